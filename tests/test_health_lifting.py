"""How a drain of ours ends: lifted once all is there again, or by a person, who may insist."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.slurm_fleet import LATE, NOW, FleetNode
from health_acting import ADMIN, DOWN, HUNG, PORT, UP, Node, reading_of, verdict
from health_nodes import signal
from test_health_node_state import VERSIONS, states

from ftslurm.health.drain import Action
from ftslurm.health.verdict import Verdict


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.state.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_what_an_administrator_has_set_is_never_lifted_in_any_state(
    node: Node, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)  # thousands of writes
    node.act(PORT)
    for _ in range(2):
        assert node.look_again().word == "already"
    ours = (node.mine.reason, node.mine.at)
    kept = node.state.read_json("drain.json")
    for state in states(version):
        for reason, at in (ours, (ADMIN, NOW)):
            node.fleet.nodes["n1"] = FleetNode(state, reason, "root", at)
            node.state.write_json("drain.json", kept)
            word = node.look_again().word
            if node.fleet.updates():
                assert word == "resumed"
                assert (reason, at) == ours
                assert not {"FAIL", "MAINTENANCE", "DOWN"} & set(state.split("+"))
            else:
                assert node.mine == FleetNode(state, reason, "root", at)


def test_a_cause_that_is_gone_is_lifted_after_three_looks_and_two_calls(node: Node) -> None:
    node.act(HUNG)
    node.boot_id = "b002-0000"
    words = []
    for _ in range(3):
        action = node.look_again()
        words.append((action.word, action.calls, action.exit_code))
    assert words == [("already", 0, 0), ("already", 0, 0), ("resumed", 2, 0)]
    assert node.mine == FleetNode("IDLE", "", "root", NOW)
    assert node.look_again() == Action("none")


def test_other_contexts_lift_nothing(node: Node) -> None:
    node.act(HUNG)
    node.boot_id = "b002-0000"
    for _ in range(5):
        node.fleet.now += 100
        node.act(context="prolog")
        node.act(context="epilog")
    assert node.fleet.drained() == ["n1"]


def test_a_node_is_lifted_twice_a_week_and_then_waits_for_a_person(node: Node) -> None:
    ends = []
    for _ in range(3):
        node.look_again(PORT, after_s=86400)
        for _ in range(4):
            last = node.look_again()
        ends.append(node.mine.is_drained)
    assert ends == [False, False, True]
    assert "within a week" in last.sentence


def test_a_node_that_a_person_has_lifted_is_drained_again_while_the_fault_lasts(node: Node) -> None:
    node.act(verdict("drain", "REMAP-FAIL", sticky=True))
    node.fleet.nodes["n1"] = FleetNode()
    assert node.look_again(verdict("drain", "REMAP-FAIL", sticky=True)).word == "drained"


def drains_after_a_person(node: Node, found: Verdict) -> list[str]:
    """The word of the look after each time that a person has lifted it."""
    node.look_again(found)
    words = []
    for _ in range(3):
        node.fleet.nodes["n1"] = FleetNode()
        words.append(node.look_again(found).word)
    return words


def test_a_person_who_lifts_a_port_twice_is_believed_until_it_was_up_again(node: Node) -> None:
    assert drains_after_a_person(node, PORT) == ["drained", "shadow", "shadow"]
    told = node.look_again(PORT)
    assert "twice" in told.sentence
    other = replace(PORT, signals=(replace(DOWN, where="mlx5_1/1"),))
    assert node.look_again(PORT, other).word == "drained"
    node.fleet.nodes["n1"] = FleetNode()
    node.look_again(verdict("unknown"))
    node.look_again()
    assert node.look_again(PORT).word == "drained"


def test_a_person_does_not_talk_a_fault_away_that_needs_no_comparison(node: Node) -> None:
    sticky = verdict("drain", "REMAP-FAIL", rule="remap-failure", sticky=True)
    assert drains_after_a_person(node, sticky) == ["drained"] * 3


def test_a_drain_that_never_stood_was_lifted_by_nobody(node: Node) -> None:
    node.fleet.broken["update"] = LATE
    for _ in range(3):
        assert node.look_again(PORT).word == "failed"
    node.fleet.broken.clear()
    assert node.look_again(PORT).word == "drained"


@pytest.mark.parametrize(
    ("found", "lasting"),
    [(PORT, reading_of("h100", DOWN)), (PORT, reading_of("h100")),
     (verdict(rule="pcie-width", needs="reboot", signals=(signal("pcie_width", 8),)),
      reading_of("h100", UP, signal("pcie_width", 8))),
     (verdict(), reading_of("h100", signal("gpu_count_pci", 7, None),
                            signal("gpu_count_nvml", 7, None))),
     (verdict(), reading_of("none")), (HUNG, None)],
)  # fmt: skip
def test_after_a_reboot_all_has_to_be_read_that_was_there_before(
    node: Node, found, lasting
) -> None:
    node.act(found)
    node.boot_id = "b002-0000"
    for _ in range(5):
        told = node.look_again(reading=lasting)
    assert node.fleet.drained() == ["n1"]
    assert "was not read" in told.sentence or " and is " in told.sentence
    assert [node.look_again().word for _ in range(3)] == ["already", "already", "resumed"]


def test_what_nobody_knows_the_state_of_before_waits_for_a_person(node: Node) -> None:
    node.act(PORT, baseline=None)
    node.boot_id = "b002-0000"
    for _ in range(5):
        told = node.look_again()
    assert "a person has to look" in told.sentence
    assert node.fleet.drained() == ["n1"]
