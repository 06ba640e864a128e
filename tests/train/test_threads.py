"""How many threads a rank's libraries take: what cluster.env asks for, else none but torch's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, os, sys
from types import SimpleNamespace
from ftslurm.run.spec import ClusterSpec, RunSpec
from ftslurm.train.entry import prepare_libraries
cluster = ClusterSpec(cpus_per_task=2, env=json.loads(sys.argv[1]))
spec = RunSpec(cluster=cluster)
prepare_libraries(SimpleNamespace(spec=spec))
import torch
print(os.environ["OMP_NUM_THREADS"], torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("env", "says"),
    # Of a list, OpenMP's outermost level takes the first.
    [({}, "1 2"), ({"OMP_NUM_THREADS": "1,2"}, "1,2 1")],
)
def test_the_number_of_threads_is_the_one_that_the_run_asks_for(env, says):
    # The batch script exports cluster.env; a value of the submitter's shell counts for nothing.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "5", **env}
    argv = [sys.executable, "-c", PROGRAM, json.dumps(env)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True)
    assert done.stdout == f"{says}\n", done.stderr
