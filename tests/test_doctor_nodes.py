"""Nodes that agree get no complaint, each that stands out is named, nothing is left of a trial."""

import copy
import os
import re
import sys

import pytest

from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN
from ftslurm.doctor.machine import isa_of, machine
from ftslurm.doctor.node_facts import Clock, NodeFacts, Trialled
from ftslurm.doctor.node_lines import judge
from ftslurm.doctor.rank_start import count_calls
from ftslurm.doctor.spoken import Pieces, answer_lines
from ftslurm.doctor.watch import Watch
from ftslurm.scheduler.on_nodes import PIECE, on_nodes_argv

SEEN_S = {"listed": 0.1, "found": 0.1, "grown": 0.1, "read": 0.0, "replaced": 0.0}


def node(task):
    """One of three nodes that are alike and see each other at once."""
    line = {"name": "host.memory", "state": OK, "seen": "500 GB of memory free", "todo": ""}
    calls = {"stat": 9000, "open": 1500, "list": 200}
    return NodeFacts(
        task,
        hello={
            "node": f"n{task + 1}", "sees_folder": True, "mount": ["lustre", "mds:/scratch"],
            "isa": "x86-64-v4 amx_bf16", "gpus": {"NVIDIA H100 80GB HBM3": 8}, "driver": "570.1",
            "python": "3.11.2", "interfaces": {"ib0": "10.0.0.1", "eth0": "10.1.0.1"},
            "route": "eth0", "lines": [line],
        },
        missed={"there": [], "sizes": {}, "texts": {}},
        claims={"files": [task, task + 3], "folders": [task, task + 3]},
        seen={"seen_s": SEEN_S, "strange": [], "waits_for": [], "looked_s": 1.0},
        clock=Clock(0.001 * task, 0.001),
        rates={place: {"rate": 3e9} for place in ("/dev/shm", "/tmp", "runs")},
        rank_start={"found": True, "calls": calls, "libraries": 60, "took_s": 5.0,
                    "file_system": "xfs"} if task == 0 else None,
    )  # fmt: skip


def lines_of(change=lambda nodes: None, *, made=True):
    nodes = [copy.deepcopy(node(task)) for task in range(3)]
    change(nodes)
    return {one.name: one for one in judge(Trialled(nodes, "torch", made))}


def test_nodes_that_are_alike_and_see_each_other_get_no_complaint():
    found = lines_of()
    assert [one for one in found.values() if one.state != OK or one.todo] == []
    assert "8 x NVIDIA H100 80GB HBM3 on all 3 nodes" in found["across.gpus"].seen


def late(key, seconds):
    def change(nodes):
        nodes[1].seen["seen_s"] = {**SEEN_S, key: seconds}

    return change


def unseen(key):
    def change(nodes):
        nodes[2].seen["seen_s"] = {name: 0.1 for name in SEEN_S if name != key}
        nodes[2].seen["looked_s"] = 60.0

    return change


def hello(**values):
    return lambda nodes: nodes[1].hello.update(values)


def own(name, value):
    return lambda nodes: setattr(nodes[1], name, value)


def slow(place, rate):
    return lambda nodes: nodes[1].rates.update({place: {"rate": rate}})


def of_rank_start(**values):
    return lambda nodes: nodes[0].rank_start.update(values)


