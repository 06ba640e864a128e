"""`ftslurm resume RUN`: a run that was stopped, paused or cancelled, or that has ended, goes on.

There is never a second job beside one that is alive: a held job is released, and only when the
scheduler says that no job of the run is left is the run's own frozen command run again. Where
nobody can say, nothing is done. Orders to stop or pause are withdrawn; one that the ranks are
obeying already is waited for. `--readmit` forgives nodes what was held against them, and does so
for a run that is alive too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

from ftslurm.errors import FormatError, RunError, SchedulerError, UsageError
from ftslurm.files import is_listed
from ftslurm.operate.answer import Answer, add_json, finish, finish_sweep, parser, tell
from ftslurm.operate.standing import (
    OpenRun,
    Standing,
    elsewhere,
    open_run,
    require_own_jobs,
    sweep_elsewhere,
)
from ftslurm.program.ending import ASKED
from ftslurm.recovery.job_meant import has_stopped
from ftslurm.recovery.keep_out import (
    keep_out_of_waiting,
    known_exclusions,
    readmit_nodes,
    settle_exclusions,
)
from ftslurm.recovery.own_job import OwnJob
from ftslurm.recovery.successor import KEEP_OUT_S, reason_to_leave
from ftslurm.run.attempts import read_attempt, read_events
from ftslurm.run.control import LEAVING
from ftslurm.run.jobs import BY_PERSON, Job, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout, find_sweep
from ftslurm.run.sweep_lock import queueing
from ftslurm.run.sweep_record import read_tasks
from ftslurm.run.trust import require_own
from ftslurm.scheduler.again import named_by_script, place_at_submit, submit_again
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.lost_arrays import find_lost, still_open
from ftslurm.sweep.queue import queue_alone

ENDING_S = 90.0
"""How long a job that is being torn down is waited for: KillWait and all epilogs."""
OBEYING_S = 600.0
"""How long an order that is being obeyed is waited for: a save and what follows it."""
POLL_S = 2.0
HASTEN_S = 10.0
HASTEN_POLL_S = 0.5

_EPILOG = """examples:
  ftslurm resume runs/gpt-20260301-120000-3f9a
  ftslurm resume runs/gpt-20260301-120000-3f9a --json
  ftslurm resume runs/gpt-20260301-120000-3f9a --readmit 'n[17-18]'
  ftslurm resume runs/SWEEP                      all tasks that are not done and not alive

