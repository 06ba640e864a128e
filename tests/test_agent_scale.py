"""Large jobs on one machine: real sockets, the real leader, and its members."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fakes.agents import ROOT
from fakes.crowd import KEY, Healthy, node_name

from ftslurm.agent.inquiry import answer
from ftslurm.agent.leader import Leader
from ftslurm.agent.loop import Loop
from ftslurm.agent.main import allow_many_files
from ftslurm.agent.member import Member
from ftslurm.agent.tree import parents
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RecoverySpec

NODES, RANKS_PER_NODE = 1250, 8
SETTLE_S, MEASURE_S = 100, 20


@contextlib.contextmanager
def running(loop):
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
    finally:
        loop.from_thread(loop.stop)
        thread.join()


def make_leader(folder, num_nodes, ranks=RANKS_PER_NODE):
    allow_many_files()
    layout = RunLayout(folder)
    layout.attempt(1).root.mkdir(parents=True)
    nodes = [node_name(number) for number in range(num_nodes)]
    leader = Leader(
        Loop(KEY), Healthy(0, ranks), layout, RecoverySpec(), nodes,
        controller=lambda: True, down=lambda nodes: frozenset(), asked=answer,
    )  # fmt: skip
    return leader, leader.begin("127.0.0.1")


def wait(look, timeout_s=SETTLE_S):
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_leader_of_1250_nodes_has_little_to_do(tmp_path):
    """All of them on connections of their own, as if every inner member were dead."""
    leader, port = make_leader(tmp_path, NODES)
    argv = [sys.executable, "-m", "fakes.crowd", str(port), str(NODES)]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    with (
        running(leader.loop),
        subprocess.Popen([*argv, str(RANKS_PER_NODE)], stdin=subprocess.PIPE, env=environ) as crowd,
    ):
        wait(lambda: len(leader.roll.live) == NODES)
        leader.loop.from_thread(lambda: leader.begin_attempt(1, leader.nodes, RANKS_PER_NODE))
        time.sleep(15)
        before = figures(leader)
        time.sleep(MEASURE_S)
        cpu_s, came, went, files, written = (b - a for a, b in zip(before, figures(leader)))
        kinds, live = {finding.kind for finding in leader.trial.findings}, leader.roll.live
        crowd.stdin.close()
    share = cpu_s / MEASURE_S
    print(
        f"\n{NODES} nodes on as many connections, {NODES * RANKS_PER_NODE} ranks a second: leader "
        f"{share:.1%} of a core; each 10 s it reads {came / MEASURE_S / 1e5:.1f} MB, sends "
        f"{went / MEASURE_S / 1e2:.0f} kB and writes {files / MEASURE_S * 10:.1f} files of "
        f"{written / max(files, 1) / 1e6:.2f} MB"
    )
    # On a machine that has other work, these members may be slow; that is nobody's fault but its.
    assert kinds <= {"leader_lost"}
    assert len(live) == NODES
    assert files <= MEASURE_S / 10 + 1, "one aggregated file at most every 10 s"
    assert share < 0.8
    record = json.loads((leader.trial.paths.root / "agents.json").read_text())
    assert len(record["ranks"]) == NODES * RANKS_PER_NODE
    assert len(record["nodes"]) == NODES
    assert all(abs(node["offset_s"]) < 5 for node in record["nodes"].values())


def figures(leader):
    ledger, loop = leader.ledger, leader.loop
    return [time.process_time(), loop.bytes_in, loop.bytes_out, ledger.files, ledger.bytes]


def make_member(loop, number, port):
    return Member(
        loop,
        Healthy(number, 2),
        (node_name(0), "127.0.0.1", port),
        "127.0.0.1",
        listen_on="127.0.0.1",
        lost=lambda silent_s: None,
    )


@pytest.mark.timeout(300)
def test_members_report_through_inner_ones_and_past_one_that_dies(tmp_path):
    leader, port = make_leader(tmp_path, 70, ranks=2)
    inner = sorted(set(parents(leader.nodes).values()))
    dying = leader.nodes.index(inner[1])
    orphans = [node for node in leader.nodes if parents(leader.nodes).get(node) == inner[1]]
    others, alone = Loop(KEY), Loop(KEY)
    with running(leader.loop), running(others):
        with running(alone):
            members = [
                make_member(alone if number == dying else others, number, port)
                for number in range(1, 70)
            ]
            for member in members:
                loop = alone if member is members[dying - 1] else others
                loop.from_thread(member.begin)
            wait(lambda: set(leader.branch.children) == set(inner))
            leader.loop.from_thread(lambda: leader.begin_attempt(1, leader.nodes, 2))
            wait(lambda: leader.trial and len(leader._views()) == 140)
            assert {leader.branch.via[node] for node in orphans} == {inner[1]}
        # Its loop has stopped: nothing comes from it and nothing is refused.
        wait(lambda: leader.roll.seats[inner[1]].state == "lost")
        wait(lambda: {leader.branch.via[node] for node in orphans} == set(orphans))
        time.sleep(3)
        states = {seat.name: seat.state for seat in leader.roll.seats.values()}
        assert [node for node in states if states[node] != "live"] == [inner[1]]
        assert [finding.nodes for finding in leader.trial.findings] == [[inner[1]]]
