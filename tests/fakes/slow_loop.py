"""A loop of the user's own in torch, slow enough that a test can break its disk meanwhile."""

import time

import torch


def train(session):
    model = session.wrap(torch.nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters())
    session.register(model=model, optimizer=optimizer)

    def loss_of():
        return model(torch.randn(4, 256, device=session.device)).square().mean()

    session.restore(warm_up=lambda: loss_of().backward())
    for _ in session.steps():
        time.sleep(session.spec.user["step_s"])
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (total,) = session.sum(loss.item())
        session.end_step(loss=total)
