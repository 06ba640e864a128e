"""What Hydra gets back of a task: as its own launchers fill it in, for sweepers and callbacks.

The configurations are read from the task's folder when somebody asks for them, as those of a
thousand tasks would take hundreds of megabytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

from ftslurm.hydra_app.frozen import read_config
from ftslurm.run.layout import RunLayout


def job_return(
    configs: Callable[[], tuple[Any, Any]],
    *,
    overrides: Sequence[str],
    working_dir: Optional[str],
    name: str,
    finished: bool,
    value: Any,
) -> Any:
    """Hydra's `JobReturn`. `configs`: what reads the task's own configuration and Hydra's. Of a
    task that did not finish, `return_value` raises `value`."""
    from hydra.core.utils import JobStatus

    job = _task_return()(
        overrides=list(overrides),
        working_dir=working_dir,
        task_name=name,
        status=JobStatus.COMPLETED if finished else JobStatus.FAILED,
    )
    job.return_value = value
    job.read = configs
    return job


@functools.cache
def _task_return() -> Any:
    from hydra.core.utils import JobReturn

    class TaskReturn(JobReturn):  # type: ignore[misc]
        read: Optional[Callable[[], tuple[Any, Any]]] = None

        @functools.cached_property
        def configs(self) -> tuple[Any, Any]:
            return (None, None) if self.read is None else self.read()

        cfg = _field("cfg", 0)
        """The task's own configuration."""
        hydra_cfg = _field("hydra_cfg", 1)
        """Hydra's, below the key `hydra`; of the launcher's options only which launcher."""

        def __reduce__(self) -> Any:
            """Kept, it is one of Hydra's own."""
            told = (self.overrides, self.cfg, self.hydra_cfg, self.working_dir, self.task_name)
            return JobReturn, (*told, self.status, self._return_value)

    return TaskReturn


def _field(name: str, place: int) -> property:
    """The one of `configs`, until another is given."""

    def get(self: Any) -> Any:
        given = vars(self).get(name)
        return self.configs[place] if given is None else given

    def put(self: Any, value: Any) -> None:
        vars(self)[name] = value

    return property(get, put)


def configs_of_run(layout: RunLayout) -> tuple[Any, Any]:
    """Of a run of ftslurm's own, which knows nothing of Hydra."""
    from omegaconf import OmegaConf

    return OmegaConf.load(layout.config_yaml), None


def configs_of_task(layout: RunLayout) -> tuple[Any, Any]:
    """Of a task of somebody's program."""
    from omegaconf import OmegaConf, open_dict, read_write

    config = read_config(layout)
    hydra = OmegaConf.masked_copy(config, "hydra")
    with read_write(config), open_dict(config):
        del config["hydra"]
    return config, hydra
