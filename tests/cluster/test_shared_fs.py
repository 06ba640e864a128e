"""Runs on a file system that each node sees through a cache of its own: names that were looked for
in vain, and sizes, are remembered for half a minute (slurm/cluster/shared_fs.py).

A cluster of its own, of two nodes. `make test-slurm SHARED_FS=bindfs` holds all other cluster tests
against such a file system as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from batch_runs import INTERVAL, STEPS, LabRun, lab_of_its_own
from fakes.project import slow
from fakes.rank import MASK, NUM_VALUES
from lab import Lab, cluster

from ftslurm.run.attempts import read_events
from ftslurm.run.layout import step_name

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

WORLD_SIZE = 4
CACHE_S = 30


@pytest.fixture(scope="module")
def cached_lab() -> Iterator[Lab]:
    needed = cluster("setup-packages", "--shared-fs=bindfs", timeout_s=300)
    assert needed.returncode == 0, needed.stderr
    with lab_of_its_own("cached", "--shared-fs=bindfs") as lab:
        yield lab


@pytest.fixture(autouse=True)
def no_job_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    request.getfixturevalue("cached_lab").reset()


def undisturbed_digest(*, seed: int = 0) -> str:
    """What the torch-free ranks end with when nothing happens: their arithmetic, in one process."""
    ranks = [
        [(rank * 1_000_003 + i * 7919 + seed) & MASK for i in range(NUM_VALUES)]
        for rank in range(WORLD_SIZE)
    ]
    for step in range(STEPS):
        mix = sum(sum(values) & MASK for values in ranks) & MASK
        ranks = [
            [
                (value * 6364136223846793005 + mix + step + i) & MASK
                for i, value in enumerate(values)
            ]
            for values in ranks
        ]
    digests = [hashlib.sha256(repr(values).encode()).hexdigest() for values in ranks]
    return hashlib.sha256(repr(digests).encode()).hexdigest()


def look(lab: Lab, node: str, *paths: Path) -> list[bool]:
    """Whether a node sees paths; it remembers those that it does not."""
    seen = "import os, sys; print([int(os.path.lexists(p)) for p in sys.argv[1:]])"
    told = lab.run_inside(node, str(lab.python), "-c", seen, *map(str, paths))
    return [bool(value) for value in json.loads(told)]


def restored_steps(run: LabRun) -> list[int]:
    layout = run.run.layout
    events = [read_events(layout.attempt(n)) for n in range(1, len(run.run.decisions()) + 1)]
    return [event["step"] for some in events for event in some if event["kind"] == "restored"]


def test_a_run_preempted_and_killed_ends_as_if_nothing_had_happened(cached_lab: Lab) -> None:
    faults = "kill@step:rank=3:step=47:attempt=2"
    run = LabRun(cached_lab, "cached", *slow(), step_s=0.08, faults=faults)
    stopped_at = run.wait_for_training(1, timeout_s=150)
    run.preempt()
    run.end_as("COMPLETED", timeout_s=300)
    assert run.run.decisions() == ["requeued", "restart", "done"], run.says()
    first, second = restored_steps(run)
    assert first >= stopped_at and second == 40, run.says()
    assert run.run.digest == undisturbed_digest(), run.says()
    assert sorted(run.run.losses) == list(range(1, STEPS + 1))


@pytest.mark.full
def test_a_node_misses_what_another_has_made_until_it_forgets(cached_lab: Lab) -> None:
    """The premise of this file; and that our own reader waits where plain ones give up."""
    home = cached_lab.home(cached_lab.user)
    path = home / "run.json"
    looked_at = time.monotonic()
    assert look(cached_lab, "n2", path) == [False]
    write = "from pathlib import Path; from ftslurm.files import write_json; import sys;"
    write += "write_json(Path(sys.argv[1]), {'schema_version': 1, 'value': 7})"
    python = ["env", f"PYTHONPATH={cached_lab.checkout}", str(cached_lab.python), "-c"]
    cached_lab.run_inside("n1", *python, write, str(path))
    assert look(cached_lab, "n1", path) == [True]
    assert look(cached_lab, "n2", path) == [False]
    assert "run.json" in cached_lab.run_inside("n2", "ls", str(home))
    read = "from pathlib import Path; from ftslurm.files import read_json; import sys;"
    read += "print(read_json(Path(sys.argv[1]))['value'])"
    assert cached_lab.run_inside("n2", *python, read, str(path)).strip() == "7"
    waited_s = time.monotonic() - looked_at
    print(f"read {waited_s:.1f} s after it was missed")
    assert waited_s > CACHE_S - 1
    size = ["stat", "--format=%s", str(path)]
    before = cached_lab.run_inside("n2", *size)
    cached_lab.run_inside("n1", "sh", "-c", f"echo longer >>{path}")
    assert cached_lab.run_inside("n2", *size) == before != cached_lab.run_inside("n1", *size)
    whole = "from pathlib import Path; from ftslurm.files import read_bytes; import sys;"
    whole += "print(len(read_bytes(Path(sys.argv[1]))))"
    told = cached_lab.run_inside("n2", *python, whole, str(path))
    assert told == cached_lab.run_inside("n1", *size), "our own reader goes on behind the old end"


@pytest.mark.full
def test_of_claims_on_two_nodes_at_once_each_gets_a_number_of_its_own(cached_lab: Lab) -> None:
    run = LabRun(cached_lab, "claims")
    run.end_as("COMPLETED")
    layout = run.run.layout
    claim = "import sys; from pathlib import Path; from ftslurm.run.attempts import *;"
    claim += "from ftslurm.run.layout import RunLayout;"
    claim += "a = Attempt(0, '1', 0, ['n'], 1.0);"
    claim += "print(*(claim(RunLayout(Path(sys.argv[1])), a).number for _ in range(25)))"
    python = ["env", f"PYTHONPATH={cached_lab.checkout}", str(cached_lab.python), "-c", claim]

    def claim_on(node: str) -> list[int]:
        return list(map(int, cached_lab.run_inside(node, *python, str(layout.root)).split()))

    with ThreadPoolExecutor(max_workers=2) as pool:
        taken = [number for numbers in pool.map(claim_on, ["n1", "n2"]) for number in numbers]
    assert sorted(taken) == list(range(2, 52))


@pytest.mark.full
def test_ranks_wait_for_a_step_that_their_node_has_missed(cached_lab: Lab) -> None:
    """Both nodes have looked in vain for the folders that a save makes and a restore reads."""
    faults = "kill@step:rank=3:step=27:attempt=1;kill@step:rank=0:step=47:attempt=2"
    run = LabRun(cached_lab, "missed", step_s=0.05, faults=faults)
    steps = run.run.layout.steps
    names = [step_name(step) for step in range(INTERVAL, STEPS + 1, INTERVAL)]
    names += [f"{name}.tmp-{attempt:04d}" for name in names for attempt in (1, 2, 3)]
    run.run.layout.checkpoints.mkdir(exist_ok=True)
    steps.mkdir(exist_ok=True)
    for folder in (steps.parent, steps):
        os.chown(folder, run.run.layout.root.stat().st_uid, run.run.layout.root.stat().st_gid)
    assert not any(look(cached_lab, "n2", *(steps / name for name in names)))
    run.end_as("COMPLETED", timeout_s=400)
    assert run.run.decisions() == ["restart", "restart", "done"], run.says()
    assert restored_steps(run) == [20, 40], run.says()
    assert run.run.digest == undisturbed_digest(), run.says()
    assert not run.run.layout.quarantine.exists()


@pytest.mark.full
def test_a_new_batch_node_adopts_the_newest_step_though_it_has_looked_for_it_in_vain(
    cached_lab: Lab,
) -> None:
    """The job's only node changes between two attempts."""
    placed = ["cluster.nodes=1", "cluster.tasks_per_node=2"]
    run = LabRun(cached_lab, "moved", *placed, *slow())
    run.wait_for_training(1)
    first = cached_lab.show_job(run.job_id)["NodeList"]
    other = {"n1": "n2", "n2": "n1"}[first]
    layout = run.run.layout
    newest = [layout.steps / step_name(step) for step in range(1, STEPS + 1)]
    later = [layout.attempt(2).root, layout.attempt(1).outcome_json, layout.done]
    look(cached_lab, other, *newest, *(path / "COMMITTED" for path in newest), *later)
    cached_lab.run_as_root("scontrol", "update", f"NodeName={first}", "State=DRAIN", "Reason=test")
    cached_lab.run_as(cached_lab.user, ["scontrol", "requeue", run.job_id])
    cached_lab.hasten(run.job_id)
    run.end_as("COMPLETED", timeout_s=300)
    assert cached_lab.show_job(run.job_id)["NodeList"] == other
    (restored,) = restored_steps(run)
    told = [event for event in read_events(layout.attempt(2)) if event["kind"] == "claimed"]
    assert told[0]["adopted"][0] == restored > 0
    assert run.run.steps_trained_twice == 0, "the step saved on leaving was found"
    assert not layout.quarantine.exists()
