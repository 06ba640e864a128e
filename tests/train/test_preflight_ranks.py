"""A preflight of real ranks, four nodes of one or two: who is named, and that it always ends.

What is wrong on a node is in tests/fakes/preflight_step.py, which stands in for srun.
"""

import sys
import time
from pathlib import Path

import pytest
from launch import free_port, prepare

from ftslurm.errors import PREFLIGHT_NAMED, RANK_STOPPED
from ftslurm.files import read_json
from ftslurm.node import preflight as module
from ftslurm.node.preflight import preflight
from ftslurm.run.attempts import Attempt, claim, read_outcome
from ftslurm.run.spec import ClusterSpec, RunSpec

pytestmark = pytest.mark.torch

TESTS = Path(__file__).resolve().parent.parent
NODES = 4


@pytest.fixture
def try_nodes(tmp_path, monkeypatch):
    """Runs one attempt's preflight; (exit code, what is on record)."""
    layout = prepare(tmp_path / "run", RunSpec(cluster=ClusterSpec(nodes=NODES)))
    monkeypatch.setattr(module, "LAST_S", 3.0)
    monkeypatch.setattr(module, "TERM_WAIT_S", 2.0)

    def run(*ill, tasks=1):
        names = [f"n{number + 1}" for number in range(NODES)]
        attempt = Attempt(
            0, "12", 0, names, 1.0, [], tasks_per_node=tasks, world_size=NODES * tasks
        )
        number = claim(layout, attempt).number
        environ = {
            "FTSLURM_RUN_DIR": layout.root,
            "FTSLURM_ATTEMPT": number,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "PYTHONPATH": TESTS.parent,
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, str(value))
        step = TESTS / "fakes" / "preflight_step.py"
        rc = preflight(layout, number, [sys.executable, str(step), str(NODES), str(tasks), *ill])
        paths = layout.attempt(number)
        told = read_json(paths.preflight_json) if paths.preflight_json.exists() else None
        return rc, told, paths

    return run


@pytest.mark.full
def test_healthy_nodes_are_found_so_with_all_that_was_tried(try_nodes):
    rc, told, _ = try_nodes(tasks=2)
    assert (rc, told["bad"]) == (0, {})
    measured = {(row["what"], row["node"]) for row in told["best"]}
    assert measured == {
        (what, f"n{number}") for what in ("gemm", "hbm", "p2p", "pair") for number in range(1, 5)
    }
    assert all(row["ms"] > 0 for row in told["best"])
    assert set(told["seconds"]) == {"start", "gemm", "hbm", "p2p", "pair"}


@pytest.mark.full
@pytest.mark.parametrize(
    "illness, told_of",
    [
        ("slow_at_matrices", "at best for multiplying matrices"),
        ("late_for_everybody", "at best for an all-reduce with another node"),
        ("forgets_a_bit", "read 1 words of memory other than it had written"),
        ("miscalculates", "got another product of the same matrices"),
        ("has_no_device", "CUDA error: device unavailable"),
    ],
)
def test_a_sick_node_is_named(try_nodes, illness, told_of):
    rc, told, _ = try_nodes(f"n3={illness}")
    assert (rc, list(told["bad"])) == (PREFLIGHT_NAMED, ["n3"]), told
    assert told_of in told["bad"]["n3"]


@pytest.mark.parametrize(
    "node, illness",
    [
        pytest.param("n1", "freezes_at_matrices", marks=pytest.mark.full),
        ("n2", "freezes_in_a_pair"),
        pytest.param("n4", "freeze", marks=pytest.mark.full),
    ],
)
def test_a_node_that_hangs_is_named_whether_it_has_rank_0_or_not(try_nodes, node, illness):
    began = time.monotonic()
    rc, told, _ = try_nodes(f"{node}={illness}")
    assert (rc, list(told["bad"])) == (PREFLIGHT_NAMED, [node]), told
    assert time.monotonic() - began < 200


def test_two_sick_nodes_of_four_are_named_each_for_its_own(try_nodes):
    rc, told, _ = try_nodes("n2=forgets_a_bit", "n4=late_for_everybody")
    assert (rc, set(told["bad"])) == (PREFLIGHT_NAMED, {"n2", "n4"}), told


def test_what_a_device_takes_longer_for_at_first_is_held_against_nobody(try_nodes):
    rc, told, _ = try_nodes("n2=is_cold", "n4=comes_back_late")
    assert (rc, told["bad"]) == (0, {}), told
    tested = {row["node"] for row in told["best"] if row["what"] == "hbm"}
    assert tested == {"n1", "n2", "n3", "n4"}


@pytest.mark.full
def test_a_bug_of_its_own_names_nobody(try_nodes):
    rc, told, _ = try_nodes("n2=has_a_bug")
    assert (rc, told["bad"]) == (0, {})
    assert any("there is no such key" in note and "n2" in note for note in told["notes"])


def test_a_warning_meanwhile_makes_all_leave(try_nodes):
    rc, told, paths = try_nodes("n2=is_told_to_leave")
    assert (rc, told) == (RANK_STOPPED, None)
    assert read_outcome(paths).result == "stopped"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_undisturbed_runs_name_nobody(try_nodes):
    """On cores that ranks and whatever else runs there share."""
    found = [try_nodes() for _ in range(20)]
    assert [told["bad"] for _, told, _ in found] == [{}] * len(found)
