"""What stop, pause, save and cancel do to a run as they find it."""

import json
from dataclasses import replace
from functools import partial

import pytest
from fakes.operated import (
    AWAY,
    CANCELLED,
    FORGOTTEN,
    HELD,
    QUEUED,
    RUNNING,
    WAITING_BEHIND,
    given_orders,
    make_layout,
    make_run,
    make_run_with_successor,
    obey,
    quick,
    train,
)

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import write_json
from ftslurm.operate.cancel import cancel
from ftslurm.operate.save import save
from ftslurm.operate.standing import SECOND_LOOK_S, open_run
from ftslurm.operate.stop import leave, wait_until_left
from ftslurm.run.attempts import append_event
from ftslurm.run.control import PAUSE, SAVE, STOP
from ftslurm.run.jobs import BY_BATCH, add_job
from ftslurm.run.sweep_layout import place_of_run
from ftslurm.scheduler.protocol import UNKNOWN, JobState


@pytest.fixture
def layout(tmp_path):
    return make_layout(tmp_path)


@pytest.fixture
def given(layout):
    return partial(make_run, layout)


@pytest.mark.parametrize("order", [STOP, PAUSE])
def test_a_run_that_trains_is_given_the_order_as_a_file(layout, given, order):
    run = given(RUNNING)
    train(layout)
    answer = leave(run, order)
    assert (answer.result, answer.ok) == ("ordered", True)
    assert "step 47 of 100, committed up to step 40" in answer.text
    assert given_orders(run) == [order] and run.scheduler.done == []


def test_a_stop_of_a_run_that_only_waits_cancels_its_job(layout, given):
    run = given(QUEUED)
    run.control.give(STOP)
    answer = leave(run, STOP)
    assert answer.result == "cancelled" and "ftslurm resume" in answer.text
    assert run.scheduler.done == [("cancel", "7")]
    assert given_orders(run) == [], "a later resume must not be stopped by it"


def test_a_pause_of_a_run_that_only_waits_holds_its_job_once(layout, given):
    run = given(QUEUED)
    assert leave(run, PAUSE).result == "paused"
    assert leave(run, PAUSE).result == "paused"
    assert run.scheduler.done == [("hold", "7")]


def test_a_job_that_starts_before_it_can_be_held_is_given_the_order(layout, given):
    run = given(QUEUED)
    run.scheduler.hold = lambda job_id: run.scheduler.states.update({job_id: [RUNNING]})
    assert leave(run, PAUSE).result == "ordered"
    assert given_orders(run) == [PAUSE]


@pytest.mark.parametrize("order", [STOP, PAUSE])
def test_without_a_right_on_the_job_the_file_is_the_way_and_the_answer_says_so(given, order):
    run = given(QUEUED)
    run.scheduler.refusal = "Access/permission denied for job 7"
    answer = leave(run, order)
    assert answer.result == "ordered" and "permission denied" in answer.text
    assert str(run.layout.control / order) in answer.text
    assert given_orders(run) == [order]


def test_while_the_controller_is_away_a_stop_is_given_as_a_file(given):
    run = given(AWAY)
    answer = leave(run, STOP)
    assert answer.result == "ordered" and "nobody can say" in answer.text
    assert given_orders(run) == [STOP]


def test_there_is_nothing_to_stop_in_a_run_that_is_over(layout, given):
    run = given(FORGOTTEN)
    paths = train(layout)
    decision = {"schema_version": 1, "action": "ended", "reason": "stopped by the order `stop`"}
    write_json(paths.decision_json, decision)
    answer = leave(run, STOP)
    assert (answer.result, answer.ok) == ("not_running", True)
    assert "stopped by the order `stop`" in answer.text
    with pytest.raises(RunError, match="no job to hold"):
        leave(run, PAUSE)
    layout.done.touch()
    assert [leave(run, order).ok for order in (STOP, PAUSE)] == [True, False]


def test_a_wait_for_a_stop_ends_when_the_job_has(layout, given):
    run = given(RUNNING, RUNNING, JobState("COMPLETING"), JobState("COMPLETED"))
    paths = train(layout)
    obey(paths, STOP)
    answer = wait_until_left(run, STOP, sleep=quick)
    assert (answer.result, answer.ok) == ("stopped", True)


def test_of_a_program_no_phase_is_told_while_its_end_is_waited_for(given, capfd):
    run = given(RUNNING, JobState("COMPLETED"))
    program = replace(run.record.spec, program=["./prog"])
    wait_until_left(replace(run, record=replace(run.record, spec=program)), STOP, sleep=quick)
    assert capfd.readouterr().err.endswith("what it has saved is its own, in RUN/resume\n")


def test_a_wait_for_a_stop_cancels_the_job_when_a_preemption_came_first(layout, given):
    run = given(RUNNING, JobState("COMPLETING"), JobState("PENDING", "BeginTime"))
    train(layout)
    run.control.give(STOP)
    answer = wait_until_left(run, STOP, sleep=quick)
    assert answer.result == "cancelled" and given_orders(run) == []


