"""Tensors of every type and layout come back bit for bit, through files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_checkpointer import Trainer

from ftslurm.checkpoint.records import ITEM_BYTES
from ftslurm.replay.determinism import parameter_digest
from ftslurm.train.leaves import StateMismatch, byte_view, dtype_of

pytestmark = pytest.mark.torch


def of_type(name: str) -> torch.Tensor:
    """Any bits at all, NaNs among them; a bool is 0 or 1."""
    dtype = dtype_of(name)
    bits = torch.randint(0, 256, (24 * dtype.itemsize,), dtype=torch.uint8)
    return bits % 2 == 0 if dtype is torch.bool else bits.view(dtype)


def layouts() -> dict[str, torch.Tensor]:
    values = torch.randn(4, 6)
    return {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "strided": values[:, ::2],
        "transposed": values.t(),
        "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "expanded": values[:, :1].expand(4, 5),
        "one for all": torch.tensor(float("nan")).expand(3, 2),
        "conjugate": values.to(torch.complex64).conj(),
        "negative": torch._neg_view(values[0]),
    }


def bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(byte_view(whole)) if whole.numel() else b""


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same type and layout, with other values."""
    base = torch.zeros(4096, dtype=torch.uint8).view(tensor.dtype)
    made = torch.as_strided(base, tensor.shape, tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def come_back(root: Path, tensors: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]) -> None:
    first, second = Trainer(root), Trainer(root, seed=1, attempt=2)
    for run, values in ((first, tensors), (second, fresh)):
        for name, tensor in values.items():
            run.model.register_buffer(f"the {name}", tensor)
    assert first.save(1), first.reported("save_failed")
    assert second.checkpointer.restore(None).step == 1
    for name, tensor in tensors.items():
        found = getattr(second.model, f"the {name}")
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride()), name
        assert bits(found) == bits(tensor), name


def test_every_type_comes_back(tmp_path: Path) -> None:
    tensors = {name: of_type(name) for name in ITEM_BYTES}
    come_back(tmp_path, tensors, {name: blank(tensor) for name, tensor in tensors.items()})


def test_every_layout_comes_back(tmp_path: Path) -> None:
    tensors = layouts()
    come_back(tmp_path, tensors, {name: blank(tensor) for name, tensor in tensors.items()})


def test_values_that_differ_do_not_go_into_one_element(tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match="along dimension 0"):
        come_back(tmp_path, {"x": torch.arange(3.0)}, {"x": torch.zeros(()).expand(3)})


def test_a_learning_rate_of_another_type_is_no_damage_of_the_step(tmp_path: Path) -> None:
    first, second = Trainer(tmp_path), Trainer(tmp_path, seed=1, attempt=2)
    for run, rate in ((first, torch.tensor(0.1)), (second, torch.tensor(0.1, dtype=torch.float64))):
        run.optimizer.param_groups[0]["lr"] = rate
    assert first.save(1)
    with pytest.raises(StateMismatch, match="expected float32 of shape .. as in the checkpoint"):
        second.checkpointer.restore(None)
    assert second.steps() == ["step-000000000001"]


def test_a_run_ends_with_the_digest_of_a_conjugate() -> None:
    values = torch.randn(3).to(torch.complex64)
    views, plain = torch.nn.Module(), torch.nn.Module()
    views.register_buffer("x", values.conj())
    plain.register_buffer("x", values.conj().resolve_conj())
    assert parameter_digest(views) == parameter_digest(plain)
