"""status, cancel, stop, save and resume of a sweep: what is done, in which order, what is not."""

import dataclasses
import json
import os

import pytest

from ftslurm import cli
from ftslurm.errors import RunError, SchedulerError
from ftslurm.operate.answer import counted
from ftslurm.operate.sweep_cancel import cancel_sweep, save_sweep, stop_sweep
from ftslurm.operate.sweep_resume import resume_sweep
from ftslurm.run.control import SAVE, STOP, ControlFiles
from ftslurm.run.jobs import BY_BATCH, BY_SUBMIT, add_job, read_jobs
from ftslurm.run.sweep_record import (
    ASKED,
    PROGRAM,
    add_array,
    read_arrays,
    read_sweep,
    unanswered,
    write_sweep,
)
from ftslurm.scheduler.local_state import CANCEL, LocalJob, is_requested, write_job
from ftslurm.scheduler.process import ProcessName
from ftslurm.sweep.look import look
from ftslurm.sweep.queue import queue_left
from tests.fakes.array_queue import decide, finish, make_sweep, queued, quick, train


def is_given(layout, number, order):
    return ControlFiles(layout.task(number), layout.task_id(number)).is_given(order)


def states(layout):
    return [task.state for task in look(layout).tasks]


# status


def status(layout, capsys, *options):
    assert cli.main(["status", str(layout.root), *options]) == 0
    return capsys.readouterr().out


def test_status_of_a_small_sweep_is_a_line_a_task_and_counts_on_top(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 4)
    queued(layout, queue, range(4))
    finish(layout, 0, value=0.1)
    train(layout, 1)
    decide(train(layout, 2), "stop", "rank 3 raised MemoryError")
    queue.put(["70_2"], "FAILED")
    queue.put(["70_3"], "PENDING", "Resources")
    lines = status(layout, capsys).splitlines()
    assert lines[0] == "sweep-1: 1 of 4 done, 1 running, 1 waiting, 1 failed"
    assert "ftslurm submit -m seed=0,1" in lines[1]
    assert lines[2].split() == ["task", "overrides", "state", "step", "attempts", "job", "value"]
    assert lines[3].split() == ["0", "seed=0", "done", "100/100", "1", "0.1"]
    assert lines[4].split() == ["1", "seed=1", "running", "47/100", "1", "70_1"]
    assert lines[6].split() == ["3", "seed=3", "waiting", "(Resources)", "0", "70_3"]
    assert "task 2 failed: rank 3 raised MemoryError" in lines
    queue.put(["70_1"], "COMPLETING")
    assert "running (COMPLETING)" in status(layout, capsys), "it is being torn down"
    assert any("ftslurm resume" in line for line in lines)


def test_status_of_a_thousand_tasks_is_readable_and_all_shows_each(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 200)
    queued(layout, queue, range(200), word="PENDING", reason="Resources")
    for number in (0, 1, 2, 5):
        finish(layout, number)
    queue.put(["70_3"], "RUNNING")
    decide(train(layout, 4), "stop", "disk is full")
    queue.put(["70_4"], "FAILED")
    text = status(layout, capsys)
    assert len(text.splitlines()) < 15
    assert "done: 4 tasks (0-2,5)" in text and "waiting: 194 tasks (6-199)" in text
    assert "task 4 failed: disk is full" in text
    assert len(status(layout, capsys, "--all").splitlines()) > 200


def test_many_failures_do_not_drown_the_counts_and_what_all_tasks_share_is_not_repeated(
    tmp_path, queue, capsys
):
    layout = make_sweep(tmp_path, 100, shared=["cluster=slurm"])
    queued(layout, queue, range(100), word="FAILED")
    text = status(layout, capsys)
    assert text.startswith("sweep-1: 0 of 100 done, 0 running, 0 waiting, 100 failed")
    assert "and 60 more" in text and "cluster=slurm" not in text
    assert "task 99 failed" in status(layout, capsys, "--all")


