"""Orders as files: which one counts, and that none meets a run twice."""

import os

import pytest

from ftslurm.errors import SpecError
from ftslurm.run.control import (
    ORDERS,
    PAUSE,
    SAVE,
    STOP,
    ControlFiles,
    of_strength,
    strength,
)
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RecoverySpec, RunSpec
from ftslurm.run.spec_check import check


@pytest.fixture
def shared(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def control(tmp_path, shared):
    root = tmp_path / "main-1"
    root.mkdir()
    return ControlFiles(RunLayout(root), "main-1", str(shared))


def test_the_strongest_order_counts_wherever_it_lies(control, shared):
    assert control.read() is None
    control.give(SAVE)
    assert control.read() == SAVE
    (shared / "main-1.stop").touch()
    control.give(PAUSE)
    assert control.read() == STOP
    control.take_away(STOP)
    assert control.read() == PAUSE and not (shared / "main-1.stop").exists()
    assert control.is_given(SAVE) and not control.is_given(STOP)


def test_an_order_for_another_run_in_the_same_folder_is_no_order(control, shared):
    (shared / "main-12.stop").touch()
    (shared / "stop").touch()
    assert control.read() is None


def test_an_order_given_while_the_one_before_is_carried_out_stays(control):
    place = control.give(SAVE)
    os.utime(place, ns=(1, 1_000))
    seen = control.look()
    os.utime(place, ns=(1, 2_000))
    control.take_away(SAVE, given_by_ns=seen.given_at_ns)
    assert control.read() == SAVE
    control.take_away(SAVE, given_by_ns=2_000)
    assert control.read() is None


def test_an_order_that_may_not_be_taken_away_counts_once_and_again_when_given_again(
    control, shared, monkeypatch
):
    given = shared / "main-1.stop"
    given.touch()
    os.utime(given, ns=(1, 1_000))
    monkeypatch.setattr(type(given), "unlink", _refused)
    control.take_away(STOP)
    assert given.exists() and control.read() is None
    os.utime(given, ns=(1, 2_000))
    assert control.read() == STOP


def _refused(self, missing_ok=False):
    raise PermissionError(1, "Operation not permitted", str(self))


def test_folders_that_cannot_be_read_give_no_order(tmp_path):
    control = ControlFiles(RunLayout(tmp_path / "gone"), "main-1", str(tmp_path / "nowhere"))
    assert control.read() is None
    control.take_away(STOP)


def test_a_link_in_a_shared_folder_is_an_order_and_its_target_is_left_alone(control, shared):
    target = shared / "precious"
    target.write_text("x")
    (shared / "main-1.stop").symlink_to(target)
    assert control.read() == STOP
    control.take_away(STOP)
    assert control.read() is None and target.read_text() == "x"


def test_ranks_agree_on_the_strongest_by_a_maximum():
    assert max(ORDERS, key=strength) == STOP
    assert strength(SAVE) < strength(PAUSE) < strength(STOP)
    assert [of_strength(strength(order)) for order in (None, *ORDERS)] == [None, *ORDERS]


def test_a_control_folder_has_an_absolute_path():
    check(RunSpec(recovery=RecoverySpec(control_dir="/project/control")))
    with pytest.raises(SpecError, match="absolute path"):
        check(RunSpec(recovery=RecoverySpec(control_dir="control")))


@pytest.mark.parametrize(
    "note", ["", "{}", '{"schema_version": 1}', '{"schema_version": 1, "files": {"a": "b"}}',
             '{"schema_version": 1, "files": [1]}', '{"schema_version": 1, "files": {"a": null}}'],
)  # fmt: skip
def test_a_damaged_note_of_what_was_carried_out_hides_no_order(control, shared, note, monkeypatch):
    control.give(SAVE)
    (control.layout.control / "carried-out.json").write_text(note)
    assert control.look().name == SAVE
    monkeypatch.setattr("pathlib.Path.unlink", _refused)
    control.take_away(SAVE)
    assert control.look() is None