def test_a_wait_for_a_stop_says_when_the_run_has_ended_in_another_way(layout, given):
    run = given(RUNNING, JobState("NODE_FAIL"), RUNNING, JobState("FAILED"))
    train(layout)
    run.control.give(STOP)
    answer = wait_until_left(run, STOP, sleep=quick)
    assert (answer.result, answer.ok) == ("ended", False)
    assert given_orders(run) == [], "the next start must not be stopped by it"


def test_a_wait_for_a_pause_ends_when_the_job_is_held(layout, given):
    run = given(RUNNING, JobState("COMPLETING"), HELD)
    obey(train(layout), PAUSE)
    answer = wait_until_left(run, PAUSE, sleep=quick)
    assert answer.result == "paused" and run.scheduler.done == []


def test_a_save_is_ordered_of_a_run_that_trains_and_of_no_other(layout, given):
    run = given(RUNNING, QUEUED, CANCELLED, RUNNING)
    train(layout)
    assert save(run, wait=False).result == "ordered" and given_orders(run) == [SAVE]
    for why in ("does not train", "is not running"):
        with pytest.raises(RunError, match=why):
            save(run, wait=False)
    layout.done.touch()
    with pytest.raises(RunError, match="has finished"):
        save(run, wait=False)


@pytest.mark.parametrize(
    ("kind", "result", "ok"), [("order_done", "saved", True), ("order_failed", "failed", False)]
)
def test_a_wait_for_a_save_ends_with_what_rank_0_says_of_it(layout, given, kind, result, ok):
    run = given(RUNNING)
    paths = train(layout)
    append_event(paths, "order_done", order=SAVE, step=20)  # of a save before

    def rank_0(seconds):
        append_event(paths, kind, order=SAVE, step=48, reason="No space left on device")
        run.control.take_away(SAVE)

    answer = save(run, wait=True, sleep=rank_0)
    assert (answer.result, answer.ok) == (result, ok) and "step 48" in answer.text


def test_a_save_that_the_run_did_not_live_to_see_is_taken_back(layout, given, monkeypatch):
    monkeypatch.setattr("ftslurm.operate.save.ASK_JOB_EVERY_S", 0.0)
    run = given(RUNNING, CANCELLED)
    train(layout)
    answer = save(run, wait=True, sleep=quick)
    assert (answer.result, answer.ok) == ("not_saved", False) and given_orders(run) == []


def test_the_job_that_trains_is_meant_not_the_one_queued_behind_it(layout):
    run = make_run_with_successor(layout, RUNNING, WAITING_BEHIND)
    train(layout)
    assert leave(run, STOP).result == "ordered" and run.scheduler.done == []
    answer = cancel(run)
    assert run.scheduler.done == [("cancel", "8"), ("cancel", "7")]
    assert "up to 7 steps are lost" in answer.text and given_orders(run) == []


@pytest.mark.parametrize("gone", [CANCELLED, FORGOTTEN])
def test_a_job_that_trains_is_found_when_the_one_queued_behind_it_is_gone(layout, gone):
    run = make_run_with_successor(layout, RUNNING, gone)
    train(layout)
    answer = leave(run, STOP)
    assert (answer.result, answer.job_id) == ("ordered", "7") and given_orders(run) == [STOP]
    assert cancel(run, sleep=quick).job_id == "7" and run.scheduler.done == [("cancel", "7")]


def test_while_nobody_can_say_of_the_job_before_it_is_taken_to_train(layout):
    run = make_run_with_successor(layout, AWAY, WAITING_BEHIND)
    train(layout)
    answer = leave(run, STOP)
    assert answer.result == "ordered" and "how job 7 stands" in answer.text
    assert given_orders(run) == [STOP] and run.scheduler.done == []
    cancel(run, sleep=quick)
    assert run.scheduler.done == [("cancel", "8"), ("cancel", "7")]


def test_no_job_is_asked_for_that_ended_before_the_newest_attempt_began(layout):
    run = make_run_with_successor(layout, RUNNING, CANCELLED)
    train(layout, job_id="8")
    run.scheduler.states.pop("7")
    assert run.look().job.job_id == "8"


def test_of_a_run_that_has_ended_the_job_is_told_that_ended_it(layout):
    run = make_run_with_successor(layout, JobState("COMPLETED"), CANCELLED)
    decision = {"schema_version": 1, "action": "ended", "reason": "stopped by the order `stop`"}
    write_json(train(layout).decision_json, decision)
    assert run.look().why_over == "job 7 is COMPLETED; stopped by the order `stop`"


def test_what_was_decided_before_it_is_not_told_of_a_job_that_has_not_begun(layout):
    run = make_run_with_successor(layout, FORGOTTEN, JobState("TIMEOUT"))
    decision = {"schema_version": 1, "action": "requeued", "reason": "stopped on SIGUSR1"}
    write_json(train(layout).decision_json, decision)
    assert run.look().why_over == "job 8 is TIMEOUT; of job 7 before it: stopped on SIGUSR1"


