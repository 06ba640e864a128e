"""What a scheduler can be asked, and the small values it answers with.

Two implementations: slurm.py (real commands) and local.py (one process tree). Whoever talks to a
scheduler needs only this module and `open_scheduler`. Nothing here runs a command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional, Protocol

from ftslurm.errors import SchedulerError

UNKNOWN = "UNKNOWN"

CLOCKS_S = 5.0
"""How far the clocks of a node and of slurmctld may be apart."""

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
# What squeue says of a job that is over for longer than MinJobAge (an error, or an empty list).
_FORGOTTEN = ("Invalid job id", "no such job")
STATE_WORDS = _WAITING | _RUNNING | _ENDING | _ENDED


class CommandMissing(SchedulerError):
    """A command of the scheduler is not on this machine, or may not be run by this user."""


class RequeueImpossible(SchedulerError):
    """No job can be queued again from here: not this one (--no-requeue, or a site that takes the
    flag away), or none at all (no scontrol on the node)."""


DOUBTFUL = ("NODE_FAIL", "PREEMPTED")
"""Words of a job that Slurm may queue again a moment after it has called it so: ask twice."""
SECOND_LOOK_S = 5.0


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
    def is_forgotten(self) -> bool:
        """The scheduler has answered and knows no such job: it ended long enough ago."""
        return not self.is_known and any(words in self.reason for words in _FORGOTTEN)

    @property
    def is_over(self) -> bool:
        """As far as the scheduler can tell; it may come back from a word in DOUBTFUL."""
        return self.is_ended or self.is_forgotten

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
class Terms:
    """On which a job runs, as a scheduler says them now. None: nobody can say just now."""

    may_requeue: Optional[bool] = None
    """Whether the scheduler would queue the job again, by itself or when asked."""
    end_at: Optional[float] = None
    """UTC seconds at which the job will be ended; None also where it has no limit."""

    @property
    def are_known(self) -> bool:
        """The scheduler has answered."""
        return self.may_requeue is not None


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits."""

    job_id: str
    dependency: str
    """What it still waits for, in Slurm's words; empty: nothing."""

    def waits_for(self, job_id: str) -> bool:
        """Whether it was queued to follow that job: `afterany:4(unfulfilled)`."""
        parts = self.dependency.replace("(", ":").replace(",", ":").split(":")
        return "afterany" in parts and job_id in parts


@dataclass(frozen=True)
class NodeNeed:
    """What a job asks of each of its nodes."""

    features: str = ""
    """As sbatch --constraint takes them."""
    gpus: int = 0
    memory: str = ""
    """As sbatch --mem takes it."""


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
    preempt_by_qos: bool = False
    """A job's QOS says how it makes room, and its partition nothing (preempt/qos)."""
    qos_grace_s: dict[str, int] = field(default_factory=dict)
    qos_preempt_mode: dict[str, str] = field(default_factory=dict)
    """The same by QOS; empty where they do not count, or accounting does not tell."""
    default_qos: dict[str, str] = field(default_factory=dict)
    """Account -> QOS of the user's jobs that name none; under an empty name of those that name no
    account either. As far as it is told."""
    max_time_s: dict[str, Optional[int]] = field(default_factory=dict)
    """Partition -> longest limit; None: unlimited."""
    expedited_requeue: bool = False
    """`--requeue=expedite` is understood: such a job starts again at once, not after 2 minutes."""
    requeue_exit: list[int] = field(default_factory=list)
    """Exit codes of the batch script after which Slurm requeues by itself."""
    requeue_exit_hold: list[int] = field(default_factory=list)
    """Exit codes of the batch script after which Slurm requeues and holds."""
    cluster: str = ""
    """Its name (ClusterName); empty: not told."""
    array_size: Optional[int] = None
    """MaxArraySize, one above the highest index of a task in an array; None: not told."""
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

    def job_state(self, job_id: str) -> JobState: ...

    def job_states(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Of each of them, asked all at once: tasks of an array by their `70_1`."""

    def end_time(self, job_id: str) -> Optional[float]:
        """UTC seconds at which the job will be ended; moves earlier when grace starts."""

    def signal_ranks(self, job_id: str, signal_name: str) -> None:
        """Send e.g. `USR1` to the ranks, not to the batch shell."""

    def requeue(
        self,
        job_id: str,
        *,
        restart_count: Optional[int] = None,
        hold: bool = False,
        give_up: Callable[[], bool] = ...,
    ) -> bool:
        """Queue the job again under its id. True: accepted, or already so. False: the job is ending
        or has ended for good (e.g. somebody cancelled it). Tries on while the controller is away,
        until `give_up()`. SchedulerError: refused for good; RequeueImpossible, a kind of it: no job
        of this user can be queued again from here.

        `restart_count`: of the start that asks, when the job itself asks. A job that is being torn
        down does not show otherwise whether it comes back.
        `hold`: the job then waits until `release`.
        """

    def hold(self, job_id: str) -> None:
        """Keep a waiting job from starting until `release`. SchedulerError: refused, not waiting,
        or no answer."""

    def release(self, job_id: str) -> None:
        """Let a held job start. SchedulerError: refused (a job that Slurm itself has held is an
        operator's to release), or no answer."""

    def terms(self, environ: Mapping[str, str]) -> Terms:
        """Of the job we run in, in one question; nothing in them where there is no answer."""

    def may_requeue(self, job_id: str) -> Optional[bool]:
        """Whether the scheduler would queue this job again, by itself or when asked; None: nobody
        can say just now."""

    def forbid_requeue(self, job_id: str) -> None:
        """Make the job's end final, whatever its script's exit code."""

    def is_preempted(self, job_id: str) -> Optional[bool]:
        """Whether the job is in its grace time, or was ended to make room; None: nobody can say."""

    def was_cancelled(self, job_id: str) -> Optional[bool]:
        """Whether somebody has cancelled the job, told also while it is being torn down and after
        the scheduler has forgotten it; None: nobody can say."""

    def end_word(self, job_id: str) -> Optional[str]:
        """The scheduler's word for how the job has ended, e.g. TIMEOUT; None: it has not, or nobody
        can say."""

    def waiting(self, script: Path) -> list[QueuedJob]:
        """The waiting jobs of this user that were given this batch script."""

    def serving_nodes(self, partition: Optional[str], need: NodeNeed) -> Optional[list[str]]:
        """The nodes of a partition that could serve a job, now or when other jobs have ended: up,
        not drained, with what it needs; None: nobody can say just now."""

    def all_nodes(self) -> Optional[list[str]]:
        """The nodes that there are, in whatever state; None: nobody can say just now."""

    def excluded_nodes(self, job_id: str) -> list[str]:
        """Nodes that a job is kept off; SchedulerError when nobody can say."""

    def exclude_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        """Keep a job off these nodes and no others, the earlier list is gone. SchedulerError: not
        done; it can be only before the job starts, from the moment of its requeue on."""

    def hasten(self, job_id: str) -> bool:
        """Shorten the wait of a requeued job where its owner may; True when something was done."""

    def cancel(self, job_id: str) -> None: ...

    def cancel_all(self, job_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Cancel jobs at once: whole arrays by their number, single jobs by theirs. SchedulerError:
        some may be left; a job that has ended meanwhile is enough for that."""
