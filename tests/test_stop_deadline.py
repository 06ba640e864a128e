"""Until when ranks that are to leave may save: asked of Slurm, decided, told to the ranks."""

import signal
import time
from types import SimpleNamespace

import pytest
from fakes.agents import Job

from ftslurm.agent.deadline import AskForDeadline, left_s
from ftslurm.agent.duty import Duty
from ftslurm.agent.main import _asking
from ftslurm.errors import SchedulerError
from ftslurm.run.deadline import AGENTS, Deadline, read_deadline, write_deadline
from ftslurm.run.heartbeat import beats_folder, deadline_file
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment
from ftslurm.scheduler.job_end import FIELDS, JobEnd, parse_job_end, read_job_end
from ftslurm.scheduler.slurm import Completed

NOW = 1_796_000_000.0
SITE = {"kill_wait_s": 30}


@pytest.mark.parametrize(
    ("end", "kill_wait_s", "since_s", "left"),
    [
        # Preempted: grace and KillWait, less the margin of 5 s and what has passed.
        (JobEnd(NOW + 60, NOW, False), 30, 0.0, (85.0, "preempted")),
        (JobEnd(NOW + 60, NOW, False), 30, 2.5, (82.5, "preempted")),
        (JobEnd(NOW + 8, NOW, False), 1, 0.0, (8.0, "preempted")),
        # This node's clock is 90 s ahead, or behind: no matter.
        (JobEnd(NOW - 30, NOW - 90, False), 30, 0.0, (85.0, "preempted")),
        (JobEnd(NOW + 150, NOW + 90, False), 30, 0.0, (85.0, "preempted")),
        # The limit: KillWait is no spare time, and the warning came 60 s before it or earlier.
        (JobEnd(NOW + 66, None, False), 30, 0.5, (54.5, "time_limit")),
        (JobEnd(NOW + 59.5, None, False), 30, 0.5, (54.5, "time_limit")),
        # An administrator has moved it to here, or there is a day to it: a person's signal.
        (JobEnd(NOW + 20, None, False), 30, 0.5, (15.0, "time_limit")),
        (JobEnd(NOW + 86400, None, False), 30, 0.5, (3600.0, "time_limit")),
        (JobEnd(NOW + 600, None, False), 30, 0.5, (595.0, "time_limit")),
        # This node's clock is 90 s behind: as if it were right; ahead: no use.
        (JobEnd(NOW + 60 + 90, None, False), 30, 0.5, (54.5, "time_limit")),
        (JobEnd(NOW + 60 - 90, None, False), 30, 0.5, None),
        (JobEnd(None, None, False), 30, 0.5, None),
        # A requeue or a cancel: TERM has come, KILL follows; also at the end of a grace.
        (JobEnd(NOW, None, True), 30, 0.5, (24.5, "ending")),
        (JobEnd(NOW, NOW - 60, True), 1, 0.5, (-0.5, "ending")),
    ],
)
def test_the_time_that_is_left_follows_from_how_the_job_is_to_end(end, kill_wait_s, since_s, left):
    site = {"kill_wait_s": kill_wait_s, "lead_s": 60.0}
    assert left_s(end, **site, since_s=since_s, now_s=NOW) == left


def at(clock):
    return time.mktime(time.strptime(f"2026-11-30T{clock}", "%Y-%m-%dT%H:%M:%S"))


# As squeue printed them for a job with a limit of 5 minutes and a GraceTime of 5 s: before, in the
# grace and after it on 22.05, in the grace on 24.11 and on 26.05.
RECORDED = {
    "RUNNING 2026-11-30T12:15:56 N/A": JobEnd(at("12:15:56"), None, False),
    "RUNNING 2026-11-30T12:11:02 2026-11-30T12:10:57": JobEnd(
        at("12:11:02"), at("12:10:57"), False
    ),
    "COMPLETING 2026-11-30T12:16:10 2026-11-30T12:11:10": JobEnd(
        at("12:16:10"), at("12:11:10"), True
    ),
    "COMPLETING N/A 2026-11-30T12:11:10": JobEnd(None, at("12:11:10"), True),
    "RUNNING 2026-11-30T12:15:30 2026-11-30T12:15:25": JobEnd(
        at("12:15:30"), at("12:15:25"), False
    ),
    "RUNNING 2026-11-30T12:17:29 2026-11-30T12:17:24": JobEnd(
        at("12:17:29"), at("12:17:24"), False
    ),
}


