"""A real Slurm cluster in the hands of a test: submit as an ordinary user, preempt, cut, wait.

Every wait has a deadline and says what it saw when it passes. Nothing here knows how the cluster
is made: it only calls slurm/cluster/cluster.py and Slurm's own commands.
"""

from __future__ import annotations

import json
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / "slurm" / "cluster" / "cluster.py"
NUM_NODES = 4
DEFAULT_SETTINGS = {
    "send_user_signal": False,
    "grace_s": 60,
    "kill_wait_s": 5,
    "slurmd_timeout_s": 20,
    "job_requeue": True,
    "strip_requeue": False,
    "scontrol": True,
    "expedited_requeue": False,
    "requeue_delay_s": 120,
    "prolog": "",
    "epilog": "",
    "health_check": "",
    "nohold_on_prolog_fail": False,
}
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
SACCT_FIELDS = ("JobID", "State", "ExitCode", "Submit", "Start", "End", "NNodes", "NodeList")


def cluster(
    *arguments: str, timeout_s: float = 240, folder: Optional[Path] = None, show: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run cluster.py; its progress goes to the terminal with `show`, else into the result."""
    place = ["--folder", str(folder)] if folder else []
    return subprocess.run(
        [sys.executable, str(CLUSTER), *place, *arguments],
        stdout=subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@dataclass
class Lab:
    """The one cluster of a test session."""

    folder: Path
    environment: dict[str, str]
    """What an ordinary user has after logging in, SLURM_CONF included."""
    users: dict[str, Path]
    """The users who submit jobs, and their homes."""
    checkout: Path
    """This repository, read-only, at a path that users and nodes can read."""
    python: Path
    """The tests' interpreter with its packages, runnable by users and on nodes."""
    settings: dict[str, Any]
    version: tuple[int, int]
    """Of Slurm: (22, 5), (24, 11), (26, 5)."""
    may_be_off: bool = True
    """A node may be switched off or cut: to ask each of them costs half a second."""

    @property
    def queues_once_more(self) -> bool:
        """A job that was preempted and queued again stays marked: the run that then ends by itself
        is taken for one that gives way, and the job is queued once more (seen on 24.11.5)."""
        return self.version == (24, 11)

    @property
    def last_rows_once_preempted(self) -> list[str]:
        """How a job that was preempted earlier ends in accounting."""
        return ["PREEMPTED", "COMPLETED"] if self.queues_once_more else ["COMPLETED"]

    @property
    def user(self) -> str:
        return list(self.users)[0]

    @property
    def other_user(self) -> str:
        return list(self.users)[1]

    @property
    def nodes(self) -> list[str]:
        return [f"n{i}" for i in range(1, NUM_NODES + 1)]

    def home(self, user: str) -> Path:
        return self.users[user]

    def run_as(
        self,
        user: str,
        argv: Sequence[str],
        *,
        env: Optional[Mapping[str, str]] = None,
        cwd: Optional[Path] = None,
        stdin: str = "",
        timeout_s: float = 120,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user, in a login's environment plus `env`."""
        home = self.users.get(user, self.folder)  # root has none of its own here
        identity = {"HOME": str(home), "USER": user, "LOGNAME": user}
        # As root, without: Python then need not fork all of itself, which is two thirds of a call.
        other = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        result = subprocess.run(
            list(argv),
            input=stdin,
            env={**self.environment, **identity, **(env or {})},
            cwd=cwd or home,
            **({} if user == "root" else other),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and result.returncode != 0:
            raise AssertionError(
                f"`{' '.join(argv)}` as {user} ended with {result.returncode}\n"
                f"{result.stdout}{result.stderr}"
            )
        return result

    def run_as_root(self, *argv: str, check: bool = True) -> str:
        return self.run_as("root", argv, check=check).stdout

    def run_inside(self, node: str, *argv: str) -> str:
        """Run a command as root in a node's namespaces."""
        nodes = {n["name"]: n for n in self.status()["nodes"]}
        enter = ["nsenter", "--target", str(nodes[node]["pid"]), "--all"]
        return self.run_as_root(*enter, *argv)

    def status(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self._cluster("status", "--json"))
        return shown

    def sbatch_as(self, user: str, *arguments: str, script: str = "", **keywords: Any) -> str:
        """Submit `script` (bash, after a `#!` line) or what `arguments` name; the job id."""
        text = f"#!/bin/bash\n{script}" if script else ""
        argv = ["sbatch", "--parsable", *arguments]
        return self.run_as(user, argv, stdin=text, **keywords).stdout.strip()

    def show_job(self, job_id: str) -> dict[str, str]:
        """`scontrol show job` as a mapping; empty when Slurm no longer knows it."""
        shown = self.run_as_root("scontrol", "--oneliner", "show", "job", job_id, check=False)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def job_state(self, job_id: str) -> str:
        return self.show_job(job_id).get("JobState", "UNKNOWN")

    def wait_for_state(self, job_id: str, states: Collection[str], timeout_s: float) -> str:
        """Wait until a job is in one of the states; which one."""
        wanted = [states] if isinstance(states, str) else list(states)

        def in_state() -> Optional[str]:
            state = self.job_state(job_id)
            return state if state in wanted else None

        return wait_until(in_state, timeout_s=timeout_s, seen=lambda: self._seen(job_id, wanted))

    def _seen(self, job_id: str, wanted: Sequence[str]) -> str:
        job = self.show_job(job_id)
        return (
            f"job {job_id} is {job.get('JobState')}, wanted {wanted}\n{json.dumps(job, indent=1)}"
        )

    def wait_for_end(self, job_id: str, timeout_s: float) -> str:
        """Wait until a job has ended for good; its state."""

        def ended() -> Optional[str]:
            job = self.show_job(job_id)
            state = job.get("JobState", "UNKNOWN")
            if self.queues_once_more and state == "PENDING" and _waits_long(job):
                self.hasten(job_id)
            return state if state in ENDED else None

        return wait_until(ended, timeout_s=timeout_s, seen=lambda: self._seen(job_id, ENDED))

    def wait_for_text(self, path: Path, text: str, timeout_s: float) -> str:
        """Wait until a file holds a text; the file's content then."""

        def content() -> Optional[str]:
            # Its last character may be on its way.
            found = path.read_text("utf-8", errors="replace") if path.exists() else ""
            return found if text in found else None

        def seen() -> str:
            return f"no `{text}` in {path}:\n" + (path.read_text() if path.exists() else "(none)")

        return wait_until(content, timeout_s=timeout_s, seen=seen)

    def sacct_rows(self, job_id: str) -> list[dict[str, str]]:
        """All rows of accounting, one per run and step of a run, oldest first."""
        fields = f"--format={','.join(SACCT_FIELDS)}"
        argv = ["sacct", "-D", "-P", "-n", "-j", job_id, fields]
        lines = self.run_as_root(*argv).splitlines()
        return [dict(zip(SACCT_FIELDS, line.split("|"))) for line in lines]

    def wait_for_runs(self, job_id: str, states: Sequence[str], timeout_s: float = 120) -> None:
        """Wait until accounting shows exactly these states, one for each run of the job: rows
        come some seconds late."""

        def shown() -> list[str]:
            return [r["State"] for r in self.sacct_rows(job_id) if r["JobID"] == job_id]

        wait_until(
            lambda: shown() == list(states) or None,
            timeout_s=timeout_s,
            seen=lambda: f"sacct has {shown()} for job {job_id}, wanted {list(states)}",
        )

    def preempt(self, nodes: int, *, seconds: int = 5, nodelist: str = "") -> str:
        """Submit a job of another user to partition high that takes whole nodes; its id.

        Without a `nodelist` Slurm takes idle nodes first, so ask for more nodes than are idle.
        """
        argv = ["--partition=high", "--exclusive", f"--nodes={nodes}", "--output=/dev/null"]
        if nodelist:
            argv.append(f"--nodelist={nodelist}")
        return self.sbatch_as(self.other_user, *argv, script=f"exec sleep {seconds}")

    def hasten(self, job_id: str, *, timeout_s: float = 120) -> None:
        """Once a requeued job is PENDING, its owner moves its start from 121 s away to 4 s."""
        self.wait_for_state(job_id, ["PENDING"], timeout_s)
        owner = self.show_job(job_id)["UserId"].partition("(")[0]
        # StartTime=now can destroy the job: same node, same second.
        self.run_as(owner, ["scontrol", "update", f"JobId={job_id}", "StartTime=now+4"])

    def cancel_all(self, *, timeout_s: float = 120) -> None:
        """Cancel every job and wait until the queue is empty. A job may queue another as it ends,
        so all are cancelled until none is left."""

        def none_left() -> Optional[bool]:
            for user in self.users:
                self.run_as_root("scancel", f"--user={user}", check=False)  # some end meanwhile
            return self.queue() == "" or None

        wait_until(
            none_left,
            timeout_s=timeout_s,
            seen=lambda: f"jobs do not end:\n{self.queue()}",
            interval_s=1.0,
        )

    def queue(self) -> str:
        return self.run_as_root("squeue", "--noheader").strip()

    def cut(self, node: str) -> None:
        """Pull the node's network cable."""
        self._power("cut", node)

    def join(self, node: str) -> None:
        """Plug the cable in again."""
        self._power("join", node)

    def kill(self, node: str) -> None:
        """Power the node off: processes and memory are lost."""
        self._power("kill", node)

    def start(self, node: str) -> None:
        self._power("start", node)

    def _power(self, verb: str, node: str) -> None:
        self.may_be_off = True
        self._cluster(verb, node)

    def node_states(self) -> dict[str, str]:
        """sinfo's word for each node: `idle`, `allocated`, `down*`..."""
        shown = self.run_as_root("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T")
        return dict(line.split() for line in shown.splitlines())

    def wait_for_nodes(self, state: str, nodes: Sequence[str] = (), *, timeout_s: float) -> None:
        wanted = nodes or self.nodes
        wait_until(
            lambda: all(self.node_states()[node] == state for node in wanted) or None,
            timeout_s=timeout_s,
            seen=lambda: f"nodes are {self.node_states()}, wanted {state} for {list(wanted)}",
        )

    def set_send_user_signal(self, on: bool) -> None:
        """Whether preemption sends a job's own --signal first, in place of TERM."""
        self.change_settings(send_user_signal=on)

    def change_settings(self, **settings: Any) -> None:
        """Change settings of the running cluster, named as in DEFAULT_SETTINGS."""
        argv = []
        for name, value in settings.items():
            word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
            argv += ["--" + name.replace("_", "-"), word]
        self._cluster("set", *argv)
        self.settings = {**self.settings, **settings}

    @contextmanager
    def changed(self, **settings: Any) -> Iterator[None]:
        """With these settings for a while."""
        before = {name: self.settings[name] for name in settings}
        self.change_settings(**settings)
        try:
            yield
        finally:
            self.change_settings(**before)

    def reset(self) -> list[str]:
        """Bring the cluster back to how a test may expect it; what had to be repaired."""
        repaired = []
        if self.settings != DEFAULT_SETTINGS:
            self.change_settings(**DEFAULT_SETTINGS)
            repaired.append("settings were changed")
        if self.may_be_off:
            self._switch_on_nodes()  # a job does not end before all of its nodes say so
        if self.queue():
            self.cancel_all()
            repaired.append("jobs were left")
        if set(self.node_states().values()) != {"idle"}:
            repaired.append(f"nodes were {self.node_states()}")
            self._repair_nodes()
        return repaired

    def _switch_on_nodes(self) -> None:
        for node in self.status()["nodes"]:
            if not (node["on"] and node["linked"]):
                (self.join if node["on"] else self.start)(node["name"])
        self.may_be_off = False

    def _repair_nodes(self) -> None:
        def all_idle() -> Optional[bool]:
            states = self.node_states()
            for node, state in states.items():
                if state.startswith(("down", "drain")):
                    resume = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
                    self.run_as_root(*resume, check=False)
            return set(states.values()) == {"idle"} or None

        wait_until(
            all_idle,
            timeout_s=120,
            seen=lambda: f"nodes stay {self.node_states()}",
            interval_s=0.5,
        )

    def _cluster(self, *arguments: str) -> str:
        result = cluster(*arguments, folder=self.folder)
        if result.returncode != 0:
            raise AssertionError(f"cluster.py {' '.join(arguments)}: {result.stderr}")
        return result.stdout


def _waits_long(job: Mapping[str, str]) -> bool:
    """Requeued and not hastened: it is to start two minutes after its last run ended."""
    try:
        start = datetime.fromisoformat(job.get("StartTime", ""))
    except ValueError:  # `Unknown`
        return False
    return job.get("Reason") == "BeginTime" and start > datetime.now() + timedelta(seconds=30)


def wait_until(
    look: Callable[[], Optional[T]],
    *,
    timeout_s: float,
    seen: Callable[[], str],
    interval_s: float = 0.4,
) -> T:
    """Look until there is something to return; when the deadline passes, say what was seen."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {timeout_s:g} s: {seen()}")
        time.sleep(interval_s)
