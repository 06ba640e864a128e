"""What is remembered of earlier looks: what came again, what lasts. Pure, and bounded in size.

The record goes to a small file per node; a file that is torn or foreign counts as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

MEMORY_S = 14 * 86400.0
_PAST = 512
_STREAKS = 512
_SAME_S = 3600.0
"""A state that lasts is remembered once in this time, not at every look."""


@dataclass(frozen=True)
class Past:
    """`what`: a code such as XID79, a rule, or `reset` for a GPU that was reset."""

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

    def within(self, what: str, bus: str, *, now: float, window_s: float) -> list[Past]:
        return [
            one
            for one in self.past
            if one.what == what and one.bus == bus and now - one.at <= window_s
        ]


def with_past(history: History, new: list[Past], *, now: float) -> History:
    """With what is new and without what is old; the newest where there is too much."""
    kept = [one for one in history.past if now - one.at <= MEMORY_S]
    for one in new:
        if one.what.startswith("XID") or one.what == "reset" or not _is_known(kept, one):
            kept.append(one)
    return History(tuple(kept[-_PAST:]), history.streaks)


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
            streaks[key] = Streak(before.reads + 1, before.since, now)
    return History(history.past, streaks)


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
        texts = [text for one in past for text in (one.what, one.bus, one.key, one.user)]
    except (TypeError, KeyError, AttributeError, IndexError):
        return History()
    is_whole = all(isinstance(number, (int, float)) for number in numbers)
    return History(past, streaks) if is_whole and all(map(_is_text, texts)) else History()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
