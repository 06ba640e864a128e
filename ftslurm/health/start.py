"""Where a root-owned copy begins: `python3 -I -S PREFIX/lib/ftslurm/health/start.py ARGUMENTS`.

Modules come from the release that this file lies in, also when another one is installed meanwhile.
Whatever breaks in here is the probe's fault and ends with 3, never with the number that has Slurm
drain the node. That number is not 1: a Python that cannot start ends with it.
"""

import os
import sys
import traceback

BROKEN = 3
"""Nagios: unknown."""


def start() -> int:
    release = os.path.realpath(__file__).rsplit("/", 3)[0]
    prefix = release.rsplit("/", 2)[0]
    sys.path.insert(0, release)
    try:
        from ftslurm.health.command import main

        return main(settings=f"{prefix}/etc/health.json")
    except Exception as error:  # noqa: BLE001
        if hasattr(error, "exit_code"):  # one of ours, which is told in a sentence
            print(f"ftslurm: error: {error}", file=sys.stderr)  # noqa: T201
        else:
            traceback.print_exc()
        return BROKEN


if __name__ == "__main__":
    sys.exit(start())
