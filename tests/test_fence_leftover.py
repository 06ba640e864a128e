"""A real process that was thought dead goes on while the next attempt trains: nothing of it gets
into the run's history, and the run's own record says that it was there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.checkpoint.commit import decode_commit
from ftslurm.files import read_json, write_json
from ftslurm.recovery.claim import adoptable, choose_port
from ftslurm.replay.trace import read_trace
from ftslurm.run.attempts import (
    Attempt,
    append_event,
    claim,
    read_events,
    read_outcome,
    read_progress,
)
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec, RunSpec, to_dict
from ftslurm.run.status import read_story, render_story
from ftslurm.run.timeline import LATE_S

ROOT = Path(__file__).resolve().parent.parent
STEPS, INTERVAL = 30, 10
DEADLINE_S = 60


class ByHand:
    """A run whose batch loop is the test: it claims attempts and starts one rank for each."""

    def __init__(self, root):
        self.layout = RunLayout(root)
        self.layout.steps.mkdir(parents=True)
        self.held = self.layout.root.with_name("held")
        spec = RunSpec(
            steps=STEPS,
            entry="rank:fakes.rank:main",
            checkpoint=CheckpointSpec(interval_steps=INTERVAL, keep_last=9),
            user={"step_s": 0.0},
        )
        self.spec = to_dict(spec)
        self.processes = []

    def begin(self, *, stops="", slow_from=None):
        """Claim the next attempt and start its rank. `slow_from`: a step from which on it takes
        10 s for each, until it is told to `hurry`."""
        self.spec["user"] = {"step_s": 0.0}
        if slow_from is not None:
            self.held.touch()
            own = {"slow_while": str(self.held), "slow_from": slow_from, "slow_step_s": 10.0}
            self.spec["user"].update(own)
        write_json(self.layout.run_json, {
            "schema_version": 1, "run_id": "fenced", "scheduler": "local", "spec": self.spec,
        })  # fmt: skip
        claimed = claim(self.layout, Attempt(
            0, "12", 0, ["n1"], claimed_at=time.time(), adopted=adoptable(self.layout),
        ))  # fmt: skip
        append_event(self.layout.attempt(claimed.number), "claimed")
        self.claimed_at = claimed.claimed_at
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LEFTOVER_STOPS": stops,
            "FTSLURM_RUN_DIR": str(self.layout.root),
            "FTSLURM_ATTEMPT": str(claimed.number),
            "FTSLURM_TASKS_PER_NODE": "1",
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(choose_port(f"{self.layout.root} {claimed.number}")),
        }
        argv = [sys.executable, "-m", "tests.fakes.leftover"]
        with self.words(claimed.number).open("wb") as stream:
            process = subprocess.Popen(argv, env=environ, stderr=stream)
        self.processes.append(process)
        return claimed.number, process

    def hurry(self):
        self.held.unlink()

    def go_on(self, leftover):
        """Once what it says is late, and cannot have come with the claim of the next attempt."""
        wait_for(lambda: time.time() > self.claimed_at + LATE_S)
        leftover.send_signal(signal.SIGCONT)

    def words(self, attempt):
        """What its rank has said on stderr."""
        return self.layout.root / f"stderr-{attempt}"

    def ends(self, attempt, *, well):
        """Wait for the attempt's rank; what it has said."""
        code = self.processes[attempt - 1].wait(DEADLINE_S)
        said = self.words(attempt).read_text()
        assert (code == 0) == well, f"attempt {attempt} left with {code}: {said}"
        return said

    def wait_for_step(self, attempt, step):
        def reached():
            progress = read_progress(self.layout.attempt(attempt))
            return progress is not None and progress.step >= step

        wait_for(reached)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_for(look):
    deadline = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_stopped(process):
    def stopped():
        assert process.poll() is None
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"

    wait_for(stopped)


