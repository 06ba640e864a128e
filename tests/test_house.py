"""House rules that a machine can hold: sizes, names, openings."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("ftslurm", "slurm", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
OURS = [path for path in SOURCES if (ROOT / "tests") not in path.parents]


FUNCTIONS = [
    (path, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
    for path in OURS
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_stay_under_400_lines() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_a_module_opens_with_what_it_promises() -> None:
    silent = [
        name_of(path) for path in OURS if not ast.get_docstring(ast.parse(path.read_text()))
    ]  # fmt: skip
    assert not silent, "no module docstring"


def test_functions_stay_readable() -> None:
    too_long = [(name_of(path), name, lines) for path, name, lines in FUNCTIONS if lines > 60]
    assert not too_long


def test_most_functions_stay_under_40_lines() -> None:
    assert sum(lines <= 40 for _, _, lines in FUNCTIONS) >= 0.95 * len(FUNCTIONS)


def test_no_module_is_named_for_nothing() -> None:
    nothing = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}
    assert not [name_of(path) for path in OURS if path.stem in nothing]


def test_no_shell_and_no_loose_ends() -> None:
    loose = re.compile(r"shell=True|\b(TODO|FIXME|XXX)\b|NotImplementedError")
    found = [(name_of(path), loose.search(path.read_text())) for path in OURS]
    assert not [(name, match[0]) for name, match in found if match]
