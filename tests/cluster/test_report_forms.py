"""The same numbers in every form of `ftslurm report`, of jobs of two users on real Slurm: a sweep
one of whose tasks fails, and jobs that are none of ours; grouped, listed and named in all ways.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from batch_runs import make_project
from chromium import browse
from fakes.project import overrides
from lab import Lab, wait_until
from report_faults import PATIENCE_S
from report_ledger import Ledger
from report_told import ask, begin, same
from test_report_page import Figures, embedded, shown

from ftslurm.report.fleet import GROUPS
from ftslurm.report.page_charts import value_at
from ftslurm.report.text import hours
from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_layout import SweepLayout

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.full]

GPUS = 2
FAILS_AT, STEPS = 25, (30, 40)
"""The task with more steps fails there, in both of its attempts: the first is tried again."""
CODE, WORD = 7, "token 50257"
FAILURES = {"sweep": 2, "own": 1, "other": 1}
FAILING = f"""
from tests.fakes import rank

train = rank.FakeTraining.train_one_step


def train_one_step(self):
    if (self.step, self.env.rank, self.spec.steps) == ({FAILS_AT}, 0, {max(STEPS)}):
        raise KeyError("{WORD}")
    return train(self)


rank.FakeTraining.train_one_step = train_one_step
main = rank.main
"""


class Jobs:
    """All of them, ended."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.since = begin(lab)
        self.folder = make_project(lab, "forms", {"tests/fakes/failing_task.py": FAILING})
        with Ledger(lab) as self.ledger:
            self._submit()
            own = [*self.tasks, self.own]
            wait_until(lambda: not lab.queue() or None, timeout_s=PATIENCE_S, seen=lab.queue)
            for job_id in (*own, self.other):
                lab.wait_for_end(job_id, PATIENCE_S)
        self.raw = {job_id: lab.show_job(job_id)["JobId"] for job_id in (*own, self.other)}
        wait_until(lambda: self._are_told() or None, timeout_s=PATIENCE_S, seen=self._says,
                   interval_s=2)  # fmt: skip

    def _submit(self) -> None:
        lab = self.lab
        given = [word for word in overrides(steps=0, interval=20, step_s=0.02)
                 if not word.startswith(("steps=", "entry="))]  # fmt: skip
        words = [
            "entry=rank:tests.fakes.failing_task:main", f"steps={STEPS[0]},{STEPS[1]}",
            "cluster=slurm", "cluster.nodes=1", "cluster.tasks_per_node=2",
            f"cluster.gpus_per_node={GPUS}", "cluster.partition=low", "health.preflight=never",
            "name=forms", *given,
        ]  # fmt: skip
        argv = [str(lab.python), "-m", "ftslurm", "submit", "-m", "--json", "--detach", *words]
        env = {"PYTHONPATH": str(lab.checkout)}
        done = lab.run_as(lab.user, argv, env=env, cwd=self.folder, timeout_s=110)
        self.sweep = SweepLayout(Path(json.loads(done.stdout)["sweep_dir"]))
        self.runs = [self.sweep.task(number) for number in range(len(STEPS))]
        self.tasks = [read_jobs(run)[0].job_id for run in self.runs]
        one = ["--nodes=1", "--gres=gpu:1"]
        script = f"sleep 2; exit {CODE}"
        self.own = lab.sbatch_as(lab.user, "--job-name==1+1", "--partition=low", *one,
                                 script=script, cwd=self.folder)  # fmt: skip
        self.other = lab.sbatch_as(lab.other_user, "--job-name=theirs", "--partition=high", *one,
                                   "--output=/dev/null", script=script)  # fmt: skip
        self.log = self.folder / f"slurm-{self.own}.out"

    def _are_told(self) -> bool:
        jobs = self.json(*self.all())["jobs"]
        return len(jobs) == len(STEPS) + 2 and all(job["attempts"][-1]["end_at"] for job in jobs)

    def _says(self) -> str:
        return self.lab.run_as_root("sacct", "-a", "-D", "-X", "-S", self.since)

    def text(self, *words: str) -> str:
        done = ask(self.lab, self.folder, *words)
        assert done.returncode == 1, done.stderr
        return done.stdout

    def json(self, *words: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.text("--json", *words))
        return told

    def all(self) -> list[str]:
        return ["--all-users", "--since", self.since]


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> Jobs:
    return Jobs(lab)


