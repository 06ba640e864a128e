"""What a resume of a sweep queues at limits, beside what may be queued, and what is refused."""

import time
from pathlib import Path

import pytest

from ftslurm.cli import main
from ftslurm.errors import EXIT_INTERRUPTED, RunError
from ftslurm.files import write_json
from ftslurm.operate.sweep_cancel import cancel_sweep
from ftslurm.operate.sweep_resume import resume_sweep
from ftslurm.run.control import STOP, ControlFiles
from ftslurm.run.jobs import add_job, read_jobs
from ftslurm.run.sweep_lock import is_closed
from ftslurm.run.sweep_record import ASKED, add_array, read_arrays, unanswered
from ftslurm.scheduler.local_state import LocalJob, write_job
from ftslurm.scheduler.lost_arrays import OPEN_S
from ftslurm.sweep import here
from ftslurm.sweep.look import look
from tests.fakes.array_queue import (
    arrays,
    decide,
    finish,
    make_sweep,
    queued,
    quick,
    train,
)


def states(layout):
    return [task.state for task in look(layout).tasks]


def away_from(monkeypatch, nodes):
    """Each of these tasks is queued alone."""
    monkeypatch.setattr(
        "ftslurm.operate.sweep_resume._excluded", lambda layout, task: nodes.get(task.number, [])
    )


def test_what_may_be_on_its_way_is_left_alone_and_the_time_to_wait_is_said(tmp_path, queue):
    layout = make_sweep(tmp_path, 3)
    add_array(layout, ASKED, 0, [0, 1])
    answer = resume_sweep(layout, sleep=quick)
    assert not answer.ok and arrays(queue) == ["--array=2"]
    assert "2 may have a job: Slurm was asked for it at" in answer.text
    assert states(layout) == ["unknown", "unknown", "waiting"]


def test_what_never_came_is_queued_once_it_cannot_come_any_more(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 1000.0)
        add_array(layout, ASKED, 0, [0, 1], now=lambda: 1000.0 - OPEN_S)
        assert resume_sweep(layout, sleep=quick).ok
    assert arrays(queue) == ["--array=0-1"]


def test_a_task_with_an_earlier_job_is_left_alone_too(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="FAILED")
    add_array(layout, ASKED, 0, [0])
    answer = resume_sweep(layout, sleep=quick)
    assert answer.result == "nothing" and not answer.ok and arrays(queue) == []


@pytest.mark.parametrize("action", ["stop", "ended"])
def test_a_task_whose_batch_script_is_on_its_way_out_is_not_taken_for_alive(
    tmp_path, queue, action
):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0, 1])
    decide(train(layout, 0), action, "so it is")
    answer = resume_sweep(layout, sleep=lambda _: queue.put(["70_0"], "FAILED"))
    assert answer.ok and answer.text.startswith("1 task is queued to go on"), answer.text
    assert arrays(queue) == ["--array=0"]


def test_a_cancel_orders_what_may_be_on_its_way_and_says_so(tmp_path, queue):
    layout = make_sweep(tmp_path, 3)
    queued(layout, queue, [0])
    add_array(layout, ASKED, 0, [1, 2])
    answer = cancel_sweep(layout, sleep=quick)
    assert answer.result == "cancelled" and not answer.ok
    assert "nobody can say whether 2 tasks are alive" in answer.text
    assert "nobody knows whether it has a job" in answer.text
    orders = [ControlFiles(layout.task(n), layout.task_id(n)).is_given(STOP) for n in range(3)]
    assert orders == [False, True, True]


def test_a_refused_group_is_said_and_the_others_are_queued(tmp_path, queue):
    layout = make_sweep(tmp_path, 4, groups=2)
    queue.refuse(0, "sbatch: error: invalid partition specified: nope")
    answer = resume_sweep(layout, sleep=quick)
    assert not answer.ok and answer.text.startswith("2 tasks are queued")
    assert "2 are not queued, and will not be: sbatch refused the job" in answer.text
    assert states(layout) == ["not queued", "waiting", "not queued", "waiting"]


def test_parallelism_counts_tasks_that_are_queued_alone(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 6, parallelism=3)
    away_from(monkeypatch, {1: ["n2"], 4: ["n3"]})
    answer = resume_sweep(layout, sleep=quick)
    assert answer.ok and arrays(queue) == ["--array=0,2-3,5%1"]
    singles = [call for call in queue.calls if call[0] == "sbatch" and "--array" not in str(call)]
    assert [call[-1] for call in singles] == [str(layout.task(n).script) for n in (1, 4)]
    queue.start()
    assert len(queue.running) == 3


def test_a_task_queued_alone_by_a_resume_that_was_killed_is_not_queued_again(
    tmp_path, queue, monkeypatch
):
    """Its sbatch outlived the resume: the job is there only after the next one has looked."""
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="FAILED")
    away_from(monkeypatch, {0: ["n2"]})
    queue.loses_answer = True
    assert resume_sweep(layout, sleep=quick).result == "interrupted"
    came = {"100": queue.jobs.pop("100")}
    answer = resume_sweep(layout, sleep=quick)
    assert answer.result == "nothing" and "1 may have a job" in answer.text
    assert states(layout) == ["unknown"]

    queue.jobs |= came
    queue.put(["100"], "RUNNING", command=str(layout.task(0).script))  # it has claimed nothing yet
    answer = resume_sweep(layout, sleep=quick)
    assert answer.ok and answer.result == "nothing"
    assert [job.job_id for job in read_jobs(layout.task(0))] == ["70_0", "100"]
    assert queue.count("sbatch") == 1 and unanswered(read_arrays(layout)) == []
    assert states(layout) == ["running"]


