"""What tasks of a sweep share on disk, and what is looked at once for all of them."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest
import test_sweep_submit
from fakes.sweep_slurm import slurm_on_path  # noqa: F401 - a fixture
from test_sweep_submit import task

from ftslurm.errors import SpecError
from ftslurm.files import encode_json, read_json
from ftslurm.run.attempts import Attempt, claim
from ftslurm.run.control import STOP, ControlFiles
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import PROGRAM_ENTRY

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


def test_tasks_that_differ_in_nothing_but_their_name_share_all_but_that(begin, slurm):
    alike, other = task(0), task(7)
    sweep = begin()
    sweep.launch(
        [dataclasses.replace(one, number=n) for n, one in enumerate([alike, alike, other])]
    )
    sweep.launch([dataclasses.replace(alike, number=3)])
    runs = [sweep.layout.task(number) for number in range(4)]
    for run in runs:
        assert run.run_json.read_bytes() == encode_json(read_json(run.run_json))
    assert [read_record(run).run_id for run in runs] == [run.root.name for run in runs]
    assert [read_record(run).spec.seed for run in runs] == [0, 0, 7, 0]
    assert [run.config_yaml.read_text() for run in runs] == [
        "seed: 0\n", "seed: 0\n", "seed: 7\n", "seed: 0\n",
    ]  # fmt: skip
    assert runs[0].config_yaml.samefile(runs[1].config_yaml)


def test_a_task_is_planned_like_the_one_before_as_it_would_be_by_itself(begin):
    first, other = task(0, continue_by="resubmit", nodes=1), task(1)
    second = dataclasses.replace(first, number=12)
    sweep = begin()
    like_another = sweep.plan([first, second])[1]
    by_itself = sweep.plan([other, second])[1]
    assert like_another == by_itself
    assert f"FTSLURM_RUN_DIR={like_another.layout.root}\n" in like_another.script
    assert f"--job-name=ftslurm-{like_another.run_id}" in like_another.options


def test_an_order_and_the_first_attempt_find_the_folders_of_a_program_or_make_them(begin, slurm):
    program = task(0)
    spec = dataclasses.replace(program.spec, entry=PROGRAM_ENTRY, program=["true"])
    sweep = begin()
    sweep.launch([dataclasses.replace(program, number=n, spec=spec) for n in range(2)])
    ordered, begun = (sweep.layout.task(number) for number in range(2))
    folders = sorted(path.name for path in ordered.root.iterdir() if path.is_dir())
    assert folders == ["attempts", "code", "submit"]
    ControlFiles(ordered, ordered.root.name).give(STOP)
    attempt = Attempt(
        number=0, job_id="1", raw_job_id="1", restart_count=0, nodes=["n1"], claimed_at=0.0
    )
    claim(ordered, attempt)
    assert ControlFiles(ordered, ordered.root.name).read() == STOP
    claim(begun, attempt)
    assert begun.control.is_dir(), "before a rank of another node looks there"


def test_what_stands_in_the_place_of_the_orders_keeps_no_attempt_from_its_beginning(
    tmp_path, capsys
):
    layout = RunLayout(tmp_path)
    layout.control.symlink_to(tmp_path / "away")
    assert claim(layout, Attempt(0, "1", 0, ["n1"], 0.0)).number == 1
    assert "an order to the run may be seen late" in capsys.readouterr().err
