"""A device's own compute in a step, by events that are never waited for. The device is made up: it
runs what was put on its stream in order, and has passed what it is said to have passed."""

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftslurm.diagnosis.stragglers import SlowFinding, StragglerLimits, Watcher
from ftslurm.run.heartbeat import EVALUATING, beats_folder, read_views
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment
from ftslurm.train import beats
from ftslurm.train.device_clock import MOST_PENDING, DeviceClock, clock_of, gpu_name


class Device:
    """Its stream, as the time at which what was put on it last will have ended."""

    def __init__(self) -> None:
        self.busy_until_s, self.passed_s = 0.0, float("inf")
        self.made = 0
        self.error: Optional[Exception] = None

    def compute(self, seconds: float) -> None:
        self.busy_until_s += seconds

    def new_event(self) -> "Event":
        self.made += 1
        return Event(self)

    def clock(self) -> DeviceClock:
        return DeviceClock(self.new_event, lambda: False)


class Event:
    """Without `synchronize`: whoever calls it fails."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_s: Optional[float] = None

    def record(self) -> None:
        if self._device.error:
            raise self._device.error
        self.at_s = self._device.busy_until_s

    def query(self) -> bool:
        assert self.at_s is not None
        return self.at_s <= self._device.passed_s

    def elapsed_time(self, end: "Event") -> float:
        assert self.at_s is not None and end.at_s is not None
        return 1000.0 * (end.at_s - self.at_s)


def step(device: Device, clock: DeviceClock, own_s: float, wait_s: float = 0.0) -> None:
    clock.begins()
    device.compute(own_s)
    clock.computed()
    device.compute(wait_s)


def test_a_step_is_told_once_the_device_has_passed_it_and_its_wait_is_left_out() -> None:
    device = Device()
    device.passed_s = 0.0
    clock = device.clock()
    step(device, clock, 0.25, wait_s=0.75)
    assert clock.own_s() is None
    step(device, clock, 0.5, wait_s=0.5)
    device.passed_s = 1.0
    assert clock.own_s() == pytest.approx(0.25)
    device.passed_s = 2.0
    assert clock.own_s() == pytest.approx(0.5)
    assert clock.own_s() == pytest.approx(0.5), "of the newest that is known"


def test_events_are_used_again_and_those_of_a_device_that_stands_still_are_few() -> None:
    device = Device()
    clock = device.clock()
    for _ in range(50):
        step(device, clock, 0.1)
        clock.own_s()
    assert device.made == 2
    device.passed_s = 0.0
    for _ in range(50):
        step(device, clock, 0.1)
        clock.own_s()
    assert device.made <= 2 * MOST_PENDING + 2


def test_a_step_that_reduces_no_gradients_or_is_captured_into_a_graph_is_not_told() -> None:
    device = Device()
    clock = device.clock()
    for _ in range(3):
        clock.begins()
        device.compute(0.3)
    assert clock.own_s() is None
    captured = DeviceClock(device.new_event, lambda: True)
    step(device, captured, 0.3)
    assert captured.own_s() is None and device.made <= 2


def test_once_a_step_is_measured_no_more_the_last_that_was_is_soon_forgotten() -> None:
    device = Device()
    clock = device.clock()
    step(device, clock, 0.8)
    assert clock.own_s() == pytest.approx(0.8)
    told = []
    for _ in range(MOST_PENDING + 1):  # replays of a graph: nothing of ours runs in them
        clock.begins()
        device.compute(0.2)
        told.append(clock.own_s())
    assert told[0] == pytest.approx(0.8) and told[-1] is None
    step(device, clock, 0.2)
    assert clock.own_s() == pytest.approx(0.2)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_of_the_device_is_not_raised_here_and_ends_the_measuring(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device()
    clock = device.clock()
    step(device, clock, 0.3)
    device.error = kind("CUDA error: an illegal memory access was encountered")
    for _ in range(3):
        step(device, clock, 0.3)
        assert clock.own_s() is None
    assert capsys.readouterr().err.count("not measured any more: CUDA error") == 1


def test_the_device_is_the_ranks_own_as_nvidia_smi_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpu_name(torch.device("cpu")) == "" and clock_of(torch.device("cpu")) is None
    told = SimpleNamespace(uuid="6c8d9a5b-0000-4000-8000-000000000001")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert gpu_name(torch.device("cuda", 1)) == "GPU-6c8d9a5b-0000-4000-8000-000000000001"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert gpu_name(torch.device("cuda", 1)) == ""


class Ranks:
    """Four that train in step, each on a made-up device of its own."""

    def __init__(self, folder: Path) -> None:
        environ = {"FTSLURM_BEATS": str(folder / "beats")}
        beats_of = beats_folder(environ, 1)
        assert beats_of is not None
        self._folder, self._watcher = beats_of, Watcher(StragglerLimits())
        self.found: list[tuple[int, SlowFinding]] = []
        self.ranks = []
        for rank in range(4):
            env = RankEnvironment(Path("/run"), 1, rank, 4, rank, 4, "n1", 0, "127.0.0.1", 1)
            pulse, device = Pulse.open(env, environ), Device()
            pulse.devices_wait(f"GPU-{rank}")
            pulse.device_clock = device.clock()
            pulse.restored(0)
            self.ranks.append((pulse, device, pulse.device_clock))

    def step(self, number: int, own_s: list[float], *, measured: Collection[int]) -> None:
        for rank, (pulse, device, clock) in enumerate(self.ranks):
            pulse.step_begins()
            device.compute(own_s[rank])
            if rank in measured:
                clock.computed()
            device.compute(max(own_s) - own_s[rank])
            pulse.step_ended(number)
        new = self._watcher.observe(read_views(self._folder, "n1"), at=number)
        self.found += [(number, finding) for finding in new]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_of_ranks_whose_hosts_see_no_wait_the_slow_device_is_named(ranks: Ranks) -> None:
    for number in range(1, 100):
        own_s = [0.2, 0.2, 0.8 if number > 20 else 0.2, 0.2]
        ranks.step(number, own_s, measured=range(4))
    (named_at, finding), *others = ranks.found
    assert (finding.kind, finding.ranks) == ("straggler", (2,)) and not others
    assert "rank 2 on n1 (GPU-2) computes 0.8 s a step of its own, 4.0 times" in finding.why
    assert finding.why.endswith("as its device tells")
    assert named_at <= 20 + 10 + 2 * 10, "its window, and as long as it has to last"


def test_a_rank_whose_device_does_not_tell_is_held_against_no_others_device(ranks: Ranks) -> None:
    for number in range(1, 60):  # the last of its parameters has no gradient
        time.sleep(0.002)
        ranks.step(number, [1e-4] * 4, measured={0, 1, 3})
    assert ranks.found == []


def test_an_odd_last_step_before_a_graph_is_captured_makes_no_straggler(ranks: Ranks) -> None:
    for number in range(1, 100):
        odd_s = 0.8 if number == 11 else 0.2
        ranks.step(number, [0.2, 0.2, odd_s, 0.2], measured=range(4 if number <= 11 else 0))
    assert ranks.found == []


def test_an_evaluation_at_the_begin_of_a_step_is_not_its_own_compute() -> None:
    pulse, device = Pulse.unseen(), Device()
    pulse.device_clock = clock = device.clock()
    pulse.step_begins()
    with pulse.aside(EVALUATING):
        device.compute(30.0)
    device.compute(0.2)
    clock.computed()
    assert clock.own_s() == pytest.approx(0.2)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_end_is_where_all_gradients_are_there_and_none_is_waited_for(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))))
    pulse, told = Pulse.unseen(), []

    class Clock:
        def begins(self) -> None:
            told.append("begins")

        def computed(self) -> None:
            assert all(parameter.grad is not None for parameter in model.parameters())
            told.append("computed")

        def own_s(self) -> float:
            return 0.125

    monkeypatch.setattr(beats, "clock_of", lambda device: Clock())
    monkeypatch.setattr(pulse, "wait_begins", lambda seq: told.append("waits"))
    model = beats.watch_backward(pulse, model)  # type: ignore[assignment]
    rows: Any = torch.ones(4, 8)
    for number in (1, 2):
        pulse.step_begins()
        with model.no_sync():
            model(rows).sum().backward()
        model(rows).sum().backward()
        pulse.step_ended(number)
    assert told == ["begins", "computed", "waits"] * 2


def test_two_models_have_one_clock(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, device = Pulse.unseen(), Device()
    monkeypatch.setattr(beats, "clock_of", lambda _: device.clock())
    models = [DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2)]
    for model in models:
        beats.watch_backward(pulse, model)
    pulse.step_begins()
    for model in models:
        device.compute(0.25)
        model(torch.ones(2, 4)).sum().backward()
        device.compute(0.5)
    assert pulse.device_clock is not None
    assert pulse.device_clock.own_s() == pytest.approx(0.25), "until it waits for the first time"
