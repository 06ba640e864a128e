"""What is remembered of earlier looks: what came again, what lasts. Pure, and bounded in size.

The record goes to a small file per node; a file that is torn or foreign counts as none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from ftslurm.health.signals import is_number

MEMORY_S = 14 * 86400.0
_PAST = 512
_PAST_OF_ONE = 16
"""Of one thing on one GPU: who floods the log with his own Xids makes no loss forgotten."""
_STREAKS = 512
_SAME_S = 3600.0
"""A state that lasts is remembered once in this time, not at every look."""
_UNSEEN_S = 1800.0


@dataclass(frozen=True)
class Past:
    """`what`: a code such as XID79, or a rule."""

    what: str
    at: float
    key: str = ""
    """Where: a verdict's key."""
    bus: str = ""
    boot_id: str = ""
    job: str = ""
    user: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Streak:
    """In how many looks in a row a rule has held, and since when."""

    reads: int
    since: float
    last: float


@dataclass(frozen=True)
class History:
    past: tuple[Past, ...] = ()
    streaks: Mapping[str, Streak] = field(default_factory=dict)

    def within(self, what: str, *, now: float, window_s: float) -> list[Past]:
        return [one for one in self.past if one.what == what and 0 <= now - one.at <= window_s]


def with_past(history: History, new: list[Past], *, now: float) -> History:
    """With what is new and without what is old; the newest where there is too much."""
    kept = [one for one in history.past if now - one.at <= MEMORY_S]
    for one in new:
        if one.what.startswith("XID") or not _is_known(kept, one):
            kept.append(one)
    newest, counts = [], Counter[tuple[str, str]]()
    for one in reversed(kept):
        counts[one.what, one.bus] += 1
        if counts[one.what, one.bus] <= _PAST_OF_ONE:
            newest.append(one)
    return History(tuple(reversed(newest[:_PAST])), history.streaks)


def _is_known(kept: list[Past], new: Past) -> bool:
    return any(
        one.what == new.what and one.key == new.key and 0 <= new.at - one.at < _SAME_S
        for one in reversed(kept)
    )


def with_streaks(
    history: History,
    holding: Mapping[str, bool],
    unread: set[str],
    *,
    now: float,
    since: Optional[float],
    boot_id: str,
) -> History:
    """`holding`: keys `boot_id|rule place` of what holds now, and whether that is a rise `since`
    the baseline: two looks at the same rise are one. A rule whose signal could not be read
    (`unread`) is neither broken off nor counted. A streak ends with the boot."""
    streaks = {
        key: streak
        for key, streak in history.streaks.items()
        if key.startswith(f"{boot_id}|") and _rule_of(key) in unread
    }
    for key in sorted(holding)[:_STREAKS]:
        before = history.streaks.get(key)
        if before is None:
            streaks[key] = Streak(1, now, now)
        elif is_same_rise(before, holding[key], since):
            streaks[key] = before
        else:
            streaks[key] = Streak(before.reads + 1, lasting_since(before, now), now)
    return History(history.past, streaks)


def lasting_since(streak: Streak, now: float) -> float:
    """Since when, by a look at `now`. Time that nobody looked in, and what a clock makes of it that
    is set forward or back, is no time that anything has lasted."""
    return streak.since if 0 <= now - streak.last <= _UNSEEN_S else now


def is_same_rise(streak: Streak, is_rise: bool, since: Optional[float]) -> bool:
    return is_rise and (since is None or since < streak.last)


def _rule_of(key: str) -> str:
    return key.partition("|")[2].partition(" ")[0]


def history_record(history: History) -> dict[str, Any]:
    """For JSON; the file that it goes to has the schema_version."""
    return asdict(history)


def parse_history(record: Any) -> History:
    """An empty one of what is no record of one."""
    try:
        past = tuple(Past(**one) for one in record["past"])
        streaks = {str(key): Streak(**one) for key, one in record["streaks"].items()}
        numbers = [one.at for one in past]
        for one in streaks.values():
            numbers += [one.reads, one.since, one.last]
        texts = [value for one in past for name, value in vars(one).items() if name != "at"]
    except (TypeError, KeyError, AttributeError, IndexError):
        return History()
    is_whole = all(map(is_number, numbers)) and all(isinstance(text, str) for text in texts)
    return History(past, streaks) if is_whole else History()
