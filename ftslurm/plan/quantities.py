"""Numbers on the command line: what they have to be is said where they are not. For argparse."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    value = from_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not above 0")
    return value


def from_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"`{text}` is no number from 0 on")
    return value


def count(text: str) -> int:
    value = positive(text.replace(",", "").replace("_", ""))
    if value != int(value):
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number")
    return int(value)
