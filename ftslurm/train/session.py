"""Session: the one object a training loop needs. It decides when to save, stop and finish.

A loop wraps and registers its parts, restores, iterates over `steps()` and calls `end_step` once a
step on every rank; the rest is kept from it. Step numbers: `session.step` is the number of steps
applied so far, so it is 0 before the first; the trace row and the checkpoint of step n are those of
the moment when n steps have been applied. Collective calls are marked; every rank makes them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ftslurm import faults
from ftslurm.errors import RANK_STOPPED, CheckpointError, UsageError
from ftslurm.replay.determinism import parameter_digest, seed_all
from ftslurm.run.attempts import FINISHED, Outcome, read_attempt
from ftslurm.run.deadline import MOST_S
from ftslurm.run.heartbeat import EVALUATING, LEAVING, RESTORING, SAVING, STARTING
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment, StopFlag
from ftslurm.run.record import RunRecord
from ftslurm.train import parallel
from ftslurm.train.account import Account
from ftslurm.train.beats import watch_backward, watch_collectives, watch_compiler
from ftslurm.train.checkpointer import Checkpointer
from ftslurm.train.cursor import Cursor
from ftslurm.train.deadline import Leeway
from ftslurm.train.distributed import Groups
from ftslurm.train.ending import LAST_BARRIER_S, leave_together, stopped
from ftslurm.train.feed import open_feed
from ftslurm.train.loader import GlobalBatches, MicroBatch
from ftslurm.train.numeric import LossWatch
from ftslurm.train.pacer import open_pacer
from ftslurm.train.same_code import check_same_code
from ftslurm.train.save_facts import SaveFacts
from ftslurm.train.state import TrainState
from ftslurm.train.stop import Agreement, Speaker, Word, save_is_due, start_maximum
from ftslurm.train.token_store import TokenStore

CLOSE_LOADER_S = 5.0
"""How long the loader's workers may take to end by themselves."""
RETENTION_IN_GRACE_S = 2.0
"""How long a stop waits for old steps to be removed, which the next attempt may do as well."""


