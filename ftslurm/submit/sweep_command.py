"""`ftslurm submit -m`: a sweep over our own conf/, one run for each combination of values.

All tasks are composed and checked before anything is written. With the basic sweeper the tasks are
known at once; others (`hydra/sweeper=optuna`) choose the next by the values of the last, and Hydra
itself drives them. Follows to the end, unless detached; exit code 1 when a task did not finish.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.errors import EXIT_FAILED, EXIT_OK, RunError, SpecError, UsageError
from ftslurm.files import write_atomic
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import RUN
from ftslurm.run.value import plain
from ftslurm.submit.compose_sweep import SweepComposer, expand, for_sweeper
from ftslurm.submit.place import open_choices, say_opened
from ftslurm.submit.program_files import check_words
from ftslurm.submit.say import print_json, repeated
from ftslurm.submit.sweep_course import BASIC, Course, TaskResult, failure

if TYPE_CHECKING:
    from ftslurm.submit.sweep import Task

_CHOICE = "hydra/sweeper="
_OPTION = ("hydra/sweeper/", "hydra.sweeper.", "+hydra.sweeper.", "++hydra.sweeper.")
_SHOWN = 20
"""Tasks of a dry run, for a person."""


def submit_sweep(
    options: argparse.Namespace, command: Sequence[str], say: Callable[[str], None]
) -> int:
    """The exit code."""
    check_words(command, "the command line")
    of_hydra = [word for word in options.overrides if word.startswith((_CHOICE, *_OPTION))]
    own = [word for word in options.overrides if word not in of_hydra]
    sweeper = _sweeper(of_hydra)
    native = Native(options, command, sweeper, say)
    if sweeper == BASIC and of_hydra and not of_hydra == [_CHOICE + BASIC]:
        raise UsageError(
            f"`{of_hydra[-1]}` is of a sweeper that was not chosen; choose one, e.g. "
            "hydra/sweeper=optuna, or leave it out"
        )
    try:
        if sweeper == BASIC:
            return native.all_at_once(expand(own, options.config_dir))
        return native.as_chosen([*of_hydra, *for_sweeper(own, options.config_dir)])
    except KeyboardInterrupt:
        native.say_stopped()
        return EXIT_FAILED


def _sweeper(of_hydra: Sequence[str]) -> str:
    chosen = [word[len(_CHOICE) :] for word in of_hydra if word.startswith(_CHOICE)]
    return chosen[-1] if chosen else BASIC


class Native:
    """One sweep of runs of our own."""

    def __init__(
        self,
        options: argparse.Namespace,
        command: Sequence[str],
        sweeper: str,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._sweeper = sweeper
        self._say = say
        self._composer = SweepComposer(options.config_dir, open_choices())
        self._course = Course(
            kind=RUN,
            sweeper=sweeper,
            command=command,
            parallelism=options.parallelism,
            detach=options.detach,
            say=say,
        )
        self._layout: Optional[SweepLayout] = None
        self._overrides: list[Sequence[str]] = []
        self._results: list[TaskResult] = []
        self._is_launching = False

    def all_at_once(self, overrides: Sequence[Sequence[str]]) -> int:
        if self._options.dry_run:
            tasks = self._tasks(overrides, 0)
            self._say_same(tasks)
            return self._show(tasks)
        self.launch(overrides, 0)
        return self._end()

    def as_chosen(self, words: Sequence[str]) -> int:
        from ftslurm.hydra_app import native

        if self._options.dry_run:
            raise UsageError(
                "a dry run shows the tasks, and these are chosen by the values of others; leave "
                "--dry-run out, or the sweeper"
            )
        try:
            files = native.sweep(self.launch, self._run, words, self._options.config_dir)
        except SpecError as error:
            if not self._results or self._layout is None:
                raise
            where = f"`{self._layout.root}`"
            raise RunError(f"{error}; the tasks that have run are in {where}") from None
        if self._layout is None:
            raise SpecError("the sweeper has asked for no task at all")
        for name, data in files.items():
            write_atomic(self._layout.submit / name, data)
            if name == "optimization_results.yaml":
                self._say(data.decode().rstrip("\n"))
        return self._end()

    def launch(self, overrides: Sequence[Sequence[str]], first: int) -> list[TaskResult]:
        """Submit tasks, from that number on, and wait for them. To Hydra's sweepers a launch."""
        tasks = self._tasks(overrides, first)
        if self._sweeper == BASIC:
            self._say_same(tasks)
        self._is_launching = True
        results = self._course.launch(tasks)
        self._is_launching = False
        self._results += results
        return results

    def _run(self, number: int) -> RunLayout:
        assert self._layout is not None, "nothing was launched"
        return self._layout.task(number)

    def say_stopped(self) -> None:
        """Of Ctrl-C. While tasks are launched, the course has said how far it is."""
        if self._is_launching:
            return
        if self._layout is None or not self._results:
            self._say("stopped; nothing was written, nothing was submitted")
        else:
            self._say(f"stopped; the tasks that have run are in {self._layout.root}")

    def _tasks(self, overrides: Sequence[Sequence[str]], first: int) -> list[Task]:
        from ftslurm.submit.sweep import Task

        if not overrides:
            raise SpecError("the sweeper asks for a batch without a task; have it choose some")
        tasks = []
        for number, words in enumerate(overrides, start=first):
            try:
                composed = self._composer.compose(words)
            except SpecError as error:
                raise SpecError(f"task {number} ({' '.join(words)}): {error}") from None
            if composed.spec.run_id is not None:
                raise UsageError("run_id names one run, and a sweep has several; leave it out")
            tasks.append(Task(number, tuple(words), composed.spec, composed.text))
        if self._layout is None:
            say_opened(composed.opened, self._say)
            self._layout = self._course.begin(tasks[0].spec)
        self._overrides += overrides
        return tasks

    def _say_same(self, tasks: Sequence[Task]) -> None:
        told = repeated({task.number: task.config_text for task in tasks}, "the same configuration")
        if told is not None:
            self._say(told)

    def _show(self, tasks: Sequence[Task]) -> int:
        assert self._layout is not None
        plans = self._course.plan(tasks)
        if self._options.json:
            shown = [{"number": task.number, "overrides": list(task.overrides)} for task in tasks]
            print_json({**self._identity(), "tasks": shown, "script": plans[0].script})
            return EXIT_OK
        self._say(f"sweep folder:   {self._layout.root}")
        self._say(f"tasks:          {len(tasks)}")
        for task in tasks[:_SHOWN]:
            self._say(f"  {task.number:4}  {' '.join(task.overrides)}")
        if len(tasks) > _SHOWN:
            self._say(f"  ... and {len(tasks) - _SHOWN} more")
        self._say("")
        self._say(f"script of task {tasks[0].number}:")
        self._say(plans[0].script.rstrip("\n"))
        self._say("")
        self._say("dry run: nothing was written, nothing was submitted")
        return EXIT_OK

    def _end(self) -> int:
        assert self._layout is not None
        failed = [result for result in self._results if not result.finished]
        if self._options.json:
            print_json({**self._identity(), "tasks": self._told()})
        else:
            if self._results and not self._options.detach:
                done = len(self._results) - len(failed)
                self._say(f"{done} of {len(self._results)} tasks finished; {self._layout.root}")
            for result in failed:
                self._say(failure(result))
        return EXIT_FAILED if failed else EXIT_OK

    def _identity(self) -> dict[str, Any]:
        assert self._layout is not None
        return {
            "schema_version": 1,
            "sweep_id": self._layout.sweep_id,
            "sweep_dir": str(self._layout.root),
        }

    def _told(self) -> list[dict[str, Any]]:
        assert self._layout is not None
        results = {result.number: result for result in self._results}
        told = []
        for number, words in enumerate(self._overrides):
            task = {
                "number": number,
                "run_id": self._layout.task_id(number),
                "overrides": list(words),
            }
            result = results.get(number)
            if result is not None:
                value = plain(result.value)  # others read no NaN
                task.update(finished=result.finished, text=result.text, value=value)
            told.append(task)
        return told
