"""A small GPT: pre-norm blocks, learned positions, causal attention. torch.nn and nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ftslurm.errors import DataError
from ftslurm.run.spec import ModelSpec


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.dropout = spec.dropout
        self.attention_norm = nn.LayerNorm(spec.width)
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.attention_out = nn.Linear(spec.width, spec.width)
        self.mlp_norm = nn.LayerNorm(spec.width)
        self.mlp_in = nn.Linear(spec.width, 4 * spec.width)
        self.mlp_out = nn.Linear(4 * spec.width, spec.width)
        self.residual_dropout = nn.Dropout(spec.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.residual_dropout(self._attend(self.attention_norm(x)))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        y: torch.Tensor = x + self.residual_dropout(self.mlp_out(hidden))
        return y

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        y: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class GPT(nn.Module):
    """Token ids (batch, length) in, logits (batch, length, vocabulary) out."""

    def __init__(self, spec: ModelSpec, *, vocab_size: int) -> None:
        super().__init__()
        self.context = spec.context
        self.tokens = nn.Embedding(vocab_size, spec.width)
        self.positions = nn.Embedding(spec.context, spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.blocks = nn.ModuleList([Block(spec) for _ in range(spec.layers)])
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, vocab_size, bias=False)
        self.apply(_initialise)
        if spec.tied_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        if length > self.context:
            raise DataError(
                f"a sequence of {length} tokens came to a model with model.context {self.context}; "
                "build the token store or the model for the same length"
            )
        places = torch.arange(length, device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    """GPT-2's: normal(0, 0.02), biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
