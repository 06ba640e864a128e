"""`ftslurm doctor`: is this cluster, and this machine, set up so that runs survive?

Tries rather than asks, where that does no harm, and changes nothing but a folder of its own that it
takes away again; it submits a job only for --across. Object stores are not looked at, and a line
says so: to ask for versions, encryption and the like takes the rights of what copies checkpoints
there, which a run has not. Exit 0: nothing stands against a run; 1: something
does; 3: nothing that could be looked at does, and Slurm could not be asked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Callable, Optional

from ftslurm.doctor.across import check_across
from ftslurm.doctor.checklist_command import show_checklist
from ftslurm.doctor.cluster import Cluster
from ftslurm.doctor.folder_checks import check_folder
from ftslurm.doctor.host_checks import check_host
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN, Line, fail, skipped
from ftslurm.doctor.room import Need, need_of_run
from ftslurm.doctor.run_facts import check_emergency_saves, past_runs
from ftslurm.doctor.slurm_checks import check_partition, check_slurm
from ftslurm.errors import EXIT_FAILED, EXIT_OK, SchedulerError, UsageError
from ftslurm.plan.quantities import count, from_zero, positive
from ftslurm.scheduler.settings import own_default_qos, read_gres, read_qos, read_settings
from ftslurm.scheduler.slurm import Runner, run_command
from ftslurm.scheduler.slurm_parse import parse_version

_EXAMPLES = """\
examples:
  ftslurm doctor                                  Slurm's default partition, ./runs, this machine
  ftslurm doctor --partition gpu --runs /scratch/$USER/runs --state-gb 980 --nodes 16
  srun ftslurm doctor --here                      what ranks will find on a node
  ftslurm doctor --across 2 --partition gpu       a job of 2 nodes: what they see of each other
  ftslurm doctor --checklist                      what is known of runs here, and since when
  ftslurm doctor --json | jq '.lines[] | select(.state != "ok")'

