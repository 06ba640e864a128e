"""`ftslurm report` on real Slurm after faults of known size: every number against what was done.

What it says is held against slurmctld's own word on each job, the ranks' traces and clocks, and the
clock of the one who broke things, never against another part of the report.
"""

from __future__ import annotations

import json
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import pytest
from batch_runs import daemon_away
from lab import Lab, wait_until
from report_faults import (
    BUGS,
    CRASH,
    FEW,
    FOREIGN_S,
    GPUS,
    HANG,
    INTERVAL,
    MORE,
    PATIENCE_S,
    STALL_S,
    STEP_S,
    WAIT_S,
    Faults,
    ToldRun,
)
from report_told import Told, between, same, when_ended

from ftslurm.diagnosis.hang import HangLimits
from ftslurm.files import read_json
from ftslurm.report.drains import LOST, OTHERS, OURS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NODES = {"crash": 2}
GPUS_OF = {"killed": 1, "again": 1}
"""Of a node, where not all of them."""
SECOND = 1.01
"""Slurm's times are whole seconds."""
FINE = (None, None, None)


@pytest.fixture(scope="module", params=[FEW, pytest.param((*FEW, *MORE), marks=pytest.mark.full)],
                ids=["few", "more"])  # fmt: skip
def faults(lab: Lab, request: pytest.FixtureRequest) -> Faults:
    return Faults(lab, request.param)


@pytest.fixture(scope="module")
def told(faults: Faults) -> Told:
    """When accounting has all rows: they come some seconds late."""

    def whole() -> Optional[Told]:
        jobs = len(faults.names) + len(faults.foreign)
        found = when_ended(faults, faults.report("--since", faults.since), jobs)
        return found if found and faults.knows_all_events() else None

    return wait_until(whole, timeout_s=PATIENCE_S, seen=faults.rows, interval_s=2)


@pytest.fixture(scope="module", autouse=True)
def degraded(faults: Faults, told: Told) -> Told:
    """At once: slurmctld forgets jobs after five minutes."""
    with daemon_away(faults.lab, "slurmdbd", verb="stop"):
        return Told(faults, faults.report("--since", faults.since))


def injected(faults: Faults) -> dict[str, list[tuple[Optional[str], Optional[str], Optional[int]]]]:
    """Cause, node and first failing rank of each attempt."""
    node = faults.killed_node
    done: dict[str, list[tuple[Optional[str], Optional[str], Optional[int]]]] = {
        "calm": [FINE],
        # Where it is queued once more, it is done already.
        "preempted": [("preempted", None, None), FINE, *[FINE] * faults.lab.queues_once_more],
        "broken": [("oom_gpu", None, BUGS[1][1]), *[("code", None, BUGS[n][1]) for n in (2, 3)]],
        "crash": [("unknown", None, CRASH[1]), FINE],  # who killed it nobody can know
        "hang": [("hang", faults.hung_node, HANG[1]), FINE],
        "killed": [("node", node, None), FINE],
        "cancelled": [("cancelled_user", None, None)],
        "fails": [("code", None, None)],
        "again": [("node", node, None), FINE],
        "waits": [FINE],
    }
    return {name: done[name] for name in (*faults.run, *faults.foreign)}


def test_every_attempt_ended_of_what_was_done_to_it(faults: Faults, told: Told) -> None:
    assert told.record["source"] == {"accounting": "sacct", "notes": []}
    assert told.jobs.keys() == injected(faults).keys()
    print(f"\n{'':34} {'done to it, or seen of it':>40} {'told of it':>40}")
    ends = {"broken": "failed", "cancelled": "cancelled", "fails": "failed"}
    for name, ends_of in injected(faults).items():
        same(f"{name}: state", told.jobs[name]["state"], ends.get(name, "completed"))
        found = [(one["cause"], one["node"], one["rank"]) for one in told.attempts(name)]
        assert len(found) == len(ends_of), faults.rows()
        for number, (one, true) in enumerate(zip(found, ends_of), start=1):
            same(f"{name} {number}: cause, node, rank", one, true)
    for number, attempt in enumerate(told.attempts("broken"), start=1):
        assert BUGS[number][2] in str(attempt["evidence"])
    if "crash" in faults.run:
        assert "Killed" in str(told.attempts("crash")[0]["evidence"])
    again = told.attempts("again")
    assert [one["nodes"] for one in again] == [faults.killed_node] * 2
    assert faults.killed_node not in told.attempts("killed")[1]["nodes"]


