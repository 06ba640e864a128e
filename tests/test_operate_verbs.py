"""What stop, pause, save and cancel do to a run as they find it."""

import json
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
from ftslurm.operate.standing import open_run
from ftslurm.operate.stop import leave, wait_until_left
from ftslurm.run.attempts import append_event
from ftslurm.run.control import PAUSE, SAVE, STOP
from ftslurm.scheduler.protocol import JobState


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


def test_a_cancel_that_is_refused_names_the_other_ways(given):
    run = given(RUNNING)
    run.scheduler.refusal = "Access/permission denied"
    with pytest.raises(SchedulerError, match=r"main-1\.stop"):
        cancel(run)


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
    with pytest.raises(RunError, match=r"control_dir .* `main-1\.stop`"):
        open_run(str(layout.root))


def test_an_answer_for_programs_has_the_result_and_the_job(layout, given, capfd, monkeypatch):
    from ftslurm.operate import stop

    run = given(QUEUED)
    monkeypatch.setattr(stop, "open_run", lambda name: run)
    assert stop.stop_main(["main-1", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert (record["schema_version"], record["result"], record["job_id"]) == (1, "cancelled", "7")
    assert record["run_dir"] == str(layout.root)
