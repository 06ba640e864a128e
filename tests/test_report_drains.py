"""Nodes out of service: ours, lost and others' told apart, with the hours of the window."""

from pathlib import Path

import pytest
from test_job_table import row
from test_report_command import as_json, report, sacct

from ftslurm.errors import SchedulerError
from ftslurm.health.reason import PREFIX
from ftslurm.report.drains import LOST, OTHERS, OURS, drains
from ftslurm.scheduler.node_events import NodeEvent, parse_events, read_events
from ftslurm.scheduler.slurm import Completed

__all__ = ["sacct"]

XID = f"{PREFIX}XID79 gpu3 0000:9b:00 boot=ab12cd34 2026-11-29T12:00:00Z"
HOUR_S = 3600.0


def event(node, begin, end, reason, state="DRAIN"):
    return NodeEvent(node, begin, end, state, "root(0)", reason)


def kinds(*events, since=None, until=None, now=10 * HOUR_S):
    return drains(events, since=since, until=until, now=now).kinds


def test_a_drain_of_ours_a_lost_node_and_an_administrators_are_told_apart():
    found = kinds(
        event("n1", 0.0, HOUR_S, XID),
        event("n2", 0.0, HOUR_S, "Not responding", state="DOWN*"),
        event("n3", 0.0, 2 * HOUR_S, "Node unexpectedly rebooted", state="DOWN"),
        event("n4", 0.0, 3 * HOUR_S, "disk | swap, not ftslurm:XID79"),
        event("n4", 5 * HOUR_S, None, ""),
    )
    assert {name: (kind.events, kind.nodes, kind.hours) for name, kind in found.items()} == {
        OURS: (1, ["n1"], 1.0), LOST: (2, ["n2", "n3"], 3.0), OTHERS: (2, ["n4"], 8.0),
    }  # fmt: skip
    assert found[OURS].reasons == {"XID79": 1}
    assert set(found[OTHERS].reasons) == {"disk | swap, not ftslurm:XID79", "no reason"}


def test_one_loss_of_a_node_is_one_event_though_its_reason_changes():
    """slurmctld says so again when the node has booted."""
    found = kinds(
        event("n2", 0.0, HOUR_S, "Not responding", state="DOWN*"),
        event("n2", HOUR_S, 2 * HOUR_S, "Node unexpectedly rebooted", state="DOWN"),
        event("n2", 5 * HOUR_S, 6 * HOUR_S, "Not responding", state="DOWN*"),
    )
    assert (found[LOST].events, found[LOST].nodes, found[LOST].hours) == (2, ["n2"], 3.0)


@pytest.mark.parametrize(
    ("since", "until", "hours"), [(None, None, 8.0), (4.0, None, 6.0), (4.0, 5.0, 1.0)]
)
def test_hours_outside_the_window_do_not_count(since, until, hours):
    bounds = [None if one is None else one * HOUR_S for one in (since, until)]
    found = kinds(event("n1", 2 * HOUR_S, None, XID), since=bounds[0], until=bounds[1])
    assert found[OURS].hours == hours


def test_a_reason_may_hold_the_delimiter_and_lines_that_are_none_are_left_out():
    lines = ["n2|2026-11-29T12:00:00|Unknown|DRAIN|root(0)|a|b", "its second line", "", "n3|x|y"]
    (found,) = parse_events(lines)
    assert (found.node, found.end_at, found.state, found.reason) == ("n2", None, "DRAIN", "a|b")


def test_what_22_05_has_printed_is_read():
    lines = (Path(__file__).parent / "data/slurm-22.05/events.txt").read_text().splitlines()
    found = kinds(*parse_events(lines), now=parse_events(lines)[0].begin_at + HOUR_S)
    assert (found[OURS].nodes, found[OURS].reasons) == (["n1"], {"XID79": 1})
    assert found[OURS].hours == pytest.approx(4 / 3600)
    assert found[OTHERS].reasons == {"disk swap | Bob's = ü": 1, "broken fan": 1}
    assert found[OTHERS].hours == 2.0


@pytest.mark.parametrize(("version", "lost"), [("24.11", "n1"), ("26.05", "n4")])
def test_what_others_have_printed_is_read(version, lost):
    """Of each a drain of ours, an administrator's and a node that was switched off."""
    text = (Path(__file__).parent / f"data/slurm-{version}/events.txt").read_text()
    found = kinds(*parse_events(text.splitlines()), now=2e9)
    assert {name: (kind.nodes, kind.reasons) for name, kind in found.items()} == {
        OURS: (["n1"], {"XID79": 1}),
        LOST: ([lost], {"Not responding": 1}),
        OTHERS: (["n2"], {"a | b": 1}),
    }


def test_that_nobody_answers_is_an_error():
    with pytest.raises(SchedulerError, match="no answer"):
        read_events("now-7days", "now", run=lambda argv, timeout_s: Completed(1, "", "away"))


def test_the_report_has_them_in_text_and_json_and_asks_for_its_window(sacct, capsys):
    sacct.rows(row("7"))
    sacct.had_events(
        f"n1|2026-11-29T12:00:00|2026-11-29T14:00:00|DRAIN|root(0)|{XID}",
        "n2|2026-11-29T12:00:00|2026-11-29T13:00:00|DOWN*|slurm(64030)|Not responding",
    )
    _, record = as_json(capsys, "--since", "2026-11-29", "--until", "2026-11-30")
    told = record["fleet"]["drains"]
    assert (told["ours"]["hours"], told["ours"]["reasons"]) == (2.0, {"XID79": 1})
    assert (told["lost"]["nodes"], told["others"]["events"]) == (["n2"], 0)
    asked = (sacct.folder / "events_asked").read_text().split()
    assert {"start=2026-11-29", "end=2026-11-30"} <= set(asked)
    report("--since", "2026-11-29", "--until", "2026-11-30")
    out = " ".join(capsys.readouterr().out.split())
    assert "drained by ftslurm: 1 time on 1 node, 2 node-hours (1 x XID79)" in out
    assert "lost, Slurm had no answer: 1 time on 1 node, 1 node-hours" in out


def test_without_an_answer_it_says_so_and_a_named_run_does_not_ask(sacct, capsys):
    sacct.rows(row("7"))
    (sacct.folder / "events").unlink()
    _, record = as_json(capsys)
    assert record["fleet"]["drains"] is None
    assert "out of service is not known" in record["source"]["notes"][0]
    (sacct.folder / "events_asked").unlink()
    assert as_json(capsys, "7")[1]["source"]["notes"] == []
    assert not (sacct.folder / "events_asked").exists()


def test_a_reason_that_stands_on_in_the_next_event_counts_once():
    """By who goes down while it is drained, say."""
    found = kinds(
        event("n1", 0.0, HOUR_S, XID),
        event("n1", HOUR_S, 2 * HOUR_S, XID, state="DOWN*+DRAIN"),
        event("n1", 5 * HOUR_S, 6 * HOUR_S, XID),
    )[OURS]
    assert (found.events, found.nodes, found.reasons) == (2, ["n1"], {"XID79": 2})
