"""What an array leaves of its share of `parallelism` as it ends is given to the others."""

import errno
import itertools

import pytest

from ftslurm.errors import SchedulerError
from ftslurm.operate.sweep_resume import resume_sweep
from ftslurm.run.sweep_record import (
    ASKED,
    QUEUED,
    WIDENED,
    WIDENING,
    ArrayRecord,
    add_array,
    read_arrays,
    unanswered,
)
from ftslurm.scheduler.slurm import Completed
from ftslurm.scheduler.throttle import run_at_once
from ftslurm.sweep.follow import follow
from ftslurm.sweep.queue import queue_left
from ftslurm.sweep.share import use_room, wider
from tests.fakes.array_queue import decide, finish, make_sweep, quick, task_of, train


def of_array(array_id, size, at_once, event=QUEUED):
    return ArrayRecord(event, 0, tuple(range(size)), 0.0, 0, array_id, at_once)


def jobs(**left):
    return [f"{name[1:]}_{n}" for name, count in left.items() for n in range(count)]


@pytest.mark.parametrize("parallelism", [1, 2, 5, 8])
def test_all_that_is_free_is_given_and_never_more(parallelism):
    for left, shares in itertools.product(
        itertools.product(range(5), repeat=3), itertools.product((1, 2), repeat=3)
    ):
        if sum(shares) > parallelism:
            continue
        arrays = [of_array(str(70 + n), 4, share) for n, share in enumerate(shares)]
        alive = jobs(**{f"j{70 + n}": count for n, count in enumerate(left)})
        given = {array.array_id: array.at_once for array in wider(parallelism, arrays, alive)}
        after = [given.get(str(70 + n), share) for n, share in enumerate(shares)]
        assert all(new >= old for new, old in zip(after, shares)), "none is lowered"
        running = sum(map(min, left, after))
        assert running == min(parallelism, sum(left)), (left, shares, after)


def test_what_may_come_yet_and_what_runs_alone_has_its_place():
    arrays = [of_array("70", 4, 1), of_array(None, 2, 2, ASKED)]
    assert wider(4, arrays, [*jobs(j70=3), "88"]) == []
    (found,) = wider(5, arrays, [*jobs(j70=3), "88"])
    assert (found.array_id, found.at_once) == ("70", 2)


def end(layout, queue, job_id):
    finish(layout, task_of(layout, job_id))
    queue.put([job_id], "COMPLETED")


def test_the_share_of_an_array_that_has_ended_is_used_to_the_end(tmp_path, queue):
    layout = make_sweep(tmp_path, 12, parallelism=4, groups=2)
    queue_left(layout)
    assert queue.at_once == {"100": 2, "101": 2}
    lines, clock, ran = [], [0.0], []

    def sleep(seconds):
        clock[0] += seconds
        assert len(ran) < 300
        queue.start()
        ran.append(len(queue.running))
        # Group 0 first, then the other, one after the other.
        for job_id in sorted(queue.running)[: 1 if len(ran) % 4 == 0 else 0]:
            end(layout, queue, job_id)

    ends = follow(layout, say=lines.append, sleep=sleep, clock=lambda: clock[0])
    assert len(ends) == 12 and all(one.finished for one in ends)
    assert max(ran) == 4
    assert queue.at_once["101"] == 4
    # One is ended every fourth pause, so eight times of twelve four are there to run.
    assert sum(count == 4 for count in ran) >= 4 * 7, ran
    assert 1 <= queue.count("scontrol", "update") <= 2, "a call where there is more to give"
    assert not [line for line in lines if "fewer" in line]


def test_a_share_of_which_slurm_may_not_have_been_told_is_told_again(tmp_path, queue):
    layout = make_sweep(tmp_path, 6, parallelism=2, groups=2)
    queue_left(layout)
    queue.put([f"100_{n}" for n in (0, 2, 4)], "COMPLETED")

    def away(array_id, at_once):
        raise SchedulerError("Unable to contact slurm controller")

    with pytest.raises(SchedulerError):
        use_room(layout, over=[0, 2, 4], tell_slurm=away)
    assert queue.at_once["101"] == 1
    assert [one.event for one in read_arrays(layout)][-1] == WIDENING
    use_room(layout, over=[0, 2, 4])
    assert queue.at_once["101"] == 2
    assert [one.event for one in read_arrays(layout)][-2:] == [WIDENING, WIDENED]
    calls = len(queue.calls)
    use_room(layout, over=[0, 2, 4])
    assert [call[0] for call in queue.calls[calls:]] == ["squeue"], "nothing more is to be told"


