"""What Hydra finds: `hydra/launcher=ftslurm`, for any Hydra program where ftslurm is installed.

Hydra loads launchers from the package `hydra_plugins` alone and imports every plugin at every
start, so this module is nearly empty: all but the names of the options is imported when tasks are
submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ftslurm.hydra_app.schema import hydra_node

if TYPE_CHECKING:
    from ftslurm.hydra_app.launcher import Submission


class FtslurmLauncher(Launcher):  # type: ignore[misc]
    """Submits the tasks of a sweep as runs of ftslurm."""

    def __init__(self, **options: Any) -> None:
        # They are read from each task's own configuration, which may differ from the sweep's.
        del options
        self.submission: Optional[Submission] = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        from ftslurm.hydra_app.launcher import submission_for

        self.submission = submission_for(hydra_context, task_function, config)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        assert self.submission is not None, "Hydra calls setup() first"
        return self.submission.launch(job_overrides, initial_job_idx)


# In the package `hydra`, not `hydra.launcher`: the choice of this launcher says more than its own
# options (see hydra_node).
ConfigStore.instance().store(
    group="hydra/launcher",
    name="ftslurm",
    node=hydra_node(f"{__name__}.{FtslurmLauncher.__name__}"),
    package="hydra",
    provider="ftslurm",
)
