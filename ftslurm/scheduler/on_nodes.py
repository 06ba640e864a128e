"""One process on each of N nodes of a small job, spoken to line by line; the job ends with it.

What is said goes to all of them (srun's stdin), what they say comes back line by line. They end
when nobody is there to speak any more, so nothing is left of a caller that was killed. Inside an
allocation (`salloc`) it is a job step of that; outside, srun asks for one of its own.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import queue
import secrets
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, Callable, Optional

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.launch import one_a_node
from ftslurm.scheduler.slurm import clean_environment, run_command

MINUTES = 4
"""Time limit of the job: short, so that it is backfilled, and the end of whatever is left of it."""
END_S = 10.0
BEAT_S = 3.0
SILENT_S = 20.0
"""Who has heard nothing for so long has nobody left to speak to it."""
_CANCEL_S = 20.0

PIECE = 600
"""Characters of a line that srun hands on whole: it cuts what is longer than 1,024 bytes, and the
pieces of several tasks mix (src/common/io_hdr.h, MAX_MSG_LEN)."""


def on_nodes_argv(
    command: Sequence[str], *, nodes: int, name: str, where: Mapping[str, str], is_inside: bool
) -> list[str]:
    """`where`: partition, account, qos, empty for the default; `is_inside`: of an allocation."""
    place = ["--overlap", "--mem=0"]
    if not is_inside:
        place = [f"--time={MINUTES}"]
        place += [f"--{option}={value}" for option, value in where.items() if value]
    options = [*place, "--input=all", "--export=ALL", "--cpu-bind=none", "--mpi=none"]
    return [*one_a_node(nodes, name, options), *command]


class OnNodes:
    """`on_word`: hears what srun itself says, e.g. that the job waits for its turn."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        nodes: int,
        where: Mapping[str, str] = MappingProxyType({}),
        environ: Optional[Mapping[str, str]] = None,
        on_word: Callable[[str], None] = lambda _: None,
    ) -> None:
        told = clean_environment() if environ is None else dict(environ)
        self.name = f"ftslurm-doctor-{secrets.token_hex(4)}"
        self.is_inside = "SLURM_JOB_ID" in told
        argv = on_nodes_argv(
            command, nodes=nodes, name=self.name, where=where, is_inside=self.is_inside
        )
        try:
            self._srun = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=told,
            )
        except (FileNotFoundError, PermissionError):
            raise SchedulerError(
                "`srun` is not on PATH; nodes are tried where Slurm's commands are"
            ) from None
        self._lines: queue.Queue[Optional[str]] = queue.Queue()
        self._speaking, self._closing = threading.Lock(), threading.Event()
        self.words: list[str] = []
        """What srun said, and what tasks wrote to stderr."""
        self._on_word = on_word
        for stream, hear in (
            (self._srun.stdout, self._lines.put),
            (self._srun.stderr, self._hear_word),
        ):
            assert stream is not None
            threading.Thread(target=_read, args=(stream, hear), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _hear_word(self, line: str) -> None:
        if line.strip():
            self.words.append(line.strip())
            self._on_word(line.strip())

    def say(self, line: str) -> None:
        """To all. Whether anybody hears it, their answers tell."""
        stdin = self._srun.stdin
        assert stdin is not None
        with self._speaking, contextlib.suppress(BrokenPipeError, ValueError):
            stdin.write(line + "\n")
            stdin.flush()

    def _beat(self) -> None:
        """Silence has to mean that nobody is there: when the caller of an srun was killed, its
        tasks did not come to the end of their stdin, and the job lived on (22.05, seen)."""
        while not self._closing.wait(BEAT_S):
            self.say("")

    def hear(self, timeout_s: float) -> Optional[str]:
        """The next line of any of them; None when none came in time."""
        try:
            return self._lines.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    @property
    def rc(self) -> Optional[int]:
        """srun's exit code; None while it is there."""
        return self._srun.poll()

    def close(self) -> None:
        """Nothing more is said: they end, and the job with them. Who does not is cancelled."""
        assert self._srun.stdin is not None
        self._closing.set()
        with self._speaking, contextlib.suppress(BrokenPipeError):
            self._srun.stdin.close()
        try:
            self._srun.wait(END_S)
            return
        except subprocess.TimeoutExpired:
            self._srun.terminate()
        if not self.is_inside:
            with contextlib.suppress(SchedulerError):
                argv = ["scancel", f"--user={getpass.getuser()}", f"--name={self.name}"]
                run_command(argv, _CANCEL_S)
        try:
            self._srun.wait(END_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()


def _read(stream: IO[str], hear: Callable[[str], object]) -> None:
    for line in stream:
        hear(line)


def in_pieces(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)] or [""]


def end_own_job(environ: Mapping[str, str] = os.environ) -> None:
    """Give the nodes back for an srun that is not there any more to do it."""
    job_id = environ.get("SLURM_JOB_ID")
    if job_id:
        with contextlib.suppress(SchedulerError):
            run_command(["scancel", job_id], _CANCEL_S)


def task_number(environ: Mapping[str, str] = os.environ) -> int:
    """Of the task that we are: 0 to N - 1."""
    return int(environ.get("SLURM_PROCID", "0"))
