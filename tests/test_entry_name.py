"""An entry whose function its module does not name is warned of, and never refused."""

import subprocess

import pytest

from ftslurm.submit.entry_name import missing_function
from ftslurm.submit.snapshot import check_entry, plan_snapshot

TYPO = "def tain(session): ..."


def warned(folder, entry="mine:train"):
    planned = plan_snapshot(folder, entry=entry)
    check_entry(planned, entry, installed=False)
    return missing_function(planned, entry)


@pytest.mark.parametrize(
    "text, has",
    [
        ("def train(session): ...", True),
        ("if True:\n    from json import load as train", True),
        ("from json import *", True),
        ("globals()['tr' + 'ain'] = print", True),
        ("locals()['tr' + 'ain'] = print", True),
        ("exec(compile(open('x').read(), 'x', 'exec'))", True),
        ("import sys\nsys.modules[__name__] = object()", True),
        ("import mine\nmine.train = print", True),
        ("match print:\n    case train: ...", True),
        ("def __getattr__(name): return print", True),
        ("this is no Python, but names train", True),
        ("", False),
        (TYPO, False),
        ("def training(session): ...", False),
        ("from json import load as other\nmodel.eval()", False),
        ("x = " + "1 + " * 30_000 + "1", False),
    ],
)
@pytest.mark.parametrize("place", ["mine.py", "pack/__init__.py", "pack/mine.py"])
def test_a_function_that_its_module_does_not_name_is_warned_of(tmp_path, place, text, has):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").touch()
    (tmp_path / place).write_text(text)
    module = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for entry in (f"{module}:train", f"rank:{module}:train"):
        said = warned(tmp_path, entry)
        assert (said is None) is has
        assert has or (f"`{place}`" in said and "`train`" in said)


@pytest.mark.parametrize(
    "files, entry",
    [
        ({"mine.py": TYPO, "mine/__init__.py": "def train(): ..."}, "mine:train"),
        ({"mine.py": TYPO, "mine.cpython-311-x86_64-linux-gnu.so": ""}, "mine:train"),
        ({"mine.py": TYPO, "src/mine.py": "def train(): ..."}, "mine:train"),
        (
            {"pack/mine.py": TYPO, "src/pack/__init__.py": "", "src/pack/mine.py": "train = 1"},
            "pack.mine:train",
        ),
        ({"pack/__init__.py": "__path__ = ['other']", "pack/mine.py": TYPO}, "pack.mine:train"),
        ({"pack/mine.py": TYPO}, "pack.mine:train"),
    ],
)
def test_where_more_than_one_file_could_be_the_module_nothing_is_said(tmp_path, files, entry):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert warned(tmp_path, entry) is None


def test_a_file_that_cannot_be_read_is_no_reason_to_refuse(tmp_path):
    (tmp_path / "mine.py").write_text(TYPO)
    planned = plan_snapshot(tmp_path, entry="mine:train")
    (tmp_path / "mine.py").unlink()
    assert missing_function(planned, "mine:train") is None


def test_a_file_that_was_mended_is_looked_at_anew(tmp_path):
    (tmp_path / "mine.py").write_text(TYPO)
    assert warned(tmp_path) is not None
    (tmp_path / "mine.py").write_text("def train(session): ...")
    assert warned(tmp_path) is None
