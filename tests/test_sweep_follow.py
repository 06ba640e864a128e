"""Following a sweep: how its tasks end, what is said, what is queued on the way, at what price."""

import pytest

from ftslurm.run.jobs import BY_BATCH, BY_PERSON, add_job, read_jobs
from ftslurm.run.sweep_lock import queueing
from ftslurm.run.sweep_record import ASKED, add_array
from ftslurm.sweep.follow import follow
from tests.fakes.array_queue import decide, finish, make_sweep, queued, task_of, train


def followed(layout, on_pause, **options):
    """(ends, lines, pauses)"""
    lines, pauses, clock = [], [], [0.0]

    def sleep(seconds):
        pauses.append(seconds)
        clock[0] += seconds
        assert len(pauses) < 500
        on_pause(len(pauses))

    options.update(sleep=sleep, clock=lambda: clock[0])
    return follow(layout, say=lines.append, **options), lines, pauses


def nothing(pause):
    pass


def end(layout, queue, number, job_id=None):
    finish(layout, number)
    queue.put([job_id or f"70_{number}"], "COMPLETED")


def test_a_sweep_is_followed_to_the_end_of_each_task(tmp_path, queue):
    layout = make_sweep(tmp_path, 3)
    queued(layout, queue, range(3))

    def on_pause(pause):
        if pause == 1:
            end(layout, queue, 0)
        if pause == 2:
            decide(train(layout, 2), "stop", "rank 1 raised ValueError")
            queue.put(["70_2"], "FAILED")
        if pause == 6:
            end(layout, queue, 1)

    ends, lines, _ = followed(layout, on_pause)
    assert [(one.number, one.finished, one.attempts) for one in ends] == [
        (0, True, 1),
        (1, True, 1),
        (2, False, 1),
    ]
    assert "rank 1 raised ValueError" in ends[2].text
    assert lines[0] == "0 of 3 done, 3 running, 0 waiting, 0 failed"
    assert "1 of 3 done, 2 running, 0 waiting, 0 failed" in lines
    assert lines[-1] == "2 of 3 done, 0 running, 0 waiting, 1 failed"
    (told,) = [line for line in lines if line.startswith("task 2 (seed=2)")]
    assert "ValueError" in told and "sweep-1-0002/attempts/0001/logs" in told


def test_a_question_is_one_for_all_tasks_and_they_grow_rare(tmp_path, queue):
    layout = make_sweep(tmp_path, 5)
    queued(layout, queue, range(5))
    waited = []

    def on_pause(pause):
        waited.append(len(queue.calls))
        if len(waited) == 200:
            for number in range(5):
                end(layout, queue, number)

    _, lines, pauses = followed(layout, on_pause)
    assert len(queue.calls) == queue.count("squeue") <= 20 and sum(pauses) > 300
    assert waited[-1] == len(queue.calls), "that they are DONE their folders have said"
    assert len(lines) == 2


def test_only_the_tasks_that_were_named_are_waited_for(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, range(2))
    end(layout, queue, 1)
    ends, _, _ = followed(layout, nothing, numbers=[1])
    assert [one.number for one in ends] == [1]


def test_a_preempted_task_is_not_over_though_slurm_calls_it_so_for_a_moment(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])

    def on_pause(pause):
        if pause == 1:
            decide(train(layout, 0), "requeued", "stopped on SIGUSR1")
            queue.put(["70_0"], "PREEMPTED")
        if pause == 2:
            queue.put(["70_0"], "PENDING", "BeginTime")
        if pause == 5:
            end(layout, queue, 0)

    ends, lines, _ = followed(layout, on_pause)
    assert ends[0].finished and ends[0].attempts == 2
    assert queue.count("scontrol", "update", "jobid=70_0") == 1, "hastened once"
    assert not [line for line in lines if line.startswith("task")]


def test_a_first_wait_is_not_hastened(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="PENDING", reason="BeginTime")
    followed(layout, lambda pause: pause == 3 and end(layout, queue, 0))
    assert queue.count("scontrol") == 0