def test_lost_steps_are_those_that_no_checkpoint_held(faults: Faults, told: Told) -> None:
    killed = faults.run["killed"]
    lost = {
        "crash": [CRASH[0] - INTERVAL, 0],
        "hang": [HANG[0] - INTERVAL, 0],
        "broken": [BUGS[number][0] - INTERVAL for number in (1, 2, 3)],
        "killed": [max(killed.trained(1)) - killed.restored(2), 0],
    }
    assert lost["killed"][0] >= 1
    for name, attempts in told.ours().items():
        run = faults.run[name]
        batch = read_json(run.run.layout.run_json)["spec"]["optim"]["global_batch_size"]
        steps = lost.get(name, [0] * len(attempts))
        same(f"{name}: steps lost", [one["steps_lost"] for one in attempts], steps)
        tokens = [one["tokens_lost"] for one in attempts]
        same(f"{name}: tokens lost", tokens, [one * batch for one in steps])
        for number, (one, count) in enumerate(zip(attempts, steps), start=1):
            took_s = run.trace_s(number)
            lost_s = sum(took_s[len(took_s) - count :])
            same(f"{name} {number}: training lost (s)", one["lost_s"], lost_s, within=0.01)
            assert lost_s >= count * STEP_S
        job = told.jobs[name]
        committed = INTERVAL if name == "broken" else max(run.trained(len(attempts)))
        same(f"{name}: last verified step", job["committed_step"], committed)
        same(f"{name}: last step", job["last_step"], max(run.trained(len(attempts))))
        gpu_s = sum(one["lost_s"] for one in attempts) * _gpus(name)
        assert job["lost_gpu_hours"] == pytest.approx(gpu_s / 3600)
    for name in ("fails", "again"):
        assert told.jobs[name]["lost_gpu_hours"] is None  # nobody has seen what it did


def test_times_in_the_queue_and_on_nodes_are_slurmctlds(faults: Faults, told: Told) -> None:
    for name, attempts in told.ours().items():
        starts, first = faults.starts(name), attempts[0]
        same(f"{name}: waited in the queue (s)", first["wait_s"], starts[0].wait_s, within=SECOND)
        same(f"{name}: end", told.attempts(name)[-1]["end_at"], starts[-1].end_at, within=SECOND)
        assert first["start_at"] == pytest.approx(starts[0].start_at, abs=SECOND), name
        same(f"{name}: nodes", {one["num_nodes"] for one in attempts}, {NODES.get(name, 1)})
        same(f"{name}: GPUs", {one["gpus"] for one in attempts}, {_gpus(name)})
    for name in ("preempted", "killed"):
        first_start, second_start = faults.starts(name)[:2]
        first, second = told.attempts(name)[:2]
        same(f"{name}: end of the first", first["end_at"], first_start.end_at,
             within=first_start.off_s)  # fmt: skip
        assert second["start_at"] == pytest.approx(second_start.start_at, abs=SECOND)
    # One job of Slurm's, several attempts: they share its time, and only the first has waited.
    for name in {"broken", "crash", "hang"} & faults.run.keys():
        (start,), attempts = faults.starts(name), told.attempts(name)
        elapsed_s = sum(one["elapsed_s"] for one in attempts)
        same(f"{name}: begin to end (s)", elapsed_s, start.spent_s, within=SECOND)
        assert {one["wait_s"] for one in attempts[1:]} == {None}
    (waits,), (waited,) = faults.starts("waits"), told.attempts("waits")
    same("waits: waited in the queue (s)", waited["wait_s"], waits.wait_s)
    assert waits.wait_s >= WAIT_S - 1
    for name in ("killed", "again"):
        lost, over_at = faults.starts(name)[0], told.attempts(name)[0]["end_at"]
        print(f"{name}: node given up after {over_at - faults.killed_at:.1f} s")
        same(f"{name}: node given up", over_at, lost.end_at, within=lost.off_s)
        assert over_at > faults.killed_at - SECOND
    (fails,), (foreign,) = faults.starts("fails"), told.attempts("fails")
    same("fails: begin to end (s)", foreign["elapsed_s"], fails.spent_s)
    assert fails.spent_s >= FOREIGN_S


