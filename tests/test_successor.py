"""A run's next job: requeued, or queued once as a successor, held, cancelled, and let in or not."""

import functools
import itertools

import pytest
from fakes.batch_loop import OWN, begin, end, make_run, stopped
from fakes.slurm_queue import Slurm

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import read_json, write_json
from ftslurm.recovery.recover import recover
from ftslurm.run.attempts import Attempt, claim, read_events
from ftslurm.run.jobs import BY_BATCH, BY_PERSON, add_job, read_jobs
from ftslurm.scheduler.protocol import RequeueImpossible
from ftslurm.scheduler.sbatch import NotReachedError, RefusedError, UnclearError


@pytest.fixture
def make(tmp_path):
    return functools.partial(make_run, tmp_path)


def after(layout):
    return [(job.job_id, job.queued_by, job.after) for job in read_jobs(layout)]


def test_a_job_has_its_successor_before_its_ranks_start(make, monkeypatch):
    layout, slurm = make(), Slurm()
    assert begin(layout, slurm, monkeypatch).startswith("go 1 ")
    assert slurm.done == ["sbatch --dependency=singleton,afterany:12"]
    assert after(layout)[1:] == [("13", BY_BATCH, "12")]


def test_a_job_that_slurm_would_not_requeue_has_one_too(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm(flag=False)
    begin(layout, slurm, monkeypatch)
    assert slurm.done == ["sbatch --dependency=afterany:12"]
    slurm.requeues = RequeueImpossible("Requested operation is presently disabled for job 12")
    stopped(layout)
    decision = end(layout, slurm)
    assert decision.action == "requeued"
    assert "presently disabled" in decision.reason and "job 13 follows it" in decision.reason
    assert read_json(layout.attempt(1).decision_json)["reason"] == decision.reason
    assert len(slurm.queue) == 1


def test_a_run_that_is_requeued_queues_nothing(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm()
    begin(layout, slurm, monkeypatch)
    stopped(layout)
    assert end(layout, slurm).action == "requeued"
    assert slurm.done == ["requeue"]


def test_a_second_claim_of_the_same_job_queues_no_other(make, monkeypatch):
    layout, slurm = make(), Slurm()
    begin(layout, slurm, monkeypatch)
    assert end(layout, slurm, rc=1).action == "restart"
    assert begin(layout, slurm, monkeypatch).startswith("go 2 ")
    stopped(layout, 2)
    assert end(layout, slurm, attempt=2).action == "requeued"
    assert list(slurm.queue) == ["13"]


def test_a_lost_answer_makes_no_second_job_and_the_first_is_put_on_record(make, monkeypatch):
    layout, slurm = make(), Slurm()
    slurm.answers = [UnclearError("sbatch lost its connection")]
    begin(layout, slurm, monkeypatch)
    assert len(after(layout)) == 1
    stopped(layout)
    decision = end(layout, slurm)
    assert (decision.action, list(slurm.queue)) == ("requeued", ["13"])
    assert after(layout)[1:] == [("13", BY_BATCH, "12")]


def test_while_slurmctld_is_away_a_successor_is_asked_for_again_and_again(make, monkeypatch):
    layout, slurm = make(), Slurm()
    slurm.answers = [NotReachedError("connect failure")]
    begin(layout, slurm, monkeypatch)
    assert slurm.queue == {}
    slurm.answers = ["no squeue", NotReachedError("connect failure"), "no squeue"]
    stopped(layout)
    assert end(layout, slurm).action == "requeued"
    assert list(slurm.queue) == ["13"]


def test_a_person_who_has_queued_the_run_is_its_next_job(make, monkeypatch):
    layout, slurm = make(), Slurm()
    slurm.queue["40"] = "singleton(unfulfilled)"
    begin(layout, slurm, monkeypatch)
    assert list(slurm.queue) == ["40"] and len(after(layout)) == 1


def test_one_that_cannot_be_queued_at_all_stops_the_run_and_says_so(make, monkeypatch):
    layout, slurm = make(), Slurm()
    slurm.answers = [RefusedError("no limit left"), RefusedError("no limit left")]
    begin(layout, slurm, monkeypatch)
    stopped(layout)
    decision = end(layout, slurm)
    assert decision.action == "stop" and "no limit left" in decision.reason


NO_SCONTROL = RequeueImpossible("`scontrol` is not on PATH")


def test_without_scontrol_a_successor_takes_over(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm(requeues=NO_SCONTROL)
    begin(layout, slurm, monkeypatch)
    stopped(layout)
    decision = end(layout, slurm)
    assert decision.action == "requeued" and "scontrol" in decision.reason
    assert slurm.done == ["requeue", "sbatch --dependency=afterany:12"]


def test_in_a_preemption_the_job_ends_itself_so_that_slurm_does_not_requeue_it_too(
    make, monkeypatch
):
    layout, slurm = make("requeue"), Slurm(requeues=NO_SCONTROL, preempted=True)
    begin(layout, slurm, monkeypatch)
    stopped(layout)
    assert end(layout, slurm).action == "requeued"
    assert slurm.done[-1] == "cancel 12"
    slurm.gone.add("12")
    del slurm.queue["13"]
    again = {**OWN, "SLURM_JOB_ID": "13"}
    assert begin(layout, slurm, monkeypatch, again).startswith("go 2 ")


@pytest.mark.parametrize(("preempted", "flag", "waits"), [
    (True, True, True), (None, True, True), (False, True, False), (True, False, False),
])  # fmt: skip
def test_with_no_way_left_a_preempted_job_stays_to_be_killed(
    make, monkeypatch, capsys, preempted, flag, waits
):
    layout, slurm = make("requeue"), Slurm(requeues=NO_SCONTROL, preempted=preempted)
    begin(layout, slurm, monkeypatch)
    slurm.flag = flag
    slurm.answers = [RefusedError("`sbatch` is not on PATH")]
    stopped(layout)
    clock, passed = itertools.count(1000.0), itertools.count()
    while_waiting = []

    def now():
        next(passed)
        while_waiting.append(read_json(layout.attempt(1).decision_json)["action"]
                             if layout.attempt(1).decision_json.exists() else None)  # fmt: skip
        return next(clock)

    decision = recover(
        layout, slurm, {**OWN, "FTSLURM_STOP_AT": "5000"}, attempt=1, rc=75, term=False,
        submit=slurm.sbatch, now=now, sleep=lambda s: None,
    )  # fmt: skip
    # Nobody has killed it for longer than grace can last: it was no preemption.
    assert decision.action == "stop"
    assert (next(passed) > 60) is waits
    assert ("stays to be killed" in capsys.readouterr().err) is waits
    assert ("requeued" in while_waiting[20:]) is waits


def test_a_stop_leaves_no_successor_and_a_persons_own_job_alone(make, monkeypatch):
    layout, slurm = make(), Slurm()
    begin(layout, slurm, monkeypatch)
    slurm.queue["40"] = "singleton(unfulfilled)"
    assert end(layout, slurm, rc=78).action == "stop"
    assert list(slurm.queue) == ["40"]


@pytest.mark.parametrize("order", ["stop", None])
def test_an_end_leaves_no_successor(make, monkeypatch, order):
    layout, slurm = make(), Slurm()
    begin(layout, slurm, monkeypatch)
    if order:
        stopped(layout, order=order)
    else:
        write_json(layout.done, {"schema_version": 1})
    assert end(layout, slurm).action == ("ended" if order else "done")
    assert slurm.queue == {}


@pytest.mark.parametrize("cause", ["stop", "cancelled"])
def test_a_successor_that_is_left_all_the_same_does_not_run(make, monkeypatch, cause):
    layout, slurm = make(), Slurm()
    begin(layout, slurm, monkeypatch)
    if cause == "stop":
        stopped(layout, order="stop")
        monkeypatch.setattr(slurm, "cancel", lambda job_id: None)
        assert end(layout, slurm).action == "ended"
    else:
        slurm.gone.add("12")  # killed before its batch loop could decide
    del slurm.queue["13"]
    with pytest.raises(RunError, match="this job leaves"):
        begin(layout, slurm, monkeypatch, {**OWN, "SLURM_JOB_ID": "13"})
    assert slurm.queue == {} and not layout.attempt(2).root.exists()


def test_what_a_person_queues_after_a_stop_runs_and_is_put_on_record(make, monkeypatch):
    layout, slurm = make(), Slurm()
    begin(layout, slurm, monkeypatch)
    stopped(layout, order="stop")
    end(layout, slurm)
    own = {**OWN, "SLURM_JOB_ID": "50"}
    assert begin(layout, slurm, monkeypatch, own).startswith("go 2 ")
    assert ("50", BY_PERSON, None) in after(layout)
    assert slurm.done[-1] == "sbatch --dependency=singleton,afterany:50"


def test_a_job_that_was_told_to_end_because_somebody_cancelled_it_has_no_successor(
    make, monkeypatch
):
    layout, slurm = make(), Slurm()
    begin(layout, slurm, monkeypatch)
    slurm.gone.add("12")
    decision = end(layout, slurm, rc=143, term=True)
    assert decision.action == "stop" and "cancelled" in decision.reason
    assert slurm.queue == {}


def test_a_pause_keeps_the_next_job_in_the_queue_and_held(make, monkeypatch):
    layout, slurm = make(), Slurm()
    begin(layout, slurm, monkeypatch)
    stopped(layout, order="pause")
    assert end(layout, slurm).action == "paused"
    assert slurm.done[-1] == "hold 13" and list(slurm.queue) == ["13"]


def test_a_pause_of_a_job_that_is_requeued_holds_it(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm()
    begin(layout, slurm, monkeypatch)
    stopped(layout, order="pause")
    assert end(layout, slurm).action == "paused"
    assert slurm.done == ["requeuehold"]


def test_a_pause_that_cannot_be_held_ends_the_run_for_a_resume(make, monkeypatch):
    layout, slurm = make(), Slurm()

    def refuse(job_id):
        raise SchedulerError("Access/permission denied for job 13")

    slurm.hold = refuse
    begin(layout, slurm, monkeypatch)
    stopped(layout, order="pause")
    decision = end(layout, slurm)
    assert decision.action == "ended" and "`ftslurm resume` queues one" in decision.reason
    assert slurm.queue == {}


@pytest.mark.parametrize("order", [None, "stop"])
def test_a_stop_is_final_though_slurm_may_queue_what_leaves(make, monkeypatch, order):
    layout, slurm = make("requeue"), Slurm()
    begin(layout, slurm, monkeypatch)
    if order:
        stopped(layout, order=order)
    assert end(layout, slurm, rc=78).action == ("ended" if order else "stop")
    assert slurm.done == ["forbid 12"]


def test_a_finished_run_is_not_kept_from_ending_as_completed(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm()
    begin(layout, slurm, monkeypatch)
    write_json(layout.done, {"schema_version": 1})
    assert end(layout, slurm).action == "done"
    assert slurm.done == []


def test_a_finished_run_asks_what_waits_only_where_a_successor_was_asked_for(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm()
    asked, waiting = [], slurm.waiting
    slurm.waiting = lambda script: asked.append(script) or waiting(script)
    begin(layout, slurm, monkeypatch)
    write_json(layout.done, {"schema_version": 1})
    assert end(layout, slurm).action == "done" and asked == []


def test_a_finished_run_cancels_the_successor_whose_id_was_never_told(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm(flag=False)
    slurm.answers = [UnclearError("sbatch lost its connection")]
    begin(layout, slurm, monkeypatch)
    assert list(slurm.queue) == ["13"] and len(after(layout)) == 1
    write_json(layout.done, {"schema_version": 1})
    assert end(layout, slurm).action == "done"
    assert slurm.queue == {}


def test_a_finished_run_cancels_the_successor_of_which_a_record_alone_tells(make, monkeypatch):
    """Queued by an older ftslurm, or while the disk was full."""
    layout, slurm = make("requeue"), Slurm(flag=False)
    begin(layout, slurm, monkeypatch)
    layout.successor_asked.unlink()
    write_json(layout.done, {"schema_version": 1})
    assert end(layout, slurm).action == "done"
    assert slurm.queue == {}


def test_that_a_successor_is_asked_for_is_durable_before_it_is(make, monkeypatch):
    layout, slurm = make(), Slurm()
    synced = []
    monkeypatch.setattr("ftslurm.files.fsync_folder", synced.append)

    class Cut(Exception):
        """The batch node dies in sbatch."""

    def dies(arguments):
        assert layout.successor_asked.exists() and layout.submit in synced
        raise Cut

    monkeypatch.setattr(slurm, "sbatch", dies)
    with pytest.raises(Cut):
        begin(layout, slurm, monkeypatch)


def test_giving_way_is_on_record_before_it_is_done(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm(requeues=NO_SCONTROL, preempted=True)
    begin(layout, slurm, monkeypatch)

    def cancel(job_id):
        kinds = [event["kind"] for event in read_events(layout.attempt(1))]
        assert kinds[-1] == "gave_way"
        slurm.done.append("cancelled")

    slurm.cancel = cancel
    stopped(layout)
    end(layout, slurm)
    assert slurm.done[-1] == "cancelled"


def test_a_claim_that_was_cut_off_has_not_begun_for_a_successor(make, monkeypatch):
    layout, slurm = make(), Slurm()
    claim(layout, Attempt(0, "12", 0, ["n1"], 0.0))
    layout.attempt(1).attempt_json.unlink()
    add_job(layout, "13", scheduler="slurm", queued_by=BY_BATCH, after="12")
    assert begin(layout, slurm, monkeypatch, {**OWN, "SLURM_JOB_ID": "13"}).startswith("go 2 ")


NOT_PASSED, PASSED = "5000", "500"


@pytest.mark.parametrize(("way", "stop_at", "action"), [
    ("resubmit", NOT_PASSED, "stop"), ("resubmit", PASSED, "requeued"),
    ("requeue", NOT_PASSED, "stop"), ("requeue", PASSED, "requeued"),
])  # fmt: skip
def test_without_accounting_the_clock_tells_a_time_limit_from_a_persons_cancel(
    make, monkeypatch, way, stop_at, action
):
    layout, slurm = make(way), Slurm(requeues=False)
    begin(layout, slurm, monkeypatch)
    slurm.gone = None
    environ = {**OWN, "FTSLURM_STOP_AT": stop_at}
    decision = end(layout, slurm, rc=143, term=True, environ=environ)
    assert decision.action == action
    assert ("somebody has cancelled" in decision.reason) is (action == "stop")
    assert list(slurm.queue) == ([] if action == "stop" else ["13"])


def test_a_preemption_is_no_cancel_whatever_the_clock_says(make, monkeypatch):
    layout, slurm = make(), Slurm(preempted=True)
    begin(layout, slurm, monkeypatch)
    slurm.gone = None
    environ = {**OWN, "FTSLURM_STOP_AT": NOT_PASSED}
    assert end(layout, slurm, rc=143, term=True, environ=environ).action == "requeued"


def test_a_run_that_does_not_know_how_it_was_submitted_stops_and_says_so(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm(requeues=NO_SCONTROL)
    begin(layout, slurm, monkeypatch)
    layout.sbatch_command.unlink()
    stopped(layout)
    decision = end(layout, slurm)
    assert decision.action == "stop" and "how this run was submitted" in decision.reason
    assert read_json(layout.attempt(1).decision_json)["action"] == "stop"


def test_a_stop_also_cancels_the_successor_whose_id_was_never_told(make, monkeypatch):
    layout, slurm = make("requeue"), Slurm(flag=False)
    slurm.answers = [UnclearError("sbatch lost its connection")]
    begin(layout, slurm, monkeypatch)
    assert list(slurm.queue) == ["13"] and len(after(layout)) == 1
    assert end(layout, slurm, rc=78).action == "stop"
    assert slurm.queue == {}
