"""Every damaged, foreign or half-written token store is one DataError, and never hangs."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from ftslurm.cli import main
from ftslurm.errors import DataError
from ftslurm.train.build import build
from ftslurm.train.token_store import SCHEMA_VERSION, TokenStore, describe

LENGTH = 128


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    text = np.random.default_rng(0).integers(0, 256, 1_300_000, np.uint8)
    (folder / "text").write_bytes(text.tobytes())
    build([folder / "text"], folder / "whole.h5")
    return folder / "whole.h5"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copy(whole, tmp_path / "copy.h5")
    return tmp_path / "copy.h5"


def test_a_file_cut_short_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    offsets = {0, 1, 7, 8, 9, 47, 48, 49, 500, 2047, 2048, len(data) - 1, len(data) - 2048}
    offsets |= set(range(0, len(data), len(data) // 40))
    for offset in sorted(offsets):
        # A name of its own for each: HDF5 knows files by inode.
        cut = tmp_path / f"cut-{offset}.h5"
        cut.write_bytes(data[:offset])
        with pytest.raises(DataError, match=cut.name):
            TokenStore(cut, LENGTH)
        cut.unlink()


@pytest.mark.parametrize(
    "content", [b"", b"some text\n" * 1000, b"\x89HDF\r\n\x1a\n" + b"x" * 5000]
)
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text.h5").write_bytes(content)
    with pytest.raises(DataError, match="text.h5"):
        TokenStore(tmp_path / "text.h5", LENGTH)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="directory"):
        TokenStore(tmp_path, LENGTH)
    with pytest.raises(DataError, match="ftslurm data build"):
        TokenStore(tmp_path / "none.h5", LENGTH)


def test_a_foreign_hdf5_file_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["tokens"] = np.zeros(1000, np.uint16)
        file.attrs["format"] = "something else"
    with pytest.raises(DataError, match="no token store"):
        TokenStore(tmp_path / "foreign.h5", LENGTH)


def test_a_newer_schema_is_refused_with_what_to_do(copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        file.attrs["schema_version"] = SCHEMA_VERSION + 1
    with pytest.raises(DataError, match="use the version that wrote it"):
        TokenStore(copy, LENGTH)


@pytest.mark.parametrize("name", ["num_tokens", "vocab_size", "separator"])
def test_a_changed_number_in_the_header_is_seen(copy: Path, name: str) -> None:
    with h5py.File(copy, "r+") as file:
        file.attrs[name] = file.attrs[name] - 1
    with pytest.raises(DataError, match="damaged header"):
        TokenStore(copy, LENGTH)


@pytest.mark.parametrize("name", ["snapshot", "tokenizer_digest", "header_digest", "edge_digest"])
def test_a_missing_part_of_the_header_is_seen(copy: Path, name: str) -> None:
    with h5py.File(copy, "r+") as file:
        del file.attrs[name]
    with pytest.raises(DataError, match="copy or build it again"):
        TokenStore(copy, LENGTH)


def test_tokens_cut_off_inside_hdf5_are_seen(copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        file["tokens"].resize((1_000_000,))
    with pytest.raises(DataError, match="its header says"):
        TokenStore(copy, LENGTH)


@pytest.mark.parametrize("place", [0, 65_535, -1, -65_536])
def test_a_wrong_token_at_either_end_is_seen_at_once(copy: Path, place: int) -> None:
    change_token(copy, place)
    with pytest.raises(DataError, match="its ends"):
        TokenStore(copy, LENGTH)


def test_a_wrong_token_in_the_middle_is_found_by_verify(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_token(copy, 600_000)
    assert main(["data", "describe", str(copy)]) == 0
    assert main(["data", "describe", "--verify", str(copy)]) == 1
    assert "damaged" in capsys.readouterr().err


def test_a_wrong_bit_in_the_metadata_is_an_error_or_harmless(whole: Path, tmp_path: Path) -> None:
    """HDF5's older format hangs on some of these; see TokenWriter."""
    data = whole.read_bytes()
    truth = describe(whole, verify=True)
    refused = 0
    for number, place in enumerate(range(8, 2048, 31)):
        changed = bytearray(data)
        changed[place] ^= 1 << number % 8
        path = tmp_path / f"bit-{place}.h5"
        path.write_bytes(changed)
        try:
            assert {**describe(path, verify=True), "path": truth["path"]} == truth
        except DataError:
            refused += 1
        path.unlink()
    assert refused > 15


def change_token(path: Path, place: int) -> None:
    with h5py.File(path, "r+") as file:
        tokens = file["tokens"]
        place %= tokens.shape[0]
        tokens[place] = (int(tokens[place]) + 1) % 256
