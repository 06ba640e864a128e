"""`ftslurm resume SWEEP`: what is not DONE and not alive is queued, each from its own checkpoint.

Under the sweep's lock, so that of two resumes one queues a task and the other is told to wait.
Arrays of which the answer was lost are looked for first. A task of which nobody can say whether it
is alive, or not yet, is left alone and named. Tasks that never were queued, because their submitter
died or Slurm had too many jobs, are queued as well.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from typing import Optional

from ftslurm.errors import FtslurmError, SchedulerError
from ftslurm.operate.answer import Answer, counted, tell
from ftslurm.operate.resume import ENDING_S, resume
from ftslurm.operate.standing import open_run
from ftslurm.recovery.keep_out import settle_exclusions
from ftslurm.recovery.own_job import OwnJob
from ftslurm.run.acts import note_act
from ftslurm.run.control import LEAVING, ControlFiles
from ftslurm.run.jobs import BY_PERSON, read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import queueing
from ftslurm.run.sweep_record import read_arrays, read_sweep, read_tasks
from ftslurm.run.trust import require_own
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.again import submit_again
from ftslurm.scheduler.arrays import NO_ROOM, Outcome, reasons
from ftslurm.scheduler.lost_arrays import find_lost, find_singles, still_open
from ftslurm.sweep.here import run_here
from ftslurm.sweep.look import (
    ALIVE,
    DONE,
    HELD,
    NOBODY_KNOWS,
    NOT_QUEUED,
    ON_PAUSE,
    OVER,
    SweepLook,
    TaskLook,
    look_twice,
)
from ftslurm.sweep.queue import by_array, queue_tasks
from ftslurm.sweep.share import use_room

POLL_S = 2.0


def resume_sweep(layout: SweepLayout, *, sleep: Callable[[float], None] = time.sleep) -> Answer:
    with queueing(layout):
        find_lost(layout)
        if read_sweep(layout).scheduler != "local":
            find_singles(layout)
        layout.closed.unlink(missing_ok=True)
        seen = _settled(layout, sleep)
        ready = [task for task in seen.of(*OVER, NOT_QUEUED) if _is_whole(layout, task)]
        try:
            outcome = _queue(layout, seen, ready, sleep)
        except KeyboardInterrupt:
            return _interrupted(layout, seen)
        for number in outcome.taken:
            _note_queued(layout, number)
    let_go = _let_go(layout, seen.of(HELD, ON_PAUSE))
    return _answer(layout, seen, ready, outcome, let_go)


def _settled(layout: SweepLayout, sleep: Callable[[float], None]) -> SweepLook:
    """Once no task is in the middle of its end, or they have taken too long for it."""
    until, said = time.monotonic() + ENDING_S, False
    seen = look_twice(layout, sleep)
    while _leaving(layout, seen) and time.monotonic() < until:
        if not said:
            tell(f"{counted(len(_leaving(layout, seen)), 'tasks are')} on the way out; waiting")
        said = True
        sleep(POLL_S)
        seen = look_twice(layout, sleep)
    return seen


def _leaving(layout: SweepLayout, seen: SweepLook) -> list[TaskLook]:
    """Being torn down, on their way out, or ordered to leave: they are not alive for long."""
    return [
        task
        for task in seen.of(*ALIVE)
        if task.job == "COMPLETING"
        or task.leaves
        or (task.state not in (HELD, ON_PAUSE) and _given(layout, task))
    ]


def _given(layout: SweepLayout, task: TaskLook) -> Optional[str]:
    control = ControlFiles(layout.task(task.number), task.run_id)
    return next((name for name in LEAVING if control.is_given(name)), None)


def _is_whole(layout: SweepLayout, task: TaskLook) -> bool:
    return layout.task(task.number).run_json.exists()


def _queue(
    layout: SweepLayout,
    seen: SweepLook,
    tasks: Sequence[TaskLook],
    sleep: Callable[[float], None],
) -> Outcome:
    """Orders to leave that they have not seen are withdrawn before."""
    for task in tasks:
        require_own(layout.task(task.number))
        ControlFiles(layout.task(task.number), task.run_id).take_away_leaving()
    numbers = [task.number for task in tasks]
    wanted = set(numbers)
    parallelism = seen.record.parallelism
    if seen.record.scheduler == "local":
        at_once = parallelism or 1
        begun = run_here(
            layout,
            numbers,
            at_once=at_once,
            start=_start_here,
            queued_by=BY_PERSON,
            say=tell,
            sleep=sleep,
        )
        outcome = Outcome(singles=begun)
        outcome.leave(sorted({*numbers} - {*begun}), "somebody has cancelled the sweep meanwhile")
        return outcome
    over = [task.number for task in seen.tasks if not task.alive]
    outcome = queue_tasks(
        layout,
        [record for record in read_tasks(layout) if record.number in wanted],
        parallelism=parallelism,
        queued_by=BY_PERSON,
        alone={task.number: names for task in tasks if (names := _excluded(layout, task))},
        over=over,
    )
    try:
        use_room(layout, over=set(over).difference(outcome.taken))
    except (SchedulerError, OSError) as error:  # what is queued is to be told all the same
        tell(f"fewer tasks run at once than may: {error}")
    return outcome


def _start_here(run: RunLayout) -> str:
    return submit_again(run, "local")


def _excluded(layout: SweepLayout, task: TaskLook) -> list[str]:
    """Nodes that this task has found bad: an array has one list for all, so such a task is queued
    by itself."""
    run = layout.task(task.number)
    if not run.nodes_jsonl.exists():
        return []
    return list(settle_exclusions(OwnJob(run, read_record(run), open_scheduler("slurm"), "")))


def _note_queued(layout: SweepLayout, number: int) -> None:
    run = layout.task(number)
    jobs = read_jobs(run)
    note_act(run, "resume", "queued", jobs[-1].job_id if jobs else None)


def _let_go(layout: SweepLayout, tasks: Sequence[TaskLook]) -> list[TaskLook]:
    """Of those that are held the ones that are so no more."""
    let_go = []
    for task in tasks:
        run = open_run(str(layout.task(task.number).root))
        try:
            answer = resume(run)
        except FtslurmError as error:
            tell(f"{task.run_id} stays held: {error}")
            continue
        note_act(run.layout, "resume", answer.result, answer.job_id)
        let_go.append(task)
    return let_go


def _interrupted(layout: SweepLayout, seen: SweepLook) -> Answer:
    done = "run" if seen.record.scheduler == "local" else "queued"
    name = shlex.quote(str(layout.root))
    return Answer(
        "interrupted",
        f"interrupted before all were {done}; what is alive goes on, `ftslurm status {name}` shows "
        f"it, and another `ftslurm resume {name}` is for the others",
        False,
    )


def _answer(
    layout: SweepLayout,
    seen: SweepLook,
    ready: Sequence[TaskLook],
    outcome: Outcome,
    let_go: Sequence[TaskLook],
) -> Answer:
    told = [counted(len(outcome.taken), f"tasks {_how(seen)}")]
    if let_go:
        told.append(counted(len(let_go), "held ones are released"))
    alive = counted(len(seen.of(*ALIVE)) - len(let_go), "are alive")
    told.append(f"{counted(seen.counts[DONE], 'were done')}, {alive}")
    lost = still_open(layout)
    left = {number: why for number, why in outcome.left.items() if number not in lost}
    unknown = [task for task in seen.of(NOBODY_KNOWS) if task.number not in lost]
    when = _room_when(layout, seen, outcome) if NO_ROOM in left.values() else ""
    amiss = [
        _few(len(left), f"are not queued yet: {reasons(left)}{when}; resume again later"),
        _few(len(outcome.refused), f"are not queued, and will not be: {reasons(outcome.refused)}"),
        _few(len(lost), f"may have a job: {next(iter(lost.values()), '')}; resume again then"),
        _few(len(unknown), "may be alive, nobody can say: resume again later"),
        _few(len(_leaving(layout, seen)), "are still leaving: resume again when they have"),
        _few(len(seen.of(HELD, ON_PAUSE)) - len(let_go), "stay held"),
        _few(
            len(seen.of(NOT_QUEUED)) - len([one for one in ready if one.state == NOT_QUEUED]),
            "are without a folder that is whole: submit anew",
        ),
    ]
    told += filter(None, amiss)
    return Answer("queued" if outcome.taken else "nothing", "; ".join(told), not any(amiss))


def _room_when(layout: SweepLayout, seen: SweepLook, outcome: Outcome) -> str:
    """What has to end before there may be room: of an array all but a few."""
    alive = [task.alive[-1] for task in seen.tasks if task.alive]
    alive += [array.job_id(number) for array in outcome.arrays for number in array.numbers]
    alive += [read_jobs(layout.task(number))[-1].job_id for number in outcome.singles]
    arrays = by_array(read_arrays(layout), alive)
    if not arrays:
        return ""
    first, (count, at_once) = min(arrays.items(), key=lambda one: one[1][0] - one[1][1])
    if count == 1:
        return f"; there is room once job {first} has ended"
    few = f"{at_once} of the {count} tasks"
    return f"; there is room once fewer than {few} of array {first} are left"


def _how(seen: SweepLook) -> str:
    if seen.record.scheduler == "local":
        return "ran on this machine"
    return "are queued to go on"


def _few(count: int, words: str) -> str:
    return counted(count, words) if count > 0 else ""
