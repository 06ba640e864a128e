"""A span of time in words: one number and a unit, for a person at a glance."""

from __future__ import annotations


def format_span(seconds: float) -> str:
    """Below two minutes in seconds, below two hours in minutes, below three days in hours."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.1f} days"
