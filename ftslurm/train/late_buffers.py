"""Room for buffers that a forward makes, or makes anew, and a program that has just begun lacks.

A mask or a table of positions that grows with the longest sequence seen: the checkpoint has it as
it was, the fresh model as None or as its constructor made it. A buffer that the model itself saves
(persistent) has one form, so another one says that the program is not the one that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import torch
from torch.distributed.tensor import DTensor

from ftslurm.train.leaves import dtype_name, dtype_of
from ftslurm.train.optimizer_state import Catalogue


class LateBuffers:
    """Those of one model, for one offered step at a time: what another step had may not be left."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._replaced: list[tuple[torch.nn.Module, str, Optional[torch.Tensor]]] = []

    def make_room(
        self, catalogue: Catalogue, aliases: Mapping[str, str], device: torch.device
    ) -> None:
        """Put empty tensors, to be filled, in the place of such buffers: one for those that were
        one (`aliases`). Those of a step offered before are taken back."""
        for module, name, buffer in self._replaced:
            module._buffers[name] = buffer
        self.keep()
        made: dict[str, torch.Tensor] = {}
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                key = f"model/{prefix}.{name}" if prefix else f"model/{name}"
                key = aliases.get(key, key)
                if key not in catalogue or not _gives_way(module, name, buffer, catalogue[key]):
                    continue
                dtype, shape = catalogue[key]
                if key not in made:
                    place = device if buffer is None else buffer.device
                    made[key] = torch.empty(shape, dtype=dtype_of(dtype), device=place)
                self._replaced.append((module, name, buffer))
                module._buffers[name] = made[key]

    def keep(self) -> None:
        """The step is restored: the room is the model's."""
        self._replaced.clear()


def _gives_way(
    module: torch.nn.Module,
    name: str,
    buffer: Optional[torch.Tensor],
    saved: tuple[str, tuple[int, ...]],
) -> bool:
    if buffer is None:
        return True
    if isinstance(buffer, DTensor) or name not in module._non_persistent_buffers_set:
        return False
    return (dtype_name(buffer.dtype), tuple(buffer.shape)) != saved
