"""Ends of runs that people have reported are told rightly; what training goes on after is none."""

import dataclasses
import time

import failure_clues as texts
import failure_reports
import pytest
from failure_reports import BEFORE, HARMLESS, clues_of, judged
from reported_failures import REPORTS, raised, torchrun

from ftslurm.diagnosis.causes import CAPACITY, CODE, OOM_GPU, STORAGE, UNKNOWN
from ftslurm.diagnosis.classify import classify

KILLED = texts.launcher("srun: error: n2: task 3: Killed", 2, 3)
BLOCKED = "BlockingIOError: [Errno 11]"
GOES_ON = [f"step {step} loss 2.1" for step in range(40, 80)]


@pytest.mark.parametrize("report", REPORTS, ids=[report.name for report in REPORTS])
def test_a_reported_end_is_told_rightly_among_the_others_echoes(report):
    found = judged(report)
    assert found.cause == report.cause, found.sentence


def test_how_many_reports_are_told_rightly_is_printed(capsys):
    failure_reports.main()
    assert capsys.readouterr().out.startswith(f"{len(REPORTS)} of {len(REPORTS)} reports")
    with capsys.disabled():
        print(f"\n{len(REPORTS)} reported ends, {len(HARMLESS)} harmless lines")


@pytest.mark.parametrize("line", [
    *(line for _, line in HARMLESS),
    "WARNING upload: HTTP Error 503: Service Unavailable, will retry in 5 s",
    "INFO table.py: found NaN in 12 rows of column `age`, filled with 0",
])  # fmt: skip
def test_a_line_that_training_goes_on_after_is_no_sign(line):
    assert clues_of("\n".join([*BEFORE, line])) == []


def program_failed(said, rank=3):
    text = f"ProgramFailed: `torchrun train.py` ended with code 1; the last line of its log: {said}"
    return texts.error(text, " ", rank=rank)


def log_of(*reports, then=()):
    return clues_of("\n".join([*BEFORE, *reports, *then]))


def test_why_a_program_failed_is_looked_for_in_its_log_where_the_last_line_does_not_tell():
    out_of_memory = raised("", OOM_GPU, "torch.OutOfMemoryError: CUDA out of memory.\n").text
    told = [program_failed("=" * 60), *log_of(out_of_memory, torchrun(1))]
    assert classify([*texts.ECHOES, *told], texts.FACTS).cause == OOM_GPU
    # A word that tells is the better one.
    told = [program_failed("KeyError: 'x'"), *log_of(out_of_memory)]
    assert classify(told[:1], texts.FACTS).cause == CODE
    mine = program_failed("RuntimeError: CUDA out of memory")
    chatter = raised("", STORAGE, "OSError: [Errno 5] Input/output error\n").text
    assert classify([mine, *log_of(chatter)], texts.FACTS).cause == OOM_GPU


def test_a_program_that_has_only_lost_its_peer_does_not_take_the_place_of_the_one_killed():
    lost = raised("", UNKNOWN, f"{REPORTS[0].text.splitlines()[2]}\n").text
    peer = [dataclasses.replace(clue, rank=1, node="n1") for clue in log_of(lost)]
    assert peer
    killed = texts.error("ProgramFailed: `train.sh` was killed by signal 9 (Killed)", " ", rank=3)
    found = classify([program_failed("[rank1]: bye", rank=1), *peer, killed], texts.FACTS)
    assert (found.cause, found.blamed_rank) == (UNKNOWN, 3), found.sentence


@pytest.mark.parametrize("text", [
    raised("", STORAGE, "OSError: [Errno 116] Stale file handle\n").text,
    "WARNING: ran out of memory, skipping batch: CUDA out of memory. Tried to allocate 93.75 GiB\n",
    "Loss is nan, skipping this batch\n",
])  # fmt: skip
def test_what_the_program_has_gone_on_after_is_not_why_it_was_killed(text):
    ended = texts.launcher("srun: error: n2: task 3: Exited with exit code 1", 2, 3)
    assert classify([*log_of(text), ended], texts.FACTS).cause != UNKNOWN
    before = log_of(text, then=GOES_ON)
    assert [clue.is_past for clue in before] == [True]
    assert classify([*before, KILLED], texts.FACTS).cause == UNKNOWN
    # Nor does it hide what came then, whatever its kind.
    then = raised("", CODE, "KeyError: 'x'\n").text
    assert classify(log_of(text, then=[*GOES_ON, then]), texts.FACTS).cause == CODE


