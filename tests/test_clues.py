"""What an attempt leaves in the run directory is gathered and classified as it stands there."""

import json
import time

import pytest
from fakes.left_behind import (
    KILLED,
    NOW,
    TRACEBACK,
    agents,
    found,
    leave,
    make_run,
    rank_error,
)

from ftslurm.diagnosis import rank_clues
from ftslurm.diagnosis.clues import gather
from ftslurm.files import write_json
from ftslurm.run.attempts import Progress, write_progress
from ftslurm.run.layout import RunLayout


@pytest.fixture
def layout(tmp_path):
    return make_run(tmp_path)


@pytest.fixture
def paths(layout):
    return layout.attempt(1)


def test_the_first_exception_is_found_with_its_file_and_its_step(layout, paths):
    rank_error(paths, 0, NOW - 5, "PeerLost", "rank 0 lost another rank")
    rank_error(paths, 3, NOW, "ValueError", "the bug of step 37")
    finding, facts = found(layout)
    assert (finding.cause, finding.blamed_rank) == ("code", 3)
    assert finding.clues[0].file == str(paths.ranks / "rank-00003.json")
    assert "rank 3 on n2 at step 37" in finding.sentence
    assert facts.step == 37 and facts.nodes == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


@pytest.mark.parametrize("version", KILLED)
def test_a_rank_that_was_killed_is_named_with_every_ranks_end(layout, paths, version):
    leave(paths.root / "launcher.log", KILLED[version])
    for rank in range(3):
        rank_error(paths, rank, NOW - rank, "PeerLost", "lost another rank")
    finding, facts = found(layout, rc=137)
    assert (finding.cause, finding.blamed_rank) == ("unknown", 3)
    assert finding.clues[0].line == (2 if version == "22.05" else 1)
    assert facts.exits[3].signal == "SIGKILL" and facts.exits[3].node == "n2"
    assert set(facts.exits) == {0, 1, 2, 3}


OOM = {
    "22.05": "slurmstepd-n2: error: Detected 1 oom-kill event(s) in StepId=118.2. Some of your "
    "processes may have been killed by the cgroup out-of-memory handler.\n",
    "24.11": "slurmstepd-n2: error: Detected 1 oom_kill event in StepId=118.2. Some of the step "
    "tasks have been OOM Killed.\n",
    "26.05": "[2026-11-29T14:19:25.7] error: Detected 1 oom_kill event in StepId=118.2. Some of "
    "the step tasks have been OOM Killed.\n",
}


@pytest.mark.parametrize("version", OOM)
def test_out_of_memory_is_told_from_a_kill(layout, paths, version):
    leave(paths.root / "launcher.log", OOM[version] + "srun: error: n2: task 3: Out Of Memory\n")
    finding, _ = found(layout)
    assert (finding.cause, finding.blamed_rank) == ("oom_host", 3)


def test_without_a_file_of_its_own_the_launcher_is_heard_in_the_batch_scripts_output(layout):
    leave(
        layout.submit / "118.out",
        "srun: error: n1: task 0: Segmentation fault\nftslurm: attempt 0: rank 0 failed first\n"
        "srun: error: n2: task 3: Out Of Memory\nftslurm: attempt 1: rank 3 failed first\n"
        "srun: error: n1: task 1: Segmentation fault\n",
    )
    finding, facts = found(layout)
    assert (finding.cause, finding.blamed_rank, list(facts.exits)) == ("oom_host", 3, [3])
    assert finding.clues[0].line == 3


def test_a_crash_a_range_of_tasks_and_core_dumps_are_read(layout, paths):
    leave(
        paths.root / "launcher.log",
        "srun: error: n1: tasks 0-1,3: Segmentation fault (core dumped)\n",
    )
    finding, facts = found(layout, rc=139)
    assert finding.cause == "code" and set(facts.exits) == {0, 1, 3}
    assert facts.exits[0].signal == "SIGSEGV"


def test_a_lost_node_is_read_from_srun(layout, paths):
    leave(
        paths.root / "launcher.log",
        "slurmstepd-n1: error: *** STEP 118.2 ON n1 CANCELLED AT 2026-11-29T13:47:08 DUE TO NODE "
        "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\nsrun: error: Node failure on n2\n",
    )
    finding, _ = found(layout)
    assert (finding.cause, finding.blamed_node) == ("node", "n2")


def test_a_traceback_that_only_the_log_has_is_found(layout, paths):
    leave(paths.logs / "rank-2.log", f"step 36\n{TRACEBACK}ValueError: the bug of step 37\n")
    leave(paths.logs / "rank-0.log", "RuntimeError: Connection closed by peer [10.0.0.1]:5\n")
    finding, _ = found(layout)
    assert (finding.cause, finding.blamed_rank) == ("code", 2)
    clue = finding.clues[0]
    assert (clue.line, clue.text) == (7, "ValueError: the bug of step 37")
    assert "line 9, in main" in clue.context


