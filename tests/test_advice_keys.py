"""What people are told to set, give or run is there: keys, options, verbs and targets of make.

Reads the texts of the verbs that advise (doctor, plan, report) out of their source.
"""

import ast
import dataclasses
import re
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from ftslurm.cli import VERBS, main
from ftslurm.run.spec import RunSpec
from ftslurm.submit.further_options import _SBATCH

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [*(ROOT / "ftslurm/doctor").glob("*.py"), *(ROOT / "ftslurm/plan").glob("*.py"),
           ROOT / "ftslurm/report/advice.py"]  # fmt: skip

LINES = ("slurm.", "folder.", "host.", "runs.", "across.", "s3.")
"""Beginnings of the names of doctor's lines, which look like keys."""
FILES = (".py", ".sh", ".json", ".tmp", "memory.max", "memory.current", "_in_bytes")
OF_SBATCH = {"--requeue", "--mem", "--exclude", "--time"}
"""What ftslurm asks for by itself, and what is advised for jobs that are not of ours."""
OF_AWS = {"--bucket", "--cli-connect-timeout", "--cli-read-timeout", "--expires-in", "--output"}
"""What object_store.py runs `aws` with."""
PLAIN = {"runs_dir"}
"""Keys of no group, which cannot be told from other words."""

_KEY = re.compile(r"(?<![\w./-])([a-z]\w+(?:\.[a-z]\w*)+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_COMMAND = re.compile(r"(?:`|^ +)(?:srun )?ftslurm ([a-z]+)\b([^`\n]*)", re.MULTILINE)
_FILE = re.compile(
    r"(?<![\w./-])(?:slurm|conf|ftslurm)/[\w./-]+\w|\bREADME(?:\.md)?:? ?[A-Z][\w ]*"
)
_TARGET = re.compile(r"`make ([a-z-]+)`")


def texts(path: Path) -> list[str]:
    """Every string of a module that is not a docstring, what is put into it as `{}`."""
    tree = ast.parse(path.read_text())
    silent = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
              for part in node.values}  # fmt: skip
    silent |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if id(node) in silent:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else "{}" for one in node.values)
            found.append("".join(parts))
    return found


def key_is_there(key: str) -> bool:
    """A field of RunSpec, or an entry of one of its tables (`recovery.budgets.code`)."""
    here = RunSpec()
    for name in key.split("."):
        if isinstance(here, dict):
            return True
        if not dataclasses.is_dataclass(here):
            return False
        if name not in {field.name for field in dataclasses.fields(here)}:
            return False
        here = getattr(here, name)
    return True


@cache
def options_of(verb: str) -> frozenset[str]:
    """By its own --help."""
    told = StringIO()
    with redirect_stdout(told), pytest.raises(SystemExit):
        main([verb, "--help"])
    return frozenset(_OPTION.findall(told.getvalue()))


def wrong_in(text: str, verb: str) -> list[str]:
    wrong = []
    for match in _KEY.finditer(text):
        key = match[1]
        if not key.startswith(LINES) and not key.endswith(FILES) and not key_is_there(key):
            wrong.append(key)
    for name, options in _COMMAND.findall(text):
        if name not in VERBS:
            wrong.append(f"ftslurm {name}")
            continue
        wrong += [one for one in _OPTION.findall(options) if one not in options_of(name)]
    rest = _COMMAND.sub("", text)
    for option in _OPTION.findall(rest):
        is_own = option in options_of(verb) | OF_SBATCH | OF_AWS
        # `--gres=...` is given in cluster.sbatch, which refuses what a key stands for.
        is_passed = "cluster.sbatch" in text and option.removeprefix("--") not in _SBATCH
        wrong += [] if is_own or is_passed else [option]
    # A part of the README is told by its heading, which moves; a file is there or is not.
    wrong += [name for name in _FILE.findall(text) if not (ROOT / name).exists()]
    makefile = (ROOT / "Makefile").read_text()
    wrong += [name for name in _TARGET.findall(text) if f"\n{name}:" not in makefile]
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_key_option_and_verb_that_is_named_is_one(path):
    found = {text: wrong_in(text, path.parent.name) for text in texts(path)}
    assert {text: wrong for text, wrong in found.items() if wrong} == {}


def test_keys_and_options_are_found_in_these_texts_at_all():
    everything = "\n".join(text for path in SOURCES for text in texts(path))
    keys = {match[1] for match in _KEY.finditer(everything)}
    assert {"checkpoint.interval_s", "recovery.continue_by", "cluster.constraint"} <= keys
    assert {"--state-gb", "--here", "--qos"} <= set(_OPTION.findall(everything))
    assert {field.name for field in dataclasses.fields(RunSpec)} >= PLAIN
    assert all(re.search(rf"\b{key}\b", everything) for key in PLAIN)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("submit with recovery.continue=resubmit", ["recovery.continue"]),
        ("point paths.runs at another", ["paths.runs"]),
        ("fewer workers (data.workers)", ["data.workers"]),
        ("submit with --no-requeue", ["--no-requeue"]),
        ("`ftslurm mend RUN` does it", ["ftslurm mend"]),
        ("`ftslurm doctor --there` tells", ["--there"]),
        ("`make instal-node`", ["instal-node"]),
        ("see slurm/site/NONE.md", ["slurm/site/NONE.md"]),
        ("see README: For administrators", ["README: For administrators"]),
        ("see slurm/site/README.md", []),
        ("give `--nodes=4` in cluster.sbatch", []),
        ("give `--time-min=4` in cluster.sbatch", ["--time-min"]),
        ("checkpoint.interval_s={} and recovery.budgets.code, see prolog.sh", []),
    ],
)
def test_what_is_not_there_is_found(text, wrong):
    assert wrong_in(text, "doctor") == wrong


def test_a_time_between_saves_is_never_advised_without_the_steps_that_come_first():
    """checkpoint.interval_steps is 250 unless it is set, and whichever is due first counts."""
    assert RunSpec().checkpoint.interval_steps > 0
    for path in SOURCES:
        for text in texts(path):
            assert (
                "checkpoint.interval_s" not in text.replace("checkpoint.interval_steps", "")
                or "checkpoint.interval_steps" in text
            ), text
