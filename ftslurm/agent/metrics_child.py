"""The run's figures in recovery.metrics_dir, kept fresh by a process of its own beside the leader.

It has the lowest priority, outlives the signals that are for the ranks, and ends with the leader,
after a last word. That it cannot begin, or has ended before, is told once and disturbs nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from ftslurm.agent.loop import tell
from ftslurm.parent import die_with_parent
from ftslurm.run.rank import STOP_SIGNALS

EVERY_S = 30
LOOK_S = 2.0
LOWEST = 19
"""nice(1)"""


class MetricsChild:
    """To be started by the process's first thread: it ends with the thread that did."""

    def __init__(self, run_dir: Path, folder: Optional[str], *, every_s: float = EVERY_S) -> None:
        self._process: Optional[subprocess.Popen[bytes]] = None
        if folder is None:
            return
        argv = [sys.executable, "-m", "ftslurm", "metrics", str(run_dir)]
        argv += ["--textfile", folder, "--every", str(every_s)]
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, preexec_fn=_stay_aside()
            )
        except OSError as error:
            tell(f"nobody keeps the metrics of this run: {error}")

    def look(self) -> None:
        """Whether it still runs; done with the run, it leaves by itself."""
        if self._process is None or self._process.poll() is None:
            return
        if self._process.returncode != 0:
            tell(
                f"nobody keeps the metrics of this run any more (code {self._process.returncode},"
                " the reason is above); the run itself goes on"
            )
        self._process = None


def _stay_aside() -> Callable[[], None]:
    tied = die_with_parent(signal.SIGINT)  # on which it writes a last time

    def prepare() -> None:
        os.nice(LOWEST)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # A shell that starts something in the background has it ignore INT.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        tied()

    return prepare
