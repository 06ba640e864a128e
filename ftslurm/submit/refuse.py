"""What is refused at submit, with the reason: runs that this place cannot carry to their end.

The decisions are pure; `storage_of` and `save_cost` look (mounts, earlier runs, a test write) and
leave nothing behind. A value that could never be right is refused earlier, in run/spec_check.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Optional

from ftslurm.errors import FormatError, RunError, SpecError, UsageError
from ftslurm.run.attempts import numbers, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.mounts import IN_MEMORY, OF_CONTAINER, OWN_DISK, TABLE, mount_of
from ftslurm.run.neighbours import newest_runs
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.spec import RunSpec
from ftslurm.submit.cluster_values import NCCL_SIGNAL, stop_signal_of

REFERENCE_ENTRY = "ftslurm.train.reference:train"

_PROBE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_NUM_EARLIER_RUNS = 50
# fp32 weights and AdamW's two moments; a lower bound, which is what a refusal needs.
_STATE_BYTES_PER_PARAMETER = 12
_LEAST_VOCABULARY = 256


@dataclass(frozen=True)
class Storage:
    """The mount that a path lies on."""

    mount_point: str
    kind: str
    """File system as Linux names it, e.g. `lustre`."""


@dataclass(frozen=True)
class SaveCost:
    """What a save of the whole state takes, as far as can be told before the run."""

    size_bytes: int
    seconds: float
    source: str
    """Where both come from, for a person."""


def refuse_inside_job(spec: RunSpec, environ: Mapping[str, str]) -> None:
    """UsageError in a job: a run submitted there inherits limits, bindings and mounts of its node,
    and its submitter dies with the job."""
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if job_id and spec.cluster.scheduler == "slurm":
        raise UsageError(
            f"this is inside job {job_id} (SLURM_JOB_ID is set), and runs are submitted from a "
            "login node; go there, or run the loop here with cluster=local, or take the job's "
            "variables away first: env -u SLURM_JOB_ID -u SLURM_JOBID ftslurm submit ..."
        )


def refuse_signal_clash(spec: RunSpec, environ: Mapping[str, str]) -> None:
    """SpecError when the shell's NCCL setting takes a signal that asks ranks to stop; what
    cluster.env sets in its place is looked at with the other values there."""
    if NCCL_SIGNAL in spec.cluster.env:
        return
    number = environ.get(NCCL_SIGNAL, "").strip()
    taken = stop_signal_of(number)
    if taken is not None:
        raise SpecError(
            f"{NCCL_SIGNAL}={number} takes {taken.name}, which asks the ranks to stop; unset "
            "it, or give it another signal"
        )


def refuse_taken(layout: RunLayout) -> None:
    """RunError when the run directory is somebody's already."""
    if layout.root.exists():
        raise RunError(
            f"`{layout.root}` exists: two runs cannot share a directory; choose another run_id, or "
            f"let that run go on with `ftslurm resume {layout.root}`"
        )


def refuse_storage(spec: RunSpec, storage: Storage, runs_dir: Path) -> Optional[str]:
    """SpecError for checkpoints that would go with their node; a sentence for what looks so."""
    if spec.cluster.scheduler != "slurm":
        return None
    if storage.kind in IN_MEMORY + OF_CONTAINER:
        raise SpecError(
            f"runs_dir `{runs_dir}` lies in {storage.kind} (mounted at `{storage.mount_point}`), "
            "which goes with its host, so no checkpoint would outlive a node; choose a folder on a "
            "file system that all nodes share"
        )
    if storage.kind in OWN_DISK:
        return (
            f"runs_dir `{runs_dir}` lies on {storage.kind}, a disk of this host; ranks on other "
            "nodes see it only where the host exports it"
        )
    return None


def refuse_slow_save(cost: Optional[SaveCost], deadline_s: Optional[float]) -> None:
    """SpecError when an emergency save certainly cannot be done in time."""
    if cost is None or deadline_s is None or cost.seconds <= deadline_s:
        return
    size_gib = cost.size_bytes / (1 << 30)
    raise SpecError(
        f"an emergency save takes some {cost.seconds:.0f} s ({size_gib:.1f} GiB, {cost.source}), "
        f"and the site leaves {deadline_s:.0f} s, so every preemption would lose the steps since "
        "the last periodic save; use more nodes or faster storage, ask for a longer "
        "cluster.signal_lead_s or a partition with a longer grace, or accept it by setting "
        f"checkpoint.emergency_deadline_s to {cost.seconds:.0f} or more"
    )


