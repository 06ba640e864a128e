"""The protocol between the batch loop and a rank, torch or not: environment, stop flag, outcome.

A rank reads who it is from the environment, sets a flag on USR1, USR2 or TERM and nothing else,
and leaves with one of the RANK_* codes of errors.py. Whoever writes ranks without torch (tests,
other programs) needs only this module, attempts.py and checkpoint/.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

from ftslurm.errors import UsageError
from ftslurm.files import write_json
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.secret import without_secrets

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Slurm's name for this node; outside of a job its own."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class RankEnvironment:
    """Who a rank is. The batch loop exports FTSLURM_* and MASTER_*, srun adds SLURM_*."""

    run_dir: Path
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    node_rank: int
    """Number of the node among those of the job step."""
    master_addr: str
    master_port: int
    stop_at: Optional[float] = None
    """UTC seconds at which to stop of one's own accord: the warn signal is due by then, and one
    that came between two job steps has reached nobody."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> RankEnvironment:
        try:
            world_size, rank = int(environ["SLURM_NTASKS"]), int(environ["SLURM_PROCID"])
            local_world_size = int(environ["FTSLURM_TASKS_PER_NODE"])
            return cls(
                run_dir=Path(environ["FTSLURM_RUN_DIR"]),
                attempt=int(environ["FTSLURM_ATTEMPT"]),
                rank=rank,
                world_size=world_size,
                local_rank=int(environ["SLURM_LOCALID"]),
                local_world_size=local_world_size,
                node=node_name(environ),
                node_rank=int(environ.get("SLURM_NODEID") or rank // local_world_size),
                master_addr=environ["MASTER_ADDR"],
                master_port=int(environ["MASTER_PORT"]),
                stop_at=float(environ.get("FTSLURM_STOP_AT") or 0) or None,
            )
        except KeyError as error:
            raise UsageError(
                f"{error.args[0]} is not set; ranks are started by the batch script of "
                "`ftslurm submit`, not by hand"
            ) from None

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.run_dir)

    @property
    def attempt_layout(self) -> AttemptLayout:
        return self.layout.attempt(self.attempt)


class StopFlag:
    """Set by the first stop signal; a second one changes nothing.

    The handler stores two numbers: no lock, no log, no I/O (signal-safety(7); a save inside a
    handler hangs at random, lightning#21406). USR1 and TERM may both come, TERM up to three times.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.signalled_at = 0.0
        """time.monotonic() of the first signal."""

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._set)
        # A rank out of a standby is born with them blocked (node/standby.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _set(self, number: int, frame: Optional[FrameType]) -> None:
        if not self.signal_number:
            self.signalled_at = time.monotonic()
            self.signal_number = number

    @property
    def is_set(self) -> bool:
        return self.signal_number != 0

    @property
    def signal_name(self) -> Optional[str]:
        return signal.Signals(self.signal_number).name if self.signal_number else None


stop_flag = StopFlag()
"""The process's one flag: installed before anything heavy is imported."""


def write_rank_error(
    env: RankEnvironment,
    error: BaseException,
    *,
    step: Optional[int],
    at: Optional[float] = None,
) -> None:
    """Leave this rank's own account before it exits: the first failure is told from its echoes.
    `at`: UTC seconds of the failure, where it is noted some time after."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    write_json(
        env.attempt_layout.ranks / f"rank-{env.rank:05d}.json",
        {
            "schema_version": 1,
            "rank": env.rank,
            "node": env.node,
            "step": step,
            "at": time.time() if at is None else at,
            "type": type(error).__name__,
            "message": without_secrets(str(error)),
            "traceback": [without_secrets(line) for line in lines],
        },
    )
