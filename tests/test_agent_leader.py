"""What a leader makes of the nodes it hears, and a member of a leader that it does not hear.

In this process, without a network."""

import dataclasses
import os
import resource
import subprocess
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from fakes.crowd import KEY, Healthy, node_name

from ftslurm.agent import aside, succession
from ftslurm.agent.aside import Aside, down_nodes
from ftslurm.agent.duty import Duty, Watch
from ftslurm.agent.inquiry import answer
from ftslurm.agent.leader import Leader
from ftslurm.agent.main import Agent, _take_up, allow_many_files, main
from ftslurm.agent.report import GONE, LIVE, LOST, AgentFinding, NodeReport, to_row
from ftslurm.agent.silence import NOTHING, REFUSES
from ftslurm.agent.succession import Succession
from ftslurm.run.heartbeat import beats_folder
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RecoverySpec
from ftslurm.scheduler.accounting import NodeState
from ftslurm.scheduler.process import ProcessName

N0, N1, N2, N3 = map(node_name, range(4))


class Loop:
    """Notes what is to come later; threads are done with at once, or when told."""

    key = KEY

    def __init__(self):
        self.timers, self.threads, self.holds = [], [], False

    def later(self, delay_s, act):
        self.timers.append((delay_s, act))

    def in_thread(self, work, done, *, otherwise=None):
        self.threads.append(lambda: done(work()))
        while self.threads and not self.holds:
            self.threads.pop(0)()

    def from_thread(self, act):
        act()


class Noted(Healthy):
    def __init__(self):
        super().__init__(0, 1)
        self.orders = []

    def carry_out(self, order):
        self.orders.append(order["do"])
        return super().carry_out(order)


@pytest.fixture
def make(tmp_path):
    def make(nodes=4, *, controller=lambda: True, down=lambda nodes: frozenset(), loop=None):
        layout = RunLayout(tmp_path)
        layout.attempt(1).root.mkdir(parents=True)
        leader = Leader(
            loop or Loop(), Noted(), layout, RecoverySpec(), [node_name(i) for i in range(nodes)],
            controller=controller, down=down, asked=answer,
        )  # fmt: skip
        for name, seat in leader.roll.seats.items():
            seat.state, seat.host, seat.port = LIVE, name, 1
        return leader

    return make


def hear(leader, *names, ago_s=0.0, **more):
    """A report of one training rank of each node."""
    now = time.monotonic()
    for name in names:
        (view,) = Healthy(int(name[1:]), 1).look(1)
        row = to_row(dataclasses.replace(view, **more))
        leader.branch.below[name] = NodeReport(now - ago_s, 0.0, 1, [row])
        leader.roll.seats[name].seen_at = now - ago_s


def kinds(leader):
    return [(one.kind, one.nodes, one.acted) for one in leader.trial.findings]


STUCK = {"age_s": 60.0, "step_age_s": 60.0, "collective_age_s": 60.0, "proc_state": "S"}


def test_ranks_that_wait_for_a_node_that_is_about_to_be_given_up_do_not_hang(make):
    leader = make(2)
    leader.begin_attempt(1, [N0, N1], 1)
    hear(leader, N0, **STUCK)
    hear(leader, N1, ago_s=4.0, **STUCK)
    leader._judge_ranks()
    assert kinds(leader) == []
    hear(leader, N1, **STUCK)
    leader._judge_ranks()
    assert [kind for kind, _, _ in kinds(leader)] == ["hang"]


@pytest.mark.parametrize("state", [LOST, GONE, "unknown"])
def test_the_ranks_of_a_node_that_is_not_watched_are_not_waited_for(make, state):
    leader = make(2)
    leader.begin_attempt(1, [N0, N1], 1)
    leader.roll.seats[N1].state = state
    hear(leader, N0, **STUCK, in_collective=False)
    leader._judge_ranks()
    assert [kind for kind, _, _ in kinds(leader)] == ["hang"]


def test_an_attempt_that_has_lost_a_node_before_it_begins_is_ended_until_its_ranks_are_there(make):
    leader = make()
    leader.roll.seats[N1].state = LOST
    leader.begin_attempt(1, [N0, N1], 1)
    assert kinds(leader) == [("node_lost", [N1], True)]
    for delay_s, act in list(leader.loop.timers):
        if delay_s in (3.0, 10.0):
            act()
    assert leader.duty.orders.count("end") == 3