@pytest.mark.parametrize("line", [
    "my scheduler says: JOB 118 ON n1 CANCELLED AT 2026-11-29T13:47:08 DUE TO TIME LIMIT",
    "runs that ended DUE TO PREEMPTION: 3", "squeue: Node failure on n2", "batch 7: Out Of Memory",
    "INFO job aborted, exceeded memory limit of the cache",
    "[2026-11-29T14:19:25.707] WARN skipping batch 7: out of memory",
])  # fmt: skip
def test_what_a_program_prints_of_jobs_is_no_word_of_slurms(line):
    assert clues_of("\n".join([*BEFORE, line])) == []


@pytest.mark.parametrize("line", [
    "slurmstepd: error: *** JOB 118 ON n2 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***",
    "slurmstepd-n2: error: *** STEP 118.2 ON n2 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT "
    "***",
    "[2026-11-29T14:19:25.707] error: *** STEP 118.2 ON n2 CANCELLED AT 2026-11-29T14:19:25 DUE TO "
    "TIME LIMIT ***",
    " 50%|#####     | 5/10 [00:01<00:01]slurmstepd: error: *** STEP 118.2 ON n2 CANCELLED "
    "AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***",
])  # fmt: skip
def test_what_slurmstepd_writes_into_a_ranks_log_is(line):
    told = log_of(line, then=GOES_ON)
    assert classify([*texts.ECHOES, *told], texts.FACTS).cause == "time_limit"


def test_the_stacks_of_an_end_are_no_going_on():
    stacks = [
        *(f"frame #{number}: <unknown function> + 0x1 (0x7f in torch.so)" for number in range(40)),
        "Thread 0x00007adf2ede06c0 (most recent call first):",
        *('  File "threading.py", line 1032 in _bootstrap' for _ in range(40)),
        *(f"n2:577:577 [0] NCCL INFO misc/socket.cc:{number} -> 6" for number in range(40)),
        *(f"/lib64/libc.so.6(+0x{number}b429)[0x7f55ddcfe429]" for number in range(40)),
        *(
            f"7f55ddc{number}000-7f55dde3a000 r-xp 00000000 fd:00 1 /libc.so"
            for number in range(40)
        ),
        *(
            f"[n2:02330] [ {number}] /lib64/libpthread.so.0(+0xf5d0)[0x7f55]"
            for number in range(40)
        ),
        *(f"#{number} 0x00007f55ddcfe429 in raise (/lib64/libc.so.6)" for number in range(40)),
        *(f"| Active memory         | {number} MiB |" for number in range(40)),
        *("[W CudaIPCTypes.cpp:15] Producer process has been terminated" for _ in range(40)),
        *(f"COMET INFO:     loss [{number}] : (0.1, 0.2)" for number in range(40)),
    ]
    clues = log_of("RuntimeError: CUDA error: an illegal memory access", then=stacks)
    assert clues and not any(clue.is_past for clue in clues)


def test_a_peer_that_was_lost_long_before_does_not_hide_the_programs_own_end():
    reset = "urllib3: Connection reset by peer"
    ended = program_failed("FATAL: no such key")
    assert classify([ended, *log_of(reset, then=GOES_ON)], texts.FACTS).cause == CODE
    assert classify([ended, *log_of(reset)], texts.FACTS).cause == UNKNOWN


@pytest.mark.parametrize(("text", "cause"), [
    ("RuntimeError: no shard 7 after retrying 5 times: [Errno 5] Input/output error", STORAGE),
    ("ConnectionError: gave up retrying", CODE),
    ("ValueError: please check the learning rate", CODE),
])  # fmt: skip
def test_what_was_raised_is_an_end_even_if_its_words_are_advice(text, cause):
    assert classify([texts.error(text)], texts.FACTS).cause == cause
    assert classify(log_of(raised("", cause, text).text), texts.FACTS).cause == cause


def test_a_write_that_would_have_blocked_is_no_lack_of_room():
    for said, cause in (
        ("Resource temporarily unavailable", CAPACITY),
        ("write could not complete without blocking", CODE),
    ):
        assert classify([texts.error(f"{BLOCKED} {said}")], texts.FACTS).cause == cause


def test_lines_of_any_length_are_matched_in_time():
    began = time.process_time()
    for word in ("loss ", "grad ", "loss a b ", "NET/IB : a ", "\t"):
        clues_of(word * 20_000)
    assert time.process_time() - began < 5.0
