"""The options of `ftslurm plan`."""

from __future__ import annotations

import argparse
from typing import Any

from ftslurm.errors import UsageError
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


def refuse_what_is_of_no_use(options: argparse.Namespace) -> None:
    """UsageError for an option that nothing would be done with."""
    given = {name for name, _, default, *_ in _OPTIONS if _value(options, name) != default}
    given |= {name for name in ("--table", "--published") if _value(options, name)}
    for name, others, why in _AGAINST:
        if name in given and (found := [one for one in others if one in given]):
            raise UsageError(f"{name} {why}; leave {found[0]} out, or {name}")
    for names, others, why in _ONLY_WITH:
        if (alone := [one for one in names if one in given]) and not given.intersection(others):
            raise UsageError(f"{alone[0]} {why} {' or '.join(others)}; leave it out, or name that")


def _value(options: argparse.Namespace, name: str) -> Any:
    return getattr(options, name.lstrip("-").replace("-", "_"))


def _shape(text: str) -> float:
    value = positive(text)
    if not 0.1 <= value <= 10.0:
        raise argparse.ArgumentTypeError(f"`{text}` is no shape between 0.1 and 10")
    return value


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
    ("--gpus-per-node", count, 8, "N", "of the storage's figures by node"),
    ("--grace", positive, 120.0, "S", "from a preemption's signal to the kill"),
    ("--simulate", positive, None, "DAYS", "of training, event by event"),
    ("--burst", _shape, 1.0, "SHAPE", "failures of the simulation: 1 at random, below it in"
     " bursts (shape of Weibull's distribution, 0.1 to 10)"),
    ("--seed", int, 0, "N", "of the simulation"),
)  # fmt: skip

_SIZES = ("--params", "--state-gb")
_STORAGE = ("--keep", "--gpus-per-node", "--grace")
_AGAINST: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("--published", tuple(["--table", *(name for name, *_ in _OPTIONS)]),
     "has sizes and costs of its own"),
    ("--table", ("--gpus",), "is for all sizes"),
    ("--table", ("--simulate", *_SIZES), "tells neither storage nor simulations"),
    ("--params", ("--state-gb",), "tells the size as well"),
)  # fmt: skip
_ONLY_WITH: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("--burst", "--seed"), ("--simulate",), "is for"),
    (("--bytes-per-param",), ("--params",), "is for"),
    (_STORAGE, _SIZES, "is for the storage that follows from"),
)
