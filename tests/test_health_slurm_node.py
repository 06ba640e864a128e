"""The calls of Slurm themselves: one node, cut off in time, and in a text that can be read."""

import os
import time
from pathlib import Path

import pytest
from fakes.slurm_fleet import NOW, ended, fleet

from ftslurm.errors import SchedulerError
from ftslurm.health.drain import act
from ftslurm.health.settings import HealthSettings
from ftslurm.health.slurm_node import SlurmNode, run_slurm
from ftslurm.health.state_dir import StateDir
from ftslurm.health.verdict import Verdict

SICK = Verdict("drain", "XID79", None, "a GPU fell off", "xid-79", "test")


@pytest.mark.parametrize("name", ["ALL", "n[1-2]", "n1,n2", "", "n", "n1 State=DOWN"])
@pytest.mark.parametrize("answer", [("n1", "n2"), ("n1",), ()])
def test_no_more_than_one_node_is_ever_changed(tmp_path: Path, name: str, answer) -> None:
    """scontrol tells all nodes of a range, and takes a range to change."""
    cluster = fleet("n1", "n2")

    def run(argv, deadline_s):
        assert argv[1] == "show"
        return ended(stdout="".join(map(cluster.text, answer)))

    with StateDir(tmp_path / "state") as state:
        action = act([SICK], HealthSettings(), name, state, context="epilog", boot_id="b",
                     looked_at=NOW, runner=run)  # fmt: skip
    assert (action.word, action.calls) == ("failed", 1)


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_call_that_hangs_is_cut_off_and_the_node_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "scontrol", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    began = time.monotonic()
    with StateDir(tmp_path / "state") as state:
        action = act([SICK], HealthSettings(slurm_call_s=0.4), "n1", state, context="epilog",
                     boot_id="b", looked_at=NOW)  # fmt: skip
    took_s = time.monotonic() - began
    assert (action.word, action.exit_code, action.calls) == ("failed", 0, 1)
    assert "cut off after 0.4 s" in action.sentence
    assert 0.4 <= took_s < 20


def test_slurm_prints_what_we_read_whatever_the_environment_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "sinfo", "env >&2; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SLURM_TIME_FORMAT", "SINFO_FORMAT", "SLURM_CLUSTERS", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc/site/slurm.conf")
    env = run_slurm(["sinfo"], 5.0).stderr.decode().splitlines()
    assert {"TZ=UTC", "LC_ALL=C", "SLURM_CONF=/etc/site/slurm.conf"} <= set(env)
    assert not [line for line in env if line.endswith("=relative")]
    monkeypatch.delenv("PATH")
    assert run_slurm(["/usr/bin/env"], 5.0).stdout.decode().count("PATH=/usr/local/bin:") == 1
    assert os.environ.get("PATH") is None


def test_an_unknown_command_is_an_error_of_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SchedulerError, match="ended with 127"):
        SlurmNode("n1", 1.0, run_slurm).read()