def test_the_loss_of_a_node_is_the_reason_though_a_leader_before_has_found_something(make, capfd):
    leader = make(2)
    leader.roll.seats[N1].state = LOST
    before = [AgentFinding("straggler", 1.0, 1.0, "rank 1 was slow", [1], [N1], False)]
    leader.begin_attempt(1, [N0, N1], 1, before=before, under_way=True)
    capfd.readouterr()
    for _, act in leader.loop.timers[:]:
        act()
    said = capfd.readouterr().err
    assert "are ended" in said and "has been silent" in said and "was slow" not in said


def test_agents_that_never_came_are_told_of_once(make, capfd, monkeypatch):
    leader = make()
    noted = []
    monkeypatch.setattr(leader, "_event", lambda kind, node, **facts: noted.append((kind, node)))
    leader.roll.seats[N2].state = "unknown"
    hear(leader, N1, N3)
    leader._judge_nodes()
    assert noted == []
    leader.roll._absent_at = 0.0
    for _ in range(2):
        leader._judge_nodes()
    assert noted == [("no_agent", N2)]
    assert f"no agent has come from {N2}: the ranks there are not watched" in capfd.readouterr().err


def test_an_answer_of_slurm_from_before_this_silence_is_no_answer(make):
    """A leader that has been cut off since would take its peer for lost."""
    loop = Loop()
    leader = make(2, loop=loop)
    leader.begin_attempt(1, [N0, N1], 1)
    seat = leader.roll.seats[N1]

    def look(silent_s):
        seat.seen_at, seat.sightings = time.monotonic() - silent_s, {N0: NOTHING}
        seat.asked_at = time.monotonic()
        leader._judge_nodes()

    loop.holds = True
    look(20.0)  # asked
    look(0.0)  # heard again
    (answered,) = loop.threads
    loop.threads.clear()
    answered()
    look(20.0)
    assert seat.state == LIVE
    (answered,) = loop.threads
    answered()
    look(21.0)
    assert seat.state == LOST


@pytest.mark.parametrize(("away_ago_s", "state"), [(2.0, LIVE), (6.0, LOST)])
def test_a_leader_that_stood_still_gives_its_only_peer_the_time_to_be_heard_again(
    make, away_ago_s, state
):
    """Not all that it has to be silent: a leader may stand still again and again."""
    leader = make(2)
    leader.begin_attempt(1, [N0, N1], 1)
    seat, now = leader.roll.seats[N1], time.monotonic()
    seat.seen_at, seat.asked_at, seat.sightings = now - 20.0, now, {N0: NOTHING}
    leader.roll.was_away()
    leader.roll._fair_from -= away_ago_s
    for _ in range(2):  # slurmctld is asked, and has answered
        leader._judge_nodes()
    assert seat.state == state


@pytest.mark.parametrize(("down", "lost"), [({N2, N3}, [N2, N3]), (set(), []), (None, [])])
def test_most_members_lost_at_once_are_lost_where_slurm_says_so(make, down, lost):
    leader = make(down=lambda nodes: None if down is None else frozenset(down))
    leader.begin_attempt(1, leader.nodes, 1)
    hear(leader, N0, N1)
    hear(leader, N2, N3, ago_s=20.0)
    leader._judge_nodes()
    assert [name for name in leader.nodes if leader.roll.seats[name].state == LOST] == lost
    acted = [nodes for kind, nodes, acted in kinds(leader) if kind == "node_lost" and acted]
    assert acted == [[name] for name in lost[:1]]
    if lost:
        assert "slurmctld, which answers here, does not reach it" in leader.trial.findings[0].why


def test_slurms_word_for_a_node_that_it_does_not_reach(monkeypatch):
    states = {"n1": "IDLE*+DRAIN", "n2": "ALLOCATED", "n3": "DOWN", "n4": "MIXED+NOT_RESPONDING"}
    nodes = {name: NodeState(name, state, "", None) for name, state in states.items()}
    monkeypatch.setattr(aside, "read_nodes", lambda names: nodes)
    assert down_nodes(["n1", "n2", "n3", "n4", "n5"]) == {"n1", "n3", "n4"}
    monkeypatch.setattr(aside, "read_nodes", lambda names: None)
    assert down_nodes(["n1"]) is None