def storage_of(path: Path, mountinfo: Path = TABLE) -> Storage:
    """The mount of `path`, or of the nearest parent that exists."""
    while not path.exists():
        path = path.parent
    mount = mount_of(path, mountinfo)
    return Storage("/", "unknown") if mount is None else Storage(mount.point, mount.kind)


Earlier = tuple[RunRecord, RunLayout]


def save_cost(
    spec: RunSpec, runs_dir: Path, earlier: Optional[Iterable[Earlier]] = None
) -> Optional[SaveCost]:
    """Measured in an earlier run of the same kind, else computed for the reference model and a test
    write; None when nothing is known of the state's size. `earlier`: runs, where they are read
    already."""
    for record, layout in earlier_runs(runs_dir) if earlier is None else earlier:
        if _is_alike(record.spec, spec):
            measured = _measured(layout)
            if measured is not None:
                return measured
    if spec.entry != REFERENCE_ENTRY or spec.program:
        return None
    size_bytes = _reference_state_bytes(spec)
    return _probed(size_bytes, spec.cluster.nodes, runs_dir)


def earlier_runs(runs_dir: Path) -> Iterator[Earlier]:
    """The newest of a folder, newest first."""
    for layout in newest_runs(runs_dir, _NUM_EARLIER_RUNS):
        try:
            yield read_record(layout), layout
        except (FormatError, RunError, OSError):
            continue  # somebody else's or half removed: it cannot tell


def _is_alike(earlier: RunSpec, spec: RunSpec) -> bool:
    """Same state on as many nodes: what a save took there, it takes here."""
    return (
        (earlier.entry, earlier.program, earlier.user) == (spec.entry, spec.program, spec.user)
        and (earlier.model, earlier.parallel) == (spec.model, spec.parallel)
        and earlier.cluster.nodes == spec.cluster.nodes
        and earlier.world_size == spec.world_size
    )


def _measured(layout: RunLayout) -> Optional[SaveCost]:
    """The slowest of the newest attempt that committed anything."""
    for number in reversed(numbers(layout)):
        saves = [
            (float(event["seconds"]), int(event["bytes"]))
            for event in read_events(layout.attempt(number))
            if event["kind"] == "committed" and "seconds" in event
        ]
        if saves:
            seconds, size_bytes = max(saves)
            return SaveCost(size_bytes, seconds, f"as measured in run {layout.root.name}")
    return None


def _reference_state_bytes(spec: RunSpec) -> int:
    model = spec.model
    blocks = model.layers * (12 * model.width**2 + 13 * model.width)
    embeddings = (model.context + _LEAST_VOCABULARY) * model.width
    return _STATE_BYTES_PER_PARAMETER * (blocks + embeddings)


def _probed(size_bytes: int, nodes: int, runs_dir: Path) -> Optional[SaveCost]:
    """Time a test write of at most 64 MiB; each node is taken to write its share as fast."""
    share_bytes = size_bytes // nodes
    amount = min(share_bytes, _PROBE_BYTES)
    folder = runs_dir
    while not folder.exists():
        folder = folder.parent
    per_second = _write_speed(folder, amount)
    if per_second is None:
        return None  # freezing the run will say what is wrong with the folder
    source = f"at the {per_second / 1e6:.0f} MB/s of a test write from this host"
    return SaveCost(size_bytes, share_bytes / per_second, source)


@cache
def _write_speed(folder: Path, amount: int) -> Optional[float]:
    """Bytes a second; measured once, however many tasks of a sweep want to know."""
    try:
        seconds = _write_and_remove(folder / f".ftslurm-probe-{os.getpid()}", amount)
    except OSError:
        return None
    return amount / max(seconds, 1e-6)


def _write_and_remove(path: Path, amount: int) -> float:
    block = os.urandom(_BLOCK_BYTES)  # not zeros, which a file system may compress
    started = time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for offset in range(0, amount, _BLOCK_BYTES):
            os.write(descriptor, block[: amount - offset])
        os.fsync(descriptor)
        return time.monotonic() - started
    finally:
        os.close(descriptor)
        path.unlink()
