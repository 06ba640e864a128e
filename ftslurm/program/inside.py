"""What a program may ask of the run it is part of: `ftslurm.resume_dir()`, `ftslurm.should_stop()`.

Outside of a run both answer as if there were none. Neither talks to other ranks, and neither fails
because a file system does. That a program asks is its sign of life: see beat.py.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Optional, Union

from ftslurm.program.calls import Counter
from ftslurm.program.environment import AWARE_FILE, RESUME_DIR, STOP_FILE
from ftslurm.program.stacks import answer_agents


class _Word:
    """What this process has said and heard."""

    def __init__(self) -> None:
        self.is_aware = False
        self.answers_agents = False
        self.got_term = False

    def say_aware(self) -> None:
        """Once: TERM no longer ends this program, and then the rank waits for it."""
        took_term = self._take_term()  # first: whoever reads the word may send it at once
        try:
            os.close(os.open(os.environ[AWARE_FILE], os.O_WRONLY | os.O_CREAT, 0o600))
        except (KeyError, OSError):
            if took_term:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return  # tried again at the next call
        self.is_aware = True
        if took_term:
            os.register_at_fork(
                before=_block_term, after_in_parent=_unblock_term, after_in_child=self._in_child
            )

    def _take_term(self) -> bool:
        """Where proctrack is linuxproc, Slurm's TERM goes to every process of the step, not to the
        rank alone. A program's own handler stays."""
        is_main = threading.current_thread() is threading.main_thread()
        takes = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if takes:
            signal.signal(signal.SIGTERM, self._on_term)
        return takes

    def _on_term(self, number: int, frame: Optional[FrameType]) -> None:
        self.got_term = True

    def _in_child(self) -> None:
        """Whoever forks a worker expects to end it by TERM, from its first moment on."""
        if signal.getsignal(signal.SIGTERM) == self._on_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _unblock_term()


def _block_term() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_term() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


_word = _Word()
_counter = Counter()


def resume_dir(default: Union[str, Path, None] = None) -> Optional[Path]:
    """The folder that this run's attempts share; `default` outside of a run."""
    folder = os.environ.get(RESUME_DIR, default)
    return None if folder is None else Path(folder)


def should_stop() -> bool:
    """Whether this rank was asked to leave. Cheap enough for every step."""
    stop_file = os.environ.get(STOP_FILE)
    if stop_file is None:
        return False
    if not _word.answers_agents:
        _word.answers_agents = True
        answer_agents()
    if not _word.is_aware:
        _word.say_aware()
    _counter.add()
    return _word.got_term or os.path.exists(stop_file)  # noqa: PTH110 - a step's time counts