BROKEN = [
    ("across.shared", FAIL, hello(sees_folder=False), "n2 does not see"),
    ("across.shared", WARN, hello(mount=["nfs4", "s:/x"]), "not the same mount"),
    ("across.new_file", WARN, late("found", 30.2), "30.20 s at most (n2)"),
    ("across.new_file", WARN, unseen("found"), "not in sight after 60 s on n3"),
    ("across.listing", WARN, late("listed", 12.0), "12.00 s"),
    ("across.listing", FAIL, unseen("listed"), "on n3"),
    ("across.attributes", WARN, late("grown", 29.0), "29.00 s"),
    ("across.reread", WARN, late("replaced", 11.0), "11.00 s"),
    ("across.reread", FAIL, unseen("read"), "n3 still reads the old bytes"),
    (
        "across.reread",
        WARN,
        lambda nodes: nodes[1].seen.update(strange=["replaced: Stale file handle"]),
        "n2: replaced: Stale",
    ),
    ("across.claims", FAIL, own("claims", {"files": [1, 4, 5], "folders": [1, 4]}), "1 of 6"),
    ("across.claims", FAIL, own("claims", {"files": [4], "folders": [1, 4]}), "by nobody"),
    ("across.claims", FAIL, own("claims", {"error": "Input/output error", "errno": 5}), "n2: "),
    ("across.clock", WARN, own("clock", Clock(7.0, 0.01)), "n2 is ahead of n1"),
    ("across.write_memory", WARN, slow("/dev/shm", 1.2e9), "1.20 GB/s on n2"),
    ("across.write_runs", WARN, slow("runs", 0.05e9), "0.05 GB/s on n2"),
    (
        "across.write_local",
        WARN,
        lambda nodes: nodes[1].rates.update({"/tmp": {"error": "No space left on device"}}),
        "/tmp on n2",
    ),
    ("across.cpu", WARN, hello(isa="x86-64-v3"), "x86-64-v3 on n2; x86-64-v4 amx_bf16 on n1, n3"),
    ("across.gpus", WARN, hello(gpus={"NVIDIA H100 80GB HBM3": 7}), "7 x NVIDIA"),
    ("across.gpus", WARN, hello(gpus={}), "none on n2"),
    ("across.driver", WARN, hello(driver="550.2"), "550.2 on n2"),
    ("across.python", WARN, hello(python="3.9.1"), "3.9.1 on n2"),
    ("across.interface", WARN, hello(interfaces={"enp1": "10.0.0.2"}), "n2: enp1"),
    ("across.interface", WARN, hello(route="ib0"), "eth0, ib0"),
    ("across.rank_start", WARN, of_rank_start(file_system="nfs4"), "10760 times or more"),
    (
        "host.memory",
        FAIL,
        hello(lines=[{"name": "host.memory", "state": FAIL, "seen": "4 GB", "todo": "have more"}]),
        "n2: 4 GB",
    ),
]


MANY = [
    lambda one: one.hello.update(sees_folder=False),
    lambda one: one.hello.update(mount=["ext4", f"/dev/{one.node}"]),
    lambda one: one.hello.update(gpus={one.node: 8}, interfaces={one.node: "10.0.0.1"}),
    lambda one: one.seen.update(seen_s={}, strange=[f"replaced: Stale {one.node}"]),
    lambda one: one.claims.update(error="No space left on device", errno=28),
    lambda one: one.seen.clear(),
    lambda one: None,
]


@pytest.mark.parametrize("change", MANY)
def test_of_hundreds_of_nodes_a_line_names_a_few_and_their_number(change):
    nodes = [copy.deepcopy(node(task)) for task in range(512)]
    for one in nodes[1:]:
        change(one)
    lines = judge(Trialled(nodes, "torch", made=True))
    for line in lines:
        assert len(line.seen) < 500, line
    assert any(re.search(r"and 50\d more|512 nodes", line.seen) for line in lines)


@pytest.mark.parametrize(("name", "state", "change", "word"), BROKEN)
def test_what_is_broken_on_one_node_is_named_and_nothing_else_is(name, state, change, word):
    found = lines_of(change)
    assert (found[name].state, word in found[name].seen) == (state, True), found[name]
    assert found[name].todo
    assert [line.name for line in found.values() if line.state not in (OK, SKIPPED)] == [name]


@pytest.mark.parametrize(
    "change",
    [
        late("found", 3.0),
        own("clock", Clock(3.0, 1.5)),
        slow("/tmp", 0.3e9),
        of_rank_start(file_system="nfs4", calls={"stat": 100, "open": 100, "list": 2}),
        hello(interfaces={"ib0": "10.0.0.2", "docker0": "172.17.0.1", "eth0": "10.1.0.2"}),
    ],
)
def test_what_is_unusual_and_harmless_is_no_false_alarm(change):
    assert [line for line in lines_of(change).values() if line.state != OK] == []


@pytest.mark.parametrize(("rate", "is_told"), [(1.9e9, True), (2.1e9, False)])
def test_a_local_tier_below_two_gigabytes_a_second_is_told_as_such(rate, is_told):
    line = lines_of(slow("/tmp", rate))["across.write_local"]
    assert line.state == OK, "no save goes there"
    assert ("a local tier should take 2" in line.seen) is is_told


@pytest.mark.parametrize("field", ["claims", "seen", "clock"])
def test_an_answer_that_does_not_come_in_time_is_said_and_nothing_is_made_of_it(field):
    found = lines_of(own(field, {} if field != "clock" else None))
    assert [line.name for line in found.values() if line.state != OK] == ["across.answers"]
    assert "n2" in found["across.answers"].seen and found["across.answers"].state == WARN


