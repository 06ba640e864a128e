"""House rules that a machine can hold: sizes, names, openings."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("ftslurm", "slurm", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
OURS = [path for path in SOURCES if (ROOT / "tests") not in path.parents]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_stays_under_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_a_module_opens_with_what_it_promises(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "no module docstring"


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_a_function_stays_readable(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= 60, f"{node.name} has {lines} lines"


def test_most_functions_stay_under_40_lines() -> None:
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in OURS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert sum(length <= 40 for length in lengths) >= 0.95 * len(lengths)


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_no_module_is_named_for_nothing(path: Path) -> None:
    assert path.stem not in {
        "utils",
        "util",
        "common",
        "helpers",
        "helper",
        "manager",
        "base",
        "misc",
    }


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_no_shell_and_no_loose_ends(path: Path) -> None:
    text = path.read_text()
    assert "shell=True" not in text
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert "NotImplementedError" not in text
