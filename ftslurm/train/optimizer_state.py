"""Optimizer state by parameter name, read where it lies and written back as it was.

Reading never steps the optimizer and never creates state (torch's get_optimizer_state_dict does
both); a parameter without state is recorded as absent and restored as absent. Scalars such as
Adam's `step` are packed into one tensor per dtype and device: one record instead of thousands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ftslurm.errors import CheckpointError
from ftslurm.train.leaves import (
    Leaf,
    Shape,
    StateMismatch,
    describe,
    dtype_name,
    dtype_of,
    replicated,
)
from ftslurm.train.tree import flatten, unflatten

Catalogue = Mapping[str, tuple[str, Shape]]
"""key -> (dtype, global shape) of every tensor in a checkpoint that all ranks share."""


class OptimizerReader:
    """Collects one optimizer's leaves and JSON; used once."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._rank = rank
        self._world_size = world_size
        self._packs: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._leaves: list[Leaf] = []

    def read(self) -> tuple[list[Leaf], dict[str, Any]]:
        groups = []
        state: dict[str, Any] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append(
                {
                    "params": group_names(group, number, self._names),
                    "options": flatten(options, f"optimizer/groups/{number}", self._take_plain),
                }
            )
            for parameter in group["params"]:
                entry = self._optimizer.state.get(parameter)
                if entry:
                    name = self._names[id(parameter)]
                    take = partial(self._take_state, parameter)
                    state[name] = flatten(dict(entry), f"optimizer/{name}", take)
        self._check_no_other_state()
        for key, tensors in self._packs.items():
            pack = torch.stack([tensor.detach() for tensor in tensors])
            self._leaves.append(self._replicated(key, pack))
        return self._leaves, {"groups": groups, "state": state}

    def _replicated(self, key: str, tensor: torch.Tensor) -> Leaf:
        return replicated(key, tensor, rank=self._rank, world_size=self._world_size)

    def _take_plain(self, key: str, tensor: torch.Tensor) -> dict[str, Any]:
        self._leaves.append(self._replicated(key, tensor))
        return {"key": key}

    def _take_state(
        self, parameter: torch.Tensor, key: str, tensor: torch.Tensor
    ) -> dict[str, Any]:
        if tensor.ndim == 0 and not isinstance(tensor, DTensor):
            pack = f"optimizer/packed/{tensor.device.type}.{str(tensor.dtype)[6:]}"
            self._packs[pack].append(tensor)
            return {"key": pack, "index": len(self._packs[pack]) - 1}
        if isinstance(parameter, DTensor):
            _check_follows(key, tensor, parameter)
        self._leaves.append(describe(key, tensor, rank=self._rank, world_size=self._world_size))
        return {"key": key}

    def _check_no_other_state(self) -> None:
        owners = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for owner in self._optimizer.state:
            if id(owner) not in owners:
                raise CheckpointError(
                    f"the optimizer keeps state for a {type(owner).__name__} that is in none of "
                    "its parameter groups; such state cannot be saved by parameter name"
                )


def _check_follows(key: str, tensor: torch.Tensor, parameter: DTensor) -> None:
    # A plain tensor beside a sharded parameter may be a piece or a replica: guessing loses ranks.
    if (
        not isinstance(tensor, DTensor)
        or tensor.shape != parameter.shape
        or tensor.placements != parameter.placements
    ):
        placed = tensor.placements if isinstance(tensor, DTensor) else "a plain tensor"
        raise CheckpointError(
            f"`{key}` is {placed} of shape {tuple(tensor.shape)}, its parameter is "
            f"{parameter.placements} of shape {tuple(parameter.shape)}; state of a sharded "
            "parameter has to be a scalar or sharded like it"
        )


def group_names(group: Mapping[str, Any], number: int, names: Mapping[int, str]) -> list[str]:
    """Names of a group's parameters; all have to belong to the model."""
    found = []
    for position, parameter in enumerate(group["params"]):
        if id(parameter) not in names:
            raise CheckpointError(
                f"parameter {position} of optimizer group {number} (shape "
                f"{tuple(parameter.shape)}) is not in the model; build the optimizer after the "
                "model is wrapped and pass it the wrapped model's parameters"
            )
        found.append(names[id(parameter)])
    return found


