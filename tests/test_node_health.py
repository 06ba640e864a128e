"""After a failure the nodes are asked for their health, and root's word on them is read."""

import json
import os
import socket
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from fakes.nvml.nodes import Node, build
from fakes.recovering import FakeScheduler, begin, decide, make_layout, rank_error
from health_probes import BUSES, XID_13, write

from ftslurm.diagnosis import ask_nodes
from ftslurm.files import read_json, write_json
from ftslurm.health.report import Report, Told, report_record
from ftslurm.recovery.keep_out import known_exclusions
from ftslurm.recovery.node_health import remember_roots_word
from ftslurm.recovery.own_job import OwnJob
from ftslurm.run.attempts import STOPPED, Outcome, append_event, write_outcome
from ftslurm.run.node_memory import EXCLUDED, FAULT, read_node_events
from ftslurm.run.record import read_record

SRUN = Path(__file__).resolve().parent / "fakes" / "each_node.py"
LINK = Told("drain", "NVLINK-DOWN", 3, "0000:9b:00", "fewer NVLinks", "nvlink-model", "DCGM")
FAULT_31 = Told("warn", "XID31", 3, "0000:9b:00", "Xid 31", "xid-31", "NVIDIA", hands_to_run=True)
ONLY_ROOT = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can write what root is believed"
)


class Slurm(FakeScheduler):
    """n3 is a spare."""

    name = "slurm"

    def nodes(self, environ):
        return ["n1", "n2", "n3"]


def report(node, *verdicts, at=None, boot="boot-1", job="12"):
    word = verdicts[0].word if verdicts else "ok"
    return Report(node, job, boot, time.time() if at is None else at, "probe", word, verdicts)


@pytest.fixture
def layout(tmp_path):
    layout = make_layout(tmp_path / "run")
    set_up(layout, gpus_per_node=8, spares=1, scheduler="slurm")
    return layout


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """What the nodes say: NODE.json."""
    folder, srun = tmp_path / "nodes", tmp_path / "bin" / "srun"
    folder.mkdir()
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nexec {sys.executable} {SRUN} "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FTSLURM_TEST_NODES", str(folder))
    monkeypatch.setenv("FTSLURM_ATTEMPT", "1")
    return folder


def set_up(layout, *, health=(), **cluster):
    record = read_json(layout.run_json)
    record["spec"]["cluster"].update(cluster)
    record["spec"]["health"].update(health)
    write_json(layout.run_json, record)


def say(nodes, *reports):
    for one in reports:
        write_json(nodes / f"{one.node}.json", report_record(one))


def asked(nodes):
    """What srun was asked for, each time."""
    path = nodes / "srun.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kinds(layout):
    return [(event.kind, event.node) for event in read_node_events(layout)]


def test_a_node_that_finds_itself_sick_is_left_out_and_a_spare_takes_its_place(layout, nodes):
    rank_error(begin(layout), 3, 5.0, "unhandled cuda error", kind="DistBackendError", node="n2")
    say(nodes, report("n1"), report("n2", LINK))
    decision = decide(layout, Slurm())
    assert (decision.action, decision.cause, decision.exclude) == ("restart", "gpu", ("n2",))
    assert "n2 (NVLINK-DOWN of gpu3 at 0000:9b:00)" in decision.reason
    assert decision.evidence[0].file == str(layout.attempt(1).looks / "n2.json")
    assert kinds(layout) == [(FAULT, "n2"), (EXCLUDED, "n2")]
    (srun,) = asked(nodes)
    assert {"--nodelist=n1,n2", "--nodes=2", "--overlap", "--no-kill"} <= set(srun["argv"])
    assert not any(word.startswith("--gres") for word in srun["argv"])
    assert srun["attempt"] is None  # else the agents would end it as a leftover of the ranks


def test_without_a_spare_the_job_is_queued_again_away_from_the_sick_node(layout, nodes):
    set_up(layout, spares=0)
    begin(layout)
    say(nodes, report("n1"), report("n2", LINK))
    scheduler = Slurm()
    scheduler.nodes = lambda environ: ["n1", "n2"]
    decision = decide(layout, scheduler, rc=137)
    assert decision.action == "requeued" and scheduler.requeued == ["12"], decision.reason
    assert scheduler.excluded == ["n2"]


