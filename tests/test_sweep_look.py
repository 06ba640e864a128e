"""Where the tasks of a sweep stand, by one question to the scheduler."""

import os
import subprocess
import time

import pytest

from ftslurm.files import write_json
from ftslurm.run.acts import note_act
from ftslurm.run.attempts import Progress, write_progress
from ftslurm.run.jobs import BY_BATCH, BY_PERSON, add_job
from ftslurm.run.sweep_record import ASKED, add_array
from ftslurm.scheduler.local_state import LocalJob, write_job
from ftslurm.scheduler.process import ProcessName
from ftslurm.scheduler.protocol import JobState
from ftslurm.scheduler.slurm import Completed, SlurmScheduler
from ftslurm.sweep.look import look
from tests.fakes.array_queue import decide, finish, make_sweep, queued, train


def states(layout):
    return {task.number: task.state for task in look(layout).tasks}


def scheduler(rc, out, err=""):
    seen = []

    def run(argv, timeout_s):
        seen.append(argv)
        return Completed(rc, out, err)

    return SlurmScheduler(run), seen


def test_many_jobs_are_one_question_by_the_numbers_of_their_arrays():
    asked, seen = scheduler(
        0, "70_0|RUNNING|None|N/A\n70_1|PENDING|JobArrayTaskLimit|N/A\n9|COMPLETED|None|N/A\n"
    )
    states = asked.job_states(["70_0", "70_1", "70_2", "9"])
    assert states["70_1"] == JobState("PENDING", "JobArrayTaskLimit")
    assert states["9"].is_ended and states["70_2"].is_forgotten
    (argv,) = seen
    assert "--jobs=70,9" in argv and "--array" in argv and "--all" in argv


def test_tasks_told_together_do_not_pass_for_forgotten_ones():
    asked, _ = scheduler(0, "70_[1,3,5...%4]|PENDING|Priority|N/A\n70_0|COMPLETED|None|N/A\n")
    states = asked.job_states(["70_0", "70_7", "71_0"])
    assert states["70_0"].is_ended and states["70_7"].is_waiting and states["71_0"].is_forgotten


@pytest.mark.parametrize(
    "said, forgotten",
    [("slurm_load_jobs error: Invalid job id specified", True), ("Unable to contact", False)],
)
def test_a_question_that_fails_is_no_end_unless_slurm_has_forgotten(said, forgotten):
    asked, _ = scheduler(1, "", said)
    assert asked.job_states(["70_0"])["70_0"].is_forgotten is forgotten


def test_nothing_is_asked_of_no_jobs():
    asked, seen = scheduler(0, "")
    assert asked.job_states([]) == {} and seen == []


def test_each_task_is_told_by_what_its_folder_and_its_job_say(tmp_path, queue):
    layout = make_sweep(tmp_path, 10)
    queued(layout, queue, range(9))
    finish(layout, 0, value=[0.1, "x"])
    train(layout, 1)
    queue.put(["70_2"], "PENDING", "Resources")
    queue.put(["70_3"], "PENDING", "JobHeldUser")
    decide(train(layout, 4), "paused")
    queue.put(["70_4"], "PENDING", "JobHeldUser")
    decide(train(layout, 5), "stop", "rank 3 raised MemoryError")
    queue.put(["70_5"], "FAILED")
    decide(train(layout, 6), "ended", "stopped by order")
    queue.put(["70_6"], "COMPLETED")
    queue.put(["70_7"], "CANCELLED")
    queue.put(["70_8"], "OUT_OF_MEMORY")
    seen = look(layout)
    assert [task.state for task in seen.tasks] == [
        "done", "running", "waiting", "held", "paused", "failed", "stopped", "cancelled", "failed",
        "not queued",
    ]  # fmt: skip
    done, running, failed = seen.tasks[0], seen.tasks[1], seen.tasks[5]
    assert done.value == [0.1, "x"] and (done.step, done.steps) == (100, 100)
    assert (running.step, running.committed_step, running.attempts) == (47, 40, 1)
    assert failed.reason == "rank 3 raised MemoryError"
    assert failed.log == "sweep-1-0005/attempts/0001/logs"
    assert "OUT_OF_MEMORY" in seen.tasks[8].reason
    assert seen.tasks[8].log == "sweep-1-0008/submit/70_8.out"
    assert queue.count("squeue") == 1


