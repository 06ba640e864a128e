"""submitit: carries a frozen run to sbatch or to this machine. The only module that imports it.

The plugin `ftslurm` (entry points in pyproject.toml) submits run directories that `ftslurm submit`
has frozen, one, or tasks of a sweep as arrays; the scripts were rendered then and are used as they
are. A parameter that would have no effect is an error. Nothing here requeues, and no handler of
ours does more than set the stop flag.

Overridden private names of submitit 1.5: `_internal_process_submissions`,
`_internal_update_parameters`, `_valid_parameters`, `_handle_signals`; of the local executor
`_submit_command`. `_delayed_batch` is read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from submitit.auto.auto import AutoExecutor
from submitit.core.core import PicklingExecutor
from submitit.core.plugins import get_executors
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob, SlurmJobEnvironment

from ftslurm.errors import RunError, UsageError
from ftslurm.run.layout import CALL, RunLayout
from ftslurm.run.rank import stop_flag
from ftslurm.run.record import read_record
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import read_tasks
from ftslurm.run.trust import require_own
from ftslurm.scheduler.arrays import Outcome, reasons
from ftslurm.scheduler.local import run_batch
from ftslurm.scheduler.sbatch import RefusedError, frozen_arguments, scrubbed, submit
from ftslurm.submit.rank import TrainCall

NAME = "ftslurm"

# Ten years: submitit's controller would end a job of its own after this; the batch loop has the
# run's time limit.
_NO_TIMEOUT_S = 10 * 365 * 24 * 3600


class FtslurmExecutor(SlurmExecutor):  # type: ignore[misc]
    """Submits frozen runs: `executor.submit(TrainCall(), run_dir)`, tasks of one sweep in a
    batch or with `map_array` as arrays. Without `run_dir`, the run is the one whose `submit` folder
    is `folder`."""

    def __init__(self, folder: Union[str, Path]) -> None:
        # Not SlurmExecutor's: it refuses the affinity that keeps this class out of auto-detection.
        PicklingExecutor.__init__(self, folder)
        self.outcome = Outcome()
        """Of the tasks of a sweep that were submitted last."""
        self.array_size: Optional[int] = None
        """MaxArraySize, as far as it is known."""

    @classmethod
    def affinity(cls) -> int:
        return -1

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"array_parallelism"}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - self._valid_parameters())
        if unknown:
            raise UsageError(
                f"executor `{NAME}` takes array_parallelism, not {', '.join(unknown)}; nodes, "
                "time, partition and the like are frozen with the run: give them to `ftslurm "
                "submit` as cluster.*"
            )
        self.parameters.update(kwargs)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[SlurmJob]:
        """Of tasks of a sweep only those that Slurm has taken, in the order of the submissions;
        `outcome` tells of the others. RefusedError where it takes none, now or later; RunError
        where a batch is not taken whole."""
        runs = [self._frozen_run(delayed) for delayed in delayed_submissions]
        sweeps = {run.root.parent for run in runs}
        sweep = SweepLayout(sweeps.pop())
        if not sweeps and sweep.sweep_json.is_file():
            return self._submit_tasks(sweep, [run.root.name for run in runs])
        if len(runs) > 1:
            raise UsageError(
                f"executor `{NAME}` takes runs one by one, or tasks of one sweep together: make "
                "the sweep with `ftslurm submit -m`"
            )
        return [_job(runs[0], submit(frozen_arguments(runs[0])), _world_size(runs[0]))]

    def _submit_tasks(self, sweep: SweepLayout, run_ids: Sequence[str]) -> list[SlurmJob]:
        # Here: each rank loads this module, and has no use for that.
        from ftslurm.sweep.queue import queue_tasks

        wanted = set(run_ids)
        tasks = [task for task in read_tasks(sweep) if task.run_id in wanted]
        parallelism = self.parameters.get("array_parallelism")
        self.outcome = queue_tasks(
            sweep,
            tasks,
            parallelism=parallelism and int(parallelism),
            array_size=self.array_size,
        )
        if self.outcome.is_refused:
            raise RefusedError(reasons(self.outcome.refused))
        jobs = {}
        for array in self.outcome.arrays:
            numbers = [number for number in array.numbers if sweep.task_id(number) in wanted]
            # The tasks of a group have as many ranks.
            world_size = _world_size(sweep.task(numbers[0])) if numbers else 0
            for number in numbers:
                run, job_id = sweep.task(number), array.job_id(number)
                jobs[sweep.task_id(number)] = _job(run, job_id, world_size)
        if self._delayed_batch is not None and len(jobs) < len(wanted):
            # A batch gives its handles away by their places alone.
            why = reasons({**self.outcome.left, **self.outcome.refused})
            raise RunError(
                f"{len(jobs)} of {len(wanted)} tasks of `{sweep.root}` are queued, and this batch "
                f"has no handles of them: {why}; `map_array` gives those that there are"
            )
        return [jobs[run_id] for run_id in run_ids if run_id in jobs]

    def _frozen_run(self, delayed: DelayedSubmission) -> RunLayout:
        if not isinstance(delayed.function, TrainCall) or delayed.kwargs or len(delayed.args) > 1:
            raise UsageError(
                f"executor `{NAME}` submits runs: give it `TrainCall()` of ftslurm.submit.rank and "
                "a run directory that `ftslurm submit` has frozen"
            )
        run = RunLayout(Path(delayed.args[0]).absolute() if delayed.args else self.folder.parent)
        require_own(run)
        for path in (run.run_json, run.script, run.call):
            if not path.is_file():
                raise RunError(f"`{run.root}` is no frozen run: it has no `{path.name}`")
        return run


def _world_size(run: RunLayout) -> int:
    return read_record(run).spec.world_size


def _job(run: RunLayout, job_id: str, world_size: int) -> SlurmJob:
    return SlurmJob(folder=run.submit, job_id=job_id, tasks=list(range(world_size)))


class RunJobPaths(JobPaths):  # type: ignore[misc]
    """submitit's paths, with the one call of a run for every job id the run ever has."""

    @property
    def submitted_pickle(self) -> Path:
        frozen = self.folder / CALL
        return frozen if frozen.is_file() else Path(super().submitted_pickle)


