"""Saves and restores a run's training state: stage on the caller's thread, persist in background.

All methods but `poll`, `close` and the properties are collective: every rank calls them at the same
step boundary. A save is reported committed only when it is durable and published; one that fails on
any rank fails on all, is reported once, and leaves the steps before it as they were. At most one
save is in flight, and what it is writing is never overwritten.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ftslurm import faults
from ftslurm.checkpoint.records import IndexEntry, Manifest, Parent
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import CheckpointError, FtslurmError
from ftslurm.run.attempts import AdoptedStep
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec
from ftslurm.train.arena import Arena
from ftslurm.train.background import BackgroundSave
from ftslurm.train.distributed import Groups
from ftslurm.train.exchange import largest
from ftslurm.train.persist import Failure, Place, SaveJob, SaveResult, persist, reason_of
from ftslurm.train.restore import OnEvent, Restored, Restorer
from ftslurm.train.save_facts import SaveFacts
from ftslurm.train.setbacks import Setbacks
from ftslurm.train.staging import Part, copy_digests, needed_bytes, own_parts, stage
from ftslurm.train.state import Snapshot, TrainState

RETRY_S = 5.0
"""Between two tries of a last save for which there is no space."""
AGREEMENT_GRACE_S = 2.0
"""How much later than its deadline an emergency save may learn that another rank is late."""


class Checkpointer:
    """One attempt's checkpoints."""

    def __init__(
        self,
        *,
        layout: RunLayout,
        spec: CheckpointSpec,
        facts: SaveFacts,
        groups: Groups,
        state: TrainState,
        attempt: int,
        on_event: OnEvent,
    ) -> None:
        self._spec = spec
        self._facts = facts
        self._groups = groups
        self._state = state
        self._attempt = attempt
        self._on_event = on_event
        store = CheckpointStore(layout)
        self._place = Place(groups.rank, groups.world_size, groups.checkpoint, store)
        self._arena = Arena(pinned=groups.device.type == "cuda")
        self._reserving: threading.Thread | None = None
        self._in_flight: BackgroundSave | None = None
        self._last: BackgroundSave | None = None
        self._parent: Parent | None = None
        self._restored_step: int | None = None
        self._setbacks = Setbacks()
        self._is_broken = False

    @property
    def committed_step(self) -> int | None:
        """Newest step this rank knows to be committed on the run's lineage."""
        return None if self._parent is None else self._parent.step

    @property
    def failed_saves(self) -> int:
        """Saves of this attempt that failed."""
        return self._setbacks.total

    def restore(self, adopted: list[AdoptedStep] | None) -> Restored | None:
        """Continue from the newest step that all ranks verify; None when there never was one."""
        groups = self._groups
        place = Place(groups.rank, groups.world_size, groups.control, self._place.store)
        restorer = Restorer(
            self._state, place, device=groups.device, attempt=self._attempt, node=groups.node
        )
        began_at = time.monotonic()
        restored = restorer.restore(adopted, self._on_event)
        if restored is None:
            return None
        self._parent = Parent(restored.step, restored.digest)
        self._restored_step = restored.step
        self._on_event(
            "restored",
            {
                "step": restored.step,
                "saved_by_attempt": restored.manifest.attempt,
                "saved_world_size": restored.manifest.world_size,
                "generators_continue": restored.generators_continue,
                "seconds": round(time.monotonic() - began_at, 3),
            },
        )
        self._reach("restored", restored.step)
        return restored

    def save(self, step: int, position: Mapping[str, int]) -> bool:
        """Stage now, persist in the background; False when skipped because one is in flight.

        CheckpointError on all ranks together after `max_failed_saves` failures in a row that
        another attempt might not have (see `setbacks`).
        """
        if self._spec.when_busy == "skip" and self._is_rank_0_busy():
            self._on_event("save_skipped", {"step": step})
            return False
        self._await_previous()
        self._start(step, position, max_failed=self._spec.max_failed_saves)
        return True

    def emergency_save(
        self,
        step: int,
        position: Mapping[str, int],
        *,
        deadline_s: float,
        nearer: Callable[[], float] = lambda: math.inf,
    ) -> bool:
        """True once `step` is committed; False, on all ranks, when the deadline passed before.

        A save that fails for lack of space or the like is tried again until then. `nearer`: a
        moment by time.monotonic() that may come nearer while it waits; who gives up makes all do.
        """
        last = time.monotonic() + deadline_s

        def deadline() -> float:
            return min(last, nearer())

        if not self._all_settled_by(deadline, step):
            return False
        while self.committed_step != step:
            self._start(step, position, max_failed=None)
            if not self._all_settled_by(deadline, step):
                return False
            if self.committed_step != step and not self._wait_for_space(deadline):
                return False
        return True

    def _wait_for_space(self, deadline: Callable[[], float]) -> bool:
        """Collective: False when trying again is in vain, or would come too late for a rank."""
        is_late = time.monotonic() + RETRY_S >= deadline()
        if not self._setbacks.is_of_disk or any(
            largest([int(is_late)], self._groups.control, world_size=self._groups.world_size)
        ):
            return False
        time.sleep(RETRY_S)
        return True

    def poll(self) -> None:
        """Report what the background has done since the last call; call it each step."""
        self._harvest()
        if self._reserving is None and self._last is None and self._state.optimizer.state:
            self._reserve()

    def close(self, *, timeout_s: float, hurry: bool = False) -> None:
        """Let the save in flight, and retention after it, finish; or leave it behind, saying so.

        `hurry`: steps that retention has not got to may stay for the next attempt.
        """
        deadline = time.monotonic() + timeout_s
        if self._in_flight is not None and not self._in_flight.wait(timeout_s):
            reason = f"still in flight after {timeout_s:.0f} s"
            self._on_event("save_abandoned", {"step": self._in_flight.step, "reason": reason})
            return
        self._harvest()
        if self._last is not None:
            if hurry:
                self._last.hurry()
            self._last.join(max(0.0, deadline - time.monotonic()))
            self._report_retention()

    def _start(self, step: int, position: Mapping[str, int], *, max_failed: int | None) -> None:
        """Collective: agree that everyone can and may, then stage and hand over."""
        assert self._in_flight is None, "a save is in flight"
        refusal: FtslurmError | None = None
        snapshot: Snapshot | None = None
        parts: list[Part] = []
        has_room = True
        try:
            snapshot = self._capture()
            parts = own_parts(snapshot.leaves)
            has_room = self._make_room(parts)
        except FtslurmError as error:
            refusal = error
        lacking = self._agree(refusal, max_failed, has_room=has_room)
        if lacking is not None:
            failure = Failure(lacking, f"rank {lacking} has no host memory for its snapshot")
            self._note_failures(step, [failure], of_all=False)
            return
        assert snapshot is not None
        tensors = stage(parts, self._arena)
        self._reach("staged", step)
        self._arena.hand_over()
        job = SaveJob(
            step=step,
            attempt=self._attempt,
            tensors=tensors,
            shared=snapshot.shared,
            private=snapshot.private,
            copies=copy_digests(snapshot.copies, self._spec.digest),
            aliases=snapshot.aliases,
            algorithm=self._spec.digest,
            manifest=partial(self._manifest, step, dict(position), self._parent),
        )
        self._in_flight = self._last = BackgroundSave(
            step, partial(self._persist, job), after=self._retain, previous=self._last
        )

    def _make_room(self, parts: Sequence[Part]) -> bool:
        """Whether this rank has the memory; all that staging takes."""
        if self._reserving is not None:
            self._reserving.join()
        return self._arena.has_room(needed_bytes(parts))

    def _agree(
        self, refusal: FtslurmError | None, max_failed: int | None, *, has_room: bool
    ) -> int | None:
        """Every rank goes on, or every rank raises, or all learn of a rank that lacks memory:
        nobody is left waiting in a collective."""
        refused, broken, failed, lacking = largest(
            [
                int(refusal is not None),
                int(self._is_broken),
                self._setbacks.against_attempt,
                -1 if has_room else self._groups.rank,
            ],
            self._groups.control,
            world_size=self._groups.world_size,
        )
        if refusal is not None:
            raise refusal
        if refused:
            raise CheckpointError("the state of another rank cannot be saved; see its own error")
        if broken:
            raise CheckpointError(
                "the ranks lost each other during an earlier save, so no further one can be agreed "
                "on; the newest committed step is unharmed"
            )
        if max_failed is not None and failed >= max_failed:
            raise CheckpointError(
                f"{failed} saves in a row have failed (checkpoint.max_failed_saves is "
                f"{max_failed}); the newest committed step is {self.committed_step}: see the "
                "reasons in the save_failed events"
            )
        return None if lacking < 0 else lacking

    def _capture(self) -> Snapshot:
        groups = self._groups
        return self._state.capture(
            rank=groups.rank, world_size=groups.world_size, device=groups.device
        )

    def _persist(self, job: SaveJob) -> SaveResult:
        try:
            return persist(job, self._place)
        finally:
            self._arena.release()

    def _retain(self, result: SaveResult, should_stop: Callable[[], bool]) -> None:
        """Rank 0, after the commit: only now may older steps go."""
        if self._groups.rank == 0:
            protect = set() if self._restored_step is None else {self._restored_step}
            self._place.store.retain(
                self._spec.keep_last,
                self._spec.keep_every_steps,
                protect,
                attempt=self._attempt,
                should_stop=should_stop,
            )

    def _await_previous(self) -> None:
        if self._in_flight is not None:
            self._in_flight.wait()
            self._harvest()

    def _is_rank_0_busy(self) -> bool:
        """Rank 0's view decides: ranks learn of the end of a save at different times."""
        busy = self._in_flight is not None and not self._in_flight.is_known
        word = int(busy and self._groups.rank == 0)
        return bool(largest([word], self._groups.control, world_size=self._groups.world_size)[0])

    def _all_settled_by(self, deadline: Callable[[], float], step: int) -> bool:
        """Collective: True when no rank has a save in flight any more and none lost the others."""
        if self._in_flight is not None:
            self._in_flight.wait_until(deadline)
            self._harvest()
        words = [int(self._in_flight is not None), int(self._is_broken)]
        timeout_s = max(0.0, deadline() - time.monotonic()) + AGREEMENT_GRACE_S
        group, size = self._groups.control, self._groups.world_size
        try:
            late, broken = largest(words, group, world_size=size, timeout_s=timeout_s)
        except RuntimeError as error:
            # A peer is dead or stuck; a deadline is there so that this rank can still leave.
            reason = f"a rank did not answer in time: {error}"
            self._on_event("save_abandoned", {"step": step, "reason": reason})
            return False
        return not late and not broken

    def _harvest(self) -> None:
        """Take note of a save whose result is known; the only place that counts and reports."""
        save = self._in_flight
        self._report_retention()
        if save is None or not save.is_known:
            return
        self._in_flight = None
        if save.result is None:
            # The collective itself broke: a peer died or the group timed out.
            self._is_broken = True
            assert save.error is not None
            failure = Failure(self._groups.rank, reason_of(save.error))
            self._note_failures(save.step, [failure], of_all=False)
        elif save.result.is_committed:
            self._setbacks.committed()
            self._parent = Parent(save.step, save.result.digest)
            self._on_event(
                "committed",
                {
                    "step": save.step,
                    "bytes": save.result.bytes,
                    "seconds": round(save.result.seconds, 3),
                },
            )
        else:
            self._note_failures(save.step, save.result.failures, of_all=save.result.failed_all)

    def _note_failures(self, step: int, failures: Sequence[Failure], *, of_all: bool) -> None:
        self._setbacks.failed([failure.errno for failure in failures], of_all=of_all)
        self._on_event(
            "save_failed",
            {
                "step": step,
                "rank": failures[0].rank,
                "reason": failures[0].reason,
                "in_a_row": self._setbacks.in_a_row,
            },
        )

    def _report_retention(self) -> None:
        if self._last is not None and self._last.after_error is not None:
            error, self._last.after_error = self._last.after_error, None
            self._on_event("retention_failed", {"reason": reason_of(error)})

    def _reserve(self) -> None:
        """Allocate and touch the arena beside the training, so that the first save need not."""
        needed = needed_bytes(own_parts(self._capture().leaves))
        self._reserving = threading.Thread(
            target=self._arena.has_room, args=(needed,), name="reserve-arena", daemon=True
        )
        self._reserving.start()

    def _reach(self, point: str, step: int) -> None:
        faults.point(point, rank=self._groups.rank, step=step, attempt=self._attempt)

    def _manifest(
        self,
        step: int,
        position: dict[str, int],
        parent: Parent | None,
        entries: list[IndexEntry],
    ) -> Manifest:
        facts = self._facts
        return Manifest(
            run_id=facts.run_id,
            attempt=self._attempt,
            step=step,
            parent=parent,
            world_size=facts.world_size,
            parallelism=facts.parallelism,
            global_batch_size=facts.global_batch_size,
            accumulation=0,
            epoch=position["epoch"],
            samples=position["samples"],
            tokens=position["tokens"],
            seed=facts.seed,
            framework="torch",
            framework_version=facts.framework_version,
            code_commit=facts.code_commit,
            config_digest=facts.config_digest,
            image_digest=facts.image_digest,
            dataset_snapshot=facts.dataset_snapshot,
            tokenizer_digest=facts.tokenizer_digest,
            digest_algorithm=self._spec.digest,
            indexes=entries,
            created_at=time.time(),
        )
