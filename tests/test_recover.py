"""`ftslurm recover` reads what an attempt left, writes its decision down and acts on it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import make_step
from fakes.recovering import FakeScheduler, begin, decide, make_layout, rank_error

from ftslurm.errors import RANK_NEVER_RETRY, SchedulerError
from ftslurm.files import read_json, write_json
from ftslurm.run.attempts import (
    STOPPED,
    Outcome,
    append_event,
    read_events,
    write_outcome,
)
from ftslurm.scheduler.local_state import LocalJob, write_job
from ftslurm.scheduler.process import ProcessName

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def layout(tmp_path):
    return make_layout(tmp_path)


def test_near_the_time_limit_a_failure_is_requeued_not_restarted(layout):
    begin(layout)
    near, far = (FakeScheduler(end_at=time.time() + wait_s) for wait_s in (150, 4000))
    assert decide(layout, far, rc=138).action == "restart"
    assert decide(layout, near, rc=138).action == "requeued"
    assert (near.requeued, far.requeued) == (["12"], [])


def test_a_full_disk_does_not_cost_the_requeue(layout, monkeypatch):
    paths = begin(layout)
    stopped = Outcome(STOPPED, step=30, committed_step=30, signal="SIGUSR1")
    write_outcome(paths, stopped)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("recover.append_event", "recover.write_json", "next_job.append_event"):
        monkeypatch.setattr(f"ftslurm.recovery.{name}", full)
    scheduler = FakeScheduler()
    assert decide(layout, scheduler, rc=75).action == "requeued"
    assert scheduler.requeued == ["12"]


def test_nor_does_it_where_a_programs_end_is_to_be_put_down(layout, monkeypatch):
    begin(layout)
    record = read_json(layout.run_json)
    record["spec"]["program"] = ["train.sh"]
    write_json(layout.run_json, record)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ftslurm.program.ending.write_outcome", full)
    scheduler = FakeScheduler()
    decision = decide(layout, scheduler, rc=75)
    assert (decision.action, decision.reason) == ("requeued", "stopped")
    assert scheduler.requeued == ["12"]


def test_the_one_job_of_a_machine_ends_at_its_limit_with_a_stop_on_record(layout):
    paths = begin(layout)
    scheduler = FakeScheduler(accepts=False)
    scheduler.name, scheduler.was_cancelled = "local", lambda job_id: False
    decision = decide(layout, scheduler, rc=143, term=True)
    assert decision.action == "stop" and "has one job at a time" in decision.reason
    assert read_json(paths.decision_json)["action"] == "stop"


def test_a_stopped_attempt_is_requeued_and_its_decision_is_on_record(layout):
    paths = begin(layout)
    write_outcome(paths, Outcome(STOPPED, step=20, committed_step=20, signal="SIGUSR1"))
    scheduler = FakeScheduler()
    assert decide(layout, scheduler, rc=75).action == "requeued"
    assert scheduler.requeued == ["12"]
    record = read_json(paths.root / "decision.json")
    assert (record["action"], record["rc"], record["term"]) == ("requeued", 75, False)
    kinds = [event["kind"] for event in read_events(paths)]
    assert kinds == ["ranks_ended", "decided", "requeue_asked"]


def test_the_decision_is_on_disk_before_the_requeue_is_asked_for(layout):
    paths = begin(layout)

    class Looking(FakeScheduler):
        def requeue(self, job_id, **options):
            assert read_json(paths.root / "decision.json")["action"] == "requeued"
            return super().requeue(job_id, **options)

    assert decide(layout, Looking(), rc=143, term=True).action == "requeued"


def test_a_job_that_somebody_has_cancelled_becomes_a_stop_on_record(layout):
    paths = begin(layout)
    decision = decide(layout, FakeScheduler(accepts=False), rc=143, term=True)
    assert decision.action == "stop"
    assert "somebody has cancelled the job" in decision.reason
    assert read_json(paths.root / "decision.json")["action"] == "stop"


def test_a_stop_says_how_the_run_goes_on(layout):
    begin(layout)
    assert decide(layout, rc=1).action == "restart"
    for reason in (
        decide(layout, rc=RANK_NEVER_RETRY).reason,
        decide(layout, FakeScheduler(accepts=False), rc=143, term=True).reason,
    ):
        assert reason.count(f"`ftslurm resume {layout.root}` lets this run go on") == 1


def test_failures_in_a_row_stop_the_run_and_a_committed_step_begins_the_count_anew(layout):
    actions = []
    for attempt in range(1, 6):
        committed = [10] if attempt > 2 else []
        begin(layout, adopted=committed)
        if attempt == 2:
            make_step(layout, 10)
        actions.append(decide(layout, attempt=attempt).action)
    assert actions == ["restart", "restart", "restart", "restart", "stop"]


def test_the_first_failing_rank_is_named_and_echoes_are_not(layout):
    paths = begin(layout)
    rank_error(paths, 0, 5.0, "rank 0 lost another rank", kind="PeerLost")
    rank_error(paths, 3, 9.0, "loss is nan", node="n2")
    rank_error(paths, 1, 9.5, "later")
    decision = decide(layout)
    assert "rank 3 on n2 failed first" in decision.reason
    assert "ValueError: loss is nan" in decision.reason
    assert str(paths.logs / "rank-3.log") in decision.reason


def test_the_one_rank_without_a_word_is_named_when_all_others_only_lost_it(layout):
    paths = begin(layout)
    for rank in (0, 1, 3):
        rank_error(paths, rank, 5.0, "lost a rank", kind="PeerLost")
    decision = decide(layout, rc=137)
    assert "rank 2 on n2 failed first" in decision.reason
    assert "without a word" in decision.reason


def test_of_an_attempt_on_fewer_nodes_the_silent_rank_is_looked_for_among_its_own(layout):
    paths = begin(layout)
    record = read_json(paths.attempt_json)
    write_json(
        paths.attempt_json, {**record, "nodes": ["n2"], "tasks_per_node": 2, "world_size": 2}
    )
    rank_error(paths, 0, 5.0, "lost a rank", kind="PeerLost")
    assert "rank 1 on n2 failed first" in decide(layout, rc=137).reason


def test_a_torn_record_of_a_rank_does_not_keep_the_run_from_going_on(layout):
    paths = begin(layout)
    (paths.ranks / "rank-00001.json").write_text('{"schema_ver')
    paths.outcome_json.write_text("{")
    assert decide(layout, rc=137).action == "restart"


def test_ranks_that_did_not_save_in_time_are_requeued_not_restarted(layout):
    append_event(begin(layout), "signal", signal="SIGTERM")
    assert decide(layout, rc=143).action == "requeued"


def test_while_slurmctld_is_away_no_failure_is_counted_and_it_is_waited_for(layout):
    paths = begin(layout)
    (paths.logs / "rank-0.log").unlink()
    slept = []
    scheduler = FakeScheduler(alive=[False, False, False, False, True])
    decision = decide(layout, scheduler, rc=1, sleep=slept.append)
    assert (decision.action, decision.cause) == ("restart", "not_started")
    assert len(slept) == 2
    begin(layout)
    assert decide(layout, attempt=2).failures_in_a_row == 1


def local_job(layout):
    """This test is the job's runner, so that the local scheduler accepts requests."""
    own = ProcessName.of(os.getpid())
    write_job(layout, LocalJob("12", "RUNNING", 0, own.pid, own.started))


