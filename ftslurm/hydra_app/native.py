"""`ftslurm submit -m hydra/sweeper=NAME`: Hydra's own multirun over our conf/.

For the sweepers that choose tasks by the values of earlier ones. Each task is composed and checked
like a single run.

Used of Hydra 1.3 by private names: `hydra._internal.hydra.Hydra` and
`hydra._internal.utils.create_config_search_path`.
"""

from __future__ import annotations

import functools
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

from ftslurm.errors import FtslurmError, SpecError
from ftslurm.hydra_app.job_return import configs_of_run, job_return
from ftslurm.run.layout import RunLayout
from ftslurm.submit.compose import SCHEMA_NAME, config_folders, searchpath, sentence

if TYPE_CHECKING:
    from ftslurm.submit.sweep_course import TaskResult

Launch = Callable[[Sequence[Sequence[str]], int], "list[TaskResult]"]


class NativeSweep:
    """Where Hydra expects the task function; the launcher finds it there and hands over."""

    def __init__(self, launch: Launch, run: Callable[[int], RunLayout]) -> None:
        self._launch = launch
        self._run = run
        self.is_launching = False

    def __call__(self, config: Any) -> None:
        raise AssertionError("tasks of a sweep are submitted, not called")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        from ftslurm.hydra_app.launcher import hydra_error

        jobs = []
        self.is_launching = True
        results = self._launch(job_overrides, initial_job_idx)
        self.is_launching = False
        for overrides, result in zip(job_overrides, results):
            error = hydra_error(f"{result.run_id} {result.text}")
            job = job_return(
                functools.partial(configs_of_run, self._run(result.number)),
                overrides=overrides,
                working_dir=None,
                name="ftslurm",
                finished=result.finished,
                value=result.value if result.finished else error,
            )
            jobs.append(job)
        return jobs


def _said(error: Exception) -> str:
    """In one sentence; of a bug, which nobody has written a sentence for, also what and where."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    text = sentence(error)
    if text and isinstance(error, (HydraException, OmegaConfBaseException, ValueError, OSError)):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = f": {text}" if text else ""
    return f"the sweeper has raised {type(error).__name__}{said} ({frame.filename}:{frame.lineno})"


def sweep(
    launch: Launch,
    run: Callable[[int], RunLayout],
    overrides: Sequence[str],
    config_dir: Optional[Path],
) -> dict[str, bytes]:
    """Have Hydra sweep; the files that the sweeper has left, by name. `run`: where a task lies that
    was launched. `overrides`: as Hydra takes them. SpecError for what the sweeper refuses, or makes
    of the tasks' values."""
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    from ftslurm.run.spec import RunSpec

    ConfigStore.instance().store(name=SCHEMA_NAME, node=RunSpec, provider="ftslurm")
    primary, *others = config_folders(config_dir)
    task = NativeSweep(launch, run)
    app = Hydra.create_main_hydra2("ftslurm", create_config_search_path(str(primary)))
    try:
        with tempfile.TemporaryDirectory(prefix="ftslurm-sweep-") as place:
            own = ["hydra/launcher=ftslurm", f"hydra.sweep.dir='{place}'", *searchpath(others)]
            app.multirun(
                config_name="config",
                task_function=task,
                overrides=[*own, *overrides],
                with_log_configuration=False,
            )
            return {path.name: path.read_bytes() for path in Path(place).glob("*.yaml")}
    except FtslurmError:
        raise
    except Exception as error:  # noqa: BLE001 - a sweeper of anybody's says no by what it likes
        if task.is_launching:
            raise  # not the sweeper's, but a bug of ours
        raise SpecError(_said(error)) from error
    finally:
        GlobalHydra.instance().clear()
