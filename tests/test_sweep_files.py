"""What tasks of a sweep share on disk, and what is looked at once for all of them."""

import errno
import os
from pathlib import Path

import pytest
import test_sweep_submit
from fakes.sweep_slurm import slurm_on_path  # noqa: F401 - a fixture
from test_sweep_submit import task

from ftslurm.errors import SpecError

begin = test_sweep_submit.begin
LINK = os.link


@pytest.mark.parametrize("most", [1, 2, 60])
def test_a_file_that_can_have_no_more_names_is_copied_and_the_copy_has_the_next(
    begin, slurm, monkeypatch, most
):
    def link(source, target):
        if Path(source).stat().st_nlink >= most:
            raise OSError(errno.EMLINK if most > 1 else errno.EPERM, "no more")
        LINK(source, target)

    monkeypatch.setattr(os, "link", link)
    sweep = begin()
    sweep.launch([task(number, files={"x.pkl": b"x"}) for number in range(5)])
    for name in ("train.pkl", "x.pkl"):
        files = [sweep.layout.task(number).submit / name for number in range(5)]
        assert {path.read_bytes() for path in files} == {files[0].read_bytes()}
        assert len({path.stat().st_ino for path in files}) == -(-5 // most)
        assert {path.stat().st_mode for path in files} == {files[0].stat().st_mode}


def test_a_second_name_whose_answer_was_lost_is_there(begin, slurm, monkeypatch):
    def link(source, target):
        LINK(source, target)
        LINK(source, target)  # as NFS asks again: EEXIST

    monkeypatch.setattr(os, "link", link)
    sweep = begin()
    sweep.launch([task(number) for number in range(2)])
    calls = [sweep.layout.task(number).submit / "train.pkl" for number in range(2)]
    assert calls[0].samefile(calls[1]) and calls[0].stat().st_size > 0


def test_a_spec_that_was_refused_is_refused_again(begin, monkeypatch):
    def refuse(*_):
        raise SpecError("no room")

    monkeypatch.setattr("ftslurm.submit.checks.refuse_storage", refuse)
    sweep, tasks = begin(), [task(0)]
    for _ in "ab":
        with pytest.raises(SpecError, match="no room"):
            sweep.plan(tasks)
