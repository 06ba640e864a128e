"""The whole state of a training process, as leaves and JSON, and back in place.

`capture` reads and changes nothing. `prepare` checks a checkpoint against the live program (names,
dtypes, shapes, ties; nothing is cast) and names the memory its bytes belong in: that of the live
parameters and buffers, which are not replaced (but see late_buffers), so tied weights stay tied.
`Restoration.adopt` applies the rest once every byte has been verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ftslurm.errors import CheckpointError
from ftslurm.train import rng
from ftslurm.train.late_buffers import LateBuffers
from ftslurm.train.leaves import (
    Leaf,
    StateMismatch,
    describe,
    dtype_of,
    private,
)
from ftslurm.train.optimizer_state import Catalogue, OptimizerReader, OptimizerWriter
from ftslurm.train.parallel import in_ddp, unwrap
from ftslurm.train.tree import flatten, unflatten

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """What a scheduler, a scaler and a user's own object have in common."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class Snapshot:
    """The state at one step boundary; leaves alias live memory until they are staged."""

    leaves: list[Leaf]
    shared: dict[str, Any]
    """JSON that is equal on all ranks."""
    private: dict[str, Any]
    """JSON of this rank alone."""
    aliases: dict[str, str]
    """Second name of a tied tensor -> the name it is stored under."""
    copies: list[Leaf]
    """Buffers of which every rank has a copy that nothing keeps equal."""


@dataclass
class Restoration:
    """Memory to fill, and what is left to do after every rank has verified all it read."""

    leaves: list[Leaf] = field(default_factory=list)
    actions: list[Callable[[], Any]] = field(default_factory=list)
    generators_continue: bool = False
    """False: the random generators start a fresh documented stream."""

    def adopt(self) -> None:
        for action in self.actions:
            action()


