"""Plans as lines for a person. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftslurm.plan.intervals import AGAIN, Waste, after_failure_s, best_s
from ftslurm.plan.intervals import waste as waste_of
from ftslurm.plan.plan import PEER_OVERHEAD, PEER_RESTART_S, PEER_SHARE, Plan, Storage
from ftslurm.plan.published import Row
from ftslurm.plan.simulate import Played

LEAST_GOODPUT = 1e-6
"""A run with less is called one that does not end."""


def plan_lines(plan: Plan, restart: Mapping[str, float]) -> list[str]:
    costs, waste = plan.costs, plan.waste
    parts = " + ".join(f"{name} {seconds:g}" for name, seconds in restart.items())
    chosen = "the best" if plan.is_best else "as asked for"
    lines = [
        f"{plan.gpus:,} GPU{'s' if plan.gpus > 1 else ''}, {_hours(plan)} between failures of one",
        f"  between failures   {duration(plan.mtbf_s)}: {plan.failures_per_day:.2g} a day",
        f"  a save             stops training {costs.stall_s:g} s, durable {costs.lag_s:g} s later",
        f"  a restart          {costs.restart_s:g} s ({parts})",
        f"  save every         {duration(plan.interval_s)} ({chosen}); Young"
        f" {duration(plan.young_s)}, Daly {duration(plan.daly_s)}, exact {duration(plan.exact_s)}",
        f"  a failure costs    {_failure(after_failure_s(restart, plan.interval_s, costs.lag_s))}",
        f"  wasted             {_split(waste)}",
        f"  goodput            {_percent(waste.goodput)};"
        f" {plan.gpu_hours_lost_per_day:,.0f} GPU-hours lost a day",
        f"  peer redundancy    {_peers(plan)}",
    ]
    if plan.storage is not None:
        lines += _storage_lines(plan.storage)
    return [*lines, *_advice(plan)]


def table_lines(plans: Sequence[Plan]) -> list[str]:
    head = (
        f"{'GPUs':>8} {'between failures':>16} {'a day':>7} {'Young':>9} {'Daly':>9} {'exact':>9}"
        f" {'saves':>7} {'again':>7} {'restarts':>8} {'goodput':>8} {'GPU-h lost/day':>14}"
    )
    lines = [head]
    for plan in plans:
        waste = plan.waste
        lines.append(
            f"{plan.gpus:>8,} {duration(plan.mtbf_s):>16} {plan.failures_per_day:>7.2g}"
            f" {duration(plan.young_s):>9} {duration(plan.daly_s):>9} {duration(plan.exact_s):>9}"
            f" {_percent(waste.stall):>7} {_percent(waste.lost):>7} {_percent(waste.restart):>8}"
            f" {_percent(waste.goodput):>8} {plan.gpu_hours_lost_per_day:>14,.0f}"
        )
    costs = plans[0].costs
    lines.append(
        f"a save stops training {costs.stall_s:g} s and is durable {costs.lag_s:g} s later;"
        f" a restart takes {costs.restart_s:g} s; {_hours(plans[0])}"
        " between failures of one GPU"
    )
    return lines


def simulation_lines(plan: Plan, played: Played, shape: float) -> list[str]:
    told = "at random" if shape == 1.0 else f"in bursts (Weibull, shape {shape:g})"
    seen = played.waste
    off = seen.total - plan.waste.total
    end = "" if played.is_done else f"; given up, with {duration(played.trained_s)} of it trained"
    return [
        f"simulated {duration(played.wall_s)}, {played.failures:,} failures {told}{end}",
        f"  wasted             {_split(seen)}",
        f"  against formulas   {100 * off:+.2f} points",
    ]


def published_lines(rows: Sequence[Row]) -> list[str]:
    lines = [f"{'what':46} {'published':>24} {'ours':>12}  source"]
    for row in rows:
        ours = f"{row.value:,.4g} {row.unit}"
        note = f"; {row.note}" if row.note else ""
        lines.append(f"{row.what:46} {row.published:>24} {ours:>12}  {row.source}{note}")
    return lines


def _hours(plan: Plan) -> str:
    hours = plan.gpu_mtbf_h
    return f"{hours:,.0f} h" if 10.0 <= hours < 1e12 else f"{hours:.3g} h"


def duration(seconds: float) -> str:
    """`5.2 s`, `4 min`, `3.1 h`, `12 days`."""
    for unit, size, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    days = seconds / 86400.0
    return f"{days:,.0f} days" if 1000.0 <= days < 1e9 else f"{days:.3g} days"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 0.99995 else "100 %"


def _split(waste: Waste) -> str:
    return (
        f"{_percent(waste.total)}: saves {_percent(waste.stall)}, trained again"
        f" {_percent(waste.lost)}, restarts {_percent(waste.restart)}"
    )


def _failure(parts: Mapping[str, float]) -> str:
    """The dearest part first."""
    whole_s = sum(parts.values()) or 1.0
    dearest = sorted(parts.items(), key=lambda item: -item[1])
    names = {AGAIN: "trained again"}
    told = ", ".join(
        f"{names.get(name, name)} {_seconds(seconds)} ({seconds / whole_s:.0%})"
        for name, seconds in dearest
    )
    return f"{duration(whole_s)} in the mean: {told}"


def _seconds(seconds: float) -> str:
    """Alike, so that parts can be compared; no further than they are read."""
    return f"{seconds:.3g} s" if seconds < 1000.0 else duration(seconds)


def _peers(plan: Plan) -> str:
    at = plan.peers_pay_from_gpus
    when = f"pays from {at:,} GPUs on" if at else "pays at no size"
    return (
        f"{when} (restart {PEER_RESTART_S:g} s for {PEER_SHARE:.0%} of the failures, copies take"
        f" {PEER_OVERHEAD:.0%} of a step)"
    )


def _storage_lines(storage: Storage) -> list[str]:
    some, more = storage.kept_bytes_with_margin
    return [
        f"  one checkpoint     {_bytes(storage.one_bytes)}; kept {_bytes(storage.kept_bytes)}, with"
        f" 20 to 30 % of room {_bytes(some)} to {_bytes(more)}",
        f"  bandwidth          {_bytes(storage.persist_bytes_per_s)}/s over all nodes"
        f" ({_bytes(storage.persist_bytes_per_s_per_node)}/s a node) to be durable in time;"
        f" {_bytes(storage.grace_bytes_per_s_per_node)}/s a node to save in a quarter of the grace",
    ]


def _advice(plan: Plan) -> list[str]:
    """Where most is wasted, and the key that changes it."""
    waste = plan.waste
    best = waste_of(best_s(plan.costs, plan.mtbf_s), plan.costs, plan.mtbf_s)
    if best.goodput < LEAST_GOODPUT:
        told = (
            "this run does not end: restarts and saves take longer than failures leave; shorten"
            " both, or use fewer GPUs"
        )
    elif waste.restart >= max(waste.stall, waste.lost):
        told = "restarts cost most: spares (cluster.spares) and recovery.standby=true shorten them"
    elif plan.is_best and plan.interval_s > plan.exact_s:
        told = (
            f"saves are durable too late to save every {duration(plan.exact_s)}, which would be"
            " best: only saves that are durable sooner help (faster storage)"
        )
    elif plan.is_best:
        told = (
            "at the best interval saves and training done again balance: only saves that stop"
            " training for less, or are durable sooner, lower both"
        )
    else:
        more_often = waste.lost > waste.stall
        told = (
            f"save {'more' if more_often else 'less'} often: checkpoint.interval_s="
            f"{max(plan.exact_s, plan.costs.lag_s):.0f} checkpoint.interval_steps=0"
        )
    return [f"  advice             {told}"]


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value / 1e3:.3g} kB"
