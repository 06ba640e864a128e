"""Its being here puts this folder on the import path: tests everywhere below import `fakes`."""

import pytest

from ftslurm import files


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What a test has broken is not mended by waiting; one that mends it itself sets its own."""
    monkeypatch.setattr(files, "VIEW_LAG_S", 0.2)
    monkeypatch.setattr(files, "STUMBLE_S", 0.1)