def test_an_ended_job_is_passed_by_the_successor_that_the_batch_loop_queued(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="COMPLETED")
    decide(train(layout, 0), "requeued", "stopped on SIGUSR1")
    add_job(layout.task(0), "88", scheduler="slurm", queued_by=BY_BATCH, after="70_0")
    queue.put(["88"], "PENDING", "Priority")
    (task,) = look(layout).tasks
    assert (task.state, task.job_id, task.alive) == ("waiting", "88", ("88",))


def test_a_successor_that_waits_is_alive_beside_the_job_that_runs(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    train(layout, 0)
    add_job(layout.task(0), "88", scheduler="slurm", queued_by=BY_BATCH, after="70_0")
    queue.put(["88"], "PENDING", "Dependency")
    (task,) = look(layout).tasks
    assert (task.state, task.job_id, task.alive) == ("running", "70_0", ("88", "70_0"))


def test_a_successor_that_is_queued_while_slurm_is_asked_is_seen(tmp_path, queue, monkeypatch):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0, 1], word="COMPLETED")
    queue.put(["70_1"], "RUNNING")
    decide(train(layout, 0), "requeued", "stopped on SIGUSR1")

    def ask(argv, **options):
        answer = queue(argv, **options)
        if queue.count("squeue") == 1:
            add_job(layout.task(0), "88", scheduler="slurm", queued_by=BY_BATCH, after="70_0")
            queue.put(["88"], "PENDING", "Priority")
        return answer

    monkeypatch.setattr(subprocess, "run", ask)
    task, beside = look(layout).tasks
    assert (task.state, task.job_id, task.alive) == ("waiting", "88", ("88",))
    assert beside.state == "running"
    assert len(queue.calls) == queue.count("squeue") == 2


def look_at_one(tmp_path, queue, *, word="COMPLETED", later=()):
    """A task whose job has trained and was asked to go on in the jobs that came `later`."""
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word=word)
    decide(train(layout, 0), "requeued", "stopped on SIGUSR1")
    for job_id, job_word, by in later:
        after = "70_0" if by == BY_BATCH else None
        add_job(layout.task(0), job_id, scheduler="slurm", queued_by=by, after=after)
        queue.put([job_id], job_word)
    (task,) = look(layout).tasks
    return task


def test_a_task_is_alive_though_the_newest_of_its_jobs_is_not(tmp_path, queue):
    later = [("88", "PENDING", BY_BATCH), ("89", "CANCELLED", BY_BATCH)]
    task = look_at_one(tmp_path, queue, later=later)
    assert (task.state, task.job_id, task.alive) == ("waiting", "88", ("88",))


def test_a_successor_in_a_state_that_is_not_known_here_does_not_pass_for_over(tmp_path, queue):
    task = look_at_one(tmp_path, queue, later=[("88", "HIBERNATED", BY_BATCH)])
    assert (task.state, task.job_id, task.alive) == ("unknown", "88", ("88",))


def test_a_task_whose_successor_a_person_has_cancelled_was_cancelled(tmp_path, queue):
    task = look_at_one(tmp_path, queue, later=[("88", "CANCELLED", BY_BATCH)])
    assert (task.state, task.job_id) == ("cancelled", "88")


def test_a_task_that_was_begun_by_a_job_nobody_wrote_down_is_alive(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0], word="COMPLETED")
    for number, job_id in enumerate(["90", "91"]):
        train(layout, number, job_id=job_id)
        queue.put([job_id], "RUNNING")
    tasks = look(layout).tasks
    assert [(task.state, task.job_id, task.alive) for task in tasks] == [
        ("running", "90", ("90",)),
        ("running", "91", ("91",)),
    ]


