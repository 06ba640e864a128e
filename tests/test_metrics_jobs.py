"""A run whose job was killed with its batch shell is called gone: Slurm is asked, seldom."""

from pathlib import Path

import pytest
from metrics_runs import MadeRun, only, read_samples, shown

from ftslurm.errors import RunError, SchedulerError
from ftslurm.metrics import command, job_look
from ftslurm.metrics.command import Keeper
from ftslurm.metrics.exposition import render
from ftslurm.metrics.job_look import ASK_APART_S, SECOND_LOOK_S, JobLooks, ask
from ftslurm.metrics.reading import RunReader
from ftslurm.metrics.samples import samples_of
from ftslurm.recovery.job_meant import JobsOnRecord
from ftslurm.run.jobs import Job
from ftslurm.scheduler.protocol import UNKNOWN, JobState
from ftslurm.scheduler.slurm import SlurmScheduler


class Asked:
    """Slurm, as it answers one after the other; the last answer stays."""

    def __init__(self, *answers):
        self.answers, self.asked, self.now = list(answers), [], 0.0
        self.looks = JobLooks(clock=lambda: self.now, ask=self)

    def __call__(self, root):
        self.asked.append((self.now, root))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    @property
    def times(self):
        return [now for now, _ in self.asked]

    def shown(self, state="quiet", job="12", *, root=Path("r1")):
        """Its files are renewed, and then it is somebody's turn."""
        is_gone = self.looks.is_gone(root, state, job)
        self.looks.ask_next()
        return is_gone


@pytest.mark.parametrize(
    ("answers", "gone_from"),
    [
        ([True], 60),
        ([False], None),
        ([False, True], 360),
        ([True, False], None),  # a successor that was not on record yet, or Slurm's own requeue
        ([True, None, True], 360),  # nobody could say meanwhile
        ([True, True, None], 60),
        ([True, True, False], 60),  # somebody has queued it again
    ],
)
def test_a_run_is_gone_once_two_looks_have_found_its_jobs_over(answers, gone_from):
    slurm, seen = Asked(*answers), {}
    for slurm.now in range(0, 1201, 30):
        slurm.shown()
        seen[slurm.now] = slurm.looks.is_gone(Path("r1"), "quiet", "12")
    gone = [now for now, is_gone in seen.items() if is_gone]
    assert (gone[0] if gone else None) == gone_from
    assert seen[1200] == (gone_from is not None and answers[-1] is not False)


def test_it_is_asked_of_every_five_minutes_and_sooner_only_to_hear_that_all_is_over_again():
    slurm = Asked(False, True, True, False)
    for slurm.now in range(0, 1501, 30):
        slurm.shown()
    assert slurm.times == [0, 300, 360, 660, 960, 1260]


def test_nobody_is_asked_of_a_run_that_shows_itself():
    slurm = Asked(True)
    for slurm.now in range(0, 601, 30):
        for state in ("running", "done", "stopped"):
            assert not slurm.shown(state)
    assert slurm.times == []


def test_one_that_is_quiet_now_and_then_is_asked_of_no_more_often_than_one_that_always_is():
    """A program that logs each three minutes is quiet for one of them."""
    slurm = Asked(False)
    for slurm.now in range(0, 3600, 30):
        slurm.shown("quiet" if slurm.now % 180 >= 120 else "running")
    assert len(slurm.times) <= 3600 / 300
    assert min(b - a for a, b in zip(slurm.times, slurm.times[1:])) >= 300


@pytest.mark.parametrize(
    "shown", [("waiting", "13"), ("quiet", "13"), ("waiting", "12"), ("running", "12")]
)
def test_what_was_said_counts_no_more_once_the_run_is_another_or_has_another_job(shown):
    """`ftslurm resume` has queued it: nobody need come any more."""
    slurm = Asked(True)
    for slurm.now in range(0, 121, 30):
        gone = slurm.shown()
    assert gone
    slurm.now = 150
    assert not slurm.shown(*shown)
    assert not slurm.shown(), "nor is the old word taken up again"
    assert slurm.times == [0, 60]


def test_of_a_thousand_runs_one_is_asked_about_at_a_time_and_each_in_its_turn():
    slurm = Asked(False)
    roots = [Path(f"r{number}") for number in range(1000)]
    for root in roots:
        slurm.looks.is_gone(root, "waiting", "12")
    while slurm.now < 4100:
        slurm.looks.ask_next()
        slurm.now += 0.3
    assert min(b - a for a, b in zip(slurm.times, slurm.times[1:])) >= ASK_APART_S
    first = [root for _, root in slurm.asked[:1000]]
    assert sorted(first) == sorted(roots), "each once, before one is asked about again"
    assert slurm.times[999] < 1000 * (ASK_APART_S + 0.3)


def test_a_scheduler_that_does_not_answer_is_left_alone_for_five_minutes():
    """It hangs for ten seconds each time: files of sixty quiet runs would be called stale."""
    slurm = Asked(None)
    for slurm.now in range(0, 1200, 2):
        for number in range(60):
            assert not slurm.shown(root=Path(f"r{number}"))
    assert slurm.times == [0, 300, 600, 900]


