"""The leader's pen: all that agents write to the run directory, in order, by one thread.

A file server that is away holds up this thread and nothing else; then the newest agents.json counts
and older ones are left out. What cannot be written (disk full) costs a warning, once.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import warn
from ftslurm.files import append_record, fsync_folder, write_atomic
from ftslurm.run.layout import AttemptLayout


class Ledger:
    """Calls return at once; `then` of `flush` is called by the writing thread."""

    def __init__(self) -> None:
        self.files = 0
        self.bytes = 0
        """Written so far."""
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._status: Optional[tuple[Path, dict[str, Any]]] = None
        self._lock = threading.Lock()
        self._told: set[str] = set()
        threading.Thread(target=self._write_on, daemon=True).start()

    def status(self, paths: AttemptLayout, record: dict[str, Any]) -> None:
        """Replace agents.json."""
        with self._lock:
            is_waiting, self._status = self._status is not None, (paths.agents_json, record)
        if not is_waiting:
            self._todo.put(self._write_status)

    def event(self, paths: AttemptLayout, record: dict[str, Any]) -> None:
        """Append to agents.jsonl."""
        self._todo.put(lambda: append_record(paths.agents_jsonl, record))

    def text(self, path: Path, text: str) -> None:
        """A file of evidence; its name, as a member has sent it, stays within its folder."""

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode(), durable=False)
            self.files += 1
            self.bytes += len(text)

        self._todo.put(write)

    def flush(self, paths: AttemptLayout, then: Callable[[], None]) -> None:
        """Make what was written of an attempt durable."""

        def sync() -> None:
            for path in [paths.agents_json, paths.agents_jsonl, *evidence(paths).rglob("*")]:
                if path.is_file():
                    with path.open("rb") as stream:
                        os.fsync(stream.fileno())
            for folder in (paths.root, evidence(paths), evidence(paths) / "stacks"):
                if folder.is_dir():
                    fsync_folder(folder)

        self._todo.put(sync)
        self._todo.put(then)

    def _write_status(self) -> None:
        with self._lock:
            waiting, self._status = self._status, None
        if waiting is None:
            return
        path, record = waiting
        # Compact: indenting 10,000 ranks takes a second in Python's own encoder.
        data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        write_atomic(path, data, durable=False)
        self.files += 1
        self.bytes += len(data)

    def _write_on(self) -> None:
        while True:
            act = self._todo.get()
            try:
                act()
            except Exception as error:  # noqa: BLE001 - nothing more would be on record, nor flushed
                why = str(error) if isinstance(error, OSError) else repr(error)
                if why not in self._told:
                    self._told.add(why)
                    warn(f"agent: not on record: {why}")


def evidence(paths: AttemptLayout) -> Path:
    return paths.root / "evidence"
