"""`ftslurm report` of sweeps: by folder or id, the value of each task, the best and the failed."""

import csv
import io
import time
from pathlib import Path

import pytest
from test_job_table import row
from test_report_command import as_json, report, sacct
from test_report_sources import make_run, slurm

from ftslurm.files import read_json, write_json
from ftslurm.run.attempts import Outcome, write_outcome
from ftslurm.run.jobs import BY_SUBMIT, add_job
from tests.fakes.array_queue import decide, finish, make_sweep, train

__all__ = ["sacct"]

SWEEP = Path("runs/sweep-1")
VALUES = {0: 0.5, 1: {"float": "nan"}, 2: 0.25}
"""Task 3 fails, 4 and 5 wait."""


def claimed_at(run, at):
    path = run.attempt(1).attempt_json
    write_json(path, {**read_json(path), "claimed_at": at})


def done(layout, number, value):
    finish(layout, number, value)
    write_outcome(layout.task(number).attempt(1), Outcome("finished", 100, 100))


@pytest.fixture
def sweep(sacct):
    begin = time.time() - 3600.0
    layout = make_sweep(".", 6, shared=("steps=100",))
    for number in range(6):
        run = layout.task(number)
        add_job(run, f"70_{number}", scheduler="slurm", queued_by=BY_SUBMIT, now=lambda: begin)
    for number, value in VALUES.items():
        done(layout, number, value)
    decide(train(layout, 3), "stop", "KeyError: 7")
    for number in range(4):
        claimed_at(layout.task(number), begin + 2.0)
    sacct.rows(
        *(slurm(f"70_{number}", "COMPLETED", begin, hours=0.5) for number in VALUES),
        slurm("70_3", "FAILED", begin, hours=0.5, ExitCode="1:0"),
        row("70_[4-5,9%2]", "PENDING", Start="Unknown", End="Unknown", ElapsedRaw="0"),
    )
    return layout


@pytest.mark.parametrize("word", ["runs/sweep-1", "sweep-1", "runs"])
def test_a_sweep_is_found_by_folder_by_id_and_below_a_folder(sweep, capsys, word):
    code, record = as_json(capsys, word)
    assert code == 1, "a task has failed"
    told = {job["sweep"]["number"]: job for job in record["jobs"] if job["sweep"]}
    assert sorted(told) == list(range(6))
    assert {number: told[number]["sweep"]["value"] for number in VALUES} == VALUES
    assert told[3]["sweep"]["overrides"] == ["seed=3"], "what all have is left out"
    assert [len(told[number]["attempts"]) for number in range(6)] == [1] * 6
    assert [told[number]["state"] for number in range(6)] == [
        "completed", "completed", "completed", "failed", "waiting", "waiting",
    ]  # fmt: skip
    (whole,) = record["sweeps"]
    assert whole["sweep_dir"] == str(SWEEP.absolute())
    assert (whole["sweep_id"], whole["tasks"]) == ("sweep-1", 6)
    assert whole["states"] == {"completed": 3, "failed": 1, "waiting": 2}
    assert whole["failed"] == [3]
    assert (whole["lowest"]["number"], whole["highest"]["number"]) == (2, 0), "nan is neither"


def test_a_task_is_found_by_its_id_and_belongs_to_its_sweep(sweep, capsys):
    code, record = as_json(capsys, "sweep-1-0002")
    (job,) = record["jobs"]
    assert (code, job["sweep"]["number"], job["sweep"]["value"]) == (0, 2, 0.25)
    assert record["sweeps"][0]["states"] == {"completed": 1}
    twice = ("sweep-1", "runs/sweep-1/sweep-1-0002", "sweep-1-0002")
    assert len(as_json(capsys, *twice)[1]["jobs"]) == 6


def test_tasks_that_wait_in_one_row_are_told_once_and_those_of_others_stay_one_row(sweep, capsys):
    waits = "70_[4-5,9%2]"
    for words, left in ((["--all-users"], waits), (["sweep-1", "70_9"], "70_9")):
        _, record = as_json(capsys, *words)
        others = [job for job in record["jobs"] if not job["sweep"]]
        assert [(job["job_id"], job["tasks"]) for job in others] == [(left, 1)]
        assert record["fleet"]["jobs"] == 7
        assert record["fleet"]["states"] == {"completed": 3, "failed": 1, "waiting": 3}
        assert not record["source"]["notes"]