def contents(folder):
    """Every file below `folder` with what is in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = ByHand(tmp_path_factory.mktemp("undisturbed") / "run")
    run.begin()
    run.ends(1, well=True)
    return read_trace(run.layout), read_json(run.layout.done)["parameter_digest"]


@pytest.fixture
def run(tmp_path):
    run = ByHand(tmp_path / "run")
    yield run
    run.end()


def losses(trace):
    return {step: row.loss.hex() for step, row in trace.items()}


def publisher(layout, step):
    """The attempt whose step this is."""
    return read_json(layout.steps / f"step-{step:012d}" / "manifest.json")["attempt"]


def test_a_step_that_a_leftover_publishes_makes_way_for_the_new_attempts_own(run, undisturbed):
    _, old = run.begin(stops="rename-20")
    wait_until_stopped(old)  # behind its last look at the journal: the rename comes next
    _, new = run.begin(slow_from=12)
    run.wait_for_step(2, 12)
    new.send_signal(signal.SIGSTOP)
    wait_until_stopped(new)
    run.go_on(old)
    assert "attempt 1 has been superseded by attempt 2" in run.ends(1, well=False)
    assert publisher(run.layout, 20) == 1, "the leftover came too late to test anything"
    run.hurry()
    new.send_signal(signal.SIGCONT)
    run.ends(2, well=True)

    trace, digest = undisturbed
    assert losses(read_trace(run.layout)) == losses(trace)
    assert read_json(run.layout.done)["parameter_digest"] == digest
    assert read_json(run.layout.done)["attempt"] == 2
    assert [publisher(run.layout, step) for step in (10, 20, 30)] == [1, 2, 2]
    (home,) = run.layout.quarantine.iterdir()
    assert (
        "published by attempt 1 after attempt 2 was claimed" in (home / "reason.json").read_text()
    )
    assert decode_commit((home / f"step-{20:012d}" / "COMMITTED").read_bytes()).step == 20

    kinds = [event["kind"] for event in read_events(run.layout.attempt(2))]
    assert kinds.count("rejected") == 1
    story = read_story(run.layout, now=time.time())
    assert story.attempts[0].late is not None and story.attempts[0].late.kinds == ["error"]
    assert story.attempts[1].late is None
    told = render_story(story, now=time.time())
    assert "a leftover of it still wrote (error)" in told
    assert "quarantined step-000000000020-001: " in told and "published by attempt 1 after" in told


def test_what_a_leftover_writes_stays_with_its_own_attempt(run, undisturbed):
    """It is stopped between two steps, trains on to its next save and is refused there."""
    _, old = run.begin(stops="step-13")
    wait_until_stopped(old)
    number, new = run.begin(slow_from=12)
    run.wait_for_step(number, 12)
    new.send_signal(signal.SIGSTOP)
    wait_until_stopped(new)
    before = contents(run.layout.attempt(number).root)
    trace_before = run.layout.trace_file(number).read_bytes()
    run.go_on(old)
    assert "superseded" in run.ends(1, well=False)

    assert contents(run.layout.attempt(number).root) == before
    assert run.layout.trace_file(number).read_bytes() == trace_before
    assert read_progress(run.layout.attempt(1)).step == 20, "it had to train on"
    assert read_story(run.layout, now=time.time()).last_step < 20
    assert max(read_trace(run.layout)) < 20
    assert read_outcome(run.layout.attempt(1)) is None
    run.hurry()
    new.send_signal(signal.SIGCONT)
    run.ends(2, well=True)
    assert losses(read_trace(run.layout)) == losses(undisturbed[0])
    assert read_json(run.layout.done)["attempt"] == number


def test_a_leftovers_step_is_adopted_by_nobody_when_the_new_attempt_dies_too(run, undisturbed):
    _, old = run.begin(stops="rename-20")
    wait_until_stopped(old)
    number, new = run.begin(slow_from=12)
    run.wait_for_step(number, 12)
    new.kill()
    new.wait()
    run.go_on(old)
    run.ends(1, well=False)
    assert publisher(run.layout, 20) == 1
    number, _ = run.begin()
    run.ends(number, well=True)
    claimed = json.loads(run.layout.attempt(number).attempt_json.read_text())
    assert [item["step"] for item in claimed["adopted"]] == [10]
    assert losses(read_trace(run.layout)) == losses(undisturbed[0])
    assert publisher(run.layout, 20) == number
    assert "rejected" in [event["kind"] for event in read_events(run.layout.attempt(number))]
    told = render_story(read_story(run.layout, now=time.time()), now=time.time())
    assert "from step 10 to step 30, finished" in told and "quarantined step-" in told


def test_a_leftover_that_had_committed_its_last_step_says_neither_done_nor_how_it_ended(run):
    """Its last step was published after the claim: it is not the run's."""
    _, old = run.begin(stops="rename-30")
    wait_until_stopped(old)
    number, new = run.begin(slow_from=22)
    run.wait_for_step(number, 22)
    new.send_signal(signal.SIGSTOP)
    wait_until_stopped(new)
    run.go_on(old)
    run.ends(1, well=False)
    assert publisher(run.layout, 30) == 1
    assert not run.layout.done.exists()
    assert read_outcome(run.layout.attempt(1)) is None
    run.hurry()
    new.send_signal(signal.SIGCONT)
    run.ends(2, well=True)
    assert read_json(run.layout.done)["attempt"] == number
