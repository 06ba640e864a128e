"""conf/health and a site's overrides become the one file that the nodes' own copy reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ftslurm.errors import UsageError
from ftslurm.files import write_json
from ftslurm.health.settings_file import to_record
from ftslurm.submit.compose import compose

_OF_HEALTH = ("health=", "health.")


def write_settings(out: Path, overrides: Sequence[str], config_dir: Optional[Path] = None) -> None:
    """Nothing is written unless all of it can be right."""
    for text in overrides:
        if not text.startswith(_OF_HEALTH):
            raise UsageError(
                f"`{text}` has no effect on a node; give health.KEY=VALUE or health=OPTION"
            )
    spec, _ = compose(overrides, config_dir)
    write_json(out, to_record(spec.health))
