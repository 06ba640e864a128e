"""The agents of one job on this machine, as processes that hear, lose and end each other.

Most of a scenario is waiting for silence, so some of them run side by side.
"""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.agents import JOB, Job, is_gone
from fakes.nvml import nodes

from ftslurm.agent.ask import key_file
from ftslurm.diagnosis.gpu_memory import WITHIN_S
from ftslurm.files import read_json
from ftslurm.run.node_memory import read_node_events

SIDE_BY_SIDE = 7
IDLE_S = 10
HANGS = {"hang_floor_s": 8.0}
"""Longer than this machine itself may stand still."""
SCENARIOS = []


def scenario(play):
    SCENARIOS.append(play)
    return play


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        folders = [tmp_path_factory.mktemp("job") for _ in SCENARIOS]
        yield {play: pool.submit(play, folder) for play, folder in zip(SCENARIOS, folders)}


def late(job, attempt, what):
    """Nodes of which it is on record that the ranks' end did not wait for this evidence of theirs:
    this machine stood still meanwhile."""
    return {e["node"] for e in job.events(attempt, "no_evidence") if e["what"] == what}


@scenario
def agents_find_their_leader_and_answer_for_the_batch_script(tmp_path):
    with Job(tmp_path, nodes=3) as job:
        attempt = job.claim()
        job.start_ranks(attempt)
        for process in job.processes.values():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                process.send_signal(number)
        assert stat.S_IMODE(key_file(job.layout, JOB).stat().st_mode) == 0o600
        job.wait(lambda: len(job.agents_json(attempt).get("ranks", ())) == 3, "all are seen")
        launcher = job.start_launcher(attempt)
        assert job.ask("end", attempt=attempt, why="a test") == {"t": "answer", "ended": True}
        assert all(is_gone(rank) for rank in job.ranks.values()) and is_gone(launcher)
        assert job.ask("clear", attempt=attempt)["clear"]
        assert job.ask("ended", attempt=attempt, rc=143)["durable"]
        assert job.are_all_live(), "stop signals are for the ranks"
        assert set(job.agents_json(attempt)["ranks"]) == {"0", "1", "2"}
        offsets = [node["offset_s"] for node in job.agents_json(attempt)["nodes"].values()]
        assert len(offsets) == 3 and all(abs(offset_s) < 2 for offset_s in offsets)
        job.wait(lambda: len(job.events(attempt, "rank_exit")) == 3, "all exits are told of")
        kinds = [event["kind"] for event in job.events(attempt)]
        assert kinds[0] == "begin" and "ended" in kinds
        job.wait(lambda: not job.beats_of(attempt).exists(), "its beats are given back")
        assert set(job.agents_json(attempt)["ranks"]) == {"0", "1", "2"}


@scenario
def a_rank_that_ignores_term_is_killed_and_one_of_an_older_attempt_is_a_leftover(tmp_path):
    with Job(tmp_path, nodes=2) as job:
        first = job.claim()
        job.start_ranks(first, "deaf")
        old = list(job.ranks.values())
        second = job.claim()
        job.start_ranks(second)
        answer = job.ask("clear", attempt=first)
        told = {"leftover": {}, "held": {}, "unseen": [], "lost": []}
        assert answer == {"t": "answer", "clear": True, **told}
        assert all(is_gone(rank) for rank in old)
        assert not any(is_gone(rank) for rank in job.ranks.values()), (
            "a newer attempt is left alone"
        )
        assert len(job.beating(second)) == 2
        assert job.ask("ended", attempt=second, rc=1)["durable"]
        kept = job.layout.attempt(second).root / "evidence" / "nodes"
        told = {path.stem for path in kept.iterdir()}
        assert told, "a node's own account of an ordinary failure"
        assert told | late(job, second, "nodes") == set(job.nodes)


