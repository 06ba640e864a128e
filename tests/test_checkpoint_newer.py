"""A step that a newer ftslurm has written is no damaged one."""

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import names, two_steps

from ftslurm.checkpoint import verification
from ftslurm.checkpoint.digest import digest
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import CheckpointError
from ftslurm.run.layout import RunLayout


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    return two_steps(tmp_path / "run", monkeypatch)


def rewrite(path: Path, **changes: object) -> bytes:
    record = {**json.loads(path.read_bytes()), **changes}
    data = (json.dumps(record, sort_keys=True, indent=1) + "\n").encode()
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("committed_version", [1, 2])
def test_no_older_step_is_taken_for_one_that_a_newer_ftslurm_has_written(
    layout: RunLayout, committed_version: int
) -> None:
    folder = layout.steps / "step-000000000020"
    data = rewrite(folder / "manifest.json", schema_version=2)
    identity = hashlib.sha256(data).hexdigest()
    rewrite(folder / "COMMITTED", schema_version=committed_version, digest=identity)
    with pytest.raises(CheckpointError, match="step 20 was written by a newer ftslurm.*version"):
        CheckpointStore(layout).choose(full=False)
    assert names(layout.steps) == ["step-000000000010", "step-000000000020"]


def test_a_wrong_bit_in_the_version_is_damage(layout: RunLayout) -> None:
    rewrite(layout.steps / "step-000000000020" / "COMMITTED", schema_version=3)
    choice = CheckpointStore(layout).choose(full=False)
    assert choice.manifest is not None and choice.manifest.step == 10
    assert "schema_version 3" in choice.rejected[0].reason


def test_a_newer_step_whose_manifest_cannot_be_read_now_is_not_set_aside(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = layout.steps / "step-000000000020"
    rewrite(folder / "COMMITTED", schema_version=2)

    def fail(path: Path, **options: Any) -> bytes:
        raise CheckpointError("cannot read it") from OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(verification, "read_small", fail)
    with pytest.raises(CheckpointError, match="step 20 cannot be read just now"):
        CheckpointStore(layout).choose(full=False)


def test_a_newer_step_with_a_damaged_part_is_a_damaged_one(layout: RunLayout) -> None:
    folder = layout.steps / "step-000000000020"
    record = json.loads((folder / "manifest.json").read_bytes())
    data = rewrite(folder / record["indexes"][0]["path"], schema_version=2)
    record["indexes"][0].update(bytes=len(data), digest=digest(record["digest_algorithm"], data))
    data = rewrite(folder / "manifest.json", indexes=record["indexes"])
    rewrite(folder / "COMMITTED", digest=hashlib.sha256(data).hexdigest())
    with pytest.raises(CheckpointError, match="step 20 was written by a newer ftslurm"):
        CheckpointStore(layout).choose(full=False)
    (folder / record["indexes"][1]["path"]).write_bytes(b"torn")
    choice = CheckpointStore(layout).choose(full=False)
    assert choice.manifest is not None and choice.manifest.step == 10
