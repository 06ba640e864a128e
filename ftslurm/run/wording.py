"""A span of time or a count in words, for a person at a glance."""

from __future__ import annotations


def format_span(seconds: float) -> str:
    """Below two minutes in seconds, below two hours in minutes, below three days in hours."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.1f} days"


def format_count(count: int, what: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{count} {what}{'' if count == 1 else 's'}"
