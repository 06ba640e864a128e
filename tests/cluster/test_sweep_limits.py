"""Sweeps that are larger than what real Slurm takes at once: queued in parts, each task once, while
whoever submitted them follows. The limits are slurmctld's own, so it is started anew with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from batch_runs import daemon_away, make_project
from fakes.project import Run, overrides
from lab import Lab, wait_until

from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import FULL, LEFT, QUEUED, WIDENED, ArrayRecord, read_arrays

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

PLACED = ["cluster=slurm", "cluster.tasks_per_node=1", "cluster.partition=low",
          "cluster.signal_lead_s=30", "health.preflight=never"]  # fmt: skip
AT_ONCE = 5
"""Jobs that the user may have in the queue."""


@pytest.fixture
def configure(lab: Lab) -> Iterator[Callable[..., None]]:
    """Start slurmctld anew with these values of slurm.conf."""
    path = Path(lab.environment["SLURM_CONF"])
    plain = path.read_text()

    def set_values(**values: object) -> None:
        lines = [line for line in plain.splitlines() if line.partition("=")[0] not in values]
        lines += [f"{name}={value}" for name, value in values.items()]
        with daemon_away(lab, "slurmctld", verb="stop"):
            path.write_text("\n".join([*lines, ""]))

    yield set_values
    lab.cancel_all()
    set_values()


@pytest.fixture
def few_jobs(lab: Lab, configure: Callable[..., None]) -> Iterator[None]:
    """Arrays of ten, and AT_ONCE jobs of the user."""
    limit = ["sacctmgr", "--immediate", "modify", "user", lab.user, "set"]
    configure(AccountingStorageEnforce="limits", MaxArraySize=11)
    lab.run_as_root(*limit, f"MaxSubmitJobs={AT_ONCE}")
    yield
    lab.run_as_root(*limit, "MaxSubmitJobs=-1")


class Followed:
    """A sweep whose submitter stays to its end."""

    def __init__(self, lab: Lab, *words: str, options: Sequence[str] = (), step_s: float) -> None:
        self.lab = lab
        self.folder = make_project(lab, "limits", files={})
        given = [*PLACED, *words, *overrides(steps=6, interval=3, step_s=step_s)]
        self._argv = [str(lab.python), "-m", "ftslurm", "submit", "-m", "--json", *options, *given]

    def run(self) -> dict[str, Any]:
        environ = {"PYTHONPATH": str(self.lab.checkout)}
        done = self.lab.run_as(
            self.lab.user, self._argv, env=environ, cwd=self.folder, timeout_s=540
        )
        self.said = done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    @property
    def layout(self) -> SweepLayout:
        (found,) = self.folder.glob("runs/[!.]*/sweep.json")
        return SweepLayout(found.parent)

    def lines(self, event: str) -> list[ArrayRecord]:
        return [one for one in read_arrays(self.layout) if one.event == event]

    def assert_each_once(self, count: int) -> None:
        runs = [Run(self.layout.task(number).root) for number in range(count)]
        # Who follows goes by what a task has written; its batch script decides after that.
        wait_until(
            lambda: all(run.decisions() for run in runs) or None,
            timeout_s=60,
            seen=lambda: f"{[run.decisions() for run in runs]}",
        )
        assert [run.decisions() for run in runs] == [["done"]] * count
        queued = [(number, one) for one in self.lines(QUEUED) for number in one.numbers]
        assert sorted(number for number, _ in queued) == list(range(count))
        for number, array in queued:
            (job,) = read_jobs(runs[number].layout)
            assert job.job_id == array.job_id(number)


def test_a_sweep_larger_than_slurms_limits_is_queued_in_parts(lab: Lab, few_jobs: None) -> None:
    sweep = Followed(lab, "seed=range(12)", step_s=0.0)
    told = sweep.run()
    assert [task["finished"] for task in told["tasks"]] == [True] * 12, sweep.said
    sweep.assert_each_once(12)
    assert "12 tasks 5 are queued" in sweep.said
    assert "Slurm takes no more jobs of yours just now" in sweep.said
    assert sweep.lines(LEFT)[0].numbers == tuple(range(10)), "ten at first, as MaxArraySize allows"
    assert max(len(array.numbers) for array in sweep.lines(QUEUED)) <= AT_ONCE
    assert {one.offset for one in sweep.lines(QUEUED) if one.numbers[0] >= 10} == {10}


def test_a_sweep_that_a_full_slurmctld_has_no_place_for_is_queued_in_parts(
    lab: Lab, configure: Callable[..., None]
) -> None:
    """sbatch itself waits two minutes for a place before it says no. Jobs that have ended keep
    theirs for MinJobAge, and are looked for once a minute."""
    configure(MaxJobCount=7, MinJobAge=2)
    sweep = Followed(lab, "seed=range(8)", step_s=0.0)
    told = sweep.run()
    assert [task["finished"] for task in told["tasks"]] == [True] * 8, sweep.said
    sweep.assert_each_once(8)
    assert "Slurm has as many jobs as it holds just now (MaxJobCount)" in sweep.said
    (full, *_) = sweep.lines(FULL)
    assert full.numbers == tuple(range(8))
    assert sweep.lines(QUEUED)[0].numbers == tuple(range(4)), "then for half of them"


def running_at_once(sweep: Followed, is_over: Callable[[], bool]) -> list[tuple[int, int]]:
    """(how many of its tasks run, of how many arrays), at each look until it is over; one that is
    DONE has only its job to leave."""
    running: list[tuple[int, int]] = []

    def sample() -> bool:
        argv = ["squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i"]
        jobs = set(sweep.lab.run_as_root(*argv).split())
        if jobs:
            layout = sweep.layout
            over = [layout.task(n) for n in range(8) if layout.task(n).done.exists()]
            jobs -= {job.job_id for run in over for job in read_jobs(run)}
        running.append((len(jobs), len({job_id.partition("_")[0] for job_id in jobs})))
        return is_over()

    wait_until(
        lambda: sample() or None, timeout_s=400, seen=lambda: f"{sweep.lab.queue()}\n{running}"
    )
    return running


def assert_shared(sweep: Followed, running: Sequence[tuple[int, int]]) -> None:
    sweep.assert_each_once(8)
    assert max(count for count, _ in running) == 3, "never more than parallelism"
    narrow, wide = sorted(sweep.lines(QUEUED), key=lambda array: array.at_once or 0)
    assert (narrow.at_once, wide.at_once) == (1, 2)
    given = sweep.lines(WIDENED)
    assert {one.array_id for one in given} == {narrow.array_id}, sweep.said
    assert max(one.at_once or 0 for one in given) > 1
    assert (2, 1) in running or (3, 1) in running, "the one is over, two of the other run"


# Two arrays of four tasks, as they ask for different CPUs: the one ends in two rounds with the
# share of two that it has, the other would take four with its share of one.
TWO_ARRAYS = ["cluster.cpus_per_task=1,2", "+user.tag=range(4)"]


def test_what_an_array_leaves_of_parallelism_as_it_ends_is_the_others(lab: Lab) -> None:
    sweep = Followed(lab, *TWO_ARRAYS, options=["--parallelism", "3"], step_s=2.0)
    with ThreadPoolExecutor(1) as beside:
        following = beside.submit(sweep.run)
        running = running_at_once(sweep, following.done)
    told = following.result()
    assert [task["finished"] for task in told["tasks"]] == [True] * 8, sweep.said
    assert_shared(sweep, running)
    assert not re.search("fewer tasks run at once", sweep.said)


def test_so_it_is_where_nobody_follows(lab: Lab) -> None:
    options = ["--parallelism", "3", "--detach"]
    sweep = Followed(lab, *TWO_ARRAYS, options=options, step_s=2.0)
    sweep.run()
    runs = [Run(sweep.layout.task(number).root) for number in range(8)]
    running = running_at_once(sweep, lambda: all(run.decisions() for run in runs))
    assert_shared(sweep, running)
