"""Whose a job is: numbers that Slurm has given anew, or that another cluster has given."""

from pathlib import Path

import pytest
from fakes.operated import HELD, QUEUED, RUNNING, make_layout, make_run, quick

from ftslurm.cli import main
from ftslurm.errors import FormatError, RunError
from ftslurm.operate import standing
from ftslurm.operate.cancel import cancel
from ftslurm.operate.resume import resume
from ftslurm.operate.stop import leave
from ftslurm.run.control import PAUSE, STOP
from ftslurm.scheduler.slurm import CommandHangs, Completed
from ftslurm.scheduler.whose import Marks, jobs_of_others, marks_of_run, marks_of_sweep
from tests.fakes.array_queue import make_sweep, queued

OTHER = "/home/u/other.sh"


def others(marks, told, *job_ids):
    """`told`: squeue's lines, NUMBER|ARRAY|NAME|SCRIPT."""
    return sorted(jobs_of_others(job_ids, marks, run=lambda argv, _: Completed(0, told, "")))


@pytest.mark.parametrize(("named", "is_other"), [
    ("gpt|/runs/a|b/submit/train.sbatch", False),
    ("gpt|/runs/c/submit/train.sbatch", True),
    ("gpt|/runs/S/submit/group-000-1000.sbatch 1000", False),
    ("gpt|/runs/T/submit/group-000-1000.sbatch 1000", True),
    ("renamed|/runs/a|b/submit/train.sbatch", False),
    ("edited.sh|/runs/a|b/submit/./edited.sh", False),
    ("gpt|/var/spool/site/job.sh", False),  # by a `sbatch` of the site's own
    ("gpt-gpt-20260301-120000-3f9a|/var/spool/site/job.sh", False),
    (f"sleep|{OTHER}", True),
    ("sleep|(null)", False),
    ("interactive|bash", False),
    ("", False),
])  # fmt: skip
def test_a_job_is_anothers_by_its_script_and_name(named, is_other):
    marks = Marks([Path("/runs/a|b"), Path("/runs/S")], ["gpt"])
    assert others(marks, f"7|7|{named}\n", "7") == ["7"] * is_other


def test_a_number_is_looked_for_as_a_job_an_array_and_a_task_of_one():
    marks = Marks([Path("/runs/a")], ["gpt"])
    told = f"9|7|x|{OTHER}\n5|3|x|{OTHER}\n8|8|x|/runs/a/submit/train.sbatch\n"
    assert others(marks, told, "7_1", "5", "8", "6") == ["5", "7_1"]


def test_where_slurm_does_not_answer_nothing_is_anothers():
    def run(argv, timeout_s):
        raise CommandHangs("no answer")

    assert jobs_of_others(["7"], Marks([], []), run=run) == {}


def test_a_run_that_was_moved_knows_its_job_by_its_old_place_and_over_a_link(tmp_path):
    run = make_run(make_layout(tmp_path), RUNNING)
    run.layout.script.write_text("export FTSLURM_RUN_DIR='/old/the run'\n")
    (tmp_path / "link").symlink_to(run.layout.root)
    marks = marks_of_run(run.layout, run.record)
    scripts = ["/old/the run", run.layout.root, tmp_path / "link", "/old/another"]
    told = [f"7|7|ftslurm|{folder}/submit/train.sbatch\n" for folder in scripts]
    assert [others(marks, line, "7") for line in told] == [[], [], [], ["7"]]


@pytest.mark.parametrize(("verb", "state"), [
    (lambda run: cancel(run, sleep=quick), RUNNING),
    (lambda run: leave(run, STOP, sleep=quick), QUEUED),
    (lambda run: leave(run, PAUSE, sleep=quick), QUEUED),
    (lambda run: resume(run, sleep=quick), HELD),
])  # fmt: skip
def test_nothing_is_done_to_a_job_that_is_not_the_runs(tmp_path, monkeypatch, verb, state):
    monkeypatch.setattr(standing, "jobs_of_others", lambda *asked: {"7": "job 7 is another one"})
    run = make_run(make_layout(tmp_path), state)
    with pytest.raises(RunError, match="job 7 is another one; nothing is done to it"):
        verb(run)
    assert run.scheduler.done == []
    assert not run.control.is_given(STOP) and not run.control.is_given(PAUSE)


@pytest.mark.parametrize("verb", ["cancel", "stop", "pause", "resume"])
def test_a_task_whose_number_another_job_has_is_told_and_that_job_left_alone(
    tmp_path, queue, capsys, verb
):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    queue.name = "sleep"
    queue.put(["70_0"], "PENDING", command=OTHER)
    assert main([verb, str(layout.task(0).root)]) != 0
    assert f"job 70_0 is another one by now (`sleep|{OTHER}`)" in capsys.readouterr().err
    assert queue.jobs["70_0"][0] == "PENDING" and not queue.count("scancel")


def test_of_a_sweep_only_its_own_jobs_are_cancelled(tmp_path, queue, capsys, monkeypatch):
    monkeypatch.setattr("ftslurm.operate.sweep_cancel.GONE_S", 0.01)
    monkeypatch.setattr("ftslurm.operate.sweep_cancel.POLL_S", 0.01)
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0])
    queued(layout, queue, [1], array_id="71")
    queue.put(["70_0"], "RUNNING", command=str(layout.group_script(0)))
    queue.put(["71_1"], "RUNNING", command="/runs/another/submit/group-000.sbatch")
    assert main(["cancel", str(layout.root)]) != 0
    assert [queue.jobs[job_id][0] for job_id in ("70_0", "71_1")] == ["CANCELLED", "RUNNING"]
    assert "1 task is still alive" in (told := capsys.readouterr().err)
    assert "job 71 is another one by now" in told


def test_a_sweep_with_a_record_that_cannot_be_read_is_cancelled_all_the_same(
    tmp_path, queue, capsys
):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    layout.task(0).run_json.write_text("{")
    with pytest.raises(FormatError):
        marks_of_sweep(layout, {0: 0})
    main(["cancel", str(layout.root)])
    assert queue.jobs["70_0"][0] == "CANCELLED"
    assert "whether the jobs are the sweep's is not looked at" in capsys.readouterr().err
