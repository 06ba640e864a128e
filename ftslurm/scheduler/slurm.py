"""Slurm: the only code that runs scontrol, squeue, scancel and sacct.

Commands are argv lists with a deadline, in an environment in which no SQUEUE_*, SINFO_* or time
format of the user changes what they print. Nothing here decides; nothing polls but `requeue`, which
waits for a controller that is away.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.job_id import id_alone, own_job_id
from ftslurm.scheduler.protocol import (
    UNKNOWN,
    CommandMissing,
    JobState,
    NodeNeed,
    QueuedJob,
    RequeueImpossible,
    Site,
    Terms,
)
from ftslurm.scheduler.slurm_parse import (
    JOB_FORMAT,
    JOBS_FORMAT,
    NODE_FORMAT,
    QUEUED_FORMAT,
    TERMS_FORMAT,
    parse_config,
    parse_end_time,
    parse_job,
    parse_jobs,
    parse_queued,
    parse_serving,
    parse_site,
    parse_terms,
)

TIMEOUT_S = 60.0
"""Above the 18 s for which squeue blocks while slurmctld is away (22.05, 24.11; 20 s on 26.05)."""

PING_TIMEOUT_S = 10.0

HASTEN_S = 4
"""StartTime=now destroyed jobs placed on the same node in the same second; now+4 never did."""

SHOW_PARTITIONS = ["scontrol", "--oneliner", "--all", "show", "partition"]
"""--all: those too that are hidden from this user, who may submit to them all the same."""

# What the controller says when asking again cannot help. Matched in lower case.
_REFUSALS = (
    "invalid job id",
    "access/permission denied",
    "job is not batch",
    "only batch jobs are accepted",
)

# What it says of a job with Requeue=0 (22.05 to 26.05, seen).
_NEVER_AGAIN = (
    "requested operation is presently disabled",
    "requested operation not supported",
)

# The user's own defaults for these commands would change the fields, order or filter of the output,
# or ask another cluster than the one that sbatch.py submits to: there a job of ours is unknown.
_FOREIGN = ("SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_", "SACCT_", "SLURM_CLUSTERS")


@dataclass(frozen=True)
class Completed:
    """What a command left."""

    rc: int
    """Exit code; 128 + N for death by signal N, as a shell counts."""
    stdout: str
    stderr: str


class CommandHangs(SchedulerError):
    """A Slurm command gave no answer within its deadline."""


Runner = Callable[[list[str], float], Completed]
"""(argv, timeout in seconds) -> Completed; SchedulerError when it cannot be run."""


def clean_environment() -> dict[str, str]:
    """Ours, less what would change what Slurm's commands print."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    # By themselves they cut lists of tasks after 64 characters (22.05: seen), and tell times in
    # local time, of which an hour comes twice a year; all of them take any format of strftime
    # (22.05, 24.11, 26.05: seen).
    return {**environ, "LC_ALL": "C", "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "%s"}


def run_command(argv: list[str], timeout_s: float) -> Completed:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env=clean_environment(),
            check=False,
            text=True,
            errors="replace",
        )
    except (FileNotFoundError, PermissionError):
        raise CommandMissing(
            f"`{argv[0]}` is not on PATH; run on a machine with Slurm, or choose cluster=local"
        ) from None
    except subprocess.TimeoutExpired:
        raise CommandHangs(f"`{' '.join(argv)}` gave no answer for {timeout_s:g} s") from None
    rc = 128 - done.returncode if done.returncode < 0 else done.returncode
    return Completed(rc, done.stdout, done.stderr)


