"""A run's records and Slurm's rows of its jobs: every second counted once, losses to the step."""

import json

import pytest

from ftslurm.files import write_json
from ftslurm.recovery import policy
from ftslurm.recovery.allocation import CAUSE_NO_PLACE
from ftslurm.report.attempt_end import ASK_SLURM, MEANS
from ftslurm.report.fold import fold
from ftslurm.report.joined import join
from ftslurm.report.records import lost_gpu_hours
from ftslurm.report.step_times import read_step_times
from ftslurm.run.attempt_story import AttemptStory
from ftslurm.run.attempts import append_event
from ftslurm.run.layout import RunLayout
from ftslurm.run.story import RunStory
from ftslurm.run.timeline import Timeline
from ftslurm.scheduler.job_table import JobRun

TOKENS = 500
"""Of a step."""


def attempt(number, *, claimed_at, job_id="7", restart=0, cause=None, ended="failed", **values):
    defaults = {
        "nodes": ["n1", "n2"], "restored_step": None, "last_step": 0, "committed_step": None,
        "signal": None, "order": None, "action": "restart", "reason": "why", "steps_lost": 0,
        "tokens_lost": 0, "confidence": None, "blamed": None, "evidence": [], "exclude": [],
        "first_failure": None, "timeline": Timeline(), "findings": [], "late": None,
    }  # fmt: skip
    return AttemptStory(
        number=number, job_id=job_id, restart_count=restart, claimed_at=claimed_at, ended=ended,
        cause=cause, **{**defaults, **values},
    )  # fmt: skip


def story(*attempts, state="done", committed=None, program=(), last_sign_at=None):
    return RunStory(
        run_id="r", state=state, program=list(program), steps=100, last_step=attempts[-1].last_step,
        committed_step=committed, steps_lost=0, tokens_lost=0, loss=None, tokens_per_s=None,
        last_sign_at=last_sign_at, committed_steps=[], quarantined=[], attempts=list(attempts),
    )  # fmt: skip


def slurm(state, start, end, *, job_id="7", restarts=0, eligible=None):
    return JobRun(
        job_id, state, None, 0, 0, start, end, None, "", restarts, raw_id=job_id, user="ada",
        eligible_at=start - 30.0 if eligible is None else eligible, elapsed_s=end - start,
        num_nodes=2, gpus=8, name="train",
    )  # fmt: skip


def trace(layout, number, first, seconds):
    path = layout.trace_file(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": first + i, "seconds": took, "tokens": TOKENS * (first + i)}
        for i, took in enumerate(seconds)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')


def event(layout, number, kind, at, **facts):
    layout.attempt(number).root.mkdir(parents=True, exist_ok=True)
    append_event(layout.attempt(number), kind, now=lambda: at, **facts)


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path / "r")
    layout.root.mkdir()
    write_json(layout.run_json, {"schema_version": 1, "spec": {"cluster": {"gpus_per_node": 4}}})
    return layout


def joined(layout, told, *runs):
    return join(layout, told, list(fold(runs)), now=10_000.0)


def test_the_time_of_a_job_is_divided_among_its_attempts_without_a_rest(layout):
    """One Slurm run from 1000 to 1500 with two attempts, requeued, then 2000 to 2600."""
    told = story(
        attempt(1, claimed_at=1005.0, cause="node", blamed={"node": "n2"}, last_step=10),
        attempt(2, claimed_at=1200.0, cause="preempted", ended="stopped", last_step=20),
        attempt(3, claimed_at=2004.0, restart=1, ended="finished", last_step=30),
        committed=30,
    )
    report, _ = joined(
        layout, told, slurm("PREEMPTED", 1000.0, 1500.0),
        slurm("COMPLETED", 2000.0, 2600.0, restarts=1, eligible=1900.0),
    )  # fmt: skip
    assert [one.elapsed_s for one in report.attempts] == [200.0, 300.0, 600.0]
    assert [one.wait_s for one in report.attempts] == [30.0, None, 100.0]
    assert report.gpu_hours == pytest.approx(8 * 1100 / 3600)
    assert [one.cause for one in report.attempts] == ["node", "preempted", None]
    assert (report.attempts[0].node, report.attempts[0].is_failure) == ("n2", True)
    assert (report.state, report.user, report.committed_step) == ("completed", "ada", 30)


