"""Ranks save for as long as Slurm gives them by now, not as it did at submit, and all the same."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import launch
import pytest

from ftslurm.errors import RANK_STOPPED
from ftslurm.run.attempts import STOPPED, Outcome, read_events, read_outcome
from ftslurm.run.deadline import (
    AGENTS,
    ENDING,
    LEAST_S,
    PREEMPTED,
    SUBMIT,
    Deadline,
    read_deadline,
    write_deadline,
)
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import read_record
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, RunSpec

pytestmark = pytest.mark.torch


class Stop:
    """Two ranks that are asked to stop in step 2; frozen at submit: `frozen_s`."""

    def __init__(self, folder: Path, *, frozen_s: float, faults: str) -> None:
        spec = RunSpec(
            entry="loops:stopped_at_3",
            steps=8,
            cluster=ClusterSpec(tasks_per_node=2),
            checkpoint=CheckpointSpec(interval_steps=0, interval_s=0),
            user={"lr": 0.1},
        )
        self.layout = launch.prepare(folder / "run", spec, emergency_deadline_s=frozen_s)
        record = json.loads(self.layout.run_json.read_text())
        self.layout.run_json.write_text(json.dumps({**record, "scheduler": "slurm"}))
        self.environ = {"FTSLURM_BEATS": str(folder / "beats"), "FTSLURM_FAULTS": faults}

    def tell(self, left_s: float, by: str = PREEMPTED) -> None:
        """As the node's agent does."""
        write_deadline(self.environ, 1, Deadline(time.monotonic() + left_s, by))

    def begin(self) -> launch.Launch:
        return launch.Launch(self.layout, world_size=2, environ=self.environ)

    def end(self, begun: launch.Launch) -> Outcome:
        ended = begun.wait()
        assert ended.codes == [RANK_STOPPED] * 2, ended.logs()
        assert not ended.killed
        outcome = read_outcome(self.layout.attempt(1))
        assert outcome is not None and outcome.result == STOPPED
        return outcome

    def wait_until_it_saves(self) -> None:
        give_up_at = time.monotonic() + 120
        while not self.deadlines():
            assert time.monotonic() < give_up_at
            time.sleep(0.02)

    def deadlines(self) -> list[dict[str, Any]]:
        events = read_events(self.layout.attempt(1))
        return [event for event in events if event["kind"] == "deadline"]


def test_a_save_that_takes_longer_than_was_frozen_commits_in_a_longer_grace(tmp_path: Path) -> None:
    stop = Stop(tmp_path, frozen_s=1.0, faults="slow@persist:rank=1:seconds=2")
    stop.tell(600)
    assert stop.end(stop.begin()).committed_step == 3
    (told,) = stop.deadlines()
    assert told["by"] == PREEMPTED and told["left_s"] > 10
    assert read_deadline(stop.environ, 1) is None, "the last rank has taken it away"


def test_a_save_is_given_up_in_time_in_a_shorter_grace(tmp_path: Path) -> None:
    stop = Stop(tmp_path, frozen_s=600.0, faults="hang@persist:rank=1")
    stop.tell(1.0)  # over, by the time the ranks are there
    outcome = stop.end(stop.begin())
    assert outcome.committed_step is None
    assert "did not commit (1 s were left for it)" in outcome.reason


def test_an_answer_that_comes_while_it_saves_lengthens_the_time_on_all_ranks(
    tmp_path: Path,
) -> None:
    stop = Stop(tmp_path, frozen_s=15.0, faults="sleep@persist:rank=1:seconds=20")
    begun = stop.begin()
    stop.wait_until_it_saves()
    stop.tell(60)
    assert stop.end(begun).committed_step == 3
    assert [told["by"] for told in stop.deadlines()] == ["submit", PREEMPTED]


def test_an_answer_that_comes_while_it_saves_shortens_the_time_on_all_ranks(
    tmp_path: Path,
) -> None:
    """Frozen at submit were 600 s; launch.Launch would kill them before."""
    stop = Stop(tmp_path, frozen_s=600.0, faults="hang@persist:rank=1")
    begun = stop.begin()
    stop.wait_until_it_saves()
    stop.tell(2)
    outcome = stop.end(begun)
    assert outcome.committed_step is None
    by_submit, told = stop.deadlines()
    assert (by_submit["by"], told["by"]) == (SUBMIT, PREEMPTED) and told["left_s"] <= 2


class Alone:
    """A rank without others that is asked to leave just now; by its clock stop_at was 2 s ago."""

    def __init__(
        self,
        folder: Path,
        *,
        scheduler: str = "slurm",
        number: int = signal.SIGTERM,
        own_s: float | None = None,
        told_s: float | None = None,
        by: str = PREEMPTED,
        agents: bool = True,
        world_size: int = 1,
    ) -> None:
        from ftslurm.train.deadline import Leeway

        spec = RunSpec(cluster=ClusterSpec(signal_lead_s=120))
        spec.recovery.agents = agents
        spec.checkpoint.emergency_deadline_s = own_s
        layout: RunLayout = launch.prepare(folder / "run", spec, emergency_deadline_s=15.0)
        record = replace(read_record(layout), scheduler=scheduler)
        environ = launch.rank_environ(layout, 1, 0, world_size, 1)
        env = replace(RankEnvironment.read(environ), stop_at=1000.0)
        environ["FTSLURM_BEATS"] = str(folder / "beats")
        self._at = asked_at = time.monotonic()
        self.environ = environ
        if told_s is not None:
            self.tell(told_s, by)
        leeway: Any = Leeway
        self._leeway = leeway(
            env, record, None, asked_at=asked_at, signal_number=number, environ=environ,
            clock=self.clock, now=lambda: 1002.0,
        )  # fmt: skip
        self.given: list[float] = []
        self.nearer: list[float] = []
        """Seconds that were left, each time by what was told while it saved."""
        self.events: list[dict[str, Any]] = []

    def clock(self) -> float:
        """Goes on by being read, and not while this machine stands still."""
        self._at += 0.01
        return self._at

    def tell(self, left_s: float, by: str = PREEMPTED) -> None:
        write_deadline(self.environ, 1, Deadline(self.clock() + left_s, by))

    def save(self, *, late_s: float | None = None, by: str = PREEMPTED) -> None:
        """`late_s`: what is told to be left while it saves."""

        def save(*, deadline_s: float, nearer: Callable[[], float]) -> bool:
            self.given.append(deadline_s)
            if late_s is not None:
                self.tell(late_s, by)
            self.nearer.append(nearer() - self.clock())
            return False

        assert not self._leeway.save(save, lambda kind, facts: self.events.append(dict(facts)))

    @property
    def given_s(self) -> float:
        return float(self._leeway.given_s)