def test_a_start_time_of_a_resumed_task_is_left_as_it_is(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="FAILED")
    decide(train(layout, 0), "stop", "rank 1 raised ValueError")
    add_job(layout.task(0), "90", scheduler="slurm", queued_by=BY_PERSON)
    queue.put(["90"], "PENDING", "BeginTime")
    followed(layout, lambda pause: pause == 5 and end(layout, queue, 0, job_id="90"))
    assert queue.count("scontrol") == 0


def test_a_task_that_was_preempted_while_slurm_did_not_answer_is_not_over(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])

    def on_pause(pause):
        if pause == 1:
            decide(train(layout, 0), "requeued", "stopped on SIGUSR1")
            queue.put(["70_0"], "PREEMPTED")
        if pause == 3:
            queue.is_away = True
        if pause == 8:
            queue.is_away = False
            queue.put(["70_0"], "PENDING", "Priority")
        if pause == 15:
            end(layout, queue, 0)

    ends, lines, _ = followed(layout, on_pause)
    assert ends[0].finished and not [line for line in lines if line.startswith("task")]


def test_the_successor_of_a_task_is_followed(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])

    def on_pause(pause):
        if pause == 1:
            decide(train(layout, 0), "requeued", "time limit is near")
            queue.put(["70_0"], "COMPLETED")
            add_job(layout.task(0), "88", scheduler="slurm", queued_by=BY_BATCH)
            queue.put(["88"], "PENDING", "Priority")
        if pause == 4:
            end(layout, queue, 0, job_id="88")

    ends, _, _ = followed(layout, on_pause)
    assert ends[0].finished and ends[0].attempts == 2


@pytest.mark.parametrize(
    ("parallelism", "limit", "groups"), [(None, 2, 1), (2, 2, 1), (2, 9, 3), (1, 3, 2), (4, 3, 2)]
)
def test_what_was_left_is_queued_as_tasks_end_and_parallelism_kept(
    tmp_path, queue, parallelism, limit, groups
):
    layout = make_sweep(tmp_path, 12, parallelism=parallelism, groups=groups)
    queue.limit = limit

    def on_pause(pause):
        queue.start()
        assert len(queue.running) <= (parallelism or limit)
        for job_id in queue.running[: 1 + pause % 2]:
            end(layout, queue, task_of(layout, job_id), job_id=job_id)

    ends, lines, pauses = followed(layout, on_pause)
    assert len(ends) == 12 and all(one.finished for one in ends)
    assert all(len(read_jobs(layout.task(number))) == 1 for number in range(12))
    left = [line for line in lines if line.startswith("some tasks are not queued yet")]
    assert len(left) == len(set(left)) > 0, "each reason is said once"
    assert sum(pauses) < 400, "it does not wait for its minute when a task has ended"


def test_of_what_has_no_room_nothing_is_asked(tmp_path, queue):
    layout = make_sweep(tmp_path, 4, parallelism=1)
    queued(layout, queue, [0, 1])

    def on_pause(pause):
        if pause == 60:
            assert queue.count("sbatch") == 0
            end(layout, queue, 0)
            end(layout, queue, 1)
        if pause == 80:
            assert queue.count("sbatch") == 1
            for number in (2, 3):
                end(layout, queue, number, job_id=read_jobs(layout.task(number))[0].job_id)

    ends, _, pauses = followed(layout, on_pause)
    assert len(ends) == 4 and sum(pauses[:60]) > 100
    assert queue.count("scontrol") == 1, "what arrays may be like is asked where there is room"


def test_tasks_that_end_while_there_is_no_room_cost_no_further_questions(tmp_path, queue):
    layout = make_sweep(tmp_path, 32, parallelism=1)
    queued(layout, queue, range(30))

    def on_pause(pause):
        if pause <= 30:
            end(layout, queue, pause - 1)
        if pause == 30:
            assert queue.count("sbatch") == 0 and queue.count("squeue") < 15
        if pause == 60:
            for number in (30, 31):
                end(layout, queue, number, job_id=read_jobs(layout.task(number))[0].job_id)

    ends, _, _ = followed(layout, on_pause)
    assert len(ends) == 32


