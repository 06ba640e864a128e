"""Windows side by side: what lies in one counts there, once, and together they are the whole."""

import re
import time

import pytest
from test_job_table import row
from test_report_command import as_json, report, sacct
from test_report_fleet import attempt as made
from test_report_fleet import fleet, job
from test_report_joined import attempt, event, layout, slurm, story, trace

from ftslurm.diagnosis import causes
from ftslurm.report.fold import fold
from ftslurm.report.jobs import within
from ftslurm.report.joined import join

__all__ = ["layout", "sacct"]

HOUR_S = 3600.0
CUTS = (1000.0, 1007.0, 1040.0, 1055.0, 1112.0, 1130.0, 2000.0)
"""Before, while it starts, while it trains, among the steps that are lost, ..."""


@pytest.fixture
def two(layout):
    """1000 to 1130 on two nodes; 10 steps of 2 s, 4 of which are trained again after 1100."""
    trace(layout, 1, 1, [2.0, 2.0, 2.0, 7.0, 2.0, 2.0, 10.0, 10.0, 10.0, 10.0])
    trace(layout, 2, 7, [2.0] * 4)
    for number, begin in ((1, 1010.0), (2, 1112.0)):
        event(layout, number, "first_step", begin + 2.0, step=1)
    event(layout, 1, "committed", 1020.0, step=3)
    return layout, story(
        attempt(1, claimed_at=1000.0, cause="node", blamed={"node": "n2"}, last_step=10,
                steps_lost=4, tokens_lost=2000),
        attempt(2, claimed_at=1100.0, ended="finished", restored_step=6, last_step=10),
        committed=10,
    )  # fmt: skip


def told(two, since, until, rows=None):
    rows = rows or [slurm("COMPLETED", 1000.0, 1130.0)]
    run, good = join(*two, list(fold(rows)), now=10_000.0, window=(since, until))
    total = fleet(run).total
    figures = {name: getattr(total, name) for name in vars(total) if name not in
               ("jobs", "attempts")}  # fmt: skip
    return run, good, {**figures, **vars(good)}


@pytest.mark.parametrize("cut", CUTS)
def test_two_windows_of_a_run_are_together_the_whole(two, cut):
    _, _, whole = told(two, None, None)
    _, _, before = told(two, None, cut)
    _, _, after = told(two, cut, None)
    assert {name: before[name] + after[name] for name in whole} == pytest.approx(whole)
    assert whole["lost_s"] == pytest.approx(2 * 40.0)
    assert whole["failures"] == 1


@pytest.mark.parametrize("since", CUTS)
@pytest.mark.parametrize("until", CUTS)
def test_goodput_is_of_what_was_used_in_the_window_and_no_more_was_lost(two, since, until):
    if since >= until:
        return
    run, good, figures = told(two, since, until)
    assert good.allocated_s == pytest.approx(HOUR_S * run.node_hours)
    assert figures["lost_gpu_hours"] <= figures["gpu_hours"] + 1e-9
    for one in run.attempts:
        assert since <= one.start_at
        assert one.end_at is None or one.end_at < until
        assert one.last_at - one.start_at == pytest.approx(one.elapsed_s)


def test_goodput_of_a_job_that_was_resized_has_what_the_lost_nodes_had(two):
    shrunk = slurm("COMPLETED", 1000.0, 1130.0)
    shrunk.more_node_s = 150.0
    run, good, _ = told(two, None, None, [shrunk])
    assert run.node_hours * HOUR_S == pytest.approx(2 * 130.0 + 150.0)
    assert good.allocated_s == pytest.approx(run.node_hours * HOUR_S)
    run, good, _ = told(two, 1050.0, None, [shrunk])
    assert good.allocated_s == pytest.approx(run.node_hours * HOUR_S)


@pytest.mark.parametrize(("until", "committed", "last"), [
    (None, 10, 10),
    (1010.0, None, None),  # it had begun, and no record says how far it was
    (1021.0, 3, None),
    (1100.0, 3, None),
    (1101.0, 3, None),
    (1131.0, 10, 10),
])  # fmt: skip
def test_how_far_it_was_is_told_as_of_the_end_of_the_window(two, until, committed, last):
    run, _, _ = told(two, None, until)
    assert (run.committed_step, run.last_step) == (committed, last)


