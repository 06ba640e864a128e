"""Small, real checkpoints without torch: what `CheckpointStore` publishes, for any test that needs
a run with steps in it.

Values depend on step and key, so that no two steps hold the same bytes.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import pytest

from ftslurm.checkpoint.records import IndexEntry, Manifest, Parent
from ftslurm.checkpoint.rename import rename_new
from ftslurm.checkpoint.shard import TensorData, write_shard
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.run import attempts
from ftslurm.run.layout import RunLayout

RUN_ID = "gpt-test"
NEWEST = "newest"
"""As `parent`: the newest step there is, as in a run that went on from it."""

ROWS, COLUMNS = 64, 33
"""Of the sharded weight: 8448 bytes in all, so a piece of one of two ranks is above a page."""


def make_layout(root: Path) -> RunLayout:
    """An empty run directory."""
    root.mkdir(parents=True, exist_ok=True)
    return RunLayout(root)


def make_step(
    layout: RunLayout,
    step: int,
    *,
    attempt: int = 1,
    world_size: int = 2,
    parent: Union[Parent, str, None] = NEWEST,
    run_id: str = RUN_ID,
    algorithm: str = "xxh3_128",
    extra: Optional[Mapping[str, Any]] = None,
) -> Path:
    """Publish `step` as attempt `attempt` of `world_size` ranks would; returns its folder.

    An attempt that is not the newest one publishes all the same: as a writer does that was held up
    between its last look at the journal and its rename.
    """
    store = CheckpointStore(layout)
    if parent == NEWEST:
        published = store.published()
        parent = Parent(published[0].step, published[0].committed_digest) if published else None
    assert not isinstance(parent, str)
    is_late = attempt < max(attempts.numbers(layout), default=0)
    home = make_layout(layout.root / "elsewhere") if is_late else layout
    temporary, indexes = write_ranks(
        home, step, attempt=attempt, world_size=world_size, algorithm=algorithm
    )
    manifest = make_manifest(
        step,
        indexes,
        attempt=attempt,
        parent=parent,
        run_id=run_id,
        algorithm=algorithm,
        extra=extra,
    )
    path = CheckpointStore(home).publish(temporary, manifest)
    if is_late:
        rename_new(path, layout.steps / path.name)
        shutil.rmtree(home.root)
    return layout.steps / path.name


def write_ranks(
    layout: RunLayout,
    step: int,
    *,
    attempt: int = 1,
    world_size: int = 2,
    algorithm: str = "xxh3_128",
) -> tuple[Path, list[IndexEntry]]:
    """All that comes before `publish`: the temporary folder and each rank's index entry."""
    temporary = CheckpointStore(layout).create_temporary(step, attempt)
    indexes = [
        write_shard(
            temporary,
            rank,
            make_tensors(step, rank, world_size),
            objects={f"rank-{rank}/rng": [step, float(rank), "state"]},
            aliases={"model/head.weight": "model/weight"} if rank == 0 else {},
            algorithm=algorithm,
            attempt=attempt,
            step=step,
            chunk_bytes=4096,
            max_file_bytes=16 * 1024,
        )
        for rank in range(world_size)
    ]
    return temporary, indexes


def make_tensors(step: int, rank: int, world_size: int) -> list[TensorData]:
    """One rank's share: rows of a weight, a replicated bias and a scalar, an empty piece."""
    start, stop = (ROWS * edge // world_size for edge in (rank, rank + 1))
    whole = content(f"{step} weight", ROWS * COLUMNS * 4)
    rows = whole[start * COLUMNS * 4 : stop * COLUMNS * 4]
    shape = (ROWS, COLUMNS)
    piece = (stop - start, COLUMNS)
    tensors = [TensorData("model/weight", "float32", shape, (start, 0), piece, memoryview(rows))]
    if rank == 0:
        bias = memoryview(content(f"{step} bias", 50))
        tensors.append(TensorData("model/bias", "bfloat16", (25,), (0,), (25,), bias))
        count = memoryview(content(f"{step} count", 4))
        tensors.append(TensorData("optimizer/weight.step", "float32", (), (), (), count))
    if rank == world_size - 1:
        empty = memoryview(b"")
        tensors.append(TensorData("model/bias", "bfloat16", (25,), (25,), (0,), empty))
        mask = memoryview(content(f"{step} mask", 4097))
        tensors.append(TensorData("model/mask", "bool", (17, 241), (0, 0), (17, 241), mask))
    return tensors


def make_manifest(
    step: int,
    indexes: list[IndexEntry],
    *,
    attempt: int = 1,
    parent: Optional[Parent] = None,
    run_id: str = RUN_ID,
    algorithm: str = "xxh3_128",
    extra: Optional[Mapping[str, Any]] = None,
) -> Manifest:
    return Manifest(
        run_id=run_id,
        attempt=attempt,
        step=step,
        parent=parent,
        world_size=len(indexes),
        parallelism={"dp": len(indexes)},
        global_batch_size=8,
        accumulation=0,
        epoch=0,
        samples=8 * step,
        tokens=1024 * step,
        seed=0,
        framework="torch",
        framework_version="2.13.0",
        code_commit="0" * 40,
        config_digest=None,
        image_digest=None,
        dataset_snapshot="abc",
        tokenizer_digest="def",
        digest_algorithm=algorithm,
        indexes=indexes,
        created_at=1.75e9 + step,
        extra=dict(extra or {}),
    )


def skip_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests need the bytes only where other processes see them, not on the device."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


def two_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A run directory with steps 10 and 20, quickly: nothing is made durable."""
    skip_fsync(monkeypatch)
    layout = make_layout(root)
    for step in (10, 20):
        make_step(layout, step)
    return layout


def damage(step: Path, name: str = "shard-00001-000.bin", position: int = 5) -> None:
    """Flip one bit of a file in a step."""
    data = bytearray((step / name).read_bytes())
    data[position] ^= 1
    (step / name).write_bytes(data)


def tree(root: Path) -> dict[str, bytes]:
    """Every file under `root` with its bytes."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(seed: str, count: int) -> bytearray:
    """`count` bytes that no other seed gives."""
    return bytearray(hashlib.shake_128(seed.encode()).digest(count))


def make_unreadable(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Whatever opens, lists or looks at `path` gets the error `number`. (Root may read all.)"""

    def broken(real: Any) -> Any:
        def call(target: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(target, (str, Path)) and Path(target) == path:
                raise OSError(number, os.strerror(number), str(path))
            return real(target, *rest, **options)

        return call

    for owner, name in [
        (Path, "read_bytes"),
        (Path, "lstat"),
        (Path, "iterdir"),
        (os, "open"),
        (os, "listdir"),
    ]:
        monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
