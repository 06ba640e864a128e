"""Every row of the table finds its cause among echoes of earlier wall time, and nothing else."""

import dataclasses
import itertools
import random
import time

import failure_clues as texts
import failure_reports
import failure_texts
import pytest
from reported_failures import REPORTS

from ftslurm.diagnosis import classify as module
from ftslurm.diagnosis.causes import CODE, GPU, HANG, MEANING, NODE, OOM_HOST, UNKNOWN
from ftslurm.diagnosis.classify import classify
from ftslurm.diagnosis.finding import Clue, Facts
from ftslurm.diagnosis.signatures import KINDS, look_up
from ftslurm.recovery.budgets import SURE

CASES = list(failure_texts.variants())
IDS = [f"{row}-{number}" for row, number, *_ in CASES]
FURTHER = [
    (texts.error("MisreadError: step 20 was read wrongly (rank 3 on n2: ...)"), NODE),
    (texts.error("MisreadElsewhereError: step 20 was read wrongly (rank 1 on n1: ...)"), UNKNOWN),
    (texts.launcher("srun: error: Task launch for StepId=118.2 failed on node n2: Communication "
                    "connection failure"), NODE),
    (texts.launcher("srun: error: Task launch for StepId=6.1 failed on node n1: Protocol "
                    "authentication error"), "network_transient"),
    (texts.launcher("srun: error: Munge decode failed: Failed to receive message header: "
                    "Timed-out"), "network_transient"),
    (texts.launcher("slurmstepd: error: execve(): pyhton: No such file or directory"), CODE),
    (texts.launcher("srun: error: n2: task 3: Aborted (core dumped)", 2, 3), CODE),
    (texts.launcher("srun: error: n2: task 3: Exited with exit code 78", 2, 3), CODE),
    (texts.launcher("srun: error: n2: task 3: Exited with exit code 1", 2, 3), UNKNOWN),
    (texts.launcher("local_ranks: error: rank 3 left with 139; ending the rest", 2, 3), CODE),
    (texts.launcher("local_ranks: error: rank 3 left with 137; ending the rest", 2, 3), UNKNOWN),
    (texts.launcher("srun: error: Unable to create step for job 118: Requested nodes are busy"),
     "capacity"),
    (texts.launcher("srun: error: Unable to confirm allocation for job 96: Unable to contact slurm "
                    "controller (connect failure)"), "network_transient"),
    (texts.launcher("srun: error: Unable to create step for job 9: Memory required by task is not "
                    "available"), "network_transient"),
    (texts.account("step 118.2 NODE_FAIL 0:0"), NODE),
    (texts.node_state("the run's file system is full, so what happens now may not be on record"),
     "capacity"),
    (texts.kernel("GPU 00000000:9B:00.0: GPU Recovery Action : Reset"), GPU),
    (texts.kernel("GPU 00000000:9B:00.0: GPU Recovery Action : None"), UNKNOWN),
    (texts.kernel("NVRM: Xid (PCI:0000:9b:00): 63, pid=4711, name=python, Row Remapper: New row "
                  "(0x1) marked for remapping, reset gpu to activate."), GPU),
    (texts.kernel("NVRM: Xid (PCI:0000:9b:00): 137, pid=4711, NVLink privilege error"), CODE),
    (texts.kernel("NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to "
                  "0x4 (Drain and Reset)"), GPU),
    (texts.kernel("nfs: server fs1 not responding, still trying"), "storage"),
    (texts.kernel("INFO: task python:4711 blocked for more than 120 seconds."), "storage"),
    (texts.kernel("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0"), NODE),
    (texts.kernel("mlx5_core 0000:1a:00.0 ib0: Link down"), "network_transient"),
    (texts.launcher("slurmstepd: error: Step 118.2 exceeded memory limit (5 > 4), being killed"),
     OOM_HOST),
    (texts.error("MemoryError"), OOM_HOST),
    (texts.error("CheckpointError: 3 saves in a row have failed ([Errno 5] Input/output error)"),
     "storage"),
    (texts.error("RuntimeError: NCCL Error 2: unhandled system error"), UNKNOWN),
    (texts.error("RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId "
                 "from [0] via c10d key-value store, but store->get('0') got error: wait timeout "
                 "after 600000ms"), "network_transient"),
    (texts.error("RuntimeError: Function 'MulBackward0' returned nan values in its 0th output."),
     "numeric"),
    (texts.log("Loss is nan, stopping training"), "numeric"),
    (texts.log("train.sh: line 3: 4711 Segmentation fault   (core dumped) python train.py"), CODE),
    (texts.log("train.sh: line 3: 4711 Killed               python train.py"), UNKNOWN),
    (texts.log("double free or corruption (!prev)"), CODE),
    (texts.log("mypackage.Interrupted: no more", "Traceback (most recent call last):"), CODE),
    (texts.error("ProgramFailed: `sh train.sh` ended with code 1; the last line of its log: "
                 "torch.OutOfMemoryError: CUDA out of memory."), "oom_gpu"),
    (texts.error("ProgramFailed: `sh train.sh` ended with code 137"), UNKNOWN),
    (texts.error("ProgramFailed: `sh train.sh` ended with code 1"), CODE),
    (texts.error("OSError: Unable to synchronously open file (truncated file: eof = 96)",
                 'File "h5py/_hl/files.py", line 5'), "data"),
    (texts.error("KeyError: Caught KeyError in DataLoader worker process 0."), CODE),
    (texts.error("RuntimeError: CUDA error: no CUDA-capable device is detected"), GPU),
    (texts.error("RuntimeError: CUDA error: unspecified launch failure"), CODE),
    (texts.error("RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly"), UNKNOWN),
    (texts.error("RuntimeError: DataLoader worker is killed by signal: Killed."), UNKNOWN),
    (texts.error("ProgramFailed: `train.sh` was killed by signal 15 (Terminated)"), UNKNOWN),
    (texts.agent("slow_all: every rank needs 1.9 x its usual step"), UNKNOWN),
    (texts.agent("straggler (not acted on): rank 3 needs 4.1 x the others'"), UNKNOWN),
    (texts.agent("hang (not acted on): it has passed"), UNKNOWN),
    (texts.agent("node_lost (not acted on): the agent on n2 has ended"), NODE),
    (texts.agent("leftover: a process of attempt 2 lives on n2"), UNKNOWN),
    (texts.agent("preflight: it needed 0.9 s for what its peers needed 0.1 s for"), NODE),
    (texts.node_state("n2 MIXED+DRAIN reason ftslurm:NVLINK-DOWN gpu3 0000:9b:00 boot=ab12 "
                      "2026-09-01T10:00Z"), GPU),
    (texts.node_state("n2 MIXED+DRAIN reason ftslurm:MLX5-DEAD boot=ab12 2026-09-01T10:00Z"), NODE),
    (texts.health("drain: NVLINK-DOWN of gpu3 at 0000:9b:00: fewer NVLinks than its model has"),
     GPU),
    (texts.health("reset: XID62 of gpu at 0000:9b:00: Xid 62, PMU halt"), GPU),
    (texts.health("drain: MLX5-DEAD of the node: a NIC that cannot recover"), NODE),
    (texts.health("reset: REMAP-WAIT of gpu3 at 0000:9b:00: a remapped row that waits"), GPU),
    (texts.health("after: IB-FLAP of the node: a port that keeps going down"), NODE),
    (texts.health("program: XID31 of gpu3 at 0000:9b:00: Xid 31, MMU page fault"), CODE),
    (texts.health("program: XID43 of gpu3 at 0000:9b:00: Xid 43, GPU stopped processing"), CODE),
]  # fmt: skip


