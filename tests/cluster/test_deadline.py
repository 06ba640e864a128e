"""How long a last save may take is asked of Slurm when the signal comes: settings change.

Programs with one rank, whose only save is the last one and takes as long as a test wants; and a
rank of torch, whose save a fault makes long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.project import Run
from lab import Lab, wait_until
from spine import submit

from ftslurm.files import read_records
from ftslurm.run.attempts import Outcome, read_decision, read_events, read_outcome
from ftslurm.run.record import read_record

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SCRIPT = Path("tests") / "fakes" / "slow_save.py"
KILL_WAIT_S, MARGIN_S = 5, 5
LONG_S, SHORT_S = 60, 8
"""GraceTime."""
SAVE_S = 40
"""What neither Slurm nor the run waits for when grace is short."""


class SlowSave:
    """A run on one node whose last save takes `save_s`."""

    def __init__(self, lab: Lab, name: str, save_s: float, *more: str) -> None:
        self.lab, self.name = lab, name
        new = ["mktemp", "--directory", f"{lab.home(lab.user)}/{name}-XXXXXX"]
        folder = Path(lab.run_as(lab.user, new).stdout.strip())
        lab.run_as(lab.user, ["cp", str(lab.checkout / SCRIPT), f"{folder}/train.py"])
        placed = ["cluster=slurm", "cluster.partition=low", "cluster.signal_lead_s=120"]
        placed += [f"name={name}", f"runs_dir={folder}/runs", "cluster.nodes=1", *more]
        argv = [str(lab.python), "-m", "ftslurm", "run", "--json", *placed, "--"]
        argv += [str(lab.python), "train.py", str(save_s)]
        environ = {"PYTHONPATH": str(lab.checkout)}
        told = lab.run_as(lab.user, argv, env=environ, cwd=folder, timeout_s=110).stdout
        record = json.loads(told)
        self.job_id, self.run = str(record["job_id"]), Run(record["run_dir"])

    @property
    def frozen_s(self) -> float | None:
        return read_record(self.run.layout).emergency_deadline_s

    def wait_for_training(self) -> None:
        self.wait_for(lambda: self.run.layout.attempt(1).aware.exists())

    def preempt(self) -> None:
        node = self.lab.show_job(self.job_id)["NodeList"]
        self.lab.preempt(1, nodelist=node, seconds=2)

    def wait_for_end(self, *, timeout_s: float = 150) -> None:
        """Of the attempt; then nothing more of the run is wanted."""
        self.wait_for(lambda: self.run.decisions() == ["requeued"], timeout_s=timeout_s)
        self.lab.run_as(self.lab.user, ["scancel", self.job_id])

    def wait_for(self, look: Any, *, timeout_s: float = 150) -> None:
        wait_until(lambda: look() or None, timeout_s=timeout_s, seen=self.says)

    @property
    def has_saved(self) -> bool:
        return (self.run.layout.resume / "state").exists()

    @property
    def log(self) -> str:
        return (self.run.layout.attempt(1).logs / "rank-0.log").read_text()

    def told(self) -> dict[str, Any]:
        """The leader's own note of what Slurm has said first."""
        events = list(read_records(self.run.layout.attempt(1).root / "agents.jsonl"))
        return next(event for event in events if event["kind"] == "deadline")

    def says(self) -> str:
        return f"job {self.lab.show_job(self.job_id)}\n{self.run.says()}"


