"""What a run that was given up has lost: to the step, in all of its attempts."""

from dataclasses import replace

import pytest
from test_report_joined import TOKENS, attempt, joined, layout, slurm, story, trace

__all__ = ["layout"]


def test_a_run_that_was_given_up_has_lost_what_no_checkpoint_holds(layout):
    trace(layout, 1, 1, [3.0] * 10)
    told = story(
        attempt(1, claimed_at=1000.0, cause="code", last_step=10, committed_step=8, action="stop"),
        state="stopped", committed=8,
    )  # fmt: skip
    report, _ = joined(layout, told, slurm("FAILED", 1000.0, 1100.0))
    assert (report.state, report.attempts[0].steps_lost) == ("failed", 2)
    assert report.attempts[0].lost_s == pytest.approx(6.0)
    assert report.attempts[0].tokens_lost == 2 * TOKENS


def test_what_an_attempt_had_trained_is_lost_too_where_none_after_it_trains(layout):
    trace(layout, 1, 1, [3.0] * 19)
    trace(layout, 2, 11, [3.0] * 5)
    told = story(
        attempt(1, claimed_at=1000.0, cause="node", last_step=19, committed_step=10, steps_lost=5),
        attempt(2, claimed_at=1100.0, cause="node", restored_step=10, last_step=15,
                committed_step=12),
        attempt(3, claimed_at=1200.0, cause="capacity", last_step=None, action="stop"),
        state="stopped", committed=12,
    )  # fmt: skip
    report, good = joined(layout, told, slurm("FAILED", 1000.0, 1300.0))
    assert [one.steps_lost for one in report.attempts] == [9, 3, 0]
    assert [one.lost_s for one in report.attempts] == [27.0, 9.0, 0.0]
    assert [one.tokens_lost for one in report.attempts] == [9 * TOKENS, 3 * TOKENS, 0]
    assert good.trained_s == pytest.approx(2 * 3.0 * 12)  # what the checkpoint holds, on two nodes


def test_where_no_checkpoint_verified_any_more_all_that_was_trained_is_lost(layout):
    trace(layout, 1, 1, [3.0] * 17)
    ruined = attempt(2, claimed_at=1100.0, cause="checkpoint", last_step=None, action="stop")
    first = attempt(1, claimed_at=1000.0, cause="unknown", last_step=17, committed_step=10)
    told = story(first, ruined, state="stopped", committed=10)
    report, good = joined(layout, told, slurm("FAILED", 1000.0, 1200.0))
    assert (report.committed_step, report.attempts[0].steps_lost) == (None, 17)
    assert good.trained_s == 0.0
    # A save that failed has spoiled none of those before it.
    failed = replace(ruined, restored_step=10, last_step=20)
    report, _ = joined(layout, story(first, failed, state="stopped", committed=10))
    assert (report.committed_step, report.attempts[1].steps_lost) == (10, 10)
