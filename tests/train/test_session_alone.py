"""A session of one rank inside this process: in what order it ends, what a stop may cost, when it
saves."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import launch
import pytest

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.doctor.line import WARN
from ftslurm.doctor.run_facts import Past, check_emergency_saves
from ftslurm.errors import RANK_STOPPED
from ftslurm.run.attempts import FINISHED, STOPPED, read_events, read_outcome
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import RankEnvironment, StopFlag
from ftslurm.run.record import read_record
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, RunSpec

pytestmark = pytest.mark.torch

Open = Callable[..., Any]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    spec = RunSpec(
        entry="example_loop:train",
        steps=30,
        cluster=ClusterSpec(tasks_per_node=1),
        checkpoint=CheckpointSpec(interval_steps=0, interval_s=0),
        user={"lr": 0.1},
    )
    return launch.prepare(tmp_path / "run", spec)


@pytest.fixture
def groups() -> Iterator[Any]:
    import torch
    import torch.distributed as dist

    from ftslurm.train.distributed import Groups

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    yield Groups(0, 1, 0, torch.device("cpu"), world, world, world)
    dist.destroy_process_group()


@pytest.fixture
def open_session(layout: RunLayout, groups: Any) -> Open:
    """Call it for a Session at step 0 with a model, restored."""
    import torch

    from ftslurm.train.session import Session

    def make(
        *,
        flag: StopFlag | None = None,
        steps: int = 30,
        stop_at: float | None = None,
        **checkpoint: Any,
    ) -> Session:
        attempt = launch.claim_attempt(layout)
        environ = launch.rank_environ(layout, attempt, 0, 1, 1)
        env = replace(RankEnvironment.read(environ), stop_at=stop_at)
        record = read_record(layout)
        record.spec.steps = steps
        for name, value in checkpoint.items():
            setattr(record.spec.checkpoint, name, value)
        session = Session(env, record, groups, flag or StopFlag())
        model = session.wrap(torch.nn.Linear(2, 1))
        session.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        session.restore(warm_up=lambda: model(torch.ones(1, 2)).sum().backward())
        return session

    return make


def train(session: Any, *, before_end: Callable[[int], None] = lambda step: None) -> None:
    for step in session.steps():
        before_end(step + 1)
        session.end_step(loss=1.0)


def test_a_run_killed_before_its_outcome_is_known_to_have_finished(
    layout: RunLayout, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftslurm.train import ending

    session = open_session(steps=2)
    train(session)

    def killed(*_: object) -> None:
        assert layout.done.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(ending, "write_outcome", killed)
    with pytest.raises(KeyboardInterrupt):
        session.finish()
    assert read_outcome(layout.attempt(1)) is None


def test_a_journal_on_a_full_disk_does_not_keep_a_stop_from_its_save(
    layout: RunLayout, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftslurm.train import progress

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    flag = StopFlag()
    session = open_session(flag=flag)
    monkeypatch.setattr(progress, "append_event", full)
    monkeypatch.setattr(progress, "write_progress", full)
    flag._set(signal.SIGUSR1, None)
    with pytest.raises(SystemExit) as left:
        train(session)
    assert left.value.code == RANK_STOPPED
    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None and (outcome.result, outcome.committed_step) == (STOPPED, 2)


def test_the_deadline_of_a_stop_counts_from_its_signal(
    open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftslurm.train.checkpointer import Checkpointer

    deadlines: list[float] = []
    save = Checkpointer.emergency_save

    def note(self: Checkpointer, *args: Any, deadline_s: float, **more: Any) -> bool:
        deadlines.append(deadline_s)
        return save(self, *args, deadline_s=deadline_s, **more)

    monkeypatch.setattr(Checkpointer, "emergency_save", note)
    flag = StopFlag()
    session = open_session(flag=flag)
    # It came 12 s before restore ended; the site leaves 20 s.
    flag.signal_number, flag.signalled_at = signal.SIGTERM, time.monotonic() - 12
    with pytest.raises(SystemExit):
        train(session)
    (deadline_s,) = deadlines
    assert 0 < deadline_s <= 8


def test_an_attempt_that_no_signal_reaches_stops_before_the_time_limit(
    layout: RunLayout, open_session: Open
) -> None:
    session = open_session(stop_at=time.time() - 1)
    with pytest.raises(SystemExit):
        train(session)
    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None and (outcome.signal, outcome.committed_step) == ("SIGALRM", 1)


def test_after_a_save_that_failed_nobody_is_waited_for_beyond_the_deadline(
    open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftslurm.train import session as module
    from ftslurm.train.checkpointer import Checkpointer

    waits: list[float] = []
    closed: list[float] = []

    class Batches:
        def close(self, *, timeout_s: float) -> None:
            closed.append(timeout_s)

    monkeypatch.setattr(Checkpointer, "emergency_save", lambda *_, **__: False)
    monkeypatch.setattr(module, "leave_together", lambda _, *, timeout_s: waits.append(timeout_s))
    flag = StopFlag()
    session = open_session(flag=flag)
    session._batches = Batches()
    flag.signal_number, flag.signalled_at = signal.SIGTERM, time.monotonic() - 17.5
    with pytest.raises(SystemExit):
        train(session)
    assert 1.0 <= waits[0] <= 2.5 and 1.0 <= closed[0] <= 2.5


def test_a_save_that_its_deadline_has_cut_off_is_found_by_doctor(
    layout: RunLayout, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, publish = threading.Event(), CheckpointStore.publish

    def wait_and_publish(self: CheckpointStore, *args: Any) -> Any:
        assert opened.wait(30.0)
        return publish(self, *args)

    monkeypatch.setattr(CheckpointStore, "publish", wait_and_publish)
    flag = StopFlag()
    session = open_session(flag=flag)
    flag.signal_number, flag.signalled_at = signal.SIGTERM, time.monotonic() - 30
    try:
        with pytest.raises(SystemExit):
            train(session)
    finally:
        opened.set()
    line = check_emergency_saves([Past(layout, read_record(layout))])
    assert line.state == WARN and "could not save in time" in line.seen


def test_the_clock_saves_once_an_interval(layout: RunLayout, open_session: Open) -> None:
    session = open_session(steps=8, interval_s=1e-6)
    train(session)
    session.finish()
    committed = [e["step"] for e in read_events(layout.attempt(1)) if e["kind"] == "committed"]
    assert committed == [1, 3, 5, 7, 8]
    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None and outcome.result == FINISHED


def test_an_attempt_has_trained_once_a_step_is_through(open_session: Open) -> None:
    session = open_session(steps=1)
    seen: list[bool] = []
    train(session, before_end=lambda step: seen.append(session.has_trained))
    assert (seen, session.has_trained) == ([False], True)


def test_a_process_ends_its_children_and_itself_whatever_they_do_to_it() -> None:
    """torch's SIGCHLD handler raises for a loader worker that dies."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        from ftslurm.train import entry

        class Child:
            def __init__(self, name: bytes) -> None:
                self.name = name

            def kill(self) -> None:
                os.write(tell, self.name)
                os.kill(os.getpid(), signal.SIGCHLD)
                if self.name == b"b":
                    raise RuntimeError("no such child")

        def worker_died(*_: object) -> None:
            raise RuntimeError("DataLoader worker exited unexpectedly")

        signal.signal(signal.SIGCHLD, worker_died)
        entry.multiprocessing.active_children = lambda: [Child(b"a"), Child(b"b")]  # type: ignore
        try:
            entry._end_now(7)
        finally:
            os._exit(99)
    os.close(tell)
    with os.fdopen(told, "rb") as stream:
        assert stream.read() == b"ab"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_lists_of_blocks_inside_blocks_and_lists_are_sharded_from_the_inside(groups: Any) -> None:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from ftslurm.train.parallel import wrap

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
            self.norm = nn.LayerNorm(2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.norm(sum(expert(inputs) for expert in self.experts))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.ModuleList([Block()]) for _ in range(2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for stage in self.stages:
                for block in stage:
                    inputs = block(inputs)
            return inputs

    model = wrap(Model(), strategy="fsdp", groups=groups)
    model(torch.ones(3, 2)).sum().backward()
    units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    blocks = {f"stages.{i}.0" for i in range(2)}
    assert units == {"", *blocks, *(f"{b}.experts.{i}" for b in blocks for i in range(2))}
