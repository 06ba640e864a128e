"""Following a run: what is news, which end is believed and when, and what a look survives."""

import pytest
from fakes.followed import RUNNING, Scheduler, attempt, decide, followed, progress

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import write_json
from ftslurm.recovery import view as run_view
from ftslurm.recovery.ending import AttemptView, View, ending
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import SECOND_LOOK_S, JobState
from ftslurm.submit import follow
from ftslurm.submit.follow import is_ripe_for_drill, news


def view(*attempts, job=RUNNING, done=False):
    return View(attempts, done, job)


def test_news_are_what_changed():
    first = view(AttemptView(1, progress(10, loss=2.5, tokens_per_s=1234.0), None))
    assert list(news(view(job=JobState("UNKNOWN")), first)) == [
        "job is RUNNING",
        "attempt 1 begins",
        "attempt 1  step 10/100  loss 2.5000  1,234 tokens/s",
    ]
    assert list(news(first, first)) == []
    decided = {"action": "requeued", "reason": "stopped on SIGUSR1 at step 10, all committed"}
    second = view(
        AttemptView(1, first.attempts[0].progress, decided),
        AttemptView(2, progress(11, committed_step=10, restored_step=10), None),
        job=JobState("PENDING", "BeginTime"),
    )
    assert list(news(first, second)) == [
        "job is PENDING (BeginTime)",
        "attempt 1 ended: stopped on SIGUSR1 at step 10, all committed -> requeued",
        "attempt 2 begins",
        "attempt 2 goes on from step 10",
        "attempt 2  step 11/100  committed 10",
    ]


@pytest.mark.parametrize(
    "seen, finished, says",
    [
        (view(done=True), True, "finished"),
        (view(job=RUNNING), None, ""),
        (view(job=JobState("PENDING", "BeginTime")), None, ""),
        (view(job=JobState("COMPLETING")), None, ""),
        (view(job=JobState("UNKNOWN", "no answer")), None, ""),
        (view(job=JobState("CANCELLED")), False, "job CANCELLED"),
        (view(job=JobState("REQUEUE_HOLD", "held")), False, "scontrol release"),
        (
            view(
                AttemptView(1, None, {"action": "stop", "reason": "disk is full"}),
                job=JobState("UNKNOWN", "Invalid job id"),
            ),
            False,
            "disk is full",
        ),
    ],
)
def test_an_end_is_told_from_a_wait(seen, finished, says):
    end = ending(seen)
    assert (None if end is None else end.finished) is finished
    assert says in (end.text if end else "")


@pytest.mark.parametrize(
    "seen, ripe",
    [
        (view(AttemptView(1, progress(12, committed_step=10), None)), True),
        (view(AttemptView(1, progress(10, committed_step=10), None)), False),
        (view(AttemptView(1, progress(12), None)), False),
        (view(AttemptView(1, progress(100, committed_step=90), None)), False),
        (view(AttemptView(1, progress(12, committed_step=10, phase="saving"), None)), False),
        (
            view(AttemptView(1, None, None), AttemptView(2, progress(12, committed_step=10), None)),
            False,
        ),
        (
            view(AttemptView(1, progress(12, committed_step=10), None), job=JobState("PENDING")),
            False,
        ),
    ],
)
def test_a_drill_waits_until_it_loses_something_and_comes_once(seen, ripe):
    assert is_ripe_for_drill(seen) is ripe


def test_following_backs_off_and_ends_with_done(tmp_path):
    attempt(tmp_path)

    def finish(pause):
        if pause == 25:
            write_json(RunLayout(tmp_path).done, {"schema_version": 1})

    end, _, pauses, _ = followed(tmp_path, [RUNNING], on_pause=finish)
    assert end.finished and pauses[0] == 1.0 and max(pauses) == 15.0


def test_a_bad_end_is_believed_when_it_is_seen_twice(tmp_path):
    states = [JobState("PREEMPTED"), JobState("PENDING"), RUNNING, JobState("FAILED")]
    end, said, _, _ = followed(tmp_path, states)
    assert not end.finished and "job FAILED" in end.text
    assert "job is FAILED" in said


