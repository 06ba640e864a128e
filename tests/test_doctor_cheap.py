"""What submit looks at by the way: silent where all is well, each thing named, quick."""

import os
import time

import pytest
from doctor_runs import SITE, OldRun

from ftslurm.cli import main
from ftslurm.doctor import cheap
from ftslurm.doctor.cheap import cheap_findings
from ftslurm.doctor.line import FAIL, WARN
from ftslurm.doctor.mounts import Mount
from ftslurm.run.spec import ModelSpec, RunSpec
from ftslurm.scheduler.protocol import Site

GOOD = Site.from_dict({**SITE, "default_partition": "gpu", "preempt_mode": {"gpu": "REQUEUE"}})


def slurm_spec(**values):
    spec = RunSpec(**values)
    spec.cluster.nodes = 2
    return spec


def saved(runs, name="old"):
    run = OldRun(runs, name, spec=slurm_spec())
    run.attempt(0, steps=range(1, 9))
    run.save(1, 5, 10)
    return run


def site(**values):
    return Site.from_dict({**GOOD.to_dict(), **values})


def named(spec, where, runs):
    return [(line.name, line.state) for line in cheap_findings(spec, where, runs)]


def test_where_all_is_well_nothing_is_said(tmp_path):
    saved(tmp_path)
    assert named(slurm_spec(), GOOD, tmp_path) == []
    assert named(slurm_spec(), GOOD, tmp_path / "not" / "there") == []
    assert named(slurm_spec(), None, tmp_path) == []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"kill_wait_s": 5}, [("slurm.kill_wait", WARN)]),
        ({"preempt_mode": {"gpu": "GANG,SUSPEND"}}, [("slurm.preempt_mode", WARN)]),
        ({"preempt_mode": {"other": "SUSPEND"}}, []),
        ({"preempt_mode": {"gpu": "SUSPEND"}, "preempt_by_qos": True}, []),
    ],
)
def test_each_setting_of_the_site_is_named(tmp_path, values, found):
    assert named(slurm_spec(), site(**values), tmp_path) == found


def test_a_run_on_this_machine_is_not_bothered_with_slurm(tmp_path):
    spec = slurm_spec()
    spec.cluster.scheduler = "local"
    assert named(spec, site(kill_wait_s=5), tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [
        ("nfs4", {"soft"}, [("folder.mount", WARN)]),
        ("nfs4", {"hard", "acdirmax=900"}, [("folder.mount", WARN)]),
        ("fuse.gcsfuse", set(), [("folder.mount", FAIL)]),
        ("tmpfs", set(), []),  # submit refuses it by itself
    ],
)
def test_mount_options_are_named_and_what_submit_says_itself_is_not_repeated(
    tmp_path, monkeypatch, kind, options, found
):
    mount = Mount("/x", kind, "s:/x", ",".join(options))
    monkeypatch.setattr(cheap, "mount_of", lambda _: mount)
    assert named(slurm_spec(), GOOD, tmp_path) == found


def test_a_disk_without_room_for_what_is_kept_is_named_by_an_earlier_run_of_the_same_shape(
    tmp_path, monkeypatch
):
    saved(tmp_path)
    free = os.statvfs_result((4096, 4096, 100, 1, 1, 100, 50, 50, 0, 255))
    monkeypatch.setattr(cheap, "check_room", lambda *rest: REAL_ROOM(*rest, look=lambda _: free))
    assert named(slurm_spec(), GOOD, tmp_path) == [("folder.room", FAIL)]
    assert named(slurm_spec(model=ModelSpec(layers=9)), GOOD, tmp_path) == []


REAL_ROOM = cheap.check_room


def test_a_run_like_one_that_could_not_save_in_time_is_warned(tmp_path):
    run = saved(tmp_path)
    run.leave(1, 8, 20, committed=5)
    assert named(slurm_spec(), GOOD, tmp_path) == [("runs.emergency_save", WARN)]


def test_submit_says_it_by_the_way(tmp_path, monkeypatch, capsys):
    (tmp_path / "mytrain.py").write_text("def main():\n    return 0\n")
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    asked = ["submit", "entry=rank:mytrain:main", "steps=3", "--dry-run"]
    assert main(asked) == 0
    assert "mount with hard" not in capsys.readouterr().err
    monkeypatch.setattr(cheap, "mount_of", lambda _: Mount("/x", "nfs4", "s:/x", "soft"))
    assert main(asked) == 0
    assert "nfs4 from s:/x, mounted at /x with soft" in capsys.readouterr().err


def test_it_is_cheap_among_many_runs(tmp_path):
    for number in range(60):
        saved(tmp_path, f"old-{number}")
    took_s = []
    for _ in range(5):
        began = time.process_time()
        cheap_findings(slurm_spec(), GOOD, tmp_path)
        took_s.append(time.process_time() - began)
    assert min(took_s) < 0.05, took_s
