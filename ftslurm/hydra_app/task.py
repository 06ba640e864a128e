"""One task of somebody's Hydra program, on a node: `python -m ftslurm.hydra_app.task SCRIPT`.

Their script runs as `__main__`, up to the call of its `hydra.main` function; there its own task
function gets the configuration that was frozen at submit, whatever the configs and the command line
would now say. So no function is ever pickled, and what the script defines on its way is there. All
else is as in a sweep on one machine: folder of the output, `.hydra/`, logging, callbacks, the
folder that it was started in. Rank 0 alone writes what Hydra writes, and the value that the
function has returned. An exception ends the process with a code other than 0.

Replaced of Hydra 1.3, by private names: `hydra._internal.hydra.Hydra`'s `run`, `multirun` and
`get_mode`; used: `hydra._internal.callbacks.Callbacks`.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import EXIT_FAILED, FtslurmError, RunError, SpecError, warn
from ftslurm.files import read_json
from ftslurm.hydra_app.frozen import read_config
from ftslurm.program.environment import STOP_FILE
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.trust import require_own
from ftslurm.run.value import write_value

CALL = "hydra_task.json"
"""In RUN/submit."""


@dataclass(frozen=True)
class Call:
    """How the program was started where the sweep was submitted."""

    script: Optional[str]
    """Relative to the folder it was started in, where it lies below that."""
    module: Optional[str]
    """Of `python -m MODULE`."""
    argv: tuple[str, ...]
    folder: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "script": self.script,
            "module": self.module,
            "argv": list(self.argv),
            "folder": self.folder,
        }


def read_call(layout: RunLayout) -> Call:
    record = read_json(layout.submit / CALL)
    return Call(record["script"], record["module"], tuple(record["argv"]), record["folder"])


class Task:
    """The run of the one task function."""

    def __init__(self, env: RankEnvironment) -> None:
        self.env = env
        self.has_run = False

    def run(
        self, app: Any, config_name: Optional[str], task_function: Any, *_: Any, **__: Any
    ) -> Any:
        """In place of `Hydra.run`; `app` is the Hydra that `hydra.main` has made."""
        from hydra._internal.callbacks import Callbacks
        from hydra.core.utils import run_job
        from hydra.types import HydraContext

        config = read_config(self.env.layout)
        if self.env.rank != 0:
            _write_nothing(config)
        self.has_run = True
        job = run_job(
            task_function=task_function,
            config=config,
            # Settled at submit, and absolute.
            job_dir_key="hydra.runtime.output_dir",
            job_subdir_key=None,
            hydra_context=HydraContext(app.config_loader, Callbacks(config)),
        )
        value = job.return_value  # raises what the function has raised
        if self.env.rank == 0 and not _is_asked_to_leave():
            _keep(self.env.layout, value)
        return job


def main() -> None:
    env = RankEnvironment.read()
    require_own(env.layout)
    call = read_call(env.layout)
    task = Task(env)
    _take_the_place_of_hydra(task)
    # Or the last line of the log, which is shown for the reason of a failure, is Hydra's advice.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    _go_home(call)
    if call.module is not None:
        runpy.run_module(call.module, run_name="__main__", alter_sys=True)
    else:
        assert call.script is not None
        runpy.run_path(sys.argv[0], run_name="__main__")
    if not task.has_run:
        raise RunError(
            f"`{call.module or call.script}` came to its end without a call of its hydra.main "
            "function, so the task has not run"
        )


def _take_the_place_of_hydra(task: Task) -> None:
    from hydra._internal.hydra import Hydra
    from hydra.types import RunMode

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        return task.run(self, *arguments, **options)

    Hydra.run = Hydra.multirun = run
    Hydra.get_mode = lambda self, *_, **__: RunMode.MULTIRUN


def _go_home(call: Call) -> None:
    """Arguments, module path and folder as the program had them; modules still come from the run's
    copy of the code, whose place is the folder that this process was started in."""
    here = Path.cwd()
    if call.script is not None:
        script = here / call.script
        sys.path[0] = str(script.parent)
        sys.argv = [str(script), *call.argv]
    else:
        sys.path[0] = str(here)
        sys.argv = [str(call.module), *call.argv]
    try:
        os.chdir(call.folder)
    except OSError as error:
        warn(
            f"the program works in `{here}`, as the folder it was submitted from is not here: "
            f"{error}"
        )


def _keep(layout: RunLayout, value: Any) -> None:
    """A function may return whatever it likes; only a sweeper that needs its value misses it."""
    try:
        write_value(layout, value)
    except SpecError as error:
        warn(str(error))


def _is_asked_to_leave() -> bool:
    """Then the function has returned early, and will be called again. Not `should_stop`, after
    which a program is taken for one that looks for the request by itself."""
    stop_file = os.environ.get(STOP_FILE)
    return stop_file is not None and Path(stop_file).exists()


def _write_nothing(config: Any) -> None:
    """Ranks other than 0 would write the same files."""
    from omegaconf import flag_override

    with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
        config.hydra.output_subdir = None
        handlers = (config.hydra.job_logging or {}).get("handlers") or {}
        for handler in handlers.values():
            if "filename" in handler:
                handler.filename = os.devnull


if __name__ == "__main__":
    try:
        main()
    except FtslurmError as error:
        print(f"ftslurm: error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_FAILED)
