"""Whichever call to the file system fails, and however: a save is committed or is not, and that is
what was said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import launch
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

SOURCE = launch.ROOT / "tests" / "fakes" / "storage" / "failing.c"
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failing") / "libfailing.so"
    words = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(path), str(SOURCE)]
    subprocess.run([*words, "-ldl", "-lpthread"], check=True)
    return path


@pytest.mark.parametrize(
    ("words", "least"),
    [
        # The calls behind which the step bears its name, among others.
        (["saving", "--only", "fsync", "renameat2", "--every", "4"], 20),
        pytest.param(["saving"], 1000, marks=FULL),
        pytest.param(["restoring"], 400, marks=FULL),
    ],
    ids=["some", "saving", "restoring"],
)
def test_a_save_is_committed_or_not_whichever_call_fails(
    tmp_path: Path, failing: Path, words: list[str], least: int
) -> None:
    done = subprocess.run(
        [sys.executable, str(launch.HERE / "storage_sweep.py"), str(tmp_path), *words],
        env={
            **os.environ,
            "LD_PRELOAD": str(failing),
            "PYTHONPATH": os.pathsep.join(launch.PYTHON_PATH),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    print(f"{answer['cases']} cases")  # noqa: T201
    assert not answer["found"]
    assert answer["cases"] >= least
