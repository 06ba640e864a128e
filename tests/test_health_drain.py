"""What a probe does to its node: which calls, in which order, what is left when one fails."""

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.slurm_fleet import AWAY, LATE, NOW, FleetNode, ended
from health_acting import ADMIN, HUNG, SOFT, Node, verdict
from test_health_node_state import VERSIONS, states

from ftslurm.health.drain import Action
from ftslurm.health.settings import HealthSettings

CONTEXTS = ("prolog", "epilog", "periodic")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.state.close()


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("found", [(), (verdict("warn"),), (verdict("unknown"),)])
def test_a_healthy_node_is_not_spoken_of_with_slurm(node: Node, context: str, found) -> None:
    assert node.act(*found, context=context) == Action("none")
    assert node.fleet.calls == []


@pytest.mark.parametrize(
    ("word", "context", "code"),
    [("drain", "prolog", 1), ("reset", "prolog", 0), ("after", "prolog", 0),
     ("drain", "epilog", 1), ("reset", "epilog", 1), ("after", "epilog", 1),
     ("drain", "periodic", 0), ("reset", "periodic", 0), ("after", "periodic", 0)],
)  # fmt: skip
def test_a_sick_node_is_drained_in_three_calls(node: Node, word, context, code) -> None:
    action = node.act(verdict("warn", "COOLING"), verdict(word), context=context)
    assert (action.word, action.exit_code, action.calls) == ("drained", code, 3)
    assert node.kinds == ["show", "update", "sinfo"]
    assert node.mine.reason == action.reason
    assert action.reason == "ftslurm:XID79 gpu3 0000:61:00 boot=b0010000 2027-01-15T08:00:00Z"
    assert node.slept == [1.6], "past the second of slurmctld's stamp"
    assert node.fleet.drained() == ["n1"]


def test_the_worst_verdict_gives_the_reason(node: Node) -> None:
    sticky = verdict("drain", "REMAP-FAIL", sticky=True)
    assert "REMAP-FAIL" in node.act(verdict("after", "TREND"), verdict(), sticky).reason


def test_each_call_has_its_seconds(node: Node) -> None:
    given: list[float] = []

    def run(argv, deadline_s):
        given.append(deadline_s)
        return node.fleet.run(argv, deadline_s)

    node.act(verdict(), site=HealthSettings(slurm_call_s=2.5), runner=run)
    assert given == [2.5] * 3


CUT = replace(ended(), is_cut=True)


@pytest.mark.parametrize("broken", [LATE, AWAY, ended(None), CUT, ended(0, stdout="gibberish")])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("call", ["show", "update"])
def test_where_slurm_cannot_be_asked_nothing_is_drained_behind_the_breakers_back(
    node: Node, broken, context: str, call: str
) -> None:
    """A slow slurmctld is slow for all nodes: an exit code of 1 would take them all."""
    if call == "update" and broken.code == 0:
        return
    node.fleet.broken[call] = broken
    for found in (verdict(), SOFT):
        action = node.act(found, context=context)
        assert (action.word, action.exit_code) == ("failed", 0)
        assert action.calls == (1 if call == "show" else 2)
    assert node.fleet.drained() == []


def test_a_drain_that_fails_is_tried_again(node: Node) -> None:
    node.fleet.broken["update"] = AWAY
    action = node.act(verdict())
    assert (action.word, action.exit_code, action.calls) == ("failed", 0, 2)
    assert "Unable to contact" in action.sentence
    node.fleet.broken.clear()
    assert node.act(verdict()).word == "drained"


def test_a_count_that_fails_is_made_up_for_by_the_next_probe(node: Node) -> None:
    node.fleet.broken["sinfo"] = LATE
    assert node.act(verdict()).exit_code == 1
    node.fleet.broken.clear()
    assert node.look_again(verdict("warn")).word == "drained"
    assert node.kinds == ["sinfo"]
    node.look_again(verdict("warn"))
    assert node.kinds == []


def test_what_is_not_counted_yet_holds_up_a_job_for_an_xid_of_the_hardware_alone(
    node: Node,
) -> None:
    node.fleet.broken["sinfo"] = LATE
    soft = node.act(SOFT, context="prolog")
    assert (soft.word, soft.exit_code, node.fleet.drained()) == ("drained", 0, ["n1"])
    assert node.act(SOFT, context="epilog").exit_code == 0
    worse = verdict(code="DRIVER", rule="driver", sticky=True)
    assert node.act(worse, context="epilog").exit_code == 0
    assert node.act(verdict(), context="prolog").exit_code == 1


def test_a_drain_that_another_has_taken_back_meanwhile_is_not_renewed_by_the_exit_code(
    node: Node,
) -> None:
    node.fleet.before = lambda kind: (
        node.fleet.nodes.update(n1=FleetNode()) if kind == "sinfo" else None
    )
    action = node.act(verdict())
    assert "sinfo does not show it" in action.sentence
    assert action.exit_code == 0


