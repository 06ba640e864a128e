"""The heartbeat of a program's rank: what its program counts, for the agents to judge.

A program that never calls should_stop() has no beat: it is unknown, never hung. One that does is
silent from its newest call on. Made, told and removed by the rank; nothing here raises or waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

from ftslurm.program.calls import Calls
from ftslurm.run.heartbeat import LEAVING
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment

LOOK_S = 1.0


class Beat:
    """One a rank; `look` is to be called about once in LOOK_S."""

    def __init__(self, env: RankEnvironment, environ: Mapping[str, str] = os.environ) -> None:
        self._env, self._environ = env, environ
        self._calls = Calls.made(env, environ)
        self._pulse: Optional[Pulse] = None
        self._seen = (0, 0.0)

    @classmethod
    @contextmanager
    def begun(cls, env: RankEnvironment) -> Iterator[Beat]:
        beat = cls(env)
        try:
            yield beat
        finally:
            beat.end()

    @property
    def calls_file(self) -> Optional[Path]:
        return None if self._calls is None else self._calls.path

    def look(self) -> None:
        if self._calls is None:
            return
        calls, called_at = self._calls.read()
        before, before_at = self._seen
        if calls == before:
            return
        self._seen = (calls, called_at)
        # The first calls ended no step of which the beginning is known.
        each_s = _each_s(calls - before, called_at - before_at) if self._pulse else None
        if self._pulse is None:
            self._pulse = Pulse.open(self._env, self._environ)
        self._pulse.counted(calls, each_s)

    def leave(self) -> None:
        """The program was asked to leave, and has limits of its own from now on."""
        if self._pulse is not None and self._pulse.phase_name != LEAVING:
            self._pulse.phase(LEAVING)

    def end(self) -> None:
        if self._pulse is not None:
            self._pulse.remove()
        if self._calls is not None:
            self._calls.remove()


def _each_s(calls: int, took_s: float) -> float:
    """Processes of one program that count at once may lose a call, or seem to go back."""
    return max(0.0, took_s) / max(1, calls)