def test_slurm_is_not_asked_every_second():
    asked, clock = [], [0.0]
    one = Aside(Loop().in_thread, lambda: asked.append(1), now=lambda: clock[0])
    for clock[0] in (0.0, 1.0, 2.0, 3.0):
        one.said()
    assert len(asked) == 2


# A member's part.


class Absent:
    """The duty of a member whose leader is reached as `seen`."""

    node = N1

    def __init__(self, seen):
        self.seen = seen

    def probe(self, host, port):
        return self.seen


@pytest.fixture
def consider(monkeypatch, tmp_path):
    """Have a member consider a leader that is silent, at once and several times."""

    class AtOnce:
        def __init__(self, target, daemon):
            self.start = target

    def consider(seen, votes, times=3, me=N1, has_heard=True, every_s=0.0, down=None):
        done, clock = Counter(), [0.0]
        scheduler = SimpleNamespace(controller_alive=lambda: done.update(["ping"]) or True)
        duty = Absent(seen)
        duty.node = me
        one = Succession(
            RunLayout(tmp_path), scheduler, {}, [N0, N1, N2, N3], (N0, "h", 1), duty, KEY,
            leave=lambda: done.update(["leave"]),
        )  # fmt: skip
        one._ask = lambda places: {name: votes[name] for name in places if name in votes}
        one._give_next_job = lambda why: done.update(["job"])
        peers = {name: ["h", 1] for name in (N1, N2, N3)}
        with monkeypatch.context() as patch:
            patch.setattr(succession, "Thread", AtOnce)
            patch.setattr(succession, "AGAIN_S", min(every_s, succession.AGAIN_S))
            fake = SimpleNamespace(monotonic=lambda: clock[0])
            fake.sleep = lambda seconds: done.update(waited_s=seconds)
            patch.setattr(succession, "time", fake)
            patch.setattr(succession, "down_nodes", lambda nodes: done.update(["node"]) or down)
            for _ in range(times):
                clock[0] += every_s
                one.consider(SimpleNamespace(peers=peers, has_heard=has_heard), 20.0)
        return done

    return consider


def test_the_run_is_given_one_next_job_however_long_the_old_one_takes_to_end(consider):
    assert consider(NOTHING, {N2: False, N3: False})["job"] == 1


def test_no_next_job_is_given_for_a_leader_that_was_never_heard(consider):
    votes = {N2: False, N3: False}
    assert "job" not in consider(NOTHING, votes, has_heard=False, every_s=9.0)


def test_who_has_never_heard_the_leader_asks_slurm_ever_more_rarely(consider):
    assert consider(NOTHING, {}, times=120, every_s=5.0)["node"] == 120
    assert consider(NOTHING, {}, times=120, every_s=5.0, has_heard=False)["node"] == 12


@pytest.mark.parametrize(("me", "more"), [(N1, {}), (N3, {"waited_s": 4, "ping": 1, "node": 1})])
def test_who_knows_of_no_other_member_gives_the_next_job_in_its_turn(consider, me, more):
    done = consider(NOTHING, {}, me=me, has_heard=False, down={N0})
    assert done == Counter(job=1, ping=1, node=1) + Counter(more)


def test_only_the_one_that_acts_asks_slurm(consider):
    assert consider(NOTHING, {N1: False, N3: False}, me=N2) == {}
    assert consider(NOTHING, {N2: False, N3: True}) == {}
    assert consider(REFUSES, {N2: False, N3: False}) == {}
    assert consider(NOTHING, {N2: False}, times=1) == {"ping": 1, "node": 1, "job": 1}


