"""What root has said of the nodes counts as far as it stands by it, and never holds a run up."""

import time
from dataclasses import replace

import pytest
from fakes.recovering import FakeScheduler, begin, decide, make_layout, rank_error

from ftslurm.diagnosis import ask_nodes
from ftslurm.diagnosis.ask_nodes import words_of_root
from ftslurm.diagnosis.find import find
from ftslurm.files import read_json, write_json
from ftslurm.health import verdict_folder
from ftslurm.health.report import Report, Told
from ftslurm.recovery.claim import claim_attempt
from ftslurm.recovery.keep_out import known_exclusions, readmit_nodes
from ftslurm.recovery.node_health import remember_roots_word
from ftslurm.recovery.own_job import OwnJob
from ftslurm.run.attempts import claim, read_attempt
from ftslurm.run.node_memory import FAULT, note_node
from ftslurm.run.record import read_record

LINK = Told("drain", "NVLINK-DOWN", 3, "0000:9b:00", "fewer NVLinks", "nvlink-model", "DCGM")
FAULT_31 = Told("warn", "XID31", 3, "0000:9b:00", "Xid 31", "xid-31", "NVIDIA", hands_to_run=True)


class Slurm(FakeScheduler):
    name = "slurm"


@pytest.fixture
def layout(tmp_path):
    layout = make_layout(tmp_path / "run")
    record = read_json(layout.run_json)
    record["spec"]["health"].update(verdict_dir="/verdicts")
    write_json(layout.run_json, record)
    return layout


@pytest.fixture
def said(monkeypatch):
    """What lies in root's folder, and for which job it is looked up."""
    told, asked = [], []

    def read_verdicts(folder, nodes, *, job=""):
        asked.append(job)
        return [one for one in told if one.node in nodes], []

    monkeypatch.setattr(verdict_folder, "read_verdicts", read_verdicts)
    return told, asked


def report(node, *verdicts, at=9e9, action="", job="12", context="epilog"):
    word = verdicts[0].word if verdicts else "ok"
    return Report(node, job, "boot-1", at, context, word, verdicts, action=action)


def job_of(layout):
    return OwnJob(layout, read_record(layout), Slurm(), "12")


@pytest.mark.parametrize(("action", "out"), [
    ("drained", ["n2"]), ("foreign", ["n2"]), ("", ["n2"]), ("undone", []), ("shadow", []),
])  # fmt: skip
def test_a_drain_that_root_only_tries_or_took_back_keeps_no_run_off(layout, said, action, out):
    begin(layout)
    said[0].append(report("n2", LINK, action=action))
    remember_roots_word(job_of(layout))
    assert list(known_exclusions(job_of(layout))) == out
    finding, _ = find(layout, 1, scheduler=None, rc=1, deadline_s=60.0)
    assert list(finding.sick) == out


def test_what_root_says_of_most_nodes_at_once_keeps_a_run_off_none(layout, said, capsys):
    nodes = [f"n{number}" for number in range(1, 65)]
    begin(layout)
    claim(layout, replace(read_attempt(layout, 1), nodes=nodes))
    said[0].extend(report(node, LINK) for node in nodes[:40])
    remember_roots_word(job_of(layout))
    assert known_exclusions(job_of(layout)) == {}
    assert "40 of 64 nodes say NVLINK-DOWN of themselves at once" in capsys.readouterr().err
    del said[0][3:]
    remember_roots_word(job_of(layout))
    assert list(known_exclusions(job_of(layout))) == nodes[:3]


def test_a_person_who_readmits_a_node_has_the_last_word_on_what_was_said_before(layout, said):
    begin(layout)
    note_node(layout, FAULT, "n2", attempt=1, cause="node", why="lost")
    job = job_of(layout)
    before = time.time() - 60
    said[0].append(report("n2", LINK, at=before))
    readmit_nodes(job, ["n2"])
    remember_roots_word(job)
    assert known_exclusions(job) == {}
    said[0].append(report("n2", LINK, at=time.time() + 60))
    remember_roots_word(job)
    assert list(known_exclusions(job)) == ["n2"]


