"""Every way we could think of to spoil a checkpoint: named by verify, survived by choose.

Each mutation is done to the newest step, or to what surrounds it, of a real tree of three steps by
two ranks.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import damage, make_layout, make_step, skip_fsync, tree

from ftslurm.checkpoint.digest import digest
from ftslurm.checkpoint.record_json import manifest_digest
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.checkpoint.verify import main as verify
from ftslurm.files import encode_json
from ftslurm.run.layout import RunLayout, step_name

STEPS = (10, 20, 30)
SHARD, INDEX = "shard-00001-000.bin", "index-00001.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout = make_layout(tmp_path_factory.mktemp("original"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        skip_fsync(monkeypatch)
        for step in STEPS:
            make_step(layout, step)
    return layout.root


@pytest.fixture
def layout(original: Path, tmp_path: Path) -> RunLayout:
    shutil.copytree(original, tmp_path / "run")
    return RunLayout(tmp_path / "run")


def step_at(layout: RunLayout, step: int) -> Path:
    return layout.steps / step_name(step)


def edit_json(path: Path, change: Callable[[Any], object]) -> bytes:
    record = json.loads(path.read_bytes())
    change(record)
    data = json.dumps(record).encode()
    path.write_bytes(data)
    return data


def reseal(folder: Path) -> None:
    """Make all digests fit again: what remains wrong has to be found by what it says."""

    def renew(manifest: Any) -> None:
        for entry in manifest["indexes"]:
            path = folder / entry["path"]
            if path.exists():
                data = path.read_bytes()
                entry.update(bytes=len(data), digest=digest("xxh3_128", data))

    identity = manifest_digest(edit_json(folder / "manifest.json", renew))
    commit = json.loads((folder / "COMMITTED").read_bytes())
    (folder / "COMMITTED").write_bytes(encode_json({**commit, "digest": identity}))


def lie(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change what a record says and make every digest fit."""

    def mutate(folder: Path) -> None:
        edit_json(folder / name, change)
        reseal(folder)

    return mutate


