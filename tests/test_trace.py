"""The trace of a run: a killed writer leaves it whole; the latest attempt has the last word."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from ftslurm.errors import FormatError, UsageError
from ftslurm.replay.trace import TraceRow, TraceWriter, count_trained, read_trace, render_row
from ftslurm.run.layout import RunLayout


def row(step: int, loss: float = 1.0, **values: float) -> TraceRow:
    return TraceRow(step, loss, samples=8 * step, tokens=64 * step, seconds=0.5, values=values)


def write(layout: RunLayout, attempt: int, rows: list[TraceRow]) -> None:
    writer = TraceWriter(layout.trace_file(attempt))
    for each in rows:
        writer.append(each)
    writer.close()


def test_a_loss_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    write(RunLayout(tmp_path), 1, [row(1, loss, lr=1e-3)])
    read = read_trace(RunLayout(tmp_path))[1]
    assert read.loss.hex() == loss.hex()
    assert read.values == {"lr": 1e-3} and read.samples == 8 and read.attempt == 1


def test_a_step_trained_twice_counts_with_its_latest_attempt(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write(layout, 9, [row(1), row(2), row(3, 7.0)])
    write(layout, 10, [row(3, 3.0), row(4)])
    assert sorted(read_trace(layout)) == [1, 2, 3, 4]
    assert read_trace(layout)[3].loss == 3.0
    assert count_trained(layout) == {1: 1, 2: 1, 3: 2, 4: 1}


def test_each_row_is_readable_before_the_writer_closes(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    writer = TraceWriter(layout.trace_file(1))
    writer.append(row(1))
    assert list(read_trace(layout)) == [1]
    writer.close()


def test_a_line_torn_by_a_power_cut_is_left_out(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    whole = render_row(row(1))
    layout.trace.mkdir()
    for length in range(len(whole) - 1):
        layout.trace_file(1).write_bytes(whole + render_row(row(2))[:length])
        assert list(read_trace(layout)) == [1]


def test_a_row_that_a_full_disk_tears_takes_none_beside_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path)
    writer = TraceWriter(layout.trace_file(1))
    write_all = os.write
    room = [10]

    def write_some(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write_all(fd, data[: room[0]])
        room[0] -= taken
        return taken

    writer.append(row(1))
    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match="No space left"):
        writer.append(row(2))
    monkeypatch.undo()
    writer.append(row(3))
    writer.append(row(4))
    writer.close()
    assert list(read_trace(layout)) == [1, 3, 4]


def test_a_row_that_the_kernel_takes_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path)
    writer = TraceWriter(layout.trace_file(1))
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write_all(fd, data[:7]))
    writer.append(row(1))
    writer.append(row(2))
    writer.close()
    assert list(read_trace(layout)) == [1, 2]


def test_a_loss_that_is_not_finite_is_valid_json_and_comes_back(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write(layout, 1, [row(1, math.nan, grad_norm=math.inf)])
    line = json.loads(layout.trace_file(1).read_text())
    assert line["loss"] is None and line["grad_norm"] is None
    assert math.isnan(read_trace(layout)[1].loss)


def test_a_value_may_not_hide_a_column() -> None:
    with pytest.raises(UsageError, match="`tokens` is a column"):
        render_row(row(1, tokens=3.0))


def test_a_newer_trace_is_refused(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.trace.mkdir()
    newer = {**json.loads(render_row(row(1))), "schema_version": 2}
    layout.trace_file(1).write_text(json.dumps(newer) + "\n")
    with pytest.raises(FormatError, match="newer ftslurm"):
        read_trace(layout)


def test_a_run_without_a_trace_has_no_rows(tmp_path: Path) -> None:
    assert read_trace(RunLayout(tmp_path)) == {}


def test_where_an_attempt_begins_the_history_before_it_ends(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write(layout, 1, [row(step, 1.0) for step in range(1, 9)])
    write(layout, 2, [row(5, 2.0), row(6, 2.0)])
    # Thought dead, attempt 1 trains on.
    write(layout, 1, [row(step, 1.0) for step in range(9, 12)])
    history = read_trace(layout)
    assert sorted(history) == [1, 2, 3, 4, 5, 6]
    assert [history[step].attempt for step in (4, 5, 6)] == [1, 2, 2]
    assert count_trained(layout)[11] == 1


@pytest.mark.parametrize(
    "line", [b"3", b"{}", b"[]", b'{"schema_version": 1}', b"\0\0", b"[" * 9999]
)
def test_a_damaged_line_and_a_file_of_another_name_cost_nothing_else(
    tmp_path: Path, line: bytes
) -> None:
    layout = RunLayout(tmp_path)
    write(layout, 1, [row(1)])
    with layout.trace_file(1).open("ab") as stream:
        stream.write(line + b"\n" + render_row(row(2)))
    (layout.trace / "attempt-0001-copy.jsonl").touch()
    assert sorted(read_trace(layout)) == [1, 2]