@pytest.mark.parametrize("words", RECORDED)
def test_what_squeue_prints_is_read(words):
    assert parse_job_end("".join(f"{word:<32}" for word in words.split()) + "\n") == RECORDED[words]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("RUNNING N/A N/A\n", JobEnd(None, None, False)),
        ("RUNNING Unknown N/A\nRUNNING 2026-11-30T12:15:56 N/A\n", JobEnd(None, None, False)),
        ("", None),
        ("RUNNING 2026-11-30T12:15:56\n", None),
    ],
)
def test_no_limit_and_no_answer_are_told_apart(text, end):
    assert parse_job_end(text) == end


def test_one_command_asks_and_an_answer_that_does_not_come_is_none():
    asked = []

    def run(argv, timeout_s):
        asked.append((argv, timeout_s))
        return Completed(1, "", "slurm_load_jobs error: Unable to contact slurm controller")

    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
    assert read_job_end({"SLURM_JOB_ID": "71", **array}, run=run) is None
    ((argv, timeout_s),) = asked
    assert argv[0] == "squeue" and "--jobs=71" in argv and timeout_s == 10.0
    assert all(name in argv[-1] for name in FIELDS)

    def hangs(argv, timeout_s):
        raise SchedulerError("no answer")

    assert read_job_end({"SLURM_JOB_ID": "7"}, run=hangs) is None


class Leader:
    """One attempt; threads are done with when told."""

    me = "n1"

    def __init__(self):
        self.trial = SimpleNamespace(number=1, is_ending=False, paths=None, nodes=["n1", "n2"])
        self.given, self.events, self.threads = [], [], []
        self.loop = SimpleNamespace(in_thread=lambda *work: self.threads.append(work))
        self.orders = self
        self.ledger = SimpleNamespace(event=lambda paths, record: self.events.append(record))

    def give(self, do, nodes, **facts):
        self.given.append((do, nodes, facts))

    def answer(self):
        work, done = self.threads.pop(0)
        done(work())


def asking(leader, answers, clock=lambda: 100.0):
    return AskForDeadline(
        leader, lambda: answers.pop(0), kill_wait_s=30, lead_s=60, clock=clock, now=lambda: NOW
    )


GRACE = JobEnd(NOW + 60, NOW, False)


def test_the_leader_asks_once_for_each_signal_of_an_attempt_and_tells_all_nodes():
    leader, clock = Leader(), [100.0]
    limit = JobEnd(NOW + 600, None, False)
    ask = asking(leader, [limit, GRACE, GRACE], lambda: clock[0])
    for _ in range(3):
        ask.signalled(signal.SIGUSR1, 100.0)
    leader.answer()
    assert not leader.threads
    ask.signalled(signal.SIGTERM, 100.0)
    clock[0] = 101.0
    leader.answer()
    told = {"attempt": 1, "left_s": 84.0, "by": "preempted"}
    assert leader.given[1:] == [("deadline", ["n1", "n2"], told)]
    by_limit, event = leader.events
    assert by_limit["by"] == "time_limit"
    assert (event["kind"], event["signal"], event["left_s"]) == ("deadline", "SIGTERM", 84.0)
    leader.trial = SimpleNamespace(number=2, is_ending=False, paths=None, nodes=[])
    ask.signalled(signal.SIGTERM, 101.0)
    leader.answer()
    assert [facts["attempt"] for _, _, facts in leader.given] == [1, 1, 2]


def test_a_second_signal_in_a_grace_does_not_begin_it_anew():
    leader, clock = Leader(), [100.0]
    ask = asking(leader, [GRACE, GRACE], lambda: clock[0])
    ask.signalled(signal.SIGTERM, 100.0)
    leader.answer()
    clock[0] = 140.0
    ask.signalled(signal.SIGUSR1, 140.0)
    leader.answer()
    ((_, _, facts),) = leader.given
    assert facts["left_s"] == 85.0
    assert [event["by"] for event in leader.events] == ["preempted", "preempted"]
    assert "left_s" not in leader.events[1]


