"""A composed spec becomes a run directory: first a plan, which only reads, then the files.

A run directory appears whole, by a rename, or not at all. All that a restart needs is in it before
the scheduler hears of the run; nothing reads conf/ or the working folder afterwards.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import SpecError
from ftslurm.files import encode_json, fsync_folder, write_atomic, write_json, write_new
from ftslurm.node.environment import find_environment
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import LIVE, ClusterSpec, RunSpec, parse_time_s, to_dict
from ftslurm.scheduler.launch import (
    agents_argv,
    nodes_argv,
    preflight_argv,
    ranks_argv,
    standbys_argv,
)
from ftslurm.scheduler.protocol import Scheduler, Site
from ftslurm.submit.continue_by import named, requeue_option, settle_continue_by
from ftslurm.submit.dataset import Dataset, Wanted, prepare_dataset, wanted_dataset
from ftslurm.submit.deadline import emergency_deadline_s
from ftslurm.submit.durable import make_durable
from ftslurm.submit.packages import Interpreters
from ftslurm.submit.refuse import refuse_taken
from ftslurm.submit.render import check_values, render_script, sbatch_options
from ftslurm.submit.snapshot import (
    PACKAGE,
    Copied,
    Snapshot,
    check_entry,
    copy,
    is_installed,
    plan_snapshot,
    unseen_folders,
)

# What only Slurm reads; the local scheduler would ignore it.
_SLURM_ONLY = (
    "job_name", "account", "partition", "qos", "reservation", "constraint", "exclude", "comment",
    "mem", "wait_s", "licenses", "switches", "mail_user", "mail_type", "spares", "gpus_per_task",
    "gpu_bind", "cpu_bind", "sbatch", "srun", "container_image", "mounts", "mpi", "export",
)  # fmt: skip
_DEFAULTS = ClusterSpec()

CODE_JSON = "code.json"
CODE_DIFF = "code.diff"


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
    """Interpreter of the batch script."""
    continue_by: str
    """requeue | resubmit"""
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
    check_place(spec, site, runs_dir)
    run_id = spec.run_id or make_run_id(spec.name, now, secrets.token_hex(2))
    layout = RunLayout(runs_dir / run_id)
    refuse_taken(layout)
    snapshot = plan_snapshot(folder, entry=spec.entry, program=spec.program, exclude=[runs_dir])
    require_entry(spec, snapshot)
    given = Given(folder, site, snapshot, now, wanted_dataset(spec, runs_dir, folder))
    return plan_at(layout, spec, config_text, given)


@dataclass(frozen=True)
class Given:
    """What a run is planned with, beside its spec."""

    folder: Path
    """That it is submitted from."""
    site: Optional[Site]
    snapshot: Snapshot
    now: float
    data: Optional[Wanted]
    shared_code: Optional[Path] = None
    """Of a task of a sweep: the folder that RUN/code leads to."""


def plan_at(layout: RunLayout, spec: RunSpec, config_text: str, given: Given) -> Plan:
    """Decide all of the run that is to be at `layout`, whose spec has been checked."""
    site, snapshot, folder = given.site, given.snapshot, given.folder
    python = spec.cluster.python or sys.executable
    continue_by = settle_continue_by(spec, site)
    paths = python_path(spec, layout, snapshot)
    live_folder = folder.resolve() if spec.code == LIVE else None
    ranks_at: dict[str, Any] = {
        "run_dir": layout.root,
        "workdir": live_folder,
        "code": _code_outside(spec, given, paths),
    }
    script = render_script(
        spec,
        requeue=requeue_option(continue_by, site),
        run_id=layout.root.name,
        run_dir=layout.root,
        python=python,
        python_path=paths,
        live_folder=live_folder,
        launch=ranks_argv(spec.cluster, spec.recovery, python=python, **ranks_at),
        preflight=preflight_argv(spec.cluster, spec.recovery, spec.health, **ranks_at),
        on_nodes=nodes_argv(spec.cluster, spec.recovery),
        agents=agents_argv(spec.cluster, spec.recovery, is_task=given.shared_code is not None),
        standbys=standbys_argv(spec.cluster, spec.recovery),
        environment=find_environment(spec.cluster, folder),
    )
    cluster = named(spec.cluster, continue_by, layout.root.name)
    return Plan(
        run_id=layout.root.name,
        layout=layout,
        spec=spec,
        config_text=config_text,
        created_at=given.now,
        site=site,
        python=python,
        continue_by=continue_by,
        script=script,
        options=sbatch_options(cluster, log=f"{layout.submit}/%j.out"),
        snapshot=snapshot,
        data=given.data,
    )


def plan_alike(plan: Plan, layout: RunLayout) -> Plan:
    """The plan of another run with the same spec, of the same sweep. A run's id has its sweep's
    random digits in it, so where it stands it is meant."""
    before, run_id = plan.run_id, layout.root.name
    return replace(
        plan,
        run_id=run_id,
        layout=layout,
        script=plan.script.replace(before, run_id),
        options=[option.replace(before, run_id) for option in plan.options],
    )


def require_entry(spec: RunSpec, snapshot: Snapshot) -> None:
    """SpecError when the ranks would not find the entry's module."""
    own = not spec.cluster.ranks_are_inside and not spec.cluster.rank_python
    installed = own and spec.cluster.python is None
    unseen = unseen_folders(snapshot, os.environ)
    check_entry(snapshot, spec.entry, installed=installed, unseen=unseen)


