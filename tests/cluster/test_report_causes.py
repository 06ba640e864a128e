"""`ftslurm report` on real Slurm after each cause that can be brought about: its numbers against
what was injected, the ranks' own clocks and traces, and what slurmctld said meanwhile.
"""

from __future__ import annotations

from typing import Optional

import pytest
from health_site import HealthSite
from lab import wait_until
from report_causes import CAUSES, LOST, SAYS, SLOW_RANK, WAY, Causes
from report_faults import PATIENCE_S
from report_told import Told, between, ended_events, same, when_ended

from ftslurm.report.drains import LOST as LOST_NODES
from ftslurm.report.drains import OTHERS, OURS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.full]

SECOND = 1.01
"""Slurm's times are whole seconds."""
FREE = {None, "time_limit"}
"""No failures."""
KILLED = {("said", 5), ("ruined", 1)}
"""That could not say when: attempts."""


@pytest.fixture(scope="module")
def causes(installed_site: HealthSite) -> Causes:
    return Causes(installed_site)


@pytest.fixture(scope="module")
def told(causes: Causes) -> Told:
    """When accounting has all rows: they come some seconds late."""

    def whole() -> Optional[Told]:
        found = when_ended(causes, causes.report(), len(causes.run) + len(causes.foreign))
        known = {node for node, _ in ended_events(causes.lab, causes.since)}
        return found if causes.sick_node in known else None

    return wait_until(
        whole, timeout_s=PATIENCE_S, seen=lambda: "accounting lacks rows", interval_s=2
    )


def test_every_attempt_ended_of_what_was_done_to_it(causes: Causes, told: Told) -> None:
    print(f"\n{'':34} {'done to it, or seen of it':>40} {'told of it':>40}")
    blamed = {"sick": (causes.sick_node, SAYS["sick"][1][1]), "slow": (causes.slow_node, SLOW_RANK)}
    for name, run in causes.run.items():
        same(f"{name}: state", told.jobs[name]["state"],
             "failed" if name == "ruined" else "completed")  # fmt: skip
        attempts = told.attempts(name)
        assert len(attempts) == len(CAUSES[name]) == run.attempts + (name == "ruined"), run.says()
        for number, (one, cause) in enumerate(zip(attempts, CAUSES[name]), start=1):
            said = SAYS.get(name, {}).get(number)
            true = (cause, None, said[1] if said else None)
            if name in blamed and number == 1:
                true = (cause, *blamed[name])
            if cause == "checkpoint":
                true = (cause, None, 0)  # who looks for one
            same(f"{name} {number}: cause, node, rank", (one["cause"], one["node"], one["rank"]),
                 true)  # fmt: skip
            text = said[3] if said else ""
            assert text in " ".join(str(line["text"]) for line in one["evidence"]), one["evidence"]
    (late,) = told.attempts("foreign late")
    same("foreign late: cause", late["cause"], "time_limit")
    assert causes.sick_node not in told.attempts("sick")[1]["nodes"]
    assert causes.slow_node not in told.attempts("slow")[1]["nodes"]


def test_lost_steps_are_those_behind_the_save_that_was_left(causes: Causes, told: Told) -> None:
    for name, run in causes.run.items():
        attempts = told.attempts(name)
        same(f"{name}: steps lost", [one["steps_lost"] for one in attempts], LOST[name])
        for number, (one, steps) in enumerate(zip(attempts, LOST[name]), start=1):
            took_s = run.trace_s(number) if steps else []
            lost_s = sum(took_s[len(took_s) - steps :])
            same(f"{name} {number}: training lost (s)", one["lost_s"], lost_s, within=0.01)
        job = told.jobs[name]
        done = max(max(run.trained(number)) for number in range(1, run.attempts + 1))
        same(f"{name}: last step", job["last_step"], done)
        same(f"{name}: last verified step", job["committed_step"],
             None if name == "ruined" else done)  # fmt: skip


def test_from_the_failure_to_the_next_step_it_takes_what_the_ranks_clocks_say(
    causes: Causes, told: Told
) -> None:
    for name, says in SAYS.items():
        run = causes.run[name]
        for number in says:
            one = told.attempts(name)[number - 1]
            if number == run.attempts:
                assert one["rto_s"] is None  # it never trained again
                continue
            is_killed = (name, number) in KILLED
            began_at = run.steps_at(number)[-1] if is_killed else run.injected_at(number)
            gone_at = run.claimed_at(number + 1)
            said_at = gone_at if is_killed else min(run.failed_at(number), gone_at)
            first_at, second_at = run.steps_at(number + 1)[:2]
            between(f"{name} {number}: back after (s)", one["rto_s"], first_at - said_at,
                    second_at - began_at)  # fmt: skip
            between(f"{name} {number}: found after (s)", one["mttd_s"], 0.0, gone_at - began_at)