@pytest.mark.parametrize("why", ["no GPUs", "never", "away", "grace", "ended well"])
def test_nobody_is_asked_where_it_would_cost_for_nothing(layout, nodes, why):
    paths = begin(layout)
    scheduler, rc = Slurm(), 1
    if why == "no GPUs":
        set_up(layout, gpus_per_node=0)
    elif why == "never":
        set_up(layout, health={"probe": "never"})
    elif why == "away":
        scheduler = Slurm(alive=[False])
    elif why == "grace":
        append_event(paths, "signal", signal="SIGTERM")
    else:
        layout.done.touch()
    decide(layout, scheduler, rc=rc)
    assert asked(nodes) == []


def test_always_also_looks_without_gpus_and_a_lost_node_is_not_asked(layout, nodes):
    set_up(layout, gpus_per_node=0, health={"probe": "always"})
    paths = begin(layout)
    finding = {"kind": "node_lost", "nodes": ["n2"], "why": "silent", "acted": True, "at": 5.0}
    write_json(paths.root / "agents.json", {"schema_version": 1, "findings": [finding]})
    say(nodes, report("n1"))
    assert decide(layout, Slurm()).cause == "node"
    assert "--nodelist=n1" in asked(nodes)[0]["argv"]


def test_always_also_looks_at_nodes_whose_straggler_was_evicted(layout, nodes):
    say(nodes, report("n1", LINK), report("n2"))
    for attempt, (probe, out) in enumerate([("on_failure", {"n2"}), ("always", {"n1", "n2"})], 1):
        set_up(layout, spares=2, health={"probe": probe})
        paths = begin(layout)
        finding = {"kind": "straggler", "nodes": ["n2"], "why": "slow", "acted": True, "at": 5.0}
        write_json(paths.root / "agents.json", {"schema_version": 1, "findings": [finding]})
        append_event(paths, "signal", signal="SIGUSR1")
        write_outcome(paths, Outcome(STOPPED, step=20, committed_step=20, signal="SIGUSR1"))
        record = read_json(layout.run_json)
        record["spec"]["recovery"]["evict"] = "now"
        write_json(layout.run_json, record)
        decision = decide(layout, Slurm(), attempt=attempt, rc=75)
        assert (decision.cause, set(decision.exclude)) == ("straggler", out), decision
        assert decision.confidence is None and decision.blamed is None


def test_a_node_that_does_not_answer_costs_a_bound_and_is_not_taken_for_sick(
    layout, nodes, monkeypatch
):
    monkeypatch.setattr(ask_nodes, "LOOK_S", 6.0)
    monkeypatch.setattr(ask_nodes, "TERM_S", 0.3)
    begin(layout)
    say(nodes, report("n1"))
    (nodes / "n2.hang").touch()
    begun = time.monotonic()
    decision = decide(layout, Slurm())
    assert time.monotonic() - begun < 40
    assert (decision.action, decision.exclude) == ("restart", ())
    (srun,) = asked(nodes)
    assert not Path(f"/proc/{srun['pid']}").exists(), "the step was left behind"


def test_a_slurm_that_hangs_does_not_keep_the_rest_from_being_heard(layout, nodes, monkeypatch):
    monkeypatch.setattr(ask_nodes, "LOOK_S", 0.5)
    scheduler = Slurm()
    scheduler.controller_alive = lambda: time.sleep(1) or False
    leave = layout.attempt(1).root / "launcher.log"
    begin(layout)
    leave.write_text("srun: error: n2: task 3: Out Of Memory\n")
    assert decide(layout, scheduler).cause == "oom_host"
    assert asked(nodes) == []


def test_a_torn_or_foreign_word_of_a_node_is_none(layout, nodes):
    begin(layout)
    (nodes / "n1.json").write_text('{"schema_ver')
    (nodes / "n2.json").write_text('{"schema_version": 1, "word": "drain"}')
    decision = decide(layout, Slurm())
    assert (decision.action, decision.exclude) == ("restart", ())


