"""Durable primitives: the old bytes or the new ones, never a mix; whole lines, never half ones."""

import os
import threading
from pathlib import Path

import pytest

from ftslurm.errors import FormatError
from ftslurm.files import (
    append_record,
    claim_folder,
    decode_json,
    read_json,
    read_records,
    write_atomic,
    write_json,
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
    "data", [b"", b"{", b"[]", b'{"a": 1}', b'{"schema_version": "1"}', b"\xff"]
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
