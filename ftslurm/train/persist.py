"""One save in the background: write, gather, publish, tell everyone. No rank is left guessing.

Runs on a thread of its own and talks over the checkpoint group only, which no other thread may use
meanwhile. Whatever goes wrong on one rank fails the save on all of them, with the same reasons; the
temporary folder is removed then and published steps are untouched.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from ftslurm.checkpoint.digest import digest
from ftslurm.checkpoint.record_json import encode_index, encode_manifest, manifest_digest
from ftslurm.checkpoint.records import IndexEntry, Manifest, ShardIndex
from ftslurm.checkpoint.shard import TensorData, write_shard
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import CheckpointError, FtslurmError
from ftslurm.train.exchange import broadcast_json, gather_json, largest


@dataclass(frozen=True)
class SaveJob:
    """A staged snapshot; `tensors` lie in the arena and stay valid until the save is over."""

    step: int
    attempt: int
    tensors: Sequence[TensorData]
    shared: Mapping[str, Any]
    private: Mapping[str, Any]
    copies: Mapping[str, str]
    """Digests of tensors of which every rank has a copy that nothing keeps equal."""
    aliases: Mapping[str, str]
    algorithm: str
    manifest: Callable[[list[IndexEntry]], Manifest]


@dataclass(frozen=True)
class Failure:
    """Why a save failed, by the rank that saw it."""

    rank: int
    reason: str
    errno: int | None = None
    """Of the file system's answer, None where it was something else."""


@dataclass(frozen=True)
class SaveResult:
    """The same on every rank."""

    step: int
    failures: list[Failure]
    bytes: int = 0
    """Written by all ranks together."""
    seconds: float = 0.0
    digest: str = ""
    """Identity of the committed step: the digest of its manifest."""
    failed_all: bool = False
    """No rank could write: nothing points at one node."""

    @property
    def is_committed(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class Place:
    """Where this rank stands and what it talks over."""

    rank: int
    world_size: int
    group: ProcessGroup
    store: CheckpointStore


def persist(job: SaveJob, place: Place) -> SaveResult:
    """Collective over all ranks' background threads."""
    began_at = time.monotonic()
    answer = _open_folder(job, place)
    if "reason" in answer:
        failure = Failure(0, **answer)
        return SaveResult(job.step, [failure], failed_all=not _can_any_write(place))
    folder = Path(answer["folder"])
    rows = gather_json(_write(job, place, folder), place.group, world_size=place.world_size)
    outcome = _conclude(job, place, folder, rows) if place.rank == 0 else None
    outcome = broadcast_json(outcome, place.group, world_size=place.world_size)
    failures = [Failure(**row) for row in outcome["failures"]]
    seconds = time.monotonic() - began_at
    failed_all = {failure.rank for failure in failures} == set(range(place.world_size))
    return SaveResult(
        job.step, failures, outcome["bytes"], seconds, outcome["digest"], failed_all=failed_all
    )


def reason_of(error: BaseException) -> str:
    """One sentence; errors that are not meant for people carry their type."""
    return str(error) if isinstance(error, (FtslurmError, OSError)) else repr(error)


def errno_of(error: BaseException) -> int | None:
    """The error number behind `error`, if it came from the file system."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


def _account(error: BaseException) -> dict[str, Any]:
    return {"reason": reason_of(error), "errno": errno_of(error)}


def _open_folder(job: SaveJob, place: Place) -> dict[str, Any]:
    """Rank 0 makes the folder before anyone writes: a shared file system may show it late."""
    answer: dict[str, Any] = {}
    if place.rank == 0:
        try:
            answer["folder"] = str(place.store.create_temporary(job.step, job.attempt))
        except Exception as error:  # noqa: BLE001 - reported; the other ranks wait for this answer
            answer = _account(error)
    reply: dict[str, Any] = broadcast_json(answer, place.group, world_size=place.world_size)
    return reply


def _can_any_write(place: Place) -> bool:
    """Whether a rank besides rank 0 might have made the folder. Collective."""
    layout = place.store.layout
    folders = (layout.steps, layout.checkpoints, layout.root)
    nearest = next((folder for folder in folders if os.path.lexists(folder)), layout.root)
    # access(2) asks the server (NFS) and knows of a read-only mount, and leaves nothing behind.
    can_write = place.rank != 0 and os.access(nearest, os.W_OK | os.X_OK)
    return bool(largest([int(can_write)], place.group, world_size=place.world_size)[0])


def _write(job: SaveJob, place: Place, folder: Path) -> dict[str, Any]:
    try:
        is_first = place.rank == 0
        entry = write_shard(
            folder,
            place.rank,
            job.tensors,
            objects={"private": job.private, **({"shared": job.shared} if is_first else {})},
            aliases=job.aliases if is_first else {},
            algorithm=job.algorithm,
            attempt=job.attempt,
            step=job.step,
        )
        return {
            "entry": dataclasses.asdict(entry),
            "bytes": sum(tensor.data.nbytes for tensor in job.tensors),
            "shared": {**shared_digests(job.shared), **job.copies},
        }
    except Exception as error:  # noqa: BLE001 - reported; a rank that went silent would hold the others
        return _account(error)


def shared_digests(shared: Mapping[str, Any]) -> dict[str, str]:
    """One digest per object that has to be equal on all ranks."""
    return {
        name: digest("sha256", encode_index(ShardIndex(0, [], [], {}, {name: value})))
        for name, value in shared.items()
    }


def _conclude(
    job: SaveJob, place: Place, folder: Path, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Rank 0: publish what all have written, or clean up."""
    failures = [
        {"rank": rank, "reason": row["reason"], "errno": row["errno"]}
        for rank, row in enumerate(rows)
        if "reason" in row
    ]
    failures = failures or _differences(rows)
    written = sum(row.get("bytes", 0) for row in rows)
    identity = ""
    if not failures:
        try:
            manifest = job.manifest([IndexEntry(**row["entry"]) for row in rows])
            identity = manifest_digest(encode_manifest(manifest))
            place.store.publish(folder, manifest)
        except Exception as error:  # noqa: BLE001 - reported; the other ranks wait for this answer
            failures = [{"rank": 0, **_account(error)}]
    if failures:
        failures += _discard(folder, place)
    return {"failures": failures, "bytes": written, "digest": identity}


def _discard(folder: Path, place: Place) -> list[dict[str, Any]]:
    """Give the space of the failed save back; a leftover is one more thing to report."""
    try:
        if folder.exists():
            place.store.discard_temporary(folder)
    except (OSError, FtslurmError) as error:
        reason = f"cannot remove `{folder}`: {reason_of(error)}"
        return [{"rank": 0, "reason": reason, "errno": errno_of(error)}]
    return []


def _differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ranks whose copy of something shared is not rank 0's: saving one would lose the others."""
    first = rows[0]["shared"]
    found = []
    for rank, row in enumerate(rows):
        names = sorted(n for n in {*first, *row["shared"]} if first.get(n) != row["shared"].get(n))
        if names:
            error = CheckpointError(
                f"{names} differ between rank 0 and rank {rank}; such state has to be equal on all "
                "ranks (running statistics of BatchNorm: use SyncBatchNorm)"
            )
            found.append({"rank": rank, "reason": str(error)})
    return found