def test_the_prolog_of_the_attempts_own_job_counts_though_it_ended_before_the_claim(layout, said):
    begin(layout)
    attempt = replace(read_attempt(layout, 1), claimed_at=1000.0)
    early = {"at": 998.0, "context": "prolog"}
    said[0].extend([
        report("n1", LINK, **early), report("n2", FAULT_31, **early),
        report("n1", LINK, at=900.0), report("n2", LINK, at=998.0, context="prolog", job="11"),
    ])  # fmt: skip
    words, notes = words_of_root(layout.root, attempt)
    assert [(one.node, one.context, one.job) for _, one in words] == [
        ("n1", "prolog", "12"), ("n2", "prolog", "12"),
    ]  # fmt: skip
    # What a program did before this job began is none of its own.
    assert not words[1][1].verdicts[0].hands_to_run and notes == []


def test_the_word_on_an_array_task_is_looked_up_by_slurms_own_number_of_it(layout, said):
    begin(layout)
    attempt = replace(read_attempt(layout, 1), job_id="70_1", raw_job_id="72", claimed_at=1.0)
    said[0].append(report("n2", FAULT_31, job="72"))
    ((_, word),) = words_of_root(layout.root, attempt)[0]
    assert said[1] == ["72"] and word.verdicts[0].hands_to_run


def test_a_claim_notes_slurms_own_number_of_an_array_task(layout, monkeypatch):
    scheduler = Slurm()
    scheduler.name, scheduler.own_job_id = "local", lambda environ: "70_1"
    scheduler.master_address = lambda nodes: nodes[0]
    monkeypatch.setattr("ftslurm.recovery.claim.open_scheduler", lambda *_, **__: scheduler)
    claim_attempt(layout, {"SLURM_JOB_ID": "72", "FTSLURM_RUN_DIR": str(layout.root)})
    attempt = read_attempt(layout, 1)
    assert (attempt.job_id, attempt.raw_job_id) == ("70_1", "72")


def test_a_folder_that_does_not_answer_holds_up_no_claim(layout, monkeypatch, capsys):
    begin(layout)
    monkeypatch.setattr(ask_nodes.RootsWords.wait, "__defaults__", (0.1,))
    monkeypatch.setattr(ask_nodes, "words_of_root", lambda *_: time.sleep(30))
    begun = time.monotonic()
    remember_roots_word(job_of(layout))
    assert time.monotonic() - begun < 15
    assert "`/verdicts` does not answer" in capsys.readouterr().err


def test_nor_does_it_cost_the_diagnosis(layout, monkeypatch):
    rank_error(begin(layout), 3, 5.0, "no such key", kind="KeyError", node="n2")
    monkeypatch.setattr(ask_nodes, "words_of_root", lambda *_: time.sleep(30))
    monkeypatch.setattr("ftslurm.diagnosis.find.MARGIN_S", 20.0)
    begun = time.monotonic()
    finding, why_none = find(layout, 1, scheduler=None, rc=1, deadline_s=1.0)
    assert (finding.cause, why_none) == ("code", "")
    assert time.monotonic() - begun < 19


def test_what_has_come_by_the_deadline_is_classified_though_one_source_hangs(layout, monkeypatch):
    rank_error(begin(layout), 3, 5.0, "no such key", kind="KeyError", node="n2")
    monkeypatch.setattr("ftslurm.diagnosis.clues.of_logs", lambda found: time.sleep(30))
    monkeypatch.setattr("ftslurm.diagnosis.find.MARGIN_S", 0.2)
    monkeypatch.setattr("ftslurm.diagnosis.find.DEADLINE_S", 10.0)
    decision = decide(layout)
    assert (decision.cause, decision.blamed.rank) == ("code", 3), decision.reason
