"""A program that stops calling should_stop() is found, named and started again; others are not."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.agents import JOB, Job, is_gone
from fakes.program_run import ENVIRON, claim_next, make_run
from fakes.recovering import FakeScheduler
from fakes.views import silent

from ftslurm.diagnosis.hang import HangLimits, HangMemory, hung
from ftslurm.diagnosis.stragglers import StragglerLimits, Watcher
from ftslurm.files import read_json, write_json
from ftslurm.program.beat import Beat
from ftslurm.program.calls import Counter
from ftslurm.program.ending import ASKED, settle
from ftslurm.recovery.recover import recover
from ftslurm.run.attempts import append_event
from ftslurm.run.heartbeat import beats_folder, read_views
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.spec import RecoverySpec

ROOT = Path(__file__).resolve().parent.parent
RANK = "from ftslurm.program.rank import main; exit(main())"

# In its first attempt slow at first, busy for two seconds after its fifth call, and not heard of
# again after its twentieth. Its rank looks once a second, and has to see it go on four times.
HANGS_ONCE = """
import os, time, ftslurm
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
step = 0
while step < 25 and not ftslurm.should_stop():
    step += 1
    time.sleep({1: 1.5, 5: 2.0, 20: 600}.get(step, 0.5) if is_first else 0)
(ftslurm.resume_dir() / ("state-" + os.environ["RANK"])).write_text(str(step))
"""
LIMITS = {"hang_floor_s": 1.0, "phase_limit_s": {"evaluating": 12.0}}


def test_a_program_that_hangs_is_named_and_started_again_and_slow_is_not_hung(tmp_path):
    with Job(tmp_path, nodes=2, recovery=LIMITS, program=[sys.executable, "-c", HANGS_ONCE]) as job:
        for folder in (job.layout.code, job.layout.resume):
            folder.mkdir(mode=0o700)
        first = started(job)
        job.wait(lambda: job.events(first, "ended"), "the hung ranks are ended")
        (finding,) = job.findings(first)
        assert (finding["kind"], finding["acted"]) == ("hang", True), finding
        assert "ranks 0, 1 called ftslurm.should_stop() 20 times and then no more" in finding["why"]
        assert "recovery.phase_limit_s.evaluating" in finding["why"]
        assert "attempts/0001/evidence/stacks" in finding["why"]
        for number in (0, 1):
            kept = job.layout.attempt(first).root / "evidence" / "stacks" / f"rank-{number:05d}.txt"
            text = kept.read_text()
            assert "Python stacks:" in text and 'File "<string>", line 7 in <module>' in text, text
            assert "State: S (sleeping)" in text and " -c " in text, text
        assert all(is_gone(rank) for rank in job.ranks.values())
        assert not (job.layout.resume / "state-0").exists()
        assert recovered(job, first, rc=137) == ("restart", "hang")
        assert read_json(job.layout.attempt(first).decision_json)["blamed"] is None

        second = started(job)
        job.wait(lambda: all(map(is_gone, job.ranks.values())), "the next attempt ends")
        assert [rank.returncode for rank in job.ranks.values()] == [0, 0], job.said()
        assert not job.findings(second)
        assert recovered(job, second, rc=0)[0] == "done"
        assert not list(job.beats.rglob("*")), "nothing is left in memory"


def started(job):
    attempt = job.claim()
    job.layout.attempt(attempt).logs.mkdir(exist_ok=True)
    for node in job.nodes:
        job.start_rank(attempt, node, code=RANK)
    return attempt


def recovered(job, attempt, *, rc):
    """What `ftslurm recover` decides, with what these agents have put on record."""
    decision = recover(
        job.layout, FakeScheduler(), {"SLURM_JOB_ID": JOB}, attempt=attempt, rc=rc, term=False
    )
    return decision.action, decision.cause


# What its rank tells.


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """A rank without a process, and the counter of its program."""
    layout = make_run(tmp_path / "run-1")
    claim_next(layout)
    environ = {**ENVIRON, "FTSLURM_BEATS": str(tmp_path / "beats")}
    env = RankEnvironment.read({**environ, "FTSLURM_RUN_DIR": str(layout.root)})
    beat, folder = Beat(env, environ), beats_folder(environ, 1)
    monkeypatch.setenv("FTSLURM_CALLS_FILE", str(beat.calls_file))
    return SimpleNamespace(beat=beat, folder=folder, counter=Counter(), node=env.node)


def views(rank):
    return read_views(rank.folder, rank.node)


def test_who_never_calls_has_no_beat_and_whoever_does_is_counted(rank):
    for _ in range(3):
        rank.beat.look()
    assert views(rank) == [], "unknown, which is never hung"
    for calls in (2, 4, 4, 4):
        for _ in range(calls):
            rank.counter.add()
            time.sleep(0.01)
        rank.beat.look()
    (view,) = views(rank)
    assert (view.counted, view.phase, view.step, view.pid) == (True, "training", 14, os.getpid())
    assert 0.01 <= view.usual_step_s < 1
    assert view.window_own_s == 0.0, "held against no other rank's"
    time.sleep(0.1)
    rank.beat.look()
    assert views(rank)[0].age_s >= 0.1, "no call, no sign of life"
    rank.beat.leave()
    assert views(rank)[0].phase == "leaving"
    rank.beat.end()
    assert not rank.folder.parent.exists()


def test_a_program_in_several_processes_counts_into_one_place(rank):
    code = "from ftslurm.program.calls import Counter; one = Counter(); one.add(); one.add()"
    rank.counter.add()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
    rank.counter.add()
    rank.beat.look()
    assert views(rank)[0].step == 4


@pytest.mark.parametrize("path", [None, "/nowhere/calls", "/dev/null", "/dev/full", "/"])
def test_a_program_whose_calls_cannot_be_counted_runs_as_well(path, monkeypatch):
    monkeypatch.delenv("FTSLURM_CALLS_FILE", raising=False)
    if path is not None:
        monkeypatch.setenv("FTSLURM_CALLS_FILE", path)
    counter = Counter()
    counter.add()
    counter.add()


def test_where_no_beat_can_be_made_the_program_is_told_so_and_starts(rank, tmp_path, capsys):
    (tmp_path / "file").touch()
    environ = {**ENVIRON, "FTSLURM_BEATS": str(tmp_path / "file")}
    beat = Beat(RankEnvironment.read({**environ, "FTSLURM_RUN_DIR": str(tmp_path)}), environ)
    assert beat.calls_file is None
    beat.look()
    beat.leave()
    beat.end()
    assert "has no heartbeat" in capsys.readouterr().err


def test_a_call_costs_little_more_for_being_counted(rank):
    best_s = min(timed(rank.counter.add) for _ in range(20))
    assert best_s < 3e-6


def timed(act, count=2000):
    began = time.perf_counter()
    for _ in range(count):
        act()
    return (time.perf_counter() - began) / count


# How it is judged.


def counted(rank, seconds, **changes):
    of_program = {"counted": True, "in_collective": False, "collective_seq": 0, "step_own_s": 0.0}
    nothing_known = {"window_wall_s": 0.0, "window_own_s": 0.0, "window_cpu_s": 0.0}
    return silent(rank, seconds, **{**of_program, **nothing_known, **changes})


@pytest.mark.parametrize(
    ("usual_s", "limits", "found_after_s"),
    [
        (1.0, {}, 3600.0),
        (1.0, {"phase_limit_s": {"evaluating": 60.0}}, 60.0),
        (100.0, {"phase_limit_s": {"evaluating": 60.0}}, 310.0),
        (0.0, {"phase_limit_s": {"evaluating": 60.0}}, None),
        (1.0, {"phase_limit_s": {}}, None),
        (1.0, {"hang_factor": 0.0, "phase_limit_s": {"evaluating": 60.0}}, None),
    ],
)
def test_silence_has_the_limit_of_an_evaluation_or_of_long_steps(usual_s, limits, found_after_s):
    limits = HangLimits.of(RecoverySpec(**limits))

    def judged(seconds):
        ranks = [counted(rank, seconds, usual_step_s=usual_s) for rank in range(2)]
        return hung(ranks, HangMemory(), limits, at=1e6)

    assert judged((found_after_s or 1e5) - 2) is None
    assert (judged((found_after_s or 1e5) + 1) is not None) == (found_after_s is not None)


def test_as_long_as_one_rank_calls_nobody_hangs_and_different_counts_blame_nobody():
    limits = HangLimits.of(RecoverySpec())
    ranks = [counted(0, 0.5, step=90), counted(1, 9000, step=20)]
    assert hung(ranks, HangMemory(), limits, at=1e6) is None
    finding = hung([counted(0, 9000, step=90), ranks[1]], HangMemory(), limits, at=1e6)
    assert finding is not None and finding.culprits == ()
    assert "called ftslurm.should_stop() 20, 90 times" in finding.why


def test_ranks_of_a_program_need_not_be_as_fast_as_each_other():
    watcher = Watcher(StragglerLimits.of(RecoverySpec()))
    for second in range(60):
        ranks = [counted(0, 0.1, step=100 * second), counted(1, 0.1, step=second)]
        assert watcher.observe(ranks, at=float(second)) == []


# How it ends.


def test_who_leaves_since_the_agents_end_it_for_a_hang_has_not_left_on_request(tmp_path):
    layout = make_run(tmp_path / "run-1")
    claim_next(layout)
    paths = layout.attempt(1)
    append_event(paths, ASKED, now=lambda: 50.0, signal="SIGTERM", order=None)

    def found(kind, at, acted=True):
        write_json(paths.root / "agents.json", {
            "schema_version": 1, "findings": [{"kind": kind, "at": at, "acted": acted}],
        })  # fmt: skip
        outcome = settle(layout, 1, rc=75)
        paths.outcome_json.unlink(missing_ok=True)
        return outcome

    assert found("hang", 45.0) is None and found("node_lost", 45.0) is None
    for other in (("hang", 55.0), ("hang", 45.0, False), ("straggler", 45.0)):
        assert found(*other) is not None, other
