"""What a rank has imported by the end of its first step, in the order a cold rank imports it.

For the standby (node/standby.py), which forks ranks out of a process that has imported this. It
runs no operation and touches no device; of the code a run brings along it imports nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.train.entry import limit_openmp
from ftslurm.train.late_imports import LATE

# Libraries read it once, when they are loaded.
limit_openmp(read_record(RunLayout(Path(os.environ["FTSLURM_RUN_DIR"]))))

for _name in (*LATE, "ftslurm.train.session", "ftslurm.train.reference"):
    import_module(_name)
