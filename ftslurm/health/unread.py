"""What could not be read, from look to look: counted once a look, and said when it lasts. Pure.

A source that is never read leaves a node blind, and neither healthy nor sick: nothing is drained
for it (but for NVML, see verdicts.py), so somebody has to be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftslurm.health.history import History
from ftslurm.health.verdict import Verdict

_RULES = "unread-"
_AGAIN_S = 3600.0


def as_counted_before(history: History, before: History) -> History:
    """`history`, with what could not be read counted as `before`: of two looks in one, the second
    tells."""
    kept = {key: one for key, one in before.streaks.items() if f"|{_RULES}" in key}
    return History(history.past, {**history.streaks, **kept})


def too_long(
    verdicts: Sequence[Verdict], before: History, after: History, *, boot_id: str, least: int
) -> Iterator[str]:
    """What has not been read in `least` looks in a row: said then, and once an hour from then on.
    `before` and `after` the look of `verdicts`."""
    for verdict in verdicts:
        key = f"{boot_id}|{verdict.key}"
        now, then = after.streaks.get(key), before.streaks.get(key)
        if not verdict.rule.startswith(_RULES) or now is None or now.reads < least:
            continue
        hours = (now.last - now.since) // _AGAIN_S
        is_known = then is not None and then.reads >= least
        if is_known and then is not None and hours == (then.last - now.since) // _AGAIN_S:
            continue
        yield f"this node is not looked at as it should be: {verdict.sentence}"
