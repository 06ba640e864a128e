"""ftslurm: a Slurm training run that, once submitted, finishes as if nothing had ever failed.

    import ftslurm

    state = ftslurm.resume_dir(default=".") / "state.pt"    # kept over all attempts of a run
    if ftslurm.should_stop():                               # once a step; then save and exit

Two questions for a program started by `ftslurm run -- COMMAND`; what they mean is in
ftslurm/program/inside.py. Importing this costs nothing.
"""

from __future__ import annotations

# As of typing, which takes longer to load than Python to start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Optional, Union

# A literal: importlib.metadata would cost more than argparse and pathlib together at each start.
__version__ = "0.1.0"

__all__ = ["__version__", "resume_dir", "should_stop"]


def resume_dir(default: Union[str, Path, None] = None) -> Optional[Path]:
    """The folder in which a run's attempts find what the ones before saved; outside of a run
    `default`. A file that changes in it counts as progress: keep logs elsewhere."""
    from ftslurm.program import inside

    return inside.resume_dir(default)


def should_stop() -> bool:
    """Whether this rank was asked to leave: save, let all ranks have saved, and exit.

    Ranks learn of it at different moments, and an operator's order comes to rank 0 alone. With
    several ranks, agree before you act: all-reduce the answer by its maximum, at the same step.

    The call is also a sign of life: it costs some microseconds, and a job whose ranks have all
    called it and then stay silent is taken for hung, and started again. May be silent that long:
    `recovery.hang_factor` times the usual time between two calls plus `recovery.hang_floor_s`, and
    in any case `recovery.phase_limit_s.evaluating` (an hour), since an evaluation or a save looks
    the same. Call it in long evaluations as well, and lower that limit, to be found sooner. Whoever
    never calls it, on all ranks, is never judged.
    """
    from ftslurm.program import inside

    return inside.should_stop()