@pytest.fixture(scope="module")
def told(jobs: Jobs) -> dict[str, Any]:
    return jobs.json(*jobs.all())


def test_json_has_the_jobs_of_both_users_as_slurmctld_knew_them(
    jobs: Jobs, told: dict[str, Any]
) -> None:
    by_id = {job["job_id"]: job for job in told["jobs"]}
    assert by_id.keys() == {*jobs.tasks, jobs.own, jobs.other}
    for job_id, job in by_id.items():
        (start,) = jobs.ledger.of(jobs.raw[job_id])
        same(f"{job_id}: GPU-hours", job["gpu_hours"], start.gpus * start.spent_s / 3600,
             within=GPUS * start.off_s / 3600)  # fmt: skip
        same(f"{job_id}: waited (s)", job["wait_s"], start.wait_s, within=start.off_s)
    good, bad = (by_id[job_id] for job_id in jobs.tasks)
    assert (good["state"], good["failures"], good["last_step"]) == ("completed", 0, STEPS[0])
    assert (bad["state"], bad["causes"], bad["last_step"]) == ("failed", {"code": 2}, FAILS_AT)
    assert [one["rank"] for one in bad["attempts"]] == [0, 0]
    assert told["fleet"]["total"]["failures"] == sum(FAILURES.values())
    assert {job["user"] for job in told["jobs"]} == {jobs.lab.user, jobs.lab.other_user}
    own = jobs.json("--since", jobs.since)
    assert {job["job_id"] for job in own["jobs"]} == {*jobs.tasks, jobs.own}
    theirs = jobs.json("--since", jobs.since, "--user", jobs.lab.other_user)
    assert [job["job_id"] for job in theirs["jobs"]] == [jobs.other]


def test_csv_has_the_numbers_of_json(jobs: Jobs, told: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(jobs.text("--csv", *jobs.all()))))
    assert len(rows) == len(told["jobs"])
    for row, job in zip(rows, told["jobs"]):
        numbers = ("wait_s", "node_hours", "gpu_hours", "lost_gpu_hours", "committed_step",
                   "last_step", "failures", "tasks")  # fmt: skip
        found = {key: float(row[key]) if row[key] else None for key in numbers}
        assert found == {key: job[key] for key in numbers}
        for key in ("job_id", "user", "partition", "state", "run_dir"):
            assert row[key] == (job[key] or ""), key
        assert row["attempts"] == str(len(job["attempts"]))
    names = {row["job_id"]: row["name"] for row in rows}
    assert names[jobs.own] == "'=1+1"  # a spreadsheet would work it out


def test_a_page_has_the_numbers_of_json(jobs: Jobs, told: dict[str, Any]) -> None:
    page = written(jobs)
    data = embedded(page)
    assert {key: data[key] for key in told} == told
    figures(page, told)
    for job in told["jobs"]:
        assert job["job_id"] in page and hours(job["gpu_hours"]) in page


def test_a_browser_shows_the_numbers_of_json(jobs: Jobs, told: dict[str, Any]) -> None:
    written(jobs)
    figures(browse(jobs.folder / "report.html", "--dump-dom"), told)


def written(jobs: Jobs) -> str:
    jobs.text(*jobs.all(), "--html", "report.html")
    return (jobs.folder / "report.html").read_text()


def figures(page: str, told: dict[str, Any]) -> None:
    found = dict(Figures(page).found)
    assert found == {path: shown(path, value_at(told, path)) for path in found}
    for path in ("fleet.jobs", "fleet.total.failures", "fleet.total.gpu_hours",
                 "fleet.total.lost_gpu_hours", "fleet.goodput.share"):  # fmt: skip
        assert path in found, found


