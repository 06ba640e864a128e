"""Token stores: what is built is what is read, and whatever is damaged is said before step 0."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import ftslurm
from ftslurm.cli import main
from ftslurm.errors import DataError, UsageError
from ftslurm.train.build import build, build_python_stdlib
from ftslurm.train.token_store import TokenStore, describe
from ftslurm.train.token_writer import writing_store
from ftslurm.train.tokenizer import ByteTokenizer, token_dtype

TEXT = bytes(range(1, 256)) * 1500  # 382,500 bytes: more than both checked ends


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    (folder / "text").write_bytes(TEXT)
    build([folder / "text"], folder / "whole.h5")
    return folder / "whole.h5"


def expected(index: int, length: int) -> np.ndarray:
    tokens = [*TEXT, 256]
    return np.array(tokens[index * length : index * length + length + 1])


def test_sequences_are_consecutive_and_targets_are_one_ahead(whole: Path) -> None:
    store = TokenStore(whole, 100)
    assert len(store) == len(TEXT) // 100
    inputs, targets = store[7]
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.tolist() == expected(7, 100)[:-1].tolist()
    assert targets.tolist() == expected(7, 100)[1:].tolist()
    assert store[len(store) - 1][1][-1] == 256


def test_a_batch_is_what_single_reads_give(whole: Path) -> None:
    store = TokenStore(whole, 33)
    wanted = [5, 4, 6, 900, 5, 0, len(store) - 1, 901]
    rows = store.read(wanted)
    assert rows.dtype == np.uint16
    assert [row.tolist() for row in rows] == [expected(i, 33).tolist() for i in wanted]
    pairs = store.__getitems__(wanted)
    assert [pair[0].tolist() for pair in pairs] == [store[i][0].tolist() for i in wanted]
    assert store.read([]).shape == (0, 34)


@pytest.mark.parametrize("index", [-1, 3825])
def test_a_sequence_outside_the_store_is_an_index_error(whole: Path, index: int) -> None:
    with pytest.raises(IndexError):
        TokenStore(whole, 100)[index]


def test_a_store_too_short_for_one_sequence_is_refused(whole: Path) -> None:
    assert len(TokenStore(whole, len(TEXT))) == 1
    with pytest.raises(DataError, match="shorter sequences"):
        TokenStore(whole, len(TEXT) + 1)


def test_tokens_over_several_chunks_come_back_whole(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2_500_000, np.uint8).tobytes()
    (tmp_path / "text").write_bytes(data)
    build([tmp_path / "text"], tmp_path / "o.h5")
    store = TokenStore(tmp_path / "o.h5", 1000)
    rows = store.read(np.arange(len(store)))
    assert rows[:, :-1].astype(np.uint8).tobytes() == data[: len(store) * 1000]
    describe(tmp_path / "o.h5", verify=True)


# --- building -------------------------------------------------------------------------------------


def test_documents_are_separated_and_read_in_a_stated_order(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    (folder / "a").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"B")
    (folder / "a" / "z.md").write_bytes(b"Z")
    (folder / "a" / "latin").write_bytes(b"\xe9")
    (folder / ".hidden").write_bytes(b"H")
    (folder / "image").write_bytes(b"\x89\0\0")
    (folder / "nothing").write_bytes(b"")
    (folder / "link").symlink_to(folder / "b.txt")
    (tmp_path / "named.bin").write_bytes(b"\0")
    report = build([tmp_path / "named.bin", folder], tmp_path / "o.h5")
    assert report["num_documents"] == 4
    store = TokenStore(tmp_path / "o.h5", 7)
    assert store.read([0])[0].tolist() == [0, 256, 0xE9, 256, ord("Z"), 256, ord("B"), 256]


def test_the_snapshot_is_the_content_and_nothing_else(tmp_path: Path) -> None:
    for name, text in (("one", b"same"), ("two", b"same"), ("three", b"Same")):
        (tmp_path / name).write_bytes(text)
        build([tmp_path / name], tmp_path / f"{name}.h5")
    one, two, three = (describe(tmp_path / f"{name}.h5") for name in ("one", "two", "three"))
    assert one["snapshot"] == two["snapshot"] != three["snapshot"]
    assert one["sources_digest"] != two["sources_digest"]


def test_a_store_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"old")
    (tmp_path / "u").write_bytes(b"new!")
    before = build([tmp_path / "t"], tmp_path / "o.h5")
    with pytest.raises(UsageError, match="--force"):
        build([tmp_path / "u"], tmp_path / "o.h5")
    assert describe(tmp_path / "o.h5") == before
    assert build([tmp_path / "u"], tmp_path / "o.h5", replace=True) != before


def test_a_failed_build_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"old")
    before = build([tmp_path / "t"], tmp_path / "o.h5")
    names = names_in(tmp_path)
    with pytest.raises(KeyboardInterrupt), writing_store(tmp_path / "o.h5", ByteTokenizer()) as out:
        out.add_document("x", [b"half"])
        raise KeyboardInterrupt
    assert names_in(tmp_path) == names
    assert describe(tmp_path / "o.h5", verify=True) == before


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    """A limit on the file size stands in for it; HDF5 left alone crashes at exit here."""
    (tmp_path / "t").write_bytes(b"text" * 10**6)
    code = (
        "import resource, signal, sys; from ftslurm.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))\n"
        "sys.exit(main(['data', 'build', 't', 'o.h5']))"
    )
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "ftslurm: error: cannot write `o.h5`: File too large\n"
    assert names_in(tmp_path) == {"t"}


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        (["nope"], "no such file or folder: `nope`"),
        (["empty"], "all sources are empty"),
        (["folder"], "all sources are empty"),
        ([], "no text to build"),
    ],
)
def test_nothing_to_build_from_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sources: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("folder").mkdir()
    assert main(["data", "build", *sources, "o.h5"]) in (1, 2)
    assert sentence in capsys.readouterr().err
    assert names_in(tmp_path) == {"empty", "folder"}


def test_the_standard_library_is_built_once_and_two_builders_do_no_harm(tmp_path: Path) -> None:
    out = tmp_path / "new" / "std.h5"
    code = f"from ftslurm.train.build import main; main(['build', '--python-stdlib', {str(out)!r}])"
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [builder.wait(60) for builder in both] == [0, 0]
    assert names_in(out.parent) == {"std.h5"}
    report = describe(out, verify=True)
    assert 5_000_000 < report["num_tokens"] < 40_000_000
    written_at = out.stat().st_mtime_ns
    assert build_python_stdlib(out) == report
    assert out.stat().st_mtime_ns == written_at


def test_a_tokenizers_file_is_used_whole_and_never_cuts_documents(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "t").write_text("a b c a\n")
    report = build([tmp_path / "t"], tmp_path / "o.h5", tokenizer=str(tmp_path / "words.json"))
    assert (report["tokenizer"], report["vocab_size"], report["separator"]) == ("words.json", 4, 3)
    store = TokenStore(tmp_path / "o.h5", 4)
    assert store.read([0]).dtype == np.uint8
    assert store.read([0])[0].tolist() == [0, 1, 2, 0, 3]
    (tmp_path / "t").write_bytes(b"a \xff")
    with pytest.raises(DataError, match="not UTF-8"):
        build([tmp_path / "t"], tmp_path / "p.h5", tokenizer=str(tmp_path / "words.json"))


def test_without_the_tokenizers_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "t").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"ftslurm\[tokenizers\]"):
        build([tmp_path / "t"], tmp_path / "o.h5", tokenizer="words.json")


def test_the_type_is_as_narrow_as_the_vocabulary_allows() -> None:
    sizes = [256, 257, 65536, 65537]
    assert [token_dtype(size).str for size in sizes] == ["|u1", "<u2", "<u2", "<u4"]


def test_describe_prints_json_and_help_loads_no_numpy(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "describe", "--verify", "--json", str(whole)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_tokens"] == len(TEXT) + 1
    code = (
        "import sys; from ftslurm.train.build import main\n"
        "try: main(['build', '--help'])\n"
        "except SystemExit: print('numpy' in sys.modules, 'h5py' in sys.modules)"
    )
    assert run_python("-c", code).stdout.endswith("False False\n")


# --- processes ------------------------------------------------------------------------------------


def test_parent_and_child_read_the_same_store_after_a_fork(whole: Path) -> None:
    store = TokenStore(whole, 50)
    wanted = np.random.default_rng(1).integers(0, len(store), 2000)
    truth = store.read(wanted)
    children = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            same = all(np.array_equal(store.read(wanted), truth) for _ in range(3))
            os._exit(0 if same else 1)
        children.append(pid)
    for _ in range(3):
        assert np.array_equal(store.read(wanted), truth)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_an_error_that_passes_costs_no_attempt(
    whole: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = TokenStore(whole, 100)
    expected_rows = store.read([3, 7])
    opened, handles, left = TokenStore.open, [], [1]

    class Stumbling:
        def __init__(self, tokens: h5py.Dataset) -> None:
            self.tokens, self.dtype = tokens, tokens.dtype

        def __getitem__(self, wanted: slice) -> np.ndarray:
            if left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number))
            handles.append(self.tokens)
            return self.tokens[wanted]

    monkeypatch.setattr(TokenStore, "open", lambda self: Stumbling(opened(self)))
    before = opened(store)
    assert np.array_equal(store.read([3, 7]), expected_rows)
    assert (handles[0] is before) == (number == errno.EIO)  # a stale handle is opened again
    left[0] = 10**6
    with pytest.raises(DataError, match=r"cannot read sequence 3 .*data describe --verify"):
        store.read([3])


def test_a_store_travels_by_pickle(whole: Path) -> None:
    store = TokenStore(whole, 50)
    truth = store.read([3, 1])
    assert np.array_equal(pickle.loads(pickle.dumps(store)).read([3, 1]), truth)


def test_a_store_replaced_under_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"old text")
    (tmp_path / "u").write_bytes(b"new text")
    build([tmp_path / "t"], tmp_path / "o.h5")
    store = TokenStore(tmp_path / "o.h5", 4)
    build([tmp_path / "u"], tmp_path / "o.h5", replace=True)
    with pytest.raises(DataError, match="was replaced"):
        store.read([0])


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(ftslurm.__file__).parent.parent)}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
