"""The processes of an attempt on this node: found, ended, and proved to be gone.

A rank is known by its beat or by its environment (FTSLURM_RUN_DIR, FTSLURM_ATTEMPT, inside a job
step of the job that FTSLURM_JOB_ID names), and named by pid and start, so that a pid used again is
never taken for it. Never touches another user's process, one of another job that a rank has
submitted, an agent, a standby, the batch shell or what that shell runs; but the ranks' srun when
asked for it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Callable, Optional

from ftslurm.run.heartbeat import RankView
from ftslurm.run.process_stat import children_by_parent
from ftslurm.scheduler.process import ProcessName

GRACE_S = 5.0
"""From TERM to KILL: a save that is nearly done may come to its end."""
GONE_WITHIN_S = 5.0
"""After KILL. A process in uninterruptible sleep stays longer, and is told of."""
_LOOK_S = 0.05

_NOT_RANKS = ("ftslurm", "ftslurm.agent", "ftslurm.node.standby")
"""Modules that are never ended: the batch loop's verbs, agents, and who forks the next ranks."""
_LAUNCHERS = frozenset({"srun", "tee"})


@dataclass(frozen=True)
class Found:
    """A process with an attempt's environment."""

    name: ProcessName
    attempt: int
    argv: tuple[str, ...]
    is_in_step: bool
    is_of_its_job: bool = True
    """Of the job whose batch script began the attempt, not of one that was submitted from within
    it, which inherits all its variables."""

    @property
    def is_rank(self) -> bool:
        """Or its child: a data loader, a container's tool. The batch script's own children have no
        step."""
        is_ranks = self.is_in_step and self.is_of_its_job
        return is_ranks and self._program not in _LAUNCHERS and not self._is_ours

    @property
    def is_launcher(self) -> bool:
        return self._program == "srun" and self.is_of_its_job and not self._is_ours

    @property
    def _program(self) -> str:
        return PurePath(self.argv[0]).name if self.argv else ""

    @property
    def _is_ours(self) -> bool:
        return any(
            word == "-m" and module in _NOT_RANKS for word, module in zip(self.argv, self.argv[1:])
        )


def find(run_dir: Path, node: str, *, proc: Path = Path("/proc")) -> Iterator[Found]:
    """This user's processes with the run's environment. May block where a process hangs in the
    kernel (its memory is locked): call it in a thread."""
    run, own = os.fsencode(f"FTSLURM_RUN_DIR={run_dir}"), os.fsencode(node)
    for folder in proc.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            environ = folder.joinpath("environ").read_bytes().split(b"\0")
            if run not in environ or _node_of(environ) not in (None, own):
                continue
            argv = folder.joinpath("cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        name = ProcessName.of(int(folder.name))
        values = dict(item.partition(b"=")[::2] for item in environ)
        attempt = values.get(b"FTSLURM_ATTEMPT", b"")
        if name is not None and attempt.isdigit():
            words = tuple(map(os.fsdecode, argv))
            is_in_step = b"SLURM_STEP_ID" in values
            is_of_its_job = values.get(b"FTSLURM_JOB_ID") == values.get(b"SLURM_JOB_ID")
            yield Found(name, int(attempt), words, is_in_step, is_of_its_job)


def ranks_of(
    run_dir: Path, node: str, attempt: int, views: Iterable[RankView], *, older: bool = False
) -> set[ProcessName]:
    """The living ranks of `attempt`, with `older` of those before it too, and their children."""
    names = {
        found.name
        for found in find(run_dir, node)
        if found.is_rank and (found.attempt == attempt or (older and found.attempt < attempt))
    }
    # One that was forked by a standby has that one's environment in /proc.
    beating = {ProcessName(view.pid, view.start_ticks) for view in views if view.pid > 0}
    return names | _with_children({name for name in beating if name.is_alive})


def launchers_of(run_dir: Path, node: str, attempt: int) -> set[ProcessName]:
    """The srun clients of an attempt's ranks; on the batch node only."""
    return {
        found.name
        for found in find(run_dir, node)
        if found.is_launcher and found.attempt == attempt
    }


def end(
    look: Callable[[], set[ProcessName]],
    *,
    grace_s: float = GRACE_S,
    gone_within_s: float = GONE_WITHIN_S,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> set[ProcessName]:
    """TERM, `grace_s`, KILL for all that `look` finds, what is born meanwhile too; what is left."""
    known: set[ProcessName] = set()
    kill_at = clock() + grace_s
    give_up_at = kill_at + gone_within_s
    while True:
        living = {name for name in known | look() if name.is_alive}
        if not living or clock() >= give_up_at:
            return living
        for name in living:
            if clock() >= kill_at:
                name.send(signal.SIGKILL)  # at once without a grace
            elif name not in known:
                # A stopped process acts on TERM only when it goes on (signal(7)).
                name.send(signal.SIGTERM)
        known |= living
        _await(living, min(1.0, max(_LOOK_S, kill_at - clock())), sleep, clock)


def _node_of(environ: list[bytes]) -> Optional[bytes]:
    """More than one slurmd may run on a machine (--enable-multiple-slurmd)."""
    name = b"SLURMD_NODENAME="
    return next((word[len(name) :] for word in environ if word.startswith(name)), None)


def _await(
    names: set[ProcessName],
    most_s: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> None:
    """Until all are gone, `most_s` at most; a look at a pid is cheaper than one at all of /proc."""
    deadline = clock() + most_s
    while any(name.is_alive for name in names) and clock() < deadline:
        sleep(_LOOK_S)


def _with_children(roots: set[ProcessName]) -> set[ProcessName]:
    """They and all below them."""
    if not roots:
        return set()
    children = children_by_parent()
    names, todo = set(roots), [name.pid for name in roots]
    while todo:
        for pid in children.get(todo.pop(), []):
            name = ProcessName.of(pid)
            if name is not None and name not in names:
                names.add(name)
                todo.append(pid)
    return names
