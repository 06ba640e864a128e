"""A claim on a node that misreads COMMITTED: no good step becomes a stray for it."""

import errno
import time
from pathlib import Path

import pytest
from checkpoints import make_layout, make_step

from ftslurm import files
from ftslurm.checkpoint import published, verification
from ftslurm.checkpoint.choose import Fence
from ftslurm.checkpoint.commit import COMMITTED
from ftslurm.checkpoint.records import MANIFEST
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.files import write_json
from ftslurm.recovery.claim import adoptable
from ftslurm.recovery.evidence import has_gone_on
from ftslurm.run.attempts import AdoptedStep, Attempt, claim
from ftslurm.run.layout import RunLayout, parse_step_name
from ftslurm.run.record import read_record
from ftslurm.run.spec import RunSpec, to_dict


def begin(layout: RunLayout) -> Attempt:
    now = time.time()
    return claim(layout, Attempt(0, "12", 0, ["n1"], claimed_at=now, adopted=adoptable(layout)))


@pytest.fixture
def layout(tmp_path):
    """A run of which attempt 1 has published the steps 10 and 20."""
    layout = make_layout(tmp_path / "run")
    write_json(layout.run_json, {
        "schema_version": 1, "run_id": "gpt-test", "scheduler": "local", "spec": to_dict(RunSpec()),
    })  # fmt: skip
    layout.steps.mkdir(parents=True, exist_ok=True)
    begin(layout)
    make_step(layout, 10)
    make_step(layout, 20)
    return layout


def torn(data: bytes) -> bytes:
    return data[:-9] + b"?" + data[-8:]


def another_digest(data: bytes) -> bytes:
    """Still of the form in which it is written."""
    place = data.index(b'"digest"') + 14
    return data[:place] + (b"0" if data[place : place + 1] != b"0" else b"1") + data[place + 1 :]


@pytest.fixture(params=[torn, another_digest])
def misreads(request, monkeypatch):
    read = published.read_small

    def misread(path, **how):
        data = read(path, **how)
        return request.param(data) if path.name == COMMITTED else data

    def begin_to():
        monkeypatch.setattr(published, "read_small", misread)

    begin_to.end = lambda: monkeypatch.setattr(published, "read_small", read)
    return begin_to


def put_aside(layout, attempt):
    return [one.step for one in CheckpointStore(layout).fence(attempt.number, attempt.adopted)]


def test_steps_that_only_the_claims_node_misread_stay_in_the_runs_history(layout, misreads):
    misreads()
    sick = begin(layout)
    assert [(one.step, one.digest, one.by) for one in sick.adopted] == [(20, "", 1), (10, "", 1)]
    misreads.end()
    assert put_aside(layout, sick) == []
    well = begin(layout)
    assert [(one.step, bool(one.digest)) for one in well.adopted] == [(20, True), (10, True)]
    assert put_aside(layout, well) == []
    choice = CheckpointStore(layout).choose(full=True, attempt=3, adopted=well.adopted)
    assert choice.manifest.step == 20 and not choice.rejected


def test_what_an_attempt_before_has_known_is_known_still(layout, misreads):
    known = begin(layout).adopted
    misreads()
    for _ in range(2):  # two claims on that node
        assert begin(layout).adopted == known
    misreads.end()
    assert begin(layout).adopted == known


def test_a_stray_is_one_whoever_has_claimed_meanwhile(layout, misreads):
    begin(layout)  # attempt 2
    begin(layout)  # attempt 3
    make_step(layout, 30, attempt=1)  # of one that was thought dead
    misreads()
    sick = begin(layout)
    assert sick.adopted[0] == AdoptedStep(30, "", by=3)
    misreads.end()
    assert put_aside(layout, sick) == [30]
    assert [one.step for one in begin(layout).adopted] == [20, 10]


def test_a_claim_waits_twice_at_most_for_manifests_that_are_listed_and_gone(layout, monkeypatch):
    """For all of them as it looks for strays, and for all as it names what it adopts."""
    looks = []

    def read(path, read=Path.read_bytes):
        if path.name != MANIFEST:
            return read(path)
        looks.append(parse_step_name(path.parent.name))
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(files, "VIEW_LAG_S", 0.3)
    monkeypatch.setattr(Path, "read_bytes", read)
    assert [(one.step, one.by) for one in adoptable(layout)] == [(20, 1), (10, 1)]
    assert looks.count(10) == 2 and looks[-1] == 10


def test_the_fence_takes_a_name_only_for_the_attempt_that_it_stands_for():
    fence = Fence(4, [AdoptedStep(30, "", by=3), AdoptedStep(20, "d")])
    assert fence.is_inside(3, 30, "any") and fence.is_inside(1, 20, "d")
    assert not fence.is_inside(2, 30, "any") and not fence.is_inside(3, 40, "any")
    assert not fence.is_inside(1, 20, "e")


def test_a_step_that_is_really_damaged_is_no_measure_of_progress(layout):
    record = read_record(layout)
    path = layout.steps / "step-000000000020" / COMMITTED
    path.write_bytes(torn(path.read_bytes()))
    third = begin(layout)
    assert [one.step for one in third.adopted] == [20, 10]
    assert not has_gone_on(layout, record, third.number)
    choice = CheckpointStore(layout).choose(full=False, attempt=2, adopted=third.adopted)
    assert (choice.manifest.step, [one.step for one in choice.rejected]) == (10, [20])
    assert verification.verify_heads(path.parent).manifest is None
