"""The data of a run as its loop gets it, held against what was frozen at submit."""

from __future__ import annotations

from ftslurm.errors import DataError
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import RunRecord
from ftslurm.run.skipped import read_skips, skipped_batches
from ftslurm.train.cursor import Cursor
from ftslurm.train.loader import GlobalBatches
from ftslurm.train.token_store import TokenStore


def open_feed(
    store: TokenStore, record: RunRecord, env: RankEnvironment, *, held_out: int
) -> tuple[Cursor, GlobalBatches]:
    """The cursor over all of `store` but its last `held_out` sequences and what the run passes
    over, and the batches that follow it."""
    if record.dataset_snapshot is not None and store.snapshot != record.dataset_snapshot:
        raise DataError(
            f"`{store.path}` has snapshot {store.snapshot}, the run was submitted with "
            f"{record.dataset_snapshot}; put the old file back or submit a new run"
        )
    if held_out >= len(store):
        raise DataError(
            f"{held_out} of the {len(store)} sequences of `{store.path}` are held out for "
            "evaluation, which leaves none to train on; evaluate fewer batches or use more data"
        )
    spec = record.spec
    cursor = Cursor(
        len(store) - held_out,
        spec.optim.global_batch_size,
        spec.seed,
        snapshot=store.snapshot,
        passed_over=skipped_batches(read_skips(env.layout)),
    )
    batches = GlobalBatches(
        store,
        cursor,
        rank=env.rank,
        world_size=env.world_size,
        micro_batch_size=spec.optim.micro_batch_size,
        num_workers=spec.data.num_workers,
    )
    return cursor, batches