def verb(layout, *options):
    return [sys.executable, "-m", "ftslurm", "recover", str(layout.root), *options]


def test_the_verb_prints_one_word_and_says_why_on_stderr(layout):
    begin(layout)
    environ = {**os.environ, "SLURM_JOB_ID": "12"}
    done = subprocess.run(
        verb(layout, "--attempt", "1", "--rc", "1"),
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "restart\n")
    assert "no rank said why" in done.stderr
    local_job(layout)
    begin(layout)
    done = subprocess.run(
        verb(layout, "--attempt", "2", "--rc", "143", "--term"),
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "requeued\n")
    assert json.loads((layout.submit / "local-requeue.json").read_text())["job_id"] == "12"


def test_the_verb_outlives_the_term_that_its_own_requeue_brings(layout, tmp_path):
    """A scontrol that TERMs its caller, and dies of it where it is not told to ignore it."""
    begin(layout)
    record = read_json(layout.run_json)
    write_json(layout.run_json, {**record, "scheduler": "slurm"})
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text(
        '#!/bin/sh\necho "$@" >> "$0.log"\n[ "$1" = ping ] && exit 0\nkill -TERM $PPID $$\nexit 0\n'
    )
    (tools / "scontrol").chmod(0o755)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run(
        verb(layout, "--attempt", "1", "--rc", "143", "--term"),
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "requeued\n"), done.stderr
    # What follows it only asks why the job was to end.
    asked = (tools / "scontrol.log").read_text().splitlines()
    assert asked[:2] == ["ping", "requeue Incomplete 12"] and set(asked[2:]) <= {"ping"}
    assert done.returncode != -signal.SIGTERM


