"""Following a run that has one job after the other: which is watched, and which end is told."""

import time

from fakes.followed import RUNNING, Jobs, attempt, decide, followed, queue_job

from ftslurm.files import write_json
from ftslurm.run.attempts import Attempt, claim
from ftslurm.run.jobs import BY_PERSON, BY_SUBMIT
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import JobState


def test_the_next_job_is_watched_when_the_one_before_has_ended(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    queue_job(tmp_path, "8", after="7")
    decide(attempt(tmp_path, step=20), "requeued", "stopped")
    waiting = JobState("PENDING", "Dependency")
    states = [
        ("7", [RUNNING, RUNNING, JobState("COMPLETED")]),
        ("8", [waiting, waiting, JobState("PENDING", "Resources"), RUNNING, JobState("FAILED")]),
    ]
    end, said, _, _ = followed(tmp_path, states, kind=Jobs)
    assert "job FAILED" in end.text
    assert said.index("the run goes on in job 8") < said.index("job is PENDING (Resources)")
    assert "job is PENDING (Dependency)" not in said


def test_a_successor_that_was_cancelled_with_the_run_is_no_news(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    queue_job(tmp_path, "8", after="7")
    decide(attempt(tmp_path, step=20), "ended", "stopped by the order `stop`")
    states = [("7", [JobState("COMPLETED")]), ("8", [JobState("CANCELLED")])]
    end, said, pauses, _ = followed(tmp_path, states, kind=Jobs)
    assert "by the order `stop`" in end.text and sum(pauses) <= 2
    assert not any("goes on" in line for line in said)


def test_a_successor_that_was_cancelled_by_a_person_is_how_the_run_ended(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    queue_job(tmp_path, "8", after="7")
    decide(attempt(tmp_path, step=20), "requeued", "stopped on SIGUSR1")
    states = [("7", [JobState("COMPLETED")]), ("8", [JobState("CANCELLED")])]
    end, _, pauses, _ = followed(tmp_path, states, kind=Jobs)
    assert "job CANCELLED" in end.text and sum(pauses) <= 2


def test_a_successor_that_began_and_queued_its_own_between_two_looks_is_the_one_watched(tmp_path):
    """A look is 15 s after the last one: time for a job to end and for two to come."""
    queue_job(tmp_path, "7", BY_SUBMIT)
    queue_job(tmp_path, "8", after="7")
    decide(attempt(tmp_path, step=20), "requeued", "stopped on SIGUSR1")

    def begin(pause):
        if pause == 2:
            queue_job(tmp_path, "9", after="8")
            claim(RunLayout(tmp_path), Attempt(0, "8", 0, ["n1"], time.time()))

    behind = JobState("PENDING", "Dependency")
    states = [
        ("7", [RUNNING, RUNNING, JobState("COMPLETED")]),
        ("8", [behind, behind, RUNNING, RUNNING, JobState("FAILED")]),
        ("9", [behind, behind, JobState("CANCELLED")]),
    ]
    _, said, _, _ = followed(tmp_path, states, kind=Jobs, on_pause=begin)
    assert "the run goes on in job 8" in said
    assert not [line for line in said if "PENDING" in line or "job 9" in line]


def test_a_resumed_run_does_not_end_with_the_old_reason_while_slurm_is_away(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    decide(attempt(tmp_path, step=20), "stop", "rank 1 raised ValueError")
    queue_job(tmp_path, "9", BY_PERSON)
    away = JobState("UNKNOWN", "Unable to contact slurm controller")
    states = [
        ("7", [JobState("FAILED")]),
        ("9", [JobState("PENDING", "Resources"), away, away, away, RUNNING, JobState("TIMEOUT")]),
    ]
    end, said, _, _ = followed(tmp_path, states, kind=Jobs)
    assert "job is RUNNING" in said and "job TIMEOUT" in end.text
    assert "ValueError" not in end.text


def test_a_successor_that_slurm_has_forgotten_keeps_nobody_waiting(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    queue_job(tmp_path, "8", after="7")
    decide(attempt(tmp_path, step=20), "requeued", "stopped on SIGUSR1")
    forgotten = JobState("UNKNOWN", "Invalid job id specified")
    states = [("7", [JobState("FAILED")]), ("8", [forgotten])]
    end, _, pauses, _ = followed(tmp_path, states, kind=Jobs)
    assert "job FAILED" in end.text and sum(pauses) <= 2


def test_a_run_resumed_by_a_person_is_watched_on_in_its_new_job(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    decide(attempt(tmp_path, step=20), "stop", "it failed")
    queue_job(tmp_path, "9", BY_PERSON)
    forgotten = JobState("UNKNOWN", "Invalid job id specified")
    states = [("7", [forgotten]), ("9", [RUNNING, JobState("CANCELLED")])]
    _, said, _, _ = followed(tmp_path, states, kind=Jobs)
    assert said[0] == "job is RUNNING"


AWAY = JobState("UNKNOWN", "Unable to contact slurm controller")
FORGOTTEN = JobState("UNKNOWN", "Invalid job id specified")


def test_the_end_of_one_job_is_not_believed_of_the_next_while_slurm_is_away(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    decide(attempt(tmp_path, step=20), "requeued", "stopped on SIGUSR1")
    states = [
        ("7", [RUNNING, JobState("FAILED")]),
        ("8", [AWAY, AWAY, RUNNING, JobState("TIMEOUT")]),
    ]

    def queue(pause):
        if pause == 2:
            queue_job(tmp_path, "8", after="7")

    end, said, _, _ = followed(tmp_path, states, kind=Jobs, on_pause=queue)
    assert "job TIMEOUT" in end.text and "job is TIMEOUT" in said


def test_a_second_job_is_looked_at_twice_like_the_first(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    decide(attempt(tmp_path, step=20), "requeued", "stopped on SIGUSR1")
    states = [("7", [JobState("COMPLETED")]), ("9", [JobState("NODE_FAIL"), RUNNING])]

    def go_on(pause):
        if pause == 6:
            queue_job(tmp_path, "9", BY_PERSON)
        if pause == 9:
            write_json(RunLayout(tmp_path).done, {"schema_version": 1})

    assert followed(tmp_path, states, kind=Jobs, on_pause=go_on)[0].finished


def test_a_start_time_of_a_resumed_job_is_left_as_it_is(tmp_path):
    """sbatch was given one (--begin): nobody has requeued that job."""
    queue_job(tmp_path, "7", BY_SUBMIT)
    decide(attempt(tmp_path, step=20), "stop", "rank 1 raised ValueError")
    queue_job(tmp_path, "9", BY_PERSON)
    begin = JobState("PENDING", "BeginTime")
    states = [("7", [JobState("FAILED")]), ("9", [begin] * 4 + [RUNNING, JobState("FAILED")])]
    assert followed(tmp_path, states, kind=Jobs)[3] == []


def test_a_job_that_was_lost_is_not_told_for_one_that_a_person_has_queued_since(tmp_path):
    """Slurm shows an ended job for MinJobAge."""
    queue_job(tmp_path, "7", BY_SUBMIT)
    attempt(tmp_path, step=20)
    queue_job(tmp_path, "9", BY_PERSON)
    states = [("7", [JobState("NODE_FAIL")]), ("9", [RUNNING, RUNNING, JobState("TIMEOUT")])]
    end, said, _, _ = followed(tmp_path, states, kind=Jobs)
    assert "job TIMEOUT" in end.text and not [line for line in said if "goes on" in line]


def test_the_run_does_not_go_on_in_a_job_that_is_over(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    queue_job(tmp_path, "8", after="7")
    decide(attempt(tmp_path, step=20), "stop", "rank 1 raised ValueError")
    states = [
        ("7", [RUNNING, JobState("COMPLETED")]),
        ("8", [JobState("PENDING", "Dependency"), JobState("PENDING"), JobState("CANCELLED")]),
    ]
    end, said, _, _ = followed(tmp_path, states, kind=Jobs)
    assert "ValueError" in end.text and "the run goes on in job 7" not in said


def test_a_run_that_stopped_is_told_at_once_when_slurm_has_forgotten_all_its_jobs(tmp_path):
    queue_job(tmp_path, "7", BY_SUBMIT)
    decide(attempt(tmp_path, step=20), "stop", "rank 1 raised ValueError")
    queue_job(tmp_path, "9", BY_PERSON)
    states = [("7", [FORGOTTEN]), ("9", [FORGOTTEN])]
    end, _, pauses, _ = followed(tmp_path, states, kind=Jobs)
    assert "rank 1 raised ValueError" in end.text and sum(pauses) <= 2
