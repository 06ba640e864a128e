"""A composed spec becomes a run directory: first a plan, which only reads, then the files.

A run directory appears whole, by a rename, or not at all. All that a restart needs is in it before
the scheduler hears of the run; nothing reads conf/ or the working folder afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import RunError, SpecError
from ftslurm.files import fsync_folder, write_atomic, write_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import ClusterSpec, RunSpec, parse_time_s, to_dict
from ftslurm.scheduler.protocol import Scheduler, Site
from ftslurm.submit.dataset import Dataset, Wanted, prepare_dataset, wanted_dataset
from ftslurm.submit.deadline import emergency_deadline_s
from ftslurm.submit.render import check_values, render_script, sbatch_options
from ftslurm.submit.snapshot import (
    PACKAGE,
    Snapshot,
    check_entry,
    copy,
    plan_snapshot,
    unseen_folders,
)

_LIST_PACKAGES = (
    "import importlib.metadata as m, json\n"
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
)
_IMPORT_SUBMITIT = "import submitit"

# What only Slurm reads; the local scheduler would ignore it.
_SLURM_ONLY = (
    "job_name", "account", "partition", "qos", "reservation", "constraint", "exclude", "comment",
    "mem", "wait_s",
)  # fmt: skip
_DEFAULTS = ClusterSpec()


@dataclass(frozen=True)
class Plan:
    """A run before anything is written."""

    run_id: str
    layout: RunLayout
    spec: RunSpec
    config_text: str
    created_at: float
    site: Optional[Site]
    """None in a dry run without a scheduler."""
    python: str
    """Interpreter of batch script and ranks."""
    script: str
    options: list[str]
    """Arguments of sbatch."""
    snapshot: Snapshot
    data: Optional[Wanted]

    @property
    def emergency_deadline_s(self) -> Optional[float]:
        return None if self.site is None else emergency_deadline_s(self.site, self.spec)

    @property
    def command(self) -> Optional[str]:
        """What is run to submit, for a person to read or repeat; none where no command is."""
        if self.spec.cluster.scheduler == "local":
            return None
        return f"sbatch {shlex.join(['--parsable', *self.options, str(self.layout.script)])}"


def make_run_id(name: str, now: float, suffix: str) -> str:
    """`main-20261129-150000-3f9a`: sorts by time within a name."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{suffix}"


def plan_run(
    spec: RunSpec, config_text: str, scheduler: Scheduler, site: Optional[Site], *, folder: Path
) -> Plan:
    """Decide all of a run that is submitted from `folder`. Reads, never writes."""
    now = time.time()
    runs_dir = folder / Path(spec.runs_dir).expanduser()
    check_values(spec, runs_dir)
    _check_place(spec, site)
    run_id = make_run_id(spec.name, now, secrets.token_hex(2))
    layout = RunLayout(runs_dir / run_id)
    python = spec.cluster.python or sys.executable
    snapshot = plan_snapshot(folder, entry=spec.entry, exclude=[runs_dir])
    unseen = unseen_folders(snapshot, os.environ)
    check_entry(snapshot, spec.entry, installed=spec.cluster.python is None, unseen=unseen)
    script = render_script(
        spec,
        run_id=run_id,
        run_dir=layout.root,
        python=python,
        python_path=[layout.code / place for place in snapshot.import_paths],
        launch=scheduler.launch_ranks_argv(spec.cluster, python=python),
    )
    options = sbatch_options(spec.cluster, log=f"{layout.submit}/%j.out")
    data = wanted_dataset(spec, runs_dir, folder)
    return Plan(
        run_id, layout, spec, config_text, now, site, python, script, options, snapshot, data
    )


def freeze(plan: Plan) -> None:
    """Write the run directory; durable on return, absent after an error."""
    root = plan.layout.root
    root.parent.mkdir(parents=True, exist_ok=True)
    dataset = None
    if plan.data is not None:
        dataset = prepare_dataset(plan.data, python=plan.python, import_from=PACKAGE.parent)
    packages = _packages(plan.python)
    building = RunLayout(root.parent / f".{plan.run_id}.tmp")
    # Exclusive: two submits in one second with the same four digits cannot share a folder.
    building.root.mkdir(mode=0o700)
    try:
        _write(plan, building, dataset, packages)
        _make_durable(building.root)
        if root.exists():
            raise RunError(f"`{root}` exists already; submit again for another run id")
        building.root.rename(root)
        fsync_folder(root.parent)
    except BaseException:
        shutil.rmtree(building.root)
        raise


