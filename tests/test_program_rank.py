"""The rank of a program as a process: what it passes on, how the program is told, how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.program_run import ENVIRON, claim_next, make_run

from ftslurm.errors import RANK_FAILED, RANK_STOPPED
from ftslurm.files import read_json
from ftslurm.program.ending import ASKED
from ftslurm.program.leaving import BY_CLOCK, Request
from ftslurm.program.rank import Watch
from ftslurm.run.attempts import read_events
from ftslurm.run.control import ControlFiles
from ftslurm.run.deadline import Deadline, write_deadline

ROOT = Path(__file__).resolve().parent.parent
START_S = 60
MAIN = """
from ftslurm.program import rank
rank.LATE_SIGNAL_S = {late_s} or rank.LATE_SIGNAL_S
exit(rank.main())
"""


class Rank:
    """A rank's process with a program that is a piece of Python."""

    def __init__(
        self, tmp_path, code, *, rank=0, deadline_s=60.0, environ=None, command=None, late_s=None
    ):
        program = command or [sys.executable, "-c", code]
        self.layout = make_run(tmp_path / "run-1", program=program, deadline_s=deadline_s)
        claim_next(self.layout)
        self.log = self.layout.attempt(1).logs / f"rank-{rank}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", MAIN.format(late_s=late_s)],
                env={
                    **os.environ, **ENVIRON, "PYTHONPATH": str(ROOT), "SLURM_PROCID": str(rank),
                    "FTSLURM_RUN_DIR": str(self.layout.root), "TMPDIR": str(tmp_path),
                    **(environ or {}),
                },
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def says(self):
        return self.log.read_text()

    def wait_for(self, text):
        deadline = time.monotonic() + START_S
        while text not in self.says():
            assert time.monotonic() < deadline, self.says()
            time.sleep(0.02)

    def end(self):
        """The exit code."""
        return self.process.wait(START_S)

    def asked(self):
        return [event for event in read_events(self.layout.attempt(1)) if event["kind"] == ASKED]


@pytest.fixture
def rank(tmp_path):
    started = []

    def start(code="", **options):
        started.append(Rank(tmp_path, code, **options))
        return started[-1]

    yield start
    for item in started:
        item.process.kill()
        item.process.wait()


WAITING = "import time\nprint('begun', flush=True)\ntime.sleep(60)\n"
LOOKING = (
    "import sys, time, ftslurm\nftslurm.should_stop()\nprint('begun', flush=True)\n"
    "while not ftslurm.should_stop(): time.sleep(0.01)\n"
)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_program_that_knows_of_nothing_is_ended_by_term_at_the_signal(rank, number):
    one = rank(WAITING)
    one.wait_for("begun")
    one.process.send_signal(number)
    assert one.end() == RANK_STOPPED
    (event,) = one.asked()
    assert event["signal"] == signal.Signals(number).name
    assert not list(one.layout.attempt(1).ranks.iterdir())


def test_a_program_that_handles_term_saves_and_may_leave_as_it_likes(rank):
    code = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        "    open(os.environ['FTSLURM_RESUME_DIR'] + '/state', 'w').write('saved')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
    )
    one = rank(code + WAITING)
    one.wait_for("begun")
    one.process.send_signal(signal.SIGUSR1)
    assert one.end() == RANK_STOPPED
    assert (one.layout.resume / "state").read_text() == "saved"


def test_a_warn_signal_that_slurm_sends_to_every_process_kills_no_program(rank):
    """proctrack/linuxproc: the program gets USR1 itself, beside its rank."""
    code = "import os\nprint('pid', os.getpid(), 'end', flush=True)\n" + WAITING
    one = rank(code)
    one.wait_for("begun")
    pid = int(one.says().split()[1])
    os.kill(pid, signal.SIGUSR1)
    os.kill(pid, signal.SIGUSR2)
    time.sleep(0.3)
    assert one.process.poll() is None, one.says()


def test_a_program_that_looks_is_left_alone_and_leaves_by_itself(rank):
    one = rank(LOOKING + "time.sleep(1)\nprint('saved', flush=True)\n")
    one.wait_for("begun")
    one.process.send_signal(signal.SIGUSR1)
    assert one.end() == RANK_STOPPED
    assert "saved" in one.says() and "it gets" not in one.says()