class Run:
    """As open_run finds it; its newest job is 12."""

    def __init__(self, state, *, done=False, alive=True):
        self.scheduler = self.record = self
        self.is_alive, self.state, self.done = alive, state, done
        self.layout, self.name = None, "slurm"
        self.asked = 0

    own_job_id = SlurmScheduler.own_job_id

    def controller_alive(self):
        self.asked += 1
        if isinstance(self.is_alive, Exception):
            raise self.is_alive
        return self.is_alive

    def look(self):
        if isinstance(self.state, Exception):
            raise self.state
        return self

    @property
    def is_over(self):
        return self.state.is_over


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.parametrize(
    ("run", "answer"),
    [
        (Run(JobState("CANCELLED")), True),
        (Run(JobState(UNKNOWN, "slurm_load_jobs error: Invalid job id specified")), True),
        (Run(JobState("NODE_FAIL")), True),
        (Run(JobState("PENDING")), False),
        (Run(JobState("RUNNING")), False),
        (Run(JobState(UNKNOWN, "Unable to contact slurm controller")), False),
        (Run(JobState("CANCELLED"), alive=False), None),
        (Run(JobState("CANCELLED"), alive=SchedulerError("`squeue` gave no answer")), None),
        (Run(JobState("COMPLETED"), done=True), False),
        (Run(RunError("no job of it is known")), False),
        (Run(OSError(116, "Stale file handle")), False),
    ],
)
def test_only_a_scheduler_that_answers_calls_a_run_over(tmp_path, monkeypatch, run, answer):
    monkeypatch.setattr(job_look, "open_run", lambda name: run)
    assert ask(tmp_path) is answer


@pytest.mark.parametrize(
    ("environ", "newest", "is_asked"),
    [
        ({"SLURM_JOB_ID": "12"}, "12", False),
        ({"SLURM_JOB_ID": "12"}, "13", True),  # a successor was queued
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "7_1",
         False),
        ({}, "12", True),
    ],
)  # fmt: skip
def test_nobody_is_asked_in_the_runs_own_job(tmp_path, monkeypatch, environ, newest, is_asked):
    run = Run(JobState("RUNNING"))
    on_record = JobsOnRecord(
        (Job("11", "slurm", "submit", 1.0), Job(newest, "slurm", "batch", 2.0))
    )
    monkeypatch.setattr(job_look, "open_run", lambda name: run)
    monkeypatch.setattr(job_look, "jobs_on_record", lambda layout, name: on_record)
    assert ask(tmp_path, environ=environ) is False
    assert bool(run.asked) == is_asked


def told(run, state, monkeypatch):
    """What a keeper writes after two looks."""
    monkeypatch.setattr(job_look, "open_run", lambda name: Run(JobState(state)))
    now = [0.0]
    looks = JobLooks(clock=lambda: now[0])
    reader = RunReader(run.layout, looks)
    for now[0] in (0.0, SECOND_LOOK_S):
        reader.read()
        looks.ask_next()
    return read_samples(render({"r1": samples_of(reader.read())}).decode())


def test_without_every_nobody_is_asked(tmp_path, monkeypatch, capsys):
    run = MadeRun(tmp_path)
    run.attempt(0, trained_to=25)
    monkeypatch.setattr(job_look, "open_run", lambda name: pytest.fail("it was asked"))
    for more in ((), ("--textfile", tmp_path)):
        shown(capsys, run.layout.root, *more)


def test_the_keeper_has_one_run_asked_about_after_the_other_and_none_while_it_writes(
    tmp_path, monkeypatch
):
    runs = [MadeRun(tmp_path / name) for name in "ab"]
    for run in runs:
        run.attempt(0, trained_to=25)
    now, asked, written = [0.0], [], []

    def sleep(seconds):
        now[0] += seconds
        if now[0] > 400:
            raise KeyboardInterrupt

    real = command._renew
    monkeypatch.setattr(command, "_renew", lambda *a, **k: written.append(now[0]) or real(*a, **k))
    looks = JobLooks(clock=lambda: now[0], ask=lambda root: asked.append((now[0], root)) or True)
    readers = [RunReader(run.layout, looks) for run in runs]
    Keeper(readers, looks, tmp_path, 30.0, sleep=sleep, clock=lambda: now[0]).run()
    times = [at for at, _ in asked]
    assert times == [pytest.approx(at, abs=1.0) for at in (0, 2, 60, 62, 360, 362)]
    assert [root for _, root in asked[:2]] == [run.layout.root for run in runs]
    assert not set(times) & set(written)
    last = read_samples((tmp_path / "r1.prom").read_text())
    assert only(last, "run_needs_person") == 1


def test_the_run_of_a_killed_job_needs_a_person_and_is_not_active(tmp_path, monkeypatch):
    run = MadeRun(tmp_path)
    run.attempt(0, trained_to=25)  # and an hour without a word
    alive = told(run, "RUNNING", monkeypatch)
    assert (only(alive, "run_active"), only(alive, "run_training")) == (1, 1)
    assert only(alive, "run_needs_person") == 0
    dead = told(run, "CANCELLED", monkeypatch)
    assert (only(dead, "run_active"), only(dead, "run_training")) == (0, 0)
    assert only(dead, "run_needs_person") == 1
    assert only(dead, "checkpoint_uncommitted_since_timestamp_seconds") is None


def test_a_job_that_was_cancelled_in_the_queue_leaves_no_run_that_waits(tmp_path, monkeypatch):
    run = MadeRun(tmp_path)
    run.attempt(0, trained_to=25)
    run.decide(1, 60, action="requeued")
    dead = told(run, "CANCELLED", monkeypatch)
    assert (only(dead, "run_waiting"), only(dead, "run_needs_person")) == (0, 1)
