"""Every path inside a run directory, computed. No I/O, so any process may import it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

CALL = "train.pkl"
"""The ranks' pickled call in RUN/submit, written before the job has an id."""

# One name a step, however large.
_NUMBER = r"([0-9]{12}|[1-9][0-9]{12,})"
_STEP = re.compile(rf"step-{_NUMBER}\Z")
_TEMPORARY = re.compile(rf"step-{_NUMBER}\.tmp-([0-9]{{4,}})\Z")


def step_name(step: int) -> str:
    """`step-000000012000`: sorts by name as by number up to 10**12 steps."""
    return f"step-{step:012d}"


def temporary_name(step: int, attempt: int) -> str:
    """The folder a step is written in; the attempt keeps a leftover writer out of a newer one."""
    return f"{step_name(step)}.tmp-{attempt:04d}"


def parse_step_name(name: str) -> Optional[int]:
    """The step of a published folder name, None for anything else."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def parse_temporary_name(name: str) -> Optional[tuple[int, int]]:
    """(step, attempt) of an unpublished folder name, None for anything else."""
    match = _TEMPORARY.match(name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class AttemptLayout:
    """Paths of one attempt."""

    root: Path

    @property
    def attempt_json(self) -> Path:
        return self.root / "attempt.json"

    @property
    def outcome_json(self) -> Path:
        return self.root / "outcome.json"

    @property
    def decision_json(self) -> Path:
        """What `ftslurm recover` decided, written before it acts."""
        return self.root / "decision.json"

    @property
    def agents_json(self) -> Path:
        """How the leader of the node agents, who alone writes these two, has the attempt by now."""
        return self.root / "agents.json"

    @property
    def agents_jsonl(self) -> Path:
        """What the node agents have seen and done."""
        return self.root / "agents.jsonl"

    @property
    def preflight_json(self) -> Path:
        """What a trial of the nodes before the ranks has found, where there was one."""
        return self.root / "preflight.json"

    @property
    def progress_json(self) -> Path:
        return self.root / "progress.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def ranks(self) -> Path:
        """One small error record per failed rank: rank-00003.json."""
        return self.root / "ranks"

    @property
    def looks(self) -> Path:
        """How each node found its own health when the attempt had failed: NODE.json."""
        return self.root / "evidence" / "health"

    @property
    def modules_json(self) -> Path:
        """Digests of the modules that rank 0 had imported when it began to train."""
        return self.root / "modules.json"

    @property
    def first_modules_json(self) -> Path:
        """Those of the node that was there first, of ranks that have no group to ask."""
        return self.root / "modules-first.json"

    @property
    def resume_json(self) -> Path:
        """What RUN/resume held when a program's attempt began, as one digest."""
        return self.root / "resume.json"

    @property
    def aware(self) -> Path:
        """Made by a program that looks by itself whether it is to stop."""
        return self.root / "aware"


@dataclass(frozen=True)
class RunLayout:
    """Paths of one run."""

    root: Path

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def config_yaml(self) -> Path:
        return self.root / "config.yaml"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def skipped_jsonl(self) -> Path:
        """Which batches are passed over (skipped.py)."""
        return self.root / "skipped.jsonl"

    @property
    def nodes_jsonl(self) -> Path:
        """What is known of nodes (node_memory.py)."""
        return self.root / "nodes.jsonl"

    @property
    def code_json(self) -> Path:
        """Digest of each file of `code`, as it was copied."""
        return self.root / "submit" / "code.json"

    @property
    def submit(self) -> Path:
        return self.root / "submit"

    @property
    def script(self) -> Path:
        return self.root / "submit" / "train.sbatch"

    @property
    def call(self) -> Path:
        return self.root / "submit" / CALL

    @property
    def jobs(self) -> Path:
        """Which jobs the run has had, a line each, written when the scheduler has taken one."""
        return self.root / "submit" / "jobs.jsonl"

    @property
    def successor_asked(self) -> Path:
        """There from the moment before the batch loop first asks sbatch for a next job: until then
        none of its own can be in the queue."""
        return self.root / "submit" / "successor-asked"

    @property
    def sbatch_command(self) -> Path:
        """The whole sbatch command as one line of shell; none for a run on this machine."""
        return self.root / "submit" / "sbatch.txt"

    @property
    def control(self) -> Path:
        """Orders of an operator: save, stop, pause."""
        return self.root / "control"

    @property
    def acts(self) -> Path:
        """What people have done to the run."""
        return self.control / "acts.jsonl"

    @property
    def resume(self) -> Path:
        """What a program of the user's own keeps between attempts (`ftslurm.resume_dir()`)."""
        return self.root / "resume"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def attempt(self, number: int) -> AttemptLayout:
        return AttemptLayout(self.attempts / f"{number:04d}")

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def steps(self) -> Path:
        return self.checkpoints / "steps"

    @property
    def quarantine(self) -> Path:
        return self.checkpoints / "quarantine"

    @property
    def latest_json(self) -> Path:
        return self.checkpoints / "latest.json"

    @property
    def trace(self) -> Path:
        return self.root / "trace"

    def trace_file(self, attempt: int) -> Path:
        """Per-step scalars of one attempt, written by rank 0 alone."""
        return self.trace / f"attempt-{attempt:04d}.jsonl"

    @property
    def done(self) -> Path:
        return self.root / "DONE"
