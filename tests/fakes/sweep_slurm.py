"""sbatch and scontrol of a test's own on PATH, for what queues the tasks of a sweep."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CONFIG = "SLURM_VERSION = 22.05.8\nMaxArraySize = {size}\n"


@pytest.fixture(name="slurm")
def slurm_on_path(tmp_path, monkeypatch):
    """fake_sbatch.py and a scontrol on PATH; a reader of sbatch's calls."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)

    class Slurm:
        def program(self, name, text):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

        def array_size(self, size):
            self.program("scontrol", f"#!/bin/sh\nprintf '{CONFIG.format(size=size)}'\n")

        def answers(self, **answer):
            (folder / "answer.json").write_text(json.dumps(answer))

        def refuses(self, why, group):
            """Arrays of this group alone."""
            (folder / "bin" / "sbatch").rename(folder / "bin" / "plain-sbatch")
            refuse = f"*{group}*) printf '%s' {shlex.quote(why)} >&2; exit 1;;"
            self.program("sbatch", f'#!/bin/sh\ncase "$*" in {refuse} esac\n'
                                   f'exec {folder}/bin/plain-sbatch "$@"\n')  # fmt: skip

        @property
        def calls(self):
            paths = sorted(folder.glob("call-*.json"), key=lambda path: int(path.stem[5:]))
            return [json.loads(path.read_text()) for path in paths]

    made = Slurm()
    text = (TESTS / "fake_sbatch.py").read_text()
    made.program("sbatch", text.replace("/usr/bin/env python3", sys.executable, 1))
    made.array_size(1001)
    monkeypatch.setenv("FAKE_SBATCH", str(folder))
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    return made