def test_without_words_its_tasks_stand_under_its_name(sweep, capsys):
    make_run("single", "8", claimed_at=time.time() - 600.0)
    assert report("--runs", "--all-users") == 1
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("sweep sweep-1:")
    assert any(line.startswith("8 ") for line in lines[1:place])
    below = "\n".join(
        lines[place : lines.index("sweep sweep-1, 6 tasks: 3 completed, 1 failed, 2 waiting")]
    )
    for number in range(6):
        assert f"task {number} (seed={number})" in below
    assert "value 0.25" in below
    assert "  failed tasks   3" in lines
    assert "  lowest value   0.25, task 2 (seed=2)" in lines
    assert "  highest value  0.5, task 0 (seed=0)" in lines


def test_of_many_tasks_that_wait_the_first_are_listed_and_the_others_counted(sacct, capsys):
    layout = make_sweep(".", 60)
    for number in range(60):
        run = layout.task(number)
        add_job(run, f"70_{number}", scheduler="slurm", queued_by=BY_SUBMIT, now=time.time)
    done(layout, 50, 0.5)
    waits = row("70_[0-49,51-59]", "PENDING", Start="Unknown", End="Unknown", ElapsedRaw="0")
    sacct.rows(waits, slurm("70_50", "COMPLETED", time.time() - 600.0, hours=0.1))
    assert report("sweep-1") == 0
    text = capsys.readouterr().out
    assert text.count("\n70_") == 41 and "\n70_50 " in text, "40 of those that wait"
    assert "... and 19 more; --runs lists all" in text
    assert "sweep sweep-1, 60 tasks: 1 completed, 59 waiting" in text
    assert report("sweep-1", "--runs") == 0
    assert capsys.readouterr().out.count("\n70_") == 60


def test_by_run_a_sweep_is_one(sweep, capsys):
    _, record = as_json(capsys, "sweep-1")
    assert {name: one["jobs"] for name, one in record["fleet"]["by"]["run"].items()} == {
        str(SWEEP.absolute()): 6
    }


def test_a_table_for_a_spreadsheet_has_the_values(sweep, capsys):
    report("--csv", "sweep-1")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["value"] for row in rows] == ["0.5", '{"float": "nan"}', "0.25", "", "", ""]


def test_a_sweep_whose_tasks_all_are_done_is_code_0(sacct, capsys):
    layout = make_sweep(".", 2)
    for number in range(2):
        done(layout, number, number)
    assert report("sweep-1") == 0
    assert "lowest value   0, task 0" in capsys.readouterr().out


def test_a_sweep_without_a_task_yet_is_nothing_to_read(sacct, capsys):
    make_sweep(".", 0)
    assert report("sweep-1") == 3
    assert "no task has been written yet" in capsys.readouterr().err


def test_what_is_damaged_in_a_sweep_is_said_and_hides_nothing_else(sweep, capsys):
    (sweep.task(0).root / "value.json").write_text("{")
    code, record = as_json(capsys, "sweep-1")
    assert [job["sweep"]["value"] for job in record["jobs"]][:3] == [
        None,
        *list(VALUES.values())[1:],
    ]
    assert "the value of run" in record["source"]["notes"][0]
    sweep.tasks_jsonl.unlink()
    sweep.tasks_jsonl.mkdir()
    _, record = as_json(capsys, "sweep-1")
    assert len(record["jobs"]) == 7 - 1
    assert "the tasks of sweep" in record["source"]["notes"][0]


def test_a_folder_beside_that_is_no_sweep_is_not_looked_into(sacct, capsys):
    make_run("r", "8", claimed_at=time.time() - 600.0, root="runs/other")
    assert as_json(capsys)[1]["jobs"] == []


def test_a_word_that_nothing_has_says_where_it_was_looked_for(sweep, capsys):
    assert report("sweep-2", "--runs-below", "elsewhere") == 2
    assert "its id below `elsewhere`" in capsys.readouterr().err


def test_a_sweep_named_in_two_spellings_is_one_and_has_its_own_name(sweep, capsys, monkeypatch):
    for words in (("sweep-1", str(SWEEP.absolute())), ("runs/sweep-1/../sweep-1", "sweep-1")):
        (whole,) = as_json(capsys, *words)[1]["sweeps"]
        assert (whole["sweep_id"], whole["failed"]) == ("sweep-1", [3])
        assert whole["states"] == {"completed": 3, "failed": 1, "waiting": 2}
    Path("best").symlink_to(SWEEP)
    (whole,) = as_json(capsys, "best")[1]["sweeps"]
    assert whole["sweep_id"] == "sweep-1"
    monkeypatch.chdir(SWEEP / "sweep-1-0000")
    (whole,) = as_json(capsys, "..")[1]["sweeps"]
    assert (whole["sweep_id"], whole["tasks"]) == ("sweep-1", 6)


def test_a_value_that_is_true_is_written_as_json_has_it(sweep, capsys):
    done(sweep, 4, True)
    report("--csv", "sweep-1")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[4]["value"] == "true"
