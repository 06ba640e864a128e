"""What is known of nodes' health, as clues: what they saw of themselves, and what root has seen.

Pure. Only what speaks against a node or a program is a clue; a warning is none, and what could not
be told is a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Optional

from ftslurm.diagnosis.finding import Clue
from ftslurm.diagnosis.signatures import HEALTH
from ftslurm.health.breaker import is_hardware_xid
from ftslurm.health.report import SICK, Report, Told
from ftslurm.health.settings import SHADOW_MODE, HealthSettings
from ftslurm.health.xid_table import UNKNOWN

_NAMED = 5
_HELD_BACK = ("undone", "shadow")
_MOST_NODES, _MOST_SHARE = 2, 0.05
"""The breaker's of a site (health/settings.py), for what one attempt may lose at once."""
PROGRAM, SOME_PROGRAM = "program", "some program"
"""In the place of a verdict's word: the fault is the program's own; or that of a program on the
node, which may be another job's."""


def health_clues(
    report: Report, file: str, *, settings: HealthSettings, offset_s: float = 0.0
) -> tuple[list[Clue], list[str]]:
    """(clues, sentences on what could not be told). `offset_s`: of the node's clock, ahead of the
    leader's."""
    at, settings = report.at - offset_s, believed_by(report, settings)
    clues = [clue_of(told, settings, report.node, at, file) for told in report.verdicts]
    untold = [told.sentence for told in report.verdicts if told.word == UNKNOWN]
    return [clue for clue in clues if clue is not None], untold


def clue_of(
    told: Told,
    settings: HealthSettings,
    node: str,
    at: Optional[float],
    file: str,
    *,
    program: str = PROGRAM,
) -> Optional[Clue]:
    if speaks_against_node(told, settings):
        said = told.word
    elif told.hands_to_run:
        # By the time of the look it would seem to come after what came of it.
        said, at = program, None
    else:
        return None
    text = f"{said}: {told.code} of {_place(told)}: {told.sentence}"
    return Clue(HEALTH, " ".join(text.split()), at, node=node, file=file)


def what_is_untold(by_node: Mapping[str, Sequence[str]]) -> list[str]:
    """One note, however many nodes could not tell of themselves: mostly they lack the same."""
    silent = {node: sentences for node, sentences in by_node.items() if sentences}
    first = next(iter(silent.values()), ())
    return [f"the health of {few(list(silent))}: {first[0]}"] if first else []


def few(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def speaks_against_node(told: Told, settings: HealthSettings) -> bool:
    is_shadow = settings.mode == SHADOW_MODE or told.rule in settings.shadow
    return told.word in SICK and not is_shadow


def believed_by(report: Report, settings: HealthSettings) -> HealthSettings:
    """Where a site only tries its rules, or its breaker has called a drain off (health/drain.py),
    nothing is held against a node here either."""
    is_held_back = report.action in _HELD_BACK
    return replace(settings, mode=SHADOW_MODE) if is_held_back else settings


def false_alarms(codes: Iterable[tuple[str, str]], *, nodes: int) -> dict[str, str]:
    """Codes to hold against no node, each with a sentence, of (code, node). A new driver or a wrong
    limit makes many nodes say the same at once, and no run has others in the place of all. `nodes`:
    of the attempt."""
    by_code: dict[str, set[str]] = {}
    for code, node in codes:
        by_code.setdefault(code, set()).add(node)
    everywhere = {node for found in by_code.values() for node in found}
    most = max(_MOST_NODES, _MOST_SHARE * nodes)
    too_many = len(everywhere) > max(most, nodes / 2)
    return {
        code: f"{len(found)} of {nodes} nodes say {code} of themselves at once"
        for code, found in by_code.items()
        if too_many or (len(found) > most and not is_hardware_xid(code))
    }


def _place(told: Told) -> str:
    if told.gpu is None and not told.bus:
        return "the node"
    return f"gpu{'' if told.gpu is None else told.gpu}{f' at {told.bus}' if told.bus else ''}"
