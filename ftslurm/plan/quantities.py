"""Numbers on the command line: what they have to be is said where they are not. For argparse."""

from __future__ import annotations

import argparse
import math
import re

LEAST, MOST = 1e-12, 1e18
"""Far enough from where floats end that what is reckoned with such numbers is no infinity."""

_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")


def positive(text: str) -> float:
    value = from_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not above 0")
    return value


def from_zero(text: str) -> float:
    """Also with commas between thousands, as `ftslurm report` prints it."""
    try:
        value = float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        plain = "; leave the unit out, e.g. 180 or 70e9" if _has_unit(text) else ""
        raise argparse.ArgumentTypeError(f"`{text}` is no number from 0 on{plain}")
    if value and not LEAST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"`{text}` is beyond all that is ever planned for")
    return value


def _has_unit(text: str) -> bool:
    """`3m`, `50GB`, `1k`: a number that goes on."""
    return text[:1].isdigit() and text[-1:].isalpha()


def count(text: str) -> int:
    value = positive(text.replace(",", "").replace("_", ""))
    if value != int(value):
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number")
    return int(value)
