"""The options of `ftslurm plan`."""

from __future__ import annotations

import argparse
from typing import Any

from ftslurm.plan.capacity import STATE_BYTES_PER_PARAMETER
from ftslurm.plan.failures import GPU_MTBF_H
from ftslurm.plan.intervals import AGAIN
from ftslurm.plan.quantities import count, from_zero, positive

_EXAMPLES = """\
examples:
  ftslurm plan --gpus 1024 --params 70e9              the defaults for a model of 70B parameters
  ftslurm plan --gpus 512 --stall 0.4 --persist 30 \\
      --restart detect=10,leave=5,queue=30,start=25,load=20,first_step=10
  ftslurm plan --gpus 8192 --interval 1800            what an interval of half an hour would waste
  ftslurm plan --table                                from 8 to 131,072 GPUs
  ftslurm plan --gpus 16384 --simulate 1000           play 1,000 days and compare with the formulas
  ftslurm plan --published                            published figures and ours in their place

times are in seconds; `ftslurm status RUN` tells what saves and restarts of a run took."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ftslurm plan",
        description="How often a run of that size fails, how often it should save, what is wasted.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, kind, default, metavar, text in _OPTIONS:
        told = "" if default is None or isinstance(default, dict) else f" ({default:g})"
        settings: dict[str, Any] = {"type": kind, "default": default, "metavar": metavar}
        made.add_argument(name, help=text + told, **settings)
    made.add_argument("--table", action="store_true", help="for 8 to 131,072 GPUs")
    made.add_argument("--published", action="store_true", help="compare with published figures")
    made.add_argument("--json", action="store_true", help="for programs; schema_version 1")
    return made


def _parts(text: str) -> dict[str, float]:
    if "=" not in text:
        return {"restart": from_zero(text)}
    parts: dict[str, float] = {}
    for part in text.split(","):
        name, _, seconds = part.partition("=")
        if not name or name in parts:
            raise argparse.ArgumentTypeError(
                f"`{part}` is no PART=SECONDS of its own; write e.g. detect=10,load=60"
            )
        if name == AGAIN:
            raise argparse.ArgumentTypeError(
                f"`{part}`: what is trained again follows from the interval; leave it out"
            )
        if not seconds:
            raise argparse.ArgumentTypeError(f"`{part}` has no seconds; write e.g. {name}=60")
        parts[name] = from_zero(seconds)
    return parts


_OPTIONS: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("--gpus", count, None, "N", "of the run"),
    ("--gpu-mtbf", positive, GPU_MTBF_H, "H", "hours between two failures of one GPU, its share of"
     " the node and the network included"),
    ("--params", positive, None, "P", "parameters of the model, e.g. 70e9"),
    ("--bytes-per-param", positive, STATE_BYTES_PER_PARAMETER, "B",
     "of a checkpoint: 14 with AdamW in BF16, 16 with gradients"),
    ("--state-gb", positive, None, "GB", "size of a checkpoint, instead of --params"),
    ("--stall", positive, 1.0, "S", "how long a save stops the training"),
    ("--persist", from_zero, 30.0, "S", "how long after it the save is not durable yet"),
    ("--restart", _parts, {"restart": 180.0}, "S|PART=S,...",
     "from a failure to the first new step, as a sum or in parts (180)"),
    ("--interval", positive, None, "S", "training between two saves, instead of the best"),
    ("--keep", count, 3, "K", "checkpoints kept"),
    ("--gpus-per-node", count, 8, "N", ""),
    ("--grace", positive, 120.0, "S", "from a preemption's signal to the kill"),
    ("--simulate", positive, None, "DAYS", "of training, event by event"),
    ("--burst", positive, 1.0, "SHAPE", "failures of the simulation: 1 at random, below it in"
     " bursts (shape of Weibull's distribution)"),
    ("--seed", int, 0, "N", "of the simulation"),
)  # fmt: skip