def test_times_on_nodes_and_in_the_queue_are_slurmctlds(causes: Causes, told: Told) -> None:
    for name, run in causes.run.items():
        starts, attempts = causes.ledger.of(run.job_id), told.attempts(name)
        first_in = [one for one in attempts if one["wait_s"] is not None]
        same(f"{name}: starts by Slurm", len(first_in), len(starts))
        places = [attempts.index(one) for one in first_in] + [len(attempts)]
        for number, start in enumerate(starts):
            of = attempts[places[number] : places[number + 1]]
            what = f"{name} {number + 1}"
            spent_s = sum(one["elapsed_s"] for one in of)
            same(f"{what}: on its nodes (s)", spent_s, start.spent_s, within=start.off_s)
            same(f"{what}: in the queue (s)", of[0]["wait_s"], start.wait_s, within=SECOND)
            same(f"{what}: nodes", {one["num_nodes"] for one in of}, {start.nodes})
            same(f"{what}: GPUs", {one["gpus"] for one in of}, {start.gpus})


def test_the_fleet_has_what_was_injected(causes: Causes, told: Told) -> None:
    fleet, total = told.fleet, told.total
    jobs = (*causes.run.values(), *causes.foreign.values())  # slurmctld may hold earlier tests'
    starts = [start for job in jobs for start in causes.ledger.of(job.job_id)]
    ended = [cause for of in CAUSES.values() for cause in of] + ["time_limit"]  # a foreign job
    failures = [cause for cause in ended if cause not in FREE]
    same("attempts", total["attempts"], len(ended))
    same("failures", total["failures"], len(failures))
    counted = {cause: one["attempts"] for cause, one in fleet["by"]["cause"].items()}
    same("attempts by cause", counted, {c: ended.count(c) for c in {*ended} - {None}})
    node_h = sum(one.spent_s * one.nodes for one in starts) / 3600
    gpu_h = sum(one.spent_s * one.gpus for one in starts) / 3600
    off_h = sum(one.off_s * one.nodes for one in starts) / 3600
    same("node-hours", total["node_hours"], node_h, within=off_h)
    same("GPU-hours", total["gpu_hours"], gpu_h, within=2 * off_h)
    same("in the queue (s)", total["wait_s"], sum(one.wait_s for one in starts),
         within=SECOND * len(starts))  # fmt: skip
    lost_s = sum(
        sum(run.trace_s(number)[-steps:]) * causes.ledger.of(run.job_id)[0].gpus
        for name, run in causes.run.items()
        for number, steps in enumerate(LOST[name], start=1)
        if steps
    )
    same("GPU-hours lost", total["lost_gpu_hours"], lost_s / 3600, within=1e-4)
    same("faults of nodes", fleet["node_faults"], 1)
    same("node-hours between them", fleet["node_mtbf_h"], node_h, within=off_h)
    # The network's and the storage's were on one node within a minute, and may be of one fault.
    same("failures of the cluster", fleet["hardware_failures"], 2)
    same("GPU-hours between them", fleet["gpu_mtbf_h"], gpu_h / 2, within=off_h)
    same("nodes to blame", list(fleet["by"]["node"]), [causes.sick_node])
    same("share of failed jobs recovered", fleet["recovered_share"], 3 / 4)
    same("share hit again", fleet["hit_again_share"], 0.0)


def test_goodput_is_what_the_traces_say_lasts_of_what_slurmctld_gave(
    causes: Causes, told: Told
) -> None:
    good, kept_s, lost_s = told.fleet["goodput"], 0.0, 0.0
    for name, run in causes.run.items():
        nodes = causes.ledger.of(run.job_id)[0].nodes
        for number in range(1, run.attempts + 1):
            took_s, steps = run.trace_s(number), LOST[name][number - 1]
            lost_s += nodes * sum(took_s[len(took_s) - steps :])
            kept_s += nodes * sum(took_s[: len(took_s) - steps])
    same("training lost (s)", good["lost_s"], lost_s, within=0.1)
    same("training that lasts, and saves (s)", good["trained_s"] + good["stall_s"], kept_s,
         within=0.5)  # fmt: skip
    starts = [one for run in causes.run.values() for one in causes.ledger.of(run.job_id)]
    given_s = sum(one.spent_s * one.nodes for one in starts)
    off = sum(one.off_s * one.nodes for one in starts) / given_s
    same("goodput", good["share"], (kept_s - good["stall_s"]) / given_s, within=off)


def test_the_drain_of_the_epilog_is_told_with_its_rule_and_time(causes: Causes, told: Told) -> None:
    found = told.fleet["drains"]
    same("ours: nodes out", found[OURS]["nodes"], [causes.sick_node])
    same("ours: rules", found[OURS]["reasons"], {WAY.upper().replace(" ", ""): 1})
    least_s = causes.resumed_from - causes.seen_drained_at - SECOND
    most_s = causes.resumed_at - causes.fell_sick_at + SECOND
    between("ours: out for (s)", 3600 * found[OURS]["hours"], least_s, most_s)
    assert [found[kind]["events"] for kind in (LOST_NODES, OTHERS)] == [0, 0]
