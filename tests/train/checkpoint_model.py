"""What the ranks of checkpoint_ranks.py train: a model with what makes saving one hard."""

from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    """Tied weights, uneven and too few rows for four ranks, frozen and unused ones, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 61)
        self.block = nn.Linear(61, 61)
        self.narrow = nn.Linear(61, 1)
        self.head = nn.Linear(61, 300, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(7, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.randn(5, 3).t(), persistent=False)

    def forward(self, tokens):
        self.calls += 1
        hidden = torch.tanh(self.block(self.embedding(tokens)))
        return self.head(hidden).square().mean() + self.narrow(hidden).mean() + self.cache.sum()


class Averages:
    """An average of the weights, spread over ranks as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach() / 3 for name, p in model.named_parameters()}

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state) -> None:
        for name, value in self.values.items():
            assert type(state[name]) is type(value), name
            value.copy_(state[name])


class Counted:
    """A user's own object with state."""

    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value, "history": torch.arange(3, dtype=torch.bfloat16)}

    def load_state_dict(self, state) -> None:
        self.value = state["value"]
        assert state["history"].dtype == torch.bfloat16
