"""A node keeps what it knows before anything is reset, and no probe holds it up."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from ftslurm.agent import collect as module
from ftslurm.agent.collect import Probe, collect, mount_of, probes, run_all
from ftslurm.agent.kernel_log import KERNEL_BYTES, newest_kernel_line, read_kmsg

SHORT_S = 8.0
"""Above the time that a busy machine takes to start a shell."""


@pytest.fixture(autouse=True)
def long_term(monkeypatch):
    monkeypatch.setattr(module, "TERM_S", 60.0)


@pytest.fixture
def short_term(monkeypatch):
    monkeypatch.setattr(module, "TERM_S", 0.3)


def ask(script, *, deadline_s=60.0, most_bytes=1000):
    (answer,) = run_all([Probe("probe", ["sh", "-c", script], deadline_s, most_bytes)])
    return answer.to_record()


def kept(folder, **options):
    options.setdefault("kmsg", folder / "no-kmsg")
    return json.loads(collect(folder, "n1", environ={}, **options).read_text())


def test_an_answer_is_kept_with_its_exit_code():
    record = ask("echo out; echo err >&2; exit 3")
    assert (record["text"], record["rc"]) == ("out\nerr\n", 3) and "note" not in record


def test_a_missing_tool_is_noted_and_nothing_fails(tmp_path):
    record = kept(tmp_path, asked=[Probe("nvidia-smi", ["no-such-tool-here", "-q"], 1.0, 100)])
    row = record["probes"]["nvidia-smi"]
    assert row["rc"] is None and "not on this node" in row["note"]


def test_a_tool_that_may_not_be_run_is_noted(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text("")
    tool.chmod(0o600)
    (answer,) = run_all([Probe("tool", [str(tool)], 1.0, 100)])
    assert "cannot be run" in answer.note


def test_a_probe_that_hangs_gets_term_at_its_deadline_and_what_it_said_is_kept():
    record = ask("echo early; sleep 600", deadline_s=SHORT_S)
    assert record["text"] == "early\n" and "no end within 8 s" in record["note"]
    assert record["rc"] == -signal.SIGTERM


def test_one_that_ignores_term_gets_kill_and_so_do_its_children(tmp_path, short_term):
    child = tmp_path / "pid"
    record = ask(f"trap '' TERM; sleep 60 & echo $! > {child}; wait; sleep 60", deadline_s=SHORT_S)
    assert record["rc"] == -signal.SIGKILL
    pid = int(child.read_text())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _lives(pid):
        time.sleep(0.02)
    assert not _lives(pid)


def _lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_one_that_does_not_die_is_left_behind_and_said_to_be(monkeypatch, short_term):
    sent = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append((pid, number)))
    (answer,) = run_all([Probe("df", ["sleep", "60"], 0.2, 100)])
    try:
        assert "does not die and is left behind" in answer.note
        assert [number for _, number in sent] == [signal.SIGTERM, signal.SIGKILL]
    finally:
        answer.process.kill()
        answer.process.wait()


def test_probes_run_at_the_same_time(tmp_path):
    there = " && ".join(f"[ -e {tmp_path}/{n} ]" for n in range(8))
    wait = f"until {there}; do sleep 0.1; done"
    argv = [["sh", "-c", f"touch {tmp_path}/{n}; {wait}"] for n in range(8)]
    answers = run_all([Probe(str(n), one, 60.0, 10) for n, one in enumerate(argv)])
    assert all(answer.process.returncode == 0 for answer in answers), "each has seen all others"


def test_of_a_long_answer_the_beginning_and_the_end_are_kept():
    record = ask("i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done", most_bytes=1000)
    assert record["rc"] == 0 and len(record["text"]) < 1100
    assert record["text"].startswith("line 0\n") and record["text"].endswith("line 2999\n")
    assert "left out" in record["text"]


def test_the_kernel_log_is_read_with_the_time_of_day(tmp_path):
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(
        "6,1,5000000,-;first\n SUBSYSTEM=pci\n"
        "4,2,6500000,-;NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\nnot a record\n"
    )
    lines, why_not = read_kmsg(kmsg)
    assert why_not == "" and [line["text"][:5] for line in lines] == ["first", "NVRM:"]
    boot_at = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    assert lines[1]["at"] == pytest.approx(boot_at + 6.5, abs=1.0)


def test_only_the_newest_lines_of_the_kernel_log_are_kept(tmp_path):
    kmsg = tmp_path / "kmsg"
    kmsg.write_text("".join(f"6,{n},{n},-;line {n} {'x' * 400}\n" for n in range(1000)))
    lines, _ = read_kmsg(kmsg)
    assert lines[-1]["text"].startswith("line 999")
    assert sum(len(line["text"]) for line in lines) <= KERNEL_BYTES


def test_the_newest_line_before_an_attempt_is_kept_by_its_number(tmp_path):
    kmsg = tmp_path / "kmsg"
    kmsg.write_text("6,41,5000000,-;before\n")
    after = newest_kernel_line(kmsg)
    kmsg.write_text("6,41,5000000,-;before\n6,42,6000000,-;in it\n")
    record = kept(tmp_path, asked=[], kmsg=kmsg, kernel_after=after)
    assert record["kernel_after"] == 41
    assert [line["seq"] for line in record["kernel"]] == [41, 42]
    assert newest_kernel_line(tmp_path / "none") is None


def test_a_kernel_log_that_may_not_be_read_is_noted_and_dmesg_asked(tmp_path):
    record = kept(tmp_path, asked=[Probe("dmesg", ["echo", "[    1.5] hello"], 60.0, 100)])
    assert record["kernel"] == [] and "no-kmsg" in record["kernel_unread"]
    assert record["probes"]["dmesg"]["text"] == "[    1.5] hello\n"


def test_the_mount_of_the_run_is_told_from_the_kernels_table(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:40 / /scratch rw,noatime shared:7 - nfs4 fs1:/scratch rw,vers=4.2,hard\n"
        "3 1 0:41 / /scratch/with\\040blank rw - lustre mgs:/x rw\n"
        "4 1 0:42 / /scratch2 rw - tmpfs tmpfs rw\n"
    )
    found = mount_of("/scratch/runs/1", table)
    assert (found["point"], found["type"], found["source"]) == ("/scratch", "nfs4", "fs1:/scratch")
    assert "hard" in found["options"]
    assert mount_of("/scratch/with blank/run", table)["type"] == "lustre"
    assert mount_of("/home/x", table)["type"] == "ext4"
    assert mount_of("/x", tmp_path / "none") is None


def test_ports_of_infiniband_are_asked_for_where_there_are_some(tmp_path):
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "counters" / "symbol_error").write_text("14\n")
    asked = {probe.name: probe for probe in probes("/run", sysfs=tmp_path)}
    (answer,) = run_all([asked["infiniband"]])
    text = answer.to_record()["text"]
    assert "ports/1/state:4: ACTIVE" in text and "counters/symbol_error:14" in text
    assert {"nvidia-smi", "dmesg", "df", "inodes", "shm", "memory"} <= set(asked)
    assert "infiniband" not in {probe.name for probe in probes(None, sysfs=tmp_path / "none")}


def test_whoever_has_less_time_gets_what_has_come_by_then(tmp_path):
    asked = [Probe("slow", ["sleep", "600"], 500.0, 10), Probe("quick", ["echo", "x"], 500.0, 10)]
    record = kept(tmp_path, asked=asked, within_s=SHORT_S)
    assert record["probes"]["quick"]["text"] == "x\n"
    assert "no end within 8 s" in record["probes"]["slow"]["note"]


def test_what_this_node_keeps_fits_into_one_file_of_the_leader(tmp_path):
    path = collect(tmp_path, "n1", run_dir=str(tmp_path))
    assert path == tmp_path / "nodes" / "n1.json"
    record = json.loads(path.read_text())
    assert (record["node"], record["schema_version"]) == ("n1", 1)
    assert "MemTotal" in record["probes"]["memory"]["text"]
    assert record["probes"]["df"]["rc"] == 0 and record["mount"]["point"]
    # The most of a text that the leader takes (agent/duty.py).
    most = sum(probe.most_bytes for probe in probes("/run")) + (32 << 10)
    assert path.stat().st_size < 256 << 10 and most < 256 << 10
