"""Runs attempts of real ranks on this machine, as the batch loop and srun would, without Slurm.

    layout = prepare(tmp_path / "run", spec)
    ended = run_attempt(layout, world_size=4)
    assert ended.codes == [0, 0, 0, 0], ended.logs()

`Launch` is for tests that send signals meanwhile. Like srun with --kill-on-bad-exit, the first rank
that ends non-zero has the others TERMed, and KILLed `kill_wait_s` later.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_any
from pathlib import Path
from typing import IO, Optional

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.files import write_json
from ftslurm.recovery.claim import choose_port
from ftslurm.run.attempts import AdoptedStep, Attempt, claim
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.run.spec_check import check

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PYTHON_PATH = [str(ROOT), str(HERE), str(HERE.parent)]


def build_store(folder: Path, source: str, size_bytes: int) -> Path:
    """A token store of the first bytes of a text, a token each."""
    from ftslurm.train.build import build

    text = folder / "text"
    text.write_bytes(Path(source).read_bytes()[:size_bytes])
    build([text], folder / "tokens.h5")
    return folder / "tokens.h5"


def prepare(
    root: Path,
    spec: RunSpec,
    *,
    data_path: Optional[Path] = None,
    dataset_snapshot: Optional[str] = None,
    emergency_deadline_s: float = 20.0,
) -> RunLayout:
    """A run directory as `ftslurm submit` leaves it, as far as ranks read it."""
    check(spec)
    layout = RunLayout(root)
    for folder in (layout.root, layout.code, layout.attempts, layout.steps):
        folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema_version": 1,
        "run_id": root.name,
        "created_at": 0.0,
        "spec": to_dict(spec),
        "scheduler": "local",
        "site": {},
        "emergency_deadline_s": emergency_deadline_s,
        "code": {"commit": "0" * 40, "dirty": False, "digest": "0" * 32},
        "dataset_snapshot": dataset_snapshot,
        "tokenizer_digest": None,
        "data_path": None if data_path is None else str(data_path),
        "config_digest": "0" * 32,
        "image_digest": None,
        "packages": {},
    }
    write_json(layout.run_json, record, durable=False)
    return layout


def claim_attempt(layout: RunLayout) -> int:
    """What `ftslurm claim` does, without its judgement."""
    steps = CheckpointStore(layout).published()
    adopted = [AdoptedStep(step.step, step.committed_digest) for step in steps]
    attempt = Attempt(0, "test", 0, ["localhost"], time.time(), adopted)
    return claim(layout, attempt).number


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    layout: RunLayout
    attempt: int
    codes: list[int]
    """By rank; -N: ended by signal N."""
    killed: list[int]
    """Ranks that the launcher itself had to KILL."""
    seconds: float

    def log(self, rank: int) -> str:
        return log_path(self.layout, self.attempt, rank).read_text()

    def logs(self) -> str:
        """The end of each rank's log, for the message of an assertion."""
        tails = [
            f"--- rank {rank}: {code}\n" + "\n".join(self.log(rank).splitlines()[-25:])
            for rank, code in enumerate(self.codes)
        ]
        return "\n".join(tails)


def log_path(layout: RunLayout, attempt: int, rank: int) -> Path:
    return layout.attempt(attempt).logs / f"rank-{rank}.log"


