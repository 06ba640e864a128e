"""`ftslurm doctor`: is this cluster, and this machine, set up so that runs survive?

Tries rather than asks, where that does no harm, and changes nothing but a folder of its own that it
takes away again; it submits a job only for --across, and asks for the settings of a bucket only
where one is named. Exit 0: nothing stands against a run; 1: something does; 3: nothing that could
be looked at does, and Slurm could not be asked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Callable, Optional, Union

from ftslurm.doctor.across import check_across
from ftslurm.doctor.bucket_lines import STORE
from ftslurm.doctor.checklist_command import show_checklist
from ftslurm.doctor.cluster import Cluster
from ftslurm.doctor.folder_checks import check_folder, nearest
from ftslurm.doctor.host_checks import check_host
from ftslurm.doctor.in_time import HANGS, SilentError, in_time
from ftslurm.doctor.let_in import lists_of, names_accounts
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN, Line, fail, skipped
from ftslurm.doctor.object_store import bucket_of, check_bucket
from ftslurm.doctor.own_groups import may_use
from ftslurm.doctor.room import Need, need_of_run
from ftslurm.doctor.run_facts import check_emergency_saves, past_runs
from ftslurm.doctor.slurm_checks import check_partition, check_slurm
from ftslurm.errors import EXIT_FAILED, EXIT_OK, SchedulerError, UsageError
from ftslurm.plan.quantities import count, from_zero, positive
from ftslurm.scheduler.settings import (
    Own,
    own_terms,
    read_ancestors,
    read_gres,
    read_qos,
    read_settings,
)
from ftslurm.scheduler.slurm import Runner, run_command
from ftslurm.scheduler.slurm_parse import parse_version

_EXAMPLES = """\
examples:
  ftslurm doctor                                   Slurm's default partition, ./runs, this machine
  ftslurm doctor --partition gpu --runs /scratch/$USER/runs --state-gb 980 --nodes 16
  srun ftslurm doctor --here                       what ranks will find on a node
  ftslurm doctor --across 2 --partition gpu        a job of 2 nodes: what they see of each other
  ftslurm doctor --object-store s3://checkpoints   and the bucket that steps are copied to
  ftslurm doctor --checklist                       what is known of runs here, and since when
  ftslurm doctor --json | jq '.lines[] | select(.state != "ok")'

