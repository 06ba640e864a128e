"""Rank 0's account of an attempt while it runs: trace, progress.json, journal, log lines.

Reporting only: nothing reads it back to decide how to train. A write that fails is logged and
counted, and never ends the training or keeps it from a save. What the journal did not take (a full
disk) is kept and added, with its own time, once it can be written again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from ftslurm.replay.trace import TraceRow, TraceWriter
from ftslurm.run.attempts import PACED, Progress, append_event, write_progress
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import RunRecord

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
MAX_KEPT_EVENTS = 10_000


class Recorder:
    """Owned by rank 0's session."""

    def __init__(
        self,
        layout: RunLayout,
        *,
        attempt: int,
        steps: int,
        log_interval_steps: int,
        interval_s: float | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = layout.attempt(attempt)
        self._trace = TraceWriter(layout.trace_file(attempt))
        self._log_interval_steps = log_interval_steps
        self._now = now
        self._clock = clock
        self._progress = Progress(step=0, steps=steps, interval_s=interval_s)
        self._step_began = self._written = clock()
        self._tokens_written = 0
        self._has_trained = False
        self._failed_writes: Counter[str] = Counter()
        self._unwritten: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=MAX_KEPT_EVENTS)
        self._journal = threading.Lock()

    @classmethod
    def of(cls, env: RankEnvironment, record: RunRecord) -> Recorder:
        spec = record.spec
        return cls(
            env.layout,
            attempt=env.attempt,
            steps=spec.steps,
            log_interval_steps=spec.log_interval_steps,
            interval_s=spec.checkpoint.interval_s or None,
        )

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
        self._try("trace", lambda: self._trace.append(row))
        if not self._has_trained:
            self._has_trained = True
            self.event("first_step", {"step": step})
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

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """One line for the journal. May be called from any thread: it is appended in one write."""
        is_bad = "fail" in kind or kind in ("rejected", "fell_back")
        log.log(logging.WARNING if is_bad else logging.INFO, "%s %s", kind, dict(facts))
        with self._journal:
            self._unwritten.append((self._now(), kind, dict(facts)))
        if kind == PACED:
            self._progress = dataclasses.replace(self._progress, interval_s=facts["interval_s"])
        self._try("journal", self._write_events)

    def close(self) -> None:
        """The trace is durable on return, unless that failed, which is logged."""
        self._try("journal", self._write_events)
        self._try("trace", self._trace.close)
        if self._failed_writes:
            log.warning("failed_writes %s", dict(self._failed_writes))

    def _write_events(self) -> None:
        with self._journal:
            while self._unwritten:
                at, kind, facts = self._unwritten[0]
                append_event(self._paths, kind, now=lambda: at, **facts)  # noqa: B023 - called here
                self._unwritten.popleft()

    def _write(self) -> None:
        self._written = self._clock()
        if self._unwritten:
            self._try("journal", self._write_events)
        progress = dataclasses.replace(self._progress, written_at=self._now())
        self._try("progress", lambda: write_progress(self._paths, progress))

    def _try(self, kind: str, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._failed_writes[kind] += 1
            if self._failed_writes[kind] == 1:
                log.warning("the %s misses what could not be written: %s", kind, error)
