"""A start without a sweep is refused: Hydra would run it right here, launcher or not.

Choosing the launcher chooses this callback (schema.py), the one thing of Hydra's that a plain start
asks.
"""

from __future__ import annotations

import sys
from typing import Any

from ftslurm.errors import EXIT_USAGE


class RefusePlainRun:
    """A callback as Hydra knows them."""

    def on_run_start(self, **_: Any) -> None:
        print(  # noqa: T201
            "ftslurm: error: without -m (--multirun) Hydra asks no launcher and would run this "
            "program here, not on the cluster; add -m to submit it, as a sweep of one where "
            "nothing is swept over, or give hydra/launcher=basic to run it here",
            file=sys.stderr,
        )
        # No Exception, of which Hydra makes a warning.
        raise SystemExit(EXIT_USAGE)

    def __getattr__(self, name: str) -> Any:
        """All other occasions pass."""
        if name.startswith("on_"):
            return lambda **_: None
        raise AttributeError(name)