@pytest.mark.parametrize(("given", "left_s"), [
    ({}, 14.0),
    ({"scheduler": "local"}, 15.0),
    ({"agents": False}, 15.0),
    ({"told_s": 3600.0, "by": AGENTS}, 3600.0),
])  # fmt: skip
def test_without_an_answer_what_was_frozen_holds_and_an_eviction_takes_its_time(
    tmp_path: Path, given: dict[str, Any], left_s: float
) -> None:
    one = Alone(tmp_path, **given)
    one.save()
    assert one.given == [pytest.approx(left_s, abs=0.9)]


@pytest.mark.parametrize(("told_s", "left_s"), [(None, 113.0), (300.0, 113.0), (30.0, 30.0)])
def test_by_the_clock_the_limit_itself_is_the_deadline_or_what_slurm_says_is_nearer(
    tmp_path: Path, told_s: float | None, left_s: float
) -> None:
    """No signal has come to rank 0; the limit is `signal_lead_s` after stop_at."""
    one = Alone(tmp_path, number=signal.SIGALRM, told_s=told_s, agents=told_s is not None)
    one.save()
    assert one.given == [pytest.approx(left_s, abs=0.9)]


@pytest.mark.parametrize(
    ("told_s", "late_s", "by", "left_s"),
    [
        (None, 6.0, PREEMPTED, 6.0),  # later than was waited for
        (60.0, 6.0, ENDING, 6.0),  # of a second signal
        (60.0, -3.0, ENDING, LEAST_S),
        (60.0, 3600.0, PREEMPTED, 60.0),
        (6.0, 3600.0, AGENTS, 6.0),
    ],
)
def test_a_nearer_deadline_that_is_told_during_the_save_shortens_it_and_is_on_record(
    tmp_path: Path, told_s: float | None, late_s: float, by: str, left_s: float
) -> None:
    one = Alone(tmp_path, told_s=told_s)
    one.save(late_s=late_s, by=by)
    assert one.nearer[0] == pytest.approx(left_s, abs=0.8)
    assert [told["by"] for told in one.events[1:2]] == ([by] if left_s < one.given[0] - 1 else [])


def test_nodes_that_are_told_a_little_apart_do_not_shorten_the_save(tmp_path: Path) -> None:
    one = Alone(tmp_path, told_s=60.0)
    one.save(late_s=59.5)
    assert one.given == [pytest.approx(one.given_s)] and len(one.events) == 1


def test_a_save_for_an_operator_is_shortened_by_the_end_of_its_job(tmp_path: Path) -> None:
    one = Alone(tmp_path, number=0)
    one.save(late_s=6.0)
    assert one.given == [pytest.approx(3600.0, abs=9)]
    assert one.nearer == [pytest.approx(6.0, abs=0.9)]


@pytest.mark.parametrize(("number", "left_s"), [(0, 3600.0), (signal.SIGTERM, 14.0)])
def test_a_deadline_of_a_signal_that_the_ranks_did_not_get_is_none(
    tmp_path: Path, number: int, left_s: float
) -> None:
    """As of one to the agents' job step alone, an hour ago."""
    one = Alone(tmp_path, number=number, told_s=-700.0)
    one.save()
    assert one.given == [pytest.approx(left_s, abs=0.9)]
    assert one.given_s == pytest.approx(one.given[0]), "nor is it a nearer one"


@pytest.mark.parametrize(("late_s", "given"), [(60.0, [14.0, 60.0]), (0.5, [14.0])])
def test_a_save_is_not_begun_again_for_the_end_of_a_grace(
    tmp_path: Path, late_s: float, given: list[float]
) -> None:
    one = Alone(tmp_path)
    one.save(late_s=late_s)
    assert one.given == [pytest.approx(left_s, abs=0.9) for left_s in given]


def test_ranks_that_have_lost_each_other_do_not_agree_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftslurm.train import deadline

    tried: list[float] = []

    def largest(words: list[int], group: Any, *, world_size: int, timeout_s: float) -> list[int]:
        tried.append(timeout_s)
        raise RuntimeError("Operation timed out!")

    monkeypatch.setattr(deadline, "largest", largest)
    one = Alone(tmp_path, world_size=2)
    one.save(late_s=60.0)
    assert len(tried) == len(one.given) == 1


@pytest.mark.parametrize(
    ("number", "own_s", "left_s"), [(signal.SIGTERM, 15.0, 15.0), (0, None, 3600.0)]
)
def test_a_deadline_of_ones_own_and_an_operators_order_stay_as_they_are(
    tmp_path: Path, number: int, own_s: float | None, left_s: float
) -> None:
    one = Alone(tmp_path, number=number, own_s=own_s, told_s=99.0)
    one.save()
    assert one.given == [pytest.approx(left_s, abs=0.9)]
