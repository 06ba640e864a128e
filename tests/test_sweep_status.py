"""`ftslurm status SWEEP` with values that are hard to show: a line each, and JSON to anybody."""

import json
import math
import shutil
import subprocess

import pytest

from ftslurm.files import write_atomic
from ftslurm.operate.sweep_status import status_of_sweep
from ftslurm.run.sweep_record import ASKED, add_array
from ftslurm.run.value import value_json, write_value
from tests.fakes.array_queue import ArrayQueue, decide, finish, make_sweep, queued, train

ODD = [
    math.nan,
    -math.inf,
    2**4000,
    "a\ud800\x1b[31m\n",
    {"float": "fp16"},
    {"map": [1]},
    [[]] * 50,
]


@pytest.fixture
def done(tmp_path, monkeypatch):
    """A sweep whose tasks have these values, the last one's file torn."""
    queue = ArrayQueue()
    monkeypatch.setattr(subprocess, "run", queue)
    layout = make_sweep(tmp_path, len(ODD) + 2)
    queued(layout, queue, range(len(ODD) + 2))
    for number, value in enumerate(ODD):
        finish(layout, number)
        write_value(layout.task(number), value)
    for number, data in ((len(ODD), b'{"schema_version": 1}'), (len(ODD) + 1, b'{"schema_ver')):
        finish(layout, number)
        write_atomic(value_json(layout.task(number)), data)
    return layout


def test_each_value_has_its_line_of_the_table(done):
    said = status_of_sweep(done, as_json=False, show_all=True)
    rows = [line for line in said.splitlines() if " done " in line]
    assert len(rows) == len(ODD) + 2
    assert all(row.isprintable() and row.isascii() for row in rows), rows
    shown = [row.split("  ")[-1].strip() for row in rows]
    assert shown[:2] == ["NaN", "-Infinity"] and shown[4] == '{"float": "fp16"}'


def test_the_json_is_read_by_those_who_know_no_nan_and_has_the_value_as_it_was_kept(done):
    told = json.loads(
        status_of_sweep(done, as_json=True, show_all=True), parse_constant=pytest.fail
    )
    values = [task["value"] for task in told["tasks"]]
    assert values[:2] == [{"float": "nan"}, {"float": "-inf"}] and values[2] == 2**4000
    assert values[4:6] == [{"map": {"float": "fp16"}}, {"map": {"map": [1]}}]
    reasons = [task["reason"] for task in told["tasks"][-2:]]
    assert "has no key `value`" in reasons[0] and "is not JSON" in reasons[1]


def test_of_many_that_run_the_ones_that_do_not_have_their_lines(tmp_path, monkeypatch):
    queue = ArrayQueue()
    monkeypatch.setattr(subprocess, "run", queue)
    layout = make_sweep(tmp_path, 200)
    queued(layout, queue, range(200))
    decide(train(layout, 190), "stop", "disk is full")
    queue.put(["70_190"], "FAILED")
    queue.put(["70_195"], "PENDING", "JobHeldAdmin")
    lines = status_of_sweep(layout, as_json=False, show_all=False).splitlines()
    rows = [line.split()[0] for line in lines if line[:4].strip().isdigit()]
    assert rows == [*map(str, range(38)), "190", "195"]
    assert "task 190 failed: disk is full" in lines and "and 160 more" in lines
    assert "task 195 held: JobHeldAdmin" in lines


def test_why_tasks_have_no_job_is_said_once_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", ArrayQueue())
    layout = make_sweep(tmp_path, 60)
    add_array(layout, ASKED, 0, range(10))
    shutil.rmtree(layout.task(50).root)
    lines = status_of_sweep(layout, as_json=False, show_all=False).splitlines()
    assert [line for line in lines if line.startswith("task ")][1:] == [
        "task 50: its folder is gone or not whole; submit it anew"
    ]
    (asked,) = [line for line in lines if line.startswith("tasks 0-9: ")]
    assert "no answer is on record" in asked
