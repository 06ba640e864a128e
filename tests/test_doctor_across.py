"""doctor --across as a whole: a job of nodes is asked for, what became of it is told as it was, and
nothing is left of a trial."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.cli import main
from ftslurm.doctor import across
from ftslurm.doctor.line import FAIL, OK, Line
from ftslurm.doctor.spoken import answer_lines

SRUN = Path(__file__).parent / "fakes" / "srun_here.py"


@pytest.fixture
def srun(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(f'#!/bin/sh\nexec {sys.executable} {SRUN} "$@"\n')
    (folder / "srun").chmod(0o700)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(across.__file__).parents[2]))
    monkeypatch.setattr(across, "RANKS_IMPORT", "decimal")
    return tmp_path / "runs"


def doctor_across(capsys, *more):
    code = main(["doctor", "--across", "2", "--write-gb", "0", "--json", *more])
    told = capsys.readouterr()
    lines = [Line(**line) for line in json.loads(told.out)["lines"]]
    return code, {line.name: line for line in lines}, told.err


def test_the_verb_tries_nodes_through_srun_and_leaves_nothing(srun, capsys):
    code, found, told = doctor_across(capsys)
    assert code == 3  # srun alone is on PATH: Slurm's settings could not be asked for
    assert "queued and waiting" in told and "on n1, n2" in told
    for name in ("shared", "new_file", "listing", "attributes", "reread", "claims", "clock"):
        assert found[f"across.{name}"].state == OK, found[f"across.{name}"]
    assert "of 2 nodes that made 40 names at once" in found["across.claims"].seen
    assert found["host.memory"].seen.startswith("n1 and 1 more")
    assert list(srun.iterdir()) == []


def test_a_node_that_sees_another_folder_is_named_at_once(srun, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SRUN_HERE_PATHS", f"n2={tmp_path}/elsewhere")
    began = time.monotonic()
    code, found, _ = doctor_across(capsys)
    assert time.monotonic() - began < 30
    assert code == 1
    assert found["across.shared"].state == FAIL
    assert "n2 does not see" in found["across.shared"].seen
    assert list(srun.iterdir()) == []


def test_a_job_that_slurm_refuses_is_told_with_its_words(srun, capsys, monkeypatch):
    monkeypatch.setenv("SRUN_HERE_RC", "1")
    code, found, _ = doctor_across(capsys)
    assert (code, found["across.job"].state) == (1, FAIL)
    assert "node configuration is not available" in found["across.job"].seen
    assert list(srun.iterdir()) == []


QUEUED = ["srun: job 7 queued and waiting for resources"]
GOT_IT = [*QUEUED, "srun: job 7 has been allocated resources"]
NO_PYTHON = [
    "slurmstepd: error: execve(): /env/bin/python: No such file or directory",
    "srun: error: n1: task 0: Exited with exit code 2",
]
BOTH_FAILED = ["srun: error: n1: tasks 0-1: Exited with exit code 2"]


class Nodes:
    """Of a job, spoken to as srun's tasks are: `answers` is what is heard, in turn."""

    def __init__(self, *answers, rc=None, words=QUEUED, is_inside=False):
        self._lines = [line for answer in answers for line in answer_lines(*answer)]
        self.words, self.is_inside, self.rc_then = list(words), is_inside, rc

    def __call__(self, command, **named):
        return self

    def say(self, line):
        pass

    def hear(self, timeout_s):
        return self._lines.pop(0) if self._lines else None

    @property
    def rc(self):
        return None if self._lines else self.rc_then

    def close(self):
        pass


def across_job(tmp_path, nodes, monkeypatch):
    for name in ("QUEUE_S", "ANSWER_S"):
        monkeypatch.setattr(across, name, 0.3)
    (line,) = across.check_across(
        tmp_path, nodes=2, where={}, staged_bytes=None, stop_signal="USR1",
        size_bytes=0, say=lambda text: None, open_nodes=nodes,
    )  # fmt: skip
    assert (line.name, line.state) == ("across.job", FAIL)
    return line.seen


HELLO = [(task, 1, {"node": f"n{task + 1}", "sees_folder": True}) for task in range(2)]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (Nodes(), "no job of 2 nodes could be had: no node answered in"),
        (Nodes(rc=1), "no job of 2 nodes could be had: srun ended with 1; it said: srun: job 7"),
        (
            Nodes(rc=2, words=NO_PYTHON),
            "the trial broke off: srun ended with 2; it said: srun: err",
        ),
        (Nodes(rc=2, words=BOTH_FAILED), "the trial broke off: srun ended with 2"),
        (Nodes(rc=1, words=["srun: error: Application launch failed: x"]), "the trial broke off"),
        (Nodes(rc=1, words=GOT_IT), "the trial broke off: srun ended with 1"),
        (Nodes(words=GOT_IT), "the trial broke off: no node answered in"),
        (Nodes(rc=1, is_inside=True, words=[]), "the trial broke off: srun ended with 1"),
        (Nodes(is_inside=True, words=[]), "the trial broke off: no node answered in"),
        (Nodes(HELLO[0]), "the trial broke off: of 2 nodes n1 answered, and no other in"),
        (Nodes(*HELLO), "the trial broke off: n1 has not made some small files in the folder"),
        (Nodes(*HELLO, rc=137), "the trial broke off: srun ended with 137"),
    ],
)
def test_what_became_of_the_job_is_told_as_it_was(tmp_path, monkeypatch, nodes, expected):
    assert across_job(tmp_path, nodes, monkeypatch).startswith(expected)


def test_whoever_is_killed_while_it_writes_to_measure_leaves_no_file(tmp_path):
    code = "import sys; from pathlib import Path; from ftslurm.doctor.folder_checks import *;"
    code += "print('begins', flush=True); write_rate(Path(sys.argv[1]), 1 << 40)"
    writer = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"begins\n"

    def written():
        links = Path(f"/proc/{writer.pid}/fd").iterdir()
        sizes = [link.stat().st_size for link in links if str(tmp_path) in str(link.readlink())]
        return bool(sizes) and sizes[0] > 1 << 22

    try:
        deadline = time.monotonic() + 60
        while not written() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(tmp_path.iterdir()) == []
    finally:
        writer.kill()
        writer.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_trial_whose_caller_is_killed_takes_its_folder_away(srun):
    argv = [sys.executable, "-m", "ftslurm", "doctor", "--across", "2", "--write-gb", "0"]
    caller = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert caller.stderr is not None
    for line in caller.stderr:
        if "queued and waiting" in line:
            break
    assert len(list(srun.iterdir())) == 1
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    deadline = time.monotonic() + 60
    while list(srun.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(srun.iterdir()) == []