def _code_outside(spec: RunSpec, given: Given, paths: Sequence[Path]) -> list[Path]:
    """Folders beside the run's own that the ranks import from."""
    if spec.code == LIVE or given.shared_code is None:
        return live_code(spec, given.snapshot.root, paths)
    return [given.shared_code]


def python_path(spec: RunSpec, layout: RunLayout, snapshot: Snapshot) -> list[Path]:
    """Folders that batch loop and ranks import from, before what is installed."""
    if spec.code != LIVE:
        return [layout.code / place for place in snapshot.import_paths]
    live = [snapshot.root / place for place in snapshot.import_paths]
    for path in live:
        if ":" in str(path) or not str(path).isprintable():
            raise SpecError(
                f"code=live imports from `{path}`, and PYTHONPATH cannot hold a `:` or what is not "
                "printable; rename that folder, or use code=frozen"
            )
    return live if PACKAGE.parent in live or is_installed() else [*live, PACKAGE.parent]


def live_code(spec: RunSpec, root: Path, paths: Sequence[Path]) -> list[Path]:
    """Folders of code=live, none inside another, that ranks see at their own place. `root`: the
    repository's; `paths`: those that they import from."""
    if spec.code != LIVE:
        return []
    folders = [root, *(path for path in paths if not path.is_relative_to(root))]
    for folder in folders:
        if spec.cluster.container_image is not None and re.search("[:,]", str(folder)):
            raise SpecError(
                f"code=live mounts `{folder}` into the container, and pyxis parts its mounts at "
                "`:` and `,`; rename that folder, or use code=frozen"
            )
    return folders


@dataclass(frozen=True)
class Known:
    """What was found out for the record of a run, by work that several may share."""

    code_digest: str
    dataset: Optional[Dataset]
    packages: Mapping[str, str]


