"""A loop for `spec.entry` that notes each phase its pulse enters. Run by ranks."""

import json
import time
from typing import Any

import torch
from torch import nn

from ftslurm.run.pulse import Pulse
from ftslurm.train.session import Session


def timed_steps(pulse: Pulse) -> "tuple[dict[int, float], dict[int, float]]":
    """By step: seconds as the pulse has them, and as they pass around its two calls."""
    told_s: dict[int, float] = {}
    whole_s: dict[int, float] = {}
    begins, ended, began_at = pulse.step_begins, pulse.step_ended, [0.0]

    def step_begins() -> None:
        began_at[0] = time.monotonic()
        begins()

    def step_ended(step: int, **more: Any) -> None:
        ended(step, **more)
        whole_s[step], told_s[step] = time.monotonic() - began_at[0], pulse._last[0]

    pulse.step_begins = step_begins  # type: ignore[method-assign]
    pulse.step_ended = step_ended  # type: ignore[method-assign]
    return told_s, whole_s


def phases(session: Session) -> None:
    """Saves as the spec says, evaluates for 0.1 s after every fourth step."""
    entered: list[str] = []
    enter = session._pulse.phase

    def noted(name: str) -> None:
        entered.append(name)
        enter(name)
        (session.run_dir / f"phases-{session.rank}.json").write_text(json.dumps(entered))

    session._pulse.phase = noted  # type: ignore[method-assign]
    told_s, whole_s = timed_steps(session._pulse)
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
    (session.run_dir / f"walls-{session.rank}.json").write_text(json.dumps([told_s, whole_s]))