def test_a_single_task_is_not_resumed_beside_a_job_that_may_be_on_its_way(tmp_path, queue, capsys):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0, 1], word="FAILED")
    add_array(layout, ASKED, 0, [0])
    assert main(["resume", str(layout.task(0).root)]) == 1
    assert "nobody knows whether it has a job; resume it again then" in capsys.readouterr().err
    assert main(["resume", str(layout.task(1).root)]) == 0
    assert queue.count("sbatch") == 1 and len(read_jobs(layout.task(0))) == 1


def test_the_resume_of_a_single_task_that_was_killed_is_found_by_the_next(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="FAILED")
    queue.loses_answer = True
    assert main(["resume", str(layout.task(0).root)]) == EXIT_INTERRUPTED
    queue.put(["100"], "RUNNING", command=str(layout.task(0).script))  # it has claimed nothing yet
    for root in (layout.task(0).root, layout.root):
        assert main(["resume", str(root)]) == 0
    assert queue.count("sbatch") == 1
    assert [job.job_id for job in read_jobs(layout.task(0))] == ["70_0", "100"]


def test_a_task_queued_alone_that_began_and_ended_unseen_is_told_by_its_own_word(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 1)
    away_from(monkeypatch, {0: ["n2"]})
    queue.loses_answer = True
    assert resume_sweep(layout, sleep=quick).result == "interrupted"
    queue.jobs.clear()
    add_job(layout.task(0), "100", scheduler="slurm", queued_by="person")
    finish(layout, 0)
    assert resume_sweep(layout, sleep=quick).ok
    assert unanswered(read_arrays(layout)) == [] and queue.count("sbatch") == 1


def test_a_task_queued_alone_of_which_slurm_never_heard_is_queued_once_it_cannot_come(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 1)
    away_from(monkeypatch, {0: ["n2"]})
    add_array(layout, ASKED, 0, [0], alone=True, now=lambda: time.time() - OPEN_S)
    assert resume_sweep(layout, sleep=quick).ok
    assert [job.job_id for job in read_jobs(layout.task(0))] == ["100"]
    assert [one.alone for one in read_arrays(layout)] == [True] * 4


def test_a_task_queued_alone_whose_command_is_gone_leaves_nothing_open(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 1)
    away_from(monkeypatch, {0: ["n2"]})
    layout.task(0).sbatch_command.unlink()
    with pytest.raises(RunError, match="how this run was submitted is not known"):
        resume_sweep(layout, sleep=quick)
    assert unanswered(read_arrays(layout)) == []


def test_what_parallelism_has_no_room_for_is_said_to_be_left(tmp_path, queue):
    layout = make_sweep(tmp_path, 4, parallelism=2)
    queued(layout, queue, [0, 1])
    answer = resume_sweep(layout, sleep=quick)
    assert not answer.ok and arrays(queue) == []
    assert "2 are not queued yet: what is queued may run as many tasks at once" in answer.text


def test_an_interrupted_resume_says_how_to_go_on(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queue.loses_answer = True
    answer = resume_sweep(layout, sleep=quick)
    assert answer.result == "interrupted" and not answer.ok
    assert f"`ftslurm status {layout.root}`" in answer.text


def test_a_sweep_that_was_cancelled_elsewhere_is_closed_whatever_was_looked_up_before(
    tmp_path, queue, monkeypatch
):
    """As with NFS, which may answer for a minute that a name is not there (nfs(5))."""
    layout = make_sweep(tmp_path, 2, scheduler="local")
    layout.closed.touch()
    plain = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path != layout.closed and plain(path))
    assert is_closed(layout)

    def start(run):
        raise AssertionError("a task was started")

    begun = here.run_here(
        layout, [0, 1], at_once=1, start=start, queued_by="submit", say=print, sleep=quick
    )
    assert begun == [] and not read_jobs(layout.task(0))


def test_on_this_machine_each_end_is_counted_as_it_comes(tmp_path):
    layout = make_sweep(tmp_path, 3, scheduler="local")
    said = []

    def start(run):
        write_job(run, LocalJob("local-1", "COMPLETED", 0, 1, 1))
        if run.root.name != "sweep-1-0001":
            write_json(run.done, {"schema_version": 1})
        return "local-1"

    here.run_here(
        layout, range(3), at_once=1, start=start, queued_by="submit", say=said.append, sleep=quick
    )
    assert said == [
        "1 of 3 done, 0 running, 2 waiting, 0 failed",
        "1 of 3 done, 0 running, 1 waiting, 1 failed",
        "2 of 3 done, 0 running, 0 waiting, 1 failed",
    ]


def test_a_sweep_of_this_machine_is_resumed_here_one_task_after_the_other(tmp_path, monkeypatch):
    layout = make_sweep(tmp_path, 3, scheduler="local")
    finish(layout, 1)
    begun = []

    def start(run, scheduler):
        begun.append((run.root.name, scheduler))
        write_job(run, LocalJob("local-1", "COMPLETED", 0, 1, 1))
        return "local-1"

    monkeypatch.setattr("ftslurm.operate.sweep_resume.submit_again", start)
    answer = resume_sweep(layout, sleep=quick)
    assert begun == [("sweep-1-0000", "local"), ("sweep-1-0002", "local")]
    assert "2 tasks ran on this machine" in answer.text
