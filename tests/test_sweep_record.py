"""What is written down of a sweep is read back, and what Slurm never answered is told."""

import multiprocessing
import os
from pathlib import Path

import pytest

from ftslurm.errors import FormatError, RunError
from ftslurm.files import write_json
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import queueing
from ftslurm.run.sweep_record import (
    ASKED,
    QUEUED,
    REFUSED,
    TaskRecord,
    add_array,
    add_tasks,
    format_numbers,
    parse_numbers,
    read_arrays,
    read_sweep,
    read_tasks,
    unanswered,
)
from ftslurm.scheduler.arrays import Outcome, submit_groups
from tests.fakes.array_queue import make_sweep


@pytest.mark.parametrize(
    "numbers, text",
    [
        ([], ""),
        ([4], "4"),
        ([0, 1, 2, 3, 4, 5, 7], "0-5,7"),
        ([9, 8, 3, 3, 1], "1,3,8-9"),
    ],
)
def test_numbers_are_written_as_sbatch_takes_them(numbers, text):
    assert format_numbers(numbers) == text
    assert parse_numbers(text) == sorted(set(numbers))


def test_a_sweep_and_its_tasks_are_read_back(tmp_path):
    layout = make_sweep(tmp_path, 3, parallelism=2)
    record = read_sweep(layout)
    assert (record.sweep_id, record.parallelism, record.sweeper) == ("sweep-1", 2, "basic")
    assert record.command == ("ftslurm", "submit", "-m", "seed=0,1")
    assert [task.overrides for task in read_tasks(layout)] == [
        ("seed=0",),
        ("seed=1",),
        ("seed=2",),
    ]


def test_a_torn_last_line_costs_that_task_alone(tmp_path):
    layout = make_sweep(tmp_path, 3)
    with layout.tasks_jsonl.open("r+b") as stream:
        stream.truncate(layout.tasks_jsonl.stat().st_size - 5)
    add_tasks(layout, [TaskRecord(7, "sweep-1-0007", (), 0)])
    assert [task.number for task in read_tasks(layout)] == [0, 1, 7]


def test_what_is_no_sweep_is_said_to_be_none(tmp_path):
    layout = SweepLayout(tmp_path)
    with pytest.raises(RunError, match="not there"):
        read_sweep(layout)
    write_json(layout.sweep_json, {"schema_version": 1, "sweep_id": "x"})
    with pytest.raises(FormatError, match="lacks a field"):
        read_sweep(layout)


def test_an_array_knows_the_job_of_each_of_its_tasks(tmp_path):
    layout = make_sweep(tmp_path, 0)
    add_array(layout, QUEUED, 1, [1002, 1001], offset=1000, array_id="70")
    (array,) = read_arrays(layout)
    assert array.numbers == (1001, 1002) and array.job_id(1002) == "70_2"


def test_what_was_asked_and_never_answered_is_told(tmp_path):
    layout = make_sweep(tmp_path, 0)
    add_array(layout, ASKED, 0, [0, 1])
    add_array(layout, QUEUED, 0, [0, 1], array_id="70")
    add_array(layout, ASKED, 0, [2])
    add_array(layout, ASKED, 1, [2])
    add_array(layout, REFUSED, 1, [2])
    (lost,) = unanswered(read_arrays(layout))
    assert (lost.group, lost.numbers) == (0, (2,))


def _hold(layout, is_held, may_go):
    with queueing(layout):
        is_held.set()
        may_go.wait(90)


def test_one_at_a_time_queues_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr("ftslurm.run.sweep_lock.PASSING_S", 30.0)
    layout = make_sweep(tmp_path, 0)
    context = multiprocessing.get_context("fork")
    is_held, may_go = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(layout, is_held, may_go))
    other.start()
    try:
        assert is_held.wait(90)
        with pytest.raises(RunError, match="another process queues"), queueing(layout, wait_s=0):
            pass
        with queueing(layout, sleep=lambda _: may_go.set()):  # as a task's that ends
            assert may_go.is_set()
    finally:
        may_go.set()
        other.join()


def test_tasks_and_what_sbatch_is_asked_are_on_the_device_before_it_is_called(
    tmp_path, monkeypatch
):
    synced, fsync = {}, os.fsync

    def noted_fsync(fd):
        fsync(fd)
        synced[str(Path(f"/proc/self/fd/{fd}").readlink())] = os.fstat(fd).st_size

    def sbatch(arguments):
        for path in (layout.tasks_jsonl, layout.arrays_jsonl):
            assert synced[str(path)] == path.stat().st_size > 0
        assert str(layout.root) in synced
        synced.clear()
        return "70"

    monkeypatch.setattr(os, "fsync", noted_fsync)
    layout = make_sweep(tmp_path, 2)
    submit_groups(
        layout, read_tasks(layout), room=None, outcome=Outcome(), array_size=1001, sbatch=sbatch
    )
    assert read_arrays(layout)[-1].array_id == "70" and synced == {}, "an answer is looked for"
