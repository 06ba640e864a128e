"""The folder of state: whole records or none, and nothing that a user has planted is followed."""

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftslurm.errors import FormatError, SpecError, UsageError
from ftslurm.health.state_dir import StateDir

RECORD = {"schema_version": 1, "text": "before"}
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, and a second uid by setuid")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seen by all, so that a user's trap could work: pytest's own folders are closed to others."""
    for above in tmp_path.parents[:2]:
        above.chmod(0o755)
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
def state(folder: Path) -> Iterator[StateDir]:
    with StateDir(folder / "state", mode=0o755) as opened:
        yield opened


def in_child(work: Callable[[], object], uid: int = -1) -> str:
    """What `work` returns, or the error that it ends with, in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def body() -> None:
        if uid >= 0:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        try:
            sender.send(str(work()))
        except Exception as error:  # noqa: BLE001
            sender.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=body)
    child.start()
    child.join(90)
    assert child.exitcode == 0
    return receiver.recv()


def users_folder(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    os.chown(made, NOBODY, NOBODY)
    return made


# Records.


def test_a_record_comes_back_as_it_was_written_and_can_be_read_by_all(state: StateDir) -> None:
    assert state.read_json("a.json") is None
    state.write_json("a.json", RECORD)
    state.write_json("a.json", {**RECORD, "text": "after"})
    assert state.read_json("a.json") == {**RECORD, "text": "after"}
    assert (state.path / "a.json").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in state.path.iterdir()] == ["a.json"]


def test_a_folder_is_made_closed_to_others_but_not_the_way_to_it(folder: Path) -> None:
    with StateDir(folder / "new"):
        assert (folder / "new").stat().st_mode & 0o777 == 0o700
    with pytest.raises(SpecError, match="whose parent is there"):
        StateDir(folder / "not" / "there")


@pytest.mark.parametrize(
    "data",
    [b"", b'{"schema_version": 1, "te', b"[1]", b"\x00\xff", b"{}", b'{"schema_version": 2}',
     b"[" * 200_000],
    ids=["empty", "torn", "a list", "binary", "no version", "newer", "deep"],
)  # fmt: skip
def test_a_torn_or_foreign_record_is_said_to_be_one(state: StateDir, data: bytes) -> None:
    (state.path / "a.json").write_bytes(data)
    with pytest.raises(FormatError, match="a.json"):
        state.read_json("a.json")


def test_what_is_no_file_of_ours_is_not_read(state: StateDir) -> None:
    os.mkfifo(state.path / "fifo.json")
    (state.path / "folder.json").mkdir()
    (state.path / "huge.json").touch()
    os.truncate(state.path / "huge.json", 17 << 20)
    state.write_json("loose.json", RECORD)
    (state.path / "loose.json").chmod(0o666)
    began = time.monotonic()
    for name in ("fifo.json", "folder.json", "huge.json", "loose.json"):
        with pytest.raises(FormatError, match=name):
            state.read_json(name)
    assert time.monotonic() - began < 60, "a FIFO must not be waited for"


@pytest.mark.parametrize("name", ["../a.json", "", ".", "a/b", ".hidden", "a\n", "x" * 300])
def test_a_name_that_leads_elsewhere_is_refused(state: StateDir, name: str) -> None:
    for call in (state.read_json, state.remove):
        with pytest.raises(UsageError, match="is no name of a record"):
            call(name)


def test_a_full_disk_leaves_the_old_record_and_nothing_else(state: StateDir) -> None:
    state.write_json("a.json", RECORD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel cuts the write off in its middle, as a disk does that fills up.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            state.write_json("a.json", {**RECORD, "text": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert state.read_json("a.json") == RECORD
    assert state.names() == ["a.json"] and len(list(state.path.iterdir())) == 1


def test_a_writer_that_is_killed_leaves_the_old_record(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.write_json("a.json", RECORD)
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, "rename", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        state.write_json("a.json", {**RECORD, "text": "after"})
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert state.read_json("a.json") == RECORD
    (left,) = [path for path in state.path.iterdir() if path.name.endswith(".tmp")]
    with state.lock(1):
        assert left.exists(), "another writer may be at it"
    os.utime(left, (0, 0))
    with state.lock(1):
        assert not left.exists()


def test_names_are_told_the_latest_first(state: StateDir) -> None:
    for at, name in enumerate(("b.json", "c.json", "a.json"), 1):
        state.write_json(name, RECORD)
        os.utime(state.path / name, (at, at))
    with state.lock(1):
        assert state.names() == ["a.json", "c.json", "b.json"]
    assert state.changed_at("c.json") == 2 and state.changed_at("none.json") is None
    state.remove("c.json")
    state.remove("c.json")
    assert state.names() == ["a.json", "b.json"]


# The lock.


def test_the_lock_has_one_holder_and_is_waited_for(state: StateDir) -> None:
    with StateDir(state.path) as other:
        with state.lock(0) as first, other.lock(0.1) as second:
            assert (first, second) == (True, False)
        with other.lock(0) as again:
            assert again


def test_the_lock_of_a_killed_holder_is_free(state: StateDir) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with StateDir(state.path) as other, other.lock(0):
            os.write(writer, b"held")
            time.sleep(60)
        os._exit(0)
    assert os.read(reader, 4) == b"held"
    with state.lock(0) as held:
        assert not held
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with state.lock(0) as held:
        assert held


# What a user can plant.


def test_a_link_in_the_place_of_a_record_is_neither_read_nor_written_through(
    state: StateDir, folder: Path
) -> None:
    (folder / "secret").write_text(json.dumps(RECORD))
    (state.path / "a.json").symlink_to(folder / "secret")
    with pytest.raises(FormatError, match="is a link"):
        state.read_json("a.json")
    state.write_json("a.json", {**RECORD, "text": "mine"})
    assert json.loads((folder / "secret").read_text()) == RECORD
    assert not (state.path / "a.json").is_symlink()


def test_a_link_at_the_temporary_name_is_not_followed(
    state: StateDir, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: b"\x11" * count)
    (state.path / f".a.json.{'11' * 6}.tmp").symlink_to(folder / "target")
    with pytest.raises(FileExistsError):
        state.write_json("a.json", RECORD)
    assert not (folder / "target").exists()


def test_a_link_in_the_place_of_the_lock_is_not_followed(state: StateDir, folder: Path) -> None:
    (state.path / "lock").symlink_to(folder / "target")
    with pytest.raises(OSError, match="symbolic links"), state.lock(0):
        pass
    assert not (folder / "target").exists()


@as_root
def test_no_link_on_the_way_to_the_folder_is_followed(folder: Path) -> None:
    users = users_folder(folder, "users")
    (folder / "real" / "deep").mkdir(parents=True)
    (folder / "last").symlink_to(users)
    (folder / "middle").symlink_to(folder / "real")
    for path in (folder / "last", folder / "middle" / "deep"):
        with pytest.raises(SpecError, match="by its real path"):
            StateDir(path)
    assert list(users.iterdir()) == []


@as_root
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("how", ["a user's", "of the group", "of all"])
def test_root_refuses_a_folder_that_others_could_exchange(
    folder: Path, depth: int, how: str
) -> None:
    places = [folder / "a" / "b" / "c", folder / "a" / "b", folder / "a"]
    places[0].mkdir(parents=True)
    if how == "a user's":
        os.chown(places[depth], NOBODY, -1)
    else:
        places[depth].chmod(0o775 if how == "of the group" else 0o777)
    with pytest.raises(SpecError, match=str(places[depth])):
        StateDir(places[0])


@as_root
def test_a_sticky_folder_is_safe_above_and_not_as_the_folder_itself(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    StateDir(shared / "state").close()
    with pytest.raises(SpecError, match="can be written by others"):
        StateDir(shared)

    def plant() -> None:
        (shared / "state").rename(shared / "away")

    assert in_child(plant, NOBODY).startswith("PermissionError")
    assert in_child(lambda: (shared / "mine").symlink_to("/etc"), NOBODY) == "None"
    with pytest.raises(SpecError):
        StateDir(shared / "mine")


@as_root
def test_a_user_can_plant_nothing_in_it_nor_hold_its_lock(state: StateDir) -> None:
    state.write_json("a.json", RECORD)
    with state.lock(0):
        pass
    path = state.path
    attempts: list[Callable[[], object]] = [
        lambda: (path / "b.json").symlink_to("/etc/shadow"),
        lambda: (path / ".a.json.111111111111.tmp").symlink_to("/etc/shadow"),
        lambda: (path / "a.json").unlink(),
        lambda: (path / "a.json").write_text("{}"),
        lambda: path.rename(path.parent / "away"),
        lambda: os.open(path / "lock", os.O_RDONLY),
        lambda: StateDir(path).write_json("b.json", RECORD),
    ]
    for attempt in attempts:
        assert "Permission denied" in in_child(attempt, NOBODY)
    assert in_child(lambda: StateDir(path).read_json("a.json"), NOBODY) == str(RECORD)
    assert sorted(found.name for found in path.iterdir()) == ["a.json", "lock"]


@as_root
def test_a_record_that_a_user_owns_is_not_believed(state: StateDir) -> None:
    state.write_json("a.json", RECORD)
    os.chown(state.path / "a.json", NOBODY, NOBODY)
    with pytest.raises(FormatError, match="not a file of ours"):
        state.read_json("a.json")


@as_root
def test_a_user_may_have_a_folder_of_their_own(folder: Path) -> None:
    home = users_folder(folder, "home")

    def work() -> object:
        with StateDir(home / "state") as state, state.lock(0):
            state.write_json("a.json", RECORD)
            return state.read_json("a.json")

    assert in_child(work, NOBODY) == str(RECORD)
    assert in_child(lambda: StateDir(folder / "state"), NOBODY).startswith("SpecError")