def test_members_of_a_leader_that_has_died_alone_leave_so_that_all_are_started_again(
    consider, monkeypatch
):
    monkeypatch.setattr(succession, "LEAVES_AFTER_S", 0.0)
    assert consider(REFUSES, {}, times=1) == {"leave": 1}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_is_asked_by_many_threads_at_once(monkeypatch, tmp_path):
    said = lambda host, port, key, message, timeout_s: {"hears": True}  # noqa: E731
    monkeypatch.setattr(succession, "exchange", said)
    one = Succession(
        RunLayout(tmp_path), None, {}, [N0, N1], (N0, "h", 1), Absent(NOTHING), KEY,
        leave=lambda: None,
    )  # fmt: skip
    places = {node_name(i): ("h", 1) for i in range(200)}
    assert one._ask(places) == dict.fromkeys(places, True)


# What is left in a node's memory.


def test_the_exit_of_a_rank_is_told_of_once_though_its_beats_are_gone(tmp_path):
    duty = Duty(tmp_path, N0, KEY, {})
    (view,) = Healthy(0, 1).look(1)
    rank = subprocess.Popen(["sleep", "60"])
    view = dataclasses.replace(view, pid=rank.pid, start_ticks=ProcessName.of(rank.pid).started)
    looks = [[view], [], [], []]
    duty.look = lambda attempt: looks.pop(0)
    watch = Watch(duty)
    assert (watch.look(), watch.look()) == ([], []), "it lives"
    rank.kill()
    rank.wait()
    assert watch.look() == [{"rank": 0, "pid": rank.pid, "step": 1234}]
    assert watch.look() == []


def test_an_agent_gives_back_what_jobs_that_are_over_have_left(tmp_path):
    names = {"old": (5, 7200), "young": (6, 10), "own": (77, 7200)}
    made = {}
    for what, (job, age_s) in names.items():
        made[what] = tmp_path / f"ftslurm-{os.getuid()}-{job}"
        (made[what] / "attempt-0001").mkdir(parents=True)
        (made[what] / "attempt-0001" / "stacks-00000").touch()
        for path in (made[what] / "attempt-0001", made[what]):
            os.utime(path, (time.time() - age_s,) * 2)
    other = tmp_path / f"ftslurm-{os.getuid()}-8"
    (other / "attempt-0001").mkdir(parents=True)
    (other / "attempt-0001" / "rank-00000").write_bytes(b"of another version")
    for path in (other / "attempt-0001", other):
        os.utime(path, (time.time() - 7200,) * 2)
    Duty(tmp_path, N0, KEY, {"SLURM_JOB_ID": "77"}).sweep(tmp_path)
    assert [what for what, path in made.items() if path.exists()] == ["young", "own"]
    assert other.exists(), "what is not understood is left alone"


def test_beats_of_an_attempt_that_is_over_are_given_back_when_no_rank_lives(tmp_path, monkeypatch):
    environ = {"SLURM_JOB_ID": "7", "FTSLURM_BEATS": str(tmp_path / "beats")}
    folder = beats_folder(environ, 1)
    folder.mkdir(parents=True)
    duty = Duty(tmp_path, N0, KEY, environ)
    order = {"do": "forget", "attempt": 1}
    monkeypatch.setattr(duty, "look", lambda attempt: [SimpleNamespace(alive=True)])
    assert not duty.carry_out(order)["forgotten"] and folder.exists()
    monkeypatch.setattr(duty, "look", lambda attempt: [SimpleNamespace(alive=False)])
    assert duty.carry_out(order)["forgotten"] and not folder.exists()


def test_an_agent_may_have_as_many_connections_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    allow_many_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_attempt_that_cannot_be_read_goes_unwatched_and_the_leader_leads_on(tmp_path, capsys):
    layout = RunLayout(tmp_path)
    attempt = layout.attempt(1)
    attempt.root.mkdir(parents=True)
    attempt.attempt_json.write_text('{"schema_version": 1, "number":')
    agent = Agent(layout, None, None, "7", N0, [N0], {})
    _take_up(agent, SimpleNamespace())  # tells nobody to begin one
    assert "attempt 1 goes unwatched" in capsys.readouterr().err


def test_an_agent_whose_run_cannot_be_read_says_so_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", N0)
    monkeypatch.setattr("ftslurm.agent.main.outlive_signals", lambda: None)
    (tmp_path / "run.json").write_text("{")
    assert main([str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ftslurm: agent on {N0}: ") and "run.json" in line