@pytest.mark.parametrize(("row", "number", "cause", "clues"), CASES, ids=IDS)
def test_each_variant_finds_its_cause_alone_and_among_echoes(row, number, cause, clues):
    alone = classify(clues, texts.FACTS)
    assert alone.cause == cause, alone.sentence
    among = classify([*texts.ECHOES, *clues], texts.FACTS)
    assert among.cause == cause, among.sentence
    assert among.cause in MEANING and 0 < among.confidence < 1 and among.sentence


def test_the_confusion_matrix_has_nothing_beside_its_diagonal(capsys):
    counts = failure_texts.matrix()
    with capsys.disabled():
        print("\n" + "\n".join(failure_texts.table(counts)))
    assert sum(counts.values()) == 3 * len(failure_texts.ROWS)
    assert {pair: n for pair, n in counts.items() if pair[0] != pair[1]} == {}
    # Every cause that texts can name is in it.
    assert {cause for cause, _ in counts} == set(MEANING)


@pytest.mark.parametrize("seed", range(20))
def test_echoes_in_any_number_and_order_never_change_the_cause(seed):
    chance = random.Random(seed)
    for row, number, cause, clues in CASES:
        echoes = [
            dataclasses.replace(
                echo,
                at=None if echo.at is None else echo.at + chance.uniform(-100, 100),
                line=None if echo.line is None else chance.randrange(1, 40),
            )
            for echo in chance.choices(texts.ECHOES, k=chance.randrange(12))
        ]
        told = [*echoes, *clues]
        chance.shuffle(told)
        assert classify(told, texts.FACTS).cause == cause, (row, number, echoes)


