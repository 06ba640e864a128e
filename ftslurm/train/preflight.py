"""`python -u -m ftslurm.train.preflight`: one rank of a preflight, in a job step of its own.

Tries its device alone, its node's ranks among themselves and nodes in pairs (health/pairwise.py
says which), and tells it in lines on stdout; what follows is not decided here. Every part has a
deadline and leaves by it, whatever the device or the partner does. A stop signal ends it at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.errors import RANK_STOPPED, SpecError
from ftslurm.health.pairwise import (
    CPU_LIMITS,
    GEMM,
    GPU_LIMITS,
    HBM,
    P2P,
    PAIR,
    Pair,
    Trial,
)
from ftslurm.node.preflight_lines import line
from ftslurm.run.gpu_request import ranks_use_gpus
from ftslurm.run.rank import STOP_SIGNALS, RankEnvironment
from ftslurm.run.record import read_record
from ftslurm.train.preflight_course import FIRST, Course, Step, step_of

if TYPE_CHECKING:
    import torch

    from ftslurm.run.spec import RunSpec

COMING_S = 120.0
"""For all ranks to have come: a node on which nothing is in its caches reads torch for a minute."""
WAKING_S = 60.0
"""Of these, for a device's first use."""
ALONE_S = {GEMM: 10.0, HBM: 20.0, P2P: 10.0}
MEETING_S = 15.0
SLACK_S = 10.0
"""Others may be so much behind rank 0."""

_WITHOUT_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's watchdog would end the process for one partner that hangs."""


def main() -> None:
    env = RankEnvironment.read()

    def say(kind: str, **facts: Any) -> None:
        # One write a line: all ranks of a node may share this file.
        os.write(1, f"{line(kind, rank=env.rank, node=env.node, **facts)}\n".encode())

    _leave_on_signal(say)
    try:
        preflight = _Preflight(env, read_record(env.layout).spec, say)
        from ftslurm.train.preflight_table import Unanswered

        try:
            preflight.run()
        except Unanswered as error:
            say("unanswered", why=str(error))
        else:
            say("end")
    except Exception as error:  # noqa: BLE001 - it is told, and the ranks start all the same
        say("broken", why=f"{type(error).__name__}: {_first_line(error)}")
    # No destructors: those of groups that were given up may wait for ever.
    os._exit(0)


