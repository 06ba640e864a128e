"""Where conf/ and slurm/ lie. Paths only: nothing here reads, writes or decides.

In a checkout, which an editable install points at, they stand beside the package; a wheel has them
inside it (setup.py), so that an installed ftslurm takes no name in site-packages but its own.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_folder() -> Path:
    """The configs that every run is composed from."""
    return _folder("conf")


def batch_template() -> Path:
    """The batch script's template."""
    return _folder("slurm") / "train.sbatch.j2"


def _folder(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
