"""A run's modules are compared between its nodes and with its earlier attempts."""

import errno
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest
from fakes.project import Run as LeftRun
from fakes.project import make_project, overrides, slow

from ftslurm import files
from ftslurm.errors import CodeError, RunError
from ftslurm.files import read_json, write_json
from ftslurm.run import same_code
from ftslurm.run.attempts import read_events, read_outcome, read_progress
from ftslurm.run.layout import RunLayout
from ftslurm.run.modules import look
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import read_record
from ftslurm.run.same_code import check_alone
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.scheduler import open_scheduler

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 200


def load(folder, name, text="x = 1\n"):
    """A module of a file of its own, outside sys.modules."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(folder, name, data):
    """A module of compiled code, as far as a look at its file can tell."""
    path = folder / f"{name}{EXTENSION_SUFFIXES[0]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    module = ModuleType(name)
    module.__file__ = str(path)
    return module


class Run:
    """A run directory whose ranks have imported what a test says."""

    def __init__(self, root, monkeypatch, code="frozen"):
        self.layout = RunLayout(root)
        self.monkeypatch = monkeypatch
        self.code = root / "code" if code == "frozen" else root / "live"
        for folder in (self.layout.submit, self.code):
            folder.mkdir(parents=True)
        self.records = {
            "schema_version": 1, "run_id": "r", "spec": to_dict(RunSpec(code=code)),
            "scheduler": "local", "code": {"folder": str(root / "live")},
        }  # fmt: skip
        write_json(self.layout.run_json, self.records)

    def attempt(self, number, *, rank=0, local_rank=0, node="n1", ops=None, **texts):
        """What check_alone says of a rank with modules of these texts, and with compiled `ops`."""
        paths = self.layout.attempt(number)
        paths.ranks.mkdir(parents=True, exist_ok=True)
        loaded = {name: load(self.code, name, text) for name, text in texts.items()}
        loaded.update({"ops": ops} if ops else {})
        self.monkeypatch.setattr(same_code, "look", lambda attempt: look(attempt, loaded))
        env = RankEnvironment.read(
            {
                "SLURM_NTASKS": "4", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank),
                "SLURM_NODEID": str(rank // 2), "SLURM_JOB_NUM_NODES": "2",
                "SLURMD_NODENAME": node, "FTSLURM_RUN_DIR": str(self.layout.root),
                "FTSLURM_ATTEMPT": str(number), "FTSLURM_TASKS_PER_NODE": "2",
                "MASTER_ADDR": node, "MASTER_PORT": "1",
            }
        )  # fmt: skip
        check_alone(env, read_record(self.layout))
        return paths

    def kept(self, number):
        rows = read_json(self.layout.attempt(number).modules_json)["modules"]
        return {name: row["attempt"] for name, row in rows.items()}


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path / "run", monkeypatch)


def test_the_first_attempt_is_what_later_ones_are_held_to(run):
    run.attempt(1, a="x = 1\n", b="y = 1\n")
    run.attempt(2, a="x = 1\n", c="z = 1\n")
    assert run.kept(2) == {"a": 1, "b": 1, "c": 2}
    with pytest.raises(CodeError, match="module `b` .*/code/b.py`.* since attempt 1;"):
        run.attempt(3, b="y = 2\n")
    with pytest.raises(CodeError, match="module `c` .* since attempt 2;"):
        run.attempt(4, c="z = 2\n")
    # Neither is what a later one is compared with: put back, the run goes on.
    run.attempt(5, b="y = 1\n", c="z = 1\n")
    assert run.kept(5) == {"a": 1, "b": 1, "c": 2}


def test_an_attempt_that_never_came_so_far_is_passed_over(run):
    run.attempt(1, a="x = 1\n")
    run.layout.attempt(2).root.mkdir()
    with pytest.raises(CodeError, match="since attempt 1"):
        run.attempt(3, a="x = 2\n")


def test_a_copy_that_was_changed_before_the_first_attempt_is_noticed(run):
    digest = look(0, {"a": load(run.code, "a", "x = 1\n")})["a"].sha256
    write_json(run.layout.code_json, {"schema_version": 1, "files": {"a.py": digest}})
    run.attempt(1, a="x = 1\n")
    with pytest.raises(CodeError, match="since attempt 1"):
        run.attempt(2, a="x = 2\n")
    run.layout.attempt(1).modules_json.unlink()
    with pytest.raises(CodeError, match="module `a` .* since the run was submitted"):
        run.attempt(3, a="x = 2\n")


def test_a_programs_source_is_held_to_what_was_copied_though_no_rank_imports_it(run):
    digest = look(0, {"train": load(run.code, "train", "x = 1\n")})["train"].sha256
    copied = {"train.py": digest, "log.txt": "0" * 64, "gone.py": "0" * 64}
    write_json(run.layout.code_json, {"schema_version": 1, "files": copied})
    (run.code / "log.txt").write_text("what a program may write")
    spec = to_dict(RunSpec(program=["python", "train.py"]))
    write_json(run.layout.run_json, {**run.records, "spec": spec})
    run.attempt(1)
    (run.code / "train.py").write_text("x = 2\n")
    with pytest.raises(CodeError, match="module `train.py` .* since the run was submitted"):
        run.attempt(2)


def test_a_run_reached_through_a_link_is_compared_as_well(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    run = Run(tmp_path / "link" / "run", monkeypatch)
    run.code = run.code.resolve()
    write_json(run.layout.code_json, {"schema_version": 1, "files": {"a.py": "0" * 64}})
    with pytest.raises(CodeError, match="since the run was submitted"):
        run.attempt(1, a="x = 1\n")


def test_a_node_with_other_code_ends_the_attempt_whoever_comes_first(run):
    run.attempt(1, rank=2, node="n2", a="x = 1\n")
    assert not run.layout.attempt(1).modules_json.exists()
    run.attempt(1, rank=0, node="n1", a="x = 1\n", b="")
    with pytest.raises(CodeError, match="module `a` .* on node n3 is not the one on n2"):
        run.attempt(1, rank=4, node="n3", a="x = 2\n")
    run.attempt(2, rank=4, node="n3", a="x = 2\n")
    with pytest.raises(CodeError, match="module `a` .* on node n1 is not the one on n3"):
        run.attempt(2, a="x = 1\n")
    assert not run.layout.attempt(2).modules_json.exists()


def test_only_the_first_rank_of_a_node_looks(run):
    paths = run.attempt(1, rank=1, local_rank=1, a="x = 1\n")
    assert not paths.modules_json.exists() and not paths.first_modules_json.exists()


def test_live_code_may_change_between_attempts_and_that_is_noted(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", monkeypatch, code="live")
    write_json(run.layout.code_json, {"schema_version": 1, "files": {"a.py": "0" * 64}})
    paths = run.attempt(1, a="x = 1\n", b="")
    event = {"kind": "code_changed", "modules": ["a"], "num_changed": 1}
    assert [{**row, "at": 0} for row in read_events(paths)] == [{**event, "at": 0}]
    assert read_events(run.attempt(2, a="x = 1\n", b="")) == []
    paths = run.attempt(3, a="x = 3\n", b="")
    assert [row["modules"] for row in read_events(paths)] == [["a"]]
    assert run.kept(3) == {"a": 3, "b": 1}
    assert read_events(run.attempt(4, a="x = 3\n")) == []


def test_live_code_that_differs_between_nodes_costs_the_attempt_and_not_the_run(
    tmp_path, monkeypatch
):
    run = Run(tmp_path / "run", monkeypatch, code="live")
    run.attempt(1, a="x = 1\n")
    with pytest.raises(RunError, match="on node n2 is not the one on n1"):
        run.attempt(1, rank=2, node="n2", a="x = 2\n")


def test_the_first_nodes_word_is_never_replaced(run):
    paths = run.attempt(1, a="x = 1\n")
    assert not same_code._create(paths.first_modules_json, b"other")
    assert read_json(paths.first_modules_json)["node"] == "n1"
    assert list(paths.root.glob(".modules*")) == []


def events(paths):
    return [{**row, "at": 0} for row in read_events(paths)]


@pytest.mark.parametrize("places", [("ops", "ops"), ("zen2", "skylake"), ("run/code", "run/code")])
def test_what_is_built_anew_on_each_node_is_noted_and_the_run_goes_on(tmp_path, run, places):
    write_json(run.layout.code_json, {"schema_version": 1, "files": {"a.py": "0" * 64}})
    run.attempt(1, ops=compiled(tmp_path / places[0], "ops", b"zen2"))
    paths = run.attempt(2, ops=compiled(tmp_path / places[1], "ops", b"skylake"))
    assert events(paths) == [
        {"kind": "code_changed", "modules": ["ops"], "num_changed": 1, "at": 0}
    ]
    assert run.kept(2) == {"ops": 2}


def test_a_compiled_module_that_was_taken_along_is_held_to_its_copy(run):
    module = compiled(run.code, "ops", b"1")
    digest = look(0, {"ops": module})["ops"].sha256
    copied = {Path(module.__file__).name: digest}
    write_json(run.layout.code_json, {"schema_version": 1, "files": copied})
    run.attempt(1, ops=module)
    with pytest.raises(CodeError, match="module `ops` .* since attempt 1"):
        run.attempt(2, ops=compiled(run.code, "ops", b"2"))


def test_beside_what_is_built_anew_other_source_still_ends_the_run(tmp_path, run):
    run.attempt(1, ops=compiled(tmp_path, "ops", b"1"), a="x = 1\n")
    with pytest.raises(CodeError, match=r"module `a` \(.*\) has changed since attempt 1; put"):
        run.attempt(2, ops=compiled(tmp_path, "ops", b"2"), a="x = 2\n")


@pytest.mark.parametrize("code", ["frozen", "live"])
def test_nodes_with_builds_of_their_own_train_together(tmp_path, monkeypatch, capsys, code):
    run = Run(tmp_path / "run", monkeypatch, code=code)
    run.attempt(1, rank=2, node="n2", ops=compiled(tmp_path, "ops", b"2"))
    run.attempt(1, rank=4, node="n3", ops=compiled(tmp_path, "ops", b"3"))
    assert "`ops` (" in (err := capsys.readouterr().err)
    assert "on node n3 is another build than on n2; each goes on with its own" in err
    paths = run.attempt(1, ops=compiled(tmp_path, "ops", b"1"))
    event = {"kind": "code_changed", "modules": ["ops"], "num_changed": 1}
    assert events(paths) == [{**event, "nodes": ["n2"], "num_nodes": 1, "at": 0}]
    assert run.kept(1) == {"ops": 1}


def refuse(monkeypatch, number):
    def link(source, target):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_links_the_nodes_are_compared_all_the_same(run, monkeypatch, number):
    refuse(monkeypatch, number)
    paths = run.attempt(1, a="x = 1\n")
    assert read_json(paths.first_modules_json)["node"] == "n1"
    with pytest.raises(CodeError, match="on node n2 is not the one on n1"):
        run.attempt(1, rank=2, node="n2", a="x = 2\n")
    assert not same_code._create(paths.first_modules_json, b"other")
    assert list(paths.root.glob(".*")) == []


def test_without_links_the_second_waits_until_the_first_has_written(run, monkeypatch):
    refuse(monkeypatch, errno.EPERM)
    monkeypatch.setattr(files, "VIEW_LAG_S", 60.0)
    paths = run.layout.attempt(1)
    paths.first_modules_json.with_suffix(".taken").mkdir(parents=True)
    digest = look(0, {"a": load(run.code, "a")})["a"].sha256
    row = {"file": "/a.py", "sha256": digest[::-1], "attempt": 1}
    record = {"schema_version": 1, "node": "n1", "modules": {"a": row}}
    writer = threading.Timer(0.5, write_json, (paths.first_modules_json, record))
    writer.start()
    with pytest.raises(CodeError, match="on node n2 is not the one on n1"):
        run.attempt(1, rank=2, node="n2", a="x = 1\n")
    writer.join()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_no_digests_costs_the_comparison_only(run, monkeypatch, capsys, number):
    refuse(monkeypatch, number)
    paths = run.attempt(1, a="x = 1\n")
    says = "the modules of node n1 are not compared with the other nodes'"
    assert f"ftslurm: warning: {says}" in capsys.readouterr().err
    assert not paths.first_modules_json.exists() and run.kept(1) == {"a": 1}


def test_a_disk_that_takes_no_event_does_not_end_the_attempt(tmp_path, run, monkeypatch, capsys):
    run.attempt(1, ops=compiled(tmp_path, "ops", b"1"))
    monkeypatch.setenv("FTSLURM_FAULTS", "enospc@append")
    run.attempt(2, ops=compiled(tmp_path, "ops", b"2"))
    assert "the event code_changed of ['ops'] is not kept" in capsys.readouterr().err


class Chain:
    """A run of torch-free ranks on this machine, told to leave when a test has changed its code."""

    def __init__(self, folder, *more):
        self.folder = make_project(folder)
        argv = [sys.executable, "-m", "ftslurm", "submit", "cluster=local", "--json"]
        done = subprocess.run(
            [*argv, *overrides(steps=20, interval=10, step_s=0.02, more=[*slow(), *more])],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        self.run, self.job_id = LeftRun(record["run_dir"]), record["job_id"]
        self.scheduler = open_scheduler("local", run_dir=self.run.layout.root)

    def wait_for(self, look):
        deadline = time.monotonic() + DEADLINE_S
        while not look():
            assert time.monotonic() < deadline, self.run.says()
            time.sleep(0.05)

    def trains(self):
        progress = read_progress(self.run.layout.attempt(1))
        return progress is not None and progress.step > 0

    def change(self, code):
        """Edit the ranks' source while the first attempt trains, then make it leave."""
        self.wait_for(self.trains)
        with (code / "tests" / "fakes" / "rank.py").open("a") as source:
            source.write("\n# another word\n")
        self.scheduler.signal_ranks(self.job_id, "USR1")
        self.wait_for(lambda: self.scheduler.job_state(self.job_id).is_ended)
        return self.scheduler.job_state(self.job_id).word


