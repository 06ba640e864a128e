"""Resume: never a second job beside one that is alive, never a run that stays stopped."""

import fcntl
import os
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from fakes.followed import decide
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

from ftslurm.cli import main
from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import write_json
from ftslurm.operate import resume
from ftslurm.operate.resume import resume as resume_run
from ftslurm.program.ending import ASKED
from ftslurm.recovery.own_job import GAVE_WAY
from ftslurm.run.attempts import append_event
from ftslurm.run.control import PAUSE, STOP
from ftslurm.run.jobs import BY_PERSON, add_job, read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.scheduler.again import is_one_folder, place_at_submit
from ftslurm.scheduler.protocol import JobState, QueuedJob
from tests.fakes.array_queue import make_sweep


@pytest.fixture
def layout(tmp_path):
    return make_layout(tmp_path)


@pytest.fixture
def given(layout):
    return partial(make_run, layout)


@pytest.fixture
def submitted(monkeypatch):
    """Ids for new jobs; what was submitted for which run."""
    calls = []

    def submit_again(layout, scheduler, *, exclude):
        calls.append((layout.root.name, scheduler))
        return str(70 + len(calls))

    monkeypatch.setattr(resume, "submit_again", submit_again)
    return calls


@pytest.mark.parametrize("state", [CANCELLED, JobState("FAILED"), FORGOTTEN])
def test_a_run_without_a_living_job_gets_a_new_one(layout, given, submitted, state):
    run = given(state)
    run.control.give(STOP)
    answer = resume_run(run, sleep=quick)
    assert (answer.result, answer.job_id) == ("queued", "71")
    assert submitted == [("main-1", "slurm")]
    assert [(job.job_id, job.queued_by) for job in read_jobs(layout)][1:] == [("71", BY_PERSON)]
    assert given_orders(run) == []


def test_a_new_job_that_has_noted_itself_already_is_noted_once(layout, given, monkeypatch):
    def submit_again(layout, scheduler, *, exclude):
        add_job(layout, "71", scheduler=scheduler, queued_by=BY_PERSON)
        return "71"

    monkeypatch.setattr(resume, "submit_again", submit_again)
    resume_run(given(CANCELLED), sleep=quick)
    assert [job.job_id for job in read_jobs(layout)] == ["7", "71"]


def test_a_job_that_nobody_has_written_down_is_found_by_its_script(given, submitted):
    run = given(FORGOTTEN)
    run.scheduler.queued = [QueuedJob("70", "")]
    answer = resume_run(run, sleep=quick)
    assert (answer.result, answer.job_id, submitted) == ("waiting", "70", [])


@pytest.mark.parametrize("state", [FORGOTTEN, RUNNING])
@pytest.mark.parametrize(("is_copy", "said"), [
    (False, "move it back: `mv {moved} {at_submit}`"),
    (True, "is a copy of `{at_submit}`"),
])  # fmt: skip
def test_a_run_that_was_moved_or_copied_is_not_resumed_elsewhere(
    layout, given, submitted, state, is_copy, said
):
    at_submit = layout.root.with_name("at-submit")
    layout.script.write_text(f"set -u\nexport FTSLURM_RUN_DIR={at_submit}\n")
    if is_copy:
        at_submit.mkdir()
    run = given(state)
    run.control.give(STOP)
    told = said.format(moved=layout.root, at_submit=at_submit)
    with pytest.raises(RunError, match=re.escape(told)):
        resume_run(run, sleep=quick)
    assert (submitted, given_orders(run)) == ([], [STOP])


def test_a_run_that_is_named_over_a_link_is_looked_for_by_the_name_at_its_submission(
    layout, given, submitted
):
    (layout.root.parent / "link").symlink_to(layout.root)
    script = layout.root.parent / "link" / "submit" / "train.sbatch"
    layout.script.write_text(f"export FTSLURM_RUN_DIR={layout.root.parent}/link\n")
    run = given(FORGOTTEN)
    run.scheduler.waiting = lambda found: [QueuedJob("70", "")] if found == script else []
    assert resume_run(run, sleep=quick).job_id == "70" and submitted == []


def test_a_task_that_is_named_over_a_link_is_at_its_place(tmp_path):
    sweep = make_sweep(tmp_path, 1)
    task = sweep.task(0)
    task.code.symlink_to(sweep.code)
    task.script.write_text(f"export FTSLURM_RUN_DIR={task.root}\n")
    (tmp_path / "mine").symlink_to(task.root)
    assert place_at_submit(RunLayout(tmp_path / "mine")) == task