def test_what_stopped_a_task_once_is_not_said_of_the_job_it_was_resumed_in(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0, 1], word="FAILED")
    for number, word in enumerate(["CANCELLED", "TIMEOUT"]):
        decide(train(layout, number), "stop", "rank 1 raised ValueError")
        job_id = f"9{number}"
        add_job(layout.task(number), job_id, scheduler="slurm", queued_by=BY_PERSON)
        queue.put([job_id], word)
    one, two = look(layout).tasks
    assert one.state == "cancelled" and two.state == "failed" and "TIMEOUT" in two.reason


def test_a_task_that_slurm_holds_in_place_of_failing_it_says_why_it_failed(tmp_path, queue):
    """As 24.11 and later do with --requeue=expedite."""
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0], word="REQUEUE_HOLD", reason="job requeued in held state")
    decide(train(layout, 0), "stop", "rank 1 raised ValueError")
    (task,) = look(layout).tasks
    assert (task.state, task.reason) == ("held", "rank 1 raised ValueError")


def test_on_this_machine_a_task_is_resumed_in_its_newest_job_before_that_has_begun(tmp_path):
    layout = make_sweep(tmp_path, 1, scheduler="local")
    own = ProcessName.of(os.getpid())
    decide(train(layout, 0, job_id="local-1"), "ended", "stopped by order")
    for job_id in ("local-1", "local-2"):
        add_job(layout.task(0), job_id, scheduler="local", queued_by=BY_PERSON)
    write_job(layout.task(0), LocalJob("local-2", "RUNNING", 0, own.pid, own.started))
    (task,) = look(layout).tasks
    assert (task.state, task.job_id, task.alive) == ("running", "local-2", ("local-2",))
    write_job(layout.task(0), LocalJob("local-2", "FAILED", 0, own.pid, own.started))
    (task,) = look(layout).tasks
    assert (task.state, task.alive) == ("failed", ())


def test_where_nobody_can_say_nothing_passes_for_over(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0])
    add_array(layout, ASKED, 0, [1])
    queue.is_away = True
    assert states(layout) == {0: "unknown", 1: "unknown"}
    assert "no answer is on record" in look(layout).tasks[1].reason


def test_a_task_that_was_cancelled_by_hand_is_told_so_when_slurm_has_forgotten_it(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    queue.jobs.clear()
    note_act(layout.task(0), "cancel", "cancelled", "70_0")
    assert states(layout) == {0: "cancelled"}


def test_a_damaged_decision_of_a_task_ends_no_look(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    queued(layout, queue, [0])
    (train(layout, 0).root / "decision.json").write_text("{")
    assert states(layout) == {0: "running"}


def test_a_task_whose_folder_was_cut_off_is_to_be_submitted_anew(tmp_path, queue):
    layout = make_sweep(tmp_path, 1)
    layout.task(0).run_json.unlink()
    (task,) = look(layout).tasks
    assert task.state == "not queued" and "anew" in task.reason


def test_a_task_whose_resume_was_killed_may_be_alive_whatever_its_old_job_came_to(tmp_path, queue):
    layout = make_sweep(tmp_path, 2)
    queued(layout, queue, [0, 1], word="FAILED")
    queue.put(["70_1"], "RUNNING")
    add_array(layout, ASKED, 0, [0, 1])
    assert states(layout) == {0: "unknown", 1: "running"}


def test_a_thousand_tasks_are_told_in_seconds(tmp_path, queue):
    layout = make_sweep(tmp_path, 1000)
    queued(layout, queue, range(1000))
    for number in range(1000):
        paths = layout.task(number).attempt(1)
        paths.logs.mkdir(parents=True)
        write_progress(paths, Progress(step=47, steps=100))
        attempt = {"schema_version": 1, "number": 1, "job_id": f"70_{number}", "restart_count": 0}
        attempt |= {"nodes": ["n1"], "claimed_at": 0.0, "adopted": []}
        write_json(paths.attempt_json, attempt, durable=False)
        if number % 2:
            write_json(layout.task(number).done, {"schema_version": 1}, durable=False)
    cpu = time.process_time()
    seen = look(layout)
    assert seen.counts["done"] == 500 and seen.counts["running"] == 500
    assert queue.count("squeue") == 1
    # Wall time is the machine's as well, which other tests share.
    assert time.process_time() - cpu < 3