AWAY = JobState("UNKNOWN", "Unable to contact slurm controller")


@pytest.mark.parametrize(
    "states",
    [
        [RUNNING, JobState("PREEMPTED"), AWAY, AWAY, JobState("PENDING"), RUNNING],
        [RUNNING, JobState("NODE_FAIL"), JobState("NODE_FAIL"), JobState("PENDING"), RUNNING],
        [RUNNING, JobState("PREEMPTED"), AWAY, JobState("PREEMPTED"), JobState("PENDING"), RUNNING],
    ],
)
def test_a_job_that_slurm_queues_again_is_not_given_up_of_one_look(tmp_path, states):
    decide(attempt(tmp_path), "requeued", "stopped on SIGUSR1")

    def finish(pause):
        if pause == 20:
            write_json(RunLayout(tmp_path).done, {"schema_version": 1})

    end, said, _, _ = followed(tmp_path, states, on_pause=finish)
    assert end.finished and "job is PENDING" in said
    assert not [line for line in said if "nothing says yet" in line]


def test_an_end_that_slurm_does_not_take_back_is_believed_after_a_second_look(tmp_path):
    attempt(tmp_path)
    end, _, pauses, _ = followed(tmp_path, [JobState("NODE_FAIL")])
    assert "job NODE_FAIL" in end.text and SECOND_LOOK_S <= sum(pauses) < 2 * SECOND_LOOK_S


def test_a_finished_run_whose_files_show_late_is_told_as_finished(tmp_path):
    """A login node may miss DONE for 60 s (NFS), while squeue says COMPLETED at once."""
    decide(attempt(tmp_path, step=100, phase="finished"), "done")
    slept = []

    def show(pause):
        slept.append(pause)
        if len(slept) == 12:
            write_json(RunLayout(tmp_path).done, {"schema_version": 1})

    end, said, pauses, _ = followed(tmp_path, [JobState("COMPLETED")], on_pause=show)
    assert end.finished and sum(pauses) > 30
    assert said[-1] == "nothing says yet how the run ended; looking on for 75 s"


def test_completed_without_done_is_believed_when_it_has_stood(tmp_path):
    end, _, pauses, _ = followed(tmp_path, [JobState("COMPLETED")])
    assert not end.finished and 75 <= sum(pauses) < 75 + 15


def test_a_job_that_slurm_forgets_meanwhile_has_ended_all_the_same(tmp_path):
    states = [JobState("COMPLETED"), JobState("UNKNOWN", "Invalid job id specified")]
    end, _, pauses, _ = followed(tmp_path, states)
    assert "job COMPLETED" in end.text and sum(pauses) < 100


@pytest.mark.parametrize(
    "action, name, state",
    [
        ("stop", "slurm", "COMPLETED"),
        (None, "slurm", "CANCELLED"),
        ("restart", "local", "FAILED"),
        (None, "slurm", "REQUEUE_HOLD"),
    ],
)
def test_a_bad_end_is_believed_soon_where_no_file_can_be_late(tmp_path, action, name, state):
    paths = attempt(tmp_path)
    if action:
        decide(paths, action)
    end, _, pauses, _ = followed(tmp_path, [JobState(state)], name=name)
    assert not end.finished and sum(pauses) <= 2


def test_the_last_attempts_decision_is_waited_for_and_told(tmp_path):
    paths = attempt(tmp_path, step=100, phase="finished")
    write_json(RunLayout(tmp_path).done, {"schema_version": 1})

    def write(pause):
        if pause == 3:
            decide(paths, "done", "all 100 steps are trained")

    end, said, pauses, _ = followed(tmp_path, [RUNNING], on_pause=write, name="local")
    assert end.finished and len(pauses) == 3
    assert said[-1] == "attempt 1 ended: all 100 steps are trained -> done"


def test_a_decision_that_never_comes_is_not_waited_for_longer(tmp_path):
    attempt(tmp_path, step=100, phase="finished")
    write_json(RunLayout(tmp_path).done, {"schema_version": 1})
    end, _, pauses, _ = followed(tmp_path, [RUNNING])
    assert end.finished and sum(pauses) == follow.LAST_WORD_S


