"""The batch node's side of a preflight: it listens, ends by its deadline, and says what is to be
done. What the ranks would say is said by a shell here."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.recovering import FakeScheduler, make_layout

from ftslurm.errors import PREFLIGHT_NAMED, RANK_STOPPED
from ftslurm.files import read_json
from ftslurm.health.pairwise import GEMM
from ftslurm.node import preflight as module
from ftslurm.node.preflight import preflight
from ftslurm.node.preflight_lines import line, parse
from ftslurm.recovery.recover import recover
from ftslurm.run.attempts import AdoptedStep, Attempt, claim, read_events, read_outcome

ROOT = Path(__file__).resolve().parent.parent
NODES = ["n1", "n2", "n3"]
JOB = {"SLURM_JOB_ID": "12"}


@pytest.fixture
def layout(tmp_path, monkeypatch):
    layout = make_layout(tmp_path)
    adopted = [AdoptedStep(40, "d")]
    claim(layout, Attempt(0, "12", 0, NODES, 1.0, adopted, tasks_per_node=1, world_size=3))
    monkeypatch.setattr(module, "LAST_S", 3.0)
    monkeypatch.setattr(module, "TERM_WAIT_S", 0.5)
    return layout


def saying(*lines, then="", code=0):
    """A step that says these lines, does something, and leaves."""
    said = "\n".join(f"echo {shlex.quote(text)}" for text in lines)
    return ["bash", "-c", f"{said}\n{then}\nexit {code}"]


def all_say(kind, **facts):
    return [line(kind, rank=rank, node=node, **facts) for rank, node in enumerate(NODES)]


def trials(*seconds):
    told = [
        {"what": GEMM, "nodes": [node], "seconds": value, "rank": rank}
        for rank, (node, value) in enumerate(zip(NODES, seconds))
    ]
    took = line("took", rank=0, node="n1", seconds={GEMM: 1.5})
    return "\n".join([*(line("trial", rank=0, node="n1", trial=one) for one in told), took])


def found(layout):
    return read_json(layout.attempt(1).preflight_json)


def test_good_nodes_get_their_ranks_and_the_seconds_are_told(layout, capfd):
    step = saying("a library's word", *all_say("here"), trials(1.0, 1.1, 0.9), *all_say("end"))
    assert preflight(layout, 1, step) == 0
    record = found(layout)
    assert (record["word"], record["bad"], record["seconds"][GEMM]) == ("clean", {}, 1.5)
    said = capfd.readouterr().err
    assert "preflight: 3 nodes in " in said and "gemm 1.5" in said and "nothing was found" in said
    (event,) = [e for e in read_events(layout.attempt(1)) if e["kind"] == "preflight"]
    assert event["word"] == "clean"


def test_a_node_that_is_named_keeps_all_ranks_from_starting(layout, capfd):
    step = saying(*all_say("here"), trials(1.0, 9.0, 1.0), *all_say("end"))
    assert preflight(layout, 1, step) == PREFLIGHT_NAMED
    assert list(found(layout)["bad"]) == ["n2"]
    assert "node n2 is left out: rank 1 on it takes 9.00 s" in capfd.readouterr().err


def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_others_took(layout):
    said = [*all_say("here"), *all_say("doing", part=GEMM), *all_say("end")[:2]]
    began = time.monotonic()
    assert preflight(layout, 1, saying(*said, then="sleep 200")) == PREFLIGHT_NAMED
    assert time.monotonic() - began < 100
    assert found(layout)["bad"] == {"n3": "it stopped answering in multiplying matrices"}


def test_the_node_of_rank_0_is_named_by_those_whom_it_does_not_answer(layout):
    said = [*all_say("here"), *all_say("unanswered", why="rank 0 has not answered")[1:]]
    assert preflight(layout, 1, saying(*said, then="sleep 200")) == PREFLIGHT_NAMED
    assert found(layout)["bad"] == {"n1": "it stopped answering"}


def test_who_has_not_come_is_named_where_most_have(layout):
    here, ends = all_say("here")[:2], all_say("end")[:2]
    absent = line("absent", rank=0, node="n1", who=2)
    step = saying(*here, absent, *ends, then="sleep 200")
    assert preflight(layout, 1, step) == PREFLIGHT_NAMED
    assert found(layout)["bad"] == {"n3": "it had not come when the others no longer waited for it"}


def test_words_that_were_torn_are_held_against_nobody_where_all_have_ended(layout):
    """With SLURM_UNBUFFEREDIO=1 a word may come within another's: both are lost, or one."""
    ends = all_say("end")
    took = line("took", rank=0, node="n1", seconds={GEMM: 1.5})
    torn = [took[:30] + ends[2][:20], ends[2][20:] + took[30:]]
    said = [*all_say("here"), trials(1.0, 1.0, 1.0), *ends[:2], *torn]
    assert preflight(layout, 1, saying(*said)) == 0
    assert found(layout)["bad"] == {}


