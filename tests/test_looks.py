"""A look of a node at itself: how long it is waited for, and what is read for it."""

import time
from types import SimpleNamespace

import pytest
from fakes.recovering import FakeScheduler, begin, make_layout, rank_error

from ftslurm.diagnosis import ask_nodes, look_here
from ftslurm.diagnosis.ask_nodes import Looks
from ftslurm.diagnosis.find import find
from ftslurm.diagnosis.look_here import heard_before, since_when
from ftslurm.files import read_json, write_json
from ftslurm.health.report import Report, Told, report_record
from ftslurm.health.signals import DRIVER_HANG, Signal

LINK = Told("drain", "NVLINK-DOWN", 3, "0000:9b:00", "fewer NVLinks", "nvlink-model", "DCGM")


@pytest.fixture
def layout(tmp_path):
    layout = make_layout(tmp_path / "run")
    record = read_json(layout.run_json)
    record["spec"]["cluster"].update(gpus_per_node=8, scheduler="fake")
    write_json(layout.run_json, record)
    return layout


@pytest.mark.parametrize("is_told", [True, False])
def test_looks_are_waited_for_less_where_a_rank_itself_has_told_the_cause(
    layout, monkeypatch, tmp_path, is_told
):
    kind, said = ("KeyError", "no such key") if is_told else ("RuntimeError", "NCCL error")
    rank_error(begin(layout), 3, 5.0, said, kind=kind, node="n2")
    monkeypatch.setattr(ask_nodes, "SHORT_S", 1.0)
    monkeypatch.setattr(ask_nodes, "LOOK_S", 100.0 if is_told else 6.0)
    monkeypatch.setattr(ask_nodes, "TERM_S", 60.0)
    looks = []

    def begun(scheduler, layout, record, attempt, nodes):
        argv = ["sh", "-c", f"trap 'echo > {tmp_path}/told; exit' TERM; sleep 200 & wait"]
        (tmp_path / "looks").mkdir()
        looks.append(Looks(nodes, tmp_path / "looks", argv, scheduler))
        return looks[0]

    monkeypatch.setattr("ftslurm.diagnosis.clues.begin_looks", begun)
    began = time.monotonic()
    finding, _ = find(layout, 1, scheduler=FakeScheduler(), rc=1, deadline_s=250.0)
    took_s = time.monotonic() - began
    assert took_s < 60 if is_told else took_s >= 5, took_s
    assert (finding.cause == "code") == is_told
    looks[0]._thread.join(90.0)
    assert (tmp_path / "told").exists(), "the step is left running"


def test_a_look_that_is_cut_short_still_tells_of_memory_that_does_not_come_back(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ask_nodes, "SHORT_S", 0.5)
    monkeypatch.setattr(ask_nodes, "LOOK_S", 60.0)
    monkeypatch.setattr(ask_nodes, "NODE_FILES_S", 60.0)
    for node in ("n1", "n2"):
        write_json(tmp_path / f"{node}.json", record_of(node))
    write_json(tmp_path / "late", record_of("n2", held={"0000:9b:00": "70 GiB are taken"}))
    argv = ["sh", "-c", f"sleep 1.5; mv {tmp_path}/late {tmp_path}/n2.json"]
    began = time.monotonic()
    words, _ = Looks(["n1", "n2"], tmp_path, argv, FakeScheduler()).wait(is_short=True)
    assert time.monotonic() - began >= 1.5
    assert [report.node for _, report in words] == ["n1", "n2"]
    assert read_json(tmp_path / "n2.json")["held"]


def record_of(node, held=None):
    return {**report_record(Report(node, "12", "b", 9.0, "probe", "ok", ())), "held": held or {}}


def test_a_nodes_word_that_cannot_be_read_costs_no_other_nodes_word(tmp_path, monkeypatch):
    folder = tmp_path / "looks"
    folder.mkdir()
    (folder / "n1.json").mkdir()  # IsADirectoryError, as a file server's ESTALE an OSError
    write_json(folder / "n2.json", report_record(Report("n2", "12", "b", 9.0, "probe", "drain",
                                                        (LINK,))))  # fmt: skip
    monkeypatch.setattr(ask_nodes, "NODE_FILES_S", 60.0)
    words, notes = Looks(["n1", "n2"], folder, ["true"], FakeScheduler()).wait()
    assert [report.node for _, report in words] == ["n2"] and "the health of n1" in notes[0]
    monkeypatch.setattr(ask_nodes, "NODE_FILES_S", -1.0)
    words, notes = Looks(["n1", "n2"], folder, ["true"], FakeScheduler()).wait()
    assert words == [] and "the health of n1, n2" in notes[0]


