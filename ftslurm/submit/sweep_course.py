"""A sweep from its first tasks to its last: begun, launched in one go or in several, followed.

Whoever composes the tasks gives them here, whole: nothing is written or queued before all of them
are known. Sweepers that choose tasks by the values of earlier ones come several times.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.errors import RunError, UsageError
from ftslurm.run.spec import RunSpec
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.value import read_value
from ftslurm.run.wording import format_count
from ftslurm.scheduler import open_scheduler
from ftslurm.submit.place import site_of

if TYPE_CHECKING:
    from ftslurm.scheduler.arrays import Outcome
    from ftslurm.submit.freeze import Plan
    from ftslurm.submit.sweep import Sweep, Task

BASIC = "basic"
"""The sweeper that asks for no values."""


@dataclass(frozen=True)
class TaskResult:
    """How a task went, of one that was waited for."""

    number: int
    run_id: str
    finished: bool
    text: str
    value: Any
    """What it returned; None where it did not finish."""


class Course:
    """One sweep."""

    def __init__(
        self,
        *,
        kind: str,
        sweeper: str,
        command: Sequence[str],
        parallelism: Optional[int],
        detach: bool,
        say: Callable[[str], None],
    ) -> None:
        if detach and sweeper != BASIC:
            raise UsageError(
                f"detach leaves before any task has a value, and sweeper `{sweeper}` chooses tasks "
                "by the values of others; leave detach out, or use the basic sweeper"
            )
        self.detach = detach
        self._kind = kind
        self._sweeper = sweeper
        self._command = tuple(command)
        self._parallelism = parallelism
        self._say = say
        self._sweep: Optional[Sweep] = None

    def begin(self, spec: RunSpec) -> SweepLayout:
        """Decide where the sweep lies, by a spec as each of its tasks has one. Writes nothing."""
        if self._sweep is None:
            from ftslurm.submit.sweep import Sweep

            scheduler = open_scheduler(spec.cluster.scheduler)
            found = shutil.which("sbatch") is not None
            self._sweep = Sweep.begin(
                spec.name,
                runs_dir=Path.cwd() / Path(spec.runs_dir).expanduser(),
                folder=Path.cwd(),
                scheduler=scheduler,
                site=site_of(spec, scheduler, sbatch_found=found),
                kind=self._kind,
                sweeper=self._sweeper,
                command=self._command,
                parallelism=self._parallelism,
                detach=self.detach,
            )
        return self._sweep.layout

    def plan(self, tasks: Sequence[Task]) -> Sequence[Plan]:
        """What would be launched, planned and checked; nothing is written."""
        assert self._sweep is not None, "begin comes first"
        return self._sweep.plan(tasks)

    def launch(self, tasks: Sequence[Task]) -> list[TaskResult]:
        """Submit; wait for the tasks, unless detached. What Slurm does not take, now or later, has
        failed, detached or not. What a limit has left has not: detached, a sentence names the
        command that queues it, and `ftslurm status` goes on to show it as not queued.

        RefusedError, and nothing stays of a first launch, where nothing at all is queued."""
        assert self._sweep is not None, "begin comes first"
        layout = self._sweep.layout
        try:
            outcome = self._sweep.launch(tasks, say=self._say)
        except KeyboardInterrupt:
            self._say(self._sweep.how_far(tasks))
            raise
        if self._sweep.record.scheduler != "local":
            self._tell(layout, outcome, len(tasks))
        if self.detach:
            self._say(f"how it goes:   ftslurm status {shlex.quote(str(layout.root))}")
            return [
                TaskResult(number, layout.task_id(number), False, f"was not queued: {why}", None)
                for number, why in outcome.refused.items()
            ]
        return self._results(layout, tasks, outcome)

    def _tell(self, layout: SweepLayout, outcome: Outcome, number: int) -> None:
        from ftslurm.scheduler.arrays import reasons

        count = format_count(number, "task")
        left, refused = len(outcome.left), len(outcome.refused)
        if left or refused:
            self._say(f"sweep {layout.sweep_id}: of {count} {len(outcome.taken)} are queued")
        else:
            self._say(f"sweep {layout.sweep_id}: {count} submitted")
        self._say(f"sweep folder:  {layout.root}")
        if refused:
            self._say(f"{refused} are not queued and will not be: {reasons(outcome.refused)}")
        if left:
            resume = f"`ftslurm resume {shlex.quote(str(layout.root))}`"
            how = f"queue them later with {resume}"
            if not self.detach:
                how = f"they follow as room appears while this goes on, later by {resume}"
            self._say(f"{left} are not queued yet: {reasons(outcome.left)}; {how}")

    def _results(
        self, layout: SweepLayout, tasks: Sequence[Task], outcome: Outcome
    ) -> list[TaskResult]:
        from ftslurm.sweep.follow import follow

        numbers = [task.number for task in tasks]
        ends = follow(layout, say=self._say, numbers=numbers, refused=outcome.refused)
        known = {end.number: end for end in ends}
        results = []
        for task in tasks:
            end = known.get(task.number)
            if end is None:
                raise RunError(
                    f"task {task.number} is out of sight; see `ftslurm status "
                    f"{shlex.quote(str(layout.root))}`"
                )
            value = read_value(layout.task(task.number)) if end.finished else None
            results.append(TaskResult(end.number, end.run_id, end.finished, end.text, value))
        return results


def failure(result: TaskResult) -> str:
    """One line on a task that did not finish."""
    return f"task {result.number} ({result.run_id}) {result.text}"
