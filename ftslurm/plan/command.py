"""`ftslurm plan`: what failures will cost a run of that size, and what to do about it.

Computes only: reads no run, asks no scheduler. Every figure says by which model, and `--published`
holds them against what others have published.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Optional

from ftslurm.errors import EXIT_OK, UsageError
from ftslurm.plan.capacity import state_bytes
from ftslurm.plan.failures import DAY_S, SIZES
from ftslurm.plan.intervals import Costs, after_failure_s
from ftslurm.plan.options import parser, refuse_what_is_of_no_use
from ftslurm.plan.plan import Ask, plan
from ftslurm.plan.published import rows
from ftslurm.plan.simulate import play
from ftslurm.plan.tables import plan_lines, published_lines, simulation_lines, table_lines


def main(argv: Optional[list[str]] = None) -> int:
    options = parser().parse_args(argv)
    refuse_what_is_of_no_use(options)
    if options.published:
        found = rows()
        _tell({"published": [asdict(row) for row in found]}, published_lines(found), options)
        return EXIT_OK
    costs = Costs(options.stall, sum(options.restart.values()), options.persist)
    if options.table:
        plans = [plan(_ask(options, costs, gpus)) for gpus in SIZES]
        _tell({"table": [asdict(one) for one in plans]}, table_lines(plans), options)
        return EXIT_OK
    if options.gpus is None:
        raise UsageError("for how many GPUs? name them with --gpus N, or ask for --table")
    found_plan = plan(_ask(options, costs, options.gpus))
    record: dict[str, object] = {
        "plan": asdict(found_plan),
        "after_failure_s": after_failure_s(options.restart, found_plan.interval_s, costs.lag_s),
    }
    lines = plan_lines(found_plan, options.restart)
    if options.simulate:
        shape = options.burst
        played = play(
            found_plan.interval_s,
            costs,
            found_plan.mtbf_s,
            work_s=options.simulate * DAY_S,
            seed=options.seed,
            shape=shape,
        )
        record["simulated"] = {**asdict(played), "shape": shape, "seed": options.seed}
        lines += simulation_lines(found_plan, played, shape)
    _tell(record, lines, options)
    return EXIT_OK


def _ask(options: argparse.Namespace, costs: Costs, gpus: int) -> Ask:
    size = options.state_gb * 1e9 if options.state_gb else None
    if size is None and options.params:
        size = state_bytes(options.params, options.bytes_per_param)
    return Ask(
        gpus=gpus,
        gpu_mtbf_h=options.gpu_mtbf,
        costs=costs,
        interval_s=options.interval,
        state_bytes=size,
        kept=options.keep,
        gpus_per_node=options.gpus_per_node,
        grace_s=options.grace,
    )


def _tell(record: dict[str, object], lines: list[str], options: argparse.Namespace) -> None:
    if options.json:
        lines = [json.dumps({"schema_version": 1, **record}, indent=1, sort_keys=True)]
    sys.stdout.write("\n".join(lines) + "\n")