@pytest.mark.parametrize(("after_s", "told"), [(20.0, 25.0), (84.0, None)])
def test_term_again_in_a_grace_is_asked_about_and_told_where_less_is_left(after_s, told):
    """A cancel by an administrator; the end of the grace itself, 60 s, is no news."""
    leader, clock = Leader(), [100.0]
    ask = asking(leader, [GRACE, JobEnd(NOW, NOW - 60, True)], lambda: clock[0])
    ask.signalled(signal.SIGTERM, 100.0)
    leader.answer()
    ask.signalled(signal.SIGTERM, 101.0)
    assert not leader.threads, "the same again"
    clock[0] = 100.0 + after_s
    ask.signalled(signal.SIGTERM, clock[0])
    leader.answer()
    more = [{"attempt": 1, "left_s": told, "by": "ending"}] if told else []
    assert [facts for _, _, facts in leader.given[1:]] == more
    assert [event.get("left_s") for event in leader.events] == [85.0, told]


def test_an_answer_that_was_overtaken_by_a_newer_one_is_not_told():
    leader = Leader()
    ask = asking(leader, [GRACE, JobEnd(NOW + 600, None, False)])
    ask.signalled(signal.SIGUSR1, 100.0)
    ask.signalled(signal.SIGTERM, 100.1)
    leader.threads.reverse()
    leader.answer()
    leader.answer()
    assert [facts["by"] for _, _, facts in leader.given] == ["preempted"]


def test_an_ask_that_dies_of_the_second_term_is_made_again():
    leader = Leader()
    ask = asking(leader, [None, GRACE])
    ask.signalled(signal.SIGTERM, 100.0)
    ask.signalled(signal.SIGTERM, 100.1)
    leader.answer()
    assert leader.given == [] and leader.events == []
    leader.answer()
    assert len(leader.given) == 1 and not leader.threads


def test_without_an_answer_nothing_is_told_to_the_ranks_and_that_is_on_record():
    leader = Leader()
    ask = asking(leader, [None])
    ask.signalled(signal.SIGTERM, 100.0)
    leader.answer()
    assert leader.given == [] and not leader.threads
    (event,) = leader.events
    assert event["end_at"] is None and "left_s" not in event


@pytest.mark.parametrize(("own_s", "site", "asks"), [
    (None, SITE, True), (20.0, SITE, False), (None, None, False),
])  # fmt: skip
def test_a_run_with_a_deadline_of_its_own_does_not_ask(own_s, site, asks):
    cluster = SimpleNamespace(signal_lead_s=60)
    checkpoint = SimpleNamespace(emergency_deadline_s=own_s)
    spec = SimpleNamespace(cluster=cluster, checkpoint=checkpoint)
    agent = SimpleNamespace(record=SimpleNamespace(site=site, spec=spec), job_id="7")
    assert (_asking(agent, Leader()) is not None) == asks


def test_between_attempts_and_where_ranks_are_being_ended_nobody_asks():
    leader = Leader()
    ask = asking(leader, [])
    leader.trial.is_ending = True
    ask.signalled(signal.SIGTERM, 1.0)
    leader.trial = None
    ask.signalled(signal.SIGTERM, 1.0)
    assert not leader.threads
    leader.trial = trial = Leader().trial
    ask = asking(leader, [GRACE])
    ask.signalled(signal.SIGTERM, 1.0)
    leader.trial = SimpleNamespace(number=2, is_ending=False, paths=None, nodes=[])
    leader.answer()
    assert trial is not leader.trial and leader.given == []


def test_an_answer_that_comes_when_the_ranks_have_left_is_told_to_nobody():
    leader = Leader()
    ask = asking(leader, [GRACE])
    ask.signalled(signal.SIGTERM, 1.0)
    leader.trial.is_ending = True
    leader.answer()
    assert leader.given == [] and leader.events[0]["by"] == "preempted"


@pytest.fixture
def environ(tmp_path):
    return {"FTSLURM_BEATS": str(tmp_path / "beats"), "SLURM_JOB_ID": "7"}