def test_from_a_failure_to_the_next_step_it_takes_what_the_ranks_clocks_say(
    faults: Faults, told: Told
) -> None:
    for name in {"broken", "crash", "hang"} & faults.run.keys():
        run, attempts = faults.run[name], told.attempts(name)
        for number, one in enumerate(attempts[:-1], start=1):
            # Behind its last step, and before the rank had said so; one that was killed or hangs
            # says nothing, and is gone before the next attempt.
            said_at = run.claimed_at(number + 1)
            if name == "broken":
                said_at = min(said_at, run.failed_at(number))
            first_at, second_at = run.steps_at(number + 1)[:2]
            between(f"{name} {number}: back after (s)", one["rto_s"], first_at - said_at,
                    second_at - run.steps_at(number)[-1])  # fmt: skip
            assert 0.0 <= one["mttd_s"] <= one["rto_s"]
            if name == "hang":
                assert one["mttd_s"] > HangLimits.floor_s - 2.0  # less long nobody is silent


def test_hours_are_what_slurmctld_gave(faults: Faults, told: Told) -> None:
    whole = {"node_hours": 0.0, "gpu_hours": 0.0, "wait_s": 0.0}
    off_h = off_s = 0.0
    for name, job in told.jobs.items():
        starts = faults.starts(name)
        assert {(one.nodes, one.gpus) for one in starts} == {(NODES.get(name, 1), _gpus(name))}
        spent_h = sum(one.spent_s for one in starts) / 3600
        off_s += sum(one.off_s for one in starts)
        own_h = sum(one.off_s for one in starts) * NODES.get(name, 1) * GPUS / 3600
        hours = {"node_hours": spent_h * NODES.get(name, 1), "gpu_hours": spent_h * _gpus(name)}
        for what, true in hours.items():
            same(f"{name}: {what}", job[what], true, within=own_h)
            whole[what] += true
        waited_s = sum(one.wait_s for one in starts)
        same(f"{name}: in the queue (s)", job["wait_s"], waited_s, within=SECOND * len(starts))
        whole["wait_s"] += waited_s
        off_h += own_h
    same("all: in the queue (s)", told.total["wait_s"], whole["wait_s"], within=off_s)
    for what, key in (("node_hours", "node_mtbf_h"), ("gpu_hours", "gpu_mtbf_h")):
        same(f"all: {what}", told.total[what], whole[what], within=off_h)
        # One fault of a node, which is the one failure of the cluster as well.
        same(f"all: {what} between faults", told.fleet[key], whole[what], within=off_h)
    first = faults.starts("again")[0]
    cut_short_h = (faults.starts("fails")[0].spent_s * GPUS + first.spent_s) / 3600
    same("of unknown loss (GPU-hours)", told.total["unknown_gpu_hours"], cut_short_h, within=off_h)


def test_the_fleet_counts_each_fault_once(faults: Faults, told: Told) -> None:
    fleet, total = told.fleet, told.total
    ends = injected(faults)
    causes = [one[0] for attempts in ends.values() for one in attempts if one[0]]
    free = {"preempted", "cancelled_user"}
    failures = [cause for cause in causes if cause not in free]
    same("jobs", total["jobs"], len(ends))
    same("attempts", total["attempts"], sum(map(len, ends.values())))
    same("failures", total["failures"], len(failures))
    assert fleet["states"] == {"completed": len(ends) - 3, "cancelled": 1, "failed": 2}
    counted = {cause: (one["attempts"], one["failures"]) for cause, one in _by(told, "cause")}
    assert counted.keys() == set(causes)
    for cause, found in counted.items():
        same(f"{cause}: attempts, failures", found, (causes.count(cause), failures.count(cause)))
    same("nodes to blame", [node for node, _ in _by(told, "node")], [faults.killed_node])
    # One fault, though it has ended two jobs.
    same("faults of nodes", fleet["node_faults"], 1)
    same("failures of hardware", fleet["hardware_failures"], 1)
    failed = [name for name, attempts in ends.items() if {one[0] for one in attempts} & {*failures}]
    recovered = 1 - len({"broken", "fails"}) / len(failed)
    same("share of failed jobs recovered", fleet["recovered_share"], recovered, within=1e-9)
    # Of the two jobs that the node failed, ours was kept off it and the foreign one was not.
    same("share hit again", fleet["hit_again_share"], 1 / 2)
    assert fleet["lemons"] == []  # of one fault on four nodes nothing follows


