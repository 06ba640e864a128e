"""Loops for `spec.entry`: the reference one, disturbed as `spec.user` says. Run by ranks."""

import atexit
import math
import os
import signal
import time
from typing import Any

import example_loop
import torch
import torch.distributed as dist
from torch import nn

from ftslurm.replay.determinism import parameter_digest
from ftslurm.run import control
from ftslurm.run.control import ControlFiles
from ftslurm.run.layout import RunLayout
from ftslurm.train import reference
from ftslurm.train.orders import Orders
from ftslurm.train.parallel import unwrap
from ftslurm.train.session import Session


def signalled(session: Session) -> None:
    """user.signal: {attempt, rank, step, number}: that rank gets it while that step is trained."""
    disturb(session)
    reference.train(session)


def disturb(session: Session) -> None:
    order = session.spec.user["signal"]
    here = order["rank"] == session.rank and order["attempt"] == int(os.environ["FTSLURM_ATTEMPT"])
    end_step = session.end_step

    def end_step_after_signal(**facts: Any) -> None:
        if here and session.step + 1 == order["step"]:
            os.kill(os.getpid(), order["number"])
        end_step(**facts)

    session.end_step = end_step_after_signal  # type: ignore[method-assign]


def signalled_in_evaluation(session: Session) -> None:
    """As `signalled`, but the signal comes in the middle of the evaluation after that step."""
    order = session.spec.user["signal"]
    here = order["rank"] == session.rank and order["attempt"] == int(os.environ["FTSLURM_ATTEMPT"])
    weighted_loss = reference.weighted_loss

    def weighted_loss_and_signal(session: Session, model: Any, batch: Any) -> torch.Tensor:
        if here and not torch.is_grad_enabled() and session.step + 1 == order["step"]:
            os.kill(os.getpid(), order["number"])
        return weighted_loss(session, model, batch)

    reference.weighted_loss = weighted_loss_and_signal
    reference.train(session)


def overflowing(session: Session) -> None:
    """user.overflow: {rank, step}: there one gradient of that rank alone is infinite."""
    disturb(session)
    order = session.spec.user["overflow"]
    parts = reference.assemble(session)
    unscale = parts.scaler.unscale_

    def unscale_after_overflow(optimizer: Any) -> None:
        if order == {"rank": session.rank, "step": session.step + 1}:
            gradient = next(parts.model.parameters()).grad
            assert gradient is not None
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.view(-1)[0] = math.inf
        unscale(optimizer)

    parts.scaler.unscale_ = unscale_after_overflow  # type: ignore[method-assign]
    session.restore(warm_up=lambda: reference._warm_up(session, parts))
    for _ in session.steps():
        update = reference.apply_update(session, parts, next(parts.batches))
        scale = parts.scaler.get_scale()
        session.end_step(loss=update.loss, tokens=update.tokens, values={"loss_scale": scale})
    check_ranks_agree(session, parts)


def check_ranks_agree(session: Session, parts: reference.Parts) -> None:
    digests: list[Any] = [None] * session.world_size
    dist.all_gather_object(digests, parameter_digest(unwrap(parts.model)))
    assert len(set(digests)) == 1, digests


def broken(session: Session) -> None:
    """Rank 1 has a bug; the others are in a collective by then."""
    if session.rank == 1:
        raise ValueError("a bug of this rank alone")
    session.sum(1.0)


def stopped_at_3(session: Session) -> None:
    """The example loop; rank 1 is asked to stop while step 2 of attempt 1 is trained."""
    ask_to_stop(session, step=2)
    example_loop.train(session)


def signalled_in_the_last(session: Session) -> None:
    ask_to_stop(session, step=session.spec.steps)
    example_loop.train(session)


def stopped_at_once(session: Session) -> None:
    """Asked before the model is built, twice, by two signals."""
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    example_loop.train(session)


def own_with_exit_handler(session: Session) -> None:
    atexit.register(print, "an exit handler ran")
    example_loop.train(session)


def normalizing(session: Session) -> None:
    """BatchNorm, of which every rank sees other samples; its statistics are written by any rank but
    the first unless somebody takes care."""
    disturb(session)
    rows = 8192
    model = session.wrap(nn.Sequential(nn.Linear(8, rows), nn.BatchNorm1d(rows)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.register(model=model, optimizer=optimizer)

    def loss_of(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * session.world_size + session.rank)
        return model(torch.randn(4, 8, generator=generator)).square().mean()

    session.restore(warm_up=lambda: loss_of(0).backward())
    for step in session.steps():
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (total,) = session.sum(loss.item())
        session.end_step(loss=total / session.world_size)


def ask_to_stop(session: Session, *, step: int) -> None:
    order = {"attempt": 1, "rank": 1, "step": step, "number": int(signal.SIGUSR1)}
    session.spec.user["signal"] = order
    disturb(session)


def ordered(session: Session) -> None:
    """user.orders: {step: order}: rank 0 finds it while that step of attempt 1 is trained."""
    control.LOOK_INTERVAL_S = 0.01
    if session.rank == 0 and int(os.environ["FTSLURM_ATTEMPT"]) == 1:
        files = ControlFiles(RunLayout(session.run_dir), session.run_dir.name)
        session._account._orders = Orders(files, session._account.event)
        end_step = session.end_step

        def end_step_after_order(**facts: Any) -> None:
            order = session.spec.user["orders"].get(str(session.step + 1))
            if order is not None:
                files.give(order)
                time.sleep(0.3)
            end_step(**facts)

        session.end_step = end_step_after_order  # type: ignore[method-assign]
    example_loop.train(session)
