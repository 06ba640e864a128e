"""A program's run without a process of it: what it finds, when it is told, how its attempts end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.program_run import ENVIRON, claim_next, make_run

from ftslurm.errors import RANK_FAILED, RANK_STOPPED
from ftslurm.files import write_json
from ftslurm.program.ending import ASKED, settle
from ftslurm.program.environment import child_environment
from ftslurm.program.leaving import exit_code, push_due
from ftslurm.program.progress import has_progressed, note_start, progressed_between, state_of
from ftslurm.recovery.actions import DONE, ENDED, REQUEUED, RESTART, STOP
from ftslurm.recovery.evidence import read_evidence, read_history
from ftslurm.recovery.policy import decide
from ftslurm.run.attempts import append_event, read_outcome
from ftslurm.run.control import STOP as STOP_ORDER
from ftslurm.run.control import ControlFiles
from ftslurm.run.rank import RankEnvironment, write_rank_error
from ftslurm.run.record import read_record
from ftslurm.run.spec import RecoverySpec

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def layout(tmp_path):
    layout = make_run(tmp_path / "run-1")
    claim_next(layout)
    return layout


def environment(layout, *, rank=3, attempt=1):
    return RankEnvironment.read({
        **ENVIRON, "FTSLURM_RUN_DIR": str(layout.root), "SLURM_PROCID": str(rank),
        "FTSLURM_ATTEMPT": str(attempt),
    })  # fmt: skip


# What a program finds.


def test_a_program_finds_what_torch_reads_and_keeps_what_slurm_has_set(layout):
    given = {**ENVIRON, "PATH": "/bin", "PYTHONUNBUFFERED": ""}
    env = environment(layout, attempt=3)
    found = child_environment(given, env, run_id="run-1", stop_file=Path("/tmp/x/stop"))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    assert [found[name] for name in names] == ["3", "4", "1", "2", "1", "1"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("n1", "20001")
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_RUN_ID"]) == ("2", "run-1")
    assert found["FTSLURM_RESUME_DIR"] == str(layout.resume)
    assert found["PYTHONUNBUFFERED"] == "", "the user's own choice wins"
    assert given.items() - {("MASTER_PORT", "20001")} <= found.items()


def test_commands_of_an_unpacked_environment_come_first(layout):
    given = {"PATH": "/usr/bin:/bin"}
    folder, stop_file = Path("/tmp/env/bin"), Path("/tmp/x/stop")
    env = environment(layout)
    found = child_environment(given, env, run_id="r", stop_file=stop_file, path_first=folder)
    assert found["PATH"] == "/tmp/env/bin:/usr/bin:/bin"


def test_outside_of_a_run_a_program_goes_on_as_it_would_have():
    code = (
        "import sys, ftslurm\n"
        "assert not any(name.startswith('ftslurm.') for name in sys.modules)\n"
        "assert 'pathlib' not in sys.modules, 'import ftslurm is to cost nothing'\n"
        "print(ftslurm.resume_dir(), ftslurm.resume_dir('here'), ftslurm.should_stop())\n"
    )
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "None here False\n", done.stderr


@pytest.mark.parametrize("writes", [True, False], ids=["said", "cannot-say"])
def test_term_ends_no_program_that_has_said_that_it_looks(tmp_path, writes):
    """In the very moment in which it has said so; one that cannot is ended as any other."""
    code = (
        "import os, signal\n"
        "from ftslurm.program import inside\n"
        "close = os.close\n"
        "os.close = lambda fd: (close(fd), os.kill(os.getpid(), signal.SIGTERM))\n"
        "inside.should_stop()\n"
        "os.close = close\n"
        "print(inside.should_stop(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('goes on')\n"
    )
    said = tmp_path / ("aware" if writes else "no/such/folder")
    environ = {**os.environ, "FTSLURM_STOP_FILE": str(tmp_path / "stop"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "FTSLURM_AWARE_FILE": str(said)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    ended = (0, "True\ngoes on\n") if writes else (-signal.SIGTERM, "False\n")
    assert (done.returncode, done.stdout) == ended, done.stderr


# How it is made to leave: pure.


@pytest.mark.parametrize(
    ("asked_for_s", "is_aware", "due"),
    [
        (0.0, False, signal.SIGTERM),
        (0.0, True, None),
        (9.9, True, None),
        (10.0, True, signal.SIGTERM),
        (11.9, False, signal.SIGTERM),
        (12.0, True, signal.SIGKILL),
        (12.0, False, signal.SIGKILL),
    ],
)
def test_a_program_that_does_not_look_is_told_by_term_and_none_outstays_the_deadline(
    asked_for_s, is_aware, due
):
    assert push_due(asked_for_s, is_aware=is_aware, deadline_s=10.0) == due


@pytest.mark.parametrize(
    ("returncode", "was_asked", "code"),
    [
        (0, False, 0),
        (3, False, 3),
        (127, False, 127),
        (137, False, RANK_FAILED),
        (-9, False, RANK_FAILED),
        (0, True, RANK_STOPPED),
        (-15, True, RANK_STOPPED),
        (1, True, RANK_STOPPED),
    ],
)
def test_the_ranks_code_is_the_programs_below_128_and_one_that_was_asked_comes_back(
    returncode, was_asked, code
):
    assert exit_code(returncode, was_asked=was_asked) == code


# How an attempt ended.


def failed(layout, *, rank, at):
    write_rank_error(environment(layout, rank=rank), ValueError("no such luck"), step=None, at=at)


def asked(layout, *, at, **facts):
    append_event(layout.attempt(1), ASKED, now=lambda: at, **facts)


def decided(layout, *, rc, attempt=1, term=False):
    settle(layout, attempt, rc=rc)
    record = read_record(layout)
    evidence = read_evidence(layout, record, attempt, rc=rc, term=term)
    return decide(read_history(layout, record, attempt), evidence, RecoverySpec())


def test_the_run_has_finished_when_the_launcher_says_that_every_rank_has(layout):
    assert decided(layout, rc=0).action == DONE
    assert layout.done.exists()


def test_ranks_that_were_asked_are_queued_again_and_no_failure_is_counted(layout):
    asked(layout, at=100.0, signal="SIGTERM")
    decision = decided(layout, rc=RANK_STOPPED)
    assert (decision.action, decision.failures_in_a_row) == (REQUEUED, 0)
    assert decision.reason == "stopped on SIGTERM"
    assert not layout.done.exists()


def test_a_failure_is_one_though_the_launcher_then_terms_the_other_ranks(layout):
    """srun --kill-on-bad-exit: rank 0 sees a TERM that is an echo of rank 3's end."""
    failed(layout, rank=3, at=100.0)
    asked(layout, at=102.5, signal="SIGTERM")
    decision = decided(layout, rc=RANK_STOPPED)
    assert (decision.action, decision.failures_in_a_row) == (RESTART, 1)
    assert "rank 3" in decision.reason and "no such luck" in decision.reason
    assert "starts the program again" in decision.reason


