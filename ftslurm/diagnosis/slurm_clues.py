"""Slurm's word on an attempt, as clues: how this run of the job ended, and how its nodes are.

All is asked at once and in the background; what has not come by the deadline counts as unknown.
sacct's Reason is that of a wait and never taken for the cause of an end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.diagnosis.finding import Clue
from ftslurm.diagnosis.signatures import ACCOUNTING, NODE_STATE
from ftslurm.errors import SchedulerError
from ftslurm.run.attempts import Attempt
from ftslurm.scheduler.accounting import TIMEOUT_S, NodeState, read_nodes, read_runs, run_of_attempt
from ftslurm.scheduler.job_table import JobRun, StepRow
from ftslurm.scheduler.protocol import CLOCKS_S, Scheduler
from ftslurm.scheduler.slurm import Runner

_GOES_ON = ("RUNNING", "COMPLETING", "RESIZING", "SUSPENDED")


@dataclass
class Asked:
    """Questions under way and the answers so far."""

    answers: dict[str, Any] = field(default_factory=dict)
    threads: dict[str, threading.Thread] = field(default_factory=dict)

    def ask(self, name: str, question: Callable[[], Any]) -> None:
        def work() -> None:
            try:
                self.answers[name] = question()
            except SchedulerError:
                return

        # Not waited for at the end of the process: a command that hangs ends with its deadline.
        self.threads[name] = threading.Thread(target=work, name=name, daemon=True)
        self.threads[name].start()

    def wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for thread in self.threads.values():
            thread.join(max(0.0, until - time.monotonic()))

    @property
    def unanswered(self) -> list[str]:
        return [f"{name} gave no answer" for name in self.threads
                if self.answers.get(name) is None]  # fmt: skip

    @property
    def runs(self) -> list[JobRun]:
        return self.answers.get("sacct") or []

    @property
    def nodes(self) -> dict[str, NodeState]:
        return self.answers.get("scontrol show node") or {}

    @property
    def preempted(self) -> Optional[bool]:
        return self.answers.get("squeue")


def ask_slurm(
    scheduler: Optional[Scheduler], attempt: Optional[Attempt], *, run: Runner, timeout_s: float
) -> Optional[Asked]:
    """None where there is no Slurm to ask."""
    if scheduler is None or attempt is None or scheduler.name != "slurm":
        return None
    asked, limit_s = Asked(), min(timeout_s, TIMEOUT_S)
    job_id, nodes, slurm = attempt.job_id, attempt.nodes, scheduler
    asked.ask("sacct", lambda: read_runs(job_id, run=run, timeout_s=limit_s))
    asked.ask("scontrol show node", lambda: read_nodes(nodes, run=run, timeout_s=limit_s))
    asked.ask("squeue", lambda: slurm.is_preempted(job_id))
    return asked


def accounting_clues(
    asked: Asked,
    attempt: Attempt,
    following: Optional[Attempt],
    *,
    owner: Optional[int],
    steps: Collection[str] = (),
) -> tuple[list[Clue], Optional[int]]:
    """(clues, user id of who cancelled the job). `following`: the attempt after it, if any.
    `steps`: numbers of the ranks' job steps, where the launcher told; else those that ended in time
    (srun gives the raw job id, sacct that of the array task)."""
    job = run_of_attempt(asked.runs, attempt.restart_count, attempt.claimed_at)
    if job is None:
        return [], None
    file = f"sacct -D -j {attempt.job_id}"
    clues = [
        Clue(ACCOUNTING, f"step {step.step_id} {step.state} {_code(step.code, step.signal)}",
             step.end_at, file=file)
        for step in job.steps
        if step.state not in _GOES_ON and _is_the_ranks(step, attempt, following, steps)
    ]  # fmt: skip
    # The end of the job is that of its last attempt only.
    if job.state in _GOES_ON or (following is not None and _same_run(attempt, following)):
        return clues, None
    by = ""
    if job.cancelled_by is not None:
        whose = "the owner" if job.cancelled_by == owner else "uid"
        by = f" by {whose} {job.cancelled_by}"
    failed = f" FailedNode={job.failed_node}" if job.failed_node else ""
    waits = f" reason {job.reason}" if job.state == "PENDING" else ""
    text = f"job {job.job_id} {job.state}{by} {_code(job.code, job.signal)}{failed}{waits}"
    clues.append(Clue(ACCOUNTING, text, job.end_at, node=job.failed_node, file=file))
    return clues, job.cancelled_by


def node_state_clues(asked: Asked, attempt: Attempt) -> list[Clue]:
    clues = []
    for node, state in asked.nodes.items():
        # A reason that was there before was no reason not to start.
        is_old = state.reason_at is not None and state.reason_at < attempt.claimed_at - CLOCKS_S
        reason = f" reason {state.reason}" if state.reason and not is_old else ""
        clues.append(
            Clue(
                NODE_STATE,
                f"{node} {state.state}{reason}",
                state.reason_at,
                node=node,
                file=f"scontrol show node {node}",
            )
        )
    return clues


def _is_the_ranks(
    step: StepRow, attempt: Attempt, following: Optional[Attempt], steps: Collection[str]
) -> bool:
    number, end_at = step.step_id.rpartition(".")[2], step.end_at
    if steps or not number.isdigit():  # `batch`, `extern`
        return number in steps
    if end_at is None or end_at < attempt.claimed_at - CLOCKS_S:
        return False
    return following is None or end_at <= following.claimed_at + CLOCKS_S


def _same_run(attempt: Attempt, following: Attempt) -> bool:
    return (attempt.job_id, attempt.restart_count) == (following.job_id, following.restart_count)


def _code(code: Optional[int], number: Optional[int]) -> str:
    return "?" if code is None else f"{code}:{number}"
