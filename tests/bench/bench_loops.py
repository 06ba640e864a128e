"""Loops that ranks run for the benchmarks; they leave their figures in RUN."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from ftslurm.train.session import Session

SEGMENT_STEPS = 4
RUN = Path(os.environ["FTSLURM_RUN_DIR"])


def with_and_without(session: Session) -> None:
    """Segments of a DDP loop's steps, in turn with ftslurm's part of a step and without it.

    user.width sets how much a step computes, user.rounds how often both segments run.
    """
    user = session.spec.user
    width = user["width"]
    model = session.wrap(nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session.register(model=model, optimizer=optimizer)
    inputs = torch.randn(user["batch"], width)

    def train_once() -> float:
        loss = nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    session.restore(warm_up=lambda: model(inputs).sum().backward())

    def segment(*, ours: bool) -> float:
        began = time.perf_counter()
        for _ in range(SEGMENT_STEPS):
            loss = train_once()
            if ours:
                session.end_step(loss=loss)
        return (time.perf_counter() - began) / SEGMENT_STEPS

    segment(ours=True)
    segment(ours=False)
    rows = []
    for number in range(user["rounds"]):
        first = bool(number % 2)
        by_kind = {kind: segment(ours=kind) for kind in (first, not first)}
        rows.append([by_kind[True], by_kind[False]])
    if session.rank == 0:
        path = RUN / "step_seconds.json"
        path.write_text(json.dumps(rows))


def big_state(session: Session) -> None:
    """Steps over a state of user.size_bytes (weights and AdamW's moments), until it is stopped."""
    numel = session.spec.user["size_bytes"] // (3 * 4 * 16)
    model = nn.Module()
    model.tensors = nn.ParameterList(torch.zeros(numel) for _ in range(16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.register(model=model, optimizer=optimizer)
    session.restore()
    for step in session.steps():
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:  # the arena is reserved after the first step
            (RUN / f"ready-{os.environ['FTSLURM_ATTEMPT']}").touch()
        session.end_step(loss=0.0)
