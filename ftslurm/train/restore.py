"""All ranks restore one step or none does: rank 0 offers, every rank reads and verifies.

A step that any rank finds damaged is set aside for the next older one. What was rejected is
quarantined only once an older step has been restored; when none can be, nothing is moved or deleted
and the run does not start from step 0. A file system that fails says nothing about a step: all
ranks end with StorageError, and the next attempt tries the same step again. Nor do bytes that are
wrong on one node and right on another: that node is named (MisreadError), and the step stays. What
rank 0 finds damaged is therefore read by a rank on another node too, where the job has one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ftslurm.checkpoint.choose import Rejected
from ftslurm.checkpoint.reading import DamagedFile, read_small
from ftslurm.checkpoint.record_json import decode_manifest, manifest_digest
from ftslurm.checkpoint.records import MANIFEST, Manifest
from ftslurm.checkpoint.sight import await_step
from ftslurm.errors import CheckpointError, FtslurmError, RunError
from ftslurm.files import Patience
from ftslurm.run.attempts import AdoptedStep
from ftslurm.train import rng
from ftslurm.train.exchange import broadcast_json, gather_json
from ftslurm.train.leaves import StateMismatch
from ftslurm.train.persist import Place, reason_of
from ftslurm.train.state import Restoration, TrainState
from ftslurm.train.step_reader import StepReader

OnEvent = Callable[[str, dict[str, Any]], None]
_Loaded = tuple[Restoration, Manifest]


class StorageError(RunError):
    """A file could not be read or moved now; that is no evidence against what it holds."""


class MisreadError(StorageError):
    """This rank's node reads other bytes than those that were saved, which another node reads."""


