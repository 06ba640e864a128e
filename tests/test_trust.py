"""Nothing of a run directory is executed unless it is ours, and ours alone to write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftslurm.errors import RANK_NEVER_RETRY, RunError
from ftslurm.run import trust
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import ClusterSpec, RunSpec
from ftslurm.run.trust import require_own
from ftslurm.scheduler import open_scheduler
from ftslurm.submit.executor import FtslurmExecutor, run_pickled
from ftslurm.submit.freeze import freeze, plan_run
from ftslurm.submit.rank import TrainCall

ROOT = Path(__file__).resolve().parent.parent

PLACES = ["", "submit", "submit/train.pkl"]


@pytest.fixture
def layout(tmp_path):
    made = RunLayout(tmp_path / "run")
    made.submit.mkdir(parents=True)
    made.root.chmod(0o700)
    made.call.write_bytes(b"cos\nabort\n(t.")  # whoever unpickles this dies
    return made


def test_a_run_of_ones_own_is_trusted_also_where_others_may_read(layout):
    require_own(layout)
    for path in (layout.root, layout.submit):
        path.chmod(0o755)
    layout.call.chmod(0o644)
    require_own(layout)


@pytest.mark.parametrize("bits", [0o020, 0o002])
@pytest.mark.parametrize("name", PLACES)
def test_what_others_may_write_is_not_executed(layout, name, bits):
    path = layout.root / name
    path.chmod(path.stat().st_mode | bits)
    with pytest.raises(RunError, match="may be written by others than you .*`chmod go-w") as caught:
        require_own(layout)
    assert f"`{path}`" in str(caught.value).replace("/`", "`")


@pytest.mark.parametrize("name", PLACES)
def test_what_belongs_to_somebody_else_is_not_executed(layout, name, monkeypatch):
    path = layout.root / name
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)  # not even by root, for whom all is allowed
        says = "belongs to user 12345 and this process is user 0's"
    else:
        monkeypatch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)
        says = f"belongs to user {os.getuid()} and this process is user"
    with pytest.raises(RunError, match=says):
        require_own(layout)


def test_a_link_counts_as_what_it_leads_to(layout, tmp_path):
    (tmp_path / "latest").symlink_to("run")
    require_own(RunLayout(tmp_path / "latest"))
    layout.root.chmod(0o770)
    with pytest.raises(RunError, match="may be written by others"):
        require_own(RunLayout(tmp_path / "latest"))


def test_a_run_whose_files_are_missing_is_left_to_its_reader(tmp_path):
    require_own(RunLayout(tmp_path / "none"))


def test_the_pickle_of_a_foreign_run_is_not_even_opened(layout, monkeypatch):
    layout.submit.chmod(0o777)
    with pytest.raises(RunError, match="nothing of it is executed"):
        run_pickled(layout.submit)
    with pytest.raises(RunError, match="nothing of it is executed"):
        FtslurmExecutor(layout.submit).submit(TrainCall(), str(layout.root))


def test_a_rank_says_so_and_is_not_started_again(layout):
    layout.submit.chmod(0o777)
    argv = [sys.executable, "-m", "ftslurm.submit.rank", layout.submit]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == RANK_NEVER_RETRY, done.stderr
    assert done.stderr.startswith("ftslurm: error: `") and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [["claim"], ["recover", "--attempt=1", "--rc=1"]])
def test_the_batch_loops_verbs_refuse_before_they_read(layout, verb):
    layout.root.chmod(0o777)
    layout.run_json.write_text("not even JSON")
    argv = [sys.executable, "-m", "ftslurm", verb[0], layout.root, *verb[1:]]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert "may be written by others than you (mode 0777)" in done.stderr
    assert not layout.attempts.exists()


def test_a_group_that_a_umask_lets_in_is_kept_out_of_a_run(tmp_path):
    (tmp_path / "mytrain.py").write_text("def train(session): ...\n")
    spec = RunSpec(entry="mytrain:train", cluster=ClusterSpec(scheduler="local"))
    scheduler = open_scheduler("local")
    before = os.umask(0o002)
    try:
        plan = plan_run(spec, "{}\n", scheduler, scheduler.site(), folder=tmp_path)
        freeze(plan)
    finally:
        os.umask(before)
    require_own(plan.layout)