def test_a_late_count_takes_the_drain_back_where_it_finds_its_place_taken(node: Node) -> None:
    node.fleet.broken["sinfo"] = LATE
    node.act(verdict(code="DRIVER"))
    node.fleet.broken.clear()
    for name in ("n2", "n3"):
        node.fleet.nodes[name] = FleetNode("IDLE+DRAIN", "ftslurm:DRIVER boot=1 x", "root", NOW - 5)
    assert node.look_again().word == "undone"
    assert node.mine == FleetNode("IDLE", "", "root", NOW)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_what_an_administrator_has_set_is_left_alone_in_every_state(
    node: Node, version: str, context: str
) -> None:
    for state in states(version):
        for reason in (ADMIN, "Prolog error"):
            node.fleet.nodes["n1"] = FleetNode(state, reason, "root", NOW)
            action = node.act(SOFT, context=context)
            assert (action.word, action.calls) == ("foreign", 1), state
            assert node.mine == FleetNode(state, reason, "root", NOW)
            is_drained = "DRAIN" in state.split("+")
            assert action.exit_code == (is_drained and context != "periodic"), state


IN_SERVICE = {"BLOCKED", "CLOUD", "COMPLETING", "DYNAMIC_FUTURE", "DYNAMIC_NORM", "NOT_RESPONDING",
              "PERFCTRS", "PLANNED", "RESERVED"}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_note_on_a_node_in_service_keeps_no_job_on_dead_hardware_and_stays(
    node: Node, version: str, context: str
) -> None:
    """By the exit code Slurm drains it, and keeps the note."""
    for state in states(version):
        base, *flags = state.replace("*", "+NOT_RESPONDING").split("+")
        node.fleet.nodes["n1"] = FleetNode(state, "watch fan", "root", NOW)
        action = node.act(verdict(), context=context)
        assert action.word == "foreign", state
        assert node.fleet.updates() == []
        is_drained = "DRAIN" in flags
        is_in_service = base in ("IDLE", "ALLOCATED", "MIXED") and set(flags) <= IN_SERVICE
        assert action.exit_code == ((is_drained or is_in_service) and context != "periodic"), state


def test_a_noted_node_is_not_left_to_slurm_beyond_what_the_breaker_lets_stay(node: Node) -> None:
    node.fleet.nodes["n1"] = FleetNode("IDLE", "watch fan", "root", NOW)
    for name in ("n2", "n3"):
        node.fleet.nodes[name] = FleetNode("IDLE+DRAIN", "ftslurm:XID48 boot=1 x", "root", NOW - 5)
    action = node.act(verdict())
    assert (action.word, action.exit_code) == ("foreign", 0)
    node.fleet.broken["sinfo"] = LATE
    assert (node.act(verdict()).word, node.act(verdict()).exit_code) == ("failed", 0)


def test_an_exit_code_never_makes_slurm_drain_a_node_that_is_in_other_hands(node: Node) -> None:
    for state in ("MIXED+MAINTENANCE", "DOWN", "IDLE+POWERING_UP", "IDLE+NEWFLAG"):
        node.fleet.nodes["n1"] = FleetNode(state)
        for context in CONTEXTS:
            action = node.act(verdict(), context=context)
            assert (action.word, action.exit_code) == ("foreign", 0), state
            assert node.mine == FleetNode(state)


def test_a_worse_verdict_replaces_our_milder_reason_and_a_milder_one_does_not(node: Node) -> None:
    node.act(verdict("after", "PCIE-WIDTH"))
    node.fleet.now += 100
    worse = node.act(verdict("drain", "XID79"))
    assert (worse.word, worse.calls, worse.exit_code) == ("drained", 2, 1)
    assert worse.reason.endswith("2027-01-15T08:01:40Z since=2027-01-15T08:00:00Z")
    assert node.mine.reason == worse.reason
    milder = node.act(verdict("reset", "XID62"))
    assert (milder.word, milder.calls, milder.exit_code) == ("already", 1, 1)
    assert node.mine.reason == worse.reason
    known = [cause["code"] for cause in node.state.read_json("drain.json")["drain"]["causes"]]
    assert known == ["PCIE-WIDTH", "XID79", "XID62"]


def test_a_reason_that_could_not_be_changed_is_still_known_as_ours(node: Node) -> None:
    mild = node.act(verdict("after", "PCIE-WIDTH"))
    node.fleet.broken["update"] = LATE
    assert node.act(verdict()).word == "failed"
    node.fleet.broken.clear()
    again = node.act(verdict())
    assert (again.word, again.reason) == ("already", mild.reason)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kill", ["update", "sinfo", "second update"])