class SlurmScheduler:
    name = "slurm"

    def __init__(
        self,
        run: Runner = run_command,
        *,
        sleep: Callable[[float], None] = time.sleep,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._run = run
        self._sleep = sleep
        self._environ = environ

    def site(self) -> Site:
        told = self._checked(["scontrol", "show", "config"])
        site = parse_site(told, self._checked(SHOW_PARTITIONS))
        if not site.preempt_by_qos:
            return site
        from ftslurm.scheduler.settings import with_qos  # late: few sites preempt so

        return with_qos(site, parse_config(told), run=self._run)

    def controller_alive(self) -> bool:
        # The one command that does not block for 9 s or more while the controller is away.
        try:
            return self._run(["scontrol", "ping"], PING_TIMEOUT_S).rc == 0
        except CommandMissing:
            return self._run(["squeue", "--noheader", "--me"], TIMEOUT_S).rc == 0
        except CommandHangs:
            return False

    def own_job_id(self, environ: Mapping[str, str]) -> str:
        return own_job_id(environ)

    def nodes(self, environ: Mapping[str, str]) -> list[str]:
        if "SLURM_JOB_NODELIST" not in environ:
            raise SchedulerError("SLURM_JOB_NODELIST is not set; this runs inside a Slurm job only")
        return expand(environ["SLURM_JOB_NODELIST"])

    def master_address(self, nodes: list[str]) -> str:
        return nodes[0]

    def job_state(self, job_id: str) -> JobState:
        try:
            done = self._squeue(job_id)
        except SchedulerError as error:
            return JobState(UNKNOWN, str(error))
        if done.rc != 0:
            return JobState(UNKNOWN, _last_line(done))
        return parse_job(done.stdout)

    def job_states(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        if not job_ids:
            return {}
        # An array by its number, which has squeue tell of all its tasks; --array has it do so one
        # by one for those that wait too, --all in partitions that are hidden from this user.
        numbers = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
        argv = ["squeue", "--noheader", "--all", "--array", "--states=all"]
        argv += [f"--jobs={','.join(numbers)}", f"--format={JOBS_FORMAT}"]
        try:
            done = self._run(argv, TIMEOUT_S)
        except SchedulerError as error:
            return dict.fromkeys(job_ids, JobState(UNKNOWN, str(error)))
        if done.rc != 0:
            return dict.fromkeys(job_ids, JobState(UNKNOWN, _last_line(done)))
        return parse_jobs(done.stdout, job_ids)

    def end_time(self, job_id: str) -> Optional[float]:
        done = self._squeue(job_id)
        return parse_end_time(done.stdout) if done.rc == 0 else None

    def signal_ranks(self, job_id: str, signal_name: str) -> None:
        # Without --batch and --full it goes to the steps only, never to the batch shell.
        self._checked(["scancel", f"--signal={signal_name}", job_id])

    def requeue(
        self,
        job_id: str,
        *,
        restart_count: Optional[int] = None,
        hold: bool = False,
        give_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        pause_s = 0.5
        while True:
            accepted = self._try_requeue(job_id, restart_count, hold)
            if accepted is not None:
                return accepted
            if give_up():
                raise SchedulerError(
                    f"job {job_id} could not be requeued; slurmctld does not answer"
                )
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)

    def _try_requeue(self, job_id: str, restart_count: Optional[int], hold: bool) -> Optional[bool]:
        """True accepted, False ended, None ask again."""
        verb = "requeuehold" if hold else "requeue"
        try:
            # Asked first: it answers at once where requeue blocks for 9 s and then says nothing of
            # a connection (`Unexpected message received`).
            if not self.controller_alive():
                return None
            # `Incomplete` leaves a job alone that has ended or that somebody cancelled.
            done = self._run(["scontrol", verb, "Incomplete", job_id], TIMEOUT_S)
        except CommandHangs:
            return None
        except CommandMissing as error:
            raise RequeueImpossible(str(error)) from None
        # The code says little: 0 also for a job left alone because it has ended, 143 when scontrol
        # died of the TERM that the accepted requeue sends to its caller.
        state = self.job_state(job_id)
        text = done.stderr.lower()
        if any(refusal in text for refusal in _NEVER_AGAIN):
            raise RequeueImpossible(f"Slurm never requeues job {job_id}: {_last_line(done)}")
        if state.is_ended:
            return False
        if state.is_ending and restart_count is not None:
            restarts = self._restarts(job_id)
            if restarts is not None:
                return restarts > restart_count
        if done.rc == 0 or state.is_waiting or state.is_ending:
            return True
        if any(refusal in text for refusal in _REFUSALS):
            raise SchedulerError(f"Slurm refuses to requeue job {job_id}: {_last_line(done)}")
        return None

    def hold(self, job_id: str) -> None:
        # Slurm takes a hold of a running job too, and obeys it when the job is requeued.
        state = self.job_state(job_id)
        if not state.is_waiting:
            raise SchedulerError(f"job {job_id} is {state.word}; only a waiting job can be held")
        self._checked(["scontrol", "hold", job_id])

    def release(self, job_id: str) -> None:
        self._checked(["scontrol", "release", job_id])

    def terms(self, environ: Mapping[str, str]) -> Terms:
        return self._terms(own_job_id(environ))

    def _terms(self, job_id: str) -> Terms:
        # No ranks run while this is asked: one that is busy is waited for, one that is away is not.
        terms = parse_terms(self._field(job_id, TERMS_FORMAT, PING_TIMEOUT_S))
        with contextlib.suppress(SchedulerError):
            if not terms.are_known and self.controller_alive():
                terms = parse_terms(self._field(job_id, TERMS_FORMAT))
        return terms

    def may_requeue(self, job_id: str) -> Optional[bool]:
        return self._terms(job_id).may_requeue

    def forbid_requeue(self, job_id: str) -> None:
        self._checked(["scontrol", "update", f"jobid={job_id}", "Requeue=0"])

    def is_preempted(self, job_id: str) -> Optional[bool]:
        # Set from the start of grace on; N/A again when the job is started again (seen).
        at = self._field(job_id, "PreemptTime")
        return at != "N/A" if at else None

    def was_cancelled(self, job_id: str) -> Optional[bool]:
        state = self.job_state(job_id)
        if state.is_known and not (state.is_ended or state.is_ending):
            return False
        word = self._end_word(job_id, state)
        return None if word is None else word == "CANCELLED"

    def end_word(self, job_id: str) -> Optional[str]:
        return self._end_word(job_id, self.job_state(job_id))

    def waiting(self, script: Path) -> list[QueuedJob]:
        # The script's path tells the jobs of a run apart; their names need not. Without --all, jobs
        # in hidden partitions are left out, where they are not asked for by number (22.05, seen).
        argv = ["squeue", "--noheader", "--me", "--all", "--states=PENDING"]
        return parse_queued(self._checked([*argv, f"--format={QUEUED_FORMAT}"]), str(script))

    def serving_nodes(self, partition: Optional[str], need: NodeNeed) -> Optional[list[str]]:
        argv = ["sinfo", "--noheader", "--Node", f"--format={NODE_FORMAT}"]
        try:
            if not self.controller_alive():
                return None
            shown = self._checked([*argv, *([f"--partition={partition}"] if partition else [])])
        except SchedulerError:
            return None
        return parse_serving(shown, need)

    def all_nodes(self) -> Optional[list[str]]:
        # --all: those of partitions that are hidden from this user too.
        argv = ["sinfo", "--noheader", "--all", "--Node", "--format=%N"]
        try:
            if not self.controller_alive():
                return None
            return sorted(set(self._checked(argv).split())) or None
        except SchedulerError:
            return None

    def excluded_nodes(self, job_id: str) -> list[str]:
        done = self._squeue(job_id, "--format=%x")
        if done.rc != 0:
            raise SchedulerError(f"squeue says nothing of job {job_id}: {_last_line(done)}")
        text = done.stdout.strip()
        return [] if text in ("", "(null)") else expand(text)

    def exclude_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        # Its StartTime stays as it is (seen); `+=` is refused.
        self._checked(["scontrol", "update", f"jobid={job_id}", f"ExcNodeList={','.join(nodes)}"])

    def hasten(self, job_id: str) -> bool:
        state = self.job_state(job_id)
        if state.word != "PENDING" or state.reason != "BeginTime":
            return False
        argv = ["scontrol", "update", f"jobid={job_id}", f"StartTime=now+{HASTEN_S}"]
        return self._run(argv, TIMEOUT_S).rc == 0

    def cancel(self, job_id: str) -> None:
        self._checked(["scancel", job_id])

    def cancel_all(self, job_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        if job_ids:
            states = ["--state=PENDING"] if only_waiting else []
            self._checked(["scancel", *states, *job_ids])

    def _end_word(self, job_id: str, state: JobState) -> Optional[str]:
        if state.is_ended:
            return state.word
        if state.is_known and not state.is_ending:
            return None
        # squeue says COMPLETING whatever is to come, and nothing of a job that ended long ago;
        # accounting is told how a job ends when its end begins (seen: `CANCELLED by 1007`).
        argv = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}"]
        try:
            done = self._run([*argv, "--format=State"], TIMEOUT_S)
        except SchedulerError:
            return None
        word = (done.stdout.split() or [""])[0]
        return None if done.rc or word in ("", "PENDING", "RUNNING") else word

    def _restarts(self, job_id: str) -> Optional[int]:
        """How often the job has been queued again: raised by the requeue itself, not by the start
        that follows; None when that cannot be had."""
        text = self._field(job_id, "RestartCnt")
        return int(text) if text.isdigit() else None

    def _field(self, job_id: str, name: str, timeout_s: float = TIMEOUT_S) -> str:
        """One field of squeue's, or some of them; empty when they cannot be had."""
        try:
            done = self._squeue(job_id, f"--Format={name}", timeout_s)
        except SchedulerError:
            return ""
        return done.stdout.strip() if done.rc == 0 else ""

    def _squeue(
        self, job_id: str, form: str = f"--format={JOB_FORMAT}", timeout_s: float = TIMEOUT_S
    ) -> Completed:
        named = id_alone(job_id, self._environ)
        argv = ["squeue", "--noheader", "--states=all", f"--jobs={named}", form]
        return self._run(argv, timeout_s)

    def _checked(self, argv: list[str]) -> str:
        return checked(self._run, argv, TIMEOUT_S)


def checked(run: Runner, argv: list[str], timeout_s: float) -> str:
    """What it printed; SchedulerError with its own last words where it fails."""
    done = run(argv, timeout_s)
    if done.rc != 0:
        raise SchedulerError(f"`{' '.join(argv)}` failed with code {done.rc}: {_last_line(done)}")
    return done.stdout


def _last_line(done: Completed) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1].strip() if lines else "it printed nothing"