class OptimizerWriter:
    """Memory for a saved optimizer state (`leaves`, to be filled) and the act of adopting it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        saved: Mapping[str, Any],
        catalogue: Catalogue,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._optimizer = optimizer
        self._catalogue = catalogue
        self._rank = rank
        self._world_size = world_size
        self.leaves: list[Leaf] = []
        self._packs: dict[str, torch.Tensor] = {}
        self._unpack: list[Callable[[], None]] = []
        self._state: dict[torch.Tensor, dict[str, Any]] = {}
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group, wanted in _match_groups(optimizer, names, saved["groups"]):
            self._prepare_options(group, wanted["options"])
            for parameter in group["params"]:
                entry = saved["state"].get(names[id(parameter)])
                if entry is not None:
                    self._state[parameter] = self._prepare_state(
                        parameter, entry, wanted["options"]
                    )

    def adopt(self) -> None:
        """Make the filled memory the optimizer's state; parameters saved without get none."""
        for unpack in self._unpack:
            unpack()
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, options in self._options:
            group.update(options)

    def _prepare_options(self, group: dict[str, Any], saved: dict[str, Any]) -> None:
        where = "optimizer group options"
        ours = {key for key in group if key != "params"}
        # Some optimizers add options in their first step (schedulefree's scheduled_lr).
        if not ours <= set(saved):
            raise StateMismatch(
                f"{where} differ: only in the program {sorted(ours - set(saved))}; use the same "
                "optimizer and scheduler"
            )
        options = {}
        for key, value in saved.items():
            current = group.get(key)
            options[key] = unflatten(value, partial(self._give_option, current))
            is_tensor = isinstance(options[key], torch.Tensor)
            if key in ours and isinstance(current, torch.Tensor) != is_tensor:
                raise StateMismatch(
                    f"`{key}` in {where}: expected {type(options[key]).__name__} as in the "
                    f"checkpoint, found {type(current).__name__}"
                )
        self._options.append((group, options))

    def _give_option(self, current: Any, entry: dict[str, Any]) -> torch.Tensor:
        dtype, shape = self._catalogue[entry["key"]]
        tensor: torch.Tensor = current
        if not isinstance(current, torch.Tensor):
            tensor = torch.empty(shape, dtype=dtype_of(dtype))
        found = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if found != (dtype, shape):
            raise StateMismatch(
                f"`{entry['key']}`: expected {dtype} of shape {shape} as in the checkpoint, found "
                f"{found[0]} of shape {found[1]}; use the same optimizer and scheduler"
            )
        self._add(entry["key"], tensor)
        return tensor

    def _prepare_state(
        self, parameter: torch.Tensor, entry: dict[str, Any], options: dict[str, Any]
    ) -> dict[str, Any]:
        # torch keeps `step` on the host unless the kernel reads it on the device
        # (Optimizer._process_value_according_to_param_policy); all else lies with its parameter.
        on_device = bool(options.get("capturable") or options.get("fused"))
        state: dict[str, Any] = {}
        for name, value in entry.items():
            host = name == "step" and not on_device
            device = torch.device("cpu") if host else parameter.device
            state[name] = unflatten(value, partial(self._give_state, parameter, device))
        return state

    def _give_state(
        self, parameter: torch.Tensor, device: torch.device, entry: dict[str, Any]
    ) -> torch.Tensor:
        key = entry["key"]
        dtype, shape = self._catalogue[key]
        if "index" in entry:
            tensor = torch.empty((), dtype=dtype_of(dtype), device=device)
            self._unpack.append(partial(_copy_scalar, tensor, self._pack(key), entry["index"]))
            return tensor
        if shape == tuple(parameter.shape):
            with torch.no_grad():
                tensor = torch.empty_like(parameter, dtype=dtype_of(dtype), requires_grad=False)
        elif isinstance(parameter, DTensor):
            raise StateMismatch(
                f"`{key}` has shape {shape}, its sharded parameter {tuple(parameter.shape)}; state "
                "of another shape can only be restored into an unsharded run"
            )
        else:
            tensor = torch.empty(shape, dtype=dtype_of(dtype), device=device)
        self._add(key, tensor)
        return tensor

    def _pack(self, key: str) -> torch.Tensor:
        if key not in self._packs:
            dtype, shape = self._catalogue[key]
            self._packs[key] = torch.empty(shape, dtype=dtype_of(dtype))
            self._add(key, self._packs[key])
        return self._packs[key]

    def _add(self, key: str, tensor: torch.Tensor) -> None:
        self.leaves.append(describe(key, tensor, rank=self._rank, world_size=self._world_size))


def _copy_scalar(into: torch.Tensor, pack: torch.Tensor, index: int) -> None:
    with torch.no_grad():
        into.copy_(pack[index])


def _match_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: list[dict[str, Any]],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(live group, saved group) pairs that hold the same parameters."""
    live = [
        (set(group_names(group, number, names)), group)
        for number, group in enumerate(optimizer.param_groups)
    ]
    if len(live) != len(saved):
        raise StateMismatch(
            f"the optimizer has {len(live)} parameter groups, the checkpoint {len(saved)}"
        )
    pairs = []
    for number, group in enumerate(saved):
        wanted = set(group["params"])
        position = max(range(len(live)), key=lambda i: -len(live[i][0] ^ wanted))
        closest, candidate = live.pop(position)
        if closest != wanted:
            raise StateMismatch(
                f"no parameter group of the optimizer equals group {number} of the checkpoint; "
                f"the closest lacks {sorted(wanted - closest)[:3]} and has besides "
                f"{sorted(closest - wanted)[:3]}"
            )
        pairs.append((candidate, group))
    return pairs