@scenario
def a_silent_node_is_confirmed_by_another_before_the_ranks_are_ended(tmp_path):
    with Job(tmp_path, nodes=4) as job:
        attempt = job.claim()
        job.start_ranks(attempt)
        launcher = job.start_launcher(attempt)
        cut_at = time.time()
        job.stop(job.nodes[2])
        job.wait(lambda: job.events(attempt, "ended"), "the attempt is ended")
        took_s = time.time() - cut_at
        (finding,) = job.findings(attempt)
        found_s = finding["at"] - finding["since"]
        print(f"found {found_s:.1f} s after its last word, all gone {took_s:.1f} s after the cut")
        assert found_s < 60, "by its silence, not by its ranks' time limits"
        assert (finding["kind"], finding["nodes"], finding["acted"]) == (
            "node_lost",
            ["127.0.0.3"],
            True,
        )
        assert "nor do 127.0.0." in finding["why"]
        assert job.agents_json(attempt)["nodes"]["127.0.0.3"]["state"] == "lost"
        assert is_gone(launcher)
        living = [rank for rank, process in job.ranks.items() if not is_gone(process)]
        assert living == [2], "nobody reaches the ranks of the node that is cut off"
        # It comes back: what is left of the attempt there is ended too.
        job.processes[job.nodes[2]].send_signal(signal.SIGCONT)
        job.wait(lambda: is_gone(job.ranks[2]), "the leftover is ended")
        job.wait(job.are_all_live, "it is taken back")
        job.wait(lambda: job.events(attempt, "node_back"), "that is on record")


@scenario
def a_spare_that_is_lost_ends_nothing(tmp_path):
    with Job(tmp_path, nodes=3) as job:
        attempt = job.claim(nodes=job.nodes[:2])
        job.start_ranks(attempt, nodes=job.nodes[:2])
        job.stop(job.nodes[2])
        job.wait(lambda: job.findings(attempt), "the loss is found")
        (finding,) = job.findings(attempt)
        assert (finding["kind"], finding["acted"]) == ("node_lost", False)
        assert not any(is_gone(rank) for rank in job.ranks.values())


@scenario
def an_agent_that_dies_alone_ends_nothing(tmp_path):
    with Job(tmp_path, nodes=3) as job:
        attempt = job.claim()
        job.start_ranks(attempt)
        job.processes[job.nodes[1]].kill()
        job.wait(lambda: job.findings(attempt), "it is found")
        (finding,) = job.findings(attempt)
        assert not finding["acted"] and "the node answers" in finding["why"]
        assert job.states()["127.0.0.2"] == "gone"
        assert not any(is_gone(rank) for rank in job.ranks.values())


@scenario
def a_leader_that_loses_most_at_once_blames_itself_and_ends_nothing(tmp_path):
    with Job(tmp_path, nodes=3) as job:
        attempt = job.claim()
        job.start_ranks(attempt)
        job.stop(job.nodes[1])
        job.stop(job.nodes[2])
        job.wait(lambda: job.findings(attempt), "it is found")
        time.sleep(4)
        (finding,) = job.findings(attempt)
        assert (finding["kind"], finding["nodes"]) == ("leader_lost", ["127.0.0.1"])
        assert not any(is_gone(rank) for rank in job.ranks.values())


@scenario
def the_survivors_of_the_batch_node_give_the_run_its_next_job_once(tmp_path):
    with Job(tmp_path, nodes=3) as job:
        attempt = job.claim()
        begun_at = time.time()
        # Members learn of each other every 5 s; the leader writes its status every 10.
        job.wait(lambda: job.agents_json(attempt).get("at", 0.0) > begun_at + 5, "they know")
        lost_at = time.time()
        job.stop(job.nodes[0])
        job.wait(lambda: job.calls("scancel"), "the old job is cancelled")
        print(f"next job queued {time.time() - lost_at:.1f} s after the batch node was lost")
        (sbatch,) = job.calls("sbatch")
        assert "--exclude=127.0.0.1" in sbatch and "afterany" not in sbatch
        decision = read_json(job.layout.attempt(attempt).decision_json)
        assert (decision["action"], decision["cause"]) == ("requeued", "node")
        assert decision["blamed"]["node"] == "127.0.0.1"
        assert {event.kind for event in read_node_events(job.layout)} == {"fault"}
        assert "127.0.0.2" in decision["reason"], "the lowest-named one acts"


@scenario
def survivors_who_cannot_reach_slurm_take_themselves_for_cut_off(tmp_path):
    with Job(tmp_path, nodes=2) as job:
        job.claim()
        (tmp_path / "away").touch()
        job.stop(job.nodes[0])
        job.wait(lambda: "cut_off" in job.said(), "it is said")
        time.sleep(1)
        assert not job.calls("sbatch") and not job.calls("scancel")
        (tmp_path / "away").unlink()
        job.wait(lambda: job.calls("scancel"), "of two nodes, the one that reaches Slurm acts")


