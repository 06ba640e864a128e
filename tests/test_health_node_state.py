"""Whose node it is: every state that three versions of Slurm can print, and the reason we give.

data/health/nodes/states-VERSION.txt has what slurm_node_state_string_complete() of that version's
own library says for each base state with each flag bit, with and without DRAIN.
"""

import re
from pathlib import Path

import pytest
from fakes.slurm_fleet import Fleet, FleetNode
from health_nodes import GPUS
from hypothesis import given
from hypothesis import strategies as st

from ftslurm.errors import FormatError
from ftslurm.health.node_state import (
    Drain,
    NodeState,
    first_drained_at,
    may_drain,
    parse_listing,
    parse_node,
)
from ftslurm.health.reason import parse_reason, reason_of
from ftslurm.health.signals import MLX5, Gpu, Signal
from ftslurm.health.verdict import Verdict

NODES = Path(__file__).parent / "data" / "health" / "nodes"
VERSIONS = ("22.05", "24.11", "26.05")
BOOT = "ab12cd34-1111-2222-3333-444455556666"
NOON = 1_790_000_000.0
OURS = "ftslurm:XID79 gpu3 0000:9b:00 boot=ab12cd34 2026-09-21T14:13:20Z"

# In words that are not the code's: what an administrator or slurmctld is busy with.
BUSY = re.compile(
    r"^(DOWN|UNKNOWN|ERROR|FUTURE|INVALID)|FAIL|MAINT|REBOOT|POWER|INVALID_REG|RESUME|EXTERNAL|\?"
)


def states(version: str) -> list[str]:
    lines = (NODES / f"states-{version}.txt").read_text().splitlines()
    return sorted({line.split()[1] for line in lines})


def read(state: str, reason: str = "", by: str = "root") -> NodeState:
    fleet = Fleet({"n1": FleetNode(state, reason, by, NOON)})
    return parse_node(fleet.text("n1"), "n1")


def verdict(word: str = "drain", code: str = "XID79", **rest: object) -> Verdict:
    given = {"gpu": GPUS[3], "sentence": "it fell", "rule": "xid-79", "source": "test", **rest}
    return Verdict(word, code, **given)


def test_there_are_hundreds_of_states_of_each_version() -> None:
    for version in VERSIONS:
        assert len(states(version)) > 280


@pytest.mark.parametrize("version", VERSIONS)
def test_only_a_node_that_is_nobody_elses_may_be_drained(version: str) -> None:
    for state in states(version):
        is_drained = "DRAIN" in state.split("+")
        may, why = may_drain(read(state), is_worse=True)
        assert may == (not BUSY.search(state) and not is_drained), state
        assert bool(why) != may


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reason_of_another_is_never_replaced_in_any_state(version: str) -> None:
    for state in states(version):
        for reason, by in (
            ("fan, ticket 4711", "root"),
            ("fan, ticket 4711", "alice"),
            ("Epilog error", "slurm"),
            ("NHC: nvidia-smi", "root"),
            ("ftslurm is installed here", "root"),
            (OURS, "alice"),
        ):
            assert may_drain(read(state, reason, by), is_worse=True)[0] is False, (state, reason)


@pytest.mark.parametrize("version", VERSIONS)
def test_our_own_reason_gives_way_to_a_worse_one_where_nobody_else_is_busy(version: str) -> None:
    for state in states(version):
        is_open, is_drained = not BUSY.search(state), "DRAIN" in state.split("+")
        assert may_drain(read(state, OURS), is_worse=True)[0] == is_open, state
        assert may_drain(read(state, OURS), is_worse=False)[0] == (is_open and not is_drained)


@pytest.mark.parametrize("flag", ["REBORN", "drain", "IDLE", "", "COMPLETING^"])
def test_a_flag_that_is_not_known_is_somebody_elses_business(flag: str) -> None:
    assert may_drain(read(f"IDLE+{flag}"), is_worse=True)[0] is False


def test_a_star_is_a_node_that_does_not_answer() -> None:
    assert read("IDLE*+DRAIN").flags == {"NOT_RESPONDING", "DRAIN"}
    assert read("DOWN*").base == "DOWN"


def test_who_gave_a_reason_and_when_is_read_behind_its_first_line() -> None:
    state = read("IDLE+DRAIN", "one [x@y] [root@then]\n       two", "alice")
    text = Fleet({"n1": FleetNode("IDLE+DRAIN", OURS, "root", NOON)}).text("n1")
    whole = parse_node(text, "n1")
    assert (whole.reason, whole.reason_by, whole.reason_at) == (OURS, "root", NOON)
    assert whole.is_ours
    assert not state.is_ours
    assert "one" in state.reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "slurm_load_node error",
        "NodeName=n2 Arch=x\n   State=IDLE X=1\n",
        "NodeName=n1 Arch=x\n   Comment=State=IDLE\n",
        "NodeName=n1 A=x\n   State=IDLE X=1\n\nNodeName=n2 A=x\n   State=IDLE X=1\n",
        "NodeName=n1 A=x\n   State=IDLE X=1\n   State=DOWN X=1\n",
    ],
)
def test_a_text_that_is_not_about_this_one_node_is_no_state(text: str) -> None:
    with pytest.raises(FormatError):
        parse_node(text, "n1")


