"""What a resume of a sweep queues at limits, beside what may be queued, and what is refused."""

from pathlib import Path

from ftslurm.files import write_json
from ftslurm.operate.sweep_cancel import cancel_sweep
from ftslurm.operate.sweep_resume import resume_sweep
from ftslurm.run.control import STOP, ControlFiles
from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_lock import is_closed
from ftslurm.run.sweep_record import ASKED, add_array
from ftslurm.scheduler.local_state import LocalJob, write_job
from ftslurm.scheduler.lost_arrays import OPEN_S
from ftslurm.sweep import here
from ftslurm.sweep.look import look
from tests.fakes.array_queue import arrays, make_sweep, queued, quick


def states(layout):
    return [task.state for task in look(layout).tasks]


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
    bad = {1: ["n2"], 4: ["n3"]}
    monkeypatch.setattr(
        "ftslurm.operate.sweep_resume._excluded", lambda layout, task: bad.get(task.number, [])
    )
    answer = resume_sweep(layout, sleep=quick)
    assert answer.ok and arrays(queue) == ["--array=0,2-3,5%1"]
    singles = [call for call in queue.calls if call[0] == "sbatch" and "--array" not in str(call)]
    assert [call[-1] for call in singles] == [str(layout.task(n).script) for n in (1, 4)]
    queue.start()
    assert len(queue.running) == 3


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
