"""What the launcher does: compose every task, freeze it, submit all of them, wait for their values.

A task that cannot be composed stops the sweep before anything is written or queued. What Hydra gets
back of a task is its value; of one that did not finish an error that names it, raised when the
sweeper looks at it, so that all others have ended by then.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, cast

from ftslurm.errors import EXIT_FAILED, FtslurmError
from ftslurm.files import encode_json
from ftslurm.hydra_app.frozen import CONFIG, Frozen
from ftslurm.hydra_app.job_return import configs_of_task, job_return
from ftslurm.hydra_app.quick_loader import QuickLoader
from ftslurm.hydra_app.schema import chosen_groups, given
from ftslurm.hydra_app.started import how_started, program_of
from ftslurm.hydra_app.task import CALL
from ftslurm.run.spec import RunSpec
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import PROGRAM
from ftslurm.submit.compose import compose_run
from ftslurm.submit.place import open_choices
from ftslurm.submit.program_files import check_words, with_program
from ftslurm.submit.say import repeated
from ftslurm.submit.sweep_course import BASIC, Course, TaskResult, failure

if TYPE_CHECKING:
    from ftslurm.submit.sweep import Task

log = logging.getLogger("ftslurm")

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def submission_for(context: Any, task_function: Any, config: Any) -> Any:
    """What launches for this start of Hydra: runs of ftslurm's own where `ftslurm submit -m` has
    started it, else tasks of the program."""
    from ftslurm.hydra_app.native import NativeSweep

    if isinstance(task_function, NativeSweep):
        return task_function
    with as_hydra_errors():
        return Submission(context, config)


@contextlib.contextmanager
def as_hydra_errors() -> Iterator[None]:
    """Hydra prints its own errors as a sentence, others with their traceback."""
    try:
        yield
    except FtslurmError as error:
        raise hydra_error(f"ftslurm: error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_FAILED) from None  # what was broken off has been said


def hydra_error(text: str) -> Exception:
    from hydra.errors import CompactHydraException

    error: Exception = CompactHydraException(text)
    return error


def sweeper_name(target: str) -> str:
    """`basic`, or the class's name without `Sweeper`."""
    if target == _BASIC_SWEEPER:
        return BASIC
    return target.rpartition(".")[2].replace("Sweeper", "").lower() or target


class Submission:
    """The tasks of somebody's program."""

    def __init__(self, context: Any, config: Any) -> None:
        from omegaconf.errors import OmegaConfBaseException

        if not isinstance(context.config_loader, QuickLoader):
            # The sweeper's, too, which composes every task before any is launched.
            context.config_loader = QuickLoader(context.config_loader)
        self._context = context
        self._config = config
        # As Hydra's own launchers do: a time in it is then the sweep's, and in every task the same.
        with contextlib.suppress(OmegaConfBaseException):
            config.hydra.sweep.dir  # noqa: B018 - what it comes to is kept
        self._folder = Path.cwd()
        self._call = how_started(self._folder)
        check_words(self._call.argv, "the command line")
        self._call_data = encode_json(self._call.to_dict())
        options = _plain(config.hydra.launcher)
        self._course = Course(
            kind=PROGRAM,
            sweeper=sweeper_name(config.hydra.sweeper._target_),
            command=[self._call.module or self._call.script or "", *self._call.argv],
            parallelism=options["parallelism"],
            detach=options["detach"],
            say=log.info,
        )
        self._specs: dict[str, tuple[RunSpec, str]] = {}
        self._last: Optional[tuple[dict[str, Any], tuple[RunSpec, str]]] = None
        self._layout: Optional[SweepLayout] = None

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        with as_hydra_errors():
            if self._layout is None:
                spec, _ = self._spec(_plain(self._config.hydra.launcher))
                self._layout = self._course.begin(spec)
            words_of = dict(enumerate(map(list, job_overrides), start=initial_job_idx))
            frozen, tasks = self._composed(self._layout, words_of)
            results = {result.number: result for result in self._course.launch(tasks)}
        return [
            self._job_return(self._layout, number, task, results.get(number))
            for number, task in frozen.items()
        ]

    def _composed(
        self, layout: SweepLayout, words_of: Mapping[int, list[str]]
    ) -> tuple[dict[int, Frozen], list[Task]]:
        try:
            frozen = {
                number: self._freeze(layout, number, words) for number, words in words_of.items()
            }
            tasks = [
                self._task(number, words, frozen[number]) for number, words in words_of.items()
            ]
        except KeyboardInterrupt:
            log.info("stopped; nothing of these tasks was written, nothing of them was submitted")
            raise
        if sweeper_name(self._config.hydra.sweeper._target_) == BASIC:
            loader: QuickLoader = self._context.config_loader
            told = repeated(
                {number: loader.effective(words) for number, words in words_of.items()},
                "given the same values",
            )
            if told is not None:
                log.info(told)
        return frozen, tasks

    def _freeze(self, layout: SweepLayout, number: int, overrides: list[str]) -> Frozen:
        loader: QuickLoader = self._context.config_loader
        return loader.freeze(self._config, overrides, run_id=layout.task_id(number), number=number)

    def _task(self, number: int, overrides: Sequence[str], frozen: Frozen) -> Task:
        from ftslurm.submit.sweep import Task

        spec, text = self._spec(frozen.options)  # which may follow from the task's configuration
        files = {CONFIG: frozen.data, CALL: self._call_data}
        return Task(number, tuple(overrides), spec, text, files)

    def _spec(self, options: dict[str, Any]) -> tuple[RunSpec, str]:
        """The same for all tasks with the same options."""
        if self._last is not None and options is self._last[0]:
            return self._last[1]
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._specs:
            config_dir = options["config_dir"]
            values = given(options)
            values.setdefault("name", _name(str(self._config.hydra.job.name)))
            if config_dir is None or options["groups"]["cluster"] is None:
                # conf/'s own options have two, which a program that knows of no ranks would not
                # share its work between.
                values.setdefault("cluster.tasks_per_node", 1)
            composed = compose_run(
                chosen_groups(options),
                None if config_dir is None else Path(config_dir),
                open_choices=open_choices(),
                values=values,
            )
            program = program_of(self._call, composed.spec.cluster)
            self._specs[key] = with_program(composed.spec, composed.text, program)
        self._last = (options, self._specs[key])
        return self._specs[key]

    def _job_return(
        self, layout: SweepLayout, number: int, frozen: Frozen, result: Optional[TaskResult]
    ) -> Any:
        # UNKNOWN would be right of a detached task; sweepers take that for a bug.
        finished = result is None or result.finished
        value = None if result is None else result.value
        if result is not None and not finished:
            value = hydra_error(f"ftslurm: error: {failure(result)}")
        return job_return(
            functools.partial(configs_of_task, layout.task(number)),
            overrides=frozen.overrides,
            working_dir=frozen.working_dir,
            name=self._config.hydra.job.name,
            finished=finished,
            value=value,
        )


def _plain(options: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from ftslurm.errors import SpecError

    try:
        plain = cast("dict[str, Any]", OmegaConf.to_container(options, resolve=True))
    except OmegaConfBaseException as error:
        raise SpecError(f"hydra.launcher cannot be settled: {str(error).splitlines()[0]}") from None
    return plain


def _name(job_name: str) -> str:
    return _NOT_IN_NAME.sub("_", job_name) or "sweep"