def test_a_follower_of_a_slurm_that_does_not_take_it_says_so_once_and_tries_again(
    tmp_path, queue, monkeypatch
):
    layout = make_sweep(tmp_path, 6, parallelism=2, groups=2)
    queue_left(layout)
    plain, lines, clock, pauses = queue._scontrol, [], [0.0], []

    def scontrol(argv):
        if len(pauses) < 30:
            return queue._say(argv, 1, err="slurm_update error: Invalid user id")
        return plain(argv)

    monkeypatch.setattr(queue, "_scontrol", scontrol)

    def sleep(seconds):
        clock[0] += seconds
        pauses.append(seconds)
        queue.start()
        if len(pauses) == 1:
            for number in (0, 2, 4):
                end(layout, queue, f"100_{number}")
        if queue.at_once["101"] == 2:
            for job_id in queue.running:
                end(layout, queue, job_id)

    follow(layout, say=lines.append, sleep=sleep, clock=lambda: clock[0])
    told = [line for line in lines if line.startswith("fewer tasks run at once than may")]
    assert len(told) == 1 and "Invalid user id" in told[0]
    assert queue.count("scontrol", "update") < 10, "once a minute"


def test_resume_gives_what_nobody_who_follows_has_given(tmp_path, queue):
    layout = make_sweep(tmp_path, 6, parallelism=2, groups=2)
    queue_left(layout)
    for number in (0, 2, 4):
        end(layout, queue, f"100_{number}")
    assert resume_sweep(layout, sleep=quick).result == "nothing"
    assert queue.at_once["101"] == 2 and queue.count("sbatch") == 2


def test_tasks_that_a_person_has_queued_again_have_their_room(tmp_path, queue):
    """Beside whoever follows the sweep, and for whom they have failed."""
    layout = make_sweep(tmp_path, 8, parallelism=4, groups=2)
    queue_left(layout)
    lines, clock, most, resumed = [], [0.0], [], []

    def sleep(seconds):
        clock[0] += seconds
        assert len(most) < 100
        if len(most) == 2:
            for number in (0, 2, 4, 6):
                decide(train(layout, number, job_id=f"100_{number}"), "stop", "rank 1 raised")
            queue.put([f"100_{number}" for number in (0, 2, 4, 6)], "FAILED")
        if any("4 failed" in line for line in lines) and not resumed:
            resumed.append(resume_sweep(layout, sleep=quick))
        queue.start()
        most.append(len(queue.running))
        for job_id in queue.running[: 1 if len(most) > 20 else 0]:
            end(layout, queue, job_id)

    ends = follow(layout, say=lines.append, sleep=sleep, clock=lambda: clock[0])
    assert resumed[0].result == "queued" and max(most) == 4
    assert [one.finished for one in ends] == [False, True] * 4


def test_of_a_cancelled_sweep_nothing_more_is_started(tmp_path, queue):
    layout = make_sweep(tmp_path, 6, parallelism=2, groups=2)
    queue_left(layout)
    layout.closed.touch()
    use_room(layout, over=[0, 2, 4])
    assert queue.at_once["101"] == 1 and queue.count("scontrol", "update") == 0


def test_what_a_resume_has_queued_is_told_though_the_sweep_can_no_longer_be_read(
    tmp_path, queue, monkeypatch, capsys
):
    layout = make_sweep(tmp_path, 2, parallelism=2)

    def stale(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("ftslurm.operate.sweep_resume.use_room", stale)
    assert resume_sweep(layout, sleep=quick).text.startswith("2 tasks are queued")
    assert "Stale file handle" in capsys.readouterr().err


def test_a_raised_share_answers_nothing_that_was_asked(tmp_path):
    layout = make_sweep(tmp_path, 2)
    add_array(layout, QUEUED, 0, [0, 1], array_id="70", at_once=1)
    add_array(layout, ASKED, 0, [0, 1])
    add_array(layout, WIDENED, 0, [0, 1], array_id="70", at_once=2)
    assert [one.event for one in unanswered(read_arrays(layout))] == [ASKED]


@pytest.mark.parametrize(
    ("rc", "said", "refused"),
    [
        (0, "", ""),
        # 22.05.8: two of eight tasks are over
        (1, "1_0-1: Job has already finished\n1_2-7: No error\n", ""),
        # 24.11.5 and 26.05.0
        (1, "1_[0-1]: Job has already finished\n", ""),
        (1, "Invalid job id specified for job 999999\n", "Invalid job id"),
        (1, "1_[0-7]: Invalid user id\n", "Invalid user id"),
        (1, "1_[0-1]: Job has already finished\n1_[2-7]: Invalid user id\n", "Invalid user id"),
        (1, "slurm_update error: Unable to contact slurm controller (connect failure)", "contact"),
        (1, "", "it printed nothing"),
    ],
)
def test_that_some_tasks_of_an_array_are_over_is_no_failure(rc, said, refused):
    asked = []

    def run(argv, timeout_s):
        asked.append(argv)
        return Completed(rc, "", said)

    if refused:
        with pytest.raises(SchedulerError, match=refused):
            run_at_once("1", 4, run=run)
    else:
        run_at_once("1", 4, run=run)
    assert asked == [["scontrol", "update", "jobid=1", "ArrayTaskThrottle=4"]]