def test_one_fault_of_the_program_is_confirmed_once_and_then_stops_the_run(layout, nodes):
    say(nodes, report("n1"), report("n2", FAULT_31))
    for attempt, action in ((1, "restart"), (2, "stop")):
        paths = begin(layout)
        rank_error(paths, 3, 5.0, f"CUDA error at {attempt}", kind="RuntimeError", node="n2")
        record = read_json(paths.ranks / "rank-00003.json")
        write_json(paths.ranks / "rank-00003.json", {**record, "step": 40 + attempt})
        decision = decide(layout, Slurm(), attempt=attempt)
        assert (decision.action, decision.cause) == (action, "code"), decision.reason
        assert read_json(paths.decision_json)["program_fault"] == "XID31"
    assert "the GPU names the same fault of the program, XID31, as in attempt 1" in decision.reason


def leave_word(folder, one, name="latest.json"):
    """As root does it (health/verdict_folder.py)."""
    place = folder / one.node
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / name, report_record(one))


@pytest.fixture
def roots(layout, tmp_path):
    folder = tmp_path / "verdicts"
    folder.mkdir()
    set_up(layout, health={"verdict_dir": str(folder)})
    return folder


@ONLY_ROOT
def test_roots_word_on_a_node_counts_like_its_own(layout, nodes, roots):
    begin(layout)
    say(nodes, report("n1"), report("n2"))
    leave_word(roots, report("n2", LINK))
    decision = decide(layout, Slurm())
    assert (decision.cause, decision.exclude) == ("gpu", ("n2",))
    assert decision.evidence[0].file == str(roots / "n2")


@ONLY_ROOT
def test_what_the_program_of_another_job_has_done_to_a_gpu_is_not_ours(layout, nodes, roots):
    say(nodes, report("n1"), report("n2"))
    for attempt, (job, fault) in enumerate([("12", "XID31"), ("13", "")], 1):
        begin(layout)
        leave_word(roots, report("n2", FAULT_31, job=job))
        decide(layout, Slurm(), attempt=attempt)
        assert read_json(layout.attempt(attempt).decision_json)["program_fault"] == fault


@ONLY_ROOT
@pytest.mark.parametrize("flaw", ["another's", "writable", "old boot", "before", "torn"])
def test_a_word_that_root_need_not_have_said_or_of_another_time_is_not_believed(
    layout, nodes, roots, flaw
):
    begin(layout)
    claimed_at = time.time() - 60
    record = read_json(layout.attempt(1).attempt_json)
    write_json(layout.attempt(1).attempt_json, {**record, "claimed_at": claimed_at})
    say(nodes, report("n1"), report("n2", boot="boot-2" if flaw == "old boot" else "boot-1"))
    leave_word(roots, report("n2", LINK, at=claimed_at - 5 if flaw == "before" else None))
    latest = roots / "n2" / "latest.json"
    if flaw == "another's":
        os.chown(latest, 5001, 5001)
    elif flaw == "writable":
        latest.parent.chmod(0o777)
    elif flaw == "torn":
        latest.write_text('{"schema_ver')
    decision = decide(layout, Slurm())
    assert decision.exclude == (), decision.reason


@ONLY_ROOT
def test_what_the_epilog_has_found_since_keeps_the_claim_off_the_node(layout, roots):
    begin(layout)
    job = OwnJob(layout, read_record(layout), Slurm(), "12")
    remember_roots_word(job)
    assert known_exclusions(job) == {}
    leave_word(roots, report("n2", LINK), name="12.json")
    leave_word(roots, report("n1", FAULT_31), name="12.json")
    remember_roots_word(job)
    remember_roots_word(job)
    assert list(known_exclusions(job)) == ["n2"]
    (event,) = read_node_events(layout)
    assert (event.kind, event.attempt, event.cause) == (EXCLUDED, 1, "gpu")
    assert "root's look found NVLINK-DOWN: fewer NVLinks" in event.why