class MisreadElsewhereError(StorageError):
    """Another rank's node has; that rank says so itself."""


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
        self, state: TrainState, place: Place, *, device: torch.device, attempt: int, node: str
    ) -> None:
        self._state = state
        self._place = place
        self._device = device
        self._attempt = attempt
        self._node = node
        self._patience = Patience()
        """Over all steps, of rank 0 and of the second reader: the others meanwhile wait in a
        collective that has a limit."""
        self._is_alone = False
        """What rank 0 found damaged could be read on no other node."""

    def restore(self, adopted: list[AdoptedStep] | None, on_event: OnEvent) -> Restored | None:
        """The newest step that every rank verified; None when the run never committed any."""
        rejected: dict[int, Rejected] = {}
        # Unlike damaged steps these never were part of this run's history.
        self._on_rank_0(
            "cannot put steps of older attempts aside",
            lambda: self._set_aside(self._strays(adopted), on_event),
        )
        while True:
            offer = self._on_rank_0(
                "cannot choose a checkpoint", lambda: self._offer(adopted, rejected)
            )
            self._second_look(offer["doubts"])
            if offer["reason"] is not None:
                alone = f"; only {self._node} has read them: try another node before"
                raise CheckpointError(offer["reason"] + (alone if self._is_alone else ""))
            if offer["step"] is None:
                return None
            loaded = self._load_together(offer, rejected)
            if loaded is not None:
                break
        restoration, manifest = loaded
        restoration.adopt()
        self._on_rank_0(
            "cannot put rejected steps aside",
            lambda: self._conclude(manifest.step, adopted, rejected, on_event),
        )
        position = {key: getattr(manifest, key) for key in ("epoch", "samples", "tokens")}
        return Restored(
            step=manifest.step,
            position=position,
            manifest=manifest,
            digest=offer["digest"],
            generators_continue=restoration.generators_continue,
        )

    def _on_rank_0(self, failing: str, work: Callable[[], Any]) -> Any:
        """What `work` returns on rank 0, on every rank; when it fails, every rank raises."""
        answer: dict[str, Any] = {}
        if self._place.rank == 0:
            try:
                answer["value"] = work()
            except (OSError, FtslurmError) as error:
                answer["error"] = f"{failing}: {reason_of(error)}"
                answer["node"] = self._node if is_of_storage(error) else None
        answer = self._share(answer)
        if "error" not in answer:
            return answer["value"]
        if answer["node"] is None:
            raise CheckpointError(answer["error"])
        raise StorageError(f"{answer['error']} (rank 0 on {answer['node']}); try again")

    def _strays(self, adopted: list[AdoptedStep] | None) -> list[Rejected]:
        return self._place.store.fence(self._attempt, adopted, patience=self._patience)

    def _offer(
        self, adopted: list[AdoptedStep] | None, rejected: dict[int, Rejected]
    ) -> dict[str, Any]:
        """Rank 0: the next step to try, or a sentence why there is none."""
        offer: dict[str, Any] = {"step": None, "reason": None, "doubts": []}
        if adopted:
            # The claim has seen it; another node may have made the claim.
            await_step(self._place.store.layout, max(row.step for row in adopted))
        failed = {step: row.reason for step, row in rejected.items()}
        choice = self._place.store.choose(
            full=False,
            adopted=adopted,
            attempt=self._attempt,
            failed=failed,
            patience=self._patience,
        )
        for row in choice.rejected:
            if row.is_damage and row.step not in rejected:
                offer["doubts"].append(_doubt(row.step, row.path, row.reason))
            rejected[row.step] = row
        if choice.path is not None and choice.manifest is not None:
            offer.update(
                step=choice.manifest.step, path=str(choice.path), digest=choice.committed_digest
            )
        elif rejected:
            offer["reason"] = _nothing_left(list(rejected.values()))
        elif adopted:
            offer["reason"] = (
                f"attempt {self._attempt} adopted the steps {[row.step for row in adopted]}, and "
                f"none is in `{self._place.store.layout.steps}` any more; the run does not start "
                "from step 0: put them back, or submit a new run"
            )
        return offer

    def _load_together(
        self, offer: dict[str, Any], rejected: dict[int, Rejected]
    ) -> _Loaded | None:
        """What this rank has read of the offered step; None, on all ranks, when it is damaged."""
        loaded, answer = self._load(offer)
        rows = gather_json(answer, self._place.group, world_size=self._place.world_size)
        verdict = self._on_rank_0(
            f"cannot judge step {offer['step']}", lambda: self._judge(offer, rows)
        )
        if "mismatch" in verdict:
            raise StateMismatch(verdict["mismatch"])
        if "misread" in verdict:
            raise self._misread(
                offer["step"],
                verdict["misread"],
                verdict["ranks"],
                by=f"rank 0 on {verdict['node']}",
            )
        if "unread" in verdict:
            raise StorageError(
                f"step {offer['step']} cannot be read now ({verdict['unread']}); it was not "
                "rejected: try again"
            )
        if "damage" in verdict:
            self._second_look(verdict["doubts"])
            row = Rejected(offer["step"], Path(offer["path"]), verdict["damage"])
            rejected[offer["step"]] = row
            return None
        assert loaded is not None
        return loaded

    def _load(self, offer: dict[str, Any]) -> tuple[_Loaded | None, dict[str, str]]:
        """Read and verify all this rank needs; live objects other than tensors stay as they are."""
        try:
            folder = Path(offer["path"])
            reader = StepReader(folder, _read_manifest(folder, offer["digest"]))
            restoration = self._prepare(reader)
            reader.fill(restoration.leaves, rank=self._place.rank)
        except StateMismatch as error:
            return None, {"mismatch": str(error)}
        except DamagedFile as error:
            return None, {"misread": str(error), "file": error.name, "node": self._node}
        except (OSError, FtslurmError) as error:
            kind = "unread" if is_of_storage(error) else "damage"
            return None, {kind: reason_of(error), "node": self._node}
        return (restoration, reader.manifest), {}

    def _judge(self, offer: dict[str, Any], rows: list[dict[str, str]]) -> dict[str, Any]:
        """Rank 0: what all ranks together make of a step; empty when all have read it.

        A file that is missing, wrong or cannot be read on one rank is damage only if rank 0 finds
        damage too: another node's view of a shared file system may be late or broken, and so may
        its memory.
        """
        mismatches = [row["mismatch"] for row in rows if "mismatch" in row]
        if mismatches:
            return {"mismatch": mismatches[0]}
        told = {
            kind: "; ".join(
                f"rank {rank} on {row['node']}: {row[kind]}"
                for rank, row in enumerate(rows)
                if kind in row
            )
            for kind in ("damage", "misread", "unread")
        }
        if told["damage"]:
            return {"damage": told["damage"], "doubts": []}  # of bytes that have their digests
        said = "; ".join(filter(None, (told["misread"], told["unread"])))
        if not said:
            return {}
        files = {row["file"] for row in rows if "file" in row}
        # Of wrong bytes each is read again, from the device.
        path = Path(offer["path"])
        found = self._place.store.verify(path, full=bool(files), files=files)
        if not found.ok and found.unreadable is None:
            return {"damage": said, "doubts": [_doubt(offer["step"], path, said, files)]}
        if files and found.ok:
            ranks = [rank for rank, row in enumerate(rows) if "misread" in row]
            return {"misread": told["misread"], "ranks": ranks, "node": self._node}
        return {"unread": said}

    def _second_look(self, doubts: list[dict[str, Any]]) -> None:
        """Raise where a rank on another node reads rightly what rank 0 has found damaged.

        Bytes that have their digests were not misread. In a job of one node rank 0's word, from the
        device, has to do.
        """
        if not doubts:
            return
        nodes = gather_json(self._node, self._place.group, world_size=self._place.world_size)
        second = self._on_rank_0("cannot name a second reader", lambda: _on_another_node(nodes))
        if second is None:
            self._is_alone = True
            return
        found = self._found_whole(doubts) if self._place.rank == second else None
        rows = gather_json(found, self._place.group, world_size=self._place.world_size)
        answer = self._on_rank_0(
            "cannot judge what is damaged",
            lambda: rows[second] and {**rows[second], "misreader": nodes[0], "by": nodes[second]},
        )
        if answer is None:
            return
        doubt, by = doubts[answer["which"]], f"rank {second} on {answer['by']}"
        if answer["unread"]:
            raise StorageError(
                f"step {doubt['step']} is damaged as rank 0 on {answer['misreader']} reads it, and "
                f"{by} cannot read it now ({answer['unread']}); it was not rejected: try again"
            )
        told = f"rank 0 on {answer['misreader']}: {doubt['why']}"
        raise self._misread(doubt["step"], told, [0], by=by)

    def _found_whole(self, doubts: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The first of `doubts` that this rank finds whole, or cannot read; None: all are bad."""
        for which, doubt in enumerate(doubts):
            files, unread = doubt["files"], ""
            self._patience.renew()
            try:
                found = self._place.store.verify(
                    Path(doubt["path"]),
                    full=bool(files),
                    files=files or None,
                    patience=self._patience,
                )
                if found.unreadable is not None:
                    unread = "; ".join(found.problems)
                elif not found.ok:
                    continue
            except (OSError, FtslurmError) as error:
                unread = reason_of(error)
            return {"which": which, "unread": unread}
        return None

    def _misread(self, step: int, told: str, ranks: list[int], *, by: str) -> StorageError:
        kind = MisreadError if self._place.rank in ranks else MisreadElsewhereError
        return kind(
            f"step {step} was read wrongly ({told}), and {by} finds these files whole; it was not "
            "rejected"
        )

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

    def _share(self, value: Any) -> Any:
        return broadcast_json(value, self._place.group, world_size=self._place.world_size)

    def _conclude(
        self,
        step: int,
        adopted: list[AdoptedStep] | None,
        rejected: dict[int, Rejected],
        on_event: OnEvent,
    ) -> None:
        """Rank 0: what was passed over goes out of the way, and the journal says so."""
        self._set_aside(list(rejected.values()), on_event)
        newer = [row.step for row in adopted or [] if row.step > step]
        if newer:
            vanished = [number for number in newer if number not in rejected]
            on_event("fell_back", {"step": step, "adopted": max(newer), "vanished": vanished})

    def _set_aside(self, rejected: list[Rejected], on_event: OnEvent) -> None:
        for row in rejected:
            self._place.store.quarantine(row)
            on_event("rejected", {"step": row.step, "reason": row.reason})


def _doubt(step: int, path: Path, why: str, files: Collection[str] = ()) -> dict[str, Any]:
    """What rank 0 alone has found damaged; without `files` by the records and sizes."""
    return {"step": step, "path": str(path), "why": why, "files": sorted(files)}


def _on_another_node(nodes: list[str]) -> int | None:
    return next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)


def is_of_storage(error: BaseException) -> bool:
    """Whether the file system failed or lacks a file, rather than that the bytes are not right."""
    # One who reads alone counts a missing file as damage and names no cause for it.
    return any(isinstance(e, OSError) for e in (error, error.__cause__, error.__context__))


def _read_manifest(folder: Path, digest: str) -> Manifest:
    # Rank 0 has read it a moment ago.
    data = read_small(folder / MANIFEST, announced=True)
    if manifest_digest(data) != digest:
        raise DamagedFile(MANIFEST, f"`{folder / MANIFEST}` is not the manifest that rank 0 chose")
    return decode_manifest(data, where=str(folder / MANIFEST))


def _nothing_left(rejected: list[Rejected]) -> str:
    tried = "; ".join(f"step {row.step}: {row.reason}" for row in rejected)
    return (
        f"none of the run's checkpoints can be restored ({tried}); nothing was deleted or moved "
        "and the run does not start from step 0: repair or remove them by hand, or submit a new run"
    )
