"""The one error of these tools: a sentence for the person who asked, never a traceback."""

from __future__ import annotations


class ClusterError(Exception):
    """What went wrong, where, and what to do about it."""
