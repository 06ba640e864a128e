"""`ftslurm status` tells of a job that Slurm holds, and which way lets it go on."""

import json
import time

import pytest
from fakes.operated import HELD, QUEUED, make_layout, make_run, make_run_with_successor, train

from ftslurm.errors import SchedulerError
from ftslurm.files import write_json
from ftslurm.operate import held
from ftslurm.operate.held import look_for_hold, why_held
from ftslurm.operate.resume import resume
from ftslurm.run.attempts import Progress, write_progress
from ftslurm.run.status import main
from ftslurm.scheduler.protocol import JobState

PROLOG = JobState("PENDING", "launch failed requeued held")


@pytest.fixture
def layout(tmp_path):
    return make_layout(tmp_path)


@pytest.fixture
def meets(monkeypatch):
    """That run and its scheduler are what `open_run` finds."""

    def meet(run, *, alive=True):
        def ping():
            if alive is None:
                raise SchedulerError("`squeue` is not on PATH")
            return alive

        run.scheduler.controller_alive = ping
        monkeypatch.setattr(held, "open_run", lambda name: run)

    return meet


def test_a_job_held_by_a_failed_prolog_is_told_and_resume_releases_it(layout, meets, capsys):
    run = make_run(layout, PROLOG)
    meets(run)
    assert main([str(layout.root)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line == (
        "held: job 7 is held (launch failed requeued held: the prolog of a node failed, and Slurm "
        f"has drained that node); `ftslurm resume {layout.root}` releases it"
    )
    assert resume(run, sleep=lambda seconds: None).result == "released"
    assert ("release", "7") in run.scheduler.done


def test_for_programs_it_is_a_record_and_null_where_nothing_is_held(layout, meets, capsys):
    meets(make_run(layout, PROLOG))
    main([str(layout.root), "--json"])
    told = json.loads(capsys.readouterr().out)["held"]
    assert (told["job_id"], told["reason"]) == ("7", "launch failed requeued held")
    meets(make_run(layout, QUEUED))
    main([str(layout.root), "--json"])
    assert json.loads(capsys.readouterr().out)["held"] is None


@pytest.mark.parametrize("reason", [
    "JobHeldAdmin", "JobHoldMaxRequeue", "launch failure limit exceeded requeued held",
    "launch_failure_limit_exceeded_requeued_held",
])  # fmt: skip
def test_what_only_an_operator_can_release_is_said_to_be_so(reason):
    told = why_held("7", JobState("PENDING", reason), "runs/r")
    assert "only an operator can release it: ask for `scontrol release 7`" in told
    assert "`ftslurm cancel runs/r` and `ftslurm resume runs/r` queue a new job" in told


@pytest.mark.parametrize("state", [HELD, JobState("REQUEUE_HOLD", "job requeued in held state"),
                                   JobState("REQUEUE_HOLD")])  # fmt: skip
def test_what_its_owner_holds_is_the_owners_to_release(state):
    told = why_held("7", state, "runs/r")
    assert "`ftslurm resume runs/r` releases it" in told and "()" not in told


def test_of_several_jobs_the_one_that_keeps_the_run_waiting_is_told(layout, meets):
    meets(make_run_with_successor(layout, PROLOG, QUEUED))
    assert look_for_hold(layout.root).job_id == "7"


@pytest.mark.parametrize("alive", [False, None])
def test_without_a_slurm_that_answers_nothing_is_told_at_once(layout, meets, alive):
    meets(make_run(layout, PROLOG), alive=alive)
    assert look_for_hold(layout.root) is None


def test_an_attempt_that_was_claimed_and_never_trained_does_not_hide_that_its_job_is_held(
    layout, meets, capsys
):
    """The batch node's prolog has ended, another node's has failed after it."""
    paths = train(layout, step=0, committed=None, phase="starting")
    write_progress(paths, Progress(step=0, steps=100, phase="starting", written_at=time.time()))
    meets(make_run(layout, PROLOG))
    assert main([str(layout.root)]) == 0
    assert "held: job 7 is held" in capsys.readouterr().out


@pytest.mark.parametrize("over", ["running", "stopped", "done"])
def test_slurm_is_asked_nothing_of_a_run_that_trains_or_is_over(layout, monkeypatch, over):
    paths = train(layout)
    write_progress(paths, Progress(step=47, steps=100, written_at=time.time()))
    if over == "stopped":
        record = {"schema_version": 1, "action": "stop", "cause": "code", "reason": "a bug"}
        write_json(paths.decision_json, record)
    elif over == "done":
        write_json(layout.done, {"schema_version": 1})

    def asked(name):
        raise AssertionError("Slurm was asked")

    monkeypatch.setattr(held, "open_run", asked)
    assert main([str(layout.root)]) == 0
