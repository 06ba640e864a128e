"""What a rank's heartbeat learns from torch: the collectives it enters, and how long it waits.

Notes every collective that Python hands to a process group, the wait for it, and DDP's wait for its
gradients, which C++ does alone. Changes no result, no order and no number of collectives. On CUDA
a wait returns to the host at once, so there the host's notes tell the order only; what the devices
hang in is in NCCL's own record (see prepare_nccl).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from ftslurm.run.heartbeat import COMPILING, TRAINING, nccl_pipe_stem
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment
from ftslurm.train.device_clock import clock_of

# Methods by which torch.distributed starts a collective, in all versions; those that are there
# are noted. Each returns a Work, or None where this rank has no part in it.
_STARTS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "barrier",
)
NCCL_RECORD_STEM = "nccl-rank-"
NCCL_RECORD = 2000
"""Newest collectives of each rank in NCCL's record."""


class _Notes:
    """The one watch of this process."""

    def __init__(self) -> None:
        self.pulse: Pulse | None = None
        self.left_out: dist.ProcessGroup | None = None
        self.open: dict[int, int] = {}
        """Number of the collective by id of its Work; replaced when an id comes again."""
        self.labels: dict[tuple[str, torch.dtype, int], str] = {}
        self.is_installed = False
        self.is_compiler_watched = False
        self.compiles = contextlib.ExitStack()
        """Holds the phase of a compilation that is under way."""

    def label(self, name: str, arguments: Sequence[Any]) -> str:
        """Operation, type and size of its first tensor: only the root of a gather has outputs."""
        for argument in arguments:
            while type(argument) in (list, tuple) and argument:
                argument = argument[0]
            # Not isinstance, which asks torch's metaclass: a microsecond each.
            dtype = getattr(argument, "dtype", None)
            if dtype is not None:
                return self._label(name, dtype, argument.numel())
        return name

    def _label(self, name: str, dtype: torch.dtype, count: int) -> str:
        found = self.labels.get((name, dtype, count))
        if found is None:
            if len(self.labels) > 1000:
                self.labels.clear()
            found = f"{name.strip('_')} {str(dtype).removeprefix('torch.')}[{count}]"
            self.labels[name, dtype, count] = found
        return found


_notes = _Notes()


def watch_collectives(pulse: Pulse, *, left_out: dist.ProcessGroup | None) -> None:
    """From now on `pulse` is told of every collective but those of `left_out`, which belongs to a
    thread of its own and is in no order with the others."""
    _notes.pulse, _notes.left_out = pulse, left_out
    _notes.open.clear()
    if _notes.is_installed:
        return
    _notes.is_installed = True
    for name in _STARTS:
        start = getattr(dist.ProcessGroup, name, None)
        if start is not None:
            setattr(dist.ProcessGroup, name, _noting_start(name, start))
    dist.Work.wait = _noting_wait(dist.Work.wait)  # type: ignore[method-assign]
    functional.wait_tensor = _noting_wait_tensor(functional.wait_tensor)


def watch_backward(pulse: Pulse, model: torch.nn.Module) -> torch.nn.Module:
    """In DDP count the wait for gradients as one collective, in each backward that reduces them,
    and on CUDA have the device tell how long it computed until then; `model` as it was.

    The engine runs what is queued during a backward at its end, in order. Queued when a gradient is
    there, before DDP has all of them and queues its own wait, the first note is made when this rank
    has computed all of its gradients; what that note queues in its turn comes after DDP's wait.
    """
    if not isinstance(model, DistributedDataParallel):
        return model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in parameters)
    name = f"ddp gradients [{count}]"
    engine: Any = torch.autograd.Variable._execution_engine

    # One for all models: a step's own compute ends where it first waits for gradients.
    pulse.device_clock = clock = pulse.device_clock or clock_of(parameters[0].device)

    def computed() -> None:
        if clock is not None:
            clock.computed()
        pulse.wait_begins(pulse.enter(name))
        engine.queue_callback(pulse.wait_ended)

    def first(_: torch.Tensor) -> None:
        if model.require_backward_grad_sync and not torch.compiler.is_compiling():
            engine.queue_callback(computed)

    # The last parameter's gradient is there first.
    last: Any = parameters[-1]
    last.register_post_accumulate_grad_hook(first)
    return model


def watch_compiler() -> None:
    """A compilation in the midst of training (other shapes) is a phase of its own: no part of the
    step, and its length no sign of a hang. For a loop that has called torch.compile by now; the
    first step is in that phase anyhow."""
    callbacks = sys.modules.get("torch._dynamo.callback")
    if _notes.is_compiler_watched or callbacks is None:
        return
    _notes.is_compiler_watched = True
    # Both come once for all that is compiled within one call, with arguments since torch 2.7.
    callbacks.on_compile_start(_compile_begins)
    callbacks.on_compile_end(_compile_ended)


def _compile_begins(*_: Any) -> None:
    if _notes.pulse is not None and _notes.pulse.phase_name == TRAINING:
        _notes.compiles.enter_context(_notes.pulse.aside(COMPILING))


def _compile_ended(*_: Any) -> None:
    _notes.compiles.close()


def prepare_nccl(environ: MutableMapping[str, str], env: RankEnvironment, pulse: Pulse) -> None:
    """Have NCCL's watchdog keep a record of each rank's collectives and write it among the
    attempt's evidence, when a collective times out or when somebody writes to the rank's pipe
    (agent/stacks.py). Read when the first group is made; what the run or its site has set stays.
    """
    if pulse.path is None or not torch.cuda.is_available():
        return
    evidence = env.attempt_layout.root / "evidence"
    with contextlib.suppress(OSError):
        evidence.mkdir(exist_ok=True)  # torch makes no folders
    # The names before torch 2.8; it still goes by them.
    environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(NCCL_RECORD))
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(evidence / NCCL_RECORD_STEM))
    environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", nccl_pipe_stem(pulse.path.parent))


def _noting_start(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def noting(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        pulse = _notes.pulse
        if pulse is None or group is _notes.left_out:
            return start(group, *args, **kwargs)
        seq = pulse.enter(_notes.label(name, args))
        try:
            work = start(group, *args, **kwargs)
        except BaseException:
            pulse.leave(seq)
            raise
        if work is None:
            pulse.leave(seq)
        else:
            if len(_notes.open) > 1000:
                _notes.open.clear()
            _notes.open[id(work)] = seq
        return work

    return noting


def _noting_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def noting(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        pulse, seq = _notes.pulse, _notes.open.pop(id(work), None)
        if pulse is None or seq is None:
            return wait(work, *args, **kwargs)
        pulse.wait_begins(seq)
        try:
            return wait(work, *args, **kwargs)
        finally:
            pulse.wait_ended()

    return noting


def _noting_wait_tensor(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Collectives of DTensor start in C++; seen when they are waited for."""

    @functools.wraps(wait)
    def noting(tensor: torch.Tensor) -> Any:
        pulse = _notes.pulse
        if pulse is None or torch.compiler.is_compiling():
            return wait(tensor)
        with pulse.collective(_notes.label("functional", (tensor,))):
            return wait(tensor)

    return noting
