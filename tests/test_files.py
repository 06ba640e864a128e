"""Durable primitives: the old bytes or the new ones, never a mix; whole lines, never half ones."""

import errno
import math
import os
import threading
from pathlib import Path

import pytest

from ftslurm import files
from ftslurm.errors import FormatError
from ftslurm.files import (
    append_record,
    claim_folder,
    decode_json,
    read_json,
    read_records,
    write_atomic,
    write_json,
    write_new,
)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"schema_version": 1, "value": "old"})

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"schema_version": 1, "value": "new"})
    assert read_json(path)["value"] == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_bytes_and_name_are_synced_before_a_write_returns(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(fd):
        order.append("folder" if Path(f"/proc/self/fd/{fd}").is_dir() else "file")
        fsync(fd)

    def noted_replace(*names):
        order.append("rename")
        replace(*names)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_atomic(tmp_path / "a", b"x")
    assert order == ["file", "rename", "folder"]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"a": 1}', b'{"schema_version": "1"}', b"\xff", b"[" * 100_000],
    ids=["empty", "torn", "list", "no version", "text", "no UTF-8", "deep"],
)
def test_what_is_no_record_of_ours_is_refused_by_name(data):
    with pytest.raises(FormatError, match="RUN/run.json"):
        decode_json(data, where="RUN/run.json")


def test_a_newer_record_is_refused_and_unknown_keys_are_kept():
    with pytest.raises(FormatError, match="schema_version 2"):
        decode_json(b'{"schema_version": 2}', where="x")
    assert decode_json(b'{"schema_version": 1, "new": 3}', where="x")["new"] == 3


def test_records_come_back_in_order_and_a_torn_line_costs_itself_alone(tmp_path):
    path = tmp_path / "events.jsonl"
    for number in range(3):
        append_record(path, {"number": number})
    with path.open("ab") as stream:
        stream.write(b'deadbeef {"number": 3')  # the writer was killed here
    append_record(path, {"number": 4})
    assert [record["number"] for record in read_records(path)] == [0, 1, 2, 4]


def test_a_damaged_line_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    for number in range(3):
        append_record(path, {"number": number})
    path.write_bytes(path.read_bytes().replace(b'"number":1', b'"number":7'))
    assert [record["number"] for record in read_records(path)] == [0, 2]
    assert list(read_records(tmp_path / "none")) == []


def test_one_of_many_claims_a_folder(tmp_path):
    won = []
    threads = [
        threading.Thread(target=lambda: won.append(claim_folder(tmp_path / "0001")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 15 + [True]


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def failing(number, *, until, clock):
    """Work that fails with errno `number` until the clock says so."""

    def work():
        if clock.now < until:
            raise OSError(number, os.strerror(number))
        return "read"

    return work


@pytest.fixture
def lag(monkeypatch):
    monkeypatch.setattr(files, "VIEW_LAG_S", 60.0)
    monkeypatch.setattr(files, "STUMBLE_S", 2.0)


@pytest.mark.parametrize(
    ("number", "name", "announced", "waits_s"),
    [
        (errno.ESTALE, "not-there", False, 60),
        (errno.ENOENT, "listed", False, 60),
        (errno.ENOENT, "not-there", False, 0),
        (errno.ENOENT, "not-there", True, 60),
        (errno.ENOENT, "dangling", False, 0),
        (errno.ENOENT, "no-folder/x", False, 0),
        (errno.EIO, "listed", False, 2),
        (errno.ETIMEDOUT, "listed", False, 2),
        (errno.EACCES, "listed", True, 0),
        (errno.ENOSPC, "listed", True, 0),
    ],
)
def test_what_may_come_into_sight_is_waited_for_and_nothing_else(
    tmp_path, lag, number, name, announced, waits_s
):
    (tmp_path / "listed").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    clock = Clock()

    def look(until):
        return files.patiently(
            failing(number, until=clock.now + until, clock=clock), tmp_path / name,
            announced=announced, clock=clock, sleep=clock.sleep,
        )  # fmt: skip

    if waits_s:
        assert look(waits_s * 0.7) == "read"
    began_at = clock.now
    with pytest.raises(OSError, match=os.strerror(number)):
        look(waits_s * 1.1 + 0.1)
    assert waits_s * 0.5 <= clock.now - began_at <= waits_s


def test_who_is_stopped_between_two_looks_looks_as_often(tmp_path, lag):
    (tmp_path / "listed").touch()
    clock, looks = Clock(), []

    def work():
        looks.append(clock.now)
        if len(looks) < 4:
            raise OSError(errno.EIO, "passes")
        return "read"

    def sleep(seconds):
        clock.sleep(seconds + 10.0)

    assert files.patiently(work, tmp_path / "listed", clock=clock, sleep=sleep) == "read"


def test_many_files_that_are_gone_cost_the_patience_of_one(tmp_path, lag):
    clock, patience = Clock(), files.Patience()

    def look(number, name):
        began_at = clock.now
        with pytest.raises(OSError, match=os.strerror(number)):
            files.patiently(
                failing(number, until=math.inf, clock=clock), tmp_path / name,
                patience=patience, clock=clock, sleep=clock.sleep,
            )  # fmt: skip
        return clock.now - began_at

    for name in "abc":
        (tmp_path / name).touch()
    # An error that is not waited for spoils nothing, nor does a short wait spoil a long one.
    assert look(errno.EACCES, "a") == look(errno.ENOENT, "not-there") == 0
    assert look(errno.EIO, "a") > 1 and look(errno.EIO, "b") == 0
    assert look(errno.ENOENT, "a") > 50
    assert look(errno.ENOENT, "b") == look(errno.ENOENT, "c") == 0
    assert look(errno.ESTALE, "b") > 50
    assert look(errno.ESTALE, "c") == look(errno.EIO, "c") == 0
    patience.renew()
    assert look(errno.ENOENT, "c") == 0
    assert look(errno.EIO, "c") > 1


def test_a_record_that_comes_into_sight_late_is_read(tmp_path, lag, monkeypatch):
    path = tmp_path / "attempt.json"
    write_json(path, {"schema_version": 1, "value": 7})
    monkeypatch.setenv("FTSLURM_FAULTS", "enoent@read_file:name=attempt.json:times=2")
    assert read_json(path)["value"] == 7
    monkeypatch.setenv("FTSLURM_FAULTS", "estale@write_file:name=attempt.json:times=2")
    write_json(path, {"schema_version": 1, "value": 8})
    assert read_json(path)["value"] == 8


def test_what_is_listed_is_told_without_a_look_at_it(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    assert files.is_listed(tmp_path / "dangling")
    assert not files.is_listed(tmp_path / "x")
    assert not files.is_listed(tmp_path / "x" / "y" / "z")
    (tmp_path / "file").touch()
    assert not files.is_listed(tmp_path / "file" / "y")


def test_a_line_that_a_full_disk_cuts_is_an_error_and_stays_alone(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    append_record(path, {"n": 1})
    write = os.write
    answers = [lambda fd, data: write(fd, data[:5]), lambda fd, data: full()]

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", lambda fd, data: answers.pop(0)(fd, data))
        with pytest.raises(OSError, match="No space"):
            append_record(path, {"n": 2})
    append_record(path, {"n": 3})
    assert [record["n"] for record in read_records(path)] == [1, 3]


def test_a_new_file_is_whole_though_the_disk_takes_it_in_parts_and_none_takes_its_place(
    tmp_path, monkeypatch
):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    write_new(tmp_path / "a", b"0123456789")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"other")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
