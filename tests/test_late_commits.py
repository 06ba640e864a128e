"""A run that does not commit is told of while it runs, once an attempt."""

import json

import pytest

from ftslurm.agent.late_commits import LateCommits
from ftslurm.files import write_json
from ftslurm.run.attempts import Attempt, Progress, append_event, claim, write_progress
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import RunSpec, to_dict


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    for _ in range(2):
        claim(layout, Attempt(number=0, job_id="12", restart_count=0, nodes=["n1"], claimed_at=1.0))
    for number in (1, 2):
        append_event(layout.attempt(number), "restored", now=lambda: 1000.0)
    return layout


@pytest.fixture
def told(layout, tmp_path):
    """Path that each event is added to."""
    path, hook = tmp_path / "told", tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ncat >> {path}; echo >> {path}\n")
    hook.chmod(0o755)
    spec = RunSpec()
    spec.checkpoint.interval_s, spec.checkpoint.interval_steps = 240.0, 100
    spec.recovery.on_event = [str(hook)]
    write_json(layout.run_json, {
        "schema_version": 1, "run_id": "gpt-1", "scheduler": "slurm", "spec": to_dict(spec),
    })  # fmt: skip
    return path


class Watch(LateCommits):
    """Works at once, at a time that the test sets."""

    def __init__(self, layout, at=1000.0):
        self.at = at
        super().__init__(
            layout, read_record(layout), lambda work, done: done(work()), now=lambda: self.at
        )


def events(told):
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def test_two_intervals_without_a_commit_are_told_once_an_attempt(layout, told):
    watch = Watch(layout)
    for watch.at in (1400.0, 1479.0, 1481.0, 1600.0):
        watch.look(1)
    (event,) = events(told)
    assert (event["event"], event["attempt"], event["uncommitted_s"]) == ("no_commit", 1, 481.0)
    watch.look(2)
    assert [event["attempt"] for event in events(told)] == [1, 2]


def test_a_commit_begins_the_time_anew(layout, told):
    append_event(layout.attempt(1), "committed", now=lambda: 1300.0, step=10)
    Watch(layout, at=1700.0).look(1)
    assert events(told) == []


@pytest.mark.parametrize(("step", "late"), [(1200, False), (1201, True)])
def test_steps_count_too_from_the_restored_one_on(layout, told, step, late):
    write_progress(layout.attempt(1), Progress(step=step, steps=9999, restored_step=1000))
    Watch(layout).look(1)
    assert bool(events(told)) == late


def test_between_attempts_and_without_anybody_to_tell_nothing_is_read(layout, told):
    Watch(layout, at=9999.0).look(None)
    record = json.loads(layout.run_json.read_text())
    record["spec"]["recovery"]["on_event"] = []
    write_json(layout.run_json, record)
    Watch(layout, at=9999.0).look(1)
    assert events(told) == []