def test_a_drain_of_ours_is_told_from_a_lost_node_and_from_others_drains(
    faults: Faults, told: Told
) -> None:
    found = told.fleet["drains"]
    for kind, one in faults.drained.items():
        same(f"{kind}: nodes out", found[kind]["nodes"], [one.node])
        between(f"{kind}: out for (s)", 3600 * found[kind]["hours"], one.least_s - SECOND,
                one.most_s + SECOND)  # fmt: skip
    same("ours: rules", found[OURS]["reasons"], {"XID79": 1})
    same("others: reasons", found[OTHERS]["reasons"], {"a | b": 1})
    same("lost: nodes", found[LOST]["nodes"], [faults.killed_node])
    (_, back) = told.attempts("again")
    least_s = faults.started_at - faults.given_up_at - SECOND
    most_s = back["start_at"] - faults.killed_at + SECOND
    between("lost: out for (s)", 3600 * found[LOST]["hours"], least_s, most_s)


def test_goodput_and_waste_add_up_to_what_was_allocated(faults: Faults, told: Told) -> None:
    good, ours = told.fleet["goodput"], told.ours()
    parts = {name: good[f"{name}_s"] for name in ("trained", "lost", "stall", "restart", "other")}
    allocated_s = 3600 * sum(told.jobs[name]["node_hours"] for name in ours)
    same("allocated (s)", sum(parts.values()), allocated_s, within=0.5)
    assert good["share"] == pytest.approx(parts["trained"] / sum(parts.values()))
    stepped_s = sum(
        NODES.get(name, 1) * sum(faults.run[name].trace_s(number))
        for name, attempts in ours.items()
        for number in range(1, len(attempts) + 1)
    )
    in_steps_s = parts["trained"] + parts["lost"] + parts["stall"]
    same("trained, lost and stopped (s)", in_steps_s, stepped_s, within=0.1)
    lost_s = sum(NODES.get(name, 1) * one["lost_s"] for name in ours for one in ours[name])
    same("lost (s)", parts["lost"], lost_s, within=1e-6)
    behind_s = sum(NODES.get(name, 1) * _behind_saves_s(faults.run[name]) for name in ours)
    usual_s = statistics.median(faults.run["calm"].trace_s(1))
    between("stopped for saves (s)", parts["stall"], STALL_S + STEP_S - usual_s - 0.01, behind_s)
    least_s, most_s = map(sum, zip(*(_starting_s(name, faults) for name in ours)))
    others = [one for attempts in told.unclaimed().values() for one in attempts]
    rest_s = sum(one["num_nodes"] * one["elapsed_s"] for one in others)
    between("starting and restarting (s)", parts["restart"], least_s + rest_s, most_s + rest_s)
    waited_s = sum(
        NODES.get(name, 1) * (one["wait_s"] or 0) for name in ours for one in told.attempts(name)
    )
    same("in the queue (s)", good["queue_s"], waited_s, within=1e-6)
    # From the node's death until Slurm gave it up nobody trained and nobody started.
    first_at, second_at = faults.run["killed"].steps_at(1)[:2]
    idle_s = told.attempts("killed")[0]["end_at"] - faults.dead_at - (second_at - first_at)
    between("other (s)", parts["other"], idle_s - SECOND, allocated_s)
    assert told.fleet["runs_untold"] == 0


def test_a_run_by_name_is_told_with_the_same_numbers(faults: Faults, told: Told) -> None:
    ids = [Path(run.root).name for run in faults.run.values()]
    named = Told(faults, faults.report(*ids, faults.foreign["fails"].job_id))
    left = {"waits", "again"}
    assert named.jobs == {name: job for name, job in told.jobs.items() if name not in left}


def test_the_exit_code_says_whether_something_failed_and_whether_there_was_anything(
    faults: Faults, told: Told
) -> None:
    asked = {
        0: faults.run["calm"].root,
        1: faults.run["killed"].root,
        2: "no-such-run",
        3: "99999999",
    }
    for code, word in asked.items():
        same(f"exit code of {Path(word).name[:20]}", faults.ask(word).returncode, code)
    assert faults.ask(faults.run["preempted"].root).returncode == 0  # nothing has failed
    assert faults.ask("--since", "2026-13-45").returncode == 2