def test_every_row_of_the_table_is_named_and_has_a_source_and_a_cause_of_ours():
    rows = [row for kind in KINDS for row in module.TABLE[kind]]
    assert all(row.name and row.source and row.pattern for row in rows)
    assert {row.cause for row in rows} - {None} <= set(MEANING)


def test_every_row_of_the_table_that_names_a_cause_is_tried_by_some_text():
    told = [texts.ECHOES, [clue for clue, _ in FURTHER], *(one[-1] for one in CASES)]
    told += [failure_reports.clues_of(report.text) for report in REPORTS]
    tried = {
        found[0].name
        for clue in itertools.chain(*told)
        if (found := look_up(module.TABLE[clue.kind], clue.text, clue.context)) is not None
    }
    rows = {row.name for kind in KINDS for row in module.TABLE[kind]}
    assert rows - tried == set(), rows - tried


@pytest.mark.parametrize(("clue", "cause"), FURTHER)
def test_further_texts(clue, cause):
    assert classify([clue], texts.FACTS).cause == cause


def test_the_order_of_trust_is_slurm_then_stepd_then_kernel_then_the_earliest_exception():
    exception = texts.error("KeyError: 'x'", at=texts.AT - 50)
    ladder = [
        (exception, CODE),
        (texts.kernel("NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus."), GPU),
        (texts.launcher("slurmstepd: error: Detected 1 oom_kill event in StepId=118.2."), OOM_HOST),
        (texts.account("job 118 NODE_FAIL 1:0 FailedNode=n2"), NODE),
    ]
    told = [*texts.ECHOES]
    for clue, cause in ladder:
        told.insert(0, clue)
        assert classify(told, texts.FACTS).cause == cause


def test_of_two_exceptions_the_earlier_by_the_leaders_clock_is_the_root():
    first = texts.error("KeyError: 'x'", rank=2, at=texts.AT)
    later = texts.error("OSError: [Errno 5] Input/output error", rank=3, at=texts.AT + 1)
    for told in ([first, later], [later, first]):
        finding = classify(told, texts.FACTS)
        assert (finding.cause, finding.blamed_rank) == (CODE, 2)


def test_an_exception_nobody_knows_is_no_root_beside_one_that_is_known():
    strange = texts.error("WeirdError: gone", rank=1, at=texts.AT - 9)
    known = texts.error("KeyError: 'x'", rank=3)
    assert classify([strange, known], texts.FACTS).blamed_rank == 3


def test_an_exception_before_the_agents_found_the_ranks_standing_is_the_root():
    hang = texts.agent("hang: no rank has ended a step for 14 s")
    before = texts.error("RuntimeError: my own", rank=2, at=texts.AT - 14)
    after = texts.error("KeyError: torn apart", rank=2, at=texts.AT + 1)
    assert classify([hang, before], texts.FACTS).cause == CODE
    assert classify([hang, after], texts.FACTS).cause == HANG


def test_what_agents_only_saw_takes_the_place_of_no_failure():
    seen = texts.agent("leader_lost (not acted on): the leader reaches nobody")
    finding = classify([seen, texts.error("KeyError: 'x'")], texts.FACTS)
    assert finding.cause == CODE


def test_a_bare_kill_becomes_out_of_memory_once_a_line_confirms_it():
    killed = texts.launcher("srun: error: n2: task 3: Killed", 1, 3)
    finding = classify([killed, *texts.ECHOES], texts.FACTS)
    assert (finding.cause, finding.blamed_rank) == (UNKNOWN, 3)
    assert finding.confidence <= 0.3
    confirmed = texts.kernel("Memory cgroup out of memory: Killed process 4711 (python)")
    finding = classify([killed, confirmed, *texts.ECHOES], texts.FACTS)
    assert finding.cause == OOM_HOST


def test_the_kill_of_a_rank_is_the_root_of_what_communication_libraries_print():
    killed = texts.launcher("srun: error: n2: task 3: Killed", 2, 3)
    timed_out = texts.error(
        "DistNetworkError: The client socket has timed out after 600000ms", rank=1
    )
    assert classify([killed, timed_out], texts.FACTS).cause == UNKNOWN


def test_a_kill_by_srun_does_not_take_the_place_of_the_rank_that_ended_before():
    first = texts.launcher("srun: error: n1: task 1: Exited with exit code 1", 1, 1)
    killed = texts.launcher("srun: error: n2: task 3: Killed", 4, 3)
    assert classify([killed, first], texts.FACTS).blamed_rank == 1
    # Unless that one has only lost another.
    echo = texts.error("PeerLost: rank 1 lost another rank", rank=1)
    assert classify([killed, first, echo], texts.FACTS).blamed_rank == 3


