"""A task that has ended hands on what its array leaves of `parallelism`; nobody follows."""

import contextlib
import fcntl
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from ftslurm.cli import main
from ftslurm.recovery import recover
from ftslurm.recovery.case import Decision
from ftslurm.run.sweep_record import WIDENED, WIDENING, add_event, read_arrays, read_tasks
from ftslurm.sweep.follow import follow
from ftslurm.sweep.hand_on import hand_on
from ftslurm.sweep.queue import queue_alone, queue_left
from tests.fakes.array_queue import decide, finish, make_sweep, task_of, train


def end(layout, queue, job_id, *, fails=False):
    """As its batch script does it: what was decided, then the hand-on, then the job is gone."""
    number = task_of(layout, job_id)
    if fails:
        decide(train(layout, number, job_id=job_id), "stop", "rank 1 raised")
    else:
        finish(layout, number)
    hand_on(layout.task(number))
    queue.put([job_id], "FAILED" if fails else "COMPLETED")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [(12, 4, 2), (20, 5, 3)])
def test_a_sweep_that_nobody_follows_keeps_running_as_many_as_may(tmp_path, queue, seed, shape):
    count, parallelism, groups = shape
    layout = make_sweep(tmp_path, count, parallelism=parallelism, groups=groups)
    queue_left(layout)
    chosen = random.Random(seed)
    left = count
    while left:
        queue.start()
        assert len(queue.running) == min(parallelism, left)
        end(layout, queue, chosen.choice(queue.running), fails=chosen.random() < 0.3)
        left -= 1
    assert queue.count("sbatch") == groups, "nothing is queued from a job"


@pytest.mark.parametrize("seed", range(3))
def test_beside_somebody_who_follows_no_more_run_than_may(tmp_path, queue, seed):
    layout = make_sweep(tmp_path, 16, parallelism=4, groups=3)
    clock, most, said, chosen = [0.0], [], [], random.Random(seed)

    def sleep(seconds):
        clock[0] += seconds
        assert len(most) < 500
        queue.start()
        most.append(len(queue.running))
        for job_id in chosen.sample(queue.running, chosen.randrange(len(queue.running) + 1)):
            end(layout, queue, job_id, fails=chosen.random() < 0.3)

    ends = follow(layout, say=said.append, sleep=sleep, clock=lambda: clock[0])
    assert len(ends) == 16 and max(most) == 4
    assert not [line for line in said if "fewer" in line]


def test_while_others_of_its_array_wait_one_question_is_all(tmp_path, queue):
    layout = make_sweep(tmp_path, 8, parallelism=2, groups=2)
    queue_left(layout)
    queue.start()
    before = len(queue.calls)
    end(layout, queue, "100_0")
    assert [call[0] for call in queue.calls[before:]] == ["squeue"]


@pytest.mark.parametrize(("parallelism", "groups"), [(None, 2), (2, 1)])
def test_where_nothing_is_shared_slurm_is_not_asked(tmp_path, queue, parallelism, groups):
    layout = make_sweep(tmp_path, 4, parallelism=parallelism, groups=groups)
    queue_left(layout)
    before = len(queue.calls)
    for number in range(4):
        hand_on(layout.task(number))
    assert queue.calls[before:] == []


def two_left_of_the_first_array(tmp_path, queue):
    """Tasks 8 and 10 run, of two arrays of six with two places each."""
    layout = make_sweep(tmp_path, 12, parallelism=4, groups=2)
    queue_left(layout)
    for number in (0, 2, 4, 6):
        finish(layout, number)
        queue.put([f"100_{number}"], "COMPLETED")
    queue.start()
    return layout


def test_two_that_end_at_once_hand_on_both_their_places(tmp_path, queue):
    """Each still sees the job of the other."""
    layout = two_left_of_the_first_array(tmp_path, queue)
    for number in (8, 10):
        finish(layout, number)
    hand_on(layout.task(8))
    hand_on(layout.task(10))
    assert queue.at_once["101"] == 4
    assert [one.at_once for one in read_arrays(layout) if one.event == WIDENED] == [4]


def test_two_that_fail_at_once_do_not_count_each_other(tmp_path, queue):
    """Their jobs are there for as long as an epilog takes."""
    layout = two_left_of_the_first_array(tmp_path, queue)
    for number in (8, 10):
        decide(train(layout, number, job_id=f"100_{number}"), "stop", "rank 1 raised")
    hand_on(layout.task(8))
    assert queue.at_once["101"] == 4


def test_one_that_was_queued_again_since_it_failed_is_counted(tmp_path, queue):
    layout = make_sweep(tmp_path, 6, parallelism=2, groups=2)
    queue_left(layout)
    queue.put(["100_0"], "FAILED")
    decide(train(layout, 0, job_id="100_0"), "stop", "rank 1 raised")
    queue_alone(layout, read_tasks(layout)[0], exclude=[], queued_by="person")
    for number in (2, 4):
        finish(layout, number)
    queue.put(["100_2"], "COMPLETED")
    hand_on(layout.task(4))
    assert queue.at_once["101"] == 1


def test_the_last_array_asks_once_and_looks_at_no_other_task(tmp_path, queue):
    layout = make_sweep(tmp_path, 6, parallelism=2, groups=2)
    queue_left(layout)
    for number in (0, 1, 3, 5):
        finish(layout, number)
    queue.put(["100_0", "101_1", "101_3", "101_5"], "COMPLETED")
    add_event(layout, WIDENED, replace(read_arrays(layout)[1], at_once=2))
    queue.start()
    before = len(queue.calls)
    end(layout, queue, "100_4")
    assert [call[0] for call in queue.calls[before:]] == ["squeue"]
    assert not layout.line.exists(), "no lock is taken"