@given(
    st.text(alphabet=st.sampled_from("NodeState=IDLE+DRAIN Reason[@]\n n1ftslurm:X"), max_size=200)
)
def test_no_text_makes_the_parsers_fail_otherwise(text: str) -> None:
    assert parse_listing(text).gpu_nodes >= 0
    try:
        state = parse_node(text, "n1")
    except FormatError:
        return
    assert isinstance(may_drain(state, is_worse=True)[0], bool)


def test_the_code_is_within_the_20_characters_that_sinfo_shows() -> None:
    reason = reason_of(verdict(code="NVLINK-DOWN"), boot_id=BOOT, at=NOON)
    assert reason == "ftslurm:NVLINK-DOWN gpu3 0000:61:00 boot=ab12cd34 2026-09-21T14:13:20Z"
    assert "NVLINK-DOWN" in reason[:20]
    assert parse_reason(reason).code == "NVLINK-DOWN"
    assert parse_reason(reason).since is None


def test_a_reason_names_its_place_in_plain_characters() -> None:
    port = verdict(gpu=None, signals=(Signal(MLX5, "health", where="mlx5_0/1 $(reboot)\n|x"),))
    lost = verdict(gpu=Gpu(None, "", "0000:9b:00"))
    assert reason_of(port, boot_id=BOOT, at=NOON).split()[1] == "mlx5_0/1___reboot___x"
    assert reason_of(lost, boot_id=BOOT, at=NOON).split()[:2] == ["ftslurm:XID79", "0000:9b:00"]
    assert reason_of(verdict(gpu=None), boot_id=BOOT, at=NOON).split()[1] == "boot=ab12cd34"


def test_a_replaced_reason_keeps_when_the_node_was_drained_first() -> None:
    reason = reason_of(verdict(), boot_id=BOOT, at=NOON + 500, since=NOON)
    assert parse_reason(reason).since == NOON
    assert first_drained_at(read("IDLE+DRAIN", reason)) == NOON
    fleet = Fleet({"n1": FleetNode("IDLE+DRAIN", reason, "root", NOON + 500)})
    assert parse_listing(listing(fleet)).drains == (Drain("n1", "XID79", NOON, reason),)


@pytest.mark.parametrize("text", ["ftslurm:", "ftslurm: XID79", "ftslurm:xid79", "ftslurmX:A", ""])
def test_what_is_not_of_our_form_is_not_ours(text: str) -> None:
    assert parse_reason(text) is None


def listing(fleet: Fleet) -> str:
    return fleet.run(["sinfo"], 1.0).stdout.decode()


def test_the_listing_counts_gpu_nodes_once_and_takes_only_what_root_or_slurm_gave() -> None:
    fleet = Fleet(
        {
            "n1": FleetNode("IDLE+DRAIN", OURS, "root", NOON),
            "n2": FleetNode("IDLE+DRAIN", OURS, "alice", NOON),
            "n3": FleetNode("IDLE+DRAIN", "fan | ftslurm:XID79", "root", NOON),
            "n4": FleetNode(),
        }
    )
    found = parse_listing(listing(fleet) + "n9|x\nn8|2026-01-01T00:00:00|root|(null)|none\n")
    assert [drain.node for drain in found.drains] == ["n1"]
    assert found.gpu_nodes == 4


# shown-VERSION.txt: what scontrol and sinfo of a real cluster of that version said (TZ=UTC) of
# nodes that had been brought into each of these states.
IN_SERVICE = {"idle", "allocated", "mixed", "reserved", "not-responding",
              "note-without-drain"}  # fmt: skip
OF_OURS = {"drained-ours", "draining-ours"}


def shown(version: str) -> dict[str, tuple[str, str]]:
    text = (NODES / f"shown-{version}.txt").read_text()
    blocks = [block.partition("\n") for block in text.split("=== ")[1:]]
    return {name: tuple(rest.split("--- sinfo\n")) for name, _, rest in blocks}


@pytest.mark.parametrize("version", VERSIONS)
def test_real_nodes_are_read_and_only_those_in_service_or_ours_may_be_touched(version: str) -> None:
    found = shown(version)
    assert len(found) >= 25
    assert {"maintenance-drained", "down-not-responding-drained", "fail"} <= set(found)
    for name, (text, _) in found.items():
        node = re.search(r"NodeName=(\S+)", text)[1]
        state = parse_node(text, node)
        assert may_drain(state, is_worse=True)[0] == (name in IN_SERVICE | OF_OURS), name
        assert may_drain(state, is_worse=False)[0] == (name in IN_SERVICE), name
        assert state.is_ours == (name in OF_OURS), name
        is_drained = "drain" in name.replace("without-drain", "") or name == "reboot-asap"
        assert state.is_drained == is_drained, name


@pytest.mark.parametrize("version", VERSIONS)
def test_who_drained_a_real_node_and_when_is_told_alike_by_scontrol_and_sinfo(version: str) -> None:
    for name in OF_OURS:
        text, rows = shown(version)[name]
        state = parse_node(text, re.search(r"NodeName=(\S+)", text)[1])
        (drain,) = parse_listing(rows).drains
        assert (drain.at, drain.reason) == (state.reason_at, state.reason)
        assert (state.reason_by, drain.code) == ("root", "XID79")
        assert parse_listing(rows).gpu_nodes == 1
    text, rows = shown(version)["draining-admin-two-lines"]
    state = parse_node(text, re.search(r"NodeName=(\S+)", text)[1])
    assert (state.reason, state.reason_by) == ("fan [left], ticket 4711 @ noon", "root")
    assert parse_listing(rows).drains == ()