def test_a_run_whose_copy_was_edited_between_attempts_stops_with_a_sentence(tmp_path):
    chain = Chain(tmp_path)
    run = chain.run
    assert chain.change(run.layout.code) == "FAILED", run.says()
    assert run.decisions() == ["requeued", "stop"]
    source = run.layout.code / "tests" / "fakes" / "rank.py"
    says = f"module `tests.fakes.rank` (`{source}`) has changed since attempt 1; put it back"
    decision = read_json(run.layout.attempt(2).decision_json)
    assert decision["cause"] == "never_retry" and says in decision["reason"]
    assert read_outcome(run.layout.attempt(2)).reason.startswith(says)
    assert "Traceback" not in (run.layout.attempt(2).logs / "rank-0.log").read_text()
    assert not run.layout.attempt(2).modules_json.exists()


def test_edits_where_the_run_was_submitted_from_do_not_reach_a_frozen_run(tmp_path):
    chain = Chain(tmp_path)
    assert chain.change(chain.folder) == "COMPLETED", chain.run.says()
    assert chain.run.decisions() == ["requeued", "done"]


def test_a_live_run_goes_on_with_the_new_code_and_notes_it(tmp_path):
    chain = Chain(tmp_path, "code=live")
    run = chain.run
    assert chain.change(chain.folder) == "COMPLETED", run.says()
    assert run.decisions() == ["requeued", "done"] and run.steps_trained_twice == 0
    events = [e for e in read_events(run.layout.attempt(2)) if e["kind"] == "code_changed"]
    assert [event["modules"] for event in events] == [["tests.fakes.rank"]]
    rows = read_json(run.layout.attempt(2).modules_json)["modules"]
    assert rows["tests.fakes.rank"]["file"] == str(chain.folder / "tests" / "fakes" / "rank.py")
    assert rows["tests.fakes.rank"]["attempt"] == 2 and rows["ftslurm.files"]["attempt"] == 1
