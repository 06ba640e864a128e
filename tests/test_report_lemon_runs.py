"""A node that runs have blamed again and again is a lemon, by their own records; once is none."""

import time
from pathlib import Path

import doctor_runs
import pytest
from doctor_runs import OldRun
from test_report_command import as_json, report, sacct

__all__ = ["sacct"]

HOUR_S = 3600.0
NODES = [f"n{number}" for number in range(1, 9)]
SICK = "n3"


@pytest.fixture
def runs(sacct, monkeypatch):
    """Nothing but run directories tells; they began two days ago."""
    for fails in (sacct.fails, sacct.controller_fails):
        fails("error: Connection refused")
    monkeypatch.setattr(doctor_runs, "BEGAN", time.time() - 48 * HOUR_S)
    return Path("runs")


def hit(runs, number, at, blamed, *, cause="gpu"):
    """A run on three nodes, one of which is blamed, given up and replaced."""
    run = OldRun(runs, f"run-{number}")
    others = [node for node in NODES if node != blamed]
    nodes = [others[number % 7], blamed, others[(number + 1) % 7]]
    run.attempt(at, steps=range(1, 21), nodes=nodes)
    run.decide(1, at + 60, cause, exclude=[blamed], blamed={"node": blamed, "rank": 1},
               reason=f"{blamed}: Xid 79, the GPU has fallen off the bus")  # fmt: skip
    run.attempt(at + 100, steps=range(11, 31), restored=10, nodes=[nodes[0], nodes[2]])
    run.decide(2, at + 140, "finished", action="done")


def lemons(runs, capsys):
    """Beside runs of which nothing is blamed, three nodes each."""
    for number in range(16):
        run = OldRun(runs, f"quiet-{number}")
        nodes = [NODES[(number + place) % 8] for place in (0, 2, 5)]
        run.attempt(number * HOUR_S, steps=range(1, 21), nodes=nodes)
        run.decide(1, number * HOUR_S + 60, "finished", action="done")
    code, record = as_json(capsys, "--all-users")
    assert code == 1
    return record["fleet"], [one["node"] for one in record["fleet"]["lemons"]]


def test_faults_of_one_node_hours_apart_make_it_a_lemon_by_the_runs_own_records(runs, capsys):
    for number in range(5):
        hit(runs, number, number * HOUR_S, SICK)
    fleet, found = lemons(runs, capsys)
    assert found == [SICK]
    (lemon,) = fleet["lemons"]
    assert (lemon["is_blamed"], lemon["failed"], lemon["jobs"]) == (True, 5, 11)
    assert fleet["by"]["node"][SICK]["failures"] == fleet["node_faults"] == 5
    assert report("--all-users") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"lemon nodes {SICK}: more failures than chance would give" in text
    assert f"node {SICK}: 5 faults said to be its own, on 11 jobs" in text
    assert f"cluster.exclude={SICK}" in text


def test_one_fault_that_ends_five_runs_at_once_makes_no_lemon(runs, capsys):
    for number in range(5):
        hit(runs, number, number * 60.0, SICK)
    fleet, found = lemons(runs, capsys)
    assert (found, fleet["node_faults"]) == ([], 1)


def test_faults_that_each_hit_another_node_make_no_lemon(runs, capsys):
    for number in range(5):
        hit(runs, number, number * HOUR_S, NODES[number])
    fleet, found = lemons(runs, capsys)
    assert (found, fleet["suspects"], fleet["node_faults"]) == ([], [], 5)


def test_what_was_said_of_a_program_blames_no_node(runs, capsys):
    for number in range(5):
        hit(runs, number, number * HOUR_S, SICK, cause="oom_gpu")
    fleet, found = lemons(runs, capsys)
    assert (found, fleet["node_faults"], fleet["by"]["node"]) == ([], 0, {})
