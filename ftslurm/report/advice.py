"""One line of advice for each finding, with the key or the sbatch option to change. Data and pure.

A finding without a thing to do gets none: advice that fits everything helps with nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftslurm.diagnosis import causes
from ftslurm.report.drains import OURS, Kind
from ftslurm.report.fleet import Fleet, Group
from ftslurm.report.lemons import Lemon

MOST_SUSPECTS = 3
MOST_NODES = 3
"""Named with a cause."""

BY_CAUSE = {
    causes.TIME_LIMIT: "a run goes on by itself after its limit; a job of another kind needs a"
    " longer --time, or steps that end before it",
    causes.PREEMPTED: "a run loses nothing by it if saves fit the grace: `ftslurm verify RUN` says"
    " what was committed; a QOS without preemption avoids the wait",
    causes.OOM_HOST: "ask for more memory (cluster.mem, --mem), or fewer workers"
    " (data.num_workers)",
    causes.OOM_GPU: "a smaller micro-batch (optim.micro_batch_size) or sharding"
    " (parallel.strategy=fsdp)",
    causes.NODE: "keep off the node (cluster.exclude, --exclude) and tell the site; a spare"
    " (cluster.spares) takes over in seconds",
    causes.GPU: "have the node drained: `ftslurm health probe` on it names the GPU and the rule",
    causes.NETWORK_TRANSIENT: "where it comes back, look at the links: `ftslurm health probe`"
    " (rdma), and the counters of the switches",
    causes.STORAGE: "point runs_dir at another file system, or a tier that is nearer",
    causes.CAPACITY: "make room or ask for quota; checkpoint.keep_last bounds what a run keeps",
    causes.HANG: "the stacks of all ranks are in the attempt's evidence/: the rank that is not in"
    " the collective is the one to look at",
    causes.STRAGGLER: "health.preflight=always measures nodes before the ranks start;"
    " recovery.evict=now gives a slow one up",
    causes.CHECKPOINT: "`ftslurm verify RUN` says which step is whole",
    causes.DATA: "the store is named in the decision; `ftslurm data` builds it anew",
    causes.NUMERIC: "recovery.on_nan=skip passes over the batches that do it",
    causes.CODE: "no restart mends it: a run has the traceback of its first rank in the attempt's"
    " ranks/, any other job its own log",
    causes.CANCELLED_ADMIN: "ask the site: the job's comment or its mail may say why",
    causes.UNKNOWN: "`ftslurm status RUN --attempt N` shows all that is on record of a run; of"
    " other jobs Slurm says no more: `ftslurm run` has their nodes watched (recovery.agents)",
}


_CLUSTER, _PROGRAM = "the cluster's fault", "the program's fault"
_NOBODY, _OPEN = "nobody's fault", "nobody knows whose fault"
WHOSE = {
    causes.PREEMPTED: _NOBODY, causes.TIME_LIMIT: _NOBODY, causes.CANCELLED_USER: _NOBODY,
    causes.CANCELLED_ADMIN: "the site's decision", causes.NODE: _CLUSTER, causes.GPU: _CLUSTER,
    causes.NETWORK_TRANSIENT: _CLUSTER, causes.STORAGE: _CLUSTER, causes.STRAGGLER: _CLUSTER,
    causes.CAPACITY: "its user's or the site's fault", causes.OOM_HOST: _PROGRAM,
    causes.OOM_GPU: _PROGRAM, causes.DATA: _PROGRAM, causes.NUMERIC: _PROGRAM,
    causes.CODE: _PROGRAM, causes.HANG: _OPEN, causes.CHECKPOINT: _OPEN, causes.UNKNOWN: _OPEN,
}  # fmt: skip
"""As a rule: an attempt's evidence may tell better."""


@dataclass(frozen=True)
class Finding:
    what: str
    advice: str