@pytest.mark.parametrize("shares_code", [True, False])
@pytest.mark.parametrize("place", ["moved", "elsewhere/sweep-1"])
def test_a_sweep_that_was_moved_is_to_be_moved_back_whole(tmp_path, capsys, shares_code, place):
    sweep = make_sweep(tmp_path, 3)
    for number in (1, 2):  # the folder of the first is gone
        task = sweep.task(number)
        task.script.write_text(f"export FTSLURM_RUN_DIR={task.root}\n")
        if shares_code:
            task.code.symlink_to(sweep.code)
    shutil.rmtree(sweep.task(0).root)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    moved = SweepLayout(sweep.root.rename(tmp_path / place))
    for named in (moved.root, moved.root / task.root.name):
        assert main(["resume", str(named)]) != 0
        assert f"move it back: `mv {moved.root} {sweep.root}`" in capsys.readouterr().err
    shutil.copytree(moved.root, sweep.root, symlinks=True)
    assert main(["resume", str(moved.root)]) != 0
    assert f"`{moved.root}` is a copy of `{sweep.root}`" in capsys.readouterr().err


def test_a_task_that_was_renamed_in_its_sweep_is_to_be_named_as_before(tmp_path):
    task = make_sweep(tmp_path, 1).task(0)
    task.script.write_text(f"export FTSLURM_RUN_DIR={task.root}\n")
    renamed = task.root.rename(task.root.with_name("best"))
    with pytest.raises(RunError, match=re.escape(f"move it back: `mv {renamed} {task.root}`")):
        place_at_submit(RunLayout(renamed))


def test_a_copy_with_hard_links_is_a_copy(tmp_path):
    layout = make_layout(tmp_path)
    layout.script.write_text(f"export FTSLURM_RUN_DIR={layout.root}\n")
    copy = RunLayout(tmp_path / "copy")
    shutil.copytree(layout.root, copy.root, copy_function=os.link)
    with pytest.raises(RunError, match="is a copy of"):
        place_at_submit(copy)
    assert place_at_submit(layout) == layout


@pytest.mark.parametrize(
    ("ino", "ctime_ns", "is_one"), [(5, 9, True), (6, 9, False), (5, 8, False)]
)
def test_a_file_system_that_is_mounted_twice_has_one_run(ino, ctime_ns, is_one):
    def found(dev, ino, ctime_ns):
        return SimpleNamespace(st_dev=dev, st_ino=ino, st_ctime_ns=ctime_ns)

    here, there = ([found(dev, *each)] * 2 for dev, each in ((1, (5, 9)), (2, (ino, ctime_ns))))
    assert is_one_folder(here, there) == is_one


def test_a_held_job_is_released_and_hastened_once_slurm_says_that_it_waits(given, submitted):
    run = given(HELD)
    run.scheduler.after_release = [HELD, JobState("PENDING", ""), JobState("PENDING", "BeginTime")]
    assert resume_run(run, sleep=quick).result == "released"
    assert run.scheduler.done == [("release", "7"), ("hasten", "7")] and submitted == []


def test_a_released_job_that_waits_for_nodes_is_not_hastened(given, submitted):
    run = given(HELD)
    assert resume_run(run, sleep=quick).result == "released"
    assert run.scheduler.done == [("release", "7")] and submitted == []


def test_a_job_that_slurm_holds_and_its_owner_may_not_release_is_said_to_be_so(given, submitted):
    run = given(JobState("REQUEUE_HOLD", "launch failure limit exceeded requeued held"))
    run.scheduler.refusal = "Access/permission denied for job 7"
    with pytest.raises(SchedulerError, match="an operator of the cluster"):
        resume_run(run, sleep=quick)
    assert submitted == []


@pytest.mark.parametrize(("state", "result"), [(RUNNING, "running"), (QUEUED, "waiting")])
def test_a_run_that_is_alive_is_left_alone_but_for_its_orders(given, submitted, state, result):
    run = given(state)
    run.control.give(PAUSE)
    answer = resume_run(run, sleep=quick)
    assert answer.result == result and "`pause` is withdrawn" in answer.text
    assert given_orders(run) == [] and run.scheduler.done == [] and submitted == []


def test_nothing_is_queued_and_no_order_withdrawn_while_nobody_can_say_what_is_alive(
    given, submitted
):
    run = given(AWAY)
    run.control.give(STOP)
    with pytest.raises(RunError, match="nobody can say whether job 7 is alive"):
        resume_run(run, sleep=quick)
    assert submitted == [] and given_orders(run) == [STOP]


def test_a_job_in_the_middle_of_its_end_is_waited_for(given, submitted):
    run = given(JobState("COMPLETING"), JobState("COMPLETING"), QUEUED)
    assert resume_run(run, sleep=quick).result == "waiting"
    assert submitted == []


def test_an_end_that_slurm_may_take_back_is_looked_at_twice(given, submitted):
    run = given(JobState("NODE_FAIL"), QUEUED)
    assert resume_run(run, sleep=quick).result == "waiting"
    assert submitted == []


def test_no_second_job_starts_beside_one_whose_successor_was_cancelled(layout, submitted):
    run = make_run_with_successor(layout, RUNNING, CANCELLED)
    answer = resume_run(run, sleep=quick)
    assert (answer.result, answer.job_id, submitted) == ("running", "7", [])
    run.scheduler.states["7"] = [AWAY]
    with pytest.raises(RunError, match="nobody can say whether job 7 is alive"):
        resume_run(run, sleep=quick)
    assert submitted == []


