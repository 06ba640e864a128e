"""The scheduler of a machine without Slurm: one job, its batch script as one process tree.

`run_batch` is the job: it runs the same script as Slurm would, requeues it under the same id and
ends it at its time limit. `LocalScheduler` asks and commands it from any other process, through the
files of local_state.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional

from ftslurm import __version__
from ftslurm.errors import SchedulerError
from ftslurm.parent import die_with_parent
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import parse_time_s
from ftslurm.scheduler import local_state
from ftslurm.scheduler.launch import KILL_WAIT_S
from ftslurm.scheduler.local_state import CANCEL, HOLD, REQUEUE, LocalJob, read_job, write_job
from ftslurm.scheduler.process import ProcessName
from ftslurm.scheduler.protocol import UNKNOWN, JobState, NodeNeed, QueuedJob, Site, Terms

REQUEUE_DELAY_S = 1.0
_TICK_S = 0.1

HELD = "JobHeldUser"
"""Slurm's reason of a job that its owner holds."""


class LocalScheduler:
    name = "local"

    def __init__(self, run_dir: Optional[Path] = None) -> None:
        self._run_dir = run_dir

    def site(self) -> Site:
        return Site(
            scheduler="local",
            version=__version__,
            kill_wait_s=KILL_WAIT_S,
            job_requeue=True,
            send_user_signal=True,
        )

    def controller_alive(self) -> bool:
        return True

    def own_job_id(self, environ: Mapping[str, str]) -> str:
        if "SLURM_JOB_ID" not in environ:
            raise SchedulerError("SLURM_JOB_ID is not set; this runs inside a batch script only")
        return environ["SLURM_JOB_ID"]

    def nodes(self, environ: Mapping[str, str]) -> list[str]:
        return [environ.get("SLURM_JOB_NODELIST") or socket.gethostname()]

    def master_address(self, nodes: list[str]) -> str:
        return "127.0.0.1"  # the machine's own name need not resolve

    def job_state(self, job_id: str) -> JobState:
        job = self._job(job_id)
        if job is None:
            return JobState(UNKNOWN, "the job has not begun")
        if not JobState(job.word).is_ended and not job.runner.is_alive:
            job = self._job(job_id) or job  # it may have written its last word since
            if not JobState(job.word).is_ended:
                return JobState(
                    "FAILED", f"the process that ran the script (pid {job.runner_pid}) died"
                )
        return JobState(job.word, job.reason)

    def job_states(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        return {job_id: self.job_state(job_id) for job_id in job_ids}

    def end_time(self, job_id: str) -> Optional[float]:
        job = self._job(job_id)
        return job.ends_at if job else None

    def signal_ranks(self, job_id: str, signal_name: str) -> None:
        number = signal.Signals[f"SIG{signal_name}"]
        if self._job(job_id) is None or not local_state.signal_ranks(self._layout(), number):
            raise SchedulerError(f"job {job_id} has no ranks running to send {signal_name} to")

    def requeue(
        self,
        job_id: str,
        *,
        restart_count: Optional[int] = None,
        hold: bool = False,
        give_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        job, state = self._job(job_id), self.job_state(job_id)
        if job is None:
            raise SchedulerError(f"there is no local job {job_id}; its run was not started here")
        if state.is_waiting or (state.is_ending and job.reason == REQUEUE):
            return True
        if not state.is_running:
            return False
        if hold:
            local_state.write_request(self._layout(), HOLD, job)
        local_state.write_request(self._layout(), REQUEUE, job)
        return True

    def hold(self, job_id: str) -> None:
        job, state = self._job(job_id), self.job_state(job_id)
        if job is None or not state.is_waiting:
            raise SchedulerError(f"job {job_id} is {state.word}; only a waiting job can be held")
        local_state.write_request(self._layout(), HOLD, job)

    def release(self, job_id: str) -> None:
        if not self.job_state(job_id).is_waiting:
            raise SchedulerError(f"job {job_id} does not wait, it cannot be released")
        local_state.take_back(self._layout(), HOLD)

    def terms(self, environ: Mapping[str, str]) -> Terms:
        return Terms(may_requeue=True, end_at=self.end_time(self.own_job_id(environ)))

    def may_requeue(self, job_id: str) -> Optional[bool]:
        return True

    def forbid_requeue(self, job_id: str) -> None:
        """A job here is queued again only when it asks."""

    def is_preempted(self, job_id: str) -> Optional[bool]:
        return False

    def was_cancelled(self, job_id: str) -> Optional[bool]:
        job, state = self._job(job_id), self.job_state(job_id)
        return None if job is None else "CANCELLED" in (state.word, job.reason)

    def end_word(self, job_id: str) -> Optional[str]:
        state = self.job_state(job_id)
        return state.word if state.is_ended else None

    def waiting(self, script: Path) -> list[QueuedJob]:
        return []  # a run's one job here has no successor

    def serving_nodes(self, partition: Optional[str], need: NodeNeed) -> Optional[list[str]]:
        return None

    def all_nodes(self) -> Optional[list[str]]:
        return None

    def excluded_nodes(self, job_id: str) -> list[str]:
        return []

    def exclude_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        raise SchedulerError("a job on this machine has no other node to run on")

    def hasten(self, job_id: str) -> bool:
        return False

    def cancel(self, job_id: str) -> None:
        job = self._job(job_id)
        if job is not None:
            local_state.write_request(self._layout(), CANCEL, job)

    def cancel_all(self, job_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        for job_id in job_ids:
            if not only_waiting or self.job_state(job_id).is_waiting:
                self.cancel(job_id)

    def _layout(self) -> RunLayout:
        if self._run_dir is None:
            raise SchedulerError("a local job is known by its run directory; name it")
        return RunLayout(self._run_dir)

    def _job(self, job_id: str) -> Optional[LocalJob]:
        job = read_job(self._layout())
        return job if job is not None and job.job_id == job_id else None


def run_batch(
    run_dir: Path,
    *,
    job_id: Optional[str] = None,
    kill_wait_s: float = KILL_WAIT_S,
    requeue_delay_s: float = REQUEUE_DELAY_S,
) -> int:
    """Be the job of `run_dir`: run its script until it ends for good; the script's last code."""
    layout = RunLayout(run_dir)
    runner = ProcessName.of(os.getpid())
    assert runner is not None
    job = LocalJob(
        job_id=job_id or f"local-{runner.pid}",
        word="PENDING",
        restart_count=0,
        runner_pid=runner.pid,
        runner_started=runner.started,
    )
    batch = _Batch(layout, job, kill_wait_s)
    with batch.cancelled_by_signals():
        while batch.run_once() and batch.wait_for_restart(requeue_delay_s):
            pass
    assert batch.job.rc is not None
    return batch.job.rc


class _Batch:
    """The script's runs, one after the other."""

    def __init__(self, layout: RunLayout, job: LocalJob, kill_wait_s: float) -> None:
        spec = read_record(layout).spec
        self.job = job
        self._layout = layout
        self._kill_wait_s = kill_wait_s
        self._limit_s = parse_time_s(spec.cluster.time)
        self._lead_s = spec.cluster.signal_lead_s
        self._warn_signal = signal.Signals[f"SIG{spec.cluster.signal}"]
        self._cancelled = False

    @contextlib.contextmanager
    def cancelled_by_signals(self) -> Iterator[None]:
        """TERM or INT to this process cancels the job; the warn signals are for ranks only."""

        def cancel(number: int, frame: object) -> None:
            self._cancelled = True

        handlers = {signal.SIGTERM: cancel, signal.SIGINT: cancel}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            before[number] = signal.signal(number, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run_once(self) -> bool:
        """Run the script once; True when it is to run again."""
        now = time.time()
        self._become(
            replace(
                self.job,
                word="RUNNING",
                reason="",
                started_at=now,
                ends_at=now + self._limit_s,
                rc=None,
            )
        )
        script = subprocess.Popen(
            ["bash", str(self._layout.script)],
            stdin=subprocess.DEVNULL,
            cwd=self._layout.root,
            env=self._environment(),
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        ending = self._watch(script, time.monotonic() + self._limit_s)
        _end_group(script.pid, self._kill_wait_s)
        rc = script.returncode if script.returncode >= 0 else 128 - script.returncode
        self.job = replace(self.job, rc=rc)
        if ending == REQUEUE:
            return True
        self._end(ending or ("COMPLETED" if rc == 0 else "FAILED"))
        return False

    def wait_for_restart(self, delay_s: float) -> bool:
        """False when the job was cancelled while it waited."""
        reason = HELD if self._is_held() else "BeginTime"
        self._become(replace(self.job, word="PENDING", reason=reason, ends_at=None))
        time.sleep(delay_s)
        while self._is_held() and not self._is_cancelled():
            if self.job.reason != HELD:
                self._become(replace(self.job, reason=HELD))
            time.sleep(_TICK_S)
        if self._is_cancelled():
            self._end("CANCELLED")
            return False
        self.job = replace(self.job, restart_count=self.job.restart_count + 1)
        return True

    def _watch(self, script: subprocess.Popen[bytes], limit_at: float) -> Optional[str]:
        """Wait for the script's end, ending it where due; what the end means, None: its own."""
        warn_at: Optional[float] = limit_at - self._lead_s
        ending: Optional[str] = None
        kill_at = float("inf")
        while not _ended(script):
            wanted = self._wanted_end(limit_at, ending)
            if wanted != ending:
                if ending is None:
                    _signal_group(script.pid, signal.SIGTERM)
                    kill_at = time.monotonic() + self._kill_wait_s
                ending = wanted
                self._become(replace(self.job, word="COMPLETING", reason=ending or ""))
            if time.monotonic() >= kill_at:
                _signal_group(script.pid, signal.SIGKILL)
            elif warn_at is not None and time.monotonic() >= warn_at and ending is None:
                # Kept when there is nobody to hear it: between two attempts.
                heard = local_state.signal_ranks(self._layout, self._warn_signal)
                warn_at = None if heard else warn_at
        # Asked for by the script itself a moment before it left.
        return self._wanted_end(limit_at=float("inf"), ending=ending)

    def _wanted_end(self, limit_at: float, ending: Optional[str]) -> Optional[str]:
        if self._is_cancelled():
            return "CANCELLED"
        if ending is not None:
            return ending
        if local_state.is_requested(self._layout, REQUEUE, self.job):
            return REQUEUE
        return "TIMEOUT" if time.monotonic() >= limit_at else None

    def _is_cancelled(self) -> bool:
        return self._cancelled or local_state.is_requested(self._layout, CANCEL, self.job)

    def _is_held(self) -> bool:
        return local_state.is_requested(self._layout, HOLD, self.job)

    def _end(self, word: str) -> None:
        self._become(replace(self.job, word=word, reason="", ends_at=time.time()))

    def _become(self, job: LocalJob) -> None:
        self.job = job
        write_job(self._layout, job)

    def _environment(self) -> dict[str, str]:
        # submitit started this process as a task of its own; its variables would reach the ranks.
        foreign = ("SLURM_", "SUBMITIT_", "SBATCH_", "SRUN_")
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(foreign)
        }
        environ["SLURM_JOB_ID"] = self.job.job_id
        environ["SLURM_JOB_NODELIST"] = socket.gethostname()
        if self.job.restart_count:  # unset on the first run, as Slurm does it
            environ["SLURM_RESTART_COUNT"] = str(self.job.restart_count)
        return environ


def _ended(script: subprocess.Popen[bytes]) -> bool:
    """Wait a tick for the end."""
    try:
        script.wait(_TICK_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_group(group: int, number: int) -> bool:
    """False when nobody is left in the process group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _end_group(group: int, kill_wait_s: float) -> None:
    """What the script left running does not outlive it (Slurm's end of a job)."""
    if not _signal_group(group, signal.SIGTERM):
        return
    deadline = time.monotonic() + kill_wait_s
    while _signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    _signal_group(group, signal.SIGKILL)
