"""Tasks of a sweep are queued while something goes wrong: disks, refusals, limits, other people."""

import dataclasses
import errno
import os
import time

import pytest
from fakes.sweep_slurm import slurm_on_path  # noqa: F401 - a fixture

from ftslurm.errors import RunError, SchedulerError
from ftslurm.operate.sweep_cancel import cancel_sweep
from ftslurm.operate.sweep_resume import resume_sweep
from ftslurm.operate.sweep_status import render
from ftslurm.run.control import STOP, ControlFiles
from ftslurm.run.jobs import BY_BATCH, add_job, read_jobs
from ftslurm.run.sweep_lock import is_closed, queueing
from ftslurm.run.sweep_record import (
    ASKED,
    FULL,
    QUEUED,
    add_array,
    add_event,
    read_arrays,
    read_tasks,
)
from ftslurm.scheduler.arrays import AT_LIMIT, NO_PLACE, NO_ROOM
from ftslurm.scheduler.local_state import CANCEL, LocalJob, is_requested, write_job
from ftslurm.scheduler.lost_arrays import OPEN_S
from ftslurm.scheduler.process import ProcessName
from ftslurm.submit import sweep_files
from ftslurm.sweep import here
from ftslurm.sweep.look import look
from ftslurm.sweep.queue import queue_left, queue_tasks
from tests.fakes.array_queue import arrays, make_sweep, queued, quick, task_of
from tests.test_sweep_follow import end, followed
from tests.test_sweep_submit import begin, task  # noqa: F401 - begin is a fixture

# what cannot be written or read


def no_quota(*_, **__):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_a_disk_full_half_way_says_where_and_that_nothing_stays(begin, slurm, monkeypatch):  # noqa: F811
    sweep = begin()
    plain, written = sweep_files.write_run, []

    def write_run(*args):
        written.append(args)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(*args)

    monkeypatch.setattr(sweep_files, "write_run", write_run)
    with pytest.raises(OSError, match="No space left") as caught:
        sweep.launch([task(number) for number in range(4)])
    place = sweep.layout.root.parent
    assert f"as 4 tasks were written below `{place}`; nothing of them is left" in str(caught.value)
    assert list(place.iterdir()) == [] and slurm.calls == []


def test_a_disk_that_fails_once_they_are_there_says_that_they_are(begin, slurm, monkeypatch):  # noqa: F811
    sweep = begin()
    monkeypatch.setattr(sweep_files, "fsync_folder", no_quota)
    with pytest.raises(OSError, match="Disk quota exceeded") as caught:
        sweep.launch([task(0)])
    assert f"some are left in `{sweep.layout.root}`, and nothing is queued" in str(caught.value)
    assert sweep.layout.task(0).root.exists() and slurm.calls == []


def test_a_quota_after_slurm_has_said_yes_does_not_say_to_try_again(begin, slurm, monkeypatch):  # noqa: F811
    sweep = begin()
    monkeypatch.setattr("ftslurm.scheduler.arrays.add_job", no_quota)
    with pytest.raises(RunError, match="Disk quota exceeded") as caught:
        sweep.launch([task(0), task(1)])
    assert "0 of 2 tasks are queued, 2 more may be" in str(caught.value)
    assert f"`ftslurm resume {sweep.layout.root}`" in str(caught.value)
    assert sweep.layout.root.exists() and len(slurm.calls) == 1


def test_a_folder_that_can_no_longer_be_read_either_is_named(begin, slurm, monkeypatch):  # noqa: F811
    sweep = begin()
    monkeypatch.setattr("ftslurm.scheduler.arrays.add_job", no_quota)
    monkeypatch.setattr("ftslurm.submit.sweep.read_arrays", no_quota)
    with pytest.raises(RunError, match="do not submit them again") as caught:
        sweep.launch([task(0)])
    assert str(sweep.layout.root) in str(caught.value)


def test_a_folder_that_cannot_be_read_for_a_moment_ends_no_sweep_of_this_machine(
    tmp_path, monkeypatch
):
    layout = make_sweep(tmp_path, 2, scheduler="local")
    plain, looks = here.is_closed, []

    def at_times(layout):
        looks.append(layout)
        return plain(layout) if len(looks) % 2 else no_quota()

    monkeypatch.setattr(here, "is_closed", at_times)

    def start(run):
        write_job(run, LocalJob("local-1", "COMPLETED", 0, 1, 1))
        return "local-1"

    options = {"at_once": 1, "start": start, "queued_by": "submit", "say": print, "sleep": quick}
    assert here.run_here(layout, [0, 1], **options) == [0, 1]


# cancels that meet others