def test_the_clock_of_a_node_is_set_right_by_its_measured_offset(layout, paths):
    # n1's clock is 90 s ahead: its first failure seems to come later.
    rank_error(paths, 0, NOW + 90, "KeyError", "'x'")
    rank_error(paths, 3, NOW + 1, "OSError", "[Errno 5] Input/output error")
    assert found(layout)[0].blamed_rank == 3
    record = {"schema_version": 1, "findings": [],
              "nodes": {"n1": {"state": "live", "offset_s": 90.0}}}  # fmt: skip
    write_json(paths.root / "agents.json", record)
    finding, _ = found(layout)
    assert (finding.cause, finding.blamed_rank) == ("code", 0)


def test_what_the_agents_found_is_heard(layout, paths):
    agents(paths, {"kind": "hang", "ranks": [3], "nodes": ["n2"], "why": "rank 3 is stopped (T)"})
    rank_error(paths, 0, NOW + 2, "RuntimeError", "interrupted")
    finding, _ = found(layout)
    assert (finding.cause, finding.blamed_rank, finding.blamed_node) == ("hang", 3, "n2")


@pytest.mark.parametrize(("acted", "cause"), [(True, "straggler"), (False, "unknown")])
def test_a_straggler_is_a_cause_only_where_the_agents_ended_the_ranks(layout, paths, acted, cause):
    agents(paths, {"kind": "straggler", "ranks": [3], "nodes": ["n2"], "acted": acted})
    assert found(layout)[0].cause == cause


def node_record(paths, node="n2", **record):
    record = {"schema_version": 1, "node": node, "at": NOW, "boot_at": NOW - 1000, "kernel": [],
              "probes": {}, **record}  # fmt: skip
    leave(paths.root / "evidence" / "nodes" / f"{node}.json", json.dumps(record))


XID = "NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.mark.parametrize(("age_s", "cause"), [(-20, "gpu"), (1000, "code")])
def test_an_xid_counts_in_the_time_of_the_attempt_only(layout, paths, age_s, cause):
    rank_error(paths, 3, NOW, "RuntimeError", "CUDA error: unspecified launch failure")
    node_record(paths, kernel=[{"at": NOW - age_s, "text": XID}])
    finding, _ = found(layout)
    assert finding.cause == cause
    if cause == "gpu":
        assert (finding.blamed_gpu, finding.blamed_node) == ("0000:9b:00", "n2")


def test_a_node_that_took_no_part_is_not_heard(layout, paths):
    # A spare, or one that was left out: its GPU has waited for a reset for days.
    smi = "GPU 00000000:9B:00.0\n    GPU Recovery Action : Reset\n"
    node_record(paths, node="n9", probes={"nvidia-smi": {"text": smi}})
    rank_error(paths, 3, NOW, "KeyError", "'x'")
    assert found(layout)[0].cause == "code"


def test_what_the_kernel_wrote_after_the_attempt_began_is_told_by_its_number(layout, paths):
    # Its clock is a minute behind: by the time, the Xid would be of the attempt before.
    line = {"seq": 8, "at": NOW - 52, "text": XID}
    node_record(paths, kernel=[line], kernel_after=7)
    assert found(layout)[0].cause == "gpu"
    # And a minute ahead: the one of the attempt before would be of this one.
    node_record(paths, kernel=[{**line, "at": NOW + 20}], kernel_after=8)
    assert found(layout)[0].cause == "unknown"


def test_without_a_number_the_kernels_clock_may_be_off_by_what_it_drifts_in_weeks(layout, paths):
    line = {"at": NOW - 40, "text": XID}
    node_record(paths, kernel=[line], boot_at=NOW - 30 * 86400)
    assert found(layout)[0].cause == "gpu"
    node_record(paths, kernel=[line], boot_at=NOW - 86400)
    assert found(layout)[0].cause == "unknown"
    node_record(paths, kernel=[{"at": None, "text": XID}], boot_at=None)
    assert found(layout)[0].cause == "unknown"


def test_dmesg_is_read_where_the_kernel_log_was_not(layout, paths):
    node_record(paths, probes={"dmesg": {"text": f"[  1020.5] {XID}\nfurther\n"}})
    assert found(layout)[0].cause == "gpu"
    node_record(paths, probes={"dmesg": {"text": f"[  20.5] {XID}\n"}})
    assert found(layout)[0].cause == "unknown"


def test_nvml_names_the_gpu_whose_block_it_stands_in_and_hanging_tools_are_told(layout, paths):
    smi = "GPU 00000000:1B:00.0\n    GPU Recovery Action : None\n" \
          "GPU 00000000:9B:00.0\n    GPU Recovery Action : Reset\n"  # fmt: skip
    row = {"text": smi, "note": "no end within 20 s"}
    node_record(paths, probes={"nvidia-smi": row})
    finding, facts = found(layout)
    assert (finding.cause, finding.blamed_gpu) == ("gpu", "0000:9b:00")
    assert "nvidia-smi on n2: no end within 20 s" in facts.unasked


