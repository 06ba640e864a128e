"""What Slurm refuses of a sweep: in passing, for good, or because of a limit."""

import pytest

from ftslurm.operate.sweep_resume import resume_sweep
from ftslurm.run.jobs import BY_SUBMIT, add_job
from ftslurm.run.sweep_record import LEFT, QUEUED, add_array, read_tasks
from ftslurm.scheduler.arrays import AT_LIMIT, IN_PASSING_S, Outcome, submit_groups
from ftslurm.scheduler.sbatch import NotReachedError
from ftslurm.sweep.follow import follow
from ftslurm.sweep.queue import queue_left
from tests.fakes.array_queue import make_sweep, queued, task_of
from tests.test_sweep_follow import end, followed


def test_what_slurm_refuses_for_a_while_is_queued_later(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 20)
    queue.limit = 4
    plain, is_drained = queue._sbatch, [False]

    def sbatch(argv):
        if is_drained[0]:
            return queue._say(argv, 1, err="Required partition not available (inactive or drain)")
        return plain(argv)

    def on_pause(pause):
        is_drained[0] = 30 < pause < 300
        queue.start()
        if pause % 5 == 0:
            for job_id in queue.running[:1]:
                end(layout, queue, task_of(layout, job_id), job_id=job_id)

    monkeypatch.setattr(queue, "_sbatch", sbatch)
    ends, lines, _ = followed(layout, on_pause)
    assert all(one.finished for one in ends)
    (told,) = [line for line in lines if "Slurm refuses it just now" in line]
    assert "Required partition not available" in told


def test_what_slurm_refuses_for_good_ends_with_a_sentence_an_hour_later(
    tmp_path, queue, monkeypatch
):
    """Of group 0 all is queued; of group 1 a task runs, and its partition is taken away."""
    layout = make_sweep(tmp_path, 6, groups=2)
    at, plain, pauses = [1_000_000.0], queue._sbatch, []
    monkeypatch.setattr("time.time", lambda: at[0])
    queued(layout, queue, [0, 2, 4])
    add_array(layout, QUEUED, 1, [1], array_id="71", now=lambda: at[0])
    add_job(layout.task(1), "71_1", scheduler="slurm", queued_by=BY_SUBMIT)
    queue.put(["71_1"], "RUNNING")
    add_array(layout, LEFT, 1, [3, 5], now=lambda: at[0] - 10 * IN_PASSING_S)
    queue.refuse(1, "Batch job submission failed: Invalid partition name specified")

    def sleep(seconds):
        at[0] += seconds
        pauses.append(seconds)
        assert sum(pauses) < 2 * IN_PASSING_S
        if sum(pauses) > 60:
            for number, job_id in [(0, "70_0"), (1, "71_1"), (2, "70_2"), (4, "70_4")]:
                if queue.jobs[job_id][0] == "RUNNING":
                    end(layout, queue, number, job_id=job_id)

    lines = []
    ends = follow(layout, say=lines.append, sleep=sleep, clock=lambda: at[0])
    assert [one.number for one in ends if not one.finished] == [3, 5]
    assert ends[3].text.startswith("was not queued: Slurm has refused it since ")
    assert "Invalid partition name" in ends[3].text
    assert IN_PASSING_S <= sum(pauses) < IN_PASSING_S + 120
    told = [line for line in lines if line.startswith("some tasks are not queued yet")]
    assert len(told) == 1, "said once while it may pass"
    # A person who has mended it queues them.
    monkeypatch.setattr(queue, "_sbatch", plain)
    assert resume_sweep(layout, sleep=lambda seconds: None).text.startswith("2 tasks are queued")


@pytest.mark.parametrize(("gap_s", "is_final"), [(60.0, True), (3000.0, False)])
def test_refusals_that_lie_far_apart_are_none_that_lasts(
    tmp_path, queue, monkeypatch, gap_s, is_final
):
    """Between them nobody asked: there was no room, or a person came back days later."""
    layout = make_sweep(tmp_path, 2)
    add_array(layout, QUEUED, 0, [0], array_id="70", now=lambda: 1000.0)
    queue.refuse(0, "Required partition not available (inactive or drain)")
    at = 1000.0
    while at < 1000.0 + 2 * IN_PASSING_S:
        at += gap_s
        monkeypatch.setattr("time.time", lambda now=at: now)
        outcome = queue_left(layout, [1])
    assert bool(outcome.refused) is is_final and bool(outcome.left) is not is_final


def not_reached(arguments):
    raise NotReachedError("connect failure")


def test_a_limit_that_lasts_is_no_refusal(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 2)
    add_array(layout, QUEUED, 0, [0], array_id="70")
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 1000.0)
        queue.limit = 0
        assert queue_left(layout).left == dict.fromkeys([0, 1], AT_LIMIT)
        with pytest.raises(NotReachedError):
            submit_groups(
                layout, read_tasks(layout), room=None, outcome=Outcome(), sbatch=not_reached
            )
    queue.refuse(0, "Invalid qos specification")
    left = queue_left(layout).left
    assert list(left) == [0, 1] and "refuses it just now" in left[0]


def test_tasks_that_are_refused_leave_no_room(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 4, groups=2)
    queued(layout, queue, [0])
    queue.limit, plain = 1, queue._sbatch

    def sbatch(argv):
        if "group-001" in argv[-2]:
            return queue._say(argv, 1, err="sbatch: error: invalid partition specified: nope")
        return plain(argv)

    def on_pause(pause):
        if pause == 4:
            assert queue.count("sbatch") == 2, "one a group: nothing of ours has ended"
            queue.limit = 2
            end(layout, queue, 0)
        if pause == 8:
            end(layout, queue, 2, job_id="100_2")

    monkeypatch.setattr(queue, "_sbatch", sbatch)
    ends, _, _ = followed(layout, on_pause)
    assert [one.finished for one in ends] == [True, False, True, False]
