"""Do the pieces of all ranks add up to the tensors, each element exactly once? Pure.

Replicated tensors are stored once, so for them, too, pieces tile the global shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ftslurm.checkpoint.records import ShardIndex, TensorRecord

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


def coverage_problems(indexes: Iterable[ShardIndex]) -> list[str]:
    """Holes, overlaps and contradictions over all indexes of a step, and aliases to nowhere."""
    pieces: dict[str, list[TensorRecord]] = {}
    aliases: dict[str, str] = {}
    problems = []
    for index in indexes:
        for record in index.tensors:
            pieces.setdefault(record.key, []).append(record)
        for name, target in index.aliases.items():
            if aliases.setdefault(name, target) != target:
                problems.append(f"alias {ascii(name)} has another target on rank {index.rank}")
    for name, target in aliases.items():
        if target not in pieces or name in pieces:
            problems.append(f"alias {ascii(name)} to {ascii(target)} names no stored tensor")
    for key, records in pieces.items():
        problem = _tensor_problem(records)
        if problem:
            problems.append(f"tensor {ascii(key)}: {problem}")
    return problems


def _tensor_problem(records: Sequence[TensorRecord]) -> str:
    first = records[0]
    if any((r.dtype, r.global_shape) != (first.dtype, first.global_shape) for r in records):
        return "its pieces disagree on dtype or global shape"
    boxes = [(r.offsets, r.shape) for r in records if 0 not in r.shape]
    if _has_overlap(boxes):
        return "two pieces overlap"
    covered = sum(_volume(shape) for _, shape in boxes)
    whole = _volume(first.global_shape)
    # Inside the bounds and without overlap, equal volumes mean that nothing is left out.
    return "" if covered == whole else f"pieces cover {covered} of {whole} elements"


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for length in shape:
        volume *= length
    return volume


def _has_overlap(boxes: list[Box]) -> bool:
    """Sweep along the dimension that is cut most often, so that few boxes are open at a time."""
    if len(boxes) < 2:
        return False
    dimensions = range(len(boxes[0][0]))
    if not dimensions:
        return True  # two pieces of a scalar
    cut = max(dimensions, key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    still_open: list[Box] = []
    for box in sorted(boxes, key=lambda item: item[0][cut]):
        start = box[0][cut]
        still_open = [other for other in still_open if other[0][cut] + other[1][cut] > start]
        if any(_overlap(box, other) for other in still_open):
            return True
        still_open.append(box)
    return False


def _overlap(one: Box, other: Box) -> bool:
    return all(
        a < b + b_length and b < a + a_length
        for a, a_length, b, b_length in zip(one[0], one[1], other[0], other[1])
    )