def test_goodput_is_what_was_trained_once_and_the_rest_is_told_apart(layout):
    """Steps of 2 s; 4 of 10 trained again; a save after step 3 that stops training for 5 s."""
    trace(layout, 1, 1, [2.0, 2.0, 2.0, 7.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    trace(layout, 2, 7, [2.0] * 4)
    for number, begin in ((1, 1010.0), (2, 1112.0)):
        event(layout, number, "first_step", begin + 2.0, step=1)
    event(layout, 1, "committed", 1020.0, step=3)
    told = story(
        attempt(1, claimed_at=1000.0, cause="node", last_step=10, steps_lost=4),
        attempt(2, claimed_at=1100.0, ended="finished", restored_step=6, last_step=10),
        committed=10,
    )
    report, good = joined(layout, told, slurm("COMPLETED", 1000.0, 1130.0))
    per_node = {name: value / 2 for name, value in vars(good).items()}
    assert per_node["trained_s"] == pytest.approx(6 * 2.0 + 4 * 2.0)
    assert per_node["lost_s"] == pytest.approx(4 * 2.0)
    assert per_node["stall_s"] == pytest.approx(5.0)
    assert per_node["restart_s"] == pytest.approx(10.0 + 12.0)
    assert per_node["queue_s"] == 30.0
    assert good.allocated_s == pytest.approx(2 * 130.0)
    assert report.attempts[0].lost_s == pytest.approx(8.0)
    assert report.step_s == 2.0


def test_the_rank_that_hung_is_the_one_that_is_blamed(layout):
    hung = attempt(1, claimed_at=1000.0, cause="hang", blamed={"node": "n1", "rank": 3})
    told, _ = joined(layout, story(hung), slurm("FAILED", 1000.0, 1100.0))
    assert (told.attempts[0].rank, told.attempts[0].node) == (3, "n1")


def test_the_node_that_was_given_up_as_too_slow_is_the_one_that_is_blamed(layout):
    findings = [
        {"kind": "straggler", "nodes": ["n1"], "ranks": [0], "acted": False},
        {"kind": "straggler", "nodes": ["n2"], "ranks": [5], "acted": True},
    ]
    slow = attempt(1, claimed_at=1000.0, cause="straggler", ended="stopped", findings=findings)
    told, _ = joined(layout, story(slow), slurm("COMPLETED", 1000.0, 1100.0))
    assert [(one.node, one.rank) for one in told.attempts] == [("n2", 5)]


def test_a_run_that_got_a_new_job_each_time_is_one_report(layout):
    told = story(
        attempt(1, claimed_at=1001.0, job_id="7", cause="preempted", ended="stopped"),
        attempt(2, claimed_at=2001.0, job_id="8", ended="finished"),
    )
    report, _ = joined(
        layout,
        told,
        slurm("PREEMPTED", 1000.0, 1100.0),
        slurm("COMPLETED", 2000.0, 2100.0, job_id="8"),
    )
    assert (report.job_id, len(report.attempts)) == ("8", 2)
    assert report.gpu_hours == pytest.approx(8 * 200 / 3600)


def test_without_rows_of_accounting_the_records_tell_and_the_gap_is_named(layout):
    trace(layout, 1, 1, [1.0] * 50)
    told = story(attempt(1, claimed_at=1000.0, cause="oom_host", timeline=Timeline(gone=1060.0)))
    report, good = joined(layout, told)
    assert (report.attempts[0].elapsed_s, report.attempts[0].gpus) == (60.0, 8)
    assert "accounting has no row" in report.notes[0]
    assert good.allocated_s == 120.0


def test_a_failure_that_nobody_explained_is_unknown_and_counts(layout):
    report, _ = joined(
        layout, story(attempt(1, claimed_at=1000.0, ended="killed")), slurm("FAILED", 990.0, 1100.0)
    )
    assert report.attempts[0].cause == "unknown"
    assert report.attempts[0].is_failure


def test_below_24_11_an_attempt_is_found_in_its_run_by_time(layout):
    told = story(
        attempt(1, claimed_at=1001.0, cause="preempted", ended="stopped"),
        attempt(2, claimed_at=2001.0, restart=1, ended="finished"),
    )
    report, _ = joined(
        layout, told, slurm("PREEMPTED", 1000.0, 1100.0, restarts=None),
        slurm("COMPLETED", 2000.0, 2100.0, restarts=None),
    )  # fmt: skip
    assert [one.elapsed_s for one in report.attempts] == [100.0, 100.0]


def test_a_trace_that_is_torn_or_missing_makes_up_no_time(layout, tmp_path):
    trace(layout, 1, 5, [1.0, 2.0])
    times = read_step_times(layout.trace_file(1))
    assert (times.first, list(times.seconds)) == (5, [1.0, 2.0])
    nothing = read_step_times(tmp_path / "none")
    assert (nothing.total_s, nothing.last_s(3), nothing.median_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("word", "ended", "row", "cause"),
    [
        (policy.CAUSE_ASKED, "stopped", "PREEMPTED", "preempted"),
        (policy.CAUSE_ASKED, "stopped", "TIMEOUT", "time_limit"),
        (policy.CAUSE_ASKED, "stopped", "REQUEUED", None),
        (policy.CAUSE_ASKED, "killed", "PREEMPTED", "preempted"),
        (policy.CAUSE_ASKED, "killed", "NODE_FAIL", "node"),
        (policy.CAUSE_ASKED, "killed", "REQUEUED", None),
        (policy.CAUSE_FINISHED, "finished", "COMPLETED", None),
        (policy.CAUSE_ORDERED, "stopped", "COMPLETED", None),
        (policy.CAUSE_ORDERED, "failed", "CANCELLED", None),
        (policy.CAUSE_NOT_STARTED, "failed", "REQUEUED", None),
        (policy.CAUSE_FORGOTTEN, "failed", "REQUEUED", None),
        (policy.CAUSE_NEVER_RETRY, "failed", "FAILED", "code"),
        (policy.CAUSE_STANDSTILL, "killed", "TIMEOUT", "hang"),
        (policy.CAUSE_FAILED, "failed", "NODE_FAIL", "node"),
        (policy.CAUSE_FAILED, "stopped", "PREEMPTED", "unknown"),
        (CAUSE_NO_PLACE, "killed", "NODE_FAIL", "node"),
        (CAUSE_NO_PLACE, "stopped", "REQUEUED", None),
        ("a_word_of_later", "failed", "FAILED", "unknown"),
        ("unknown", "failed", "OUT_OF_MEMORY", "oom_host"),
        (None, "killed", "PREEMPTED", "preempted"),
        (None, "killed", "NODE_FAIL", "node"),
        (None, "killed", "TIMEOUT", "time_limit"),
        (None, "killed", "CANCELLED", "cancelled_user"),
        (None, "running", "NODE_FAIL", "node"),
        (None, "running", "FAILED", "unknown"),
        (None, "running", "RUNNING", None),
        (None, "stopped", "FAILED", None),
    ],
)
def test_where_the_records_do_not_say_why_slurm_is_asked(layout, word, ended, row, cause):
    run = slurm(row, 1000.0, 1900.0)
    run.failed_node = "n2" if row == "NODE_FAIL" else None
    report, _ = joined(layout, story(attempt(1, claimed_at=1001.0, cause=word, ended=ended)), run)
    (found,) = report.attempts
    assert (found.cause, found.node) == (cause, "n2" if cause == "node" else None)


def test_every_word_of_the_policys_is_known():
    words = {value for name, value in vars(policy).items() if name.startswith("CAUSE_")}
    assert words | {CAUSE_NO_PLACE} <= set(MEANS) | ASK_SLURM


def test_the_row_tells_of_the_last_attempt_in_it_and_of_no_other(layout):
    told = story(
        attempt(1, claimed_at=1001.0, ended="failed", cause="failed"),
        attempt(2, claimed_at=1100.0, ended="killed"),
    )
    report, _ = joined(layout, told, slurm("NODE_FAIL", 1000.0, 1900.0))
    assert [one.cause for one in report.attempts] == ["unknown", "node"]


def test_a_time_limit_that_was_over_at_the_decision_is_told_though_the_job_was_queued_again(layout):
    told = story(attempt(1, claimed_at=1001.0, ended="stopped", cause="asked_to_leave"))
    layout.attempt(1).root.mkdir(parents=True)
    layout.attempt(1).decision_json.write_text('{"schema_version": 1, "limit_passed": true}')
    report, _ = joined(layout, told, slurm("REQUEUED", 1000.0, 1900.0))
    assert report.attempts[0].cause == "time_limit"


def test_a_run_of_slurms_that_no_attempt_came_of_is_one_without_a_number(layout):
    trace(layout, 1, 1, [1.0] * 50)
    lost = slurm("NODE_FAIL", 1000.0, 1900.0)
    lost.failed_node = "n1"
    told = story(attempt(1, claimed_at=2001.0, restart=1, ended="finished", last_step=50))
    report, good = joined(layout, told, lost, slurm("COMPLETED", 2000.0, 2100.0, restarts=1))
    first, second = report.attempts
    assert (first.number, first.cause, first.node, second.number) == (None, "node", "n1", 1)
    assert report.gpu_hours == pytest.approx(8 * 1000 / 3600)
    assert good.allocated_s == pytest.approx(2 * 1000)
    assert (good.trained_s, good.restart_s) == (100.0, 2 * 900.0)


@pytest.mark.parametrize("program", [(), ("python", "train.py")])
def test_without_a_trace_neither_goodput_nor_loss_is_known(layout, program):
    told = story(
        attempt(1, claimed_at=1001.0, cause="node", last_step=None if program else 50),
        attempt(2, claimed_at=5000.0, ended="finished", last_step=None if program else 90),
        program=program,
    )
    report, good = joined(layout, told, slurm("COMPLETED", 1000.0, 9000.0))
    assert good is None
    assert [one.lost_s for one in report.attempts] == [None, None]
    assert lost_gpu_hours(report) is None


def test_an_attempt_that_never_trained_has_lost_nothing(layout):
    told = story(attempt(1, claimed_at=1001.0, cause="node", last_step=None))
    report, good = joined(layout, told, slurm("NODE_FAIL", 1000.0, 1900.0))
    assert report.attempts[0].lost_s == 0.0
    assert (good.share, good.allocated_s) == (0.0, 1800.0)


def test_a_run_that_goes_on_without_rows_is_counted_until_now(layout):
    trace(layout, 1, 1, [2.0] * 500)
    going = attempt(1, claimed_at=1000.0, ended="running", last_step=500)
    _, good = joined(layout, story(going, state="running"))
    assert good.allocated_s == pytest.approx(2 * 9000.0)
    _, good = joined(layout, story(going, state="quiet", last_sign_at=1100.0))
    assert good is None  # it trained for longer than it is known to have been there


def test_nodes_of_the_allocation_without_a_rank_count(layout):
    spared = slurm("COMPLETED", 1000.0, 4600.0)
    spared.num_nodes, spared.gpus = 4, 16
    report, good = joined(layout, story(attempt(1, claimed_at=1001.0, ended="finished")), spared)
    assert (report.node_hours, report.gpu_hours) == (4.0, 16.0)
    assert good.allocated_s == 4 * 3600.0


def test_a_row_that_has_lost_its_start_begins_with_the_claim(layout):
    row = slurm("PREEMPTED", 1000.0, 1900.0, restarts=None)
    row.start_at = None
    report, _ = joined(layout, story(attempt(1, claimed_at=1001.0, cause="preempted")), row)
    assert (report.attempts[0].start_at, report.attempts[0].elapsed_s) == (1001.0, 899.0)


def test_an_attempt_that_began_seconds_after_the_end_of_a_dead_row_is_of_the_next_one(layout):
    told = story(
        attempt(1, claimed_at=1001.0, ended="killed", last_step=20),
        attempt(2, claimed_at=1504.9, ended="finished", last_step=60),
    )
    dead = slurm("NODE_FAIL", 1000.0, 1500.0, restarts=None)
    report, _ = joined(layout, told, dead, slurm("COMPLETED", 1504.0, 1600.0, restarts=None))
    assert [one.cause for one in report.attempts] == ["node", None]
    assert [one.elapsed_s for one in report.attempts] == [500.0, 96.0]


def test_the_row_of_another_job_that_once_had_the_number_is_not_taken(layout):
    told = story(attempt(1, claimed_at=9001.0, cause="node"))
    report, _ = joined(
        layout, told, slurm("COMPLETED", 1000.0, 1900.0), slurm("FAILED", 9000.0, 9100.0)
    )
    assert [one.start_at for one in report.attempts if one.number] == [9000.0]


def test_of_a_job_that_shrank_each_attempt_has_its_part(layout):
    row = slurm("COMPLETED", 1000.0, 2000.0)
    row.more_gpu_s = 1000.0
    told = story(
        attempt(1, claimed_at=1001.0, cause="node"),
        attempt(2, claimed_at=1500.0, ended="finished"),
    )
    report, _ = joined(layout, told, row)
    assert [one.more_gpu_s for one in report.attempts] == [500.0, 500.0]
    assert report.gpu_hours == pytest.approx((8 * 1000 + 1000) / 3600)


def test_a_run_that_was_ended_by_an_order_has_not_failed(layout):
    ended = attempt(1, claimed_at=1001.0, ended="stopped", cause="ordered", action="ended")
    report, _ = joined(layout, story(ended, state="stopped"), slurm("COMPLETED", 1000.0, 1900.0))
    assert (report.state, report.failures) == ("cancelled", [])


def test_a_run_whose_job_somebody_cancelled_has_not_failed_either(layout):
    ended = attempt(1, claimed_at=1001.0, ended="stopped", cause="cancelled_user", action="stop")
    row = slurm("CANCELLED", 1000.0, 1900.0)
    report, _ = joined(layout, story(ended, state="stopped"), row)
    assert (report.state, report.failures) == ("cancelled", [])


@pytest.mark.parametrize(
    ("asked_by", "row", "cause"),
    [
        ("preempted", "REQUEUED", "preempted"),
        ("time_limit", "REQUEUED", "time_limit"),
        ("signal", "REQUEUED", None),
        (None, "REQUEUED", None),
        ("preempted", "NODE_FAIL", "node"),
    ],
)
def test_why_it_was_asked_to_leave_is_told_where_its_own_requeue_has_hidden_it(
    layout, asked_by, row, cause
):
    told = story(attempt(1, claimed_at=1001.0, ended="stopped", cause="asked_to_leave"))
    layout.attempt(1).root.mkdir(parents=True)
    layout.attempt(1).decision_json.write_text(
        json.dumps({"schema_version": 1, "asked_by": asked_by})
    )
    report, _ = joined(layout, told, slurm(row, 1000.0, 1900.0))
    assert report.attempts[0].cause == cause