UNENDING = "trap '' TERM; sleep 200 & wait; wait"


@pytest.mark.parametrize("ended, rc", [([], RANK_STOPPED), (all_say("end"), 0)])
def test_a_step_that_does_not_end_by_term_is_killed_and_no_rank_meets_what_is_left_of_it(
    layout, capfd, monkeypatch, ended, rc
):
    monkeypatch.setattr(module, "LAST_S", 60.0)
    step = saying(*all_say("here"), trials(1.0, 1.0, 1.0), *ended, then=UNENDING)
    began = time.monotonic()
    assert preflight(layout, 1, step, deadline_s=8) == rc
    assert time.monotonic() - began < 100
    said = capfd.readouterr().err
    assert "cut off after 8 s" in said
    assert ("no rank is started" in said) == bool(rc)
    # Nobody has asked the job to leave: it is a failure, and counts.
    assert read_outcome(layout.attempt(1)) is None


BUG = "KeyError: 'there is no such key'"


@pytest.mark.parametrize(
    "step",
    [
        saying(*all_say("broken", why=BUG)),
        saying("srun: error: Unable to create step", code=1),
        saying(*all_say("here"), then="kill -KILL $$"),
        saying(*(text[:40] for text in all_say("here"))),
        ["/nowhere/srun"],
    ],
)
def test_a_preflight_that_breaks_is_told_of_and_the_ranks_start(layout, monkeypatch, capfd, step):
    for name, value in {"RUN_DIR": layout.root, "ATTEMPT": 1}.items():
        monkeypatch.setenv(f"FTSLURM_{name}", str(value))
    assert module.main(step) == 0
    assert "the ranks start without it" in capfd.readouterr().err


def test_a_rank_that_broke_is_no_finding_about_its_node(layout):
    said = [*all_say("here"), *all_say("end")[:2], all_say("broken", why=BUG)[2]]
    assert preflight(layout, 1, saying(*said, trials(1.0, 1.0, None))) == 0
    assert found(layout)["word"] == "open"


def test_nothing_is_begun_so_near_to_the_end_of_the_job(layout, capfd):
    assert preflight(layout, 1, ["/nowhere"], stop_at=time.time() + 60) == 0
    assert "the end of the job is near" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGTERM"])
def test_ranks_that_are_told_to_leave_make_the_job_leave(layout, name):
    step = saying(*all_say("here"), all_say("stopped", signal=name)[1], then="sleep 200")
    assert preflight(layout, 1, step) == RANK_STOPPED
    outcome = read_outcome(layout.attempt(1))
    assert (outcome.result, outcome.step, outcome.signal) == ("stopped", 40, name)
    assert not layout.attempt(1).preflight_json.exists()
    assert [e["signal"] for e in read_events(layout.attempt(1)) if e["kind"] == "signal"] == [name]


def test_a_preemption_that_only_tasks_are_told_of_is_no_failure(layout):
    """At the start of grace Slurm sends TERM to them and not to the batch shell."""
    step = saying(*all_say("here"), all_say("stopped", signal="SIGTERM")[1], then="sleep 200")
    rc = preflight(layout, 1, step)
    decision = recover(layout, FakeScheduler(), JOB, attempt=1, rc=rc, term=False)
    assert (decision.action, decision.cause) == ("requeued", "asked_to_leave"), decision.reason
    assert not decision.is_failure


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_that_kills_python_while_it_loads_is_one(layout, number):
    assert preflight(layout, 1, saying(code=128 + number)) == RANK_STOPPED
    assert read_outcome(layout.attempt(1)).result == "stopped"


def test_it_leaves_when_it_is_told_itself(layout):
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FTSLURM_RUN_DIR": str(layout.root),
        "FTSLURM_ATTEMPT": "1",
    }
    argv = [
        sys.executable,
        "-m",
        "ftslurm.node.preflight",
        *saying(*all_say("here"), then="sleep 200"),
    ]
    process = subprocess.Popen(argv, env=environ)
    log = layout.attempt(1).root / "preflight.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "here" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == RANK_STOPPED


def test_only_whole_lines_of_its_own_are_heard():
    text = line("doing", rank=3, node="n4", part=GEMM)
    for before in ("", "3: ", line("trial", rank=0, node="n1")[:25]):
        told = parse(before + text)
        assert told == {"kind": "doing", "rank": 3, "node": "n4", "part": GEMM}
    for other in ("", text[:-3], "ftslurm-preflight: []", 'ftslurm-preflight: {"kind": "end"}'):
        assert parse(other) is None
