"""A rank is killed at each named point of a save: the right step is restored, the bits are equal.

Four torch ranks, DDP with dropout; the kill is SIGKILL by the product's own fault layer. Without
torch, test_local_chain.py has all of these points in every `make test`.
"""

import json
import signal
from pathlib import Path

import launch
import pytest

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.replay.trace import read_trace
from ftslurm.run.attempts import read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, RunSpec

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

WORLD_SIZE = 4


def make_spec() -> RunSpec:
    return RunSpec(
        entry="example_loop:train",
        steps=10,
        cluster=ClusterSpec(tasks_per_node=WORLD_SIZE),
        checkpoint=CheckpointSpec(interval_steps=3, interval_s=0),
        user={"lr": 0.1},
    )


def bits(layout: RunLayout) -> tuple[dict[int, str], str]:
    losses = {step: row.loss.hex() for step, row in read_trace(layout).items()}
    return losses, json.loads(layout.done.read_text())["parameter_digest"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    layout = launch.prepare(tmp_path_factory.mktemp("undisturbed") / "run", make_spec())
    assert launch.run_attempt(layout, world_size=WORLD_SIZE).codes == [0] * WORLD_SIZE
    return layout


def finish(layout: RunLayout, *, restored: int, undisturbed: RunLayout) -> None:
    """The next attempt ends the run from the step `restored`, and nothing tells that it had to."""
    ended = launch.run_attempt(layout, world_size=WORLD_SIZE)
    assert ended.codes == [0] * WORLD_SIZE, ended.logs()
    events = read_events(layout.attempt(ended.attempt))
    assert [event["step"] for event in events if event["kind"] == "restored"] == [restored]
    assert bits(layout) == bits(undisturbed)
    assert not list(layout.steps.glob("*.tmp-*")), "leftovers of the killed save are cleared"


@pytest.mark.parametrize(
    ("point", "restored"),
    [
        pytest.param("staged:rank=2:step=6", 3, marks=pytest.mark.full),
        ("persist:rank=3:step=6", 3),
        pytest.param("before_commit:rank=0:step=6", 3, marks=pytest.mark.full),
        pytest.param("before_rename:rank=0:step=6", 3, marks=pytest.mark.full),
        ("after_rename:rank=0:step=6", 6),
    ],
)
def test_a_rank_killed_in_a_save_costs_no_bit(
    tmp_path: Path, undisturbed: RunLayout, point: str, restored: int
) -> None:
    layout = launch.prepare(tmp_path / "run", make_spec())
    plan = {"FTSLURM_FAULTS": f"kill@{point}"}
    ended = launch.run_attempt(layout, world_size=WORLD_SIZE, environ=plan)
    assert -signal.SIGKILL in ended.codes, ended.logs()
    assert CheckpointStore(layout).published()[0].step == restored
    finish(layout, restored=restored, undisturbed=undisturbed)


def test_a_rank_killed_right_after_its_restore_costs_no_bit(
    tmp_path: Path, undisturbed: RunLayout
) -> None:
    layout = launch.prepare(tmp_path / "run", make_spec())
    for point in ("step:rank=1:step=8:attempt=1", "restored:rank=1:attempt=2"):
        plan = {"FTSLURM_FAULTS": f"kill@{point}"}
        ended = launch.run_attempt(layout, world_size=WORLD_SIZE, environ=plan)
        assert ended.codes[1] == -signal.SIGKILL, ended.logs()
    restored = CheckpointStore(layout).published()[0].step
    finish(layout, restored=restored, undisturbed=undisturbed)
