"""Tasks are ended of whose jobs nobody can say: a submitter was killed, or Slurm says nothing."""

import time
from pathlib import Path

import pytest

from ftslurm.cli import main
from ftslurm.errors import EXIT_INTERRUPTED, SchedulerError
from ftslurm.operate.sweep_cancel import cancel_sweep
from ftslurm.run.control import STOP, ControlFiles
from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import ASKED, add_array
from ftslurm.scheduler.lost_arrays import OPEN_S, find_lost, find_singles
from tests.fakes.array_queue import make_sweep, queued, quick


def is_ordered_to_stop(layout, number):
    return ControlFiles(layout.task(number), layout.task_id(number)).is_given(STOP)


@pytest.mark.parametrize("verb", ["cancel", "stop", "pause"])
@pytest.mark.parametrize("has_failed", [True, False])
def test_one_that_may_have_a_job_is_not_said_to_have_none(
    tmp_path, queue, capsys, verb, has_failed
):
    layout = make_sweep(tmp_path, 2)
    if has_failed:
        queued(layout, queue, [0, 1], word="FAILED")
    add_array(layout, ASKED, 0, [0], alone=True)
    assert main([verb, str(layout.task(0).root)]) != 0
    told = capsys.readouterr().err
    assert "nobody can say whether" in told and "nobody knows whether it has a job" in told
    assert f"`ftslurm {verb} {layout.task(0).root}` again then" in told
    assert is_ordered_to_stop(layout, 0) == (verb != "pause")
    assert ("the order to stop is left" in told) == (verb != "pause")


@pytest.mark.parametrize("has_job", [True, False])
def test_where_slurm_does_not_answer_the_order_is_left_all_the_same(
    tmp_path, queue, capsys, has_job
):
    layout = make_sweep(tmp_path, 1)
    if has_job:
        queued(layout, queue, [0])
    add_array(layout, ASKED, 0, [0], alone=True)
    queue.is_away = True
    assert main(["cancel", str(layout.task(0).root)]) != 0
    assert is_ordered_to_stop(layout, 0) and "Unable to contact" in capsys.readouterr().err


def test_a_job_that_slurm_has_is_found_and_cancelled(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="FAILED")
    queue.loses_answer = True
    assert main(["resume", str(layout.task(0).root)]) == EXIT_INTERRUPTED
    queue.put(["100"], "PENDING", command=str(layout.task(0).script))
    assert main(["cancel", str(layout.task(0).root)]) == 0
    assert queue.jobs["100"][0] == "CANCELLED"
    assert [job.job_id for job in read_jobs(layout.task(0))] == ["70_0", "100"]


def test_what_can_no_longer_come_is_told_as_ever(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0], word="FAILED")
    add_array(layout, ASKED, 0, [0, 1], now=lambda: time.time() - OPEN_S)
    assert main(["cancel", str(layout.task(0).root)]) == 0
    assert "the run is not running: job 70_0 is FAILED" in capsys.readouterr().out
    assert main(["cancel", str(layout.task(1).root)]) != 0
    assert "is not queued yet" in capsys.readouterr().err
    assert not is_ordered_to_stop(layout, 0)


def test_a_task_beside_it_and_one_that_runs_are_ended_as_ever(tmp_path, queue):
    layout = make_sweep(tmp_path, 3)
    queued(layout, queue, [0, 1], word="PENDING")
    add_array(layout, ASKED, 0, [1, 2])
    for number in (0, 1):
        assert main(["cancel", str(layout.task(number).root)]) == 0
        assert queue.jobs[f"70_{number}"][0] == "CANCELLED"


def test_tasks_of_which_slurm_says_nothing_are_not_called_alive(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0, 1])
    why = "Unable to contact slurm controller"
    monkeypatch.setattr(queue, "_squeue", lambda argv: queue._say(argv, 1, err=why))
    monkeypatch.setattr("ftslurm.operate.sweep_cancel.GONE_S", 0.01)
    with pytest.raises(SchedulerError, match=rf"2 tasks are perhaps still alive \(.*\): {why}"):
        cancel_sweep(layout, sleep=quick)


def test_of_a_script_that_is_not_ours_nothing_is_looked_at(tmp_path, queue, monkeypatch):
    """A path of somebody's waiting job may lead to a file server that is away."""
    layout = make_sweep(tmp_path, 1)
    queue.put(["71"], "PENDING", command="/net/away/project/job/run.sh")
    queue.put(["72"], "PENDING", command=str(layout.task(0).script))
    looked, resolve = [], Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda path: looked.append(path) or resolve(path))
    assert find_singles(layout) == ["72"]
    assert not [path for path in looked if str(path).startswith("/net/")]


def test_jobs_are_found_though_the_sweep_is_named_over_a_link(tmp_path, queue):
    submitted = make_sweep(tmp_path, 2)
    (tmp_path / "scratch").symlink_to(submitted.root.parent)
    layout = SweepLayout(tmp_path / "scratch" / submitted.sweep_id)
    for number, script in ((0, submitted.group_script(0)), (1, submitted.task(1).script)):
        script.touch()
        add_array(layout, ASKED, 0, [number], alone=number == 1)
        queue.put([["70_0", "71"][number]], "PENDING", command=f"{script}{[' 0', ''][number]}")
    assert {array.array_id for array in find_lost(layout)} == {"70", "71"}
    queue.put(["72"], "PENDING", command=str(submitted.task(0).script))
    assert find_singles(layout) == ["72"]