def test_what_no_node_could_tell_is_not_claimed():
    def silent(nodes):
        for one in nodes:
            one.clock, one.rates, one.claims = None, {}, {}
        nodes[0].rank_start = {"error": "it printed nothing"}

    found = lines_of(silent)
    for name in ("clock", "claims", "write_memory", "write_runs", "rank_start"):
        assert found[f"across.{name}"].state == SKIPPED
    alone = judge(Trialled([node(0)], "torch", True))
    assert [one.state for one in alone if one.name == "across.new_file"] == [SKIPPED]
    assert lines_of(made=False)["across.shared"].state == FAIL
    absent = lines_of(of_rank_start(found=False))
    assert "not in the interpreter" in absent["across.rank_start"].seen


def test_a_new_name_that_this_node_is_late_to_see_is_timed(tmp_path, monkeypatch):
    (tmp_path / "new").write_text("1")
    (tmp_path / "grows").write_text("12345")
    (tmp_path / "log").write_text("12345")
    (tmp_path / "pointer").write_text("changed")
    now = [100.0]
    monkeypatch.setattr(os.path, "lexists", lambda path: now[0] > 130.0)
    watch = Watch(tmp_path, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr("threading.Thread.start", lambda thread: None)
    watch.begin(
        {
            "new": "new",
            "longer": ["grows", 5],
            "journal": ["log", 5],
            "replaced": ["pointer", "changed"],
        }
    )
    watch.look()
    seen = watch.seen()
    assert seen["seen_s"]["listed"] == seen["seen_s"]["replaced"] == 0.0
    assert 30.0 < seen["seen_s"]["found"] < 30.5
    assert not seen["waits_for"]


def test_a_watch_ends_and_says_what_it_still_waits_for(tmp_path):
    now = [0.0]
    watch = Watch(tmp_path, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    watch.begin(
        {
            "new": "new",
            "longer": ["grows", 5],
            "journal": ["log", 5],
            "replaced": ["pointer", "changed"],
        }
    )
    watch.look()
    seen = watch.seen()
    assert "listed" in seen["waits_for"] and seen["looked_s"] >= 60.0
    assert any("grown: No such file" in word for word in seen["strange"])


def test_answers_of_many_tasks_are_put_together_from_mixed_pieces_and_noise():
    facts = [{"task": task, "text": " spaced é " * 400} for task in range(3)]
    rows = [answer_lines(task, 7, facts[task]) for task in range(3)]
    assert all(len(line.encode()) < 1024 for lines in rows for line in lines)
    assert len(rows[0]) > 3 and PIECE < 1000
    mixed = [line for lines in zip(*rows) for line in lines]
    pieces, found = Pieces(), []
    for line in ["Welcome to the cluster", *mixed, "ftslurm-doctor 0 7 0 1 {torn"]:
        answer = pieces.add(line + "\n")
        found += [answer] if answer else []
    assert [(one.task, one.order, one.facts) for one in found] == [
        (task, 7, facts[task]) for task in range(3)
    ]


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3", "x86-64-v2"),
        ("cx16 popcnt", "x86-64"),
        (
            "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe"
            " amx_tile",
            "x86-64-v3 amx_tile",
        ),
    ],
)
def test_instruction_sets_are_told_by_their_level(flags, isa):
    assert isa_of("x86_64", flags.split()) == isa
    assert isa_of("aarch64", ["sve"]) == "aarch64 sve"


def test_gpus_and_their_driver_are_read_from_the_kernel_module(tmp_path):
    for number in range(2):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\n")
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version: 12.2.0\n"
    )
    found = machine(tmp_path)
    assert (found["gpus"], found["driver"]) == ({"NVIDIA H200": 2}, "570.86.15")


def test_what_an_import_asks_for_is_counted_in_a_process_of_its_own():
    found = count_calls(sys.executable, "email.message")
    assert found["found"] and found["calls"]["open"] >= 10 and found["calls"]["stat"] >= 20
    assert not count_calls(sys.executable, "no_such_module")["found"]
    assert "error" in count_calls("/no/such/python", "email")


def test_in_an_allocation_a_step_is_asked_for_and_outside_a_short_job():
    asked = {"nodes": 2, "name": "x", "where": {"partition": "gpu", "account": "", "qos": "low"}}
    outside = on_nodes_argv(["p"], **asked, is_inside=False)
    assert {"--partition=gpu", "--qos=low", "--time=4", "--ntasks=2"} <= set(outside)
    assert not any("account" in word for word in outside)
    inside = on_nodes_argv(["p"], **asked, is_inside=True)
    assert "--overlap" in inside and not any("partition" in word for word in inside)