@pytest.fixture
def gpus(layout, nodes, tmp_path):
    """Two real looks at fake GPUs."""
    found = {name: Node(nodes / f"{name}.gpus", gpus=8) for name in ("n1", "n2")}
    root = tmp_path / "root"
    for bus in BUSES:
        write(root / "sys/bus/pci/devices" / f"{bus}.0" / "vendor", "0x10de")
        write(root / "sys/bus/pci/devices" / f"{bus}.0" / "class", "0x030200")
    write(root / "proc/sys/kernel/random/boot_id", "boot-one")
    (tmp_path / "kern.log").touch()
    set_up(layout, health={
        "nvml_library": str(build(tmp_path)), "nvidia_smi": str(tmp_path / "none"),
        "sysfs_root": str(root), "kernel_log": str(tmp_path / "kern.log"),
    })  # fmt: skip
    return found


def decided_in(layout, **options):
    """The decision, and the seconds that it took."""
    begun = time.monotonic()
    decision = decide(layout, Slurm(), **options)
    return decision, time.monotonic() - begun


def test_eight_healthy_gpus_a_node_cost_little_beside_the_gathering(layout, nodes, gpus, capsys):
    begin(layout)
    decision, with_s = decided_in(layout)
    (own,) = [read_json(layout.attempt(1).looks / "n1.json")]
    assert (decision.exclude, own["word"], own["gpus"]) == ((), "ok", 8), own
    assert "the health of" not in decision.reason
    set_up(layout, health={"probe": "never"})
    begin(layout)
    _, without_s = decided_in(layout, attempt=2)
    with capsys.disabled():
        print(f"\na failed attempt decided in {with_s:.2f} s with the looks, {without_s:.2f} s "
              f"without; a look took {own['wall_s']:.2f} s")  # fmt: skip
    assert with_s - without_s < 20, "two looks on a loaded machine of two cores"


def test_a_dead_nvlink_is_seen_by_a_look_that_has_no_root_and_no_memory(
    layout, nodes, gpus, capsys
):
    gpus["n2"].set(3, "link:7", 0)
    rank_error(begin(layout), 3, 5.0, "unhandled cuda error", kind="DistBackendError", node="n2")
    decision, took_s = decided_in(layout)
    with capsys.disabled():
        print(f"\na dead NVLink was decided on in {took_s:.2f} s: {decision.reason}")
    assert (decision.cause, decision.exclude) == ("gpu", ("n2",)), decision
    assert decision.sick["n2"].startswith("NVLINK-DOWN of gpu3 at 0000:4b:00")


def test_an_xid_of_the_program_in_the_kernel_log_is_confirmed_by_another(layout, gpus, tmp_path):
    for attempt, action in ((1, "restart"), (2, "restart"), (3, "stop")):
        begin(layout)
        record = read_json(layout.attempt(attempt).attempt_json)
        write_json(layout.attempt(attempt).attempt_json, {**record, "claimed_at": time.time()})
        if attempt != 2:  # the line of the first attempt does not count again
            stamp = datetime.now(timezone.utc).isoformat()
            with (tmp_path / "kern.log").open("a") as log:
                line = XID_13.replace("pid=7", f"pid={attempt}")
                log.write(f"{stamp} n1 kernel: {line}\n")
        step = {"step": 10 * attempt, "steps": 60, "restored_step": 0}
        write_json(layout.attempt(attempt).progress_json, {"schema_version": 1, **step})
        decision = decide(layout, Slurm(), attempt=attempt, rc=137)
        fault = read_json(layout.attempt(attempt).decision_json)["program_fault"]
        assert fault == ("" if attempt == 2 else "XID13")
        assert decision.action == action, decision.reason
    assert "same fault of the program, XID13, as in attempt 1" in decision.reason


def test_on_a_machine_of_its_own_a_run_looks_too_and_has_no_other_to_go_to(
    layout, nodes, gpus, monkeypatch
):
    monkeypatch.setenv("FTSLURM_FAKE_NVML", str(nodes / "n1.gpus"))
    gpus["n1"].set(3, "link:7", 0)
    set_up(layout, scheduler="local", nodes=1, spares=0)
    begin(layout)
    record = read_json(layout.attempt(1).attempt_json)
    write_json(layout.attempt(1).attempt_json, {**record, "nodes": [socket.gethostname()]})
    scheduler = FakeScheduler()
    scheduler.name = "local"
    decision = decide(layout, scheduler)
    assert (decision.action, decision.cause, decision.exclude) == ("restart", "gpu", ())
    assert "NVLINK-DOWN" in decision.reason and asked(nodes) == []
