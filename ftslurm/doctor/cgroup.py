"""How much more memory the cgroup that this process is in may take, of version 2 or 1.

Reads only. What a file system keeps cached counts as taken there, so there may be more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


def room_in_cgroup(root: Path = Path("/")) -> Optional[float]:
    """Bytes; None where no limit is set, or none can be read."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            top, most, taken = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = "sys/fs/cgroup/memory"
            most, taken = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / top / path.lstrip("/")
        while folder != root / "sys/fs":
            room = _room(folder / most, folder / taken)
            rooms += [] if room is None else [room]
            folder = folder.parent
    return min(rooms, default=None)


def _room(most: Path, taken: Path) -> Optional[float]:
    try:
        limit = int(most.read_text())  # `max` is no number
        return None if limit >= _NO_LIMIT else max(0.0, float(limit - int(taken.read_text())))
    except (OSError, ValueError):
        return None
