"""Slurm's own commands, as root, against one cluster and of that cluster's version."""

from __future__ import annotations

import subprocess

import image
from identity import identify
from processes import attempt, daemon_environment, run
from record import Record


def ask(record: Record, *argv: str) -> str:
    """Run a command of Slurm's; its output. A failure is an error."""
    return run(image.inside(record.image, list(argv)), env=environment(record))


def try_to_ask(record: Record, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm's whose failure the caller judges."""
    return attempt(image.inside(record.image, list(argv)), env=environment(record))


def environment(record: Record) -> dict[str, str]:
    return daemon_environment(identify(record.folder).slurm_conf)