exit code: 0 nothing stands against a run, 1 something does (a line with FAIL), 2 wrong use,
3 Slurm could not be asked"""

EXIT_NO_SLURM = 3
NO_SLURM = "slurm"
_NO_OBJECT_STORE = (
    "nothing of ftslurm writes to one; where checkpoints are copied to one, --object-store"
    " s3://BUCKET asks for its versions, encryption and TLS"
)


def main(argv: Optional[list[str]] = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    _refuse_what_is_of_no_use(options, parser.get_default)
    if options.object_store:
        bucket_of(options.object_store)
    if "://" in options.runs:
        raise UsageError(
            f"--runs is `{options.runs}`; runs lie on a file system, name a folder there, and have"
            " finished steps copied to an object store"
        )
    if options.checklist is not None:
        return show_checklist(
            options.checklist,
            Path(options.runs),
            lambda: _slurm_or_none(options),
            lambda: _of_store(options),
            as_json=options.json,
            say=_to_stderr,
        )
    runs, lines = _looked_at(options)
    if options.json:
        record = {"schema_version": 1, "runs": str(runs), "lines": [asdict(one) for one in lines]}
        print(json.dumps(record, indent=1))  # noqa: T201
    else:
        print("\n".join(_told(lines)))  # noqa: T201
    if any(one.state == FAIL for one in lines):
        return EXIT_FAILED
    return EXIT_NO_SLURM if any(one.name == NO_SLURM for one in lines) else EXIT_OK


_OF_NO_USE = {
    "here": ("partition", "account", "qos"),
    "checklist": ("state_gb", "keep", "write_gb", "signal"),
}


def _refuse_what_is_of_no_use(
    options: argparse.Namespace, default: Callable[[str], object]
) -> None:
    for mode, others in _OF_NO_USE.items():
        given = [name for name in others if getattr(options, name) != default(name)]
        if given and getattr(options, mode) != default(mode):
            name = given[0].replace("_", "-")
            raise UsageError(f"--{name} is of no use with --{mode}; leave out one of them")


def _looked_at(options: argparse.Namespace) -> tuple[Path, list[Line]]:
    """And the folder that was tried."""
    runs, lines = Path(options.runs).absolute(), []
    if not options.here:
        lines += slurm_lines(options.partition, options.qos, options.nodes, options.account)
    try:
        for found in in_time(partial(_on_disk, options), say=_to_stderr):
            if isinstance(found, Path):
                runs = found
            else:
                lines.append(found)
        answers = True
    except SilentError as error:
        answers, last = False, lines[-1].name if lines else ""
        told = f"`{runs}`: {error}{f', after {last}' if last.startswith('folder.') else ''}"
        lines.append(fail("folder.answers", told, HANGS))
    lines += _of_store(options) or [skipped(STORE, _NO_OBJECT_STORE)]
    staged_bytes = options.state_gb * 1e9 / options.nodes if options.state_gb else None
    if options.across and answers:
        return runs, lines + check_across(
            runs,
            nodes=options.across,
            where={
                "partition": options.partition.partition(",")[0],
                "account": options.account,
                "qos": options.qos,
            },
            staged_bytes=staged_bytes,
            stop_signal=options.signal,
            size_bytes=int(options.write_gb * 1e9),
            say=_to_stderr,
        )
    return runs, lines + check_host(
        os.environ,
        staged_bytes=staged_bytes,
        stop_signal=options.signal,
        is_node=options.here,
    )


def _of_store(options: argparse.Namespace) -> list[Line]:
    return check_bucket(bucket_of(options.object_store)) if options.object_store else []


def _on_disk(options: argparse.Namespace) -> Iterator[Union[Path, Line]]:
    """The folder that is there, then what is found in it."""
    runs = nearest(Path(options.runs))
    yield runs
    past = list(past_runs(Path(options.runs)))
    need = Need(options.state_gb * 1e9, options.keep) if options.state_gb else None
    saved = (need_of_run(one, kept=options.keep) for one in past)
    need = need or next((one for one in saved if one is not None), None)
    yield from check_folder(runs, need=need, size_bytes=int(options.write_gb * 1e9))
    yield check_emergency_saves(past)


def _slurm_or_none(options: argparse.Namespace) -> Optional[list[Line]]:
    lines = slurm_lines(options.partition, options.qos, options.nodes, options.account)
    return None if lines[0].name == NO_SLURM else lines


def _to_stderr(text: str) -> None:
    print(f"doctor: {text}", file=sys.stderr, flush=True)  # noqa: T201


def slurm_lines(
    partition: str,
    qos: str = "",
    nodes: int = 1,
    account: str = "",
    *,
    uid: Optional[int] = None,
    run: Runner = run_command,
    clock: Callable[[], float] = time.time,
) -> list[Line]:
    """`partition`: one or, as sbatch takes it, several with commas; `nodes`: of the run; `uid`:
    whose, None: this process's. UsageError for a partition that is not there."""
    uid = os.geteuid() if uid is None else uid
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
    own = Own()
    if (known and not qos) or any(lists_of(there[name]) for name in chosen):
        own = own_terms(found.config, run=run)
    account, above = account or own.account, None
    own_qos = "" if qos else own.qos.get(account, "")
    if account and any(names_accounts(there[name]) for name in chosen):
        above = read_ancestors(found.config.get("ClusterName", ""), account, run=run)
    version = parse_version(found.config["SLURM_VERSION"])
    first, *others = [
        Cluster(found.config, there[name], version, known, qos or own_qos,
                bool(own_qos), read_gres(name, run=run), found.clock_off_s, nodes,
                may_use(there[name].get("AllowGroups", "ALL"), uid), account, above)
        for name in chosen
    ]  # fmt: skip
    return [*check_slurm(first), *(line for one in others for line in check_partition(one))]


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
    add("--account", default="", metavar="A", help="of the runs (your default account)")
    add("--qos", default="", metavar="QOS", help="of the runs (your default one)")
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
    add(
        "--nodes",
        type=count,
        default=1,
        metavar="N",
        help="of the run, which is spread over them (1)",
    )
    add("--keep", type=count, default=3, metavar="K", help="checkpoints kept (3)")
    add("--write-gb", type=from_zero, default=0.25, metavar="GB", help="written to measure (0.25)")
    add("--object-store", metavar="s3://BUCKET", help="asked for its settings through `aws`")
    add("--signal", choices=("USR1", "USR2"), default="USR1", help="cluster.signal (USR1)")
    add("--json", action="store_true", help="for programs; schema_version 1")
    return parser
