"""What is remembered of earlier looks: what came again, what lasts. Pure, and bounded in size.

The record goes to a small file per node; a file that is torn or foreign counts as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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
    history: History, holding: set[str], unread: set[str], *, now: float, boot_id: str
) -> History:
    """`holding`: keys that hold now. What a failed source would have told (`unread`: beginnings of
    keys) is neither broken off nor counted. A streak ends with the boot."""
    streaks: dict[str, Streak] = {}
    for key, streak in history.streaks.items():
        if key not in holding and key.startswith(f"{boot_id}|") and _is_unread(key, unread):
            streaks[key] = streak
    for key in sorted(holding)[:_STREAKS]:
        before = history.streaks.get(key)
        streaks[key] = Streak(before.reads + 1, before.since) if before else Streak(1, now)
    return History(history.past, streaks)


def _is_unread(key: str, unread: set[str]) -> bool:
    rule = key.partition("|")[2].partition(" ")[0]
    return rule in unread


def history_record(history: History) -> dict[str, Any]:
    """For JSON; the file that it goes to has the schema_version."""
    return asdict(history)


def parse_history(record: Any) -> History:
    """An empty one of what is no record of one."""
    try:
        past = tuple(Past(**one) for one in record["past"])
        streaks = {str(key): Streak(**one) for key, one in record["streaks"].items()}
        numbers = [one.at for one in past] + [one.since for one in streaks.values()]
        numbers += [one.reads for one in streaks.values()]
        texts = [text for one in past for text in (one.what, one.bus, one.key)]
    except (TypeError, KeyError, AttributeError, IndexError):
        return History()
    is_whole = all(isinstance(number, (int, float)) for number in numbers)
    return History(past, streaks) if is_whole and all(map(_is_text, texts)) else History()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
