"""`ftslurm submit` as a person meets it: dry run, sentences, a whole local run, following."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.cli import main as cli
from ftslurm.errors import SchedulerError
from ftslurm.files import write_json
from ftslurm.run.attempts import Attempt, Progress, claim, write_progress
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import JobState
from ftslurm.submit.follow import AttemptView, Follower, View, ending, is_ripe_for_drill, news

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
OWN = ["entry=rank:mytrain:main", "steps=3"]
TRAIN = """
import os
from pathlib import Path
from ftslurm.errors import RANK_DONE, RANK_STOPPED
from ftslurm.files import write_json
from ftslurm.run.attempts import FINISHED, STOPPED, Outcome, write_outcome
from ftslurm.run.rank import RankEnvironment

def main():
    env = RankEnvironment.read()
    last = env.attempt == 2
    if env.rank == 0:
        write_outcome(env.attempt_layout, Outcome(FINISHED if last else STOPPED, env.attempt, None))
        if last:
            write_json(env.layout.done, {"schema_version": 1, "step": 3})
    print("cwd", Path.cwd(), "source", __file__)
    return RANK_DONE if last else RANK_STOPPED
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A submitter's working folder, without Slurm on PATH."""
    (tmp_path / "mytrain.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("bash", "sed", "env", "git"):
        (bare / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(bare))
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def slurm(folder, monkeypatch):
    """sbatch and scontrol that answer as Slurm 22.05 did; returns a switch for the controller."""
    data = TESTS / "data" / "slurm-22.05"
    place = folder / "bin" / "sbatch"
    text = (TESTS / "fake_sbatch.py").read_text()
    place.write_text(text.replace("/usr/bin/env python3", sys.executable, 1))
    scontrol = folder / "bin" / "scontrol"
    scontrol.write_text(
        f'#!/bin/bash\necho "$*" >>{folder}/asked\n'
        f'case "$*" in ping) [[ ! -e {folder}/down ]] ;;\n'
        f" *partition*) exec /bin/cat {data}/partitions.txt ;;\n"
        f' "show config") exec /bin/cat {data}/config.txt ;; *) exit 9 ;; esac\n'
    )
    for path in (place, scontrol):
        path.chmod(0o755)
    (folder / "calls").mkdir()
    monkeypatch.setenv("FAKE_SBATCH", str(folder / "calls"))
    return folder / "down"


def everything(folder):
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_a_dry_run_shows_script_and_plan_and_writes_nothing(folder, capsys):
    before = everything(folder)
    assert cli(["submit", *OWN, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "cluster=local, because there is no sbatch on PATH" in out
    assert "#SBATCH --signal=USR1@120" in out and "local_ranks" in out
    assert "emergency save: 115 s" in out and "nothing was submitted" in out
    assert everything(folder) == before


def test_a_dry_run_for_slurm_needs_no_slurm(folder, capsys):
    assert cli(["submit", *OWN, "cluster=slurm", "cluster.partition=gpu", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "sbatch --parsable --job-name=ftslurm --partition=gpu" in captured.out
    assert "is left open" in captured.err
    assert not (folder / "runs").exists()


def test_a_misspelt_key_is_one_sentence_and_usage(folder, capsys):
    assert cli(["submit", "cluster.node=2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ftslurm: error: no key `cluster.node`, did you mean `cluster.nodes`")
    assert err.count("\n") == 1 and "tasks_per_node" in err
    assert not (folder / "runs").exists()


def test_slurm_asked_for_where_there_is_none_names_the_local_way(folder, capsys):
    assert cli(["submit", *OWN, "cluster=slurm"]) == 1
    assert "sbatch is not on PATH" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_a_dead_controller_is_told_at_once_and_names_the_local_way(folder, slurm, capsys):
    slurm.touch()
    assert cli(["submit", *OWN]) == 1
    # What blocks for 9 s and more while the controller is away is not even tried.
    assert (folder / "asked").read_text() == "ping\n"
    err = capsys.readouterr().err
    assert "slurmctld does not answer" in err and "cluster=local" in err
    assert not (folder / "runs").exists() and not list((folder / "calls").iterdir())


def test_submitting_prints_job_id_and_run_directory_and_returns(folder, slurm, capsys):
    assert cli(["submit", *OWN, "cluster.partition=low", "name=mine"]) == 0
    out = capsys.readouterr().out
    assert "cluster=slurm, because sbatch is on PATH" in out and "job id:        4000" in out
    (root,) = (folder / "runs").iterdir()
    assert f"run directory: {root}\n" in out and root.name.startswith("mine-")
    (call,) = [json.loads(path.read_text()) for path in (folder / "calls").iterdir()]
    assert call["options"]["partition"] == "low"
    record = json.loads((root / "run.json").read_text())
    # GraceTime 15 and KillWait 5 of that site, less the margin.
    assert record["emergency_deadline_s"] == 15.0 and record["site"]["version"] == "22.05.8"


def test_a_refused_job_leaves_no_run_directory(folder, slurm, capsys):
    answer = {"rc": 1, "stdout": "", "stderr": "sbatch: error: Invalid account\n"}
    (folder / "calls" / "answer.json").write_text(json.dumps(answer))
    assert cli(["submit", *OWN]) == 1
    assert "Invalid account" in capsys.readouterr().err
    assert list((folder / "runs").iterdir()) == []


def test_ctrl_c_detaches_and_says_how_to_follow_again(folder, slurm, capsys, monkeypatch):
    def interrupted(follower):
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "follow", interrupted)
    assert cli(["submit", *OWN, "--wait"]) == 1
    (root,) = (folder / "runs").iterdir()
    assert f"the run goes on; follow it again: ftslurm submit --follow {root}" in (
        capsys.readouterr().out
    )


def test_the_result_as_json_is_all_there_is_on_stdout(folder, slurm, capsys):
    assert cli(["submit", *OWN, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["job_id"] == "4000" and Path(record["run_dir"]).name == record["run_id"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--drill"], "needs --wait"),
        (["drill=true"], "needs --wait"),
        (["drill=maybe", "--wait"], "drill=true or drill=false"),
        (["--follow", "x", "steps=3"], "overrides are for a new run"),
    ],
)
def test_options_that_cannot_go_together_are_usage(folder, capsys, arguments, says):
    assert cli(["submit", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_signal_that_nccl_takes_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setenv("NCCL_PROXY_DUMP_SIGNAL", "10")
    assert cli(["submit", *OWN]) == 2
    assert "takes USR1" in capsys.readouterr().err


def test_following_what_is_no_run_says_so(folder, capsys):
    assert cli(["submit", "--follow", "nothing"]) == 1
    assert "is no run that was submitted" in capsys.readouterr().err


def test_a_local_run_is_submitted_requeued_and_followed_to_its_end(folder):
    command = [sys.executable, "-m", "ftslurm", "submit", *OWN, "cluster=local", "--wait"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (root,) = (folder / "runs").iterdir()
    assert "attempt 2 begins" in done.stdout and "-> requeued" in done.stdout
    assert f"run {root.name} finished: 2 attempts" in done.stdout
    log = (root / "attempts" / "0002" / "logs" / "rank-1.log").read_text()
    assert f"cwd {root}/code source {root}/code/mytrain.py" in log


def test_a_local_run_outlives_its_submitter_and_keeps_no_pipe_of_its(folder):
    command = [sys.executable, "-m", "ftslurm", "submit", *OWN, "cluster=local", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run_dir = Path(json.loads(done.stdout)["run_dir"])
    deadline = time.monotonic() + 100
    while not (run_dir / "DONE").exists():
        assert time.monotonic() < deadline, (run_dir / "submit").iterdir()
        time.sleep(0.1)
    assert cli(["submit", "--follow", str(run_dir)]) == 0


RUNNING = JobState("RUNNING")


def progress(step=10, **values):
    return Progress(step, 100, **{"phase": "training", **values})


def view(*attempts, job=RUNNING, done=False):
    return View(attempts, done, job)


def test_news_are_what_changed():
    first = view(AttemptView(1, progress(10, loss=2.5, tokens_per_s=1234.0), None))
    assert list(news(view(job=JobState("UNKNOWN")), first)) == [
        "job is RUNNING",
        "attempt 1 begins",
        "attempt 1  step 10/100  loss 2.5000  1,234 tokens/s",
    ]
    assert list(news(first, first)) == []
    decided = {"action": "requeued", "reason": "stopped on SIGUSR1 at step 10, all committed"}
    second = view(
        AttemptView(1, first.attempts[0].progress, decided),
        AttemptView(2, progress(11, committed_step=10, restored_step=10), None),
        job=JobState("PENDING", "BeginTime"),
    )
    assert list(news(first, second)) == [
        "job is PENDING (BeginTime)",
        "attempt 1 ended: stopped on SIGUSR1 at step 10, all committed -> requeued",
        "attempt 2 begins",
        "attempt 2  step 11/100  committed 10",
        "attempt 2 goes on from step 10",
    ]


@pytest.mark.parametrize(
    "seen, finished, says",
    [
        (view(done=True), True, "finished"),
        (view(job=RUNNING), None, ""),
        (view(job=JobState("PENDING", "BeginTime")), None, ""),
        (view(job=JobState("COMPLETING")), None, ""),
        (view(job=JobState("UNKNOWN", "no answer")), None, ""),
        (view(job=JobState("CANCELLED")), False, "job CANCELLED"),
        (view(job=JobState("REQUEUE_HOLD", "held")), False, "scontrol release"),
        (
            view(
                AttemptView(1, None, {"action": "stop", "reason": "disk is full"}),
                job=JobState("UNKNOWN", "Invalid job id"),
            ),
            False,
            "disk is full",
        ),
    ],
)
def test_an_end_is_told_from_a_wait(seen, finished, says):
    end = ending(seen)
    assert (None if end is None else end.finished) is finished
    assert says in (end.text if end else "")


@pytest.mark.parametrize(
    "seen, ripe",
    [
        (view(AttemptView(1, progress(12, committed_step=10), None)), True),
        (view(AttemptView(1, progress(10, committed_step=10), None)), False),
        (view(AttemptView(1, progress(12), None)), False),
        (view(AttemptView(1, progress(100, committed_step=90), None)), False),
        (view(AttemptView(1, progress(12, committed_step=10, phase="saving"), None)), False),
        (
            view(AttemptView(1, None, None), AttemptView(2, progress(12, committed_step=10), None)),
            False,
        ),
        (
            view(AttemptView(1, progress(12, committed_step=10), None), job=JobState("PENDING")),
            False,
        ),
    ],
)
def test_a_drill_waits_until_it_loses_something_and_comes_once(seen, ripe):
    assert is_ripe_for_drill(seen) is ripe


class Scheduler:
    """Answers one state after the other, the last again and again."""

    name = "slurm"

    def __init__(self, states):
        self.states = list(states)
        self.asked = []

    def job_state(self, job_id):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def hasten(self, job_id):
        self.asked.append("hasten")
        return True

    def signal_ranks(self, job_id, name):
        self.asked.append(name)
        if len(self.asked) == 1:
            raise SchedulerError("no step is running")


def followed(tmp_path, states, *, on_pause=None, **options):
    """(ending, lines said, pauses, what the scheduler was asked)."""
    scheduler, said, pauses = Scheduler(states), [], []
    clock = [0.0]

    def sleep(seconds):
        pauses.append(seconds)
        clock[0] += seconds
        if on_pause:
            on_pause(len(pauses))
        assert len(pauses) < 2000

    follower = Follower(
        RunLayout(tmp_path),
        scheduler,
        "7",
        said.append,
        sleep=sleep,
        now=lambda: clock[0],
        **options,
    )
    return follower.follow(), said, pauses, scheduler.asked


def attempt(tmp_path, **values):
    layout = RunLayout(tmp_path)
    number = claim(layout, Attempt(0, "7", 0, ["n1"], 0.0)).number
    write_progress(layout.attempt(number), progress(**values))


def test_following_backs_off_and_ends_with_done(tmp_path):
    attempt(tmp_path)

    def finish(pause):
        if pause == 25:
            write_json(RunLayout(tmp_path).done, {"schema_version": 1})

    end, _, pauses, _ = followed(tmp_path, [RUNNING], on_pause=finish)
    assert end.finished and pauses[0] == 1.0 and max(pauses) == 15.0


def test_a_bad_end_is_believed_when_it_is_seen_twice(tmp_path):
    states = [JobState("PREEMPTED"), JobState("PENDING"), RUNNING, JobState("FAILED")]
    end, said, _, _ = followed(tmp_path, states)
    assert not end.finished and "job FAILED" in end.text
    assert said[-1] == "job is FAILED"


def test_a_requeued_job_is_hastened_once_for_each_wait(tmp_path):
    attempt(tmp_path)
    waiting = JobState("PENDING", "BeginTime")
    states = [waiting, waiting, waiting, RUNNING, waiting, waiting, JobState("FAILED")]
    _, said, _, asked = followed(tmp_path, states)
    assert asked == ["hasten"] * 2
    assert sum("asked Slurm to start" in line for line in said) == 2


def test_a_first_wait_is_not_hastened(tmp_path):
    waiting = JobState("PENDING", "BeginTime")
    assert followed(tmp_path, [waiting, waiting, JobState("FAILED")])[3] == []


def test_a_drill_is_said_when_the_signal_went_out_and_only_then(tmp_path):
    attempt(tmp_path, step=12, committed_step=10)
    states = [RUNNING] * 5 + [JobState("FAILED")]
    _, said, pauses, asked = followed(tmp_path, states, drill_signal="USR1")
    assert asked == ["USR1", "USR1"] and pauses[0] == 1.0
    (line,) = [line for line in said if "DRILL" in line]
    assert "USR1" in line and "step 12" in line


def test_a_job_nobody_knows_is_given_up(tmp_path):
    end, _, pauses, _ = followed(tmp_path, [JobState("UNKNOWN", "Invalid job id specified")])
    assert not end.finished and "Invalid job id" in end.text
    assert 900 <= sum(pauses) < 1000