class FtslurmJobEnvironment(SlurmJobEnvironment):  # type: ignore[misc]
    """What a rank started by our batch script reads; chosen by SUBMITIT_EXECUTOR=ftslurm."""

    @property
    def paths(self) -> RunJobPaths:
        return RunJobPaths(
            os.environ["SUBMITIT_FOLDER"], job_id=self.job_id, task_id=self.global_rank
        )

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        stop_flag.install()
        # An attempt killed while it saved its result leaves this, and submitit then refuses to save
        # (utils.temporary_save_path asserts that there is none).
        result = Path(paths.result_pickle)
        result.with_name(result.name + ".save_tmp").unlink(missing_ok=True)


class LocalBatchExecutor(LocalExecutor):  # type: ignore[misc]
    """submitit's local executor, outliving terminal and submitting process; one task, no limit."""

    def _submit_command(self, command: str) -> LocalJob[Any]:
        folder = Path(self.folder)
        environ = {
            **scrubbed(os.environ),
            "PYTHONPATH": str(folder.parent / "code"),
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(_NO_TIMEOUT_S),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        with (folder / "controller.log").open("ab") as log:
            # submitit's start_controller keeps the terminal's session and the caller's pipes.
            process = subprocess.Popen(
                [sys.executable, "-m", "submitit.local._local", str(folder)],
                env=environ,
                cwd=folder.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalJob(folder=folder, job_id=str(process.pid), tasks=[0], process=process)


def run_local_batch(run_dir: str) -> int:
    """The local executor's one task: be the job whose id the submitter was told."""
    return run_batch(Path(run_dir), job_id=_local_id(os.environ["SUBMITIT_LOCAL_JOB_ID"]))


def _local_id(controller: str) -> str:
    return f"local-{controller}"


def write_call(folder: Path) -> None:
    """Put the ranks' call into a run's submit folder."""
    DelayedSubmission(TrainCall()).dump(folder / CALL)


def submit_tasks(
    layout: SweepLayout,
    numbers: Sequence[int],
    *,
    parallelism: Optional[int],
    array_size: Optional[int] = None,
) -> Outcome:
    """Hand tasks of a sweep over to Slurm; what has become of them. `array_size`: MaxArraySize;
    None: Slurm is asked. RefusedError where none of them is queued or will be. The caller holds the
    lock."""
    _require_plugin()
    executor = FtslurmExecutor(layout.submit)
    executor.array_size = array_size
    if parallelism is not None:
        executor.update_parameters(array_parallelism=parallelism)
    executor.map_array(TrainCall(), [str(layout.task(number).root) for number in numbers])
    return executor.outcome


def submit_run(layout: RunLayout, scheduler: str) -> str:
    """Hand a frozen run over; its job id as the scheduler of that name knows it."""
    if scheduler == "local":
        job = LocalBatchExecutor(layout.submit).submit(run_local_batch, str(layout.root))
        return _local_id(job.job_id)
    _require_plugin()
    return str(FtslurmExecutor(layout.submit).submit(TrainCall()).job_id)


def _require_plugin() -> None:
    if NAME not in get_executors():
        raise RunError(
            "submitit does not know ftslurm's executor, and the ranks would not find it either; "
            "install ftslurm with pip"
        )


def _import_process_job() -> Callable[[Path], None]:
    """Where submitit can, it loads numpy first, for pickles that hold arrays. Ours holds none, many
    ranks have no use for it, and loading it takes as long as all the rest of submitit."""
    is_kept_out = "numpy" not in sys.modules
    if is_kept_out:
        sys.modules["numpy"] = None  # type: ignore[assignment]
    try:
        # Here: a process that submits has no use for it.
        from submitit.core.submission import process_job
    finally:
        if is_kept_out:
            del sys.modules["numpy"]
    found: Callable[[Path], None] = process_job
    return found


def run_pickled(folder: Path) -> None:
    """Be a rank: load the call in `folder` and run it, as submitit does."""
    from submitit.core.plugins import get_job_environments

    process_job = _import_process_job()
    require_own(RunLayout(folder.parent))
    # The interpreter in a container or an archive may have submitit without ftslurm, whose code
    # comes with the run, and so no entry point that names this class.
    get_job_environments().setdefault(NAME, FtslurmJobEnvironment())
    process_job(folder)


_auto_init = AutoExecutor.__init__
_auto_update = AutoExecutor._internal_update_parameters


def _check_prefixes(names: Sequence[str]) -> None:
    generic = AutoExecutor._valid_parameters()
    foreign = [name for name in names if name not in generic and not name.startswith(f"{NAME}_")]
    if foreign:
        raise UsageError(
            f"executor `{NAME}` would not see {', '.join(sorted(foreign))}; its parameters begin "
            f"with `{NAME}_`"
        )


def _strict_init(self: Any, folder: Any, cluster: Any = None, **kwargs: Any) -> None:
    if cluster == NAME:
        _check_prefixes(list(kwargs))
    _auto_init(self, folder, cluster, **kwargs)


def _strict_update(self: Any, **kwargs: Any) -> None:
    if self.cluster == NAME:
        _check_prefixes(list(kwargs))
    _auto_update(self, **kwargs)


# AutoExecutor drops what is prefixed for another executor before a plugin can see it. It goes on
# doing so for all clusters but ours.
AutoExecutor.__init__ = _strict_init
AutoExecutor._internal_update_parameters = _strict_update
