"""The reference loop on four ranks: a run that was stopped ends bit for bit as one that was not.

Each comparison looks at the loss of every step and at the digest of the final parameters. The
disturbed runs save often, read through a worker and cross an epoch; the undisturbed do none of it.
"""

import json
import signal
from pathlib import Path
from typing import Any

import launch
import pytest

from ftslurm.errors import RANK_STOPPED
from ftslurm.replay.trace import count_trained, read_trace
from ftslurm.run.attempts import FINISHED, STOPPED, read_events, read_outcome
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, ModelSpec, OptimSpec, RunSpec

pytestmark = pytest.mark.torch

STEPS = 12
SEQUENCES = 60
"""Of which 8 are held out; 8 a step, so 12 steps go nearly twice through the rest."""
CONTEXT = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch.build_store(tmp_path_factory.mktemp("data"), __file__, SEQUENCES * CONTEXT)


def make_spec(strategy: str, **changes: Any) -> RunSpec:
    spec = RunSpec(
        entry="loops:signalled",
        steps=STEPS,
        seed=7,
        eval_interval_steps=4,
        eval_batches=1,
        cluster=ClusterSpec(tasks_per_node=4),
        model=ModelSpec(layers=2, heads=2, width=16, context=CONTEXT, dropout=0.1),
        # Four ranks, two sequences each, one at a time: two micro-steps.
        optim=OptimSpec(global_batch_size=8, micro_batch_size=1, warmup_steps=4),
        checkpoint=CheckpointSpec(interval_steps=0, interval_s=0),
        user={"signal": {"attempt": 0, "rank": 0, "step": 0, "number": 0}},
    )
    spec.parallel.strategy = strategy
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


def disturbed(strategy: str, *, rank: int, step: int, number: int, **changes: Any) -> RunSpec:
    spec = make_spec(strategy, **changes)
    spec.user["signal"] = {"attempt": 1, "rank": rank, "step": step, "number": number}
    spec.checkpoint.interval_steps = 3
    spec.data.num_workers = 1
    return spec


def run(root: Path, spec: RunSpec, store: Path) -> RunLayout:
    """One attempt that has to finish."""
    layout = launch.prepare(root, spec, data_path=store)
    finish(layout, spec)
    return layout


def stop_and_finish(root: Path, spec: RunSpec, store: Path, *, at_step: int) -> RunLayout:
    """One attempt that has to stop after `at_step`, a second that has to finish."""
    layout = launch.prepare(root, spec, data_path=store)
    ended = launch.run_attempt(layout, world_size=spec.world_size)
    assert ended.codes == [RANK_STOPPED] * spec.world_size, ended.logs()
    assert not ended.killed
    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None and (outcome.result, outcome.step) == (STOPPED, at_step)
    assert outcome.committed_step == at_step
    assert outcome.signal == signal.Signals(spec.user["signal"]["number"]).name
    assert not layout.done.exists()
    finish(layout, spec)
    return layout


def finish(layout: RunLayout, spec: RunSpec) -> None:
    ended = launch.run_attempt(layout, world_size=spec.world_size)
    assert ended.codes == [0] * spec.world_size, ended.logs()
    outcome = read_outcome(layout.attempt(ended.attempt))
    assert outcome is not None
    assert (outcome.result, outcome.step, outcome.committed_step) == (FINISHED, STEPS, STEPS)


def result(layout: RunLayout) -> dict[str, Any]:
    """Everything by which two runs are compared."""
    rows = read_trace(layout)
    done = json.loads(layout.done.read_text())
    assert list(rows) == list(range(1, STEPS + 1))
    return {
        "losses": [row.loss.hex() for row in rows.values()],
        "values": [dict(row.values) for row in rows.values()],
        "samples": [row.samples for row in rows.values()],
        "tokens": [row.tokens for row in rows.values()],
        "parameter_digest": done["parameter_digest"],
        "final_loss": done["loss_hex"],
    }


def test_a_ddp_run_repeats_itself_and_a_stopped_one_ends_as_it(tmp_path: Path, store: Path) -> None:
    undisturbed = result(run(tmp_path / "a", make_spec("ddp"), store))
    assert result(run(tmp_path / "b", make_spec("ddp"), store)) == undisturbed

    spec = disturbed("ddp", rank=2, step=5, number=signal.SIGUSR1)
    layout = stop_and_finish(tmp_path / "c", spec, store, at_step=6)
    assert result(layout) == undisturbed
    assert set(count_trained(layout).values()) == {1}
    assert undisturbed["losses"][-1] == undisturbed["final_loss"]
    assert undisturbed["samples"][-1] == 8 * STEPS
    assert undisturbed["tokens"][-1] == 8 * STEPS * CONTEXT
    assert [step for step, row in enumerate(undisturbed["values"], 1) if "eval_loss" in row] == [
        4,
        8,
        12,
    ]
    restored = [event for event in read_events(layout.attempt(2)) if event["kind"] == "restored"]
    assert [event["step"] for event in restored] == [6]


def test_an_fsdp_run_signalled_while_it_evaluates_ends_as_one_that_was_not(
    tmp_path: Path, store: Path
) -> None:
    undisturbed = result(run(tmp_path / "a", make_spec("fsdp"), store))
    spec = disturbed(
        "fsdp", rank=3, step=4, number=signal.SIGTERM, entry="loops:signalled_in_evaluation"
    )
    assert result(stop_and_finish(tmp_path / "b", spec, store, at_step=5)) == undisturbed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_backs_all_off_and_the_scale_survives_a_stop(
    tmp_path: Path, store: Path, strategy: str
) -> None:
    spec = disturbed(
        strategy, rank=1, step=5, number=signal.SIGUSR1, entry="loops:overflowing",
        cluster=ClusterSpec(tasks_per_node=2), eval_interval_steps=0,
    )  # fmt: skip
    spec.optim.precision = "fp16"
    spec.optim.micro_batch_size = 4
    spec.user["overflow"] = {"rank": 1, "step": 3}
    rows = read_trace(stop_and_finish(tmp_path / "run", spec, store, at_step=6))
    scales = [row.values["loss_scale"] for row in rows.values()]
    assert scales == [2.0**16] * 2 + [2.0**15] * (STEPS - 2)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.full), "fsdp"])
def test_a_run_goes_on_with_fewer_ranks_and_with_all_again(
    tmp_path: Path, store: Path, strategy: str
) -> None:
    spec = make_spec(strategy)
    spec.model.dropout = 0.0
    undisturbed = run(tmp_path / "a", spec, store)

    layout = RunLayout(tmp_path / "b")
    for attempt, world_size in enumerate((4, 3, 2), start=1):
        spec = disturbed(strategy, rank=1, step=3 * attempt, number=signal.SIGUSR1)
        spec.user["signal"]["attempt"] = attempt
        spec.model.dropout = 0.0
        spec.cluster.tasks_per_node = world_size
        launch.prepare(layout.root, spec, data_path=store)
        ended = launch.run_attempt(layout, world_size=world_size)
        assert ended.codes == [RANK_STOPPED] * world_size, ended.logs()
    spec.cluster.tasks_per_node = 4
    launch.prepare(layout.root, spec, data_path=store)
    finish(layout, spec)

    rows, expected = read_trace(layout), read_trace(undisturbed)
    assert {row.attempt for row in rows.values()} == {1, 2, 3, 4}
    assert list(rows) == list(expected)
    assert [rows[step].samples for step in rows] == [expected[step].samples for step in rows]
    losses = [rows[step].loss for step in rows]
    assert losses == pytest.approx([expected[step].loss for step in rows], rel=1e-5)
