"""All ranks restore one step or none does: rank 0 offers, every rank reads and verifies.

A step that fails on any rank is set aside for the next older one. What was rejected is quarantined
only once an older step has been restored; when none can be, nothing is moved or deleted and the run
does not start from step 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ftslurm.checkpoint.choose import Rejected
from ftslurm.checkpoint.record_json import decode_manifest, manifest_digest
from ftslurm.checkpoint.records import MANIFEST, Manifest
from ftslurm.errors import CheckpointError, FtslurmError
from ftslurm.run.attempts import AdoptedStep
from ftslurm.train import rng
from ftslurm.train.exchange import broadcast_json, gather_json
from ftslurm.train.leaves import StateMismatch
from ftslurm.train.persist import Place, reason_of
from ftslurm.train.state import Restoration, TrainState
from ftslurm.train.step_reader import StepReader

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Restored:
    """What the run continues from."""

    step: int
    position: dict[str, int]
    """epoch, samples, tokens"""
    manifest: Manifest
    digest: str
    """Of the manifest: the step's identity."""
    generators_continue: bool
    """False: the world size or kind of device changed, random numbers are drawn afresh."""


class Restorer:
    """One restore; collective over the main threads of all ranks."""

    def __init__(
        self, state: TrainState, place: Place, *, device: torch.device, attempt: int
    ) -> None:
        self._state = state
        self._place = place
        self._device = device
        self._attempt = attempt

    def restore(self, adopted: list[AdoptedStep] | None, on_event: OnEvent) -> Restored | None:
        """The newest step that every rank verified; None when the run never committed any."""
        rejected: dict[int, Rejected] = {}
        is_first = self._place.rank == 0
        fenced = self._share(self._fence(adopted, on_event) if is_first else None)
        if fenced is not None:
            raise CheckpointError(fenced)
        while True:
            offer = self._share(self._offer(adopted, rejected) if is_first else None)
            if offer["step"] is None and offer["reason"] is None:
                return None
            if offer["step"] is None:
                raise CheckpointError(offer["reason"])
            loaded, answer = self._load(offer)
            failures = self._share(self._merge(answer))
            if failures:
                reason = "; ".join(f"rank {rank}: {text}" for rank, text in failures)
                rejected[offer["step"]] = Rejected(offer["step"], Path(offer["path"]), reason)
                continue
            assert loaded is not None
            restoration, manifest = loaded
            restoration.adopt()
            if is_first:
                self._set_aside(list(rejected.values()), on_event)
            position = {key: getattr(manifest, key) for key in ("epoch", "samples", "tokens")}
            return Restored(
                step=manifest.step,
                position=position,
                manifest=manifest,
                digest=offer["digest"],
                generators_continue=restoration.generators_continue,
            )

    def _fence(self, adopted: list[AdoptedStep] | None, on_event: OnEvent) -> str | None:
        """Rank 0: put aside what an attempt thought dead published late; a sentence on error.

        Unlike damaged steps these never were part of this run's history.
        """
        try:
            self._set_aside(self._place.store.fence(self._attempt, adopted), on_event)
        except (OSError, FtslurmError) as error:
            return f"cannot put steps of older attempts aside: {reason_of(error)}"
        return None

    def _offer(
        self, adopted: list[AdoptedStep] | None, rejected: dict[int, Rejected]
    ) -> dict[str, Any]:
        """Rank 0: the next step to try, or a sentence why there is none."""
        offer: dict[str, Any] = {"step": None, "reason": None}
        try:
            failed = {step: row.reason for step, row in rejected.items()}
            choice = self._place.store.choose(
                full=False, adopted=adopted, attempt=self._attempt, failed=failed
            )
            rejected.update({row.step: row for row in choice.rejected})
            if choice.path is not None and choice.manifest is not None:
                offer.update(
                    step=choice.manifest.step, path=str(choice.path), digest=choice.committed_digest
                )
            elif rejected:
                offer["reason"] = _nothing_left(list(rejected.values()))
        except (OSError, FtslurmError) as error:
            offer["reason"] = f"cannot choose a checkpoint: {reason_of(error)}"
        return offer

    def _load(
        self, offer: dict[str, Any]
    ) -> tuple[tuple[Restoration, Manifest] | None, dict[str, Any]]:
        """Read and verify all this rank needs; live objects other than tensors stay as they are."""
        try:
            folder = Path(offer["path"])
            reader = StepReader(folder, _read_manifest(folder, offer["digest"]))
            restoration = self._prepare(reader)
            reader.fill(restoration.leaves, rank=self._place.rank)
        except StateMismatch as error:
            return None, {"mismatch": str(error)}
        except (OSError, FtslurmError) as error:
            return None, {"reason": reason_of(error)}
        return (restoration, reader.manifest), {}

    def _prepare(self, reader: StepReader) -> Restoration:
        rank, world_size = self._place.rank, self._place.world_size
        manifest = reader.manifest
        first = reader.index(0)
        if "shared" not in first.objects:
            raise StateMismatch(
                f"`{reader.folder}` was not written by ftslurm's torch checkpointer; it holds no "
                "state that this program could continue from"
            )
        is_same_world = manifest.world_size == world_size
        own = reader.index(rank).objects["private"] if is_same_world else None

        def fresh_seed() -> None:
            rng.seed_generators(seed=manifest.seed, step=manifest.step, rank=rank)

        return self._state.prepare(
            first.objects["shared"],
            own,
            first.aliases,
            rank=rank,
            world_size=world_size,
            device=self._device,
            fresh_seed=fresh_seed,
        )

    def _merge(self, answer: dict[str, Any]) -> list[tuple[int, str]]:
        """On rank 0 the failures of all ranks. A mismatch anywhere ends the restore everywhere."""
        rows = gather_json(answer, self._place.group, world_size=self._place.world_size)
        mismatches = [row["mismatch"] for row in rows if "mismatch" in row]
        mismatch = self._share(mismatches[0] if mismatches else None)
        if mismatch is not None:
            raise StateMismatch(mismatch)
        return [(rank, row["reason"]) for rank, row in enumerate(rows) if "reason" in row]

    def _share(self, value: Any) -> Any:
        return broadcast_json(value, self._place.group, world_size=self._place.world_size)

    def _set_aside(self, rejected: list[Rejected], on_event: OnEvent) -> None:
        for row in rejected:
            self._place.store.quarantine(row)
            on_event("rejected", {"step": row.step, "reason": row.reason})


def _read_manifest(folder: Path, digest: str) -> Manifest:
    data = (folder / MANIFEST).read_bytes()
    if manifest_digest(data) != digest:
        raise CheckpointError(f"`{folder / MANIFEST}` is not the manifest that rank 0 chose")
    return decode_manifest(data, where=str(folder / MANIFEST))


def _nothing_left(rejected: list[Rejected]) -> str:
    tried = "; ".join(f"step {row.step}: {row.reason}" for row in rejected)
    return (
        f"none of the run's checkpoints can be restored ({tried}); nothing was deleted or moved "
        "and the run does not start from step 0: repair or remove them by hand, or submit a new run"
    )
