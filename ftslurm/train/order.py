"""The order of an epoch's samples: a permutation of [0, n) that is computed, never stored.

It is a function of (seed, epoch, n) alone: no world size, no worker count, no library's random
generator takes part, and memory does not grow with n. It never changes for a given ORDER_VERSION:
the trajectory of every run in progress hangs on it (golden values: tests/test_data_order.py).

How: an index becomes a pair in Z_a x Z_b with a * b just above n; a Feistel network adds a keyed
hash of one half to the other by turns, which any hash makes a bijection (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains"); a result at or above n is put through again until it
falls below (cycle walking), which keeps it one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Union, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ftslurm.errors import UsageError

ORDER_VERSION = 1
"""Raised when the same (seed, epoch, n) would give another order; a saved cursor names it."""

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment (Steele, Lea and Flood 2014)
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # and its finaliser's

_Indices = NDArray[np.int64]
_Bijection = Callable[[NDArray[np.uint64]], NDArray[np.uint64]]


@overload
def permute(index: int, *, n: int, seed: int, epoch: int) -> int: ...
@overload
def permute(index: ArrayLike, *, n: int, seed: int, epoch: int) -> _Indices: ...
def permute(index: ArrayLike, *, n: int, seed: int, epoch: int) -> Union[int, _Indices]:
    """The sample that stands at place `index` of the epoch; an int for an int, else an array."""
    return _apply(index, n, _Network(n, seed, epoch).forward)


@overload
def inverse(sample: int, *, n: int, seed: int, epoch: int) -> int: ...
@overload
def inverse(sample: ArrayLike, *, n: int, seed: int, epoch: int) -> _Indices: ...
def inverse(sample: ArrayLike, *, n: int, seed: int, epoch: int) -> Union[int, _Indices]:
    """The place in the epoch at which `sample` stands: undoes `permute`."""
    return _apply(sample, n, _Network(n, seed, epoch).backward)


class _Network:
    """One keyed bijection of [0, a * b)."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n < 1 << 62:
            raise UsageError(f"an epoch of {n} samples has no order; it needs 1 to 2**62 - 1")
        width = math.isqrt(n - 1) + 1
        self._a = np.uint64(width)
        self._b = np.uint64(-(-n // width))
        self._keys = _round_keys(seed, epoch)

    def forward(self, value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(value, self._b)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _hash(left, key) % self._b) % self._b
            else:
                left = (left + _hash(right, key) % self._a) % self._a
        return left * self._b + right

    def backward(self, value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(value, self._b)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2:
                right = (right + (self._b - _hash(left, key) % self._b)) % self._b
            else:
                left = (left + (self._a - _hash(right, key) % self._a)) % self._a
        return left * self._b + right


def _apply(index: ArrayLike, n: int, bijection: _Bijection) -> Union[int, _Indices]:
    given = np.asarray(index)
    if given.size and not (given.min() >= 0 and given.max() < n):
        raise UsageError(
            f"index {given.min() if given.min() < 0 else given.max()} is outside an epoch of {n} "
            f"samples; it has to be from 0 to {n - 1}"
        )
    # At least one dimension: numpy warns of wrap-around in scalars, and not in arrays.
    result = bijection(np.atleast_1d(given).astype(np.uint64).ravel())
    outside = np.flatnonzero(result >= n)
    while outside.size:
        result[outside] = bijection(result[outside])
        outside = outside[result[outside] >= n]
    shaped = result.astype(np.int64).reshape(given.shape)
    return int(shaped) if given.ndim == 0 else shaped


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    state = _finalise((seed + _GOLDEN) & _MASK)
    state = _finalise((state ^ _finalise((epoch + 2 * _GOLDEN) & _MASK)) & _MASK)
    return [np.uint64(_finalise((state + turn * _GOLDEN) & _MASK)) for turn in range(_ROUNDS)]


def _finalise(value: int) -> int:
    """splitmix64's finaliser; `_hash` is the same on arrays."""
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def _hash(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    value = half + key
    value ^= value >> np.uint64(30)
    value *= np.uint64(_MULTIPLIERS[0])
    value ^= value >> np.uint64(27)
    value *= np.uint64(_MULTIPLIERS[1])
    value ^= value >> np.uint64(31)
    return value