def test_a_line_of_advice_is_no_sign_of_what_it_guesses():
    advice = (
        "RuntimeError: NCCL communicator was aborted on rank 3. This may be caused by CUDA out of "
        "memory.\nPossible reasons: no space left on device, a lost node."
    )
    assert classify([texts.error(advice)], texts.FACTS).cause == UNKNOWN


def test_a_hardware_xid_names_the_gpu_and_the_node():
    xid = texts.kernel("NVRM: Xid (PCI:0000:9B:00): 48, pid=4711, name=python, DBE")
    fault = texts.error("RuntimeError: CUDA error: an illegal memory access was encountered")
    finding = classify([*texts.ECHOES, fault, xid], texts.FACTS)
    assert (finding.cause, finding.blamed_node, finding.blamed_gpu) == (GPU, "n2", "0000:9b:00")
    nvml = texts.kernel("GPU 00000000:9B:00.0: GPU Recovery Action : Reset")
    assert classify([nvml], texts.FACTS).blamed_gpu == "0000:9b:00"


def test_a_lost_node_is_named_by_who_names_it_and_not_by_the_node_that_says_so():
    said = texts.launcher("slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT x DUE TO NODE FAIL"
                          "URE, SEE SLURMCTLD LOG FOR DETAILS ***")  # fmt: skip
    said = dataclasses.replace(said, node="n1")
    finding = classify([said], texts.FACTS)
    assert (finding.cause, finding.blamed_node) == (NODE, None)
    named = texts.launcher("srun: error: Node failure on n2")
    assert classify([said, named], texts.FACTS).blamed_node == "n2"


def test_no_node_is_blamed_for_a_launch_that_timed_out():
    said = [
        texts.launcher("srun: error: Munge decode failed: Failed to receive message header: Timed-o"
                       "ut", 1),
        texts.launcher("srun: error: Task launch for StepId=6.1 failed on node n1: Protocol authent"
                       "ication error", 2),
    ]  # fmt: skip
    finding = classify(said, texts.FACTS)
    assert (finding.cause, finding.blamed_node) == ("network_transient", None)


def test_no_node_is_blamed_for_what_no_node_can_be_at_fault_for():
    for text in ("KeyError: 'x'", "CUDA out of memory", "OSError: [Errno 28] No space left"):
        finding = classify([texts.error(text)], texts.FACTS)
        assert finding.blamed_node is None and finding.blamed_rank == 3
    watchdog = texts.log("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)")
    finding = classify([watchdog], texts.FACTS)
    assert (finding.blamed_rank, finding.blamed_node) == (None, None)


def test_the_rank_that_a_barrier_missed_is_blamed_and_not_the_one_that_says_so():
    said = texts.error("RuntimeError: Rank 2 failed to pass monitoredBarrier in 60000 ms", rank=0)
    finding = classify([said], texts.FACTS)
    assert (finding.cause, finding.blamed_rank, finding.blamed_node) == (HANG, 2, "n2")


def test_the_kernels_word_on_another_job_of_the_node_is_not_ours():
    foreign = texts.kernel("oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/slurm/job_7/step_0")
    assert classify([foreign], texts.FACTS).cause == UNKNOWN
    task = dataclasses.replace(texts.FACTS, job_id="7_2")
    assert classify([foreign], task).cause == OOM_HOST


def test_a_process_killed_for_memory_on_our_node_need_not_be_ours():
    kill = texts.kernel("Out of memory: Killed process 99 (other) total-vm:931kB")
    ours = texts.kernel("oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/slurm/job_118/step_0")
    known, strange = texts.error("KeyError: 'x'"), texts.error("RuntimeError: my child has died")
    assert classify([kill, known], texts.FACTS).cause == CODE
    assert classify([kill, strange], texts.FACTS).cause == OOM_HOST
    assert classify([kill, ours, known], texts.FACTS).cause == OOM_HOST


def test_what_slurm_was_asked_counts_as_its_state():
    error = texts.error("KeyError: 'x'")
    for facts, cause in [
        (Facts(preempted=True), "preempted"),
        (Facts(cancelled_by="owner"), "cancelled_user"),
        (Facts(cancelled_by="other"), "cancelled_admin"),
        (Facts(preempted=False), CODE),
    ]:
        assert classify([error], facts).cause == cause


