"""Where the ranks of a preflight tell rank 0 what they have, and get one answer for all.

Over rank 0's store and nothing else, so that a rank that hangs costs the others a wait and never
their own answer. Whoever has not spoken by the deadline is left out from then on, and everybody
goes on with the same list. What one rank tells goes to rank 0 alone: given to all, what 8,000 ranks
measure would be gigabytes through one process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ftslurm.errors import RunError
from ftslurm.run.rank import RankEnvironment
from ftslurm.train.distributed import listen, retry_bind

T = TypeVar("T")

_POLL_S = 0.05


class LeftOut(RunError):
    """The others went on without this rank."""


class Unanswered(RunError):
    """Rank 0 is silent."""


class Overdue(TimeoutError):
    """Its thread has been given up, and may come back one day."""

    def __init__(self, seconds: float, thread: threading.Thread) -> None:
        super().__init__(f"no answer in {seconds:.0f} s")
        self.thread = thread


def within(seconds: float, work: Callable[[], T]) -> T:
    """In a thread that is given up at the deadline: nothing brings a call of a driver back."""
    done: list[T] = []
    failed: list[BaseException] = []

    def target() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise Overdue(seconds, thread)
    return done[0]


def open_store(env: RankEnvironment, *, patience_s: float) -> Store:
    """Rank 0's store. Waits for rank 0, for nobody else."""
    listener = None
    if env.rank == 0:
        listener = retry_bind(lambda: listen(env.master_addr, env.master_port)).detach()
    try:
        store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=env.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=patience_s),
            master_listen_fd=listener,
        )
    except dist.DistError as error:
        raise Unanswered(
            f"rank 0 was not met at {env.master_addr}:{env.master_port} within {patience_s:.0f} s"
        ) from error
    return PrefixStore(f"preflight/{env.run_dir.name}/{env.attempt}", store)


class Table:
    """One rank's seat."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self.present: list[int] = list(range(world_size))
        """Ranks that have spoken so far, each time; rank 0 first."""

    def ask(
        self, name: str, value: Any, answer: Callable[[dict[int, Any]], Any], *, patience_s: float
    ) -> Any:
        """Rank 0's `answer` to rank -> what it says under this name, of all that said it within
        `patience_s` of rank 0. Collective; `answer` is called in rank 0 alone, `present` known by
        then. LeftOut where this rank is not among them, Unanswered by rank 0."""
        self._store.set(f"{name}/{self._rank}", json.dumps(value))
        if self._rank == 0:
            heard = self._collect(name, self.present, time.monotonic() + patience_s)
            absent = [rank for rank in self.present if rank not in heard]
            self._go_on_without(absent)
            answered = answer(heard)
            self._store.set(name, json.dumps([absent, answered]))
        else:
            absent, answered = self._hear(name, 2 * patience_s)
            self._go_on_without(absent)
        if self._rank in absent:
            raise LeftOut(f"came too late for `{name}`, the others have gone on")
        return answered

    def _go_on_without(self, absent: Sequence[int]) -> None:
        gone = set(absent)
        self.present = [rank for rank in self.present if rank not in gone]

    def leave(self, *, patience_s: float) -> None:
        """Rank 0, with whom the store ends, waits for the others to have read what it said last."""
        self._store.set(f"leave/{self._rank}", "null")
        if self._rank == 0:
            self._collect("leave", self.present, time.monotonic() + patience_s)

    def _collect(self, name: str, ranks: Sequence[int], deadline: float) -> dict[int, Any]:
        missing = list(ranks)
        while missing:
            missing = [rank for rank in missing if not self._store.check([f"{name}/{rank}"])]
            if time.monotonic() >= deadline:
                break
            if missing:
                time.sleep(_POLL_S)
        gone = set(missing)
        heard = [rank for rank in ranks if rank not in gone]
        return {rank: json.loads(self._store.get(f"{name}/{rank}")) for rank in heard}

    def _hear(self, name: str, patience_s: float) -> tuple[list[int], Any]:
        def hear() -> tuple[list[int], Any]:
            self._store.wait([name], timedelta(seconds=patience_s))
            absent, answered = json.loads(self._store.get(name))
            return absent, answered

        try:
            # A TCPStore that gives up asks the server to forget it, and waits for the answer.
            return within(patience_s + _POLL_S, hear)
        except (dist.DistError, TimeoutError) as error:
            raise Unanswered(
                f"rank 0 has not answered on `{name}` in {patience_s:.0f} s"
            ) from error