class Session:
    """One rank's view of the run."""

    def __init__(
        self,
        env: RankEnvironment,
        record: RunRecord,
        groups: Groups,
        flag: StopFlag,
        *,
        pulse: Pulse | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = groups.rank
        self.world_size = groups.world_size
        self.device = groups.device
        self.spec = record.spec
        self.run_dir: Path = env.run_dir
        self.data_path = record.data_path
        """The token store of the run, None when the run names none."""
        self.step = 0
        """Steps applied so far."""
        self.log = logging.getLogger("ftslurm.loop")
        self.is_restoring = False
        self.has_trained = False
        """Whether this attempt has got through a step."""
        self.has_ended = False
        """Whether the outcome of this attempt has been settled (stopped or finished)."""
        self.is_save_abandoned = False
        """Whether a save missed its deadline, so that a thread may still wait for peers or disk."""
        self._env = env
        self._record = record
        self._groups = groups
        self._flag = flag
        self._clock = clock
        self._pulse = pulse or Pulse.unseen()
        watch_collectives(self._pulse, left_out=groups.checkpoint)
        self._losses = LossWatch(self.spec.recovery)
        self._account = Account(env, record, self._pulse)
        self._pacer = open_pacer(env, record, self._account.event)
        self._speaker = Speaker(
            flag,
            is_first=self.rank == 0,
            interval_s=self._pacer.interval_s,
            stop_at=env.stop_at,
            clock=clock,
        )
        self._agreement = Agreement(start_maximum(groups.control))
        self._tokens = 0
        self._loss: float | None = None
        self._cursor: Cursor | None = None
        self._batches: GlobalBatches | None = None
        self._model: nn.Module | None = None
        self._state: TrainState | None = None
        self._extra: dict[str, Any] = {}
        self._checkpointer: Checkpointer | None = None
        self._boundary_at = clock()
        self._saved_step: int | None = None
        self._account.enter(STARTING)

    @property
    def should_stop(self) -> bool:
        """Whether this rank was asked to stop. Other ranks may not know yet: use it only to cut
        work short that is this rank's alone, never around a collective."""
        return self._flag.is_set

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in double precision. Collective."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=self._groups.main)
        return [float(value) for value in tensor.tolist()]

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` on this rank's device, spread as `spec.parallel.strategy` says. Collective."""
        model = parallel.wrap(model, strategy=self.spec.parallel.strategy, groups=self._groups)
        return watch_backward(self._pulse, model)

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Name what a checkpoint holds; `extra`: objects with state_dict and load_state_dict."""
        self._model = model
        self._extra.update(extra or {})
        self._state = TrainState(
            model, optimizer, scheduler=scheduler, scaler=scaler, extra=self._extra
        )

    def batches(self, store: TokenStore, *, held_out: int = 0) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches, one list a step, in the order that the run's seed gives.

        The last `held_out` sequences of the store are never among them.
        """
        if self._checkpointer is not None:
            raise UsageError("session.batches came after session.restore; call it before")
        feed = open_feed(store, self._record, self._env, held_out=held_out)
        self._cursor, self._batches = feed
        self._extra["cursor"] = self._cursor
        return iter(self._batches)

    def restore(self, warm_up: Callable[[], None] | None = None) -> None:
        """Load the newest checkpoint that verifies, if there is any. Collective.

        `warm_up` runs one forward and one backward of the model on any input; a model in DDP
        needs it (see parallel.warm_up), others do not run it.
        """
        if self._state is None or self._model is None:
            raise UsageError("session.restore came before session.register; call it after")
        self._account.enter(RESTORING)
        self.is_restoring = True
        if parallel.needs_warm_up(self._model):
            if warm_up is None:
                raise UsageError(
                    "the model is in DDP, so session.restore needs warm_up=..., a function that "
                    "runs one forward and one backward of it on any input; without it a resumed "
                    "run would add gradients in another order than an undisturbed one"
                )
            parallel.warm_up(self._model, warm_up)
        if self._batches is not None:
            self._batches.close()  # what was taken so far was trained by no step
        # Up to here all ranks drew the same numbers, so that each built the same model.
        seed_all(self.spec.seed, stream=f"rank {self.rank}")
        self._checkpointer = self._open_checkpointer(self._state)
        adopted = read_attempt(self._env.layout, self._env.attempt).adopted
        restored = self._checkpointer.restore(adopted)
        if restored is not None:
            self.step = restored.step
            self._tokens = restored.position["tokens"]
        on_event = self._account.event
        check_same_code(self._env, self._record, self._groups.control, on_event=on_event)
        self.is_restoring = False
        self._boundary_at = self._clock()
        self._speaker.saved()
        # A flag set while importing, warming up or restoring takes effect after one step.
        self._agreement.at_boundary(self._word())
        self._pulse.restored(self.step)
        watch_compiler()
        restored_step = None if restored is None else restored.step
        self._account.begin(step=self.step, tokens=self._tokens, restored_step=restored_step)

    def steps(self) -> Iterator[int]:
        """`session.step` before each step that is still to be trained."""
        self._require_checkpointer()
        while self.step < self.spec.steps:
            before = self.step
            self._pulse.step_begins()
            faults.point("step", rank=self.rank, step=before, attempt=self._env.attempt)
            yield before
            if self.step == before:
                raise UsageError(
                    "the loop came round without session.end_step; call it once in each step"
                )

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Around an evaluation in the midst of training, on every rank: it is no part of the step,
        and its length no sign of a hang."""
        return self._pulse.aside(EVALUATING)

    def end_step(
        self, *, loss: float, tokens: int = 0, values: Mapping[str, float] | None = None
    ) -> None:
        """A step has been applied. Collective; may save, and leaves by SystemExit on a stop.

        `loss` and `tokens` are those of the whole step over all ranks, the same on every rank;
        `values` are further scalars for the trace.
        """
        checkpointer = self._require_checkpointer()
        self.has_trained = True
        self.step += 1
        self._tokens += tokens
        self._loss = loss = float(loss)
        if self._cursor is not None:
            self._cursor.advance()
        self._account.step(
            self.step,
            loss=loss,
            samples=self._position()["samples"],
            tokens=self._tokens,
            values=values or {},
            committed_step=checkpointer.committed_step,
            failed_saves=checkpointer.failed_saves,
        )
        self._losses.check(self.step, loss)
        boundary_before, self._boundary_at = self._boundary_at, self._clock()
        self._pacer.step(self._boundary_at - boundary_before)
        agreed = self._agreement.at_boundary(self._word())
        self._pulse.step_ended(self.step)
        checkpointer.poll()
        if self.step >= self.spec.steps:
            return  # finish() saves; a stop asked for now has nothing left to stop
        if agreed.leaves:
            # What was agreed on was said at the boundary before, some time after the signal.
            self._stop(agreed, asked_at=boundary_before - agreed.waited_ms / 1000)
        if save_is_due(
            self.step,
            interval_steps=self._pacer.interval_steps,
            asked=agreed.saves,
            saved_step=self._saved_step,
        ):
            with self._pulse.aside(SAVING):
                has_begun = checkpointer.save(self.step, self._position())
            if has_begun:
                self._saved_step = self.step
                self._speaker.saved()
                self._pacer.saved()

    def finish(self) -> None:
        """The loop has returned: save, settle the outcome, write DONE. Collective."""
        checkpointer = self._require_checkpointer()
        assert self._model is not None, "restore came after register"
        self._agreement.drain()
        if self.step < self.spec.steps:
            self.log.info("the loop ended itself at step %d of %d", self.step, self.spec.steps)
        self._account.enter(SAVING, step=self.step)
        if not checkpointer.emergency_save(self.step, self._position(), deadline_s=MOST_S):
            raise CheckpointError(
                f"the last save, of step {self.step}, did not commit; see save_failed in "
                f"`{self._env.attempt_layout.events}`"
            )
        digest = parameter_digest(parallel.unwrap(self._model))
        checkpointer.close(timeout_s=LAST_BARRIER_S)
        self._settle(
            Outcome(
                result=FINISHED,
                step=self.step,
                committed_step=checkpointer.committed_step,
                written_at=time.time(),
            ),
            parameter_digest=digest,
        )
        self._leave()

    def _word(self) -> Word:
        order = self._account.order_due(self.step, saved_step=self._saved_step)
        return replace(self._speaker.word(), order=order)

    def _stop(self, agreed: Word, *, asked_at: float) -> None:
        """Save, settle the outcome, leave; inside what is left of the deadline when the site asks,
        an operator waits for the save."""
        checkpointer = self._require_checkpointer()
        self._agreement.drain()
        self._account.enter(SAVING)
        if agreed.stop_signal:
            self._account.event("signal", {"signal": agreed.stop_signal_name, "step": self.step})
        self.log.warning("stopping at step %d on %s", self.step, agreed.asked_by)
        leeway = Leeway(
            self._env,
            self._record,
            self._groups.control,
            asked_at=asked_at,
            signal_number=agreed.stop_signal,
            clock=self._clock,
        )
        save = partial(checkpointer.emergency_save, self.step, self._position())
        saved = leeway.save(save, self._account.event)
        order = self._account.order_obeyed(agreed.order)
        committed_step = checkpointer.committed_step
        self._settle(
            stopped(agreed, self.step, committed_step, order, None if saved else leeway.given_s)
        )
        self.is_save_abandoned = not saved
        if saved:
            checkpointer.close(timeout_s=RETENTION_IN_GRACE_S, hurry=True)
        self._leave(timeout_s=LAST_BARRIER_S if saved else min(LAST_BARRIER_S, leeway.left_s))
        raise SystemExit(RANK_STOPPED)

    def _settle(self, outcome: Outcome, *, parameter_digest: str | None = None) -> None:
        self.has_ended = True
        self._account.settle(outcome, loss=self._loss, digest=parameter_digest)

    def _leave(self, *, timeout_s: float = LAST_BARRIER_S) -> None:
        """End the loader's workers, then wait for all ranks, within limits."""
        self._pulse.phase(LEAVING)
        until = self._clock() + timeout_s
        if self._batches is not None:
            self._batches.close(timeout_s=min(CLOSE_LOADER_S, timeout_s))
        leave_together(self._groups.control, timeout_s=max(1.0, until - self._clock()))

    def _open_checkpointer(self, state: TrainState) -> Checkpointer:
        return Checkpointer(
            layout=self._env.layout,
            spec=self.spec.checkpoint,
            facts=SaveFacts.of(self._record, world_size=self.world_size),
            groups=self._groups,
            state=state,
            attempt=self._env.attempt,
            on_event=self._save_event,
        )

    def _require_checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            raise UsageError(
                f"`{self.spec.entry}` did not call session.restore; call it after "
                "session.register and before the first step"
            )
        return self._checkpointer

    def _position(self) -> dict[str, int]:
        if self._cursor is not None:
            return {**self._cursor.position(), "tokens": self._tokens}
        samples = self.step * self.spec.optim.global_batch_size
        return {"epoch": 0, "samples": samples, "tokens": self._tokens}

    def _save_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self._account.save_event(kind, facts)
        self._pacer.heard(kind, facts)
