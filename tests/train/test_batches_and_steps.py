"""A session's batches and its steps go together, or a restart would go on at another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ftslurm.errors import UsageError
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import RankEnvironment, StopFlag
from ftslurm.run.record import read_record
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, OptimSpec, RunSpec
from ftslurm.train.cursor import Cursor
from ftslurm.train.distributed import Groups
from ftslurm.train.loader import AHEAD
from ftslurm.train.session import Session
from ftslurm.train.token_store import TokenStore

pytestmark = pytest.mark.torch

LENGTH = 8
Open = Callable[[Callable[[Iterator[Any]], object]], tuple[Session, Iterator[Any]]]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield Groups(0, 1, 0, torch.device("cpu"), world, world, world)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    path = launch.build_store(tmp_path_factory.mktemp("store"), __file__, 2000)
    return TokenStore(path, LENGTH)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    spec = RunSpec(
        entry="example_loop:train",
        steps=40,
        cluster=ClusterSpec(tasks_per_node=1),
        checkpoint=CheckpointSpec(interval_steps=1, interval_s=0),
        optim=OptimSpec(global_batch_size=2),
    )
    return launch.prepare(tmp_path / "run", spec)


@pytest.fixture
def open_session(layout: RunLayout, groups: Groups, store: TokenStore) -> Open:
    """Call it with what a warm-up does with the batches."""

    def make(warm_up: Callable[[Iterator[Any]], object]) -> tuple[Session, Iterator[Any]]:
        attempt = launch.claim_attempt(layout)
        env = RankEnvironment.read(launch.rank_environ(layout, attempt, 0, 1, 1))
        session = Session(env, read_record(layout), groups, StopFlag())
        model = session.wrap(nn.Linear(2, 1))
        session.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        batches = session.batches(store)

        def run() -> None:
            warm_up(batches)
            model(torch.ones(1, 2)).sum().backward()

        session.restore(warm_up=run)
        return session, batches

    return make


def inputs(batch: list[Any]) -> Any:
    return torch.cat([micro.inputs for micro in batch]).tolist()


def test_a_batch_that_a_warm_up_takes_is_trained_all_the_same(
    open_session: Open, store: TokenStore
) -> None:
    session, batches = open_session(next)
    seen = []
    for step in session.steps():
        if step == 3:
            break
        seen.append(inputs(next(batches)))
        session.end_step(loss=1.0)
    session.finish()
    cursor = Cursor(len(store), 2, session.spec.seed, snapshot=store.snapshot)
    rows = [store.read(cursor.batch_indices(2 * step)) for step in range(3)]
    assert seen == [row[:, :-1].tolist() for row in rows]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_loop_may_take_its_batches_some_steps_ahead(open_session: Open, ahead: int) -> None:
    session, batches = open_session(lambda batches: None)
    held = [next(batches) for _ in range(ahead)]
    for _ in session.steps():
        held.append(next(batches))
        held.pop(0)
        session.end_step(loss=1.0)
    assert session.step == session.spec.steps


def test_a_loop_that_takes_two_batches_a_step_is_refused(open_session: Open) -> None:
    session, batches = open_session(lambda batches: None)
    with pytest.raises(UsageError, match=f"has taken {AHEAD} batches more than it has ended"):
        for _ in session.steps():
            next(batches), next(batches)
            session.end_step(loss=1.0)


def test_a_loop_that_ends_a_step_without_a_batch_is_refused(open_session: Open) -> None:
    session, batches = open_session(lambda batches: None)
    next(batches)
    session.end_step(loss=1.0)
    session.end_step(loss=1.0)
    with pytest.raises(UsageError, match="ended a step without taking a batch"):
        next(batches)
