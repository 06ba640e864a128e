"""Torch-free runs on the lab cluster, 2 nodes x 2 ranks, and what a test does to them."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Optional, TypeVar

from fakes.project import RANK, Run, overrides
from lab import REPOSITORY, Lab, cluster, wait_until
from opening import open_lab

from ftslurm.run.attempts import read_progress

STEPS, INTERVAL = 60, 20


def make_project(lab: Lab, name: str, files: Mapping[str, str]) -> Path:
    """A new folder of the user's own with the rank's source in it, and `files` beside."""
    new = ["mktemp", "--directory", f"{lab.home(lab.user)}/{name}-XXXXXX"]
    folder = Path(lab.run_as(lab.user, new).stdout.strip())
    target = RANK.relative_to(RANK.parents[2])
    lab.run_as(lab.user, ["install", "-D", str(lab.checkout / target), str(folder / target)])
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


class LabRun:
    """One run, submitted by the lab's ordinary user from a project folder of its own."""

    def __init__(
        self,
        lab: Lab,
        name: str,
        *more: str,
        step_s: float = 0.03,
        faults: str = "",
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.lab = lab
        self._environ = {"PYTHONPATH": str(lab.checkout), "FTSLURM_FAULTS": faults}
        self.folder = make_project(lab, name, files)
        given = overrides(steps=STEPS, interval=INTERVAL, step_s=step_s, more=more)
        placed = [
            "cluster=slurm",
            "cluster.nodes=2",
            "cluster.tasks_per_node=2",
            "cluster.partition=low",
            "cluster.signal_lead_s=30",
            # A preflight takes the seconds of loading torch; test_preflight_cluster.py has them.
            "health.preflight=never",
            f"name={name}",
            f"runs_dir={self.folder}/runs",
        ]
        record = json.loads(self.ftslurm("submit", "--json", *placed, *given))
        self.job_id: str = record["job_id"]
        self.run = Run(record["run_dir"])

    def ftslurm(self, *arguments: str) -> str:
        argv = [str(self.lab.python), "-m", "ftslurm", *arguments]
        # cwd decides what code is taken along.
        return self.lab.run_as(
            self.lab.user, argv, env=self._environ, cwd=self.folder, timeout_s=110
        ).stdout

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(
            self.ftslurm("status", str(self.run.layout.root), "--json")
        )
        return told

    def step(self, attempt: int) -> Optional[int]:
        progress = read_progress(self.run.layout.attempt(attempt))
        trains = progress is not None and progress.phase == "training"
        return progress.step if progress is not None and trains else None

    def wait_for_training(self, attempt: int, *, timeout_s: float = 120) -> int:
        """Wait until this attempt has trained three steps; the step it is at. Whether it still
        trains then is up to how slow its steps are."""

        def trained() -> Optional[int]:
            told = read_progress(self.run.layout.attempt(attempt))
            if told is None or told.step < (told.restored_step or 0) + 3:
                return None
            return told.step

        return wait_until(trained, timeout_s=timeout_s, seen=self.says)

    def make_room(self) -> None:
        """A job in `high` takes this run's nodes."""
        job = self.lab.show_job(self.job_id)
        self.lab.preempt(int(job["NumNodes"]), nodelist=job["NodeList"], seconds=2)

    def preempt(self) -> None:
        """The same, and the run is queued again and hastened."""
        self.make_room()
        self.lab.hasten(self.job_id)

    def end_as(self, state: str, *, timeout_s: float = 180) -> None:
        """Wait for the job's end; it has to be this one."""
        try:
            ended = self.lab.wait_for_end(self.job_id, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.says()}") from None
        assert ended == state, self.says()

    def wait_for_decisions(self, actions: list[str], *, timeout_s: float = 120) -> None:
        wait_until(
            lambda: self.run.decisions() == actions or None, timeout_s=timeout_s, seen=self.run.says
        )

    def says(self) -> str:
        return f"job {self.lab.show_job(self.job_id)}\n{self.run.says()}"

    def rank_pids(self) -> list[int]:
        """Pids of the ranks, as root sees them on all nodes at once."""
        wanted = f"FTSLURM_RUN_DIR={self.run.layout.root}".encode()
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit():
                    continue
                environ = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            is_rank = b"ftslurm.submit.rank" in command and b"srun" not in command[0]
            if is_rank and wanted in environ:
                pids.append(int(entry.name))
        return pids


T = TypeVar("T", bound=LabRun)


class Group(Generic[T]):
    """Runs side by side, each driven to its end in a thread; a test takes its own, and with it what
    went wrong there."""

    def __init__(self, lab: Lab, scenarios: Mapping[str, Callable[[Lab], T]]) -> None:
        with ThreadPoolExecutor(max_workers=len(scenarios)) as pool:
            self._runs: dict[str, Future[T]] = {
                name: pool.submit(scenario, lab) for name, scenario in scenarios.items()
            }

    def __getitem__(self, name: str) -> T:
        return self._runs[name].result()


@contextmanager
def daemon_away(lab: Lab, name: str, *, verb: str = "kill") -> Iterator[None]:
    """slurmctld or slurmdbd is killed, or ends by `stop`, and whoever asks for it is refused a
    connection; started again on what it has left."""
    shown = lab.status()
    place = (shown["controller_address"], shown["ports"][name])
    assert not _refuses(place), f"{name} is away already"
    _order(lab, verb, name)
    try:
        assert _refuses(place), f"{name} is still there"
        yield
    finally:
        _order(lab, "start", name)


def _order(lab: Lab, verb: str, name: str) -> None:
    done = cluster(verb, name, folder=lab.folder)
    assert done.returncode == 0, done.stderr


def _refuses(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


@contextmanager
def controller_away(lab: Lab) -> Iterator[None]:
    """slurmctld answers nobody: its port is open, as on a host that hangs."""
    pid = next(d["pid"] for d in lab.status()["daemons"] if d["name"] == "slurmctld")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def saved_state(lab: Lab, job_id: str) -> bytes:
    """slurmctld's file of jobs, as soon as all is in it that it knows of this one by now: a
    slurmctld that is killed knows so much when it is back."""
    word, path = f"known-of-{job_id}", lab.folder / "state" / "job_state"
    lab.run_as_root("scontrol", "update", f"JobId={job_id}", f"AdminComment={word}")

    def saved() -> Optional[bytes]:
        with suppress(FileNotFoundError):  # away for a moment whenever it is written anew
            state = path.read_bytes()
            return state if word.encode() in state else None
        return None

    return wait_until(saved, timeout_s=60, seen=lambda: f"{path} has no `{word}`")


@contextmanager
def time_to_leave(lab: Lab, **more: bool) -> Iterator[None]:
    """Nobody is killed at a save, however busy the machine is: who has left does not wait."""
    with lab.changed(kill_wait_s=15, **more):
        yield


@contextmanager
def lab_of_its_own(name: str, *options: str) -> Iterator[Lab]:
    """A cluster of two nodes beside the one of all others, for what holds as long as one is up."""
    folder = Path(f"{os.environ.get('FTSLURM_CLUSTER', '/var/tmp/ftslurm')}-{name}")
    started = cluster("up", "--nodes=2", f"--expose={REPOSITORY}", *options, folder=folder)
    assert started.returncode == 0, started.stderr
    try:
        yield open_lab(folder)
    finally:
        ended = cluster("down", folder=folder)
        assert ended.returncode == 0, ended.stderr
