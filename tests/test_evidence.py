"""Who failed first, as the records of an attempt tell it: by one clock and within a bound."""

import dataclasses
import errno
import time

import pytest
from fakes.recovering import begin, decide, make_layout, rank_error

from ftslurm import files
from ftslurm.diagnosis.finding import Clue, Finding
from ftslurm.files import read_json, write_json
from ftslurm.recovery.evidence import MOST_ERRORS, read_evidence, with_finding
from ftslurm.run.attempts import STOPPED, Outcome, write_outcome
from ftslurm.run.node_memory import EXCLUDED, READMITTED, note_node
from ftslurm.run.rank_errors import read_rank_errors
from ftslurm.run.record import read_record


@pytest.fixture
def layout(tmp_path):
    return make_layout(tmp_path)


def evidence_of(layout):
    return read_evidence(layout, read_record(layout), 1, rc=1, term=False)


def agents(paths, *findings, **offsets_s):
    nodes = {node: {"state": "live", "offset_s": offset} for node, offset in offsets_s.items()}
    record = {"schema_version": 1, "nodes": nodes, "findings": list(findings)}
    write_json(paths.root / "agents.json", record)


def test_the_first_failure_is_told_by_the_leaders_clock(layout):
    paths = begin(layout)
    rank_error(paths, 0, 95.0, "first by its own clock")
    rank_error(paths, 3, 100.0, "first", node="n2")
    assert evidence_of(layout).first_failure.rank == 0
    agents(paths, n1=0.0, n2=90.0)
    assert evidence_of(layout).first_failure.rank == 3


def test_what_was_found_has_the_last_word_on_who_failed_first(layout):
    paths = begin(layout)
    rank_error(paths, 0, 5.0, "Connection closed by peer [10.0.0.2]:5", kind="RuntimeError")
    rank_error(paths, 3, 9.0, "no key 7", kind="KeyError", node="n2")
    assert evidence_of(layout).first_failure.rank == 0
    decide(layout)
    record = read_json(paths.decision_json)
    assert record["blamed"]["rank"] == record["first_failure"]["rank"] == 3
    assert (record["signature"], record["step"]) == ("KeyError: no key #", 3)


def test_a_finding_that_names_no_ranks_own_record_changes_nothing(layout):
    rank_error(begin(layout), 0, 5.0, "gone")
    evidence = evidence_of(layout)
    for kind, rank, blamed in (("launcher", 3, 3), ("rank_error", 1, None), ("rank_error", 1, 2)):
        finding = Finding("gpu", 0.9, blamed, "n2", None, [Clue(kind, "x", rank=rank)], "so")
        told = with_finding(evidence, finding, "")
        assert told.first_failure == evidence.first_failure and told.finding is finding


def test_of_a_program_its_log_says_more_than_how_it_ended(layout):
    rank_error(
        begin(layout), 3, 5.0, "`torchrun` ended with code 1; ...: ====", kind="ProgramFailed"
    )
    evidence = dataclasses.replace(evidence_of(layout), is_program=True)
    line = "torch.OutOfMemoryError: CUDA out of memory.\nTried to allocate 20.00 MiB"
    clue = Clue("log", line, rank=3, node="n2", file="rank-3.log", line=7)
    finding = Finding("oom_gpu", 0.9, 3, "n2", None, [clue], "so")
    told = with_finding(evidence, finding, "").first_failure
    assert (told.rank, told.node) == (3, "n2") and told.error.startswith("torch.OutOfMemoryError")
    # By this an error is known again, and each in its own way.
    assert told.signature.endswith("Tried to allocate #.# MiB")
    ours = dataclasses.replace(evidence, is_program=False)
    assert with_finding(ours, finding, "").first_failure == evidence.first_failure


def test_no_more_than_some_records_are_read_and_each_once(layout, monkeypatch):
    paths = begin(layout)
    for rank in range(MOST_ERRORS + 40):
        rank_error(paths, rank, 5.0, "lost another rank", kind="PeerLost")
    read = []
    real = files.read_bytes

    def counted(path, **options):
        if path.parent == paths.ranks:
            read.append(path.name)
        return real(path, **options)

    monkeypatch.setattr(files, "read_bytes", counted)
    evidence = evidence_of(layout)
    assert len(read) == len(set(read)) == MOST_ERRORS
    # Of those that were not read one may say more: nobody is named for being silent.
    assert evidence.first_failure is None and evidence.step == 3


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_file_system_that_is_away_costs_a_second_and_not_a_second_a_record(
    layout, monkeypatch, number
):
    paths = begin(layout)
    for rank in range(20):
        rank_error(paths, rank, 5.0, "x")
    clock, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    def away(point, *, name="", **facts):
        if name.startswith("rank-"):
            raise OSError(number, "away")

    monkeypatch.setattr("ftslurm.files.faults.point", away)
    began = time.monotonic()
    told = read_rank_errors(paths, within_s=1.0, clock=lambda: clock[0], sleep=sleep)
    assert time.monotonic() - began < 15, "none is waited for by itself"
    assert told.unread == 20 and not told.records and 0.9 < sum(slept) < 1.2


def test_one_that_comes_late_is_read_and_a_torn_one_counts_as_absent(layout, monkeypatch):
    paths = begin(layout)
    rank_error(paths, 2, 5.0, "x")
    (paths.ranks / "rank-00003.json").write_text('{"schema_version": 1, "ra')
    tries = []

    def late(point, *, name="", **facts):
        if name == "rank-00002.json" and not tries:
            tries.append(name)
            raise OSError(errno.ESTALE, "late")

    monkeypatch.setattr("ftslurm.files.faults.point", late)
    told = read_rank_errors(paths, within_s=1.0, sleep=lambda _: None)
    assert [record["rank"] for _, record in told.records] == [2] and told.unread == 0
    assert told.ranks == {2, 3} and tries


def test_ranks_that_the_launcher_heard_of_first_are_read_first(layout):
    paths = begin(layout)
    for rank in range(5):
        rank_error(paths, rank, 5.0, "x")
    told = read_rank_errors(paths, within_s=1.0, most=3, first=[4, 9, 2])
    assert [record["rank"] for _, record in told.records] == [4, 2, 0] and told.unread == 2


def test_a_node_that_was_taken_back_is_not_given_up_again_for_being_slow(layout):
    paths = begin(layout)
    write_outcome(paths, Outcome(STOPPED, step=20, committed_step=20, signal="SIGUSR1"))
    agents(paths, {"kind": "straggler", "nodes": ["n2"], "ranks": [3], "acted": True})
    note_node(layout, EXCLUDED, "n2", attempt=0)
    assert evidence_of(layout).evicted == ("n2",)
    note_node(layout, READMITTED, "n2", attempt=0)
    evidence = evidence_of(layout)
    assert (evidence.evicted, evidence.stragglers) == ((), ())
    note_node(layout, EXCLUDED, "n2", attempt=1)
    assert evidence_of(layout).evicted == ("n2",)