@scenario
def when_only_the_leaders_agent_dies_all_leave_and_the_next_ones_go_on_watching(tmp_path):
    with Job(tmp_path, nodes=3, recovery=HANGS) as job:
        attempt = job.claim(nodes=job.nodes[:2])
        job.start_ranks(attempt, nodes=job.nodes[:2])
        job.stop(job.nodes[2])
        job.wait(lambda: job.findings(attempt), "a spare is lost")
        leader, member, spare = job.processes.values()
        spare.kill()
        leader.kill()
        died_at = time.time()
        job.wait(lambda: is_gone(member), "it leaves, so that the batch script starts all again")
        print(f"the last agent has left {time.time() - died_at:.1f} s after the leader died")
        assert member.returncode == 0 and "its agent has ended" in job.said()
        assert not job.calls("sbatch") and not job.calls("scancel")
        assert not any(is_gone(rank) for rank in job.ranks.values())
        for node in job.nodes:
            job.start(node, SLURM_STEP_ID="1")
        job.wait(job.are_all_live, "they are there again")
        job.ranks[1].send_signal(signal.SIGSTOP)
        job.wait(lambda: job.events(attempt, "ended"), "the hung ranks are ended")
        kinds = [(finding["kind"], finding["ranks"]) for finding in job.findings(attempt)]
        assert kinds == [("node_lost", []), ("hang", [1])], "none is forgotten"


@scenario
def of_two_nodes_one_that_never_heard_the_leader_leaves_the_run_its_job(tmp_path):
    """As behind a firewall: nothing comes, nothing is refused, and the ranks may well train."""
    with Job(tmp_path, nodes=2) as job:
        leader, member = job.nodes
        job.processes[member].kill()
        job.processes[member].wait()
        job.stop(leader)
        job.start(member)
        job.wait(lambda: f"{leader} was never heard" in job.said(), "it says so", timeout_s=90)
        assert not job.calls("sbatch") and not job.calls("scancel")


@scenario
def agents_whose_srun_alone_was_killed_leave_to_those_that_are_started_again(tmp_path):
    with Job(tmp_path, nodes=2) as job:
        attempt = job.claim()
        old = list(job.processes.values())
        try:
            for node in job.nodes:
                job.start(node, SLURM_STEP_ID="1")
            began = time.monotonic()
            job.wait(lambda: all(map(is_gone, old)), "the first ones leave", timeout_s=60)
            print(f"they have left {time.monotonic() - began:.1f} s after the others were started")
            assert [process.returncode for process in old] == [0, 0]
            assert "another leader has begun" in job.said()
            job.wait(job.are_all_live, "the others are there")
            assert job.ask("clear", attempt=attempt)["clear"]
        finally:
            for process in old:
                process.kill()
                process.wait()


GIB = 1 << 30


@scenario
def a_node_is_clean_once_the_memory_of_its_gpus_is_back(tmp_path):
    library = nodes.build(tmp_path)
    state = nodes.Node(tmp_path / "state", gpus=2).set("*", "memory", 0)
    with Job(tmp_path, nodes=1, gpus=(2, str(library))) as job:
        attempt = job.claim()
        job.start_ranks(attempt)
        rank = job.ranks[0].pid
        state.set(1, "memory", 70 * GIB).set(1, "processes", f"{rank}:{70 * GIB}")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(job.ask, "clear", attempt=attempt)
            job.wait(lambda: looks_with(library), "its memory is waited for")
            assert is_gone(job.ranks[0])
            state.set(1, "memory", 0).set(1, "processes", "none")
            assert answer.result()["clear"], answer.result()
        state.set(1, "memory", 70 * GIB).set(1, "processes", f"{rank}:{70 * GIB}")
        began = time.monotonic()
        answer = job.ask("clear", attempt=attempt)
        assert time.monotonic() - began >= WITHIN_S, "it is given its time"
        (told,) = answer["held"]["127.0.0.1"].values()
        assert told == f"70.0 GiB are taken by process {rank} (has ended) of an earlier attempt"
        assert not answer["clear"]
        job.wait(lambda: job.findings(attempt), "it is on record")
        (finding,) = job.findings(attempt)
        assert (finding["kind"], finding["nodes"]) == ("gpu_held", ["127.0.0.1"])
        assert "0000:2b:00: 70.0 GiB" in finding["why"]