def test_a_program_that_looks_outlives_a_term_that_slurm_sends_to_every_process(rank):
    one = rank(LOOKING.replace("begun'", "begun', __import__('os').getpid(), 'end'") + WAITING)
    one.wait_for("end")
    one.process.send_signal(signal.SIGTERM)
    os.kill(int(one.says().split()[1]), signal.SIGTERM)
    one.wait_for("begun\n")
    assert one.process.poll() is None


def test_workers_that_such_a_program_forks_still_end_by_term(rank):
    code = (
        "import multiprocessing, ftslurm, time\n"
        "ftslurm.should_stop()\n"
        "worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "worker.start(); worker.terminate(); worker.join(); print(worker.exitcode)\n"
    )
    one = rank(code)
    assert one.end() == 0, one.says()
    assert one.says() == "-15\n"


def test_a_program_that_looks_and_stays_gets_term_at_the_deadline_and_kill_after_it(rank):
    one = rank(LOOKING + WAITING.replace("begun", "stays"), deadline_s=1.0)
    one.wait_for("begun")
    sent_at = time.monotonic()
    one.process.send_signal(signal.SIGUSR1)
    assert one.end() == RANK_STOPPED
    assert time.monotonic() - sent_at >= 3.0
    assert "it gets SIGTERM" in one.says() and "it gets SIGKILL" in one.says()


@pytest.mark.parametrize(
    ("frozen_s", "told_s", "by", "saves"),
    [(0.3, 60.0, "preempted", True), (60.0, 0.3, "preempted", False), (60.0, 0.3, "agents", True)],
)
def test_a_program_has_the_time_that_slurm_gives_now_not_what_it_gave_at_submit(
    rank, tmp_path, frozen_s, told_s, by, saves
):
    save = f"time.sleep({4 if saves else 60})\nprint('has saved', flush=True)\n"
    environ = {"FTSLURM_BEATS": str(tmp_path / "beats"), "SLURM_JOB_ID": ""}
    one = rank(LOOKING + save, deadline_s=frozen_s, environ=environ)
    one.wait_for("begun")
    write_deadline(environ, 1, Deadline(time.monotonic() + told_s, by))
    one.process.send_signal(signal.SIGUSR1)
    assert one.end() == RANK_STOPPED
    assert ("has saved" in one.says(), "it gets SIGKILL" in one.says()) == (saves, not saves)


