"""What all ranks make of modules that differ between their nodes, right before the first step."""

from types import SimpleNamespace

import pytest

from ftslurm.errors import CodeError
from ftslurm.files import read_json, write_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.modules import Module
from ftslurm.run.record import read_record
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.train import same_code

pytestmark = pytest.mark.torch

SO = "/tmp/ops/ops.abi3.so"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check_same_code of one rank, with what it is told of rank 0 and gathers from the others."""
    layout = RunLayout(tmp_path)
    layout.attempt(1).ranks.mkdir(parents=True)
    record = {"schema_version": 1, "run_id": "r", "spec": to_dict(RunSpec()), "scheduler": "local"}
    write_json(layout.run_json, record)

    def run(mine, *, rank=0, node="n1", told=None, others=()):
        gathered, events, told = [], [], list(told or [])
        env = SimpleNamespace(
            attempt=1, rank=rank, local_rank=0, world_size=2, node=node, layout=layout,
            attempt_layout=layout.attempt(1),
        )  # fmt: skip

        def gather(value, group, *, world_size):
            gathered.append(value)
            return [value, *others] if rank == 0 else []

        def broadcast(value, group, *, world_size):
            return told.pop(0) if rank else value

        monkeypatch.setattr(same_code, "look", lambda attempt: mine)
        monkeypatch.setattr(same_code, "gather_json", gather)
        monkeypatch.setattr(same_code, "broadcast_json", broadcast)
        same_code.check_same_code(
            env, read_record(layout), None, on_event=lambda *event: events.append(event)
        )
        return gathered, events

    run.kept = layout.attempt(1).modules_json
    return run


def test_rank_0_notes_which_nodes_have_builds_of_their_own_and_all_train(check):
    others = [[None, "n3", ["ops"]], [None, "n2", ["ops", "more"]], [None, "n1", []]]
    _, events = check({"ops": Module(SO, "1", 1)}, others=others)
    assert events == [
        ("code_changed",
         {"modules": ["more", "ops"], "num_changed": 2, "nodes": ["n2", "n3"], "num_nodes": 2}),
    ]  # fmt: skip
    assert list(read_json(check.kept)["modules"]) == ["ops"]


def test_a_node_with_another_build_says_so_and_trains(check):
    told = [["n1", {"ops": [SO, "1"]}], [None, None]]
    gathered, _ = check({"ops": Module(SO, "2", 1)}, rank=1, node="n2", told=told)
    assert gathered == [[None, "n2", ["ops"]]]


def test_other_source_on_a_node_ends_all_ranks(check):
    told = [["n1", {"a": ["/venv/a.py", "1"]}], [None, None]]
    gathered, _ = check({"a": Module("/venv/a.py", "2", 1)}, rank=1, node="n2", told=told)
    [[sentence, _, _]] = gathered
    assert "module `a` (`/venv/a.py`) on node n2 is not the one on n1" in sentence
    with pytest.raises(CodeError, match="on node n2 is not the one on n1"):
        check({}, others=[[sentence, "n2", []]])
    assert not check.kept.exists()
