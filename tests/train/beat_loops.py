"""A loop for `spec.entry` that notes each phase its pulse enters. Run by ranks."""

import json
import time

import torch
from torch import nn

from ftslurm.train.session import Session


def phases(session: Session) -> None:
    """Saves as the spec says, evaluates for 0.1 s after every fourth step."""
    entered: list[str] = []
    enter = session._pulse.phase

    def noted(name: str) -> None:
        entered.append(name)
        enter(name)
        (session.run_dir / f"phases-{session.rank}.json").write_text(json.dumps(entered))

    session._pulse.phase = noted  # type: ignore[method-assign]
    model = session.wrap(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizer=optimizer)
    session.restore(warm_up=lambda: model(torch.ones(1, 8)).sum().backward())
    for step in session.steps():
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            with session.evaluating():
                time.sleep(0.1)
        session.end_step(loss=1.0)
    walls_s = session._pulse._walls
    (session.run_dir / f"longest-{session.rank}.json").write_text(json.dumps(max(walls_s._by_age)))
