"""A loss that is NaN ends all ranks at its step, and batches that are passed over stay passed over:
a run that passes over them from its second attempt on ends bit for bit as one that always did."""

import shutil
from pathlib import Path

import launch
import pytest

from ftslurm.errors import RANK_FAILED
from ftslurm.files import read_json
from ftslurm.replay.trace import read_trace
from ftslurm.run.attempts import read_events
from ftslurm.run.layout import RunLayout, step_name
from ftslurm.run.skipped import note_skip
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, ModelSpec, OptimSpec, RunSpec

pytestmark = pytest.mark.torch

STEPS = 9
SEQUENCES, CONTEXT = 40, 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch.build_store(tmp_path_factory.mktemp("data"), __file__, SEQUENCES * CONTEXT)


def prepare(root: Path, store: Path) -> RunLayout:
    spec = RunSpec(
        entry="bad_batch_loop:train",
        steps=STEPS,
        cluster=ClusterSpec(tasks_per_node=2),
        model=ModelSpec(layers=1, heads=1, width=8, context=CONTEXT),
        optim=OptimSpec(global_batch_size=4, micro_batch_size=2, warmup_steps=2),
        checkpoint=CheckpointSpec(interval_steps=2, interval_s=0),
        user={"bad_batch": 4},
    )
    spec.data.num_workers = 1
    return launch.prepare(root, spec, data_path=store)


def losses(layout: RunLayout) -> dict[int, str]:
    return {step: row.loss.hex() for step, row in read_trace(layout).items()}


def test_all_ranks_end_at_the_bad_step_and_a_skip_is_the_same_from_whichever_attempt_on(
    tmp_path: Path, store: Path
) -> None:
    always = prepare(tmp_path / "always", store)
    note_skip(always, (3, 5), attempt=0)
    ended = launch.run_attempt(always, world_size=2)
    assert ended.codes == [0, 0], ended.logs()

    later = prepare(tmp_path / "later", store)
    ended = launch.run_attempt(later, world_size=2)
    assert ended.codes == [RANK_FAILED] * 2, ended.logs()
    for rank in (0, 1):
        record = read_json(later.attempt(1).ranks / f"rank-{rank:05d}.json")
        assert (record["type"], record["step"]) == ("NumericError", 5)

    assert losses(later)[5] == "nan"

    # As the claim does after the decision: step 4 may have been committed or not.
    shutil.rmtree(later.steps / step_name(4), ignore_errors=True)
    note_skip(later, (3, 5), attempt=1)
    ended = launch.run_attempt(later, world_size=2)
    assert ended.codes == [0, 0], ended.logs()
    restored = [e["step"] for e in read_events(later.attempt(2)) if e["kind"] == "restored"]
    assert restored == [2]
    assert losses(later) == losses(always)
    digests = [read_json(layout.done)["parameter_digest"] for layout in (always, later)]
    assert digests[0] == digests[1]
    assert read_trace(later)[STEPS].samples == (STEPS + 3) * 4
