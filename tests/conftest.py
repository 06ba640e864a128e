"""Its being here puts this folder on the import path: tests everywhere below import `fakes`."""

import subprocess

import pytest
from fakes.array_queue import ArrayQueue
from fakes.nvml.nodes import build
from hypothesis import HealthCheck, settings

from ftslurm import files

# The same examples each time, however slow the machine: what one run of the tests finds, every run
# finds. `pytest --hypothesis-profile=default` draws others.
settings.register_profile(
    "repeated", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeated")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What a test has broken is not mended by waiting; one that mends it itself sets its own."""
    monkeypatch.setattr(files, "VIEW_LAG_S", 0.2)
    monkeypatch.setattr(files, "STUMBLE_S", 0.1)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The fake libnvidia-ml.so.1, built once."""
    return str(build(tmp_path_factory.mktemp("nvml")))


@pytest.fixture
def queue(monkeypatch):
    """Slurm's commands, on a queue in memory."""
    made = ArrayQueue()
    monkeypatch.setattr(subprocess, "run", made)
    return made
