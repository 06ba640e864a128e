"""submitit: carries a frozen run to sbatch or to this machine. The only module that imports it.

The plugin `ftslurm` (entry points in pyproject.toml) submits run directories that `ftslurm submit`
has frozen, one or an array of them; their scripts were rendered then and are used as they are. A
parameter that would have no effect is an error. Nothing here requeues, and no handler of ours does
more than set the stop flag.

Overridden private names of submitit 1.5: `_internal_process_submissions`,
`_internal_update_parameters`, `_valid_parameters`, `_handle_signals`; of the local executor
`_submit_command`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

from submitit.auto.auto import AutoExecutor
from submitit.core.core import PicklingExecutor
from submitit.core.plugins import get_executors
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob, SlurmJobEnvironment

from ftslurm.errors import RunError, UsageError
from ftslurm.files import write_atomic
from ftslurm.run.layout import CALL, RunLayout
from ftslurm.run.rank import stop_flag
from ftslurm.run.record import read_record
from ftslurm.run.spec import RunSpec
from ftslurm.run.trust import require_own
from ftslurm.scheduler.local import run_batch
from ftslurm.scheduler.sbatch import frozen_arguments, scrubbed, submit
from ftslurm.submit.rank import TrainCall
from ftslurm.submit.render import sbatch_options

NAME = "ftslurm"

# Ten years: submitit's controller would end a job of its own after this; the batch loop has the
# run's time limit.
_NO_TIMEOUT_S = 10 * 365 * 24 * 3600


class FtslurmExecutor(SlurmExecutor):  # type: ignore[misc]
    """Submits frozen runs: `executor.submit(TrainCall(), run_dir)`, several in a batch or with
    `map_array` as one job array. Without `run_dir`, the run is the one whose `submit` folder is
    `folder`."""

    def __init__(self, folder: Union[str, Path]) -> None:
        # Not SlurmExecutor's: it refuses the affinity that keeps this class out of auto-detection.
        PicklingExecutor.__init__(self, folder)

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
        runs = [self._frozen_run(delayed) for delayed in delayed_submissions]
        if len(runs) == 1:
            return [_job(runs[0], submit(frozen_arguments(runs[0])))]
        array_id = self._submit_array(runs)
        return [_job(run, f"{array_id}_{index}") for index, run in enumerate(runs)]

    def _submit_array(self, runs: Sequence[RunLayout]) -> str:
        parallel = min(len(runs), int(self.parameters.get("array_parallelism", len(runs))))
        self.folder.mkdir(parents=True, exist_ok=True)
        script = self.folder / f"array-{runs[0].root.name}.sbatch"
        write_atomic(script, array_script(runs).encode())
        options = _options(runs[0], log=f"{self.folder}/%A_%a.out")
        array = f"--array=0-{len(runs) - 1}%{parallel}"
        return submit(["--parsable", *options, array, str(script)])

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


def array_script(runs: Sequence[RunLayout]) -> str:
    """One script for an array of runs; each task goes on with its own run's script."""
    headers = {_header(run): run for run in reversed(runs)}
    if len(headers) > 1:
        first, second, *_ = headers.values()
        raise UsageError(
            f"`{first.root.name}` and `{second.root.name}` ask sbatch for different things; runs "
            "of one array share nodes, tasks, time, partition, job name and the like"
        )
    cases = [
        f"  {task}) exec bash {shlex.quote(str(run.script))} ;;" for task, run in enumerate(runs)
    ]
    lines = [line for line in next(iter(headers)) if line.startswith("#SBATCH")]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "set -uo pipefail",
            'case "${SLURM_ARRAY_TASK_ID:-}" in',
            *cases,
            '  *) echo "no run for array task ${SLURM_ARRAY_TASK_ID:-}" >&2; exit 1 ;;',
            "esac",
            "",
        ]
    )


def _header(run: RunLayout) -> tuple[str, ...]:
    """What sbatch is asked for by a run: its script's own lines and its arguments."""
    lines = [line for line in run.script.read_text().splitlines() if line.startswith("#SBATCH")]
    return (*lines, *_options(run, log=""))


def _options(run: RunLayout, *, log: str) -> list[str]:
    return sbatch_options(_spec(run).cluster, log=log)


def _spec(run: RunLayout) -> RunSpec:
    return read_record(run).spec


def _job(run: RunLayout, job_id: str) -> SlurmJob:
    return SlurmJob(folder=run.submit, job_id=job_id, tasks=list(range(_spec(run).world_size)))


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


def submit_run(layout: RunLayout, scheduler: str) -> str:
    """Hand a frozen run over; its job id as the scheduler of that name knows it."""
    if scheduler == "local":
        job = LocalBatchExecutor(layout.submit).submit(run_local_batch, str(layout.root))
        return _local_id(job.job_id)
    if NAME not in get_executors():
        raise RunError(
            "submitit does not know ftslurm's executor, and the ranks would not find it either; "
            "install ftslurm with pip"
        )
    return str(FtslurmExecutor(layout.submit).submit(TrainCall()).job_id)


def run_pickled(folder: Path) -> None:
    """Be a rank: load the call in `folder` and run it, as submitit does."""
    # Here, as it imports numpy, whose OpenBLAS starts a thread a core: on a login node with many
    # cores and a limit on processes, submitting would end there.
    from submitit.core.plugins import get_job_environments
    from submitit.core.submission import process_job

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
