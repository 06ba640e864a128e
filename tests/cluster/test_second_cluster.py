"""A second cluster beside the first: it repairs itself, leaves nothing behind, and starts nowhere
but in a place of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, cluster, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture
def second(lab: Lab) -> Iterator[Path]:
    """A folder for a second cluster beside the first."""
    path = lab.folder.with_name(lab.folder.name + "-second")
    assert not path.exists(), f"{path} is left from an earlier test; `cluster.py down` it"
    yield path
    if path.exists():
        cluster("down", folder=path)


def traces(folder: Path) -> dict[str, list[str]]:
    """Everything of the cluster in this folder that is on the machine, by kind."""
    bridge = json.loads(cluster("status", "--json", folder=folder).stdout)["cluster_name"]
    links = json.loads(subprocess.check_output(["ip", "-json", "link"], text=True))
    names = [str(link["ifname"]) for link in links]
    return {
        "links": [name for name in names if name == bridge or name.startswith(f"{bridge}-")],
        "mounts": lines_with(str(folder), "/proc/self/mountinfo"),
        "users": lines_with(f"{folder}:", "/etc/passwd") + lines_with(f"{folder}/", "/etc/passwd"),
        "processes": processes_with(folder),
        "folder": [str(folder)] if folder.exists() else [],
    }


def lines_with(text: str, path: str) -> list[str]:
    return [line for line in Path(path).read_text().splitlines() if text in line]


def processes_with(folder: Path) -> list[str]:
    """Processes whose environment names the folder, as all daemons' does."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"SLURM_CONF={folder}/".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, or closed even to root, so none of ours
    return found


@pytest.mark.timeout(400)  # starts a cluster twice; 10 s on an idle machine
def test_a_cluster_repairs_itself_and_leaves_nothing_behind(second: Path) -> None:
    started = cluster("up", "--nodes=1", f"--expose={Path(__file__).parent}", folder=second)
    assert started.returncode == 0, started.stderr
    assert started.stdout == f"export SLURM_CONF={second}/etc/slurm.conf\n"
    again = cluster("up", folder=second)
    assert again.returncode == 0 and "already up" in again.stderr

    shown = json.loads(cluster("status", "--json", folder=second).stdout)
    pids = {daemon["name"]: daemon["pid"] for daemon in shown["daemons"]}
    os.kill(pids["slurmctld"], signal.SIGKILL)
    half_dead = wait_until(  # it may take a moment to die
        lambda: told if (told := cluster("status", folder=second)).returncode else None,
        timeout_s=60,
        seen=lambda: "it is up",
    )
    assert half_dead.returncode == 1 and "DEAD" in half_dead.stdout
    repaired = cluster("up", "--nodes=1", f"--expose={Path(__file__).parent}", folder=second)
    assert repaired.returncode == 0 and "half dead" in repaired.stderr, repaired.stderr
    assert all(traces(second).values()), "each kind of trace can be seen while it is up"

    assert cluster("down", folder=second).returncode == 0
    # slurmctld's child for scripts (slurmscriptd) ends when it finds that its parent has.
    wait_until(
        lambda: not traces(second)["processes"] or None,
        timeout_s=30,
        seen=lambda: str(traces(second)),
    )
    assert not any(traces(second).values())
    assert Path(__file__).exists(), "what was exposed is not taken down with it"
    assert cluster("status", folder=second).returncode == 1
    assert cluster("down", folder=second).returncode == 0, "nothing to do is no failure"


def test_a_taken_port_is_named_and_nothing_is_started(second: Path) -> None:
    ports = json.loads(cluster("status", "--json", folder=second).stdout)["ports"]
    with socket.create_server(("127.0.0.1", ports["slurmctld"])):
        refused = cluster("up", "--nodes=1", folder=second)
    assert refused.returncode == 1
    assert f"port {ports['slurmctld']}, which slurmctld needs, is taken" in refused.stderr
    assert not any(traces(second).values())


def test_a_slurm_that_debian_does_not_have_is_refused(second: Path) -> None:
    refused = cluster("up", "--slurm-version", "19.05", folder=second)
    assert refused.returncode == 1
    assert "19.05" in refused.stderr and "Traceback" not in refused.stderr
    assert not any(traces(second).values())


def test_a_folder_with_other_things_in_it_is_refused(second: Path) -> None:
    second.mkdir()
    (second / "precious").touch()
    refused = cluster("up", folder=second)
    assert refused.returncode == 1 and "holds something else" in refused.stderr
    assert cluster("down", folder=second).returncode == 0
    assert (second / "precious").exists()
    (second / "precious").unlink()
    second.rmdir()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--folder", "/tmp/ftslurm", "up"], "each node has its own"),
        (["--folder", "/root/ftslurm", "up"], "ordinary users cannot pass through `/root`"),
        (["cut", "n99"], "there is no node `n99`"),
        (["start", "n1"], "node `n1` is already on"),
        (["up", "--nodes", "3"], "a cluster with 4 nodes"),
        (["up", "--slurm-version", "19.05"], "is already up"),
        (["enter"], "which command?"),
        (["enter", "--", "no-such-command"], "no-such-command"),
    ],
)
def test_a_wrong_wish_is_refused_with_a_sentence(
    lab: Lab, arguments: list[str], sentence: str
) -> None:
    refused = cluster(*arguments, folder=None if "--folder" in arguments else lab.folder)
    assert refused.returncode == 1
    assert sentence in refused.stderr and "Traceback" not in refused.stderr
