"""What the batch script runs where recovery.standby is on: words for the renderer. Pure.

Nothing here quotes for bash or knows how a process a node is started: the renderer puts the
interpreter and srun in front.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftslurm.errors import SpecError
from ftslurm.run.spec import RunSpec

_CALL = ("ftslurm.submit.executor", "submitit.core.submission")
_TRAINING = ("ftslurm.train.preload",)

RANK_MODULE = "ftslurm.submit.rank"


def rank_modules(spec: RunSpec) -> Sequence[str]:
    """Words after `python -u -m` of a rank, without its arguments."""
    if not spec.recovery.standby:
        return [RANK_MODULE]
    return ["ftslurm.node.standby_rank", RANK_MODULE]


def standby_modules(spec: RunSpec) -> Sequence[str]:
    """Words after `python -u -m` of a node's standby; empty: the run has none."""
    if not spec.recovery.standby:
        return []
    is_training = not spec.entry.startswith("rank:")
    return ["ftslurm.node.standby", *_CALL, *(_TRAINING if is_training else ())]


def check_standby(spec: RunSpec) -> None:
    """SpecError where a standby would never serve a rank."""
    if not spec.recovery.standby:
        return
    if spec.cluster.container or spec.cluster.container_image:
        raise SpecError(
            "recovery.standby is on and the ranks are in a container, into which no process "
            "outside can fork; switch one of them off"
        )
    if spec.program:
        raise SpecError(
            "recovery.standby is on and the run is a program, which begins anew with each attempt; "
            "switch it off"
        )
