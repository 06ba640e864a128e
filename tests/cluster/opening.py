"""Takes a cluster that is up into the hands of tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Optional

from lab import DEFAULT_SETTINGS, SYSTEM_PATH, Lab, cluster


def open_lab(folder: Optional[Path] = None) -> Lab:
    """The Lab of a cluster that is up, with everything back to default."""
    shown = json.loads(cluster("status", "--json", folder=folder).stdout)
    folder = Path(shown["folder"])
    checkout = Path(shown["source_folder"])
    lab = Lab(
        folder=folder,
        environment={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "SLURM_CONF": shown["slurm_conf"]},
        users={user["name"]: Path(user["home"]) for user in shown["users"]},
        checkout=checkout,
        python=checkout / ".venv" / "bin" / "python",
        settings={name: shown["settings"][name] for name in DEFAULT_SETTINGS},
        version=_parse_version(shown["version"]),
    )
    lab.python = _find_python(lab)
    lab.reset()
    return lab


def _parse_version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _find_python(lab: Lab) -> Path:
    """The checkout's venv, else the running one, whichever an ordinary user can execute."""
    candidates = [lab.python, Path(sys.prefix).resolve() / "bin" / "python"]
    for candidate in candidates:
        probe = [str(candidate), "-c", "import pytest"]
        try:
            if lab.run_as(lab.user, probe, check=False).returncode == 0:
                return candidate
        except OSError:
            continue  # not there, or in a folder this user cannot enter
    raise AssertionError(
        f"ordinary users can execute none of {[str(c) for c in candidates]}: make the venv "
        "from an interpreter outside root's home"
    )