def test_a_cancel_that_meets_a_start_on_this_machine_ends_that_task_and_no_other_begins(tmp_path):
    layout = make_sweep(tmp_path, 4, scheduler="local")
    own = ProcessName.of(os.getpid())
    job, started = LocalJob("local-7", "RUNNING", 0, own.pid, own.started), []

    def start(run):
        started.append(run)
        layout.closed.touch()
        write_job(run, job)
        return "local-7"

    def later(seconds):
        for run in started:
            write_job(run, LocalJob("local-7", "CANCELLED", 0, own.pid, own.started))

    begun = here.run_here(
        layout, range(4), at_once=4, start=start, queued_by="submit", say=print, sleep=later
    )
    run = layout.task(0)
    assert begun == [0] and len(started) == 1
    assert ControlFiles(run, layout.task_id(0)).is_given(STOP) and is_requested(run, CANCEL, job)


def test_a_cancel_on_this_machine_sees_a_task_that_was_being_started(tmp_path):
    layout = make_sweep(tmp_path, 1, scheduler="local")
    own = ProcessName.of(os.getpid())
    job = LocalJob("local-7", "RUNNING", 0, own.pid, own.started)

    def meanwhile(seconds):
        if not read_jobs(layout.task(0)):
            write_job(layout.task(0), job)
            add_job(layout.task(0), "local-7", scheduler="local", queued_by="submit")
        elif is_requested(layout.task(0), CANCEL, job):
            write_job(layout.task(0), LocalJob("local-7", "CANCELLED", 0, own.pid, own.started))

    assert cancel_sweep(layout, sleep=meanwhile).result == "cancelled"


def opened(layout, *, is_taken):
    """In place of queueing(): a resume has had the lock before, or has it for too long."""

    def enter(*args, **options):
        layout.closed.unlink()
        if is_taken:
            raise RunError("another process queues tasks of it just now")
        return queueing(*args, **options)

    return enter


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_resume_that_was_starting_does_not_open_what_is_cancelled(
    tmp_path, queue, monkeypatch, is_taken
):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0])
    monkeypatch.setattr("ftslurm.operate.sweep_cancel.queueing", opened(layout, is_taken=is_taken))
    assert cancel_sweep(layout, sleep=quick).result == "cancelled"
    assert is_closed(layout)


def test_an_operators_cancel_finds_the_owners_lost_array(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 2)
    owner = layout.root.stat().st_uid + 4711
    monkeypatch.setattr("ftslurm.scheduler.lost_arrays._owner", lambda layout: owner)
    add_array(layout, ASKED, 0, [0, 1], now=lambda: time.time() - OPEN_S - 1)
    queue.put(["70_0", "70_1"], "PENDING", command=f"{layout.group_script(0)} 0")
    queue.put(["71"], "PENDING", command=str(layout.task(1).script))
    plain = queue._squeue

    def squeue(argv):
        asks_for_all = any(word.startswith("--jobs=") for word in argv)
        if asks_for_all or f"--user={owner}" in argv:
            return plain(argv)
        return queue._say(argv, out="")

    monkeypatch.setattr(queue, "_squeue", squeue)
    assert cancel_sweep(layout, sleep=quick).result == "cancelled"
    assert {word for word, _, _ in queue.jobs.values()} == {"CANCELLED"}


# room


def test_a_task_with_a_successor_takes_one_place(tmp_path, queue):
    layout = make_sweep(tmp_path, 3, parallelism=2)
    queued(layout, queue, [0])
    add_job(layout.task(0), "88", scheduler="slurm", queued_by=BY_BATCH, after="70_0")
    queue.put(["88"], "PENDING", "Dependency")
    outcome = queue_tasks(layout, read_tasks(layout)[1:2], parallelism=2)
    assert outcome.taken == [1]
    assert queue_tasks(layout, read_tasks(layout)[2:], parallelism=2).left == {2: NO_ROOM}


def test_room_that_others_leave_is_used_though_tasks_of_ours_end_all_the_time(tmp_path, queue):
    layout = make_sweep(tmp_path, 60)
    queued(layout, queue, range(5))
    others = [f"9_{number}" for number in range(15)]
    queue.put(others, "RUNNING")
    queue.limit, widest = 20, []

    def on_pause(pause):
        if pause == 10:
            queue.put(others, "COMPLETED")
        queue.start()
        mine = [name for name in queue.running if name not in others]
        widest.append(len(mine))
        for job_id in mine[: 1 if pause < 60 else None]:
            end(layout, queue, task_of(layout, job_id), job_id=job_id)

    ends, _, _ = followed(layout, on_pause)
    assert all(one.finished for one in ends) and max(widest[:60]) > 10


def test_resume_says_when_there_is_room(tmp_path, queue):
    layout = make_sweep(tmp_path, 100, parallelism=8)
    add_array(layout, QUEUED, 0, range(100), array_id="70", at_once=8)
    for number in range(100):
        add_job(layout.task(number), f"70_{number}", scheduler="slurm", queued_by="submit")
    queue.put([f"70_{number}" for number in range(3)], "FAILED")
    queue.put([f"70_{number}" for number in range(3, 100)], "RUNNING")
    answer = resume_sweep(layout, sleep=quick)
    assert not answer.ok and arrays(queue) == []
    assert "there is room once fewer than 8 of the 97 tasks of array 70 are left" in answer.text


