"""The end of a rank's log becomes clues: tracebacks folded, times read, chatter left out."""

import time

import failure_texts
import pytest
from fakes.left_behind import TRACEBACK
from test_classify import FURTHER

from ftslurm.diagnosis.classify import TABLE, classify
from ftslurm.diagnosis.finding import Facts
from ftslurm.diagnosis.signatures import look_up
from ftslurm.diagnosis.tails import MOST_CLUES, log_clues, read_tail, time_in

NOW = 1_700_000_000.0


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("KeyError: 'old'\n" + "step\n" * 100_000 + f"{TRACEBACK}KeyError: 'new'\n")
    tail = read_tail(log, 4096)
    clues = log_clues(tail, rank=0, node="n1", file=str(log))
    assert [clue.text for clue in clues] == ["KeyError: 'new'"]
    assert clues[0].line is None and clues[0].at == pytest.approx(log.stat().st_mtime)
    assert read_tail(tmp_path / "none", 10) is None


def test_an_exception_is_read_with_its_prefix_its_cause_and_its_further_lines(tmp_path):
    log = tmp_path / "rank-1.log"
    block = TRACEBACK + "torch.distributed.DistBackendError: NCCL error in: x.cpp:1\n"
    block += "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    block += "Cuda failure 'out of memory'\n"
    text = "".join(f"[rank1]: {line}\n" for line in block.splitlines())
    log.write_text(text + "\nTraceback (most recent call last):\n  cut")
    clues = log_clues(read_tail(log, 1 << 20), rank=1, node="n1", file=str(log))
    assert [clue.line for clue in clues] == [6]
    assert classify(clues, Facts(rc=1)).cause == "oom_gpu"


def test_the_time_of_a_line_is_read_where_it_has_one():
    assert time_in("2026-11-29T13:47:08.250Z ERROR rank=3 x", year_of=NOW) == 1795960028.25
    local = time.mktime(time.strptime("2026-11-29 13:47:08", "%Y-%m-%d %H:%M:%S"))
    assert time_in("[2026-11-29T13:47:08.5] error: x", year_of=NOW) == local + 0.5
    line = "[rank1]:[E1129 13:47:08.500000000 ProcessGroupNCCL.cpp:632] x"
    assert time_in(line, year_of=local) == local + 0.5
    assert time_in("no time", year_of=NOW) is None
    assert time_in("9999-99-99 99:99:99", year_of=NOW) is None


def test_a_line_without_a_year_is_of_the_year_before_where_its_log_ends_in_the_next():
    ended = time.mktime((2027, 1, 1, 0, 5, 0, 0, 0, -1))
    written = time.mktime((2026, 12, 31, 23, 58, 0, 0, 0, -1))
    assert time_in("E1231 23:58:00.500000 x.cpp:1] x", year_of=ended) == written + 0.5
    assert time_in("E0101 00:05:01 x.cpp:1] x", year_of=ended) == ended + 1


def test_a_line_of_the_29th_of_february_is_none_of_the_exception_above_it(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text(f"{TRACEBACK}KeyError: 'x'\nI0229 13:47:08.5 x.cpp:1] going on\n")
    clues = log_clues(read_tail(log, 1 << 20), rank=0, node="n1", file=str(log))
    assert [clue.text for clue in clues] == ["KeyError: 'x'"]


def test_of_many_telling_lines_the_first_and_the_last_are_kept(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("".join(f"OSError: [Errno 5] number {n}\n" for n in range(5000)))
    clues = log_clues(read_tail(log, 1 << 20), rank=0, node="n1", file=str(log))
    assert len(clues) == MOST_CLUES
    assert "number 0" in clues[0].text and "number 4999" in clues[-1].text


def test_every_line_that_the_table_knows_is_looked_at(tmp_path):
    told = [*(clues for *_, clues in failure_texts.variants()), [clue for clue, _ in FURTHER]]
    texts = [clue.text for clues in told for clue in clues if clue.kind in ("log", "rank_error")]
    assert len(texts) > 80
    log = tmp_path / "rank-0.log"
    for text in texts:
        log.write_text(text.splitlines()[0] + "\n")
        clues = log_clues(read_tail(log, 1 << 20), rank=0, node="n1", file=str(log))
        known = look_up(TABLE["log"], text.splitlines()[0])
        assert bool(clues) == (known is not None), text


def test_a_log_of_training_alone_gives_no_clue(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("2026-11-29T13:47:08.250Z INFO rank=0 step 12 loss 3.1 tokens/s 1200\n" * 99)
    assert log_clues(read_tail(log, 1 << 20), rank=0, node="n1", file=str(log)) == []
