"""Where each tensor goes in a rank's shard files. Pure: sizes in, places out.

One file a rank as long as it stays below the limit: metadata servers, not bytes, are what a step of
many ranks costs a parallel file system. A file is cut between tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftslurm.checkpoint.records import LARGE_ALIGNMENT_BYTES, SMALL_ALIGNMENT_BYTES

MAX_FILE_BYTES = 32 * 1024**3


@dataclass(frozen=True)
class FilePlan:
    """One file: (position in the input, offset) in ascending order of offset, and its size."""

    places: list[tuple[int, int]]
    bytes: int


def plan_files(sizes: Sequence[int], *, max_file_bytes: int = MAX_FILE_BYTES) -> list[FilePlan]:
    """Large tensors first, on pages; then the small ones, packed on cache lines.

    A tensor above the limit gets a file of its own.
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i] < LARGE_ALIGNMENT_BYTES)
    plans: list[FilePlan] = []
    places: list[tuple[int, int]] = []
    end = 0
    for position in order:
        size = sizes[position]
        is_large = size >= LARGE_ALIGNMENT_BYTES
        offset = _align(end, LARGE_ALIGNMENT_BYTES if is_large else SMALL_ALIGNMENT_BYTES)
        if places and offset + size > max_file_bytes:
            plans.append(FilePlan(places, _align(end, LARGE_ALIGNMENT_BYTES)))
            places, offset = [], 0
        places.append((position, offset))
        end = offset + size
    if places:
        plans.append(FilePlan(places, _align(end, LARGE_ALIGNMENT_BYTES)))
    return plans


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
