"""Makes a step a function of its inputs: switches, seeds, and the digest that compares results.

Bit-for-bit equality holds between runs of one torch, one kind of device and one world size; nothing
here makes it hold across them. A setting of the environment that contradicts is refused, not
overwritten.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import MutableMapping

import numpy
import torch
from torch.distributed.tensor import DTensor

from ftslurm.errors import SpecError

# name -> (value set, values accepted). CUBLAS: cuBLAS's own conditions for reproducible results.
# NCCL: Tree changes the order of a sum with the message size (Megatron-LM's deterministic guide).
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", (":4096:8", ":16:8")),
    "NCCL_ALGO": ("Ring", ("Ring",)),
}


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Set what libraries read once, before a device is touched or a process group exists."""
    for name, (value, accepted) in ENVIRONMENT.items():
        present = environ.setdefault(name, value)
        if present not in accepted:
            raise SpecError(
                f"{name} is `{present}` in the environment, which makes results differ from run to "
                f"run; unset it, use {' or '.join(accepted)}, or set deterministic=false"
            )


def switch_on() -> None:
    """Make torch choose deterministic kernels, and raise where it has none."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def seed_all(seed: int, *, stream: str) -> None:
    """Seed python, numpy and torch (all devices); streams of other names are unrelated."""
    mixed = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    random.seed(mixed)
    numpy.random.seed(int.from_bytes(mixed[:4], "little"))
    torch.manual_seed(int.from_bytes(mixed[:8], "little") >> 1)


def parameter_digest(model: torch.nn.Module) -> str:
    """sha256 over names, types, shapes and bytes of all parameters and buffers, by name.

    Independent of how the model is spread over ranks. Collective when it is sharded.
    """
    digest = hashlib.sha256()
    state = model.state_dict()
    for name in sorted(state, key=_plain_name):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        data = whole.detach().resolve_conj().resolve_neg().cpu().contiguous()
        digest.update(f"{_plain_name(name)} {data.dtype} {list(data.shape)}\n".encode())
        # As bytes, since numpy has no bfloat16.
        digest.update(data.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain_name(name: str) -> str:
    """DDP puts its own `module.` in front of every name."""
    return name.removeprefix("module.")