@pytest.mark.parametrize(
    ("signal_name", "order", "told_s", "by", "left_s"),
    [
        (None, "pause", None, "", 60.0),
        (None, "pause", 8.0, "preempted", 8.0),
        (None, "pause", 900.0, "preempted", 60.0),
        (BY_CLOCK, None, None, "", 25.0),  # the lead of 30 s, less the margin
        (BY_CLOCK, None, 8.0, "ending", 8.0),
        (BY_CLOCK, None, 900.0, "preempted", 25.0),
        ("SIGUSR1", None, 900.0, "preempted", 900.0),
        ("SIGUSR1", None, 3600.0, "agents", 60.0),
        ("SIGUSR1", None, -700.0, "time_limit", 60.0),  # of a signal that the agents alone got
    ],
)
def test_the_end_of_the_job_shortens_what_an_order_or_the_clock_gave_and_a_signal_takes_it_as_it_is(
    tmp_path, monkeypatch, signal_name, order, told_s, by, left_s
):
    monkeypatch.setenv("FTSLURM_BEATS", str(tmp_path / "beats"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    request = Request(signal_name, order, at=1000.0, since=500.0)
    if told_s is not None:
        write_deadline(os.environ, 1, Deadline(500.0 + told_s, by))
    own = SimpleNamespace(emergency_deadline_s=None)
    spec = SimpleNamespace(checkpoint=own, cluster=SimpleNamespace(signal_lead_s=30))
    record = SimpleNamespace(emergency_deadline_s=60.0, spec=spec)
    watch = SimpleNamespace(record=record, env=SimpleNamespace(attempt=1, stop_at=1000.0))
    assert Watch._deadline_s(watch, request) == pytest.approx(left_s)


def test_a_rank_that_was_stopped_itself_gives_term_before_it_kills(monkeypatch):
    sent = []
    monkeypatch.setattr("ftslurm.program.child.send", lambda child, number: sent.append(number))
    request = Request("SIGUSR1", None, at=0.0, since=time.monotonic() - 100.0)
    watch = SimpleNamespace(request=request, is_aware=True, _sent=None, _deadline_s=lambda _: 1.0)
    for _ in range(3):
        Watch._push(watch, None)
    assert sent == [signal.SIGTERM, signal.SIGKILL]


def test_a_program_is_told_by_the_clock_when_no_signal_came(rank):
    one = rank(LOOKING, environ={"FTSLURM_STOP_AT": str(int(time.time()) + 3)})
    assert one.end() == RANK_STOPPED
    assert one.asked()[0]["signal"] == "SIGALRM"


def test_a_program_is_told_of_an_operators_order(rank):
    one = rank(LOOKING)
    one.wait_for("begun")
    ControlFiles(one.layout, "run-1").give("pause")
    assert one.end() == RANK_STOPPED
    (event,) = one.asked()
    assert (event["order"], event["signal"]) == ("pause", None)


def test_a_rank_that_was_asked_before_its_program_ran_does_not_start_it(rank):
    one = rank("print('ran')", environ={"FTSLURM_STOP_AT": "1"})
    assert one.end() == RANK_STOPPED
    assert "ran" not in one.says()


def test_a_rank_that_leaves_keeps_its_code_when_the_launcher_terms_it_meanwhile(rank):
    """srun --kill-on-bad-exit sends TERM as soon as the first rank has left."""
    one = rank(WAITING)
    one.wait_for("begun")
    while one.process.poll() is None:
        one.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert one.end() == RANK_STOPPED


def test_a_failing_program_leaves_its_code_its_last_words_and_the_time_of_its_end(rank):
    one = rank("import time\nprint(time.time())\nraise ValueError('no such luck')", rank=3)
    assert one.end() == 1
    record = read_json(one.layout.attempt(1).ranks / "rank-00003.json")
    assert record["type"] == "ProgramFailed"
    assert "ended with code 1" in record["message"]
    assert record["message"].endswith("the last line of its log: ValueError: no such luck")
    assert 0 <= record["at"] - float(one.says().split()[0]) < 60


def test_a_bad_end_that_the_signal_explains_a_moment_later_is_no_failure(rank):
    """Preemption kills a peer first: the program dies of the lost connection, then the rank of its
    own is told."""
    one = rank("print('begun', flush=True)\nraise ConnectionError", late_s=60.0)
    one.wait_for("ConnectionError")
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == RANK_STOPPED
    assert not list(one.layout.attempt(1).ranks.iterdir())


def test_a_program_that_was_killed_says_by_which_signal(rank):
    one = rank("import os\nos.kill(os.getpid(), 9)")
    assert one.end() == RANK_FAILED
    (path,) = one.layout.attempt(1).ranks.iterdir()
    assert "was killed by signal 9 (Killed)" in read_json(path)["message"]


def test_every_word_arrives_as_it_was_typed(rank):
    words = ["a b", "x'y\"z", "", "ü€😀", "$HOME `id` ${a:-b}", "--", "new\nline", "\\", "\udcff"]
    code = "import json, sys\nprint(json.dumps(sys.argv[1:]))"
    one = rank(command=[sys.executable, "-c", code, *words])
    assert one.end() == 0, one.says()
    assert json.loads(one.says()) == words


def test_what_a_program_leaves_running_is_ended_with_it(rank):
    one = rank(command=["bash", "-c", "sleep 60 & echo $!; exit 0"])
    assert one.end() == 0, one.says()
    wait_until_gone(int(one.says()))


def wait_until_gone(pid):
    deadline = time.monotonic() + START_S
    while process_state(pid) not in ("", "Z", "X"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def process_state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_shell_and_what_it_has_started_are_told_together(rank):
    one = rank(command=["bash", "-c", f'{sys.executable} -c "{WAITING}"; true'])
    one.wait_for("begun")
    one.process.send_signal(signal.SIGUSR1)
    began = time.monotonic()
    assert one.end() == RANK_STOPPED
    assert time.monotonic() - began < 50, "and not at its own end"


def test_a_program_dies_with_its_rank(rank):
    one = rank("import os\nprint('pid', os.getpid(), 'end', flush=True)\n" + WAITING)
    one.wait_for("begun")
    pid = int(one.says().split()[1])
    one.process.kill()
    one.process.wait()
    wait_until_gone(pid)


def test_a_command_that_is_not_on_this_node_is_an_error_that_names_the_node(rank):
    one = rank(command=["no-such-command"])
    assert one.end() == 1
    assert "`no-such-command` cannot be run on n2" in one.says()
