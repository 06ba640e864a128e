"""The batches of a run: for each step one rank's micro-batches, read ahead by DataLoader workers.

What is handed out depends on the cursor, the rank and the world alone: never on the number of
workers, and never on torch's random generator, which is left untouched. Reading ahead moves
nothing; the cursor moves when its owner says so, and a cursor set to another place (a restore) is
followed from the next batch on. A loop that does not train one batch a step is refused: the cursor
would name another place than it has come to, and a restart would go on there. Stop signals do not
end workers; `close`, and the end of the rank however it comes, do.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Optional

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ftslurm.errors import UsageError
from ftslurm.run.rank import STOP_SIGNALS
from ftslurm.train.cursor import BatchPlan, Cursor, plan_batch, sample_indices
from ftslurm.train.token_store import Tokens, TokenStore

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KILLED_S = 2.0
AHEAD = 16
"""Batches that a loop may hold before it trains them, e.g. to bring them to the GPU in time."""


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the model at once; all three of shape (rows, sequence_length)."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    """float32: 1 for a token that counts, 0 for padding. Their sum over all micro-batches and
    ranks is the number of tokens of the step, by which the loss is to be divided."""


class GlobalBatches:
    """Endless iterator over steps; each is a list of micro-batches, equally long on every rank."""

    def __init__(
        self,
        store: TokenStore,
        cursor: Cursor,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        num_workers: int = 0,
    ) -> None:
        assert cursor.samples_per_epoch <= len(store), "a cursor counts samples of its store"
        self.plan = plan_batch(cursor.global_batch_size, rank, world_size, micro_batch_size)
        self._store = store
        self._cursor = cursor
        self._num_workers = num_workers
        self._moves = -1
        self._steps: Optional[Iterator[Tokens]] = None
        self._begins: Iterator[int] = iter(())
        self._untrained: deque[int] = deque()
        """First samples of the batches handed out whose step has not ended."""
        self._workers: list[BaseProcess] = []

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        if self._steps is None or self._moves != self._cursor.moves:
            self._start()
        assert self._steps is not None
        self._hand_out(next(self._begins))
        return cut_micro_batches(next(self._steps), self.plan)

    def _hand_out(self, begin: int) -> None:
        due = self._cursor.begin_of(self._cursor.samples)
        while self._untrained and self._untrained[0] < due:
            self._untrained.popleft()
        self._untrained.append(begin)
        if begin < due:
            what = "ended a step without taking a batch for it"
        elif len(self._untrained) > AHEAD:
            what = f"has taken {AHEAD} batches more than it has ended steps"
        else:
            return
        raise UsageError(
            f"the loop {what}, so a restart would go on at another place in the data; take one "
            "batch from session.batches and call session.end_step once in each step"
        )

    def close(self, *, timeout_s: float = 5.0) -> None:
        """End the workers: asked first, killed at `timeout_s`. Another `next` starts new ones."""
        steps, workers = self._steps, self._workers
        self._steps, self._workers = None, []
        if workers:
            _end_workers(steps, workers, timeout_s)

    def _start(self) -> None:
        self.close()
        self._moves = self._cursor.moves
        self._begins = self._cursor.begins()
        self._untrained.clear()
        loader = DataLoader(
            _StepReader(self._store, self._cursor, self.plan),
            batch_size=None,
            sampler=self._cursor.begins(),
            num_workers=self._num_workers,
            # Arrays go through the pipe as they are: no /dev/shm, which is 64 MiB in a container.
            collate_fn=_as_is,
            worker_init_fn=_set_up_worker,
            # Else each start draws the workers' seed from the global generator, and a resumed run,
            # which starts once more, would see other dropout masks.
            generator=torch.Generator(),
            multiprocessing_context="fork" if self._num_workers else None,
        )
        before = set(multiprocessing.active_children())
        # Held back over the fork: a stop signal before `_set_up_worker` has run would kill.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._steps = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._workers = [p for p in multiprocessing.active_children() if p not in before]
        _open.add(self)


def cut_micro_batches(tokens: Tokens, plan: BatchPlan) -> list[MicroBatch]:
    """A rank's rows of sequence_length + 1 tokens as micro-batches, padded with weight zero."""
    shape = (plan.micro_steps, plan.rows, tokens.shape[1])
    padded = np.zeros(shape, np.int64)
    padded.reshape(-1, tokens.shape[1])[: len(tokens)] = tokens
    weights = torch.zeros(plan.micro_steps, plan.rows, tokens.shape[1] - 1)
    weights.view(-1, tokens.shape[1] - 1)[: len(tokens)] = 1.0
    return [
        MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), row_weights)
        for rows, row_weights in zip(torch.from_numpy(padded), weights)
    ]


class _StepReader(Dataset[Tokens]):
    """Item n: the rank's rows of the step that starts when n samples are consumed."""

    def __init__(self, store: TokenStore, cursor: Cursor, plan: BatchPlan) -> None:
        self._store = store
        self._plan = plan
        self._samples_per_epoch = cursor.samples_per_epoch
        self._seed = cursor.seed

    def __getitem__(self, samples: int) -> Tokens:
        indices = sample_indices(
            samples + self._plan.start,
            self._plan.stop - self._plan.start,
            samples_per_epoch=self._samples_per_epoch,
            seed=self._seed,
        )
        return self._store.read(indices)


def _as_is(item: Any) -> Any:
    return item


def _set_up_worker(worker: int) -> None:
    """Deaf to stop signals, and gone with its rank.

    Slurm's proctrack/linuxproc sends the signals of a job step to every process of it, and a
    worker that outlives its rank keeps srun waiting. torch's own watch looks each 5 s, and only
    between items.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)


def _end_workers(steps: Any, workers: list[BaseProcess], timeout_s: float) -> None:
    """Let torch end its workers, in a thread so that there is a limit; then kill what is left.

    Torch waits up to 10 s for each worker in turn and ends by a TERM, to which ours are deaf. Its
    method is called by its (private) name because deleting the iterator does nothing while a
    traceback holds it.
    """
    deadline = time.monotonic() + timeout_s
    closing = threading.Thread(target=steps._shutdown_workers, name="close-workers", daemon=True)
    closing.start()
    closing.join(timeout_s)
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    left = [worker for worker in workers if worker.is_alive()]
    if not left:
        return
    # torch's handler would raise for a worker that is killed on purpose.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in left:
        worker.kill()
    for worker in left:
        worker.join(_KILLED_S)
    closing.join(_KILLED_S)
    signal.signal(signal.SIGCHLD, handler)


_open: weakref.WeakSet[GlobalBatches] = weakref.WeakSet()


def _close_all() -> None:
    for batches in list(_open):
        batches.close()


# Last registered runs first, so before multiprocessing's own exit, which would send TERM to the
# workers and then wait for them without a limit.
atexit.register(_close_all)
