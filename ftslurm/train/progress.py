"""Rank 0's account of an attempt while it runs: trace rows, progress.json, the log's step lines.

Reporting only: nothing reads it back to decide how to train.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping

from ftslurm.replay.trace import TraceRow, TraceWriter
from ftslurm.run.attempts import Progress, write_progress
from ftslurm.run.layout import RunLayout

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0


class Recorder:
    """Owned by rank 0's session."""

    def __init__(
        self,
        layout: RunLayout,
        *,
        attempt: int,
        steps: int,
        log_interval_steps: int,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = layout.attempt(attempt)
        self._trace = TraceWriter(layout.trace_file(attempt))
        self._log_interval_steps = log_interval_steps
        self._now = now
        self._clock = clock
        self._progress = Progress(step=0, steps=steps)
        self._step_began = self._written = clock()
        self._tokens_written = 0

    def enter(self, phase: str, **changes: object) -> None:
        """A new phase of the attempt; written at once."""
        self._progress = dataclasses.replace(self._progress, phase=phase, **changes)  # type: ignore[arg-type]
        self._write()

    def begin(self, *, step: int, tokens: int, restored_step: int | None) -> None:
        """The first step of the attempt begins now."""
        self._step_began = self._clock()
        self._tokens_written = tokens
        self.enter("training", step=step, restored_step=restored_step, committed_step=restored_step)

    def step(
        self,
        step: int,
        *,
        loss: float,
        samples: int,
        tokens: int,
        values: Mapping[str, float],
        committed_step: int | None,
        failed_saves: int,
    ) -> None:
        """One step is done."""
        clock = self._clock()
        seconds, self._step_began = clock - self._step_began, clock
        row = TraceRow(
            step=step, loss=loss, samples=samples, tokens=tokens, seconds=seconds, values=values
        )
        self._trace.append(row)
        self._progress = dataclasses.replace(
            self._progress,
            step=step,
            loss=loss if math.isfinite(loss) else None,
            committed_step=committed_step,
            failed_saves=failed_saves,
        )
        if clock - self._written >= PROGRESS_INTERVAL_S:
            tokens_per_s = (tokens - self._tokens_written) / (clock - self._written)
            self._tokens_written = tokens
            self.enter("training", tokens_per_s=round(tokens_per_s, 1))
        if step % self._log_interval_steps == 0:
            log.info("step %d loss %.6f in %.3f s", step, loss, seconds)

    def close(self) -> None:
        """The trace is durable on return."""
        self._trace.close()

    def _write(self) -> None:
        self._written = self._clock()
        write_progress(self._paths, dataclasses.replace(self._progress, written_at=self._now()))
