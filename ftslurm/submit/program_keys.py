"""Which keys of RunSpec mean something to a program that is no loop of ftslurm's. Pure."""

from __future__ import annotations

LOOP_ONLY = frozenset({
    "entry", "program", "steps", "seed", "deterministic", "eval_interval_steps", "eval_batches",
    "log_interval_steps", "parallel", "model", "data", "optim", "user",
})  # fmt: skip
"""What a training loop of ftslurm's own reads; a program would never see it."""

OF_CHECKPOINT = "checkpoint.emergency_deadline_s"


def is_for_program(key: str) -> bool:
    """Whether a dotted key, or a group, has an effect on a run of a program. Of a sweep's program,
    too, whose runs are named by the sweep."""
    group = key.partition(".")[0]
    if group == "checkpoint":
        return key == OF_CHECKPOINT
    return group not in LOOP_ONLY and key != "run_id"
