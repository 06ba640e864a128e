"""The random generators of a rank: python, numpy, torch on the CPU and on its GPU.

Each rank keeps its own under keys that name it. With the same world size they continue exactly;
with another (or on another kind of device) every rank starts a fresh stream that depends on
(seed, step, rank) alone, so a resume is repeatable and no two ranks draw the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from ftslurm.errors import CheckpointError


def read_generators(device: torch.device) -> dict[str, Any]:
    """State of all generators as nested JSON values and tensors."""
    version, words, gauss_next = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is {numpy_state['bit_generator']}; only MT19937 can be saved"
        )
    return {
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64),
            "gauss_next": gauss_next,
        },
        "numpy": {
            "words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def can_continue(state: dict[str, Any], device: torch.device) -> bool:
    """A rank moved between CPU and GPU has no state for the generator it draws from."""
    return (state["cuda"] is not None) == (device.type == "cuda")


def write_generators(state: dict[str, Any], device: torch.device) -> None:
    """Continue from what `read_generators` returned on this rank."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
    saved = state["numpy"]
    np.random.set_state(
        (
            "MT19937",
            saved["words"].numpy().astype(np.uint32),
            saved["position"],
            saved["has_gauss"],
            saved["gauss"],
        )
    )
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_generators(*, seed: int, step: int, rank: int) -> None:
    """Fresh streams: 64 bits of sha256("ftslurm rng SEED STEP RANK"), torch's on all devices."""
    text = f"ftslurm rng {seed} {step} {rank}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    random.seed(number)
    np.random.seed([number & 0xFFFFFFFF, number >> 32])
    torch.manual_seed(number)