def test_the_text_has_the_numbers_of_json_job_by_job_and_attempt_by_attempt(
    jobs: Jobs, told: dict[str, Any]
) -> None:
    text = jobs.text(*jobs.all(), "--runs")
    total = told["fleet"]["total"]
    counts = f"{total['attempts']} attempts, {total['failures']} failures"
    assert counts in " ".join(text.split())
    assert f"{hours(total['gpu_hours'])} GPU-hours" in text
    for job in told["jobs"]:
        line = re.findall(rf"^{re.escape(job['job_id'])} .*$", text, re.MULTILINE)[0]
        lost = job["lost_gpu_hours"]
        assert line.split()[1:4] == [job["user"][:7] + "~", job["state"], str(len(job["attempts"]))]
        assert ("?" if lost is None else hours(lost)) in line.split()
    assert text.count(f"KeyError: '{WORD}'") >= FAILURES["sweep"]
    short = jobs.text(*jobs.all())
    assert [job_id for job_id in (*jobs.tasks, jobs.own, jobs.other)
            if re.search(rf"^{re.escape(job_id)} ", short, re.MULTILINE)] == [
        jobs.tasks[1], jobs.own, jobs.other,
    ]  # fmt: skip


@pytest.mark.parametrize("by", GROUPS)
def test_grouped_the_text_has_the_numbers_of_json(
    jobs: Jobs, told: dict[str, Any], by: str
) -> None:
    lab, all_failures = jobs.lab, sum(FAILURES.values())
    expected = {
        "cause": {"code": (3, all_failures)},
        "node": {},  # none was at fault
        "user": {lab.user: (3, 3), lab.other_user: (1, 1)},
        "run": {str(jobs.sweep.root): (2, FAILURES["sweep"])},
        "partition": {"low": (3, 3), "high": (1, 1)},
    }[by]
    groups = told["fleet"]["by"][by]
    found = {key: (one["jobs"], one["failures"]) for key, one in groups.items()}
    same(f"by {by}: jobs, failures", found, expected)
    text = jobs.text(*jobs.all(), "--by", by)
    _, _, table = text.partition(f"\n{by} " if groups else f"\n{by}:")
    assert table, text
    for key, one in groups.items():
        (line,) = [line for line in table.splitlines() if line.startswith(clipped(key))][:1]
        numbers = [f"{one[what]}" for what in ("jobs", "attempts", "failures")]
        lost = hours(one["lost_gpu_hours"]) + ("+" if one["unknown_gpu_hours"] else "")
        assert line[30:].split() == [*numbers, hours(one["gpu_hours"]), lost]


def clipped(key: str) -> str:
    return key if len(key) <= 30 else key[:10]


def test_what_is_named_is_told_with_the_same_numbers(jobs: Jobs, told: dict[str, Any]) -> None:
    by_id = {job["job_id"]: job for job in told["jobs"]}
    named = {
        jobs.sweep.root.name: jobs.tasks,
        str(jobs.sweep.root): jobs.tasks,
        str(jobs.runs[1].root): jobs.tasks[1:],
        jobs.runs[1].root.name: jobs.tasks[1:],
        jobs.tasks[1]: jobs.tasks[1:],
        jobs.own: [jobs.own],
        str(jobs.log): [jobs.own],
        jobs.log.name: [jobs.own],
        jobs.other: [jobs.other],
    }
    for word, ids in named.items():
        found = jobs.json(word)
        assert [job["job_id"] for job in found["jobs"]] == ids, word
        for job in found["jobs"]:
            # A run's folder as it was named; its attempts and figures whatever it was called.
            assert {**job, "run_dir": None} == {**by_id[job["job_id"]], "run_dir": None}, word
        assert found["source"]["notes"] == []
    sweep = jobs.json(jobs.sweep.root.name)["sweeps"][0]
    assert (sweep["states"], sweep["failed"]) == ({"completed": 1, "failed": 1}, [1])