def findings(fleet: Fleet) -> list[Finding]:
    """What stands out, the dearest first."""
    found = _of_differing(fleet)
    by_cause = sorted(
        fleet.by["cause"].items(),
        key=lambda item: (-item[1].lost_gpu_hours - item[1].unknown_gpu_hours, -item[1].jobs),
    )
    for cause, group in by_cause:
        if group.failures:
            attempts = f"{group.failures:,} attempt{'s' if group.failures > 1 else ''}"
            of = f"{group.jobs:,} job{'s' if group.jobs > 1 else ''}"
            what = f"{cause}, {WHOSE[cause]}: {attempts} of {of}"
            what += f"{_where(fleet.at_fault.get(cause, {}))}{_cost(group)}"
            what += f"; {causes.MEANING[cause]}"
            found.append(Finding(what, BY_CAUSE[cause]))
    judged = fleet.judged
    for one in judged.lemons:
        advice = f"keep off it (cluster.exclude={one.node}, --exclude) and have the site test it"
        found.append(Finding(_stands_out(one), advice))
    for one in judged.suspects[:MOST_SUSPECTS]:
        advice = "too little to tell, it may be chance: `ftslurm health probe` on it looks now"
        found.append(Finding(_stands_out(one), advice))
    found += [*_of_drains(fleet), *_of_goodput(fleet)]
    return found


def _cost(group: Group) -> str:
    lost, unknown = group.lost_gpu_hours, group.unknown_gpu_hours
    if unknown and not lost:
        return f", at most {hours_told(unknown)} GPU-hours lost"
    told = f", {hours_told(lost)} GPU-hours lost" if lost or group.gpu_hours else ""
    return f"{told}, at most {hours_told(unknown)} more" if unknown else told


def _where(nodes: Mapping[str, int]) -> str:
    """The nodes that were blamed most."""
    order = sorted(nodes, key=lambda node: (-nodes[node], node))
    told = ", ".join(f"{node} ({nodes[node]})" for node in order[:MOST_NODES])
    more = len(order) - MOST_NODES
    told += f" and {more:,} other node{'s' if more > 1 else ''}" if more > 0 else ""
    return f" on {told}" if told else ""


def hours_told(value: float) -> str:
    """As hours are shown everywhere."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of_differing(fleet: Fleet) -> list[Finding]:
    """First of all: whatever it cost, what came out of the run may be wrong."""
    if not fleet.differing:
        return []
    runs = f"{fleet.differing:,} run{'s' if fleet.differing > 1 else ''}"
    what = f"{runs} did not train again what had been trained before, e.g. {fleet.first_differing}"
    advice = (
        "a node that computes wrongly (health.preflight=always tries each), GPUs of another model,"
        " or an operation that is not deterministic; deterministic=false says that it may be so"
    )
    return [Finding(what, advice)]


def _stands_out(one: Lemon) -> str:
    seen = f"{one.failed} of {one.jobs} jobs failed on it, {one.programs} programs more often than"
    seen += " elsewhere"
    if one.is_blamed:
        seen = f"{one.failed} faults said to be its own, on {one.jobs} jobs"
    often = f"once in {1.0 / one.chance:,.0f}" if one.chance > 1e-6 else "never in a million"
    return (
        f"node {one.node}: {seen}; chance would give {one.expected:.1f}, and so many {often} such"
        " reports"
    )


def _of_drains(fleet: Fleet) -> list[Finding]:
    """Those of ours: they are no failures of jobs."""
    ours = fleet.drains.kinds[OURS] if fleet.drains is not None else Kind()
    if not ours.events:
        return []
    rules = ", ".join(f"{count} x {rule}" for rule, count in ours.most())
    what = f"ftslurm drained {len(ours.nodes):,} node{'s' if len(ours.nodes) > 1 else ''} ({rules})"
    advice = (
        "no job failed by it; `ftslurm health probe --explain` on the node says what was seen, and"
        " whether it still is"
    )
    return [Finding(what, advice)]


def _of_goodput(fleet: Fleet) -> list[Finding]:
    good = fleet.goodput
    allocated_s = good.allocated_s
    if not allocated_s:
        return []
    told = {
        "trained again or lost": (
            good.lost_s, "save more often (checkpoint.interval_s, checkpoint.interval_steps: the"
            " one that is due first; `ftslurm plan` says how often)"
        ),
        "stopped for saves": (
            good.stall_s, "save less often (checkpoint.interval_s with checkpoint.interval_steps=0:"
            " otherwise the steps may come first)"
        ),
        "starting and restarting": (
            good.restart_s, "standby ranks (recovery.standby=true) and a staged environment"
            " (cluster.environment) shorten each start"
        ),
    }  # fmt: skip
    return [
        Finding(f"{100 * spent_s / allocated_s:.1f} % of the allocated time {what}", advice)
        for what, (spent_s, advice) in told.items()
        if spent_s > 0.05 * allocated_s
    ]
