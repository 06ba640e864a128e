"""What the kernel says of processes: a rank that is blocked in it, and who has started whom."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.run.heartbeat import read_views
from ftslurm.run.process_stat import children_by_parent, descendants

# It becomes a process that waits for its vfork'ed child, in state D.
RANK = """
import os, sys
from pathlib import Path
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment
env = RankEnvironment(Path("/run"), 3, 0, 4, 0, 4, "n1", 0, "127.0.0.1", 1)
Pulse.open(env, {"FTSLURM_BEATS": sys.argv[1]})
os.execv(sys.argv[2], ["x"])
"""
BLOCKED = """
#include <unistd.h>
int main(void) { if (vfork() == 0) { sleep(60); _exit(0); } return 0; }
"""


@pytest.fixture
def blocked(tmp_path: Path):
    (tmp_path / "blocked.c").write_text(BLOCKED)
    program = str(tmp_path / "blocked")
    subprocess.run(["cc", "-o", program, tmp_path / "blocked.c"], check=True, timeout=60)
    argv = [sys.executable, "-c", RANK, str(tmp_path), program]
    with subprocess.Popen(argv, start_new_session=True) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def test_a_rank_in_the_kernel_is_told_of(tmp_path: Path, blocked) -> None:
    def views():
        return read_views(tmp_path / "attempt-0003", "n1")

    deadline = time.monotonic() + 60
    while [view.proc_state for view in views()] != ["D"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (view,) = views()
    assert view.alive and descendants(blocked.pid, children_by_parent())