@scenario
def agents_tell_what_kind_of_node_theirs_is_and_it_is_known_when_the_node_is_lost(tmp_path):
    library = nodes.build(tmp_path)
    for number, model in enumerate(("H100", "A100", "H100"), 1):
        nodes.Node(tmp_path / f"state-127.0.0.{number}", model, gpus=2)
    with Job(tmp_path, nodes=3, gpus=(2, str(library)), spares=1) as job:

        def gpus():
            told = job.ask("nodes")["nodes"]
            return {name: (of["kind"] or {}).get("gpus") for name, of in told.items()}

        h100, a100 = {"NVIDIA H100 80GB HBM3": 2}, {"NVIDIA A100-SXM4-80GB": 2}
        all_told = dict(zip(job.nodes, (h100, a100, h100)))
        job.wait(lambda: gpus() == all_told, "all have told")
        asked = [line for line in job.said().splitlines() if "kind" in line]
        assert asked == [], "nothing is amiss"
        job.stop(job.nodes[1])
        job.wait(lambda: job.states()[job.nodes[1]] == "lost", "it is given up")
        assert gpus() == all_told


@scenario
def ranks_that_hang_leave_their_stacks_before_they_are_ended(tmp_path):
    with Job(tmp_path, nodes=2, recovery=HANGS) as job:
        attempt = job.claim()
        job.start_ranks(attempt, "still")
        launcher = job.start_launcher(attempt)
        job.wait(lambda: job.events(attempt, "ended"), "the hung ranks are ended")
        (finding,) = job.findings(attempt)
        assert (finding["kind"], finding["acted"]) == ("hang", True)
        assert all(is_gone(rank) for rank in job.ranks.values()) and is_gone(launcher)
        kept = job.layout.attempt(attempt).root / "evidence"
        stacks = sorted((kept / "stacks").iterdir())
        assert stacks and all("all_reduce" in path.read_text() for path in stacks)
        told = {job.nodes[int(path.stem.removeprefix("rank-"))] for path in stacks}
        assert told | late(job, attempt, "stacks") == set(job.nodes)
        told = {path.stem for path in (kept / "nodes").iterdir()}
        assert told and told | late(job, attempt, "nodes") == set(job.nodes)


@scenario
def a_straggler_is_evicted_at_a_boundary_when_the_run_says_now(tmp_path):
    limits = {"straggler_factor": 3.0, "evict": "now"}
    with Job(tmp_path, nodes=3, recovery=limits) as job:
        attempt = job.claim()
        job.start_ranks(attempt, nodes=job.nodes[:2])
        job.start_rank(attempt, job.nodes[2], 0, "slow")
        job.wait(lambda: is_gone(job.ranks[2]), "it has been asked to leave")
        job.wait(lambda: job.findings(attempt), "it is on record")
        (finding,) = job.findings(attempt)
        assert (finding["kind"], finding["ranks"], finding["acted"]) == ("straggler", [2], True)
        assert finding["nodes"] == ["127.0.0.3"]
        job.wait(lambda: all(is_gone(rank) for rank in job.ranks.values()), "all leave")
        assert {rank.returncode for rank in job.ranks.values()} == {-signal.SIGUSR1}


@scenario
def an_idle_agent_costs_little(tmp_path):
    with Job(tmp_path, nodes=2) as job:
        pids = [process.pid for process in job.processes.values()]
        before = [cpu_s(pid) for pid in pids]
        time.sleep(IDLE_S)
        for name, pid, cpu_before_s in zip(("leader", "member"), pids, before):
            status = Path(f"/proc/{pid}/status").read_text()
            memory_mib = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
            share = (cpu_s(pid) - cpu_before_s) / IDLE_S
            print(f"an idle {name}: {memory_mib:.1f} MiB, {share:.2%} of a core")
            assert memory_mib < 40 and share < 0.05


@scenario
def agents_leave_when_what_started_them_is_gone(tmp_path):
    with Job(tmp_path, nodes=1) as job:
        argv = [sys.executable, "-m", "ftslurm.agent", str(job.layout.root)]
        shell = ["bash", "-c", 'trap "" TERM; "$@" & sleep 600', "slurmstepd", *argv]
        job.processes[job.nodes[0]].kill()
        job.processes[job.nodes[0]].wait()
        parent = subprocess.Popen(shell, env=job.environ(job.nodes[0]), start_new_session=True)
        try:
            job.wait(lambda: job.are_all_live() and len(job.left_over()) == 2, "it leads")
            parent.kill()
            job.wait(lambda: not job.left_over(), "it leaves")
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()


def looks_with(library):
    """Whether an agent looks at GPUs' memory."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"--library={library}".encode() in path.read_bytes().split(b"\0"):
                return True
    return False


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("play", SCENARIOS, ids=lambda play: play.__name__)
def test_agents(play, played):
    played[play].result()