def test_what_somebody_else_is_queueing_is_left_to_him(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 1)

    def taken(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("ftslurm.run.sweep_lock.fcntl.lockf", taken)
    monkeypatch.setattr("ftslurm.run.sweep_lock.PASSING_S", 0.0)

    def on_pause(pause):
        if pause == 2:
            queued(layout, queue, [0])
            end(layout, queue, 0)

    ends, lines, _ = followed(layout, on_pause)
    assert ends[0].finished and queue.count("sbatch") == 0
    assert any("another process queues" in line for line in lines)


def test_a_script_that_slurm_refuses_ends_its_tasks(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 2)
    why = "sbatch: error: invalid partition specified: nope"
    monkeypatch.setattr(queue, "_sbatch", lambda argv: queue._say(argv, 1, err=why))
    ends, _, _ = followed(layout, nothing)
    assert [one.finished for one in ends] == [False, False]
    assert "invalid partition" in ends[0].text


def test_a_group_that_slurm_refuses_ends_its_own_tasks_only(tmp_path, queue):
    layout = make_sweep(tmp_path, 4, groups=2)
    queue.refuse(0, "sbatch: error: invalid partition specified: nope")

    def on_pause(pause):
        for number in (1, 3):
            end(layout, queue, number, job_id=f"100_{number}")

    ends, lines, _ = followed(layout, on_pause)
    assert [one.finished for one in ends] == [False, True, False, True]
    assert ends[2].text.startswith("was not queued: ") and "invalid partition" in ends[2].text
    assert queue.count("sbatch") == 2, "what is refused is not asked for again"


def test_what_was_refused_at_submit_has_ended_for_the_follower(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0])
    end(layout, queue, 0)
    ends, lines, _ = followed(layout, nothing, refused={1: "no such partition"})
    assert [(one.finished, one.text) for one in ends][1] == (
        False,
        "was not queued: no such partition",
    )
    assert queue.count("sbatch") == 0 and any("no such partition" in line for line in lines)


def test_a_controller_that_is_away_ends_nothing(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    train(layout, 0)

    def on_pause(pause):
        queue.is_away = 1 <= pause < 40
        if pause == 41:
            end(layout, queue, 0)

    ends, _, pauses = followed(layout, on_pause)
    assert ends[0].finished and sum(pauses) > 200


def test_a_job_nobody_knows_is_given_up(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    queue.jobs.clear()
    ends, _, pauses = followed(layout, nothing)
    assert not ends[0].finished and "out of sight" in ends[0].text
    assert 900 <= sum(pauses) < 1000


def test_a_cancelled_sweep_ends_for_its_follower_too(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0])

    def on_pause(pause):
        layout.closed.touch()
        queue.put(["70_0"], "CANCELLED")

    layout.task(1).run_json.unlink()  # so that it is never queued
    ends, _, _ = followed(layout, on_pause)
    assert [one.finished for one in ends] == [False, False]
    assert "cancelled" in ends[1].text and queue.count("sbatch") == 0


def test_an_interrupt_says_how_to_look_later(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0])
    queue.limit = 1
    lines = []

    def interrupt(seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(layout, say=lines.append, sleep=interrupt)
    assert lines[-2] == f"detached, the sweep goes on: ftslurm status {layout.root}"
    assert lines[-1] == f"1 task not queued yet: ftslurm resume {layout.root}"


def test_an_answer_that_was_lost_is_found_before_anything_is_queued(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    add_array(layout, ASKED, 0, [0, 1])
    queue.put(["70_0", "70_1"], "RUNNING", command=f"{layout.group_script(0)} 0")

    def on_pause(pause):
        for number in range(2):
            end(layout, queue, number)

    with queueing(layout):
        pass
    ends, _, _ = followed(layout, on_pause)
    assert all(one.finished for one in ends) and queue.count("sbatch") == 0