def test_a_share_of_which_slurm_may_not_have_been_told_is_told_though_all_may_run(tmp_path, queue):
    layout = make_sweep(tmp_path, 6, parallelism=2, groups=2)
    queue_left(layout)
    narrow = read_arrays(layout)[-1]
    add_event(layout, WIDENING, replace(narrow, at_once=3))
    for number in (0, 2, 4):
        finish(layout, number)
    queue.put(["100_0", "100_2"], "COMPLETED")
    hand_on(layout.task(4))
    assert queue.at_once["101"] == 3


def test_of_a_cancelled_sweep_nothing_more_is_started_and_nothing_asked(tmp_path, queue):
    layout = make_sweep(tmp_path, 6, parallelism=2, groups=2)
    queue_left(layout)
    layout.closed.touch()
    queue.put(["100_0", "100_2"], "COMPLETED")
    before = len(queue.calls)
    hand_on(layout.task(4))
    assert queue.at_once["101"] == 1 and queue.calls[before:] == []


def test_where_slurm_does_not_answer_it_is_not_asked_twice(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 4, parallelism=4, groups=2)
    queue_left(layout)
    queue.is_away = True
    before = len(queue.calls)
    end(layout, queue, "100_0")
    assert [call[0] for call in queue.calls[before:]] == ["squeue"]
    assert capsys.readouterr().err == ""


HOLD = """
import sys
from pathlib import Path
from ftslurm.run import sweep_lock
from ftslurm.run.sweep_layout import SweepLayout
with getattr(sweep_lock, sys.argv[2])(SweepLayout(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(layout, lock):
    """By another process."""
    argv = [sys.executable, "-c", HOLD, str(layout.root), lock]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        yield
    finally:
        holder.communicate(timeout=60)


def test_where_another_waits_in_line_nobody_waits_behind_it(tmp_path, queue, monkeypatch, capsys):
    layout = make_sweep(tmp_path, 4, parallelism=2, groups=2)
    queue_left(layout)
    queue.put(["100_0"], "COMPLETED")
    before = len(queue.calls)
    with held(layout, "waiting_in_line"):
        hand_on(layout.task(2))
    assert [call[0] for call in queue.calls[before:]] == ["squeue"]
    assert capsys.readouterr().err == ""


def test_who_has_waited_leaves_the_line_before_it_looks(tmp_path, queue, monkeypatch):
    """Who comes while it looks may not be seen."""
    layout = make_sweep(tmp_path, 4, parallelism=2, groups=2)
    queue_left(layout)
    queue.put(["100_0"], "COMPLETED")
    free = []

    def look(*_, **__):
        with held(layout, "waiting_in_line"), layout.line.open("w") as stream:
            with pytest.raises(BlockingIOError):
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free.append(True)

    monkeypatch.setattr("ftslurm.sweep.share.use_room", look)
    hand_on(layout.task(2))
    assert free == [True]


def test_a_lock_that_is_not_let_go_costs_a_warning(tmp_path, queue, monkeypatch, capsys):
    layout = make_sweep(tmp_path, 4, parallelism=2, groups=2)
    queue_left(layout)
    queue.put(["100_0"], "COMPLETED")
    monkeypatch.setattr("ftslurm.run.sweep_lock.PASSING_S", 0.3)
    with held(layout, "queueing"):
        hand_on(layout.task(2))
    told = capsys.readouterr().err
    assert "fewer tasks of the sweep may run at once than might: another process queues" in told
    assert queue.at_once["101"] == 1


def test_a_run_that_is_no_task_is_let_be(tmp_path, queue):
    layout = make_sweep(tmp_path, 1, parallelism=1)
    layout.sweep_json.unlink()
    hand_on(layout.task(0))
    assert queue.calls == []


@pytest.mark.parametrize(
    ("action", "is_over"),
    [("done", True), ("stop", True), ("ended", True), ("requeued", False), ("paused", False)],
)
def test_a_batch_script_has_its_word_before_anything_is_handed_on(
    tmp_path, queue, monkeypatch, capsys, action, is_over
):
    layout = make_sweep(tmp_path, 1)
    seen = []
    monkeypatch.setattr(recover, "outlive_requeue", lambda: None)
    monkeypatch.setattr(recover, "recover", lambda *_, **__: Decision(action, "asked", "so it is"))
    monkeypatch.setattr(
        "ftslurm.sweep.hand_on.hand_on", lambda run: seen.append((run, capsys.readouterr().out))
    )
    run = layout.task(0)
    assert recover.main([str(run.root), "--attempt", "1", "--rc", "0"]) == 0
    assert seen == ([(run, f"{action}\n")] if is_over else [])


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ImportError("no such module")])
def test_what_goes_wrong_with_it_is_no_reason_to_decide_once_more(
    tmp_path, queue, monkeypatch, capsys, error
):
    layout = make_sweep(tmp_path, 1)

    def fails(_):
        raise error

    monkeypatch.setattr(recover, "outlive_requeue", lambda: None)
    monkeypatch.setattr(recover, "recover", lambda *_, **__: Decision("ended", "asked", "so it is"))
    monkeypatch.setattr("ftslurm.sweep.hand_on.hand_on", fails)
    assert main(["recover", str(layout.task(0).root), "--attempt", "1", "--rc", "0"]) == 0
    told = capsys.readouterr()
    assert told.out == "ended\n" and f"nothing is handed on to other tasks: {error}" in told.err
