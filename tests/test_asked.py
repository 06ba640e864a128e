"""Why a run was asked to leave is put on record while the scheduler still knows it."""

import time

import pytest
from fakes.recovering import FakeScheduler, begin, make_layout

from ftslurm.files import append_record, read_json
from ftslurm.recovery.recover import recover
from ftslurm.run.attempt_story import read_attempt_stories
from ftslurm.run.attempts import STOPPED, Outcome, append_event, write_outcome


class Knowing(FakeScheduler):
    """Says what it is given of a preemption; counts how often it is asked, and when."""

    def __init__(self, preempted, **options):
        super().__init__(**options)
        self.preempted, self.asked = preempted, []

    def is_preempted(self, job_id):
        self.asked.append(bool(self.requeued))
        return self.preempted


def leave(
    tmp_path, scheduler, *, outcome=None, term=False, stop_in_s=None, asked_ago_s=0.0, heard=(),
    end_in_s=60,
):  # fmt: skip
    """`heard`: by what the job was to end, as the agents' leader was told."""
    layout, now = make_layout(tmp_path), time.time()
    paths = begin(layout)
    for by in heard:
        told = {"left_s": 1.0, "by": by, "end_at": now + end_in_s} if by else {"end_at": None}
        event = {"at": now, "kind": "deadline", "node": "n1", **told}
        append_record(paths.root / "agents.jsonl", event)
    if outcome is not None:
        if outcome.signal:
            append_event(paths, "signal", now=lambda: now - asked_ago_s, signal=outcome.signal)
        write_outcome(paths, outcome)
    environ = {"SLURM_JOB_ID": "12"}
    if stop_in_s is not None:
        environ["FTSLURM_STOP_AT"] = str(int(now + stop_in_s))
    decision = recover(layout, scheduler, environ, attempt=1, rc=75 if outcome else 143, term=term)
    (story,) = read_attempt_stories(layout, is_program=False)
    record = read_json(paths.decision_json)
    assert record["asked_by"] == story.asked_by and record["cause"] == decision.cause
    return decision, story.asked_by


USR1 = Outcome(STOPPED, step=20, committed_step=20, signal="SIGUSR1")


@pytest.mark.parametrize(("preempted", "stop_in_s", "asked_ago_s", "by"), [
    (True, 9000, 0, "preempted"),
    (True, 20, 0, "preempted"),  # in grace that happens to fall before the limit
    (False, 20, 0, "time_limit"),
    (False, 60, 0, "time_limit"),  # Slurm may warn a minute early
    (False, 9000, 0, "signal"),
    (False, 10, 500, "signal"),  # so long before that no warning could have come
    (False, None, 0, "signal"),
    (None, 9000, 0, None),
    (None, 20, 0, "time_limit"),
])  # fmt: skip
def test_a_stop_is_a_preemptions_the_limits_or_somebodys(
    tmp_path, preempted, stop_in_s, asked_ago_s, by
):
    scheduler = Knowing(preempted)
    decision, said = leave(
        tmp_path, scheduler, outcome=USR1, stop_in_s=stop_in_s, asked_ago_s=asked_ago_s
    )
    assert (decision.action, decision.cause, said) == ("requeued", "asked_to_leave", by)
    words = {"preempted": "stopped on SIGUSR1 (preempted) at step 20",
             "time_limit": "stopped on SIGUSR1 (the time limit is near) at step 20"}  # fmt: skip
    assert decision.reason.startswith(words.get(by, "stopped on SIGUSR1 at step 20"))
    # Before the requeue, after which accounting says REQUEUED whatever it was.
    assert scheduler.asked == [False]


@pytest.mark.parametrize(("heard", "end_in_s", "term", "by"), [
    (["preempted"], 60, False, "preempted"),
    (["preempted"], 60, True, "preempted"),
    (["time_limit", "preempted"], 60, False, "preempted"),
    (["preempted", "ending"], 60, True, "preempted"),
    (["preempted", None], 60, False, "preempted"),
    (["time_limit"], 60, False, "time_limit"),
    (["time_limit"], 60, True, "time_limit"),
    (["time_limit"], 9000, False, "signal"),
    (["time_limit"], 9000, True, None),
])  # fmt: skip
def test_what_the_leader_was_told_at_the_signal_is_not_asked_again(
    tmp_path, heard, end_in_s, term, by
):
    scheduler = Knowing(None, alive=(False,))
    scheduler.end_time = scheduler.is_preempted
    given = {"outcome": USR1, "heard": heard, "end_in_s": end_in_s, "term": term}
    assert leave(tmp_path, scheduler, **given)[1] == by
    assert scheduler.asked == []


@pytest.mark.parametrize("heard", [
    ["ending"], [None], ["time_limit", "ending"], ["time_limit", None],
])  # fmt: skip
def test_where_the_leader_was_told_nothing_of_why_it_is_asked(tmp_path, heard):
    scheduler = Knowing(True)
    assert leave(tmp_path, scheduler, outcome=USR1, heard=heard)[1] == "preempted"
    assert scheduler.asked == [False]


@pytest.mark.parametrize(("end_in_s", "stop_in_s", "by"), [
    (60, 9000, "time_limit"),
    (20000, 20, "signal"),
])  # fmt: skip
def test_a_limit_that_was_moved_since_the_start_counts_as_it_is_now(
    tmp_path, end_in_s, stop_in_s, by
):
    scheduler = Knowing(False, end_at=time.time() + end_in_s)
    assert leave(tmp_path, scheduler, outcome=USR1, stop_in_s=stop_in_s)[1] == by


def test_rank_0s_own_clock_is_the_time_limit_and_nobody_is_asked(tmp_path):
    scheduler = Knowing(True)
    outcome = Outcome(STOPPED, step=20, committed_step=20, signal="SIGALRM")
    assert leave(tmp_path, scheduler, outcome=outcome)[1] == "time_limit"
    assert scheduler.asked == []


def test_at_the_end_of_grace_the_requeue_goes_first(tmp_path):
    scheduler = Knowing(True)
    decision, said = leave(tmp_path, scheduler, term=True)
    assert (decision.action, said) == ("requeued", "preempted")
    assert scheduler.asked == [True]


def test_a_job_that_is_ended_and_neither_preempted_nor_out_of_time_is_not_guessed_at(tmp_path):
    assert leave(tmp_path, Knowing(False), term=True, stop_in_s=9000)[1] is None


def test_a_controller_that_is_away_is_not_waited_for(tmp_path):
    scheduler = Knowing(True, alive=(False,))
    decision, said = leave(tmp_path, scheduler, outcome=USR1)
    assert (decision.action, said, scheduler.asked) == ("requeued", None, [])


def test_an_order_says_by_itself_who_asked(tmp_path):
    scheduler = Knowing(True)
    outcome = Outcome(STOPPED, step=20, committed_step=20, order="stop")
    decision, said = leave(tmp_path, scheduler, outcome=outcome)
    assert (decision.action, said, scheduler.asked) == ("ended", None, [])
