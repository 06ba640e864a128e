"""Small real checkpoints for tests that need committed steps and no ranks."""

import time

from ftslurm.checkpoint.records import Manifest
from ftslurm.checkpoint.shard import TensorData, write_shard
from ftslurm.checkpoint.store import CheckpointStore


def publish_step(layout, step, *, attempt=1, parent=None):
    """Commit `step` through the real store; one rank, one tensor."""
    store = CheckpointStore(layout)
    folder = store.create_temporary(step, attempt)
    data = memoryview(step.to_bytes(8, "little"))
    piece = TensorData("step", "int64", (1,), (0,), (1,), data)
    entry = write_shard(folder, 0, [piece], objects={}, aliases={}, algorithm="sha256")
    manifest = Manifest(
        run_id="run-1",
        attempt=attempt,
        step=step,
        parent=parent,
        world_size=1,
        parallelism={"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1},
        global_batch_size=1,
        accumulation=0,
        epoch=0,
        samples=step,
        tokens=step,
        seed=0,
        framework="fake",
        framework_version="1",
        code_commit=None,
        config_digest=None,
        image_digest=None,
        dataset_snapshot=None,
        tokenizer_digest=None,
        digest_algorithm="sha256",
        indexes=[entry],
        created_at=time.time(),
    )
    return store.publish(folder, manifest)
