"""srun of the local scheduler: start all ranks on this machine, end when the last one has.

    python -m ftslurm.scheduler.local_ranks --ntasks N --output PATTERN -- COMMAND...

As `srun --kill-on-bad-exit=1`: USR1, USR2 and TERM are passed on to the ranks, the first bad exit
ends the others, the highest code is returned. Ranks never outlive it, however it dies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Optional

from ftslurm.parent import die_with_parent, tie_to_parent
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.local_state import write_ranks

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="local_ranks", description=__doc__)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--output", required=True, help="log of a rank; %%t is its number")
    parser.add_argument("--kill-wait", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    tie_to_parent()
    with _signals_as_bytes() as inbox:
        ranks = _start(options.command, options.ntasks, options.output)
        if "FTSLURM_RUN_DIR" in os.environ:
            # After the handlers: whoever reads the file may signal at once.
            write_ranks(RunLayout(Path(os.environ["FTSLURM_RUN_DIR"])))
        return _wait(ranks, inbox, kill_wait_s=options.kill_wait)


def rank_environment(environ: Mapping[str, str], rank: int, ntasks: int) -> dict[str, str]:
    """What srun would set, for one node."""
    return {
        **environ,
        "SLURM_NTASKS": str(ntasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NUM_NODES": "1",
        "FTSLURM_TASKS_PER_NODE": str(ntasks),
    }


def _start(command: list[str], ntasks: int, output: str) -> list[subprocess.Popen[bytes]]:
    ranks = []
    for rank in range(ntasks):
        with _open_log(output, rank) as log:
            ranks.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=rank_environment(os.environ, rank, ntasks),
                    preexec_fn=die_with_parent(),
                )
            )
    return ranks


def _open_log(output: str, rank: int) -> IO[bytes]:
    return open(output.replace("%t", str(rank)), "wb")


@contextlib.contextmanager
def _signals_as_bytes() -> Iterator[int]:
    """Signals arrive as bytes on a pipe, so that one `select` waits for all that can happen."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (*FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        os.close(reader)
        os.close(writer)


def _wait(ranks: list[subprocess.Popen[bytes]], inbox: int, *, kill_wait_s: float) -> int:
    """Pass signals on until all ranks have ended; the highest code, as a shell counts it."""
    kill_at: Optional[float] = None
    with selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        while True:
            running = [rank for rank in ranks if rank.poll() is None]
            if not running:
                return max(_code(rank) for rank in ranks)
            if kill_at is None and any(_code(rank) for rank in ranks):
                _report_bad_exits(ranks)
                _send(running, signal.SIGTERM)
                kill_at = time.monotonic() + kill_wait_s
            elif kill_at is not None and time.monotonic() >= kill_at:
                _send(running, signal.SIGKILL)
                kill_at += kill_wait_s
            patience_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            if selector.select(patience_s):
                for number in os.read(inbox, 512):
                    if number in FORWARDED:
                        _send(running, number)


def _report_bad_exits(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(ranks):
        if _code(process):
            print(  # noqa: T201
                f"local_ranks: error: rank {rank} left with {_code(process)}; ending the rest",
                file=sys.stderr,
                flush=True,
            )


def _send(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)  # does nothing once the rank has been waited for


def _code(rank: subprocess.Popen[bytes]) -> int:
    code = rank.returncode or 0
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