exit code: 0 nothing stands against a run, 1 something does (a line with FAIL), 2 wrong use,
3 Slurm could not be asked"""

EXIT_NO_SLURM = 3
NO_SLURM = "slurm"
_NO_OBJECT_STORE = (
    "nothing of ftslurm writes to one; where checkpoints are copied to one (S3), its versions,"
    " encryption and TLS are for whoever copies to look at"
)


def main(argv: Optional[list[str]] = None) -> int:
    options = _parser().parse_args(argv)
    if "://" in options.runs:
        raise UsageError(
            f"--runs is `{options.runs}`; runs lie on a file system, name a folder there, and have"
            " finished steps copied to an object store"
        )
    runs = _nearest(Path(options.runs))
    if options.checklist is not None:
        return show_checklist(
            options.checklist, runs, lambda: _slurm_or_none(options), as_json=options.json
        )
    lines = _looked_at(options, runs)
    if options.json:
        record = {"schema_version": 1, "runs": str(runs), "lines": [asdict(one) for one in lines]}
        print(json.dumps(record, indent=1))  # noqa: T201
    else:
        print("\n".join(_told(lines)))  # noqa: T201
    if any(one.state == FAIL for one in lines):
        return EXIT_FAILED
    return EXIT_NO_SLURM if any(one.name == NO_SLURM for one in lines) else EXIT_OK


def _looked_at(options: argparse.Namespace, runs: Path) -> list[Line]:
    state_bytes = options.state_gb * 1e9 if options.state_gb else None
    need = Need(state_bytes, options.keep) if state_bytes else None
    staged_bytes = state_bytes / options.nodes if state_bytes else None
    size_bytes = int(options.write_gb * 1e9)
    lines = [] if options.here else slurm_lines(options.partition, options.qos)
    past = list(past_runs(Path(options.runs)))
    saved = (need_of_run(one, kept=options.keep) for one in past)
    need = need or next((one for one in saved if one is not None), None)
    lines += check_folder(runs, need=need, size_bytes=size_bytes)
    lines.append(skipped("folder.object_store", _NO_OBJECT_STORE))
    lines.append(check_emergency_saves(past))
    if options.across:
        return lines + check_across(
            runs,
            nodes=options.across,
            partition=options.partition.partition(",")[0],
            qos=options.qos,
            staged_bytes=staged_bytes,
            stop_signal=options.signal,
            size_bytes=size_bytes,
            say=_to_stderr,
        )
    return lines + check_host(
        os.environ,
        staged_bytes=staged_bytes,
        stop_signal=options.signal,
        is_node=options.here,
    )


def _slurm_or_none(options: argparse.Namespace) -> Optional[list[Line]]:
    lines = slurm_lines(options.partition, options.qos)
    return None if lines[0].name == NO_SLURM else lines


def _to_stderr(text: str) -> None:
    print(f"doctor: {text}", file=sys.stderr, flush=True)  # noqa: T201


def slurm_lines(
    partition: str,
    qos: str = "",
    *,
    run: Runner = run_command,
    clock: Callable[[], float] = time.time,
) -> list[Line]:
    """`partition`: one or, as sbatch takes it, several with commas. UsageError for one that is not
    there."""
    try:
        found = read_settings(run=run, clock=clock)
    except SchedulerError as error:
        return [skipped(NO_SLURM, f"Slurm was not asked: {error}")]
    there = found.partitions
    default = [name for name, row in there.items() if row.get("Default") == "YES"]
    chosen = partition.split(",") if partition else default[:1]
    for name in chosen:
        if name not in there:
            raise UsageError(f"there is no partition `{name}`; there are {', '.join(there)}")
    if not chosen:
        todo = f"name one of {', '.join(there)} with --partition"
        return [fail("slurm.partition", "the cluster has no default partition", todo)]
    by_qos = found.config.get("PreemptType") == "preempt/qos"
    known = read_qos(run=run) if by_qos else None
    if qos and known and qos not in known:
        raise UsageError(f"there is no QOS `{qos}`; there are {', '.join(known)}")
    own = own_default_qos(found.config, run=run).get("", "") if known and not qos else ""
    version = parse_version(found.config["SLURM_VERSION"])
    first, *others = [
        Cluster(found.config, there[name], version, known, qos or own, bool(own),
                read_gres(name, run=run), found.clock_off_s) for name in chosen
    ]  # fmt: skip
    return [*check_slurm(first), *(line for one in others for line in check_partition(one))]


def _nearest(folder: Path) -> Path:
    """What is there of it: a folder for runs is made by the first submit."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _told(lines: Sequence[Line]) -> list[str]:
    marks = {OK: "ok  ", WARN: "warn", FAIL: "FAIL", SKIPPED: "--  "}
    told = []
    for one in lines:
        told.append(f"{marks[one.state]}  {one.name:24} {one.seen}")
        if one.todo:
            told.append(f"{'':32}-> {one.todo}")
    counts = {state: sum(one.state == state for one in lines) for state in marks}
    told.append(
        f"{counts[OK]} ok, {counts[WARN]} to better, {counts[FAIL]} against a run,"
        f" {counts[SKIPPED]} not looked at"
    )
    return told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftslurm doctor",
        description="Is this cluster, and this machine, set up so that runs survive?",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--partition", default="", metavar="P[,P]", help="where runs go (the default partition)")
    add("--qos", default="", metavar="QOS", help="of the runs, where preemption goes by it")
    add("--runs", default="runs", metavar="FOLDER", help="where runs lie (runs)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--here", action="store_true", help="this machine as a node, and the folder; not Slurm"
    )
    where.add_argument(
        "--across", type=count, metavar="N", help="a job of N nodes tries the folder from each"
    )
    where.add_argument(
        "--checklist", nargs="?", const="", metavar="RUN",
        help="17 questions before production, answered from what runs (or RUN) left on record",
    )  # fmt: skip
    add(
        "--state-gb", type=positive, metavar="GB", help="size of a checkpoint (`ftslurm plan` says)"
    )
    add("--nodes", type=count, default=1, metavar="N", help="of the run: its state is spread (1)")
    add("--keep", type=count, default=3, metavar="K", help="checkpoints kept (3)")
    add("--write-gb", type=from_zero, default=0.25, metavar="GB", help="written to measure (0.25)")
    add("--signal", choices=("USR1", "USR2"), default="USR1", help="cluster.signal (USR1)")
    add("--json", action="store_true", help="for programs; schema_version 1")
    return parser