def saving(run, paths):
    run.control.give(STOP)
    train(run.layout, phase="saving")


def settled(run, paths):
    obey(paths, STOP)


def seen(run, paths):
    append_event(paths, "ordered", order=STOP, step=47)


def asked(run, paths):
    """As a program of the user's own is, here by a signal."""
    run.control.give(STOP)
    append_event(paths, ASKED, signal="SIGUSR1", order=None)


@pytest.mark.parametrize("obeys", [saving, settled, seen, asked])
def test_an_order_that_is_being_obeyed_is_waited_for(layout, given, submitted, capfd, obeys):
    run = given(RUNNING)
    obeys(run, train(layout))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            run.scheduler.states["7"] = [JobState("COMPLETED")]

    assert resume_run(run, sleep=sleep).result == "queued" and len(submitted) == 1
    assert len(slept) == 3 and given_orders(run) == []
    assert "job 7 is obeying an order" in capfd.readouterr().err


@pytest.mark.parametrize("action", ["stop", "ended"])
def test_a_batch_script_that_has_decided_to_end_is_waited_for(
    layout, given, submitted, capfd, action
):
    run = given(RUNNING)
    decide(train(layout), action)

    def sleep(seconds):
        run.scheduler.states["7"] = [JobState("FAILED")]

    assert resume_run(run, sleep=sleep).result == "queued" and len(submitted) == 1
    assert "job 7 has decided to end" in capfd.readouterr().err


def test_what_an_earlier_job_has_decided_is_no_reason_to_wait(layout, given, submitted):
    run = given(CANCELLED)
    decide(train(layout), "stop")
    resume_run(run, sleep=quick)
    run.scheduler.states["71"] = [RUNNING]
    assert resume_run(run, sleep=quick).result == "running" and len(submitted) == 1


def test_an_order_is_not_waited_for_without_end(layout, given, submitted, monkeypatch):
    monkeypatch.setattr(resume, "OBEYING_S", 0.0)
    run = given(RUNNING)
    obey(train(layout), STOP)
    with pytest.raises(RunError, match="is obeying an order to leave .* when it has ended"):
        resume_run(run, sleep=quick)
    assert submitted == []


def test_an_order_that_an_earlier_job_obeyed_is_no_reason_to_wait(layout, given, submitted):
    run = given(CANCELLED)
    obey(train(layout), STOP)
    resume_run(run, sleep=quick)
    run.scheduler.states["71"] = [RUNNING]
    assert resume_run(run, sleep=quick).result == "running" and len(submitted) == 1


def test_a_finished_run_is_not_resumed(layout, given, submitted):
    layout.done.touch()
    with pytest.raises(RunError, match="has finished"):
        resume_run(given(FORGOTTEN), sleep=quick)
    assert submitted == []


def test_two_do_not_resume_a_run_at_once(layout, given, submitted, monkeypatch):
    def taken(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(fcntl, "lockf", taken)
    with pytest.raises(RunError, match="another `ftslurm resume`"):
        resume_run(given(CANCELLED), sleep=quick)
    assert submitted == []


def test_no_second_job_starts_beside_one_that_nobody_wrote_down(layout, given, submitted):
    run = given(JobState("COMPLETED"))
    train(layout, job_id="90")
    run.scheduler.states["90"] = [RUNNING]
    answer = resume_run(run, sleep=quick)
    assert (answer.result, answer.job_id, submitted) == ("running", "90", [])


def test_once_the_job_before_has_ended_its_successor_is_the_run(layout, submitted):
    run = make_run_with_successor(layout, JobState("COMPLETED"), HELD)
    assert resume_run(run, sleep=quick).result == "released"
    assert run.scheduler.done == [("release", "8")] and submitted == []


def test_a_successor_that_would_leave_again_makes_way_for_a_job_that_does_not(layout, submitted):
    run = make_run_with_successor(layout, JobState("COMPLETED"), WAITING_BEHIND)
    decision = {"schema_version": 1, "action": "ended", "reason": "by order"}
    write_json(train(layout).decision_json, decision)
    assert resume_run(run, sleep=quick).result == "queued"
    assert run.scheduler.done == [("cancel", "8")] and len(submitted) == 1


def test_a_successor_of_a_cancelled_job_makes_way_unless_that_job_gave_way(layout, submitted):
    run = make_run_with_successor(layout, CANCELLED, WAITING_BEHIND)
    paths = train(layout)
    append_event(paths, GAVE_WAY, job_id="7")
    assert resume_run(run, sleep=quick).result == "waiting" and run.scheduler.done == []
    paths.events.unlink()
    assert resume_run(run, sleep=quick).result == "queued"
    assert run.scheduler.done == [("cancel", "8")] and len(submitted) == 1
