"""One visit to this node: look, act where Slurm called for it, and leave a report.

What the visit cannot do as it should becomes a note of its report. Without its folder of state
nothing is acted on: nobody could tell later whose drain it was.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ftslurm.errors import FtslurmError
from ftslurm.health.job import JobFacts
from ftslurm.health.latch import read_latch
from ftslurm.health.probe import EPILOG, PERIODIC, PROLOG, Probe, look_at, settle
from ftslurm.health.report import Report, report_of
from ftslurm.health.settings import HealthSettings
from ftslurm.health.state_dir import StateDir

if TYPE_CHECKING:
    from ftslurm.health.drain import Action

ACTING = (PROLOG, EPILOG, PERIODIC)


@dataclass(frozen=True)
class Visit:
    probe: Probe
    report: Report
    takes_out: bool
    """Slurm is to take the node out of service."""


def visit(
    context: str,
    settings: HealthSettings,
    complaint: str = "",
    *,
    since: Optional[float] = None,
    environ: Mapping[str, str] = os.environ,
) -> Visit:
    """`complaint` about the settings; `since`: kernel lines before it (UTC seconds) do not count
    where there is no state to say which are new."""
    job = JobFacts.from_environ(environ)
    complaints = [complaint]
    action: Optional[Action] = None
    with contextlib.ExitStack() as stack:
        state = None
        if context in ACTING or os.geteuid() == 0:
            try:
                state = stack.enter_context(StateDir(Path(settings.state_dir)))
            except FtslurmError as error:
                complaints.append(f"{error}; until then nothing is remembered, or drained")
        probe = look_at(context, settings, job, state, since=since)
        if state is not None:
            complaints.append(_latched(state))
        if state is not None and context in ACTING:
            action, unsettled = _act(context, probe, settings, job.node, state, complaint)
            complaints.append(unsettled)
    complaints += probe.complaints
    complaints = [text for text in complaints if text]
    report = report_of(probe, node=job.node, action=action, complaints=complaints)
    # Also where another look stood in for this one.
    report = replace(report, context=context, job=job.job_id or report.job)
    if settings.verdict_dir and context in ACTING:
        complaints.append(_publish(Path(settings.verdict_dir), report))
        report = replace(report, complaints=tuple(text for text in complaints if text))
    return Visit(probe, report, bool(action and action.exit_code))


def _latched(state: StateDir) -> str:
    """That the breaker holds this node back: nobody would know, of a node in service."""
    latch = read_latch(state, time.time())
    return latch.sentence(time.time()) if latch else ""


def _publish(folder: Path, report: Report) -> str:
    """What has been done by now must not be lost for a folder."""
    from ftslurm.health.verdict_folder import write_verdicts

    try:
        return write_verdicts(folder, report)
    except OSError as error:
        return f"no verdict is left in `{folder}` for a run to read: {error}"


def _act(
    context: str,
    probe: Probe,
    settings: HealthSettings,
    node: str,
    state: StateDir,
    complaint: str,
) -> tuple[Action, str]:
    """(what was done, complaint). Imported here: who only looks needs nothing of it.

    What could not be done yet is not settled, and the looks to come find it again: where Slurm
    could not be asked, where the node was in other hands, which will give it back one day, and
    where the settings could not be read (`complaint`), which they may be in a minute.
    """
    from ftslurm.health.drain import FAILED, FOREIGN, act

    action = act(
        probe.verdicts,
        settings,
        node,
        state,
        context=context,
        boot_id=probe.reading.boot_id,
        looked_at=probe.reading.at,
        reading=probe.reading,
        baseline=probe.baseline,
    )
    is_open = action.word in (FAILED, FOREIGN) or bool(complaint)
    return action, "" if is_open else settle(state, probe)