class TrainState:
    """Model, optimizer and what else has to continue.

    `extra` objects are equal on all ranks; the mapping is kept and may still grow.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.model = unwrap(model)
        # DDP begins each forward by giving all ranks the buffers of rank 0, so what the others hold
        # between two steps (their own BatchNorm statistics) is lost anyway.
        self._first_gives = [part for part in in_ddp(model) if part.broadcast_buffers]
        self._late_buffers = LateBuffers(self.model)
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._scaler = scaler
        self._extra = {} if extra is None else extra

    def capture(self, *, rank: int, world_size: int, device: torch.device) -> Snapshot:
        """Read everything; never steps the optimizer, never creates state."""
        tensors, aliases = self._model_tensors()
        where = {"rank": rank, "world_size": world_size}
        leaves, copies = self._model_leaves(tensors, where)
        reader = OptimizerReader(self.optimizer, self._names(tensors), **where)
        optimizer_leaves, optimizer_json = reader.read()
        leaves += optimizer_leaves
        shared: dict[str, Any] = {"optimizer": optimizer_json}

        def take(key: str, tensor: torch.Tensor) -> dict[str, Any]:
            leaves.append(describe(key, tensor, **where))
            return {"key": key, **({"sharded": True} if isinstance(tensor, DTensor) else {})}

        for name, value in self._objects.items():
            _refuse_sharded_optimizer(name, value)
            shared[name] = flatten(value.state_dict(), name, take)
        for name, module in _modules_with_extra_state(self.model):
            key = f"module/{name}"
            shared[key] = flatten(module.get_extra_state(), key, take)
        shared["tensors"] = catalogue_json(leaves)
        own_leaves, own = _capture_generators(rank, device)
        return Snapshot(leaves + own_leaves, shared, own, aliases, copies)

    def prepare(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        aliases: Mapping[str, str],
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        fresh_seed: Callable[[], None],
    ) -> Restoration:
        """Check the saved state against the live one. `own` is None when the world size changed."""
        restoration = Restoration()
        catalogue = read_catalogue(shared["tensors"])
        self._late_buffers.make_room(catalogue, aliases, device)
        tensors, live_aliases = self._model_tensors()
        _check_aliases(live_aliases, aliases)
        where = {"rank": rank, "world_size": world_size}
        live = [describe(f"model/{name}", tensor, **where) for name, tensor in tensors.items()]
        check_leaves(live, {k: v for k, v in catalogue.items() if k.startswith("model/")})
        writer = OptimizerWriter(
            self.optimizer, self._names(tensors), shared["optimizer"], catalogue, **where
        )
        restoration.leaves = live + writer.leaves
        restoration.actions.append(self._late_buffers.keep)
        self._prepare_objects(shared, catalogue, restoration, where)
        # After the scheduler, whose load_state_dict may touch the learning rate.
        restoration.actions.append(writer.adopt)
        _prepare_generators(own, restoration, device, fresh_seed)
        return restoration

    def _prepare_objects(
        self,
        shared: Mapping[str, Any],
        catalogue: Catalogue,
        restoration: Restoration,
        where: dict[str, int],
    ) -> None:
        modules = {f"module/{name}": m for name, m in _modules_with_extra_state(self.model)}
        live: dict[str, Any] = {**self._objects, **modules}
        saved = {name for name in shared if name not in ("optimizer", "tensors")}
        _check_names("objects with state", saved, set(live))

        present: dict[str, torch.Tensor] = {}

        def give(entry: dict[str, Any]) -> torch.Tensor:
            key = entry["key"]
            dtype, shape = catalogue[key]
            like = present.get(key)
            if isinstance(like, DTensor):
                tensor = torch.empty_like(like, requires_grad=False)
                check_leaves([describe(key, tensor, **where)], {key: (dtype, shape)})
            elif like is None and entry.get("sharded"):
                raise StateMismatch(
                    f"`{key}` was spread over ranks when it was saved, and the program has no such "
                    "tensor that would say how; make it before session.restore"
                )
            else:
                tensor = torch.empty(shape, dtype=dtype_of(dtype))
            restoration.leaves.append(describe(key, tensor, **where))
            return tensor

        for name, value in live.items():
            if any(key.startswith(f"{name}/") for key in catalogue):
                # How the live object spreads its tensors, e.g. averages of sharded parameters.
                present.update(_tensors_of(value, name, is_module=name in modules))
            state = unflatten(shared[name], give)
            load = value.set_extra_state if name in modules else value.load_state_dict
            restoration.actions.append(partial(load, state))

    @property
    def _objects(self) -> dict[str, Stateful]:
        objects = {"scheduler": self._scheduler, "scaler": self._scaler}
        objects.update({f"extra/{name}": value for name, value in self._extra.items()})
        return {name: value for name, value in objects.items() if value is not None}

    def _model_leaves(
        self, tensors: Mapping[str, torch.Tensor], where: dict[str, int]
    ) -> tuple[list[Leaf], list[Leaf]]:
        """All of the model, and of these the copies that have to be compared before a save."""
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        given = {id(buffer) for part in self._first_gives for buffer in part.buffers()}
        leaves, copies = [], []
        for name, tensor in tensors.items():
            leaf = describe(f"model/{name}", tensor, **where)
            if name in buffers and not isinstance(tensor, DTensor):
                if id(tensor) in given:
                    leaf = replace(leaf, num_replicas=1)
                else:
                    copies.append(leaf)
            leaves.append(leaf)
        return leaves, copies

    def _model_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Parameters and all buffers by name, each once, and the other names of tied ones."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # A forward without backward leaves the root's parameters gathered.
                module.reshard()
        named: dict[str, torch.Tensor] = {}
        named.update(self.model.named_parameters(remove_duplicate=False))
        named.update(self.model.named_buffers(remove_duplicate=False))
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name in sorted(named):
            tensor = named[name]
            if id(tensor) in first:
                aliases[f"model/{name}"] = f"model/{first[id(tensor)]}"
            else:
                first[id(tensor)] = name
                tensors[name] = tensor
        return tensors, aliases

    @staticmethod
    def _names(tensors: Mapping[str, torch.Tensor]) -> dict[int, str]:
        return {id(tensor): name for name, tensor in tensors.items()}


def _tensors_of(value: Any, name: str, *, is_module: bool) -> dict[str, torch.Tensor]:
    """By key; of an object that has no state yet, or none that can be saved, what it tells."""
    found: dict[str, torch.Tensor] = {}

    def take(key: str, tensor: torch.Tensor) -> dict[str, Any]:
        found[key] = tensor
        return {}

    try:
        flatten(value.get_extra_state() if is_module else value.state_dict(), name, take)
    except Exception as error:  # noqa: BLE001 - the saved state is loaded all the same
        log.info("`%s` does not tell of its tensors before it is restored: %r", name, error)
    return found


def _refuse_sharded_optimizer(name: str, value: Any) -> None:
    """Its state does not exist before its first step, so nothing would say how it is spread."""
    if isinstance(value, torch.optim.Optimizer) and any(
        isinstance(parameter, DTensor)
        for group in value.param_groups
        for parameter in group["params"]
    ):
        raise CheckpointError(
            f"`{name}` is an optimizer of sharded parameters; only the one that session.register "
            "names as optimizer can be saved: give it the parameters of both, in groups"
        )


def catalogue_json(leaves: Iterable[Leaf]) -> dict[str, Any]:
    return {leaf.key: [leaf.dtype, list(leaf.global_shape)] for leaf in leaves}


def read_catalogue(record: Mapping[str, Any]) -> Catalogue:
    return {key: (dtype, tuple(shape)) for key, (dtype, shape) in record.items()}


def check_leaves(leaves: Iterable[Leaf], catalogue: Catalogue) -> None:
    """Names, dtypes and global shapes have to be equal; the first difference is named."""
    live = {leaf.key: leaf for leaf in leaves}
    _check_names("tensors", set(catalogue), set(live))
    for key, (dtype, shape) in catalogue.items():
        leaf = live[key]
        if (leaf.dtype, leaf.global_shape) != (dtype, shape):
            raise StateMismatch(
                f"`{key}`: expected {dtype} of shape {shape} as in the checkpoint, found "
                f"{leaf.dtype} of shape {leaf.global_shape}"
            )


def _check_names(what: str, saved: set[str], live: set[str]) -> None:
    if saved != live:
        raise StateMismatch(
            f"{what} differ: only in the checkpoint {sorted(saved - live)[:3]}, only in the "
            f"program {sorted(live - saved)[:3]}; restore into the model that was saved"
        )


def _check_aliases(live: Mapping[str, str], saved: Mapping[str, str]) -> None:
    for name in sorted({*live, *saved}):
        if live.get(name) != saved.get(name):
            raise StateMismatch(
                f"`{name}`: expected to be tied to {saved.get(name) or 'nothing'} as in the "
                f"checkpoint, found it tied to {live.get(name) or 'nothing'}"
            )


def _modules_with_extra_state(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    plain = torch.nn.Module.get_extra_state
    return [(name, m) for name, m in model.named_modules() if type(m).get_extra_state is not plain]


def _capture_generators(rank: int, device: torch.device) -> tuple[list[Leaf], dict[str, Any]]:
    leaves: list[Leaf] = []

    def take(key: str, tensor: torch.Tensor) -> dict[str, Any]:
        leaves.append(private(key, tensor))
        return {"key": key}

    tree = flatten(rng.read_generators(device), f"rank-{rank:05d}/rng", take)
    return leaves, {"rng": tree, "tensors": catalogue_json(leaves)}


def _prepare_generators(
    own: Mapping[str, Any] | None,
    restoration: Restoration,
    device: torch.device,
    fresh_seed: Callable[[], None],
) -> None:
    if own is None:
        restoration.actions.append(fresh_seed)
        return
    catalogue = read_catalogue(own["tensors"])
    leaves: list[Leaf] = []

    def give(entry: dict[str, Any]) -> torch.Tensor:
        dtype, shape = catalogue[entry["key"]]
        tensor = torch.empty(shape, dtype=dtype_of(dtype))
        leaves.append(private(entry["key"], tensor))
        return tensor

    state = unflatten(own["rng"], give)
    if not rng.can_continue(state, device):
        restoration.actions.append(fresh_seed)
        return
    restoration.leaves += leaves
    restoration.generators_continue = True
    restoration.actions.append(lambda: rng.write_generators(state, device))
