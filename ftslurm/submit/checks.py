"""What a run is looked at for before anything of it is written: refused, or warned of.

A sweep's tasks are looked at one by one; what does not differ between them is looked at once, and
said once. Reads, but for the test write that refuse.py may do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Optional

from ftslurm.doctor.cheap import cheap_findings
from ftslurm.errors import warn
from ftslurm.run.spec import RunSpec
from ftslurm.submit.entry_name import missing_function
from ftslurm.submit.freeze import Plan, require_entry
from ftslurm.submit.program_files import check_program, left_behind
from ftslurm.submit.refuse import (
    Earlier,
    Storage,
    earlier_runs,
    refuse_inside_job,
    refuse_signal_clash,
    refuse_slow_save,
    refuse_storage,
    save_cost,
    storage_of,
)
from ftslurm.submit.snapshot import Snapshot, unseen_folders


class Checks:
    """All looks of one submit, at a run or at the tasks of a sweep in `runs_dir`."""

    def __init__(
        self,
        runs_dir: Path,
        environ: Optional[Mapping[str, str]] = None,
        *,
        say: Callable[[str], None] = warn,
    ) -> None:
        self._runs_dir = runs_dir
        self._environ = os.environ if environ is None else environ
        self._say = say
        self._said: set[str] = set()
        self._entries: set[tuple[object, ...]] = set()
        self._looked_into: set[str] = set()
        self._last: Optional[RunSpec] = None
        self._is_unseen_said = False
        self._is_doctor_asked = False

    def spec(self, spec: RunSpec) -> None:
        """Before the scheduler is asked anything."""
        refuse_inside_job(spec, self._environ)
        refuse_signal_clash(spec, self._environ)

    def entry(self, spec: RunSpec, snapshot: Snapshot) -> None:
        cluster = spec.cluster
        key = (spec.entry, cluster.ranks_are_inside, cluster.rank_python, cluster.python)
        if key not in self._entries:
            require_entry(spec, snapshot)
            self._entries.add(key)

    def plan(self, plan: Plan) -> None:
        spec, snapshot = plan.spec, plan.snapshot
        if spec is self._last:
            return  # another task of the same spec, at the same site and from the same source
        if spec.entry not in self._looked_into:
            self._looked_into.add(spec.entry)
            self._warn(missing_function(snapshot, spec.entry))
        self._warn(refuse_storage(spec, self._storage, self._runs_dir))
        cost = save_cost(spec, self._runs_dir, self._earlier)
        refuse_slow_save(cost, plan.emergency_deadline_s)
        if not self._is_doctor_asked:
            self._is_doctor_asked = True
            for line in cheap_findings(spec, plan.site, self._runs_dir):
                self._warn(f"{line.seen}; {line.todo}")
        if spec.program:
            check_program(snapshot, spec)
            for word in left_behind(snapshot, spec.program):
                self._warn(
                    f"`{word}` is here but not in the run's copy of the code, where the "
                    "program runs; if the program reads it, give its absolute path"
                )
        if not self._is_unseen_said:
            self._say_unseen(snapshot)
        self._last = spec

    def _say_unseen(self, snapshot: Snapshot) -> None:
        self._is_unseen_said = True
        unseen = unseen_folders(snapshot, self._environ)
        if unseen:
            self._warn(
                f"PYTHONPATH has {os.pathsep.join(unseen)}, which the ranks will not "
                "see; they import from the run's copy of this folder's code and from what is "
                "installed"
            )

    @cached_property
    def _storage(self) -> Storage:
        return storage_of(self._runs_dir)

    @cached_property
    def _earlier(self) -> list[Earlier]:
        return list(earlier_runs(self._runs_dir))

    def _warn(self, text: Optional[str]) -> None:
        if text is not None and text not in self._said:
            self._said.add(text)
            self._say(text)
