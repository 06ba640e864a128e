"""Tasks that ask sbatch for the same things, for as many ranks, share a script and so an array.
Pure.

The script carries the lines for sbatch; what it runs is each task's own.
"""

from __future__ import annotations

import shlex

from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.submit.freeze import Plan
from ftslurm.submit.render import sbatch_options

_MARK = "#SBATCH "


class Groups:
    """The groups of one sweep, numbered as they are met."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[tuple[str, ...], tuple[str, ...], int], int] = {}

    def of(self, plan: Plan) -> int:
        """The number of a run's group."""
        lines = tuple(line for line in plan.script.splitlines() if line.startswith(_MARK))
        # Not the plan's own arguments: those of a run that resubmits itself have a job name of its
        # own, under which only one job runs at once; here that is for its next jobs.
        options = tuple(sbatch_options(plan.spec.cluster, log=None))
        # With spares, as many nodes may be asked for and fewer have ranks.
        key = (lines, options, plan.spec.world_size)
        return self._numbers.setdefault(key, len(self._numbers))

    def texts(self, layout: SweepLayout) -> dict[int, tuple[str, str]]:
        """Number -> (script, sbatch's arguments as one line of shell)."""
        return {
            number: (_script(lines, layout), f"{shlex.join(options)}\n")
            for (lines, options, _), number in self._numbers.items()
        }


def _script(lines: tuple[str, ...], layout: SweepLayout) -> str:
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"# Sweep {layout.sweep_id}: each task goes on as the batch script of its own run.",
            "# $1: number of the task less its index in the array.",
            "set -uo pipefail",
            f"sweep={shlex.quote(str(layout.root))}",
            'printf -v task "%04d" "$(($1 + SLURM_ARRAY_TASK_ID))"',
            f"script=$sweep/{layout.sweep_id}-$task/submit/train.sbatch",
            "# A shared file system may be away for a while; leaving would be final.",
            "for pause in 0 1 2 4 8 16 30 60 60 60 60 60 60 60 60 60 60; do",
            '  sleep "$pause"',
            '  [[ -r $script ]] && exec bash "$script"',
            "done",
            'echo "error: \\`$script\\` cannot be read on $HOSTNAME" >&2',
            "exit 1",
            "",
        ]
    )
