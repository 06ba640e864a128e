"""doctor --across on real nodes: what they see of each other is measured, nothing stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_runs import lab_of_its_own
from lab import Lab, cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def cached_lab() -> Iterator[Lab]:
    needed = cluster("setup-packages", "--shared-fs=bindfs", timeout_s=300)
    assert needed.returncode == 0, needed.stderr
    with lab_of_its_own("doctor", "--shared-fs=bindfs") as lab:
        yield lab


def argv_of(lab: Lab, runs: Path) -> list[str]:
    options = ["--across", "2", "--partition", "low", "--runs", str(runs), "--write-gb", "0.01"]
    return [str(lab.python), "-m", "ftslurm", "doctor", *options, "--json"]


def runs_of(lab: Lab, name: str) -> Path:
    runs = lab.home(lab.user) / name
    lab.run_as(lab.user, ["mkdir", str(runs)])
    return runs


def across(lab: Lab, runs: Path) -> dict[str, dict[str, Any]]:
    environ = {"PYTHONPATH": str(lab.checkout)}
    done = lab.run_as(lab.user, argv_of(lab, runs), env=environ, timeout_s=150, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = {line["name"]: line for line in json.loads(done.stdout)["lines"]}
    assert "across.shared" in found, done.stdout + done.stderr
    return found


def assert_nothing_is_left(lab: Lab, runs: Path) -> None:
    wait_until(
        lambda: (not lab.queue() and not list(runs.iterdir())) or None,
        timeout_s=60,
        seen=lambda: f"{lab.queue()}; {list(runs.iterdir())}",
    )


def test_nodes_that_share_a_folder_get_no_complaint_of_it(lab: Lab) -> None:
    runs = runs_of(lab, "doctor-good")
    found = across(lab, runs)
    for name in ("shared", "new_file", "listing", "attributes", "reread", "claims", "clock",
                 "cpu", "gpus", "driver", "python", "interface"):  # fmt: skip
        assert found[f"across.{name}"]["state"] == "ok", found[f"across.{name}"]
    assert "`import torch` took" in found["across.rank_start"]["seen"]
    for name in ("memory", "local", "runs"):
        assert "GB/s on n" in found[f"across.write_{name}"]["seen"]
    assert found["host.memory"]["seen"].startswith("n")
    assert_nothing_is_left(lab, runs)


@pytest.mark.full
def test_a_doctor_that_is_killed_gives_its_nodes_back_and_leaves_no_folder(lab: Lab) -> None:
    runs = runs_of(lab, "doctor-killed")
    killed = ["timeout", "--signal=KILL", "2.5", *argv_of(lab, runs)]
    environ = {"PYTHONPATH": str(lab.checkout)}
    done = lab.run_as(lab.user, killed, env=environ, check=False)
    assert done.returncode != 0 and not done.stdout
    assert_nothing_is_left(lab, runs)


@pytest.mark.full
def test_on_a_file_system_with_caches_the_delay_is_measured(cached_lab: Lab) -> None:
    """Names and sizes stay for 30 s in each node's client (shared_fs.py); listings do not."""
    runs = runs_of(cached_lab, "doctor-cached")
    found = across(cached_lab, runs)
    for name in ("shared", "listing", "claims"):
        assert found[f"across.{name}"]["state"] == "ok", found[f"across.{name}"]
    late = found["across.new_file"]
    assert late["state"] == "warn" and "negative_timeout" in late["todo"]
    seconds = float(late["seen"].partition("after ")[2].partition(" s")[0])
    assert 25.0 < seconds < 40.0, late
    assert found["across.attributes"]["state"] == "warn", found["across.attributes"]
    assert_nothing_is_left(cached_lab, runs)
