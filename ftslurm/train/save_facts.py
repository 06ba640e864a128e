"""What a manifest says about the run besides its position; the same all through an attempt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftslurm.run.record import RunRecord


@dataclass(frozen=True)
class SaveFacts:
    """What a manifest says about the run besides its position."""

    run_id: str
    world_size: int
    parallelism: dict[str, int]
    global_batch_size: int
    seed: int
    framework_version: str
    code_commit: str | None
    config_digest: str | None
    image_digest: str | None
    dataset_snapshot: str | None
    tokenizer_digest: str | None

    @classmethod
    def of(cls, record: RunRecord, *, world_size: int) -> SaveFacts:
        return cls(
            run_id=record.run_id,
            world_size=world_size,
            parallelism={"dp": world_size, "tp": 1, "pp": 1, "cp": 1, "ep": 1},
            global_batch_size=record.spec.optim.global_batch_size,
            seed=record.spec.seed,
            framework_version=torch.__version__,
            code_commit=record.code_commit,
            config_digest=record.config_digest,
            image_digest=record.image_digest,
            dataset_snapshot=record.dataset_snapshot,
            tokenizer_digest=record.tokenizer_digest,
        )