def test_a_successor_that_is_queued_while_the_job_before_it_is_asked_for_is_seen(layout):
    run = make_run(layout, JobState("COMPLETED"))
    run.scheduler.states["8"] = [QUEUED]
    train(layout)
    asked = run.scheduler.job_state

    def queue(job_id):
        if job_id == "7":
            add_job(layout, "8", scheduler="slurm", queued_by=BY_BATCH, after="7")
        return asked(job_id)

    run.scheduler.job_state = queue
    answer = leave(run, STOP, sleep=quick)
    assert (answer.result, answer.job_id) == ("cancelled", "8")
    assert run.scheduler.done == [("cancel", "8")]


def test_on_this_machine_only_the_newest_job_is_known(layout):
    run = make_run_with_successor(layout, JobState(UNKNOWN, "the job has not begun"), CANCELLED)
    run.scheduler.name = "local"
    assert run.look().is_over


def test_a_cancelled_run_is_ordered_to_stop_first_so_that_no_job_is_queued_after_it(layout):
    run = make_run_with_successor(layout, RUNNING, WAITING_BEHIND)
    train(layout)
    found = []

    def cancel_job(job_id):
        found.append((job_id, given_orders(run)))
        run.scheduler.states[job_id] = [CANCELLED if job_id == "8" else JobState("COMPLETING")]

    run.scheduler.cancel = cancel_job
    run.control.give(SAVE)
    assert cancel(run, sleep=quick).result == "cancelled"
    assert found == [("8", [STOP, SAVE]), ("7", [STOP, SAVE])]
    assert given_orders(run) == [STOP], "the batch script is there yet, and has to find it"


def test_a_full_disk_keeps_nobody_from_cancelling(given, monkeypatch, capfd):
    run = given(RUNNING)

    def no_space(self, order):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(run.control), "give", no_space)
    assert cancel(run, sleep=quick).result == "cancelled"
    assert run.scheduler.done == [("cancel", "7")] and "could not be left" in capfd.readouterr().err


def test_a_cancel_that_is_refused_leaves_the_order_to_stop_and_says_so(layout):
    run = make_run_with_successor(layout, RUNNING, WAITING_BEHIND)
    asked = []

    def refused(job_id):
        asked.append(job_id)
        raise SchedulerError(f"job {job_id}: Access/permission denied")

    run.scheduler.cancel = refused
    with pytest.raises(SchedulerError, match="job 8: .*job 7: .*the order to stop is left"):
        cancel(run, sleep=quick)
    assert asked == ["8", "7"] and given_orders(run) == [STOP]


def test_a_cancel_without_a_right_on_job_and_folder_names_the_other_ways(given, monkeypatch):
    run = given(RUNNING)
    run.scheduler.refusal = "Access/permission denied"

    def closed(self, order):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(run.control), "give", closed)
    with pytest.raises(SchedulerError, match=r"main-1\.stop"):
        cancel(run, sleep=quick)


@pytest.mark.parametrize("word", ["PREEMPTED", "NODE_FAIL"])
def test_an_end_that_slurm_may_take_back_is_ordered_to_stop_and_cancelled_at_a_second_look(
    given, word
):
    run = given(JobState(word), JobState(word), QUEUED)
    answer = leave(run, STOP)
    assert answer.result == "ordered" and given_orders(run) == [STOP]
    assert cancel(run, sleep=quick).result == "cancelled"
    assert run.scheduler.done == [("cancel", "7")]


def test_an_end_that_slurm_does_not_take_back_is_believed_at_the_second_look(given):
    slept = []
    assert cancel(given(JobState("NODE_FAIL")), sleep=slept.append).result == "not_running"
    assert slept == [SECOND_LOOK_S]


def test_a_run_is_named_by_its_folder_or_by_its_id_under_runs(layout, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    layout.root.rename(tmp_path / "runs" / "main-1")
    monkeypatch.chdir(tmp_path)
    for name in ("main-1", "runs/main-1", str(tmp_path / "runs" / "main-1")):
        assert open_run(name).layout.root == tmp_path / "runs" / "main-1"
    with pytest.raises(RunError, match=r"`main-2` is no run"):
        open_run("main-2")
    with pytest.raises(RunError, match="no job of"):
        open_run("main-1").look()


def test_a_run_directory_that_is_closed_to_you_names_the_folder_for_orders(layout, monkeypatch):
    def closed(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(layout.root), "stat", closed)
    for look in (open_run, place_of_run):
        with pytest.raises(RunError, match=r"control_dir .* `main-1\.stop`"):
            look(str(layout.root))


def test_an_answer_for_programs_has_the_result_and_the_job(layout, given, capfd, monkeypatch):
    from ftslurm.operate import stop

    run = given(QUEUED)
    monkeypatch.setattr(stop, "open_run", lambda name: run)
    assert stop.stop_main(["main-1", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert (record["schema_version"], record["result"], record["job_id"]) == (1, "cancelled", "7")
    assert record["run_dir"] == str(layout.root)
