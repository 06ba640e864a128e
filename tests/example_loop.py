"""A loop of your own: plain torch, and a Session that saves, stops and resumes for it."""

import torch
from torch import nn

from ftslurm.train.session import Session


def train(session: Session) -> None:
    model = session.wrap(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=session.spec.user["lr"], momentum=0.9)
    session.register(model=model, optimizer=optimizer)

    def loss_of(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * session.world_size + session.rank)
        inputs = torch.randn(16, 8, generator=generator).to(session.device)
        return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))

    session.restore(warm_up=lambda: loss_of(0).backward())
    for step in session.steps():
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (total,) = session.sum(loss.item())
        session.end_step(loss=total / session.world_size)