def test_a_requeued_job_is_hastened_once_for_each_wait(tmp_path):
    attempt(tmp_path)
    waiting = JobState("PENDING", "BeginTime")
    states = [waiting, waiting, waiting, RUNNING, waiting, waiting, JobState("FAILED")]
    _, said, _, asked = followed(tmp_path, states)
    assert asked == ["hasten"] * 2
    assert sum("asked Slurm to start" in line for line in said) == 2


class Away(Scheduler):
    """Does not answer the first time it is asked to hasten."""

    def hasten(self, job_id):
        if super().hasten(job_id) and len(self.asked) == 1:
            raise SchedulerError("`scontrol update` gave no answer for 60 s")
        return True


def test_a_scheduler_that_does_not_answer_ends_no_follower(tmp_path):
    attempt(tmp_path)
    states = [JobState("PENDING", "BeginTime")] * 4 + [JobState("FAILED")]
    end, said, _, asked = followed(tmp_path, states, kind=Away)
    assert "job FAILED" in end.text and asked == ["hasten"] * 2
    assert sum("asked Slurm to start" in line for line in said) == 1


def test_a_file_replaced_while_it_is_read_costs_one_look(tmp_path, monkeypatch):
    attempt(tmp_path)
    stale = [OSError(116, "Stale file handle"), None, OSError(116, "Stale file handle")]

    def read(paths):
        error = stale.pop(0) if stale else None
        if error:
            raise error
        return progress(7)

    monkeypatch.setattr(run_view, "read_progress", read)
    end, said, _, _ = followed(tmp_path, [RUNNING] * 5 + [JobState("FAILED")])
    assert "job FAILED" in end.text and not stale
    assert sum("step 7/100" in line for line in said) == 1


def test_a_run_directory_that_stays_unreadable_is_given_up(tmp_path, monkeypatch):
    def read(layout):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(run_view, "numbers", read)
    with pytest.raises(RunError, match="can no longer be read .*Input/output error"):
        followed(tmp_path, [RUNNING])


def test_a_first_wait_is_not_hastened(tmp_path):
    waiting = JobState("PENDING", "BeginTime")
    assert followed(tmp_path, [waiting, waiting, JobState("FAILED")])[3] == []


def test_a_damaged_decision_ends_no_follower(tmp_path):
    (attempt(tmp_path).root / "decision.json").write_text("{")
    end, _, _, _ = followed(tmp_path, [RUNNING, JobState("FAILED")])
    assert "job FAILED" in end.text


def test_a_drill_is_said_when_the_signal_went_out_and_only_then(tmp_path):
    attempt(tmp_path, step=12, committed_step=10)
    states = [RUNNING] * 5 + [JobState("FAILED")]
    _, said, pauses, asked = followed(tmp_path, states, drill_signal="USR1")
    assert asked == ["USR1", "USR1"] and pauses[0] == 1.0
    (line,) = [line for line in said if "DRILL" in line]
    assert "USR1" in line and "step 12" in line


def test_a_drill_that_never_came_is_told(tmp_path):
    attempt(tmp_path, step=12)
    _, said, _, asked = followed(tmp_path, [RUNNING, JobState("FAILED")], drill_signal="USR1")
    assert asked == [] and said[-1].startswith("no DRILL: ")


def test_a_job_nobody_knows_is_given_up(tmp_path):
    end, _, pauses, _ = followed(tmp_path, [JobState("UNKNOWN", "Invalid job id specified")])
    assert not end.finished and "Invalid job id" in end.text
    assert 900 <= sum(pauses) < 1000


def test_a_paused_run_is_told_from_one_that_slurm_holds(tmp_path):
    decide(attempt(tmp_path, step=20), "paused", "stopped by the order `pause`")
    end, _, _, _ = followed(tmp_path, [JobState("PENDING", "JobHeldUser")])
    assert "is paused: `ftslurm resume`" in end.text
