"""A rename is done and durable, or it is not done: also where the answer to it was lost."""

import errno
import os
from pathlib import Path

import pytest

from ftslurm.checkpoint import rename
from ftslurm.checkpoint.rename import rename_new


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "here" / "one", tmp_path / "there" / "two"
    source.mkdir(parents=True)
    target.parent.mkdir()
    (source / "file").write_bytes(b"7")
    return source, target


@pytest.fixture
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""
    monkeypatch.setattr(rename, "_rename_noreplace", lambda source, target: errno.EINVAL)


@pytest.mark.usefixtures("no_flags")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT, errno.ETIMEDOUT])
def test_a_rename_whose_answer_was_lost_is_done(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.rename

    def lose_the_answer(source: Path, target: Path) -> None:
        real(source, target)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", lose_the_answer)
    source, target = folders
    rename_new(source, target)
    assert (target / "file").read_bytes() == b"7" and not source.exists()


@pytest.mark.usefixtures("no_flags")
def test_a_rename_that_was_refused_is_not_done(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rename", refuse)
    source, target = folders
    with pytest.raises(OSError, match="Input/output error"):
        rename_new(source, target)
    assert (source / "file").read_bytes() == b"7" and not target.exists()


@pytest.mark.parametrize("broken", ["here", "there"])
def test_a_rename_that_may_not_last_is_taken_back(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    real = rename.fsync_folder

    def sync(folder: Path) -> None:
        if folder.name == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(folder)

    monkeypatch.setattr(rename, "fsync_folder", sync)
    source, target = folders
    with pytest.raises(OSError, match="Input/output error"):
        rename_new(source, target)
    assert (source / "file").read_bytes() == b"7" and not target.exists()


def test_what_somebody_else_has_put_there_meanwhile_is_not_taken_back(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer attempt has put the step aside and published its own."""
    source, target = folders

    def sync(folder: Path) -> None:
        target.rename(folder / "aside")
        target.mkdir()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(rename, "fsync_folder", sync)
    with pytest.raises(OSError, match="Input/output error"):
        rename_new(source, target)
    assert target.is_dir() and not source.exists()
