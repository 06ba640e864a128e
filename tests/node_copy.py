"""What the tests of the nodes' own copy share."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path("/usr/bin/python3")


def call(*argv, env=None, cwd="/", timeout=60):
    return subprocess.run(
        [*map(str, argv)], env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