@pytest.mark.parametrize("is_served", [False, True])
def test_a_probe_that_is_killed_is_finished_by_the_next(node: Node, kill, is_served) -> None:
    """The breaker lets none stay here, so whatever was begun has to be gone in the end."""
    site = HealthSettings(breaker_nodes=0, breaker_share=0.0)
    seen: list[str] = []

    def run(argv, deadline_s):
        kind = "sinfo" if argv[0] == "sinfo" else argv[1]
        seen.append("second update" if kind == "update" and "update" in seen else kind)
        if seen[-1] == kill and not is_served:
            raise Killed
        done = node.fleet.run(argv, deadline_s)
        if seen[-1] == kill:
            raise Killed
        return done

    with pytest.raises(Killed):
        node.act(SOFT, site=site, runner=run)
    for _ in range(2):
        node.look_again(SOFT, site=site)
    assert node.fleet.drained() == []
    assert node.mine.reason == ""
    assert node.act(SOFT, site=site).word == "shadow"
    assert node.state.read_json("drain.json")["drain"] is None


def test_a_drain_that_could_not_be_taken_back_is_by_the_next_probe(node: Node) -> None:
    site = HealthSettings(breaker_nodes=0, breaker_share=0.0)
    node.fleet.before = lambda kind: (
        node.fleet.broken.update({"update": LATE}) if kind == "sinfo" else None
    )
    action = node.act(verdict(), site=site, context="prolog")
    assert (action.word, action.exit_code, action.calls) == ("failed", 0, 4)
    assert node.fleet.drained() == ["n1"]
    node.fleet.before = None
    node.fleet.broken.clear()
    assert node.look_again(site=site).word == "undone"
    assert node.fleet.drained() == []


OTHER = "ftslurm:IB-DOWN mlx5_0/1 boot=b0010000 2027-01-15T08:00:00Z"


@pytest.mark.parametrize("reason", [ADMIN, OTHER])
def test_who_has_written_another_reason_before_the_count_is_left_alone(node: Node, reason) -> None:
    """An administrator, or another probe of this node that runs beside this one."""
    site = HealthSettings(breaker_nodes=0, breaker_share=0.0)
    theirs = FleetNode("IDLE+DRAIN", reason, "root", NOW)
    node.fleet.before = lambda kind: (
        node.fleet.nodes.update(n1=replace(theirs)) if kind == "sinfo" else None
    )
    assert node.act(verdict(), site=site).word == "drained"
    assert node.mine == theirs
    node.fleet.before = None
    node.look_again(site=site)
    assert node.mine == theirs


def test_shadow_mode_and_a_rule_in_shadow_only_report(node: Node) -> None:
    whole = node.act(verdict(), site=HealthSettings(mode="shadow"))
    one = node.act(verdict(), site=HealthSettings(shadow=["rule-XID79"]))
    assert [action.word for action in (whole, one)] == ["shadow"] * 2
    assert whole.exit_code == one.exit_code == whole.calls == one.calls == 0
    assert "XID79" in whole.sentence
    assert "health.mode is shadow" in whole.sentence
    other = node.act(verdict(), verdict(code="XID48"), site=HealthSettings(shadow=["rule-XID79"]))
    assert "XID48" in other.reason


def test_a_job_that_ends_on_a_node_drained_meanwhile_is_told_so(node: Node) -> None:
    node.act(verdict(), context="periodic")
    ending, beginning = node.act(), node.act(context="prolog")
    assert [one.word for one in (ending, beginning)] == ["already"] * 2
    assert [one.exit_code for one in (ending, beginning)] == [1, 1]
    assert ending.calls == 1
    node.fleet.nodes["n1"] = FleetNode()
    assert (node.act().word, node.act().word) == ("foreign", "none")
    assert node.kinds == [], "what a person has ended is forgotten"


def test_a_full_disk_does_not_keep_a_sick_node_in_service(node: Node, monkeypatch) -> None:
    def full(name: str, record: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node.state, "write_json", full)
    action = node.act(verdict())
    assert (action.word, action.exit_code) == ("drained", 1)
    assert "No space left" in action.sentence
    monkeypatch.undo()
    for _ in range(5):
        node.look_again()
    assert node.fleet.drained() == ["n1"], "not remembered, so not lifted"


def test_a_torn_memory_is_said_and_lifts_nothing(node: Node) -> None:
    node.act(HUNG)
    (node.state.path / "drain.json").write_text('{"schema_version": 1, "drain"')
    node.boot_id = "b002-0000"
    assert [node.look_again().word for _ in range(5)] == ["none"] * 5
    assert node.fleet.drained() == ["n1"]
    told = node.act(HUNG)
    assert told.word == "already"
    assert "drain.json" in told.sentence