def test_status_as_json_has_every_task(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 60)
    queued(layout, queue, range(60))
    finish(layout, 7, value={"loss": 0.25})
    told = json.loads(status(layout, capsys, "--json"))
    assert told["counts"]["done"] == 1 and told["counts"]["running"] == 59
    assert told["sweep_id"] == "sweep-1" and told["tasks"][7]["value"] == {"loss": 0.25}
    assert told["tasks"][7]["overrides"] == ["seed=7"] and len(told["tasks"]) == 60


# cancel


def test_cancel_orders_first_and_then_asks_slurm_once(tmp_path, queue):
    layout = make_sweep(tmp_path, 4)
    queued(layout, queue, range(3))
    finish(layout, 0)
    queue.put(["70_0"], "COMPLETED")
    add_job(layout.task(1), "88", scheduler="slurm", queued_by=BY_BATCH, after="70_1")
    queue.put(["88"], "PENDING", "Dependency")
    seen = []
    plain = queue._scancel

    def scancel(argv):
        seen.append([is_given(layout, number, STOP) for number in range(4)])
        assert layout.closed.exists()
        return plain(argv)

    queue._scancel = scancel
    answer = cancel_sweep(layout, sleep=quick)
    assert answer.result == "cancelled" and "2 tasks are cancelled, 1 was done" in answer.text
    assert seen == [[False, True, True, False]]
    assert [call for call in queue.calls if call[0] == "scancel"] == [["scancel", "88", "70"]]
    assert states(layout) == ["done", "cancelled", "cancelled", "not queued"]
    assert not is_given(layout, 1, STOP), "no batch script is left to obey it"


def test_cancel_ends_an_array_whose_answer_was_lost_too(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    add_array(layout, ASKED, 0, [0, 1])
    queue.put(["70_0", "70_1"], "PENDING", command=f"{layout.group_script(0)} 0")
    cancel_sweep(layout, sleep=quick)
    assert states(layout) == ["cancelled", "cancelled"]


def test_nothing_of_a_cancelled_sweep_is_queued_until_it_is_resumed(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0])
    cancel_sweep(layout, sleep=quick)
    with pytest.raises(RunError, match="was cancelled"):
        queue_left(layout)
    assert resume_sweep(layout, sleep=quick).result == "queued"
    assert states(layout) == ["waiting", "waiting"]


