"""What a scheduler can be asked, and the small values it answers with.

Two implementations: slurm.py (real commands) and local.py (one process tree). Whoever talks to a
scheduler needs only this module and `open_scheduler`. Nothing here runs a command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Protocol

from ftslurm.run.spec import ClusterSpec

LOGS = "@LOGS@"
"""Stands in an argv of `launch_ranks_argv` for the attempt's log folder, known only when the batch
script runs. The renderer replaces it by the shell variable of its template, inside quotes."""

UNKNOWN = "UNKNOWN"

# Slurm's words (job_state_string); flags win over base states there. What is in none of the sets is
# UNKNOWN here: a word that a newer Slurm invented must not read as an end.
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
                      "RESV_DEL_HOLD", "EXPEDITING"})  # fmt: skip
_RUNNING = frozenset({"RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING",
                      "STAGE_OUT", "POWER_UP_NODE"})  # fmt: skip
_ENDING = frozenset({"COMPLETING"})
_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
                    "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED",
                    "RECONFIG_FAIL"})  # fmt: skip
STATE_WORDS = _WAITING | _RUNNING | _ENDING | _ENDED


@dataclass(frozen=True)
class JobState:
    """Where a job stands: Slurm's word and its reason for waiting."""

    word: str
    """A word of STATE_WORDS, or UNKNOWN: no such job, no answer, or a word not known here."""
    reason: str = ""
    """Slurm's reason while waiting (`BeginTime`, `Resources`), or why the state is unknown."""

    @property
    def is_known(self) -> bool:
        return self.word != UNKNOWN

    @property
    def is_waiting(self) -> bool:
        return self.word in _WAITING

    @property
    def is_running(self) -> bool:
        return self.word in _RUNNING

    @property
    def is_ending(self) -> bool:
        """Being torn down; whether it is queued again afterwards cannot be told from the word."""
        return self.word in _ENDING

    @property
    def is_ended(self) -> bool:
        """Final unless somebody requeues it by hand. NODE_FAIL and PREEMPTED may be requeued by
        Slurm a moment later: ask twice before believing those two."""
        return self.word in _ENDED

    @property
    def is_held(self) -> bool:
        """Waits for a person: it will not start by itself."""
        return self.word in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD") or (
            self.is_waiting and (self.reason.startswith("JobHeld") or "held" in self.reason)
        )


@dataclass(frozen=True)
class Site:
    """What the site's settings mean for a run; frozen into run.json at submit."""

    scheduler: str
    version: str
    """As Slurm prints it, e.g. `22.05.8`; ftslurm's own for local."""
    kill_wait_s: int
    """Seconds from TERM to KILL."""
    job_requeue: bool
    """Jobs may be requeued without asking for it (JobRequeue=1)."""
    send_user_signal: bool
    """Preemption sends the job's own warn signal instead of TERM."""
    default_partition: Optional[str] = None
    grace_s: dict[str, int] = field(default_factory=dict)
    """Partition -> seconds between the preemption's signal and the kill."""
    preempt_mode: dict[str, str] = field(default_factory=dict)
    """Partition -> REQUEUE, CANCEL, OFF..."""
    max_time_s: dict[str, Optional[int]] = field(default_factory=dict)
    """Partition -> longest limit; None: unlimited."""
    requeue_exit: list[int] = field(default_factory=list)
    """Exit codes of the batch script after which Slurm requeues by itself."""
    requeue_exit_hold: list[int] = field(default_factory=list)
    """Exit codes of the batch script after which Slurm requeues and holds."""
    findings: list[str] = field(default_factory=list)
    """Sentences about settings that work against a run here, for the person who submits."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Site:
        """Unknown keys are ignored: a newer writer is readable."""
        names = {item.name for item in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in record.items() if key in names})


class Scheduler(Protocol):
    """The one way to a scheduler. `job_id` is what `own_job_id` gives: `123`, or `70_1`."""

    @property
    def name(self) -> str: ...

    def site(self) -> Site:
        """Read the site's settings; SchedulerError when the scheduler does not answer."""

    def controller_alive(self) -> bool:
        """Quickly: True when commands would be answered now."""

    def own_job_id(self, environ: Mapping[str, str]) -> str:
        """The id by which to name the job we run in, array task included."""

    def nodes(self, environ: Mapping[str, str]) -> list[str]:
        """Names of the nodes of the job we run in, first the one that hosts rank 0."""

    def master_address(self, nodes: list[str]) -> str:
        """Where the other ranks reach rank 0."""

    def launch_ranks_argv(self, cluster: ClusterSpec, *, python: str) -> list[str]:
        """argv that starts all ranks and ends when the last has; the rank command is appended.

        One item contains LOGS, the log folder of the attempt.
        """

    def job_state(self, job_id: str) -> JobState: ...

    def end_time(self, job_id: str) -> Optional[float]:
        """UTC seconds at which the job will be ended; moves earlier when grace starts."""

    def signal_ranks(self, job_id: str, signal_name: str) -> None:
        """Send e.g. `USR1` to the ranks, not to the batch shell."""

    def requeue(
        self,
        job_id: str,
        *,
        restart_count: Optional[int] = None,
        give_up: Callable[[], bool] = ...,
    ) -> bool:
        """Queue the job again under its id. True: accepted, or already so. False: the job is ending
        or has ended for good (e.g. somebody cancelled it). Tries on while the controller is away,
        until `give_up()`. SchedulerError: refused for good.

        `restart_count`: of the start that asks, when the job itself asks. A job that is being torn
        down does not show otherwise whether it comes back.
        """

    def hasten(self, job_id: str) -> bool:
        """Shorten the wait of a requeued job where its owner may; True when something was done."""

    def cancel(self, job_id: str) -> None: ...
