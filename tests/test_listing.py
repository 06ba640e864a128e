"""`ftslurm status` without a name lists the newest of ./runs."""

import json
import os
import time

import pytest
from doctor_runs import OldRun

from ftslurm.cli import main
from ftslurm.files import write_json
from ftslurm.run.listing import MOST
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import TaskRecord, add_tasks


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def frozen_ago(runs, name, ago_s, record="run.json"):
    then = time.time() - ago_s
    os.utime(runs / name / record, (then, then))


def make_sweep(runs, name, tasks):
    layout = SweepLayout(runs / name)
    layout.root.mkdir(parents=True)
    write_json(layout.sweep_json, {"schema_version": 1})
    add_tasks(layout, [TaskRecord(n, f"{name}-{n:04d}", (), 0) for n in range(tasks)])


def test_runs_and_sweeps_are_listed_the_newest_first(runs, capsys):
    run = OldRun(runs, "done-one")
    run.attempt(0, steps=range(1, 31))
    write_json(run.layout.done, {"schema_version": 1})
    OldRun(runs, "new-one")
    make_sweep(runs, "many", tasks=3)
    make_sweep(runs, "one", tasks=1)
    for name, ago_s, record in (
        ("new-one", 10, "run.json"), ("many", 20, "sweep.json"), ("done-one", 30, "run.json"),
        ("one", 40, "sweep.json"),
    ):  # fmt: skip
        frozen_ago(runs, name, ago_s, record)
    assert main(["status"]) == 0
    new, many, done, one, last = capsys.readouterr().out.splitlines()
    assert new.split()[:3] == ["new-one", "never", "started"]
    assert "0 attempts" in new and "job 7 was queued" in new
    assert many.split() == ["many", "sweep", "3", "tasks"]
    assert one.split() == ["one", "sweep", "1", "task"]
    assert done.startswith("done-one  done")
    assert "step 30/" in done and "1 attempt" in done
    assert last == "`ftslurm status NAME` tells all of one"


def test_why_a_run_stopped_is_told_in_its_line(runs, capsys):
    run = OldRun(runs)
    number = run.attempt(0, steps=range(1, 3))
    reason = "first\nsecond \x1b[31m" + "r" * 200
    decision = {"schema_version": 1, "action": "stop", "cause": "code", "reason": reason}
    write_json(run.layout.attempt(number).root / "decision.json", decision)
    assert main(["status"]) == 0
    line, _ = capsys.readouterr().out.splitlines()
    assert "stopped" in line and "first second [31mrrr" in line
    assert "rrr..." in line and len(line) < 160


def test_the_list_is_the_same_for_programs(runs, capsys):
    OldRun(runs).attempt(0, steps=range(1, 3))
    assert main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 1 and told["runs_dir"] == "runs"
    (one,) = told["listed"]
    assert (one["name"], one["kind"], one["step"], one["attempts"]) == ("old", "run", 2, 1)


@pytest.mark.parametrize("text", [
    "{", '{"schema_version": 1}', '{"schema_version": 1, "spec": []}',
    '{"schema_version": 1, "run_id": "torn", "spec": {"steps": "many"}}',
])  # fmt: skip
def test_a_run_that_cannot_be_read_hides_no_other(runs, capsys, text):
    OldRun(runs, "whole")
    (runs / "torn").mkdir()
    (runs / "torn" / "run.json").write_text(text)
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert any(line.split()[:2] == ["torn", "unreadable"] for line in lines)
    assert main(["status", "--json"]) == 0
    told = {one["name"]: one["reason"] for one in json.loads(capsys.readouterr().out)["listed"]}
    assert told["torn"] and told["whole"].startswith("job 7 was queued")


def test_no_more_than_a_screenful_is_read(runs, capsys):
    for number in range(MOST + 3):
        OldRun(runs, f"run-{number}")
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == MOST + 2
    assert f"the newest {MOST}" in out


def test_an_empty_folder_says_what_to_do(runs, capsys):
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("no run below runs/")


def test_an_attempt_of_no_run_is_wrong_use(runs, capsys):
    assert main(["status", "--attempt", "1"]) == 2
    assert "name it" in capsys.readouterr().err