def test_between_two_attempts_it_was_where_the_one_before_had_ended(two):
    layout, whole = two
    whole.attempts[1] = attempt(2, claimed_at=1200.0, restart=1, ended="finished", restored_step=6,
                                last_step=10)  # fmt: skip
    rows = [slurm("NODE_FAIL", 1000.0, 1100.0), slurm("COMPLETED", 1200.0, 1230.0, restarts=1)]
    run, _, _ = told((layout, whole), None, 1150.0, rows)
    assert (run.state, run.committed_step, run.last_step) == ("waiting", 3, 10)


def test_a_failure_and_its_wait_are_each_of_one_window():
    """Ten hours, of which the first and the last are in another window each."""
    one = job(made(causes.NODE, node="n2", hours=10.0), state="failed")
    first, second = within(one, None, HOUR_S), within(one, HOUR_S, None)
    assert [len(half.failures) for half in (first, second)] == [0, 1]
    assert [half.attempts[0].wait_s for half in (first, second)] == [60.0, None]
    assert [half.state for half in (first, second)] == ["running", "failed"]
    assert (first.attempts[0].end_at, first.attempts[0].node) == (None, None)
    assert [fleet(half).node_faults for half in (first, second)] == [0, 1]
    assert first.gpu_hours + second.gpu_hours == one.gpu_hours
    unknown = [fleet(half).total.unknown_gpu_hours for half in (first, second)]
    assert sum(unknown) == fleet(one).total.unknown_gpu_hours


def test_what_ends_at_the_border_is_of_the_window_behind_it():
    one = job(made(causes.CODE, hours=10.0), state="failed")
    assert within(one, None, 10 * HOUR_S).failures == []
    assert len(within(one, 10 * HOUR_S, None).failures) == 1


def test_a_job_that_was_queued_again_before_the_border_waits_there():
    again = made(hours=1.0)
    again.start_at, again.end_at = 5 * HOUR_S, 6 * HOUR_S
    found = within(job(made(causes.NODE, node="n1"), again), None, 3 * HOUR_S)
    assert (found.state, len(found.attempts), len(found.failures)) == ("waiting", 1, 1)
    assert within(job(made(), again), None, 5.5 * HOUR_S).state == "running"


def test_one_that_runs_is_drawn_to_the_end_of_the_window(sacct):
    begin = time.time() - 20 * 24 * HOUR_S
    sacct.rows(
        row("7", "RUNNING", Start=f"{begin:.0f}", End="Unknown",
            ElapsedRaw=f"{20 * 24 * HOUR_S:.0f}")
    )  # fmt: skip
    report("--since", "1d", "--html", "report.html")
    text = (sacct.folder / "report.html").read_text()
    (bar,) = re.findall(r'<i style="left:([\d.]+)%;width:([\d.]+)%[^>]*title="[^"]*running', text)
    assert [float(part) for part in bar] == pytest.approx([0.0, 100.0], abs=0.1)


def test_months_side_by_side_count_a_job_that_crosses_once(sacct, capsys):
    sacct.rows(row("7", "FAILED", ExitCode="1:0"))  # 12:10 to 13:10, 8 GPUs, 600 s in the queue
    found = [
        as_json(capsys, "--all-users", *words)[1]
        for words in (["--since", "2026-11-01", "--until", "2026-11-29T12:40:00"],
                      ["--since", "2026-11-29T12:40:00", "--until", "2026-12-01"])
    ]  # fmt: skip
    totals = [one["fleet"]["total"] for one in found]
    assert [one["failures"] for one in totals] == [0, 1]
    assert [one["wait_s"] for one in totals] == [600.0, 0.0]
    assert [one["gpu_hours"] for one in totals] == [4.0, 4.0]
    assert [one["jobs"][0]["state"] for one in found] == ["running", "failed"]


def test_an_end_that_is_ahead_of_our_clock_is_not_left_out(sacct, capsys):
    now = time.time()
    sacct.rows(row("7", "FAILED", Start=f"{now - 60:.0f}", End=f"{now + 3:.0f}", ExitCode="1:0"))
    assert as_json(capsys, "--all-users")[0] == 1