@pytest.mark.parametrize("warns", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_grace_time_that_was_lengthened_is_used(lab: Lab, warns: bool) -> None:
    """`warns`: preemption sends the warn signal (send_user_signal)."""
    if warns:
        lab.set_send_user_signal(True)
    with lab.changed(grace_s=3):
        run = SlowSave(lab, "longer", 7)
        assert run.frozen_s == 3
        run.wait_for_training()
        with lab.changed(grace_s=LONG_S):
            run.preempt()
            run.wait_for_end()
    assert run.has_saved, run.says()
    told = run.told()
    signal = "SIGUSR1" if warns else "SIGTERM"
    assert (told["by"], told["signal"]) == ("preempted", signal), told
    assert LONG_S / 2 < told["left_s"] <= LONG_S + KILL_WAIT_S - MARGIN_S, told


@pytest.mark.full
def test_a_grace_time_that_was_shortened_ends_a_save_before_slurm_does(lab: Lab) -> None:
    with lab.changed(grace_s=LONG_S):
        run = SlowSave(lab, "shorter", SAVE_S)
        assert run.frozen_s == LONG_S
        run.wait_for_training()
        with lab.changed(grace_s=SHORT_S):
            run.preempt()
            run.wait_for_end()
    assert not run.has_saved
    told = run.told()
    assert told["by"] == "preempted" and 0 < told["left_s"] <= SHORT_S, told
    found = re.search(r"the program is still there after (\d+) s; it gets SIGTERM", run.log)
    assert found and int(found[1]) < SAVE_S, run.log
    assert "it gets SIGKILL" in run.log, run.log


@pytest.mark.full
def test_at_the_time_limit_the_time_until_it_is_used(lab: Lab) -> None:
    """The grace is shorter than the lead, and has nothing to do with it."""
    with lab.changed(grace_s=3):
        run = SlowSave(lab, "limit", 25, "cluster.signal_lead_s=80", "cluster.time=00:03:00")
        assert run.frozen_s == 3
        run.wait_for_end(timeout_s=200)
    assert run.has_saved, run.says()
    told = run.told()
    assert (told["by"], told["signal"]) == ("time_limit", "SIGUSR1"), told
    assert 80 / 2 < told["left_s"] <= 80 - MARGIN_S, told


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.timeout(500)
def test_a_session_saves_for_as_long_as_slurm_gives_it_now(lab: Lab) -> None:
    """One that has more than at submit commits; one that has less leaves with its last periodic
    save, before Slurm kills it."""
    slow = {"FTSLURM_FAULTS": "slow@persist:seconds=6:attempt=1"}
    outcome, told = preempted_session(
        lab, "longer", 3, LONG_S, "checkpoint.interval_steps=0", environ=slow, at_step=3
    )
    assert outcome.committed_step == outcome.step, outcome
    assert told[-1]["by"] == "preempted" and told[-1]["left_s"] > LONG_S / 2, told

    hangs = {"FTSLURM_FAULTS": "hang@persist:since=11:attempt=1"}
    outcome, told = preempted_session(
        lab, "shorter", LONG_S, SHORT_S, "cluster.signal_lead_s=120", environ=hangs, at_step=12
    )
    assert outcome.committed_step == 10, outcome
    assert told[-1]["by"] == "preempted" and told[-1]["left_s"] <= SHORT_S, told
    found = re.search(r"\((\d+) s were left for it\)", outcome.reason)
    assert found and int(found[1]) <= SHORT_S, outcome


@pytest.mark.full
@pytest.mark.torch
def test_an_answer_that_comes_late_still_ends_a_save_before_slurm_does(lab: Lab) -> None:
    """squeue takes 4 s in the job, as on a busy node: the save has begun with what was frozen."""
    squeue = lab.home(lab.user) / "slow" / "squeue"
    squeue.parent.mkdir(exist_ok=True)
    squeue.write_text('#!/bin/bash\nsleep 4\nPATH="${PATH#*:}" exec squeue "$@"\n')
    squeue.chmod(0o755)
    hangs = {"FTSLURM_FAULTS": "hang@persist:since=11:attempt=1"}
    late = ["cluster.signal_lead_s=120", f'cluster.setup=["PATH={squeue.parent}:$PATH"]']
    outcome, told = preempted_session(
        lab, "late", LONG_S, SHORT_S, *late, environ=hangs, at_step=12
    )
    assert outcome.committed_step == 10, outcome
    assert [event["by"] for event in told] == ["submit", "preempted"], told
    assert told[1]["left_s"] <= SHORT_S - 3, told


def preempted_session(
    lab: Lab, name: str, at_submit_s: int, now_s: int, *more: str,
    environ: Mapping[str, str], at_step: int,
) -> tuple[Outcome, list[dict[str, Any]]]:  # fmt: skip
    """How the first attempt of a run of one rank ended that is preempted at a step, and what its
    rank had for the save: first as at submit, where Slurm answers late. GraceTime is `at_submit_s`,
    and `now_s` when it is preempted."""
    alone = ("cluster.nodes=1", "cluster.tasks_per_node=1", "steps=2000")
    with lab.changed(grace_s=at_submit_s):
        run = submit(lab, *alone, *more, name=name, environ=environ)
    run.wait_for_step(1, at_step)
    paths = run.layout.attempt(1)
    with lab.changed(grace_s=now_s):
        lab.preempt(1, nodelist=lab.show_job(run.job_id)["NodeList"], seconds=2)
        wait_until(lambda: read_decision(paths) or None, timeout_s=150, seen=run.story)
    assert read_decision(paths)["action"] == "requeued", run.story()
    lab.run_as(lab.user, ["scancel", run.job_id])
    outcome = read_outcome(paths)
    assert outcome is not None and outcome.result == "stopped", run.story()
    return outcome, [event for event in read_events(paths) if event["kind"] == "deadline"]
