"""Orders to a running run, as files: save, stop, pause. Needs no right on the job.

An order is an empty file, RUN/control/save and the like, or RUN_ID.save in the folder that
`recovery.control_dir` names: whoever may create a file there may stop the run. In a task of a sweep
the first attempt makes RUN/control, or the verb that gives an order. Rank 0 looks for them every
few seconds, and all ranks act at the same step boundary. A carried-out order's file is taken away:
that of a save by rank 0, that of a stop or a pause by `ftslurm recover` once it has acted, or by
`ftslurm resume`. One that may not be taken away (another user's, in a sticky folder) is noted as
carried out and counts again when it is given again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import FormatError
from ftslurm.files import read_json, write_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord

SAVE = "save"
"""Save at the next boundary and go on."""
STOP = "stop"
"""Save, leave, and do not come back until somebody resumes the run."""
PAUSE = "pause"
"""Save, leave, keep the job in the queue, held."""
ORDERS = (STOP, PAUSE, SAVE)
"""Strongest first."""
LEAVING = (STOP, PAUSE)

LOOK_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Order:
    """An order as it was found."""

    name: str
    given_at_ns: int
    """Newest modification time of its files: an order that is given again is another one."""


def strength(name: Optional[str]) -> int:
    """A number for ranks to agree on by a maximum; 0: no order."""
    return 0 if name is None else len(ORDERS) - ORDERS.index(name)


def of_strength(number: int) -> Optional[str]:
    return None if number == 0 else ORDERS[len(ORDERS) - number]


@dataclass(frozen=True)
class ControlFiles:
    """Where orders for one run may lie."""

    layout: RunLayout
    run_id: str
    control_dir: Optional[str] = None

    def places(self, order: str) -> Iterator[Path]:
        yield self.layout.control / order
        if self.control_dir:
            yield Path(self.control_dir) / f"{self.run_id}.{order}"

    def look(self) -> Optional[Order]:
        """The strongest order there is. A folder that cannot be read gives none: an operator's
        convenience must not end a run."""
        noted = self._noted()
        for name in ORDERS:
            given = [at for _, at in self._given(name, noted)]
            if given:
                return Order(name, max(given))
        return None

    def read(self) -> Optional[str]:
        """Name of the strongest order there is."""
        order = self.look()
        return None if order is None else order.name

    def read_leaving(self) -> Optional[str]:
        """The stronger of the orders to leave."""
        return next((name for name in LEAVING if self.is_given(name)), None)

    def is_given(self, name: str) -> bool:
        return any(self._given(name, self._noted()))

    def give(self, order: str) -> Path:
        """Leave an order in the run directory."""
        make_folder(self.layout)
        place = self.layout.control / order
        place.touch()
        return place

    def take_away(self, name: str, *, given_by_ns: Optional[int] = None) -> None:
        """The order has been carried out, or is withdrawn; `given_by_ns`: not one given later."""
        kept = {}
        for place, given_at_ns in self._given(name, self._noted()):
            if given_by_ns is not None and given_at_ns > given_by_ns:
                continue
            try:
                place.unlink()
            except FileNotFoundError:
                continue
            except OSError:
                kept[str(place)] = given_at_ns
        if kept:
            make_folder(self.layout)
            files = {**self._noted(), **kept}
            write_json(self._note, {"schema_version": 1, "files": files}, durable=False)

    def take_away_leaving(self) -> None:
        for name in LEAVING:
            self.take_away(name)

    def _given(self, name: str, noted: dict[str, int]) -> Iterator[tuple[Path, int]]:
        for place in self.places(name):
            given_at_ns = _given_at_ns(place)
            if given_at_ns is not None and given_at_ns != noted.get(str(place)):
                yield place, given_at_ns

    @property
    def _note(self) -> Path:
        return self.layout.control / "carried-out.json"

    def _noted(self) -> dict[str, int]:
        try:
            return {str(place): int(at) for place, at in read_json(self._note)["files"].items()}
        except (OSError, FormatError, KeyError, AttributeError, TypeError, ValueError):
            return {}  # damaged: an order that was carried out is carried out again


def make_folder(layout: RunLayout) -> None:
    """Of a run that has not begun, or whose folder somebody has removed."""
    folder = layout.control
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = layout.root.stat()
    if os.geteuid() == 0:
        os.chown(folder, owner.st_uid, owner.st_gid)  # the ranks have to get in


def control_files(layout: RunLayout, record: RunRecord) -> ControlFiles:
    return ControlFiles(layout, record.run_id, record.spec.recovery.control_dir)


def _given_at_ns(place: Path) -> Optional[int]:
    """None when its folder does not list it. Listed, because a name that was once looked up in vain
    may stay away for a minute on a shared file system (nfs(5), acdirmax)."""
    try:
        if place.name not in os.listdir(place.parent):  # noqa: PTH208
            return None
    except OSError:
        return None
    try:
        return place.lstat().st_mtime_ns  # a link in a folder that others write to is not followed
    except OSError:
        return 0