The run goes on from its newest verified checkpoint, with its code and configuration as frozen.
results: queued (a new job) | released | waiting (it is queued already) | running."""


def main(argv: Optional[list[str]] = None) -> int:
    description = "Let a stopped, paused, cancelled or failed run go on."
    made = parser("resume", description, _EPILOG, of_sweeps=True)
    made.add_argument(
        "--readmit",
        metavar="NODES",
        help="use these nodes again, which the run keeps off, from its next attempt on",
    )
    add_json(made)
    options = made.parse_args(argv)
    sweep = find_sweep(options.run)
    if sweep is not None:
        return _resume_sweep(sweep, options)
    run = open_run(options.run)
    readmit = expand(options.readmit) if options.readmit is not None else []
    return finish("resume", resume(run, readmit=readmit), run, as_json=options.json)


def _resume_sweep(sweep: SweepLayout, options: argparse.Namespace) -> int:
    from ftslurm.operate.sweep_resume import resume_sweep  # late: it is built on this module

    if options.readmit is not None:
        raise UsageError("--readmit is of one run; name the task that keeps the node off")
    # By the names on record: those of sweep.task() go with the folder's.
    tasks = (RunLayout(sweep.root / task.run_id) for task in read_tasks(sweep))
    first = next((task for task in tasks if task.script.exists()), None)
    if first is not None:
        place_at_submit(first)
    _require_its_cluster(lambda: sweep_elsewhere(sweep), "")
    return finish_sweep(resume_sweep(sweep), sweep, as_json=options.json)


def resume(
    run: OpenRun, *, readmit: Sequence[str] = (), sleep: Callable[[float], None] = time.sleep
) -> Answer:
    require_own(run.layout)
    place_at_submit(run.layout)
    if not is_listed(run.layout.done):
        command = shlex.quote(str(run.layout.sbatch_command))
        _require_its_cluster(lambda: elsewhere(run), f"`sh {command}`")
    with _alone(run.layout):
        standing = _settled(run, sleep)
        if standing.done:
            raise RunError("the run has finished; for more steps submit a new run")
        job_id, state = standing.job.job_id, standing.state
        if not (standing.is_over or state.is_known):
            raise RunError(
                f"nobody can say whether job {job_id} is alive ({state.reason}), and a second job "
                "of one run must not start beside it; try again when the scheduler answers"
            )
        require_own_jobs(run, standing)
        readmit_nodes(_own_job(run), readmit)
        answer = _let_go_on(run, standing, sleep)
        if not readmit:
            return answer
        used = f"{answer.text}; used again from the next attempt on: {', '.join(readmit)}"
        return dataclasses.replace(answer, text=used)


def _require_its_cluster(ask: Callable[[], str], by_hand: str) -> None:
    """RunError before a second job is queued beside one that lives on another cluster. `by_hand`:
    how it is queued here all the same; empty: by no one command."""
    try:
        why = ask()
    except SchedulerError as error:
        raise RunError(
            f"nobody can say whether this is the cluster of the run's jobs ({error}); try again "
            "when the scheduler answers"
        ) from None
    if why:
        here = f", or, once none of them is left, queue it here by hand, {by_hand}"
        raise RunError(f"{why}: resume it there{here if by_hand else ''}")


def _let_go_on(run: OpenRun, standing: Standing, sleep: Callable[[float], None]) -> Answer:
    job_id, state = standing.job.job_id, standing.state
    withdrawn = _withdraw(run)
    if standing.is_over:
        return _again(run, withdrawn)
    if state.is_waiting and _drop_those_that_would_leave(run, standing):
        return _again(run, withdrawn)
    if state.is_waiting:
        # What is known of nodes may have changed since it was queued.
        names = list(known_exclusions(_own_job(run)))
        keep_out_of_waiting(_own_job(run), job_id, names, for_s=KEEP_OUT_S)
    if state.is_held:
        return _release(run, job_id, sleep)
    if state.is_waiting:
        return Answer("waiting", f"job {job_id} is queued already{withdrawn}", True, job_id)
    return Answer("running", f"it runs as job {job_id}{withdrawn}", True, job_id)


def _own_job(run: OpenRun, job_id: str = "") -> OwnJob:
    return OwnJob(run.layout, run.record, run.scheduler, job_id)


def _settled(run: OpenRun, sleep: Callable[[float], None]) -> Standing:
    """Once the job is neither in the middle of its end nor on its way to it."""
    waits_for, since = "", 0.0
    while True:
        standing = run.look_twice(sleep)
        if standing.state.is_ending:
            news, longest_s = f"is {standing.state.word}", ENDING_S
        elif not standing.done and _is_leaving(standing):
            news, longest_s = "has decided to end", ENDING_S
        elif not standing.done and _is_obeying(run, standing):
            news, longest_s = "is obeying an order to leave", OBEYING_S
        else:
            return standing
        now, job = time.monotonic(), f"job {standing.job.job_id}"
        if news != waits_for:
            waits_for, since = news, now
            tell(f"{job} {news}, {standing.step_words}; waiting for its end")
        elif now - since > longest_s:
            raise RunError(f"{job} {news} for {longest_s:g} s; try again when it has ended")
        sleep(POLL_S)


def _is_leaving(standing: Standing) -> bool:
    """Its batch script has decided so, and the order, if it was by one, is taken away."""
    action, job_id = standing.decision.get("action"), standing.job.job_id
    return standing.state.is_running and has_stopped(action, job_id, standing.begun_last)


def _is_obeying(run: OpenRun, standing: Standing) -> bool:
    """The ranks have seen the order: to withdraw it keeps nobody from leaving any more."""
    number = standing.attempt
    if number is None or not standing.state.is_running:
        return False
    with contextlib.suppress(FileNotFoundError, FormatError):
        if read_attempt(run.layout, number).job_id != standing.job.job_id:
            return False  # resumed already, and not begun
    outcome, progress = standing.outcome, standing.progress
    events = read_events(run.layout.attempt(number))
    if outcome is not None and outcome.order is not None:
        return True
    if any(event.get("order") in LEAVING for event in events):
        return True
    is_leaving = (
        outcome is not None
        or (progress is not None and progress.phase in ("saving", "stopped"))
        or any(event["kind"] == ASKED for event in events)
    )
    return is_leaving and run.control.read_leaving() is not None


def _drop_those_that_would_leave(run: OpenRun, standing: Standing) -> bool:
    """Cancel jobs that would leave as soon as they start, like a successor of a run that was ended;
    whether the one at the head of the queue was among them."""
    doomed = [job for job in (*standing.behind, standing.job) if _would_leave(run, job)]
    for job in doomed:
        run.scheduler.cancel(job.job_id)
    return standing.job in doomed


def _would_leave(run: OpenRun, job: Job) -> bool:
    return reason_to_leave(_own_job(run, job.job_id)) is not None


def _withdraw(run: OpenRun) -> str:
    given = run.control.read_leaving()
    run.control.take_away_leaving()
    return f"; the order `{given}` is withdrawn" if given else ""


def _release(run: OpenRun, job_id: str, sleep: Callable[[float], None]) -> Answer:
    try:
        run.scheduler.release(job_id)
    except SchedulerError as error:
        raise SchedulerError(
            f"job {job_id} is held and not released: {error}; ask an operator of the cluster, or "
            f"`ftslurm cancel {run.name}` and resume again, which queues a new job"
        ) from None
    with contextlib.suppress(SchedulerError):
        _hasten(run, job_id, sleep)
    return Answer("released", f"job {job_id} is released and goes on", True, job_id)


def _hasten(run: OpenRun, job_id: str, sleep: Callable[[float], None]) -> None:
    """Released soon after its requeue a job would wait for the rest of two minutes. Slurm says so
    only when it has next looked at its queue."""
    deadline = time.monotonic() + HASTEN_S
    while not run.scheduler.hasten(job_id) and time.monotonic() < deadline:
        state = run.scheduler.job_state(job_id)
        if not (state.is_held or state.reason in ("", "BeginTime")) or not state.is_waiting:
            break
        sleep(HASTEN_POLL_S)


def _again(run: OpenRun, withdrawn: str) -> Answer:
    # One that nobody has written down: the answer to its submission was lost.
    for queued in run.scheduler.waiting(named_by_script(run.layout).script):
        return Answer(
            "waiting", f"job {queued.job_id} is queued already{withdrawn}", True, queued.job_id
        )
    exclude = list(settle_exclusions(_own_job(run)))
    job_id = _submit(run, exclude)
    return Answer("queued", f"job {job_id} is queued and goes on where the run was", True, job_id)


def _submit(run: OpenRun, exclude: Sequence[str]) -> str:
    scheduler = run.record.scheduler
    sweep = find_sweep(str(run.layout.root.parent))
    if sweep is not None and scheduler == "slurm":
        for task in read_tasks(sweep):
            if task.run_id == run.record.run_id:
                return queue_alone(sweep, task, exclude=exclude, queued_by=BY_PERSON)
    job_id = submit_again(run.layout, scheduler, exclude=exclude)
    add_job(run.layout, job_id, scheduler=scheduler, queued_by=BY_PERSON)
    return job_id


def _require_none_on_its_way(sweep: SweepLayout, task: RunLayout) -> None:
    """RunError while Slurm may yet take a job of this task, whoever asked for it being dead."""
    find_lost(sweep)
    for number, why in still_open(sweep).items():
        if sweep.task_id(number) == task.root.name:
            raise RunError(f"`{task.root}`: {why}; resume it again then")


@contextlib.contextmanager
def _alone(layout: RunLayout) -> Iterator[None]:
    """One resume at a time. A file system without locks gives none, and no protection."""
    sweep = find_sweep(str(layout.root.parent))
    with contextlib.ExitStack() as locks:
        if sweep is not None:  # whose tasks are queued by others too
            locks.enter_context(queueing(sweep))
            _require_none_on_its_way(sweep, layout)
        stream = locks.enter_context((layout.submit / "resume.lock").open("w"))
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another `ftslurm resume` of `{layout.root}` is at work; wait for its word"
            ) from None
        except OSError as error:
            tell(f"this file system has no locks ({error}); see that nobody else resumes the run")
        yield