def heard_by(layout, number, kernel_at):
    looks = layout.attempt(number).looks
    looks.mkdir(parents=True)
    write_json(looks / "n1.json", {"schema_version": 1, "kernel_at": kernel_at})


def test_a_kernel_line_counts_for_one_attempt_only(layout):
    begin(layout)
    begin(layout)
    claimed_at = read_json(layout.attempt(2).attempt_json)["claimed_at"]
    up_s = 10 * 86400.0
    # As far back as the kernel log's clock may be off.
    heard_at = heard_before(layout, 2, "n1")
    assert claimed_at - 30 < since_when(layout, 2, heard_at, up_s=up_s) < claimed_at - 10
    heard_by(layout, 1, claimed_at - 3)
    heard_at = heard_before(layout, 2, "n1")
    assert claimed_at - 3 < since_when(layout, 2, heard_at, up_s=up_s) < claimed_at
    assert heard_before(layout, 2, "n2") is None


def test_no_more_than_a_few_earlier_looks_are_read_and_the_newest_has_the_last_word(
    layout, monkeypatch
):
    for _ in range(8):
        begin(layout)
    read = []
    real = look_here.read_json

    def counted(path):
        read.append(path)
        return real(path)

    monkeypatch.setattr(look_here, "read_json", counted)
    heard_by(layout, 1, 50.0)
    assert heard_before(layout, 8, "n1") is None and len(read) <= 3
    heard_by(layout, 6, 70.0)
    assert heard_before(layout, 8, "n1") == 70.0
    heard_by(layout, 7, None)
    del read[:]
    assert heard_before(layout, 8, "n1") is None and len(read) == 1


def test_a_look_that_hears_nothing_hands_on_what_was_heard_before(layout, monkeypatch):
    for _ in range(2):
        begin(layout)
    heard_by(layout, 1, 70.0)

    looked(layout, monkeypatch)
    look_here.look_here(layout, 2, {"SLURMD_NODENAME": "n1"})
    assert read_json(layout.attempt(2).looks / "n1.json")["kernel_at"] == 70.0


def looked(layout, monkeypatch, *signals):
    """What a look shows; its file."""
    probe = SimpleNamespace(reading=SimpleNamespace(signals=signals))
    layout.attempt(2).looks.mkdir(parents=True)
    monkeypatch.setattr(look_here, "look_at", lambda *_, **__: probe)
    monkeypatch.setattr(look_here, "report_of", lambda probe, node: node)
    monkeypatch.setattr(look_here, "report_record", lambda node: {"schema_version": 1})
    return layout.attempt(2).looks / "n1.json"


def test_what_a_look_has_found_is_written_before_memory_is_waited_for(layout, monkeypatch):
    for _ in range(2):
        begin(layout)
    path = looked(layout, monkeypatch)
    gpus = {"0000:1b:00": "70.0 GiB are taken by no process that is there"}
    before = []

    def held_here(spec, environ):
        before.append(read_json(path))
        return gpus

    monkeypatch.setattr(look_here, "held_here", held_here)
    look_here.look_here(layout, 2, {"SLURMD_NODENAME": "n1"})
    (first,) = before
    assert first["held"] == {} and read_json(path) == {**first, "held": gpus}


def test_a_driver_that_hangs_is_not_asked_for_memory_as_well(layout, monkeypatch):
    for _ in range(2):
        begin(layout)
    path = looked(layout, monkeypatch, Signal(DRIVER_HANG, True))
    monkeypatch.setattr(look_here, "held_here", lambda *_: {"0000:1b:00": "a second child"})
    look_here.look_here(layout, 2, {"SLURMD_NODENAME": "n1"})
    assert read_json(path)["held"] == {}