def test_ranks_that_die_of_a_peer_that_was_asked_to_leave_are_no_failure(layout):
    asked(layout, at=100.0, order=STOP_ORDER)
    failed(layout, rank=3, at=130.0)
    assert decided(layout, rc=RANK_STOPPED).action == ENDED


def test_a_rank_that_was_killed_is_a_failure_though_the_launcher_then_terms_the_others(layout):
    asked(layout, at=100.0, signal="SIGTERM")
    assert decided(layout, rc=137).action == RESTART


@pytest.mark.parametrize("facts", [{"signal": "SIGUSR1"}, {"signal": "SIGALRM"}])
def test_what_no_launcher_sends_is_a_request_whatever_the_code(layout, facts):
    asked(layout, at=100.0, **facts)
    assert decided(layout, rc=137).action == REQUEUED


def test_a_request_that_missed_rank_0_is_one_all_the_same(layout):
    assert decided(layout, rc=RANK_STOPPED).action == REQUEUED


def test_a_code_of_the_programs_own_ends_no_run_as_stopped(layout):
    failed(layout, rank=0, at=100.0)
    assert decided(layout, rc=RANK_STOPPED).action == RESTART


def test_an_order_that_was_obeyed_stays_until_it_is_acted_on(layout):
    files = ControlFiles(layout, "run-1")
    files.give(STOP_ORDER)
    asked(layout, at=1.0, order=STOP_ORDER)
    decided(layout, rc=RANK_STOPPED)
    assert files.read() == STOP_ORDER
    assert read_outcome(layout.attempt(1)).order == STOP_ORDER


def test_settling_twice_changes_nothing(layout):
    decided(layout, rc=0)
    before = layout.done.read_bytes()
    decided(layout, rc=0)
    assert layout.done.read_bytes() == before


# Progress.


def test_what_a_program_saves_is_progress_and_what_it_reads_is_not(layout):
    (layout.resume / "a").mkdir()
    (layout.resume / "a" / "state").write_text("1")
    note_start(layout, 1)
    (layout.resume / "a" / "state").read_text()
    (layout.resume / "empty").mkdir()
    assert not has_progressed(layout, 1)
    (layout.resume / "a" / "other").write_text("1")
    assert has_progressed(layout, 1)
    (layout.resume / "a" / "other").unlink()
    assert not has_progressed(layout, 1)
    os.utime(layout.resume / "a" / "state", ns=(1, 1))
    assert has_progressed(layout, 1)


def test_an_attempt_that_never_came_to_its_program_has_no_progress(layout):
    (layout.resume / "state").write_text("1")
    assert not has_progressed(layout, 1)


def test_progress_of_earlier_attempts_is_what_the_next_one_began_with(layout):
    state = layout.resume / "state"
    for number, text in ((1, "1"), (2, "12"), (4, "123"), (5, "123")):
        state.write_text(text)
        os.utime(state, ns=(1, 1))
        layout.attempt(number).root.mkdir(exist_ok=True)
        note_start(layout, number)
    assert progressed_between(layout, [1, 2, 3, 4, 5]) == [True, False, True, False]


def test_a_folder_that_is_not_there_is_an_empty_one(tmp_path):
    assert state_of(tmp_path / "nowhere") == state_of(tmp_path)


def test_failures_without_a_change_stop_the_run_and_a_change_begins_the_count_anew(layout):
    reasons = []
    for number in range(1, 8):
        note_start(layout, number)
        if number == 3:
            (layout.resume / "state").write_text("1")
        write_rank_error(environment(layout, attempt=number), ValueError("bad"), step=None)
        decision = decided(layout, rc=1, attempt=number)
        record = {"schema_version": 1, "cause": decision.cause}
        write_json(layout.attempt(number).decision_json, record)
        reasons.append((decision.action, decision.failures_in_a_row))
        claim_next(layout)
    assert reasons == [
        *((RESTART, 1), (RESTART, 2)),
        *((RESTART, 0), (RESTART, 1), (RESTART, 2), (RESTART, 3), (STOP, 4)),
    ]
    assert "4 failures in a row without a change in RUN/resume" in decision.reason
