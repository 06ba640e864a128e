"""What a rank has imported, as digests, and how two such sets differ."""

import importlib.util
import sys
import time
from types import ModuleType

import pytest

from ftslurm.run.modules import (
    Change,
    Copied,
    Module,
    changed_sentence,
    changes,
    expected,
    imported_files,
    look,
    merged,
    node_sentence,
    parted,
    rebuilt_sentence,
)


def load(folder, name, text="x = 1\n"):
    """A module of a file of its own, outside sys.modules."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def module(digest, attempt=1, file="/x.py"):
    return Module(file, digest, attempt)


def test_what_came_with_the_interpreter_is_not_looked_at():
    import json

    import xxhash

    found = look(1, {"json": json, "xxhash": xxhash, "sys": sys})
    assert list(found) == ["xxhash"]
    assert len(found["xxhash"].sha256) == 64 and found["xxhash"].attempt == 1


def test_extension_modules_are_looked_at():
    from xxhash import _xxhash

    assert look(1, {"e": _xxhash})["e"].file.endswith(".so")


def test_a_lazy_module_stays_lazy(tmp_path):
    (tmp_path / "lazy.py").write_text("raise RuntimeError('imported')\n")
    spec = importlib.util.spec_from_file_location("lazy", tmp_path / "lazy.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    assert imported_files({"lazy": lazy}, stdlib=[]) == {"lazy": str(tmp_path / "lazy.py")}
    with pytest.raises(RuntimeError, match="imported"):
        _ = lazy.anything


def test_what_has_no_file_is_passed_over(tmp_path):
    gone = load(tmp_path, "gone")
    (tmp_path / "gone.py").unlink()
    made_up = ModuleType("made_up")
    made_up.__file__ = "<template>"
    relative = ModuleType("relative")
    relative.__file__ = "_ops.py"
    odd = {"none": None, "text": "x", "gone": gone, "made_up": made_up, "relative": relative}
    assert look(1, odd) == {}


def test_a_script_of_the_users_own_is_a_module_too(tmp_path):
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "train.py")
    (tmp_path / "train.py").write_text("")
    assert list(look(1, {"__main__": script})) == ["__main__"]


def test_all_that_this_process_has_imported_is_looked_at_in_no_time():
    began = time.process_time()
    assert "ftslurm.run.modules" in look(1)
    assert time.process_time() - began < 5  # 0.1 s for 500 modules on an idle core


def test_a_change_is_other_bytes_under_the_same_name():
    before = {"a": module("1", 2), "b": module("1", file="/old/b.py"), "gone": module("1")}
    now = {"a": module("2", 5), "b": module("1", 5, file="/new/b.py"), "new": module("1", 5)}
    assert changes(now, before) == [Change("a", "/x.py", 2)]
    assert changes(now, now) == []


def test_what_is_kept_holds_the_first_attempt_that_had_it_so():
    earlier = {"a": module("1", 1), "b": module("1", 2), "c": module("1", 1)}
    kept = merged({"a": module("1", 3), "b": module("2", 3), "d": module("1", 3)}, earlier)
    assert {name: (m.sha256, m.attempt) for name, m in kept.items()} == {
        "a": ("1", 1), "b": ("2", 3), "c": ("1", 1), "d": ("1", 3),
    }  # fmt: skip


def test_files_of_the_runs_copy_are_compared_with_what_was_copied():
    now = {
        "mine": module("2", file="/run/code/pkg/mine.py"),
        "seen": module("2", file="/run/code/pkg/seen.py"),
        "new": module("2", file="/run/code/new.py"),
        "alien": module("2", file="/venv/pkg/mine.py"),
    }
    copied = Copied({"pkg/mine.py": "1", "pkg/seen.py": "1"}, ("/other", "/run/code"))
    before = expected(now, {"seen": module("2", 4)}, copied)
    assert changes(now, before) == [Change("mine", "/run/code/pkg/mine.py", 0)]
    assert before["seen"].attempt == 4 and set(before) == {"mine", "seen"}


SO = ".cpython-311-x86_64-linux-gnu.so"


@pytest.mark.parametrize(
    ("now", "before", "is_rebuilt"),
    [
        ("/run/code/pkg/x.so", "/run/code/pkg/x.so", False),  # taken along: nobody builds it
        ("/link/code/pkg/x.so", "/run/code/pkg/x.so", False),
        ("/run/code/pkg/x.so", "/venv/pkg/x.so", True),
        ("/run/code/build/x.so", "/run/code/build/x.so", True),  # built there by the run
        ("/tmp/ops/x.so", "/tmp/ops/x.so", True),
        ("/sw/zen2/torch/_C.so", "/sw/skylake/torch/_C.so", True),
        ("/sw/zen2/numpy/__config__.py", "/sw/skylake/numpy/__config__.py", True),
        ("/run/code/pkg/a.py", "/run/code/pkg/a.py", False),
        ("/sw/zen2/torch/nn.py", "/sw/skylake/torch/nn.py", False),
        ("/sw/zen2/torch/nn.pyc", "/sw/skylake/torch/nn.pyc", False),
        ("/venv/bin/train", "/venv/bin/train", False),
    ],
)
def test_a_build_counts_only_as_the_one_file_that_was_taken_along(now, before, is_rebuilt):
    now, before = now.replace("x.so", f"x{SO}"), before.replace("x.so", f"x{SO}")
    files = {f"pkg/x{SO}": "1", "pkg/a.py": "1"}
    theirs, mine = {"m": module("1", file=before)}, {"m": module("2", file=now)}
    found = changes(mine, theirs)
    assert len(found) == 1
    expect = ([], found) if is_rebuilt else (found, [])
    assert parted(found, mine, theirs, Copied(files, ("/run/code", "/link/code"))) == expect


def test_the_sentences_name_module_file_since_when_and_what_to_do():
    few = [Change("pkg.a", "/run/code/pkg/a.py", 2), Change("pkg.b", "/b.py", 2)]
    assert changed_sentence(few) == (
        "module `pkg.a` (`/run/code/pkg/a.py`) has changed since attempt 2, with it `pkg.b`; put "
        "it back, or submit a new run (code=live would go on with what it finds)"
    )
    many = [Change(name, "/f.py", 0) for name in "abcdef"]
    assert "since the run was submitted, with it `b`, `c`, `d` and 2 more;" in changed_sentence(
        many
    )
    assert node_sentence(few[:1], node="n7", other="n1").startswith(
        "module `pkg.a` (`/run/code/pkg/a.py`) on node n7 is not the one on n1; "
    )
    assert rebuilt_sentence(few[:1], node="n7", other="n1").endswith(
        "on node n7 is another build than on n1; each goes on with its own"
    )
