"""How long this node takes to see what another has made, made longer or replaced.

Looks on from a thread of its own while the node does other things. Times count from `begin`, which
is told when the other has done it, so they are too small by what the telling takes: milliseconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

LOOKS_S = 60.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.25


class Watch:
    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._clock, self._sleep = folder, clock, sleep
        self._waited: dict[str, Callable[[], bool]] = {}
        self._seen_s: dict[str, float] = {}
        self._strange: list[str] = []
        self._began = 0.0
        self._lock = threading.Lock()

    def begin(self, order: Mapping[str, Any]) -> None:
        """`new`: name of a file that was made; `longer`, `journal`: name and size of files that
        have grown, to be asked for its size and to be read; `replaced`: name, text."""
        new = self._folder / str(order["new"])
        longer, size = self._folder / str(order["longer"][0]), int(order["longer"][1])
        journal, whole = self._folder / str(order["journal"][0]), int(order["journal"][1])
        replaced, text = self._folder / str(order["replaced"][0]), str(order["replaced"][1])
        self._waited = {
            "listed": lambda: new.name in os.listdir(self._folder),  # noqa: PTH208
            "found": lambda: os.path.lexists(new),
            "grown": lambda: longer.stat().st_size >= size,
            "read": lambda: len(journal.read_bytes()) >= whole,
            "replaced": lambda: replaced.read_text() == text,
        }
        self._began = self._clock()
        threading.Thread(target=self.look, daemon=True).start()

    def look(self) -> None:
        """Until all was seen, or LOOKS_S have passed."""
        pause_s = FIRST_PAUSE_S
        while self._waited and self._clock() - self._began < LOOKS_S:
            for name, is_seen in list(self._waited.items()):
                problem = self._once(name, is_seen)
                if problem is not None and problem not in self._strange:
                    with self._lock:
                        self._strange.append(problem)
            self._sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_PAUSE_S)

    def _once(self, name: str, is_seen: Callable[[], bool]) -> Optional[str]:
        try:
            if is_seen():
                with self._lock:
                    self._seen_s[name] = self._clock() - self._began
                del self._waited[name]
        except OSError as error:
            # A file that is being replaced is always there, the old one or the new.
            return f"{name}: {error.strerror or error}"
        return None

    def seen(self) -> dict[str, Any]:
        with self._lock:
            return {
                "seen_s": dict(self._seen_s),
                "strange": list(self._strange),
                "waits_for": sorted(self._waited),
                "looked_s": self._clock() - self._began,
            }
