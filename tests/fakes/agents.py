"""Agents of a job as real processes on this machine: each node is an address of 127.0.0.0/8.

Slurm's commands are small scripts on PATH that note what they were asked. Ranks are processes that
beat (beating.py) with the environment that srun would give them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ftslurm.agent.ask import ask
from ftslurm.files import read_records, write_json
from ftslurm.parent import die_with_parent
from ftslurm.run.attempts import Attempt, claim
from ftslurm.run.heartbeat import beats_folder, read_views
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import PROGRAM_ENTRY, RunSpec, to_dict

ROOT = Path(__file__).resolve().parents[2]
JOB = "77"
COMMANDS = {
    "scontrol": '[[ $1 == ping ]] && { [[ -e "$FOLDER/away" ]] && exit 1; echo up; exit 0; }\n'
    '[[ $3 != show || ! -e "$FOLDER/nodes" ]] || cat "$FOLDER/nodes"',
    "squeue": "for word; do [[ $word == --me ]] && exit 0; done\n"
    "cat \"$FOLDER/job\" 2>/dev/null || echo 'RUNNING|None|Unknown'",
    "sbatch": "echo 78",
    "scancel": "",
    "sacct": "",
    "sinfo": "",
    "nvidia-smi": "exit 9",
    "srun": "exec sleep 600",
}


class Job:
    """`with Job(tmp_path, nodes=3) as job`: the agents of a job; all end with it."""

    def __init__(
        self,
        folder,
        *,
        nodes=3,
        recovery=None,
        tasks_per_node=1,
        site=None,
        program=None,
        gpus=None,
        spares=0,
    ):
        """`gpus`: a node's, and the library that tells of them, by the file `state` or the node's
        own; `spares`: of the nodes."""
        self.folder = folder
        self.layout = RunLayout(folder / "run")
        self.layout.submit.mkdir(parents=True, mode=0o700)
        self.layout.root.chmod(0o700)
        self.nodes = [f"127.0.0.{i}" for i in range(1, nodes + 1)]
        self.tasks_per_node = tasks_per_node
        spec = to_dict(RunSpec())
        spec["cluster"].update(nodes=nodes - spares, spares=spares, tasks_per_node=tasks_per_node)
        # These ranks do not train in step, so none lags by the load of this machine.
        spec["recovery"].update({"straggler_factor": 0, "straggler_lag_steps": 0})
        spec["recovery"].update(recovery or {})
        if gpus is not None:
            spec["cluster"]["gpus_per_node"], spec["health"]["nvml_library"] = gpus
        if program is not None:
            spec.update(entry=PROGRAM_ENTRY, program=program)
        record = {"run_id": "r", "spec": spec, "scheduler": "slurm", "config_digest": "0"}
        write_json(self.layout.run_json, {"schema_version": 1, "site": site, **record})
        self.layout.sbatch_command.write_text(f"sbatch --parsable {self.layout.script}\n")
        self.beats = folder / "beats"
        self._make_commands()
        self.processes, self.ranks, self.others = {}, {}, []

    def __enter__(self):
        try:
            for node in self.nodes:
                self.start(node)
            self.wait(self.are_all_live, "all agents are there")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised):
        for process in [*self.processes.values(), *self.ranks.values(), *self.others]:
            if process.poll() is None:
                process.kill()
            process.wait()
        assert not self.left_over(), "every agent ends with its test"

    def left_over(self):
        """Agents of this job's that still run."""
        run = str(self.layout.root).encode()
        commands = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                commands.append(path.read_bytes().split(b"\0"))
        return [words for words in commands if b"ftslurm.agent" in words and run in words]

    def start(self, node, code=("-m", "ftslurm.agent"), **more):
        with (self.folder / f"{node}.log").open("ab") as log:
            self.processes[node] = subprocess.Popen(
                [sys.executable, *code, str(self.layout.root)],
                env={**self.environ(node), **more},
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # Also one that a test has stopped, when the test itself is killed.
                preexec_fn=die_with_parent(),
            )

    def environ(self, node):
        """What srun gives to a process on a node."""
        own = self.folder / f"state-{node}"
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "FTSLURM_RUN_DIR": str(self.layout.root),
            "FTSLURM_BEATS": str(self.beats),
            "FOLDER": str(self.folder),
            "FTSLURM_FAKE_NVML": str(own if own.exists() else self.folder / "state"),
            "SLURM_JOB_ID": JOB,
            "FTSLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": f"127.0.0.[1-{len(self.nodes)}]",
            "SLURMD_NODENAME": node,
            "SLURM_NODEID": str(self.nodes.index(node)),
            "SLURM_STEP_ID": "0",
        }

    def claim(self, nodes=None):
        """A new attempt, as the batch script's claim makes it; its number."""
        nodes = nodes or self.nodes
        made = claim(self.layout, Attempt(0, JOB, 0, nodes, time.time()))
        self.ask("begin", attempt=made.number, nodes=nodes, tasks_per_node=self.tasks_per_node)
        return made.number

    def start_ranks(self, attempt, *arguments, nodes=None):
        for node in nodes or self.nodes:
            for local in range(self.tasks_per_node):
                self.start_rank(attempt, node, local, *arguments)

        wanted = len(self.nodes if nodes is None else nodes) * self.tasks_per_node
        self.wait(lambda: len(self.beating(attempt)) >= wanted, "ranks beat")

    def beating(self, attempt):
        """Ranks that train."""
        folder = self.beats_of(attempt)
        views = [view for node in self.nodes for view in read_views(folder, node)]
        return [view for view in views if view.step >= 2]

    def beats_of(self, attempt):
        return beats_folder(self.environ(self.nodes[0]), attempt)

    def start_rank(self, attempt, node, local=0, *arguments, code=None):
        """`code`: what it runs, else beating.py with these arguments."""
        rank = self.nodes.index(node) * self.tasks_per_node + local
        own = {
            "FTSLURM_ATTEMPT": str(attempt),
            "FTSLURM_TASKS_PER_NODE": str(self.tasks_per_node),
            "SLURM_NTASKS": str(len(self.nodes) * self.tasks_per_node),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
        what = ["-m", "fakes.beating", *arguments] if code is None else ["-c", code]
        argv = [sys.executable, *what]
        self.ranks[rank] = subprocess.Popen(
            argv, env={**self.environ(node), **own}, preexec_fn=die_with_parent()
        )

    def start_launcher(self, attempt):
        """What stands for the ranks' srun on the batch node."""
        environ = {**self.environ(self.nodes[0]), "FTSLURM_ATTEMPT": str(attempt)}
        del environ["SLURM_STEP_ID"]
        # bash keeps the name of the script in argv[1]; srun is a program of its own.
        argv = ["srun", "600"]
        process = subprocess.Popen(argv, env=environ, executable="/bin/sleep")
        self.others.append(process)
        return process

    def ask(self, what, timeout_s=60, **more):
        return ask(self.layout, JOB, {"ask": what, **more}, timeout_s)

    def states(self):
        answer = self.ask("nodes", timeout_s=30) or {"nodes": {}}
        return {node: of["state"] for node, of in answer["nodes"].items()}

    def are_all_live(self):
        return self.states() == dict.fromkeys(self.nodes, "live")

    def agents_json(self, attempt):
        path = self.layout.attempt(attempt).root / "agents.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def findings(self, attempt):
        return self.agents_json(attempt).get("findings", [])

    def events(self, attempt, kind=None):
        found = list(read_records(self.layout.attempt(attempt).root / "agents.jsonl"))
        return [event for event in found if kind in (None, event["kind"])]

    def stop(self, node):
        """To others, the node is as if its network were cut: nothing comes, nothing is refused."""
        self.processes[node].send_signal(signal.SIGSTOP)

    def calls(self, command):
        """How often and with what one of Slurm's commands was run."""
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.split()[0] == command]

    def said(self):
        logs = sorted(self.folder.glob("127.*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)

    def wait(self, look, what, timeout_s=90):
        deadline = time.monotonic() + timeout_s
        while not look():
            assert time.monotonic() < deadline, f"never: {what}\n{self.said()}"
            broken = [node for node, one in self.processes.items() if one.poll() == 1]
            assert not broken, self.said()
            time.sleep(0.05)

    def _make_commands(self):
        (self.folder / "bin").mkdir()
        for name, text in COMMANDS.items():
            path = self.folder / "bin" / name
            path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$FOLDER/calls"\n{text}\n')
            path.chmod(0o755)


def is_gone(process):
    return process.poll() is not None