def test_an_agent_tells_the_ranks_of_its_node_and_of_that_attempt(tmp_path, environ):
    duty = Duty(tmp_path, "n1", b"k" * 32, environ)
    before = time.monotonic()
    done = duty.carry_out({"do": "deadline", "attempt": 2, "left_s": 60.0, "by": "preempted"})
    assert done == {"told": True}
    told = read_deadline(environ, 2)
    assert told is not None and told.by == "preempted"
    assert before + 60 <= told.until <= time.monotonic() + 60
    assert read_deadline(environ, 1) is None


def test_ranks_that_the_agents_ask_to_leave_have_their_time_until_slurm_says_otherwise(
    tmp_path, environ
):
    duty = Duty(tmp_path, "n1", b"k" * 32, environ)
    assert duty.carry_out({"do": "leave", "attempt": 1}) == {"asked": 0}
    own = read_deadline(environ, 1)
    assert own.by == AGENTS and own.until - time.monotonic() > 3590
    told = Deadline(5.0, "preempted")
    write_deadline(environ, 1, told)
    duty.carry_out({"do": "leave", "attempt": 1})
    assert read_deadline(environ, 1) == told


def test_ranks_that_cannot_be_told_are_asked_to_leave_all_the_same(tmp_path, environ):
    (tmp_path / "beats").write_text("in the way")
    duty = Duty(tmp_path, "n1", b"k" * 32, environ)
    assert duty.carry_out({"do": "leave", "attempt": 1}) == {"asked": 0}


def test_what_is_torn_or_not_ours_is_no_deadline(environ):
    folder = beats_folder(environ, 1)
    write_deadline(environ, 1, Deadline(5.0, "preempted"))
    assert read_deadline(environ, 1) == Deadline(5.0, "preempted")
    deadline_file(folder).write_text('{"schema_version": 1, "until": "soon"}')
    assert read_deadline(environ, 1) is None
    deadline_file(folder).write_text("")
    assert read_deadline(environ, 1) is None
    assert read_deadline({}, 1) is None


def test_the_last_rank_of_a_node_takes_the_deadline_with_it(environ):
    own = {
        "FTSLURM_RUN_DIR": "/run", "FTSLURM_ATTEMPT": "1", "FTSLURM_TASKS_PER_NODE": "2",
        "SLURM_NTASKS": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    pulses = []
    for rank in ("0", "1"):
        env = RankEnvironment.read({**own, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        pulses.append(Pulse.open(env, environ))
    write_deadline(environ, 1, Deadline(5.0, "preempted"))
    pulses[0].remove()
    assert read_deadline(environ, 1) == Deadline(5.0, "preempted")
    pulses[1].remove()
    assert not beats_folder(environ, 1).parent.exists()


def test_agents_learn_of_a_signal_ask_slurm_and_every_node_is_told(tmp_path):
    """As real processes; squeue is a script. An undisturbed job asks Slurm nothing."""
    with Job(tmp_path, nodes=2, site=SITE) as job:
        squeue = tmp_path / "bin" / "squeue"
        asked = 'echo "squeue $*" >> "$FOLDER/calls"'
        at, end = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + more_s))
            for more_s in (0, 600)
        )
        squeue.write_text(f"#!/bin/bash\n{asked}\necho 'RUNNING {end} {at}'\n")
        attempt = job.claim()
        job.start_ranks(attempt)
        assert job.calls("squeue") == [] and job.calls("scontrol") == []
        for process in job.processes.values():
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        job.wait(lambda: job.events(attempt, "deadline"), "the leader has asked")
        (event,) = job.events(attempt, "deadline")
        assert (event["by"], event["signal"], event["node"]) == (
            "preempted", "SIGTERM", job.nodes[0],
        )  # fmt: skip
        # Both nodes are this machine, and so is the folder of their beats.
        environ = job.environ(job.nodes[1])
        job.wait(lambda: read_deadline(environ, attempt), "the ranks are told")
        told = read_deadline(environ, attempt)
        assert 300 < told.until - time.monotonic() <= 625
        assert len(job.calls("squeue")) == 1 and job.calls("scontrol") == []
        assert all(process.poll() is None for process in job.processes.values())
