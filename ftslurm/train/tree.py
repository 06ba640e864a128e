"""Nested values of state dicts as plain values and tensors, and back, bit for bit.

Leaves are None, bool, int, float, str and tensors; containers are dict, list, tuple and Counter
(MultiStepLR keeps one). Anything else is refused by its path: nothing is pickled, and no value is
rounded or changes its type on the way. Tensors are handed to the caller, who returns what stands
for them; the result is what checkpoint.objects takes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ftslurm.errors import CheckpointError

Take = Callable[[str, torch.Tensor], dict[str, Any]]
Give = Callable[[dict[str, Any]], torch.Tensor]

# A dict of one entry whose name starts with `$` is ours; a user's dict that looks alike is written
# in the `$dict` form, so the two cannot be confused.
_TENSOR, _DICT, _COUNTER = "$tensor", "$dict", "$counter"


def flatten(value: Any, path: str, take: Take) -> Any:
    """`value` without its tensors; `take(path, tensor)` says what stands for each."""
    if isinstance(value, torch.Tensor):
        return {_TENSOR: take(path, value)}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)  # numpy.float64 is a float: same bits, same arithmetic
    if type(value) in (list, tuple):
        items = [flatten(item, f"{path}/{i}", take) for i, item in enumerate(value)]
        return items if type(value) is list else tuple(items)
    if type(value) in (dict, OrderedDict, Counter):
        return _flatten_dict(value, path, take)
    raise CheckpointError(
        f"`{path}` is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint keeps "
        "tensors, None, bool, int, float, str, list, tuple and dict: convert it in state_dict()"
    )


def _flatten_dict(value: dict[Any, Any], path: str, take: Take) -> Any:
    if type(value) is Counter:
        return {_COUNTER: _pairs(value, path, take)}
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {key: flatten(item, f"{path}/{key}", take) for key, item in value.items()}
    return {_DICT: _pairs(value, path, take)}


def _pairs(value: dict[Any, Any], path: str, take: Take) -> list[list[Any]]:
    for key in value:
        if type(key) not in (str, int):
            raise CheckpointError(
                f"`{path}` has the key `{key!r}`; keys of a state dict have to be str or int"
            )
    return [[key, flatten(item, f"{path}/{key}", take)] for key, item in value.items()]


def unflatten(value: Any, give: Give) -> Any:
    """What `flatten` was given; `give` returns the tensor for what `take` returned."""
    if isinstance(value, (list, tuple)):
        return type(value)(unflatten(item, give) for item in value)
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == _TENSOR:
            return give(inner)
        if key in (_DICT, _COUNTER):
            pairs = {name: unflatten(item, give) for name, item in inner}
            return Counter(pairs) if key == _COUNTER else pairs
    return {key: unflatten(item, give) for key, item in value.items()}