def freeze(plan: Plan) -> None:
    """Write the run directory; durable on return, absent after an error."""
    from ftslurm.submit.executor import write_call

    root = plan.layout.root
    root.parent.mkdir(parents=True, exist_ok=True)
    dataset = None
    if plan.data is not None:
        dataset = prepare_dataset(plan.data, python=plan.python, import_from=PACKAGE.parent)
    packages = Interpreters.of(plan.spec, plan.python).packages()
    building = RunLayout(root.parent / f".{plan.run_id}.tmp")
    # Exclusive: two submits in one second with the same four digits cannot share a folder.
    building.root.mkdir(mode=0o700)
    try:
        building.submit.mkdir()
        copied = copy_code(plan.snapshot, building.code, building.submit)
        write_call(building.submit)
        known = Known(copied.digest, dataset, packages)
        write_run(plan, building, encode_record(plan, known), write_new)
        building.control.mkdir()  # an order may be left there before the run begins
        make_durable(building.root)
        refuse_taken(plan.layout)  # a second submit may have been faster
        building.root.rename(root)
        fsync_folder(root.parent)
    except BaseException:
        shutil.rmtree(building.root)
        raise


def check_place(spec: RunSpec, site: Optional[Site], runs_dir: Path) -> None:
    """SpecError for what cannot be had where the run is to be."""
    check_values(spec, runs_dir)
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


def copy_code(snapshot: Snapshot, code: Path, submit: Path) -> Copied:
    """Copy the source to `code`, and put what is known of it into the folder `submit`."""
    copied = copy(snapshot, code)
    (code / snapshot.place).mkdir(parents=True, exist_ok=True)
    write_json(submit / CODE_JSON, {"schema_version": 1, "files": copied.files})
    if snapshot.diff:
        write_atomic(submit / CODE_DIFF, snapshot.diff)
    return copied


def write_run(
    plan: Plan, building: RunLayout, record: bytes, write: Callable[[Path, bytes], None]
) -> None:
    """Write all of a run but its code and its call, which others share, into `building`, which has
    a folder `submit`; not durable. `record`: of `encode_record`; `write` is asked for what may be
    the same in many runs.

    Of folders only those that several nodes look into from the start: a name that was looked up
    there in vain may stay away for a while (files.py). The others are made by who writes into them.
    """
    folders = [building.attempts]
    if not plan.spec.program:  # which has neither
        folders += [building.trace, building.steps]
    for folder in folders:
        folder.mkdir(parents=True)
    write(building.config_yaml, plan.config_text.encode())
    write_new(building.script, plan.script.encode())
    if plan.command is not None:
        write_new(building.sbatch_command, f"{plan.command}\n".encode())
    # A umask of 002 would let the group in, and what others may write the ranks do not trust.
    building.submit.chmod(0o700)
    building.call.chmod(0o600)
    write_new(building.run_json, record)


def encode_record(plan: Plan, known: Known) -> bytes:
    """run.json."""
    return encode_json(_record(plan, known))


def record_of(run_id: str, record: bytes, other: str) -> bytes:
    """run.json of the run `other`, which differs in the id alone from that of `run_id`."""
    # A text in it breaks no line, and only what is outermost is indented by one.
    line = '\n "run_id": "{}",\n'
    head, found, tail = record.partition(line.format(run_id).encode())
    assert found, run_id
    return head + line.format(other).encode() + tail


def _record(plan: Plan, known: Known) -> dict[str, Any]:
    dataset, code = known.dataset, plan.snapshot
    config_digest = hashlib.sha256(plan.config_text.encode()).hexdigest()
    return {
        "schema_version": 1,
        "run_id": plan.run_id,
        "created_at": plan.created_at,
        "spec": to_dict(plan.spec),
        "scheduler": plan.spec.cluster.scheduler,
        "continue_by": plan.continue_by,
        "site": None if plan.site is None else plan.site.to_dict(),
        "emergency_deadline_s": plan.emergency_deadline_s,
        "code": {
            "commit": code.commit,
            "dirty": code.dirty,
            "digest": known.code_digest,
            "folder": str(code.root),
            "place": code.place,
        },
        "data_path": None if dataset is None else str(dataset.path),
        "dataset_snapshot": None if dataset is None else dataset.snapshot,
        "tokenizer_digest": None if dataset is None else dataset.tokenizer_digest,
        "config_digest": f"sha256:{config_digest}",
        "image_digest": None,
        "packages": known.packages,
    }
