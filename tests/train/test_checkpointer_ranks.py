"""Checkpoints over several ranks: same world, other world sizes, other strategy, failures.

One process runs all scenarios, since importing torch costs more than they do; what each of them
checks is in checkpoint_ranks.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")
DEADLINE_S = 250.0


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> dict[str, str]:
    """Exit codes of the ranks by scenario; what they wrote is shown when a test fails."""
    folder = tmp_path_factory.mktemp("ranks")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "four:4", "resize:2", "resize:3", "late:3"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    print(output)
    return dict(
        line.split(" ", 1)
        for line in output.splitlines()
        if line[:5] in ("four:", "resiz", "late:")
    )


def test_four_ranks_save_restore_and_fail_together(outcome):
    # Rank 3 ends itself in the last check.
    assert outcome["four:4"] == "[0, 0, 0, 1]"


def test_two_ranks_and_then_three_restore_what_four_saved(outcome):
    assert outcome["resize:2"] == "[0, 0]"
    assert outcome["resize:3"] == "[0, 0, 0]"


def test_a_rank_that_hangs_does_not_hold_the_others_beyond_the_deadline(outcome):
    assert outcome["late:3"] == "[0, 0, 0]"