def _check_place(spec: RunSpec, site: Optional[Site]) -> None:
    cluster = spec.cluster
    if cluster.scheduler == "local":
        if cluster.nodes != 1:
            raise SpecError(
                f"cluster.nodes is {cluster.nodes}; cluster=local has one, this machine"
            )
        for key in _SLURM_ONLY:
            value = getattr(cluster, key)
            if value != getattr(_DEFAULTS, key):
                raise SpecError(
                    f"cluster.{key} is `{value}`, which means nothing to cluster=local; leave it "
                    "out, or choose cluster=slurm"
                )
    limit_s = parse_time_s(cluster.time)
    if site is None:
        return
    for name in (cluster.partition or site.default_partition or "").split(","):
        longest_s = site.max_time_s.get(name)
        if longest_s is not None and limit_s > longest_s:
            raise SpecError(
                f"cluster.time is {cluster.time}, but partition `{name}` allows {longest_s} s; the "
                "job would wait for ever: ask for less, the run goes on in the next job"
            )


def _write(
    plan: Plan, building: RunLayout, dataset: Optional[Dataset], packages: dict[str, str]
) -> None:
    from ftslurm.submit.executor import write_call

    for folder in (building.submit, building.attempts, building.trace, building.steps):
        folder.mkdir(parents=True)
    digest = copy(plan.snapshot, building.code)
    config = plan.config_text.encode()
    write_atomic(building.config_yaml, config)
    write_atomic(building.script, plan.script.encode())
    if plan.command is not None:
        write_atomic(building.sbatch_command, f"{plan.command}\n".encode())
    if plan.snapshot.diff:
        write_atomic(building.submit / "code.diff", plan.snapshot.diff)
    write_call(building.submit)
    write_json(
        building.run_json,
        {
            "schema_version": 1,
            "run_id": plan.run_id,
            "created_at": plan.created_at,
            "spec": to_dict(plan.spec),
            "scheduler": plan.spec.cluster.scheduler,
            "site": None if plan.site is None else plan.site.to_dict(),
            "emergency_deadline_s": plan.emergency_deadline_s,
            "code": {
                "commit": plan.snapshot.commit,
                "dirty": plan.snapshot.dirty,
                "digest": digest,
            },
            "data_path": None if dataset is None else str(dataset.path),
            "dataset_snapshot": None if dataset is None else dataset.snapshot,
            "tokenizer_digest": None if dataset is None else dataset.tokenizer_digest,
            "config_digest": f"sha256:{hashlib.sha256(config).hexdigest()}",
            "image_digest": None,
            "packages": packages,
        },
    )


def _packages(python: str) -> dict[str, str]:
    """Names and versions of what the ranks' interpreter has installed."""
    done = _ask(python, _LIST_PACKAGES)
    if done.returncode:
        raise SpecError(
            f"cluster.python `{python}` is no Python of 3.9 or later ({_last_line(done)})"
        )
    if python != sys.executable:
        imported = _ask(python, _IMPORT_SUBMITIT)
        if imported.returncode:
            raise SpecError(
                f"cluster.python `{python}` cannot import submitit, which starts the ranks "
                f"({_last_line(imported)}); install ftslurm with that interpreter's pip"
            )
    packages: dict[str, str] = json.loads(done.stdout)
    return packages


def _ask(python: str, program: str) -> subprocess.CompletedProcess[bytes]:
    # The submitter's PYTHONPATH is not the ranks'.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        return subprocess.run(
            [python, "-c", program],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise SpecError(f"cluster.python `{python}` cannot be run: {error.strerror}") from None


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    said = os.fsdecode(done.stderr).strip().splitlines()
    return said[-1] if said else "it said nothing"


def _make_durable(root: Path) -> None:
    """fsync every file, then every folder: one pass after all is written costs the least."""
    folders: Sequence[Path] = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for folder in folders:
        for path in folder.iterdir():
            if path.is_file() and not path.is_symlink():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
    for folder in folders:
        if not folder.is_symlink():
            fsync_folder(folder)
