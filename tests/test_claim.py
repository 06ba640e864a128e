"""`ftslurm claim` gives each attempt its own number, fence and port."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoints import make_step

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import write_json
from ftslurm.recovery.claim import FIRST_PORT, NUM_PORTS, choose_port, claim_attempt, is_free_here
from ftslurm.run.attempts import read_attempt, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import ClusterSpec, RunSpec, to_dict

ROOT = Path(__file__).resolve().parent.parent
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[03-04]"}


@pytest.fixture(autouse=True)
def no_controller(monkeypatch):
    """These jobs are known to no Slurm, not even on a machine that has one."""
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path)
    record = {
        "schema_version": 1,
        "run_id": "gpt-test",
        "scheduler": "slurm",
        "spec": to_dict(RunSpec(cluster=ClusterSpec(nodes=2))),
    }
    write_json(layout.run_json, record)
    return layout


def test_a_claim_says_number_first_node_and_port(layout):
    word, attempt, address, port, stop_at, nodes, count = claim_attempt(layout, JOB).split()
    assert (word, attempt, address, stop_at) == ("go", "1", "n03", "0")
    assert (nodes, count) == ("n03,n04", "2")
    assert FIRST_PORT <= int(port) < FIRST_PORT + NUM_PORTS
    claimed = read_attempt(layout, 1)
    assert (claimed.job_id, claimed.restart_count, claimed.nodes) == ("12", 0, ["n03", "n04"])
    assert [event["kind"] for event in read_events(layout.attempt(1))] == ["claimed"]


def put_on_path(folder, name, body):
    """A command that notes how it was called in a file beside it; where that is."""
    (folder / name).write_text(f'#!/bin/sh\necho "$*" >>{folder}/{name}.calls\n{body}\n')
    (folder / name).chmod(0o755)
    return folder / f"{name}.calls"


def test_a_claim_says_when_the_warn_signal_is_due_and_asks_slurm_once(layout, monkeypatch):
    commands = layout.root / "bin"
    commands.mkdir()
    asked = put_on_path(commands, "squeue", "echo '1   2026-11-30T12:00:00     '")
    pinged = put_on_path(commands, "scontrol", "")
    monkeypatch.setenv("PATH", str(commands))
    end_at = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
    lead_s = RunSpec().cluster.signal_lead_s
    assert claim_attempt(layout, JOB).split()[4] == str(int(end_at) - lead_s)
    assert len(asked.read_text().splitlines()) == 1
    assert not pinged.exists()


def test_an_array_task_is_known_by_its_own_id(layout):
    array = {**JOB, "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2",
             "SLURM_RESTART_COUNT": "3"}  # fmt: skip
    claim_attempt(layout, array)
    claimed = read_attempt(layout, 1)
    assert (claimed.job_id, claimed.restart_count) == ("12_2", 3)


def test_a_claim_adopts_the_steps_committed_by_now_and_no_later_one(layout):
    layout.steps.mkdir(parents=True)
    for step in (10, 20):
        make_step(layout, step)
    claim_attempt(layout, JOB)
    make_step(layout, 30)
    assert sorted(item.step for item in read_attempt(layout, 1).adopted) == [10, 20]
    assert all(len(item.digest) == 64 for item in read_attempt(layout, 1).adopted)


def test_a_claim_leaves_out_what_a_dead_attempt_published_late(layout):
    make_step(layout, 10)
    claim_attempt(layout, JOB)  # attempt 1
    claim_attempt(layout, JOB)  # attempt 2; attempt 1 is thought dead and is not
    make_step(layout, 15, attempt=2)
    make_step(layout, 20, attempt=1)
    claim_attempt(layout, JOB)  # attempt 3, before attempt 2 has put the late step aside
    assert sorted(item.step for item in read_attempt(layout, 3).adopted) == [10, 15]


def test_an_attempt_that_died_in_its_claim_does_not_hold_up_the_next(layout):
    make_step(layout, 10)
    layout.attempt(1).root.mkdir(parents=True)
    assert claim_attempt(layout, JOB).startswith("go 2 ")
    assert [item.step for item in read_attempt(layout, 2).adopted] == [10]


def test_a_finished_run_is_not_claimed_again(layout):
    write_json(layout.done, {"schema_version": 1})
    assert claim_attempt(layout, JOB) == "done"
    assert not layout.attempts.exists()


def test_two_claims_at_once_get_two_numbers(layout):
    lines = []
    threads = [
        threading.Thread(target=lambda: lines.append(claim_attempt(layout, JOB))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(line.split()[1]) for line in lines) == list(range(1, 9))


def test_each_attempt_of_a_job_begins_its_search_at_another_port():
    ports = {choose_port(f"12 {attempt}", is_free=lambda port: True) for attempt in range(50)}
    assert len(ports) >= 49


def test_a_port_in_use_is_passed_over():
    wanted = choose_port("12 1")
    with socket.create_server(("", wanted)):
        assert not is_free_here(wanted)
        assert choose_port("12 1") != wanted
    assert choose_port("12 1", is_free=lambda port: port == FIRST_PORT) == FIRST_PORT


def test_no_free_port_is_an_error_that_names_the_range():
    with pytest.raises(RunError, match=f"{FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}"):
        choose_port("12 1", is_free=lambda port: False)


def test_outside_a_job_a_claim_is_refused_before_a_number_is_taken(layout):
    with pytest.raises(SchedulerError, match="SLURM_JOB_ID is not set"):
        claim_attempt(layout, {})
    assert not layout.attempts.exists()


def test_the_verb_prints_one_line_for_the_batch_script(layout):
    done = subprocess.run(
        [sys.executable, "-m", "ftslurm", "claim", str(layout.root)],
        cwd=ROOT, env={"PATH": os.environ["PATH"], **JOB}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("go 1 n03 ") and done.stdout.count("\n") == 1
