"""One real Slurm cluster for all tests below this folder; left out, in one line, where it cannot
be had. A cluster that was already up is used and left up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Optional

import pytest
from health_site import HealthSite
from lab import NUM_NODES, REPOSITORY, Lab, cluster
from opening import open_lab

HERE = Path(__file__).parent
LEFT_OUT = pytest.StashKey[str]()
LABS = {"lab", "cached_lab", "memory_lab"}
"""Fixtures that start a cluster."""


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents and LABS & _fixtures(item)]
    if not ours or config.option.collectonly:
        return
    reason = _why_not_here(config)
    if reason is not None:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)
        config.stash[LEFT_OUT] = f"{len(ours)} cluster tests skipped: {reason}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if LEFT_OUT in config.stash:
        terminalreporter.write_line(config.stash[LEFT_OUT], yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """That all were left out, and why, has been said: it is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and LEFT_OUT in session.config.stash:
        session.exitstatus = pytest.ExitCode.OK


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", []))


def _why_not_here(config: pytest.Config) -> Optional[str]:
    """One sentence when there can be no cluster on this machine; installs what it lacks."""
    if os.geteuid() != 0:
        return "a throwaway Slurm cluster needs root"
    with _uncaptured(config):
        print("\nlooking for the Slurm packages, installing what is missing", flush=True)
    installed = cluster("setup-packages", timeout_s=900)
    if installed.returncode != 0:
        return installed.stderr.strip().splitlines()[-1]
    return None


def _uncaptured(config: pytest.Config) -> AbstractContextManager[None]:
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    silence: AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return silence


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config) -> Iterator[Lab]:
    was_up = cluster("status").returncode == 0
    # Start-up and shutdown take seconds: show the waiting person what happens.
    with _uncaptured(pytestconfig):
        print("\nstarting a Slurm cluster for the tests (slurm/cluster/cluster.py up)", flush=True)
        started = cluster("up", f"--nodes={NUM_NODES}", f"--expose={REPOSITORY}", show=True)
    assert started.returncode == 0, "the cluster did not start; the reason is printed above"
    try:
        yield open_lab()
    finally:
        if not was_up:
            with _uncaptured(pytestconfig):
                print("\ntaking the cluster down", flush=True)
                ended = cluster("down", show=True)
            assert ended.returncode == 0, "the cluster is not wholly down; see above"


@pytest.fixture(scope="session")
def installed_site(lab: Lab) -> HealthSite:
    return HealthSite(lab)


@pytest.fixture
def site(installed_site: HealthSite) -> Iterator[HealthSite]:
    """The root-owned probe, installed; all nodes healthy and without a past."""
    installed_site.renew()
    yield installed_site
    installed_site.release("epilog")  # else no job ends after a test that has failed


@pytest.fixture(autouse=True)
def clean_lab(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no job left, all nodes idle, settings back to default."""
    yield
    if "lab" in request.fixturenames:
        repaired = request.getfixturevalue("lab").reset()
        if repaired:
            print("repaired after the test:", "; ".join(repaired))
