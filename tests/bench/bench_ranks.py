"""What needs whole ranks: the step time with and without ftslurm, and the time from a preemption's
signal to COMMITTED."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import launch
from pairs import Comparison

from ftslurm.errors import RANK_STOPPED
from ftslurm.run.attempts import read_events, read_outcome
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec

HERE = Path(__file__).resolve().parent
START_DEADLINE_S = 120.0


def measure_step(folder: Path, *, rounds: int, width: int, batch: int) -> list[Comparison]:
    """Two DDP ranks over gloo; no save falls due."""
    spec = RunSpec(entry="bench_loops:with_and_without", steps=10**9)
    spec.cluster.tasks_per_node = 2
    spec.checkpoint.interval_steps, spec.checkpoint.interval_s = 0, 0.0
    spec.deterministic = False
    spec.user = {"width": width, "batch": batch, "rounds": rounds}
    layout = _prepare(folder / "step", spec)
    ended = launch.run_attempt(layout, world_size=2, deadline_s=900.0)
    assert ended.codes == [0, 0], ended.logs()
    rows = json.loads((layout.root / "step_seconds.json").read_text())
    ours, bare = ([row[i] for row in rows] for i in (0, 1))
    return [Comparison("step time, nothing saved", "the same loop without ftslurm", ours, bare)]


def measure_preempt(
    folder: Path, *, rounds: int, size_bytes: int, progress: Callable[[str], None]
) -> list[float]:
    """Seconds from USR1 to the durable outcome that follows COMMITTED, one rank."""
    spec = RunSpec(entry="bench_loops:big_state", steps=10**9)
    spec.checkpoint.interval_steps, spec.checkpoint.interval_s = 0, 0.0
    spec.checkpoint.keep_last = 1
    spec.user = {"size_bytes": size_bytes}
    seconds = []
    for number in range(rounds + 1):
        layout = _prepare(folder / "preempt", spec)
        taken_s = _preempt_once(layout)
        shutil.rmtree(layout.root)
        if number:  # the first one has the files of torch still to read
            seconds.append(taken_s)
        progress(f"round {number} of {rounds}")
    return seconds


def _preempt_once(layout: RunLayout) -> float:
    started = launch.Launch(layout, world_size=1)
    ready = layout.root / f"ready-{started.attempt}"
    deadline = time.monotonic() + START_DEADLINE_S
    while not ready.exists():
        assert time.monotonic() < deadline, "the rank did not begin to train"
        time.sleep(0.02)
    asked_at = time.time()
    started.signal(0, signal.SIGUSR1)
    ended = started.wait(deadline_s=START_DEADLINE_S)
    assert ended.codes == [RANK_STOPPED], ended.logs()
    paths = layout.attempt(started.attempt)
    outcome = read_outcome(paths)
    assert outcome is not None and outcome.committed_step == outcome.step, ended.logs()
    committed = [event for event in read_events(paths) if event["kind"] == "committed"]
    return float(committed[-1]["at"]) - asked_at


def _prepare(root: Path, spec: RunSpec) -> RunLayout:
    layout = launch.prepare(root, spec, emergency_deadline_s=600.0)
    shutil.copy(HERE / "bench_loops.py", layout.code)
    return layout