def _leave_on_signal(say: Callable[..., None]) -> None:
    """By a thread: a handler would wait until the main thread is back from a collective. Threads
    that begin later have the signals blocked, too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for number in STOP_SIGNALS:
        # Never called: node/prefix.py hands a signal to those only who have a handler.
        signal.signal(number, lambda number, frame: None)

    def wait() -> None:
        number = signal.sigwait(STOP_SIGNALS)
        say("stopped", signal=signal.Signals(number).name)
        os._exit(RANK_STOPPED)

    threading.Thread(target=wait, name="signals", daemon=True).start()


class _Preflight:
    """One rank's way through it. Collective from begin to end."""

    def __init__(self, env: RankEnvironment, spec: RunSpec, say: Callable[..., None]) -> None:
        os.environ.update(_WITHOUT_WATCHDOG)
        import torch

        torch.set_num_threads(1)
        self._env, self._spec, self._say = env, spec, say
        self._places: dict[int, str] = {}
        """Rank -> node, of all that came."""
        self._stuck: Optional[threading.Thread] = None
        """Of a part that had not come back in time: until it has, its device is not asked."""
        self._memory_is_known = False
        self._took: dict[str, float] = {}

    def run(self) -> None:
        from ftslurm.train.preflight_table import Table, open_store

        self._say("here")
        self._store = open_store(self._env, patience_s=2 * COMING_S)
        self._table = Table(self._store, self._env.rank, self._env.world_size)
        self._wake()
        self._meet_all()
        course = Course(GPU_LIMITS if ranks_use_gpus(self._spec) else CPU_LIMITS, self._say)
        step: Optional[Step] = FIRST
        while step is not None:
            step = self._take(step, course)
        self._table.leave(patience_s=SLACK_S)

    def _wake(self) -> None:
        """Before anything is timed. Whatever is wrong with the device shows again when it is."""
        from ftslurm.train import preflight_parts as parts
        from ftslurm.train.preflight_table import Overdue, within

        try:
            within(WAKING_S, lambda: parts.wake(self._device()))
        except Overdue as error:
            self._stuck = error.thread
        except (RuntimeError, SpecError):
            pass

    def _meet_all(self) -> None:
        from ftslurm.train.interface import interface_towards

        env = self._env
        is_far = env.rank >= env.local_world_size
        own = interface_towards(env.master_addr, env.master_port) if is_far else None

        def answer(heard: dict[int, list[Optional[str]]]) -> Any:
            self._tell_absent(range(env.world_size))
            nodes = itertools.groupby(node for node, _ in heard.values())
            far = next((address for _, address in heard.values() if address), None)
            return [[node, len(list(ranks))] for node, ranks in nodes], far

        said = [env.node, own and own[1]]
        counts, far = self._table.ask("here", said, answer, patience_s=COMING_S)
        places = [node for node, count in counts for _ in range(count)]
        self._places = dict(zip(self._table.present, places))
        # Left alone, gloo listens on what the host's own name resolves to (127.0.1.1 on Debian).
        if own is None and far is not None:
            own = interface_towards(far, env.master_port)
        if own is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", own[0])

    def _take(self, step: Step, course: Course) -> Optional[Step]:
        """Try what is to be tried, and hear what is next."""
        if step.pairs is None:
            own, within_s = self._try_alone(step.number), sum(ALONE_S.values())
        else:
            own, within_s = self._try_pair(step), MEETING_S
        before = list(self._table.present)

        def answer(heard: dict[int, Any]) -> Any:
            self._tell_absent(before)
            return course.after(step, heard, self._whole_nodes())

        report = [[dataclasses.asdict(trial) for trial in own], self._took]
        self._took = {}
        patience_s = within_s + SLACK_S
        following = self._table.ask(step.name, report, answer, patience_s=patience_s)
        return following and step_of(following)

    def _whole_nodes(self) -> list[str]:
        """Whose ranks are all there, in the order of ranks."""
        present = set(self._table.present)
        gone = {node for rank, node in self._places.items() if rank not in present}
        return [node for node in dict.fromkeys(self._places.values()) if node not in gone]

    def _tell_absent(self, before: Iterable[int]) -> None:
        for rank in sorted(set(before) - set(self._table.present)):
            self._say("absent", who=rank)

    def _try_alone(self, go: int) -> list[Trial]:
        from ftslurm.train import preflight_parts as parts

        env = self._env
        trials = [self._try(GEMM, lambda: parts.multiply(self._device()), rank=env.rank)]
        if not self._memory_is_known:
            memory = self._try(HBM, self._test_memory, rank=env.rank)
            self._memory_is_known = memory.seconds is not None or bool(memory.wrong)
            trials.append(memory)
        here = [rank for rank in self._table.present if self._places[rank] == env.node]
        if len(here) > 1:
            work = self._together(parts.exchange, f"go {go}/{env.node}", here, ALONE_S[P2P])
            trials.append(self._try(P2P, work))
        return trials

    def _test_memory(self) -> float:
        from ftslurm.train import preflight_parts as parts

        began = time.monotonic()
        parts.fill_and_read(self._device(), until=began + ALONE_S[HBM] / 2)
        return time.monotonic() - began

    def _try_pair(self, step: Step) -> list[Trial]:
        from ftslurm.train import preflight_parts as parts

        pair = next((pair for pair in step.pairs or () if self._env.node in pair), None)
        if pair is None:
            return []
        ranks = [rank for rank in self._table.present if self._places[rank] in pair]
        name = f"{step.name}/{'+'.join(pair)}"
        work = self._together(parts.all_reduce, name, ranks, MEETING_S)
        return [self._try(PAIR, work, nodes=pair)]

    def _together(
        self, part: Callable[..., float], name: str, ranks: Sequence[int], timeout_s: float
    ) -> Callable[[], float]:
        from torch._C._distributed_c10d import PrefixStore

        from ftslurm.train.preflight_parts import open_group

        def work() -> float:
            device, store = self._device(), PrefixStore(name, self._store)
            seat = ranks.index(self._env.rank)
            return part(open_group(store, seat, len(ranks), device, timeout_s=timeout_s), device)

        return work

    def _try(
        self,
        what: str,
        work: Callable[[], float],
        *,
        nodes: Optional[Pair] = None,
        rank: Optional[int] = None,
    ) -> Trial:
        """What came of it; a device or a partner that fails is a finding, a bug of ours is not."""
        from ftslurm.train.preflight_parts import Wrong
        from ftslurm.train.preflight_table import Overdue, within

        trial = Trial(what, nodes or (self._env.node,), None, rank)
        deadline_s = ALONE_S.get(what, MEETING_S)
        self._say("doing", part=what)
        if self._is_stuck(deadline_s if what == GEMM else 0.0):
            return dataclasses.replace(trial, why="its device had not come back before")
        began = time.monotonic()
        try:
            return dataclasses.replace(trial, seconds=within(deadline_s, work))
        except Wrong as error:
            return dataclasses.replace(trial, wrong=str(error))
        except Overdue as error:
            self._stuck = error.thread if what in (GEMM, HBM) else None
            return dataclasses.replace(trial, why=str(error))
        except (RuntimeError, SpecError) as error:  # torch's own are RuntimeErrors
            return dataclasses.replace(trial, why=_first_line(error))
        finally:
            self._took[what] = self._took.get(what, 0.0) + time.monotonic() - began

    def _is_stuck(self, patience_s: float) -> bool:
        if self._stuck is not None:
            self._stuck.join(patience_s)
        return self._stuck is not None and self._stuck.is_alive()

    def _device(self) -> torch.device:
        """Asked for in each thread anew: which GPU is current is a thread's own."""
        from ftslurm.train.distributed import backend_of, take_device

        return take_device(self._env, backend_of(self._spec))


def _first_line(error: BaseException) -> str:
    """Short, so that the line it comes in is."""
    return next(iter(str(error).splitlines()), "")[:300] or type(error).__name__


if __name__ == "__main__":
    main()
