"""A report as a test holds it against what was done: the jobs by the names of who made them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional, Protocol

import pytest
from lab import Lab


class Made(Protocol):
    """Runs of ours and foreign jobs, by name."""

    @property
    def run(self) -> Mapping[str, Any]: ...
    @property
    def foreign(self) -> Mapping[str, Any]: ...


class Told:
    """A report, and its jobs by the names of those who made them."""

    def __init__(self, made: Made, record: dict[str, Any]) -> None:
        self.record = record
        self.fleet: dict[str, Any] = record["fleet"]
        self.total: dict[str, Any] = self.fleet["total"]
        self._ours = list(made.run)
        names = {one.job_id: name for name, one in made.foreign.items()}
        self.jobs: dict[str, dict[str, Any]] = {}
        for job in record["jobs"]:
            run_dir = job["run_dir"]
            name = Path(run_dir).name.partition("-")[0] if run_dir else names[job["job_id"]]
            assert name not in self.jobs, f"{name} is in it twice"
            self.jobs[name] = job

    def attempts(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.jobs[name]["attempts"]
        return found

    def ours(self) -> dict[str, list[dict[str, Any]]]:
        """Attempts that runs of ours have claimed."""
        return {name: [one for one in self.attempts(name) if one["number"]] for name in self._ours}

    def unclaimed(self) -> dict[str, list[dict[str, Any]]]:
        return {name: [one for one in self.attempts(name) if not one["number"]]
                for name in self._ours}  # fmt: skip


def when_ended(made: Made, record: dict[str, Any], jobs: int) -> Optional[Told]:
    """None: accounting lacks some of the jobs, or an end, also of other tests' jobs, which to it
    run until then."""
    known = {one.job_id for one in made.foreign.values()}
    if any(not job["run_dir"] and job["job_id"] not in known for job in record["jobs"]):
        return None
    told = Told(made, record)
    has_ended = all(job["attempts"][-1]["end_at"] for job in told.jobs.values())
    return told if has_ended and len(told.jobs) == jobs else None


def begin(lab: Lab) -> str:
    """From when on a report tells of no other test's jobs, as `report` takes it."""
    lab.cancel_all()
    time.sleep(1.0)  # Slurm's times are whole seconds
    return datetime.now().strftime("%Y-%m-%dT%H:%M:%S")


def ask(
    lab: Lab,
    folder: Path,
    *words: str,
    user: str = "",
    env: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """`ftslurm report`, as `user` (the lab's own) in a folder that has the runs below `runs`."""
    argv = [str(lab.python), "-m", "ftslurm", "report", *words]
    env = {"PYTHONPATH": str(lab.checkout), **env}
    return lab.run_as(user or lab.user, argv, env=env, cwd=folder, check=False)


def report(lab: Lab, folder: Path, *words: str) -> dict[str, Any]:
    """What it says with --json; something has failed."""
    done = ask(lab, folder, "--json", *words)
    assert done.returncode == 1 and done.stdout, f"{done.returncode} {done.stderr}"
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def new_folder(lab: Lab) -> Path:
    new = ["mktemp", "--directory", f"{lab.home(lab.user)}/told-XXXXXX"]
    return Path(lab.run_as(lab.user, new).stdout.strip())


def ended_events(lab: Lab, since: str) -> set[tuple[str, str]]:
    """Nodes that were out of service, and why; none while one of them still is."""
    argv = ["sacctmgr", "-nP", "show", "event", "events=node", f"start={since}",
            "format=NodeName,TimeEnd,Reason"]  # fmt: skip
    rows = [line.split("|", 2) for line in lab.run_as_root(*argv).splitlines()]
    if any(end == "Unknown" for _, end, _ in rows):
        return set()
    return {(node, reason) for node, _, reason in rows}


def same(what: str, told: Any, true: Any, *, within: float = 0.0) -> None:
    """A line of the table that -s shows: what was done or seen, and what is told of it."""
    print(f"{what:34} {_shown(true):>40} {_shown(told):>40}")
    is_same = told == (pytest.approx(true, abs=within) if within else true)
    assert is_same, f"{what}: {told!r} is told, it was {true!r}"


def between(what: str, told: float, least: float, most: float) -> None:
    print(f"{what:34} {f'{least:.2f} to {most:.2f}':>40} {told:>40.2f}")
    assert least <= told <= most, f"{what}: {told!r} is told, it was {least!r} to {most!r}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, (list, tuple)):
        return " ".join("-" if one is None else _shown(one) for one in value)
    return str(value)
