"""What ended an attempt, asked for within a deadline: the sources are read, then classified.

Whatever goes wrong in it, the attempt is decided on: without a finding the count of failures alone
does, and the decision says why there was none. By the deadline what has come is classified.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Optional

from ftslurm.diagnosis.causes import UNKNOWN
from ftslurm.run.layout import RunLayout

if TYPE_CHECKING:
    from ftslurm.diagnosis.finding import Finding
    from ftslurm.diagnosis.gathering import Gathering
    from ftslurm.scheduler.protocol import Scheduler

DEADLINE_S = 5.0
"""Slurm's accounting may need seconds, or not answer at all; the nodes are idle meanwhile."""
IN_GRACE_S = 1.0
"""Every second of it is needed to get the run's next job."""
MARGIN_S = 1.0


def find(
    layout: RunLayout,
    number: int,
    *,
    scheduler: Optional[Scheduler],
    rc: int,
    deadline_s: float,
) -> tuple[Optional[Finding], str]:
    """The finding, and why there is none. `scheduler` None: Slurm is not asked."""
    found: list[Finding] = []
    begun: list[Gathering] = []
    errors: list[str] = []

    def work() -> None:
        # Late, and here: a module that cannot be loaded must not cost the decision.
        try:
            from ftslurm.diagnosis.classify import classify
            from ftslurm.diagnosis.clues import gather

            clues, facts = gather(
                layout,
                number,
                scheduler=scheduler,
                rc=rc,
                deadline_s=deadline_s,
                under_way=begun.append,
            )
            found.append(classify(clues, facts))
        except Exception as error:  # noqa: BLE001 - it is told, and the run goes on
            errors.append(f"{type(error).__name__}: {error}")

    # A read of a file system that is away cannot be ended; the process ends without this thread.
    thread = threading.Thread(target=work, name="find", daemon=True)
    thread.start()
    began = time.monotonic()
    thread.join(deadline_s + MARGIN_S)
    for one in begun:  # the nodes are idle meanwhile
        thread.join(one.looks.left_s + MARGIN_S if one.looks else 0.0)
    if found:
        return found[0], ""
    so_far = _so_far(begun[0], rc) if begun and not errors else None
    if so_far is not None:
        return so_far, ""
    took_s = time.monotonic() - began
    return None, errors[0] if errors else f"it took longer than {took_s:.0f} s"


def _so_far(gathering: Gathering, rc: int) -> Optional[Finding]:
    """Of what has come, if that tells anything: one source hangs."""
    from ftslurm.diagnosis.classify import classify  # loaded by now

    with contextlib.suppress(Exception):  # as above; it is still being added to
        finding = classify(list(gathering.clues), gathering.facts(rc))
        return finding if finding.cause != UNKNOWN or finding.sick else None
    return None