def test_when_slurm_goes_away_after_a_task_was_queued_alone_that_is_told(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 3)
    plain = queue._scontrol
    monkeypatch.setattr(queue, "_scontrol", lambda argv: queue._say(argv, 1, err="connect failure"))
    monkeypatch.setattr(
        "ftslurm.operate.sweep_resume._excluded",
        lambda layout, task: ["n2"] if task.number == 0 else [],
    )
    answer = resume_sweep(layout, sleep=quick)
    assert answer.text.startswith("1 task is queued") and not answer.ok
    assert "2 are not queued yet" in answer.text and "connect failure" in answer.text
    monkeypatch.setattr(queue, "_scontrol", plain)
    assert [bool(read_jobs(layout.task(number))) for number in range(3)] == [True, False, False]
    with pytest.raises(SchedulerError, match="connect failure"):
        monkeypatch.setattr(
            queue, "_scontrol", lambda argv: queue._say(argv, 1, err="connect failure")
        )
        resume_sweep(layout, sleep=quick)


# a full Slurm


def test_a_full_slurm_is_asked_once_a_try_and_for_half_as_many_next_time(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 100, groups=2)
    plain = queue._sbatch

    def sbatch(argv):
        (numbers,) = [word[8:] for word in argv if word.startswith("--array=")]
        if numbers.count(",") + 1 > 30:
            return queue._say(argv, 1, err="sbatch: error: Slurm temporarily unable to accept job")
        return plain(argv)

    monkeypatch.setattr(queue, "_sbatch", sbatch)
    tasks = read_tasks(layout)
    outcome = queue_tasks(layout, tasks, parallelism=None)
    assert outcome.left == dict.fromkeys(range(100), NO_PLACE) and queue.count("sbatch") == 1
    outcome = queue_tasks(layout, tasks, parallelism=None)
    assert set(outcome.taken) == set(range(0, 100, 2)) and len(outcome.left) == 50
    outcome = queue_tasks(layout, tasks[1::2], parallelism=None)
    assert set(outcome.taken) == set(range(1, 100, 2))
    assert [word.count(",") + 1 for word in arrays(queue)] == [50, 25, 25, 50, 25, 25]


def test_once_there_is_place_again_ever_larger_arrays_are_asked_for(tmp_path, queue):
    layout = make_sweep(tmp_path, 100)
    add_event(layout, FULL, add_array(layout, ASKED, 0, [0]))
    assert len(queue_left(layout).taken) == 100
    sizes = [len(one.numbers) for one in read_arrays(layout) if one.event == QUEUED]
    assert sizes == [1, 2, 4, 8, 16, 32, 37]


def test_a_full_slurm_is_asked_no_more_after_a_task_alone_had_no_place(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 3)
    why = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    monkeypatch.setattr(queue, "_sbatch", lambda argv: queue._say(argv, 1, err=why))
    outcome = queue_tasks(layout, read_tasks(layout), parallelism=None, alone={0: ["n2"]})
    assert outcome.left == dict.fromkeys(range(3), NO_PLACE) and queue.count("sbatch") == 1


def test_a_limit_that_lasts_costs_one_question_a_try_and_what_it_lets_pass_goes_at_once(
    tmp_path, queue
):
    layout = make_sweep(tmp_path, 100, parallelism=8)
    queue.limit = 0
    queue_left(layout)
    queue.calls.clear()
    assert set(queue_left(layout).left.values()) == {AT_LIMIT} and queue.count("sbatch") == 1
    queue.limit = 1000
    queue.calls.clear()
    assert len(queue_left(layout).taken) == 100
    assert [word.partition("%")[2] for word in arrays(queue)] == ["1", "7"]


def test_a_follower_of_a_full_slurm_goes_on_looking_and_asks_once_a_minute(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 12)
    queued(layout, queue, range(6))
    full, asked_at, pauses_seen = [True], [], []
    plain = queue._sbatch

    def sbatch(argv):
        asked_at.append(len(pauses_seen))
        if full[0]:
            return queue._say(argv, 1, err="sbatch: error: Resource temporarily unavailable")
        return plain(argv)

    monkeypatch.setattr(queue, "_sbatch", sbatch)

    def on_pause(pause):
        pauses_seen.append(pause)
        if pause <= 6:
            end(layout, queue, pause - 1)
        if pause == 7:
            assert len(asked_at) == 1, "each question would take two minutes"
        if pause == 30:
            full[0] = False
        queue.start()
        for job_id in [name for name in queue.running if not name.startswith("70")]:
            end(layout, queue, task_of(layout, job_id), job_id=job_id)

    ends, _, _ = followed(layout, on_pause)
    assert all(one.finished for one in ends) and len([at for at in asked_at if at < 30]) <= 4


# ten thousand


def test_a_table_of_ten_thousand_tasks_is_made_at_once(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    seen = look(layout)
    many = tuple(
        dataclasses.replace(seen.tasks[0], number=n, overrides=(f"seed={n}",))
        for n in range(10_000)
    )
    before = time.process_time()
    assert list(render(layout, dataclasses.replace(seen, tasks=many), show_all=False))
    assert time.process_time() - before < 3