def test_two_windows_side_by_side_are_the_whole(faults: Faults, told: Told) -> None:
    """Cut in the midst of an attempt that a lost node has ended."""
    first = told.attempts("killed")[0]
    middle = int(first["start_at"] + first["elapsed_s"] / 2)
    cut = datetime.fromtimestamp(middle).isoformat()
    words = (["--since", faults.since, "--until", cut], ["--since", cut])
    halves = [json.loads(faults.ask("--json", *some).stdout)["fleet"] for some in words]
    assert all(one["total"]["node_hours"] for one in halves)
    for key in ("failures", "node_hours", "gpu_hours", "wait_s", "lost_gpu_hours"):
        both = sum(one["total"][key] for one in halves)
        same(f"{key} of both", both, pytest.approx(told.total[key], abs=1e-4))


def test_without_slurmdbd_it_says_so_and_tells_nothing_that_is_wrong(
    faults: Faults, told: Told, degraded: Told
) -> None:
    source = degraded.record["source"]
    assert source["accounting"] == "scontrol"
    assert "only jobs of the last minutes are known" in source["notes"][0]
    assert degraded.jobs.keys() == told.jobs.keys()
    ours = told.ours()
    for name, attempts in degraded.ours().items():
        known = ours[name]
        assert len(attempts) == len(known), name
        for less, more in zip(attempts, known):
            same = ("rank", "steps_lost", "lost_s", "tokens_lost", "committed_step", "num_nodes")
            assert {key: less[key] for key in same} == {key: more[key] for key in same}
            # Of a node that died with the batch script nobody but Slurm knew.
            assert less["cause"] == ("unknown" if more["cause"] == "node" else more["cause"]), name
            assert less["node"] == (None if more["cause"] == "node" else more["node"])
            assert less["gpus"] == more["gpus"]
            assert less["elapsed_s"] <= more["elapsed_s"] + SECOND, (name, less, more)
            # Of a start that slurmctld has forgotten, since when it was the run's.
            begun = {more["start_at"], faults.run[name].claimed_at(less["number"])}
            assert less["start_at"] in begun, (name, less, more)
    assert degraded.jobs["fails"]["attempts"] == told.jobs["fails"]["attempts"]
    # Of a job that is none of ours the newest attempt alone.
    assert degraded.attempts("again") == told.attempts("again")[1:]
    assert (degraded.fleet["node_faults"], degraded.fleet["node_mtbf_h"]) == (0, None)
    assert degraded.total["failures"] == told.total["failures"] - 1


def _gpus(name: str) -> int:
    """Of all nodes of a job."""
    return GPUS_OF.get(name, GPUS) * NODES.get(name, 1)


def _behind_saves_s(run: ToldRun) -> float:
    """What the steps took in which a save fell, whole."""
    found = 0.0
    for attempt in range(1, run.attempts + 1):
        saved = run.committed(attempt)
        took = dict(zip(run.trained(attempt), run.trace_s(attempt))) if saved else {}
        found += sum(took_s for step, took_s in took.items() if step - 1 in saved)
    return found


def _starting_s(name: str, faults: Faults) -> tuple[float, float]:
    """Node-seconds at least and at most from the start of each attempt until its first step began:
    of one within the job before it, from the end of the step before at most."""
    run, starts = faults.run[name], faults.starts(name)
    least_s = most_s = 0.0
    for attempt in range(1, run.attempts + 1):
        # A step is told of when it is done, and before the next one is.
        first_at, told_by = (at - run.trace_s(attempt)[0] for at in run.steps_at(attempt)[:2])
        if starts:
            begun_at = starts.pop(0).start_at
            least_s += first_at - begun_at - SECOND
            most_s += told_by - begun_at
        else:
            most_s += told_by - run.steps_at(attempt - 1)[-1]
    return least_s * NODES.get(name, 1), most_s * NODES.get(name, 1)


def _by(told: Told, what: str) -> list[tuple[str, dict[str, Any]]]:
    return sorted(told.fleet["by"][what].items())
