"""A save on a thread of its own: when its result is known, and when the thread is gone.

The thread is a daemon: a save that hangs never keeps the process from leaving. Errors are kept and
handed to whoever asks, never lost with the thread (pytorch#191391).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ftslurm.train.persist import SaveResult

LOOK_S = 0.5
"""How often a deadline is asked for that may come nearer."""


class BackgroundSave:
    """`work` gives the result; `after` follows once it is known, and is asked to be short by
    `hurry` (retention)."""

    def __init__(
        self,
        step: int,
        work: Callable[[], SaveResult],
        *,
        after: Callable[[SaveResult, Callable[[], bool]], None],
        previous: BackgroundSave | None,
    ) -> None:
        self.step = step
        self.result: SaveResult | None = None
        self.error: BaseException | None = None
        self.after_error: BaseException | None = None
        self._work = work
        self._after = after
        self._previous = previous
        self._known = threading.Event()
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"save-{step}", daemon=True)
        self._thread.start()

    @property
    def is_known(self) -> bool:
        """True once there is a result or an error."""
        return self._known.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the result is known; False when `timeout_s` ran out."""
        return self._known.wait(timeout_s)

    def wait_until(self, deadline: Callable[[], float]) -> None:
        """Wait until the result is known, or that moment by time.monotonic() has come."""
        while not self.is_known and (left_s := deadline() - time.monotonic()) > 0:
            self.wait(min(left_s, LOOK_S))

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread is gone, retention included; False when `timeout_s` ran out."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Somebody waits for this thread to end; what can be done another time is left."""
        self._hurried.set()

    def _run(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.hurry()
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - kept for the training thread, see `error`
            self.error = error
        finally:
            self._known.set()
        if previous is not None:
            # One retention at a time; a save, which may be an emergency's, does not wait for it.
            previous.join()
        if self.result is not None and self.result.is_committed:
            try:
                self._after(self.result, self._hurried.is_set)
            except Exception as error:  # noqa: BLE001 - kept for the training thread
                self.after_error = error