def test_torn_and_missing_records_cost_a_note_and_never_the_rest(layout, paths):
    rank_error(paths, 3, NOW, "KeyError", "'x'")
    (paths.ranks / "rank-00001.json").write_text('{"schema_version": 1, "rank"')
    (paths.ranks / "rank-00002.json").write_text('{"schema_version": 1}')
    (paths.root / "agents.json").write_text("torn")
    leave(paths.root / "evidence" / "nodes" / "n1.json", "{")
    finding, facts = found(layout)
    assert finding.cause == "code"
    assert any(note.startswith("agents.json") for note in facts.unasked)
    paths.attempt_json.unlink()
    assert found(layout)[0].cause == "code"


def test_by_the_deadline_what_has_come_is_handed_over_and_the_rest_named(layout, paths):
    leave(paths.root / "launcher.log", "srun: error: n2: task 3: Out Of Memory\n")
    for rank in range(4):
        rank_error(paths, rank, NOW, "PeerLost", "lost")
        leave(paths.logs / f"rank-{rank}.log", "x")
    finding, facts = found(layout, deadline_s=0.0)
    assert finding.cause == "oom_host"
    assert {"4 of 4 ranks' own records", "4 of 4 logs"} <= set(facts.unasked)


def test_an_attempt_that_left_nothing_is_unknown(layout):
    finding, _ = found(layout, rc=9)
    assert finding.cause == "unknown" and "code 9" in finding.sentence


def test_an_empty_run_directory_is_no_reason_to_fail(tmp_path):
    clues, facts = gather(RunLayout(tmp_path), 1, rc=1, deadline_s=1.0)
    assert clues == [] and facts.nodes == {} and facts.unasked


def test_the_last_step_is_told(layout, paths):
    write_progress(paths, Progress(step=12, steps=60, restored_step=12))
    assert found(layout)[1].step is None
    write_progress(paths, Progress(step=17, steps=60, restored_step=12))
    assert found(layout)[1].step == 17


def test_a_thousand_ranks_are_gathered_in_seconds(layout, paths, tmp_path):
    nodes = [f"n{index}" for index in range(250)]
    attempt = json.loads(paths.attempt_json.read_text())
    attempt.update(nodes=nodes, tasks_per_node=4, world_size=1000)
    write_json(paths.attempt_json, attempt)
    for rank in range(1000):
        record = {"schema_version": 1, "rank": rank, "node": "n1", "step": 3, "at": NOW + rank,
                  "type": "PeerLost" if rank != 700 else "KeyError", "message": "x",
                  "traceback": []}  # fmt: skip
        (paths.ranks / f"rank-{rank:05d}.json").write_text(json.dumps(record))
        (paths.logs / f"rank-{rank}.log").write_text("step 1 loss 3.0\n" * 200)
    began = time.process_time()
    finding, facts = found(layout, deadline_s=30.0)
    assert time.process_time() - began < 5.0
    assert (finding.cause, finding.blamed_rank) == ("code", 700)
    assert facts.nodes[999] == "n249"


def test_where_it_is_decided_few_of_many_logs_are_read(layout, paths, monkeypatch):
    nodes = [f"n{index}" for index in range(50)]
    attempt = json.loads(paths.attempt_json.read_text())
    attempt.update(nodes=nodes, tasks_per_node=4, world_size=200)
    write_json(paths.attempt_json, attempt)
    read = []
    monkeypatch.setattr(rank_clues, "read_tail", lambda path, most: read.append(path.name))
    rank_error(paths, 199, NOW, "PeerLost", "lost")
    found(layout)
    assert sum(name.startswith("rank-") for name in read) == 200
    read.clear()
    rank_error(paths, 150, NOW, "KeyError", "'x'")
    assert found(layout)[0].cause == "code"
    assert sum(name.startswith("rank-") for name in read) == 64


def test_slurmstepds_word_in_the_log_of_a_nodes_first_rank_is_heard_all_the_same(layout, paths):
    attempt = json.loads(paths.attempt_json.read_text())
    nodes = [f"n{index}" for index in range(100)]
    attempt.update(nodes=nodes, tasks_per_node=2, world_size=200)
    write_json(paths.attempt_json, attempt)
    leave(paths.root / "launcher.log", "srun: error: n95: task 191: Exited with exit code 1\n")
    rank_error(paths, 191, NOW, "KeyError", "'x'")
    leave(paths.logs / "rank-190.log", OOM["24.11"])
    assert found(layout)[0].cause == "oom_host"


def test_a_small_run_is_gathered_and_classified_in_a_second(layout, paths):
    for rank in range(4):
        rank_error(paths, rank, NOW, "PeerLost", "lost")
        (paths.logs / f"rank-{rank}.log").write_text("step 1 error none\n" * 5000)
    leave(paths.root / "launcher.log", KILLED["26.05"])
    began = time.process_time()
    found(layout)
    assert time.process_time() - began < 1.0
