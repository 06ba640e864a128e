"""What a program finds in its environment: torch's `env://` names and our own. Pure.

Slurm's variables stay as they are. Nothing of the environment is taken away.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from ftslurm.run.rank import RankEnvironment

RESUME_DIR = "FTSLURM_RESUME_DIR"
STOP_FILE = "FTSLURM_STOP_FILE"
"""Is there once this rank has been asked to leave. On the node itself: a step may look for it."""
AWARE_FILE = "FTSLURM_AWARE_FILE"
"""Made by a program that looks for STOP_FILE: then it is given time to leave by itself."""
CALLS_FILE = "FTSLURM_CALLS_FILE"
"""Where it counts how often it does (calls.py). Set on a node with heartbeats only."""


def child_environment(
    environ: Mapping[str, str],
    env: RankEnvironment,
    *,
    run_id: str,
    stop_file: Path,
    path_first: Optional[Path] = None,
    calls_file: Optional[Path] = None,
) -> dict[str, str]:
    """`path_first`: a folder in which commands are looked for before PATH."""
    path = {} if path_first is None else {"PATH": f"{path_first}:{environ.get('PATH', '')}"}
    calls = {} if calls_file is None else {CALLS_FILE: str(calls_file)}
    return {
        # A log that comes late, or never after a kill, helps nobody; the user's own choice wins.
        "PYTHONUNBUFFERED": "1",
        **environ,
        **path,
        "RANK": str(env.rank),
        "WORLD_SIZE": str(env.world_size),
        "LOCAL_RANK": str(env.local_rank),
        "LOCAL_WORLD_SIZE": str(env.local_world_size),
        "NODE_RANK": str(env.node_rank),
        "GROUP_RANK": str(env.node_rank),
        "MASTER_ADDR": env.master_addr,
        "MASTER_PORT": str(env.master_port),
        # torch reads neither to meet the others; scripts do, to know a restart and the run.
        "TORCHELASTIC_RESTART_COUNT": str(env.attempt - 1),
        "TORCHELASTIC_RUN_ID": run_id,
        RESUME_DIR: str(env.layout.resume),
        STOP_FILE: str(stop_file),
        AWARE_FILE: str(env.attempt_layout.aware),
        **calls,
    }