def forgotten(layout, **options):
    """slurmctld has been killed within 5 s of the job's start and is back."""
    scheduler = FakeScheduler(**options)
    scheduler.word = "PENDING"
    (begin(layout).logs / "rank-0.log").unlink()
    return scheduler


def test_a_job_whose_start_slurmctld_has_forgotten_makes_way_for_a_new_one(layout, monkeypatch):
    scheduler, done = forgotten(layout), []
    monkeypatch.setattr(
        "ftslurm.recovery.next_job.queue_beside", lambda job, *, without: done.append("13") or "13"
    )
    scheduler.cancel = done.append
    decision = decide(layout, scheduler, rc=1)
    assert (decision.action, decision.cause) == ("requeued", "start_forgotten")
    assert "job 13 is next, this one cannot be relied on" in decision.reason
    assert not decision.is_failure
    # The new job first, and that ours is ended by ourselves is on record before it is.
    assert done == ["13", "12"] and scheduler.requeued == []
    assert read_events(layout.attempt(1))[-1]["kind"] == "gave_way"


def test_it_is_seen_as_soon_as_slurmctld_is_back(layout, monkeypatch):
    scheduler, slept = forgotten(layout, alive=[False, False, False, False, True]), []
    monkeypatch.setattr("ftslurm.recovery.next_job.queue_beside", lambda job, *, without: "13")
    scheduler.cancel = lambda job_id: None
    decision = decide(layout, scheduler, rc=1, sleep=slept.append)
    assert (decision.action, decision.cause) == ("requeued", "start_forgotten")
    assert slept
    assert read_json(layout.attempt(1).decision_json)["cause"] == "start_forgotten"


@pytest.mark.parametrize("log", ["attempts/0001/launcher.log", "submit/12.out"])
def test_it_is_also_told_by_what_srun_was_told(layout, monkeypatch, log):
    """slurmctld has tried to start the job again meanwhile."""
    scheduler = forgotten(layout)
    scheduler.word, scheduler.cancel = "COMPLETING", lambda job_id: None
    monkeypatch.setattr("ftslurm.recovery.next_job.queue_beside", lambda job, *, without: "13")
    said = "srun: error: Unable to confirm allocation for job 12: Job is pending execution\n"
    (layout.root / log).write_text(said)
    logs = layout.attempt(1).logs
    (logs / "rank-0.log").touch()  # of an earlier srun: ranks were started
    assert decide(layout, scheduler, rc=1).action == "restart"
    (logs / "rank-0.log").unlink()
    assert decide(layout, scheduler, rc=1).cause == "start_forgotten"


def test_where_no_new_job_can_be_queued_the_forgotten_one_is_left_to_slurm(layout, monkeypatch):
    def refused(job, *, without):
        raise SchedulerError("no more jobs for this user")

    monkeypatch.setattr("ftslurm.recovery.next_job.queue_beside", refused)
    scheduler = forgotten(layout)
    assert decide(layout, scheduler, rc=1).action == "requeued"
    assert scheduler.requeued == ["12"]


def test_squeue_is_not_asked_for_the_end_of_the_job_while_slurmctld_is_away(layout):
    class Away(FakeScheduler):
        def end_time(self, job_id):
            raise AssertionError("squeue would block for 18 s")

    begin(layout)
    assert decide(layout, Away(alive=[False]), rc=138).action == "restart"