def test_a_scancel_that_did_nothing_is_said(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    monkeypatch.setattr(
        queue, "_scancel", lambda argv: queue._say(argv, 1, err="Access/permission denied")
    )
    monkeypatch.setattr("ftslurm.operate.sweep_cancel.GONE_S", 0.01)
    with pytest.raises(SchedulerError, match="sweep-1-0000.*Access/permission denied.*order"):
        cancel_sweep(layout, sleep=quick)
    assert is_given(layout, 0, STOP)


def test_cancel_of_what_has_ended_says_how_it_stands(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    finish(layout, 0)
    assert cancel_sweep(layout, sleep=quick).result == "done"
    assert queue.count("scancel") == 0


# stop, save, pause


def test_stop_cancels_what_waits_and_orders_what_runs(tmp_path, queue):
    layout = make_sweep(tmp_path, 3)
    queued(layout, queue, range(3))
    queue.put(["70_2"], "PENDING", "Resources")
    answer = stop_sweep(layout, sleep=quick)
    assert (answer.result, states(layout)) == ("ordered", ["running", "running", "cancelled"])
    assert ["scancel", "--state=PENDING", "70"] in queue.calls
    assert [is_given(layout, number, STOP) for number in range(3)] == [True, True, False]


def test_save_is_ordered_of_those_that_run(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, range(2))
    queue.put(["70_1"], "PENDING", "Resources")
    save_sweep(layout)
    assert [is_given(layout, number, SAVE) for number in range(2)] == [True, False]
    queue.put(["70_0"], "COMPLETED")
    with pytest.raises(RunError, match="no task"):
        save_sweep(layout)


def test_a_sweep_of_programs_is_told_to_save_no_more_than_one_program_is(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    train(layout, 0)
    write_sweep(layout, dataclasses.replace(read_sweep(layout), kind=PROGRAM))
    assert cli.main(["save", str(layout.root)]) == 1
    assert "which saves when it sees fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (1, "tasks are queued", "1 task is queued"),
        (0, "tasks are queued", "0 tasks are queued"),
        (1, "held ones are released", "1 held one is released"),
        (1, "may have a job, and others have", "1 may have a job, and others have"),
        (1, "were done", "1 was done"),
    ],
)
def test_one_is_told_of_in_the_singular(count, words, said):
    assert counted(count, words) == said


def test_a_verb_of_one_run_names_a_task_to_take(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 1)
    assert cli.main(["logs", str(layout.root)]) == 1
    assert f"name a task of it, e.g. `{layout.task(0).root}`" in capsys.readouterr().err


def test_a_pause_of_a_sweep_says_what_does_it(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    assert cli.main(["pause", str(layout.root)]) == 2
    said = capsys.readouterr().err
    assert f"`ftslurm stop {layout.root}`" in said and str(layout.task(0).root) in said
    assert queue.calls == [] and states(layout) == ["running"]


# resume


def test_resume_queues_what_is_not_done_and_not_alive_and_nothing_else(tmp_path, queue):
    layout = make_sweep(tmp_path, 5, parallelism=3)
    queued(layout, queue, range(4))
    finish(layout, 0)
    queue.put(["70_0"], "COMPLETED")
    decide(train(layout, 1), "stop", "disk is full")
    queue.put(["70_1"], "FAILED")
    queue.put(["70_3"], "PENDING", "Resources")
    ControlFiles(layout.task(1), layout.task_id(1)).give(STOP)
    answer = resume_sweep(layout, sleep=quick)
    assert answer.ok and "2 tasks are queued" in answer.text and "2 are alive" in answer.text
    (call,) = [call for call in queue.calls if call[0] == "sbatch"]
    assert "--array=1,4%1" in call, "at most 3 at once, of which 2 are alive"
    assert states(layout) == ["done", "waiting", "running", "waiting", "waiting"]
    assert not is_given(layout, 1, STOP)
    assert [len(read_jobs(layout.task(number))) for number in range(5)] == [1, 2, 1, 1, 1]


def test_a_second_resume_finds_nothing_to_queue(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    resume_sweep(layout, sleep=quick)
    assert resume_sweep(layout, sleep=quick).result == "nothing"
    assert queue.count("sbatch") == 1


def test_a_resume_beside_another_is_refused(tmp_path, queue, monkeypatch):
    def taken(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    layout = make_sweep(tmp_path, 2)
    monkeypatch.setattr("ftslurm.run.sweep_lock.fcntl.lockf", taken)
    monkeypatch.setattr("ftslurm.run.sweep_lock.PASSING_S", 0.0)
    with pytest.raises(RunError, match="another process queues"):
        resume_sweep(layout, sleep=quick)
    assert queue.count("sbatch") == 0


def test_a_successor_that_nobody_wrote_down_is_found_and_nothing_queued_beside_it(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0, 1])
    queue.put(["70_0", "70_1"], "TIMEOUT")
    queue.put(["88"], "PENDING", "Dependency", command=str(layout.task(1).script))
    answer = resume_sweep(layout, sleep=quick)
    (call,) = [call for call in queue.calls if call[0] == "sbatch"]
    assert "--array=0" in call and "1 is alive" in answer.text
    cancel_sweep(layout, sleep=quick)
    assert queue.jobs["88"][0] == "CANCELLED"


def test_a_task_that_slurm_calls_lost_while_it_is_waited_for_is_looked_at_twice(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    words = iter(["COMPLETING", "NODE_FAIL", "PENDING"])

    def next_word(seconds):
        queue.put(["70_0"], next(words), "BeginTime")

    next_word(0)
    assert resume_sweep(layout, sleep=next_word).result == "nothing"
    assert queue.count("sbatch") == 0


def test_a_cancel_without_an_answer_says_that_nobody_knows(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    add_array(layout, ASKED, 0, [0, 1])
    queue.is_away = True
    with pytest.raises(SchedulerError, match="nobody can say whether 2 tasks are alive"):
        cancel_sweep(layout, sleep=quick)
    assert is_given(layout, 0, STOP) and is_given(layout, 1, STOP)


def test_a_lost_answer_is_found_and_not_queued_again(tmp_path, queue):
    layout = make_sweep(tmp_path, 3)
    add_array(layout, ASKED, 0, [0, 1])
    queue.put(["70_0", "70_1"], "RUNNING", command=f"{layout.group_script(0)} 0")
    resume_sweep(layout, sleep=quick)
    assert [job.job_id for job in read_jobs(layout.task(0))] == ["70_0"]
    (call,) = [call for call in queue.calls if call[0] == "sbatch"]
    assert "--array=2" in call and unanswered(read_arrays(layout)) == []


def test_where_nobody_can_say_nothing_is_queued(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, range(2))
    queue.is_away = True
    with pytest.raises(SchedulerError, match="Unable to contact slurm controller"):
        resume_sweep(layout, sleep=quick)
    assert queue.count("sbatch") == 0


def test_a_task_that_slurm_calls_preempted_is_looked_at_twice(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="PREEMPTED")
    answer = resume_sweep(layout, sleep=lambda _: queue.put(["70_0"], "PENDING", "BeginTime"))
    assert answer.result == "nothing" and queue.count("sbatch") == 0


def test_what_is_being_torn_down_is_waited_for(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="COMPLETING")
    resume_sweep(layout, sleep=lambda _: queue.put(["70_0"], "CANCELLED"))
    assert states(layout) == ["waiting"] and queue.count("sbatch") == 1


def test_at_a_limit_the_rest_is_said_to_be_left(tmp_path, queue):
    layout = make_sweep(tmp_path, 5)
    queue.limit = 3
    answer = resume_sweep(layout, sleep=quick)
    assert not answer.ok and "3 tasks are queued" in answer.text
    assert "2 are not queued yet: Slurm takes no more jobs" in answer.text
    assert states(layout).count("waiting") == 3


def test_groups_are_queued_by_their_own_scripts(tmp_path, queue):
    layout = make_sweep(tmp_path, 4, groups=2)
    resume_sweep(layout, sleep=quick)
    calls = [call for call in queue.calls if call[0] == "sbatch"]
    assert [call[-2:] for call in calls] == [
        [str(layout.group_script(0)), "0"],
        [str(layout.group_script(1)), "0"],
    ]


def test_a_held_task_is_released(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="PENDING", reason="JobHeldUser")
    answer = resume_sweep(layout, sleep=quick)
    assert "1 held one is released" in answer.text
    assert queue.count("scontrol", "release", "70_0") == 1 and queue.count("sbatch") == 0


def test_resume_by_the_command_line_needs_a_sweep_for_a_task_that_was_never_queued(
    tmp_path, queue, capsys
):
    layout = make_sweep(tmp_path, 1)
    assert cli.main(["resume", str(layout.task(0).root)]) == 1
    assert f"`ftslurm resume {layout.root}`" in capsys.readouterr().err
    assert cli.main(["resume", str(layout.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"] == "queued"


# on this machine


def test_cancel_on_this_machine_asks_each_task_that_is_alive(tmp_path, monkeypatch):
    layout = make_sweep(tmp_path, 2, scheduler="local")
    own = ProcessName.of(os.getpid())
    job = LocalJob("local-7", "RUNNING", 0, own.pid, own.started)
    write_job(layout.task(0), job)
    add_job(layout.task(0), "local-7", scheduler="local", queued_by=BY_SUBMIT)

    def end(seconds):
        if is_requested(layout.task(0), CANCEL, job):
            write_job(layout.task(0), dataclasses.replace(job, word="CANCELLED"))

    assert cancel_sweep(layout, sleep=end).result == "cancelled"
    assert states(layout) == ["cancelled", "not queued"]