def flip(name: str, position: int) -> Callable[[Path], None]:
    return lambda folder: damage(folder, name, position)


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def overwrite(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def take_from_step_20(*names: str) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        for name in names:
            shutil.copy(folder.with_name(step_name(20)) / name, folder / name)

    return mutate


def swap(one: str, other: str) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        (folder / one).rename(folder / "kept")
        (folder / other).rename(folder / one)
        (folder / "kept").rename(folder / other)

    return mutate


def become_step_20(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(step_name(20)), folder)


def become_a_link(folder: Path) -> None:
    (folder / SHARD).rename(folder.parent.parent / "elsewhere.bin")
    (folder / SHARD).symlink_to(folder.parent.parent / "elsewhere.bin")


def become_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def lose_a_rank(folder: Path) -> None:
    def change(manifest: Any) -> None:
        manifest["indexes"].pop()
        manifest["world_size"] = 1

    edit_json(folder / "manifest.json", change)
    reseal(folder)


def tensor(position: int, **changes: Any) -> Callable[[Any], object]:
    return lambda index: index["tensors"][position].update(changes)


def manifest(**changes: Any) -> Callable[[Any], object]:
    return lambda record: record.update(changes)


# name -> (what is done to the newest step, a part of what verify says about it)
MUTATIONS: dict[str, tuple[Callable[[Path], Any], str]] = {
    # a bit anywhere
    "first bit of a shard": (flip(SHARD, 0), "'model/weight' is damaged"),
    "second chunk of a shard": (flip(SHARD, 4200), "between bytes 4096 and 8192"),
    "padding of a shard": (flip(SHARD, 6000), "between bytes 4096 and 8192"),
    "last bit of a shard": (flip(SHARD, 16383), "between bytes 12288 and 16384"),
    "small tensor": (flip("shard-00000-000.bin", 4224 + 64), "is damaged"),
    "first bit of an index": (flip(INDEX, 0), "not the index that the manifest names"),
    "middle of an index": (flip(INDEX, 500), "not the index that the manifest names"),
    "digest in an index": (flip("index-00000.json", 180), "not the index"),
    "first bit of the manifest": (flip("manifest.json", 0), "does not have the digest"),
    "middle of the manifest": (flip("manifest.json", 300), "does not have the digest"),
    "first bit of COMMITTED": (flip("COMMITTED", 0), "COMMITTED"),
    "digest in COMMITTED": (flip("COMMITTED", 40), "manifest.json"),
    "last bit of COMMITTED": (flip("COMMITTED", 163), "COMMITTED"),
    "space in COMMITTED": (
        lambda folder: (folder / "COMMITTED").write_bytes(
            (folder / "COMMITTED").read_bytes().replace(b"\n ", b"\n\t")
        ),
        "not in the form it was written in",
    ),
    # torn, cut short, grown, gone
    "shard cut by a byte": (truncate(SHARD, 16383), "has 16383 bytes, expected 16384"),
    "shard cut to nothing": (truncate(SHARD, 0), "has 0 bytes"),
    "shard grown": (truncate(SHARD, 16385), "has 16385 bytes"),
    "shard of zeros": (overwrite(SHARD, bytes(16384)), "is damaged"),
    "index cut": (truncate(INDEX, 100), "not the index that the manifest names"),
    "index empty": (truncate(INDEX, 0), "0 bytes"),
    "manifest cut": (truncate("manifest.json", 200), "does not have the digest"),
    "manifest empty": (truncate("manifest.json", 0), "does not have the digest"),
    "COMMITTED empty": (truncate("COMMITTED", 0), "is not JSON"),
    "COMMITTED garbage": (overwrite("COMMITTED", b"\xff\x00" * 99), "is not JSON"),
    "COMMITTED of nothing": (overwrite("COMMITTED", b"{}"), "schema_version"),
    "no shard": (remove(SHARD), "No such file"),
    "no index": (remove(INDEX), "No such file"),
    "no manifest": (remove("manifest.json"), "No such file"),
    "no COMMITTED": (remove("COMMITTED"), "No such file"),
    "shard is a link": (become_a_link, "is no regular file"),
    "folder is empty": (become_empty, "No such file"),
    "folder is a file": (become_a_file, "Not a directory"),
    # good in themselves, in the wrong place
    "shard of another step": (take_from_step_20(SHARD), "is damaged"),
    "index of another step": (take_from_step_20(INDEX), "not the index"),
    "rank of another step": (take_from_step_20(SHARD, INDEX), "not the index"),
    "manifest of another step": (take_from_step_20("manifest.json"), "does not have the digest"),
    "COMMITTED of another step": (take_from_step_20("COMMITTED"), "does not have the digest"),
    "manifest and COMMITTED of another step": (
        take_from_step_20("manifest.json", "COMMITTED"),
        "the manifest is of step 20",
    ),
    "all of another step": (become_step_20, "the manifest is of step 20"),
    "shards of two ranks swapped": (swap("shard-00000-000.bin", SHARD), "expected"),
    "indexes of two ranks swapped": (swap("index-00000.json", INDEX), "not the index"),
    # every digest fits, and still it cannot be
    "a rank too few": (lose_a_rank, "'model/weight': pieces cover 1056 of 2112"),
    "wrong rank count": (lie("manifest.json", manifest(world_size=3)), "world_size 3"),
    "manifest of another step number": (lie("manifest.json", manifest(step=31)), "another step"),
    "manifest of another run": (lie("manifest.json", manifest(run_id="x")), "another step or run"),
    "parent after the step": (
        lie("manifest.json", manifest(parent={"step": 30, "digest": "0" * 64})),
        "has parent 30",
    ),
    "index of another rank": (lie(INDEX, manifest(rank=0)), "expected"),
    "path out of the step": (
        lie(INDEX, lambda index: index["files"][0].update(path="../../latest.json")),
        "expected `shard-00001-000.bin`",
    ),
    "tensor in a file outside": (lie(INDEX, tensor(0, file="/etc/hostname")), "not a file of it"),
    "tensor over the end": (lie(INDEX, tensor(0, offset=12288)), "over the end"),
    "tensors over each other": (lie(INDEX, tensor(1, offset=0)), "overlaps another tensor"),
    "tensor at a negative place": (lie(INDEX, tensor(0, offset=-4096)), "damaged"),
    "tensor of huge size": (lie(INDEX, tensor(0, bytes=2**70)), "damaged"),
    "tensor of another dtype": (lie(INDEX, tensor(0, dtype="int32")), "disagree on dtype"),
    "tensor with a hole": (lie(INDEX, tensor(0, offsets=[31, 0])), "overlap"),
    "tensor of a larger whole": (lie(INDEX, tensor(0, global_shape=[65, 33])), "disagree"),
    "tensor of another digest": (lie(INDEX, tensor(1, digest="0" * 32)), "'model/mask' is damaged"),
    "tensor under another key": (lie(INDEX, tensor(0, key="model/mask")), "'model/weight'"),
    "tensor forgotten": (lie(INDEX, lambda index: index["tensors"].pop(0)), "1056 of 2112"),
    "tensor saved twice": (
        lie(INDEX, tensor(2, key="model/bias", offsets=[0], shape=[25], bytes=50)),
        "'model/bias': two pieces overlap",
    ),
    "alias to nowhere": (
        lie("index-00000.json", manifest(aliases={"head": "gone"})),
        "alias 'head' to 'gone' names no stored tensor",
    ),
    "chunks with a gap": (
        lie(INDEX, lambda index: index["files"][0]["chunks"].pop(1)),
        "gap",
    ),
    "an object that could be anything": (
        lie(INDEX, manifest(objects={"rng": {"$pickle": "gASVCgAAAAAAAAA="}})),
        "unknown tag `$pickle`",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_damage_is_named_and_the_step_before_is_chosen(
    layout: RunLayout, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mutate, told = MUTATIONS[name]
    mutate(step_at(layout, 30))
    before = tree(layout.root)
    store = CheckpointStore(layout)
    found = store.verify(step_at(layout, 30), full=True)
    assert not found.ok
    assert told in "\n".join(found.problems)
    choice = store.choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 20
    assert [rejected.step for rejected in choice.rejected] == [30]
    assert verify([str(layout.root)]) == 1
    assert "a restore would take step 20" in capsys.readouterr().out
    assert tree(layout.root) == before


@pytest.mark.parametrize(
    "name", ["shard-00002-000.bin", ".manifest.json.x.tmp", ".nfs0000000000a1"]
)
def test_a_file_that_was_not_saved_is_named_and_does_not_stop_a_restore(
    layout: RunLayout, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A restore reads and verifies what the manifest names, and all of that is as it was saved: to
    # give the step up for a note, or for a file that NFS keeps while it is open, would lose work.
    (step_at(layout, 30) / name).write_bytes(b"x")
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert (choice.manifest.step, choice.rejected) == (30, [])
    assert verify([str(layout.root)]) == 1
    out = capsys.readouterr().out
    assert "a restore would take step 30" in out
    assert f"'{name}'` belongs to no index" in out
    assert verify([str(step_at(layout, 30))]) == 1


def test_there_are_enough_mutations() -> None:
    assert len(MUTATIONS) >= 40


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_anywhere_is_found(layout: RunLayout, seed: int) -> None:
    folder = step_at(layout, 30)
    files = sorted(path for path in folder.iterdir())
    path = files[seed % len(files)]
    position = int.from_bytes(bytes.fromhex(manifest_digest(b"%d" % seed)[:8]), "big")
    damage(folder, path.name, position % path.stat().st_size)
    found = CheckpointStore(layout).verify(folder, full=True)
    assert found.problems


@pytest.mark.parametrize("step", STEPS)
def test_an_older_bad_step_is_a_finding_and_does_not_stop_a_restore(
    layout: RunLayout, step: int
) -> None:
    damage(step_at(layout, step))
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == (20 if step == 30 else 30)
    assert verify([str(layout.root)]) == 1


def test_when_all_steps_are_bad_nothing_is_chosen_and_nothing_is_touched(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(step_at(layout, 30))
    (step_at(layout, 20) / "COMMITTED").unlink()
    os.truncate(step_at(layout, 10) / "manifest.json", 10)
    before = tree(layout.root)
    choice = CheckpointStore(layout).choose(full=True)
    assert (choice.path, choice.manifest) == (None, None)
    assert [rejected.step for rejected in choice.rejected] == [30, 20, 10]
    assert all(rejected.reason for rejected in choice.rejected)
    assert verify([str(layout.root)]) == 1
    assert "there is no step from which a restore could continue" in capsys.readouterr().out
    assert tree(layout.root) == before


@pytest.mark.parametrize("data", [None, b"", b"garbage", b'{"schema_version": 1, "step": 10}'])
def test_latest_json_never_matters(layout: RunLayout, data: Any) -> None:
    layout.latest_json.unlink()
    if data is not None:
        layout.latest_json.write_bytes(data)
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 30
    assert verify([str(layout.root)]) == 0


def test_a_digest_that_no_longer_fits_the_algorithm_is_refused(layout: RunLayout) -> None:
    lie("manifest.json", manifest(digest_algorithm="sha256"))(step_at(layout, 30))
    found = CheckpointStore(layout).verify(step_at(layout, 30), full=True)
    assert any("hex digits" in problem for problem in found.problems)