def test_the_one_rank_that_left_without_a_word_is_named():
    echoes = [texts.error("PeerLost: gone", rank=rank) for rank in (0, 1, 3)]
    finding = classify(echoes, texts.FACTS)
    assert (finding.cause, finding.blamed_rank) == (UNKNOWN, 2) and "n2" in finding.sentence


def test_what_could_not_be_asked_is_said_where_nothing_is_known():
    finding = classify([], Facts(rc=1, unasked=("sacct gave no answer",)))
    assert finding.cause == UNKNOWN and "sacct gave no answer" in finding.sentence


def test_a_log_that_repeats_its_ranks_record_decides_nothing():
    record = texts.error("KeyError: 'x'")
    chatter = texts.log("OSError: [Errno 5] Input/output error", "Traceback")
    assert classify([chatter, record], texts.FACTS).cause == CODE
    elsewhere = dataclasses.replace(chatter, rank=2, at=texts.AT - 1)
    assert classify([elsewhere, record], texts.FACTS).cause == "storage"


def test_a_rank_that_left_its_own_word_is_not_the_one_killed_for_memory():
    oom = texts.launcher("srun: error: n2: task 3: Out Of Memory", 2, 3)
    assert classify([oom], texts.FACTS).blamed_rank == 3
    echo = texts.error("PeerLost: rank 3 lost another rank", rank=3)
    finding = classify([oom, echo], texts.FACTS)
    assert (finding.cause, finding.blamed_rank) == (OOM_HOST, None)
    assert "rank 3 on" not in finding.sentence


@pytest.mark.parametrize("text", [
    "HTTPError: 502 Server Error: Bad Gateway", "SSLError: handshake", "ReadTimeout: read timeout",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
])  # fmt: skip
def test_an_exception_nobody_knows_is_no_sure_thing_before_the_first_step(text):
    start = dataclasses.replace(texts.FACTS, step=None)
    records = [texts.error(text, rank=rank) for rank in range(4)]
    finding = classify(records, start)
    assert (finding.cause, finding.confidence < SURE) == (CODE, True)


def test_what_ranks_of_one_node_alone_say_is_told_from_what_all_say():
    gone = "FileNotFoundError: [Errno 2] No such file or directory: '/scratch/vocabulary'"
    on_n2 = [texts.error(gone, rank=rank) for rank in (2, 3)]
    assert classify(on_n2, texts.FACTS).is_of_one_node
    assert not classify([*on_n2, texts.error(gone, rank=0)], texts.FACTS).is_of_one_node
    one_node = dataclasses.replace(texts.FACTS, nodes={2: "n2", 3: "n2"})
    assert not classify(on_n2, one_node).is_of_one_node


def test_a_node_whose_kernel_alone_tells_of_the_network_or_storage_is_blamed():
    lost = texts.error("DistNetworkError: The client socket has timed out after 600000ms")
    link = texts.kernel("mlx5_core 0000:1a:00.0 ib0: Link down")
    assert classify([lost], texts.FACTS).blamed_node is None
    assert classify([lost, link], texts.FACTS).blamed_node == "n2"
    # What all nodes see is the server's or the switch's.
    elsewhere = dataclasses.replace(link, node="n1")
    assert classify([lost, link, elsewhere], texts.FACTS).blamed_node is None


def test_agreement_of_sources_raises_and_another_root_lowers_the_confidence():
    alone = classify([texts.error("KeyError: 'x'")], texts.FACTS)
    other = texts.error("OSError: [Errno 5] Input/output error", rank=2, at=texts.AT + 1)
    assert (
        classify([texts.error("KeyError: 'x'"), other], texts.FACTS).confidence < alone.confidence
    )
    oom = texts.launcher("srun: error: n2: task 3: Out Of Memory", 2, 3)
    account = texts.account("step 118.2 OUT_OF_MEMORY 0:125")
    assert (
        classify([oom, account], texts.FACTS).confidence > classify([oom], texts.FACTS).confidence
    )


def test_ten_thousand_echoes_are_classified_in_a_second():
    echoes = [
        dataclasses.replace(texts.ECHOES[rank % 3], rank=rank, at=float(rank))
        for rank in range(10_000)
    ]
    began = time.process_time()
    finding = classify([*echoes, texts.error("KeyError: 'x'")], texts.FACTS)
    assert finding.cause == CODE
    assert time.process_time() - began < 4.0


def test_advice_is_left_out_of_what_is_matched():
    rows = module.TABLE["log"]
    assert look_up(rows, "Please check that there is space: No space left on device") is None
    assert look_up(rows, "No space left on device. Please check the quota.") is not None
    assert Clue("log", "x").line is None