class Launch:
    """The ranks of one attempt."""

    def __init__(
        self,
        layout: RunLayout,
        *,
        world_size: int,
        environ: Optional[Mapping[str, str]] = None,
        module: Optional[str] = None,
        kill_wait_s: float = 20.0,
    ) -> None:
        """`module`: start `python -m MODULE` afresh for each rank instead of forking."""
        self.layout = layout
        self.attempt = claim_attempt(layout)
        self._kill_wait_s = kill_wait_s
        self._began = time.monotonic()
        self._fresh: dict[int, subprocess.Popen[bytes]] = {}
        port = free_port()
        self.pids = []
        for rank in range(world_size):
            own = {**rank_environ(layout, self.attempt, rank, world_size, port), **(environ or {})}
            self.pids.append(self._start(rank, own, module))
        self._gone = {os.pidfd_open(pid): rank for rank, pid in enumerate(self.pids)}

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def wait(self, *, deadline_s: float = 200.0) -> Ended:
        """Wait for all ranks; past the deadline they are KILLed and an AssertionError raised."""
        deadline = time.monotonic() + deadline_s
        kill_at = deadline
        codes: dict[int, int] = {}
        killed: list[int] = []
        while len(codes) < len(self.pids):
            timeout_s = max(0.0, kill_at - time.monotonic())
            ready = [
                gone for gone in wait_any(list(self._gone), timeout_s) if isinstance(gone, int)
            ]
            if not ready:
                killed = self._signal_rest(codes, signal.SIGKILL)
                kill_at = time.monotonic() + 60.0
            for descriptor in ready:
                rank = self._gone.pop(descriptor)
                os.close(descriptor)
                codes[rank] = self._reap(rank)
                if codes[rank] != 0 and not killed and kill_at == deadline:
                    self._signal_rest(codes, signal.SIGTERM)
                    kill_at = min(deadline, time.monotonic() + self._kill_wait_s)
        seconds = time.monotonic() - self._began
        in_order = [codes[rank] for rank in range(len(self.pids))]
        ended = Ended(self.layout, self.attempt, in_order, sorted(killed), seconds)
        assert time.monotonic() < deadline, f"not done in {deadline_s} s\n{ended.logs()}"
        return ended

    def _signal_rest(self, codes: Mapping[int, int], number: int) -> list[int]:
        rest = [rank for rank in range(len(self.pids)) if rank not in codes]
        for rank in rest:
            self.signal(rank, number)
        return rest

    def _start(self, rank: int, environ: dict[str, str], module: Optional[str]) -> int:
        log = log_path(self.layout, self.attempt, rank)
        if module is None:
            python_path = [str(self.layout.code), *PYTHON_PATH]
            return _ask({"environ": environ, "log": str(log), "python_path": python_path})
        environ["PYTHONPATH"] = ":".join([str(self.layout.code), *PYTHON_PATH])
        with log.open("ab") as stream:
            argv = [sys.executable, "-u", "-m", module]
            process = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
            )
        self._fresh[rank] = process
        return process.pid

    def _reap(self, rank: int) -> int:
        if rank in self._fresh:
            return self._fresh[rank].wait()
        return _ask({"reap": self.pids[rank]})


def run_attempt(
    layout: RunLayout,
    *,
    world_size: int,
    environ: Optional[Mapping[str, str]] = None,
    module: Optional[str] = None,
    deadline_s: float = 200.0,
) -> Ended:
    """Start an attempt and wait for its end."""
    launch = Launch(layout, world_size=world_size, environ=environ, module=module)
    return launch.wait(deadline_s=deadline_s)


def rank_environ(
    layout: RunLayout, attempt: int, rank: int, world_size: int, port: int
) -> dict[str, str]:
    """What batch script and srun give a rank, all on one node."""
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ
    }
    return {
        **kept,
        "FTSLURM_RUN_DIR": str(layout.root),
        "FTSLURM_ATTEMPT": str(attempt),
        "FTSLURM_TASKS_PER_NODE": str(world_size),
        "SLURM_NTASKS": str(world_size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_ID": "test",
        "SLURMD_NODENAME": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Not one of those that the kernel gives to whoever asks for any (ip_local_port_range): such a
    one may be another's by the time that the ranks have loaded torch."""
    return choose_port(f"{os.getpid()} {time.monotonic_ns()}")


_zygote: Optional[subprocess.Popen[str]] = None


def _ask(order: dict[str, object]) -> int:
    """One order to the zygote, started on first use and ended with this process."""
    global _zygote
    if _zygote is None:
        _zygote = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # No threads before a fork: OpenBLAS would start some when numpy is imported.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        atexit.register(_end_zygote, _zygote)
    requests, answers = _pipes(_zygote)
    requests.write(json.dumps(order) + "\n")
    requests.flush()
    return int(answers.readline())


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def _end_zygote(process: subprocess.Popen[str]) -> None:
    requests, answers = _pipes(process)
    requests.close()
    answers.close()
    process.wait(timeout=60)
