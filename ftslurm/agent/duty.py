"""What an agent does on its own node: look at the ranks' beats, end them, take their stacks.

Everything here may block and is called in a thread, but `look`, which reads the ranks' files in
/dev/shm and their states in /proc. Nothing here writes to shared storage or decides anything.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from ftslurm.agent.ask import exchange
from ftslurm.agent.gpu_memory import GpuMemory
from ftslurm.agent.kernel_log import newest_kernel_line
from ftslurm.agent.node_kind import OwnKind
from ftslurm.agent.processes import GRACE_S, end, launchers_of, ranks_of
from ftslurm.agent.silence import ANSWERS, NOTHING, REFUSES
from ftslurm.agent.wire import Message, WireError
from ftslurm.diagnosis.gpu_memory import Told
from ftslurm.files import best_effort
from ftslurm.run.deadline import AGENTS, MOST_S, Deadline, read_deadline, write_deadline
from ftslurm.run.heartbeat import RankView, beats_folder, read_views
from ftslurm.scheduler.process import ProcessName

PROBE_S = 3.0
CLEAR_GRACE_S = 2.0
"""A leftover has been asked to leave before."""
LAUNCHER_S = 0.5
"""After the last rank is gone, their srun should end by itself; with a dead node in the step it
does not (a minute and more seen), and takes a TERM for a reason to wait KillWait + 2 s."""

OLD_S = 3600.0
"""A folder of beats that has changed since may be that of a job that is just beginning."""
_SHARED_MEMORY = Path("/dev/shm")


class Duty:
    """This node's. `gpus`: of the job; `kind`: None where nobody asks for it."""

    def __init__(
        self,
        run_dir: Path,
        node: str,
        key: bytes,
        environ: Mapping[str, str],
        gpus: Optional[GpuMemory] = None,
        kind: Optional[OwnKind] = None,
    ) -> None:
        self.node = node
        self._gpus, self._kind = gpus, kind
        self._run_dir, self._key, self._environ = run_dir, key, environ
        self._kernel_after: dict[int, Optional[int]] = {}
        """Attempt -> number of the kernel's newest line when it began."""

    def look(self, attempt: int) -> list[RankView]:
        folder = beats_folder(self._environ, attempt)
        return [] if folder is None or attempt < 1 else read_views(folder, self.node)

    def carry_out(self, order: Message) -> dict[str, Any]:
        """Do what the leader says; what it is told of it."""
        attempt = int(order.get("attempt", 0))
        what = order["do"]
        if what == "begin":
            # Of one that is under way, what came since it was claimed counts, by the clock.
            late = bool(order.get("under_way"))
            self._kernel_after = {attempt: None if late else newest_kernel_line()}
        if what == "end":
            return {"left": self._end(attempt, order.get("grace_s", GRACE_S))}
        if what == "clear":
            left = self._clear(attempt)
            # What lives has memory, and is told of by itself.
            memory = self._gpus.look() if self._gpus and not left else Told()
            return {"left": left, "held": dict(memory.held), "unseen": memory.is_unseen}
        if what == "stacks":
            return {"stacks": self._stacks(attempt)}
        if what == "collect":
            return {"collected": self._collect(attempt, float(order["for_s"]))}
        if what == "deadline":
            until = time.monotonic() + float(order["left_s"])
            told = Deadline(until, str(order["by"]))
            return {"told": write_deadline(self._environ, attempt, told)}
        if what == "leave":
            return {"asked": self._ask_to_leave(attempt)}
        if what == "forget":
            return {"forgotten": self._forget(attempt)}
        if what == "kind" and self._kind is not None:
            return {"kind": self._kind.look(gpus=bool(order["gpus"]))}
        if what == "probe":
            return {"seen": self.probe(order["host"], order["port"])}
        return {}

    def end_launcher(self, attempt: int) -> list[int]:
        """The ranks of this node are gone: so is their srun, or it is ended. Those left."""
        deadline = time.monotonic() + LAUNCHER_S
        while launchers_of(self._run_dir, self.node, attempt) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = end(lambda: launchers_of(self._run_dir, self.node, attempt), grace_s=0.0)
        return sorted(name.pid for name in left)

    def probe(self, host: str, port: int) -> str:
        """Whether another agent is reached from here."""
        try:
            exchange(host, port, self._key, {"t": "probe"}, PROBE_S)
        except ConnectionRefusedError:
            return REFUSES
        except (OSError, WireError):
            return NOTHING
        return ANSWERS

    def _end(self, attempt: int, grace_s: float) -> list[int]:
        left = end(lambda: self._ranks(attempt), grace_s=grace_s)
        return sorted(name.pid for name in left)

    def _clear(self, attempt: int) -> list[int]:
        """No process of `attempt` or of an older one is left on this node; those that are."""

        def leftovers() -> set[ProcessName]:
            views = self.look(attempt)
            return ranks_of(self._run_dir, self.node, attempt, views, older=True)

        left = end(leftovers, grace_s=CLEAR_GRACE_S)
        self._forget_beats(attempt)
        return sorted(name.pid for name in left)

    def _forget_beats(self, attempt: int) -> None:
        """What attempts before this one have in this node's memory is given back."""
        folder = beats_folder(self._environ, attempt)
        if folder is None or not folder.parent.is_dir():
            return
        for older in folder.parent.glob("attempt-*"):
            if older.name < folder.name:
                shutil.rmtree(older, ignore_errors=True)

    def _ranks(self, attempt: int) -> set[ProcessName]:
        return ranks_of(self._run_dir, self.node, attempt, self.look(attempt))

    def _ask_to_leave(self, attempt: int) -> int:
        """The stop signal, to the ranks themselves: they save at a boundary, in their own time, and
        leave."""
        if read_deadline(self._environ, attempt) is None:
            with best_effort("the ranks wait for a word of Slurm's in vain"):
                until = time.monotonic() + MOST_S
                write_deadline(self._environ, attempt, Deadline(until, AGENTS))
        names = [ProcessName(view.pid, view.start_ticks) for view in self.look(attempt)]
        return sum(name.send(signal.SIGUSR1) for name in names)

    def _forget(self, attempt: int) -> bool:
        """The beats of an attempt that is over. While a rank lives it may be known by them only."""
        folder = beats_folder(self._environ, attempt)
        if folder is None or any(view.alive for view in self.look(attempt)):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True

    def sweep(self, shared: Path = _SHARED_MEMORY) -> None:
        """Give back what other jobs of this user's have left in this node's memory: folders of
        beats without a living rank."""
        own = f"ftslurm-{os.getuid()}-{self._environ.get('SLURM_JOB_ID')}"
        for folder in shared.glob(f"ftslurm-{os.getuid()}-*"):
            if folder.name != own and self._is_left_behind(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _is_left_behind(self, folder: Path) -> bool:
        try:
            attempts = list(folder.glob("attempt-*"))
            found = [path.lstat() for path in (folder, *attempts)]
            if any(one.st_uid != os.getuid() for one in found):
                return False
            if time.time() - max(one.st_mtime for one in found) < OLD_S:
                return False
            ranks = sum(len(list(attempt.glob("rank-*"))) for attempt in attempts)
        except OSError:
            return False
        views = [view for attempt in attempts for view in read_views(attempt, self.node)]
        # A rank that does not show is of another slurmd of this machine, or is none of ours.
        return len(views) == ranks and not any(view.alive for view in views)

    def _stacks(self, attempt: int) -> dict[str, str]:
        """File name -> its text, one a rank."""
        from ftslurm.agent.stacks import take_stacks

        folder = beats_folder(self._environ, attempt)
        texts = {} if folder is None else take_stacks(self.look(attempt), folder)
        return {f"rank-{rank:05d}.txt": text for rank, text in texts.items()}

    def _collect(self, attempt: int, for_s: float) -> dict[str, str]:
        from ftslurm.agent.collect import collect

        after = self._kernel_after.get(attempt)
        with tempfile.TemporaryDirectory(prefix="ftslurm-collect-", dir=_memory()) as folder:
            collect(Path(folder), self.node, within_s=for_s, kernel_after=after)
            return _texts(Path(folder))


class Watch:
    """The newest look at this node's ranks, and which of them have ended since the last."""

    def __init__(self, duty: Duty) -> None:
        self.attempt = 0
        self.views: list[RankView] = []
        self._duty = duty
        self._alive: dict[int, RankView] = {}
        """By rank, as last seen alive."""

    def begin(self, attempt: int) -> None:
        if attempt != self.attempt:
            self.attempt, self.views, self._alive = attempt, [], {}

    def look(self) -> list[dict[str, Any]]:
        """Facts of each rank that is gone now and was there before."""
        self.views = self._duty.look(self.attempt)
        exited = []
        for view in self.views:
            before = self._alive.pop(view.rank, None)
            if view.alive:
                self._alive[view.rank] = view
            elif before is not None and before.pid == view.pid:
                exited.append(_exit_of(view))
        beating = {view.rank for view in self.views}
        for rank, view in list(self._alive.items()):
            # It has taken its file with it, or we have since it ended.
            if rank not in beating and not ProcessName(view.pid, view.start_ticks).is_alive:
                exited.append(_exit_of(self._alive.pop(rank)))
        return exited


def _exit_of(view: RankView) -> dict[str, Any]:
    return {"rank": view.rank, "pid": view.pid, "step": view.step}


def _memory() -> Optional[str]:
    """A folder whose device cannot hang."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _texts(folder: Path) -> dict[str, str]:
    """All files in it, 256 KiB of each at most."""
    texts = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            texts[name] = path.read_bytes()[: 256 << 10].decode(errors="replace")
    return texts
