"""Ranks save for as long as Slurm gives them by now, not as it did at submit, and all the same."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import launch
import pytest

from ftslurm.errors import RANK_STOPPED
from ftslurm.run.attempts import STOPPED, Outcome, read_events, read_outcome
from ftslurm.run.deadline import PREEMPTED, SUBMIT, Deadline, read_deadline, write_deadline
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

    def tell(self, left_s: float) -> None:
        """As the node's agent does."""
        write_deadline(self.environ, 1, Deadline(time.monotonic() + left_s, PREEMPTED))

    def begin(self) -> launch.Launch:
        return launch.Launch(self.layout, world_size=2, environ=self.environ)

    def end(self, begun: launch.Launch) -> Outcome:
        ended = begun.wait()
        assert ended.codes == [RANK_STOPPED] * 2, ended.logs()
        assert not ended.killed
        outcome = read_outcome(self.layout.attempt(1))
        assert outcome is not None and outcome.result == STOPPED
        return outcome

    def deadlines(self) -> list[dict[str, Any]]:
        events = read_events(self.layout.attempt(1))
        return [event for event in events if event["kind"] == "deadline"]


def test_a_save_that_takes_longer_than_was_frozen_commits_in_a_longer_grace(tmp_path: Path) -> None:
    stop = Stop(tmp_path, frozen_s=1.0, faults="slow@persist:rank=1:seconds=2")
    stop.tell(60)
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
    stop = Stop(tmp_path, frozen_s=2.0, faults="slow@persist:rank=1:seconds=6")
    begun = stop.begin()
    give_up_at = time.monotonic() + 60
    while not stop.deadlines():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    stop.tell(60)
    assert stop.end(begun).committed_step == 3
    assert [told["by"] for told in stop.deadlines()] == ["submit", PREEMPTED]


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
        asked_at = time.monotonic()
        self.environ = environ
        if told_s is not None:
            self.tell(told_s, by)
        leeway: Any = Leeway
        self._leeway = leeway(
            env, record, None, asked_at=asked_at, signal_number=number, environ=environ,
            now=lambda: 1002.0,
        )  # fmt: skip
        self.given: list[float] = []

    def tell(self, left_s: float, by: str = PREEMPTED) -> None:
        write_deadline(self.environ, 1, Deadline(time.monotonic() + left_s, by))

    def save(self, *, late_s: float | None = None) -> None:
        """`late_s`: what is told to be left while it saves."""

        def save(*, deadline_s: float) -> bool:
            self.given.append(deadline_s)
            if late_s is not None:
                self.tell(late_s)
            return False

        assert not self._leeway.save(save, lambda kind, facts: None)


@pytest.mark.parametrize(("given", "left_s"), [
    ({}, 14.0),
    ({"scheduler": "local"}, 15.0),
    ({"agents": False}, 15.0),
    ({"told_s": 0.0, "by": SUBMIT}, 15.0),
])  # fmt: skip
def test_without_an_answer_what_was_frozen_holds_and_one_that_nobody_gives_is_not_waited_for(
    tmp_path: Path, given: dict[str, Any], left_s: float
) -> None:
    one = Alone(tmp_path, **given)
    one.save()
    assert one.given == [pytest.approx(left_s, abs=0.4)]


@pytest.mark.parametrize(("told_s", "left_s"), [(None, 113.0), (300.0, 113.0), (30.0, 30.0)])
def test_by_the_clock_the_limit_itself_is_the_deadline_or_what_slurm_says_is_nearer(
    tmp_path: Path, told_s: float | None, left_s: float
) -> None:
    """No signal has come to rank 0; the limit is `signal_lead_s` after stop_at."""
    one = Alone(tmp_path, number=signal.SIGALRM, told_s=told_s, agents=told_s is not None)
    one.save()
    assert one.given == [pytest.approx(left_s, abs=0.4)]


@pytest.mark.parametrize(("late_s", "given"), [(60.0, [14.0, 60.0]), (0.5, [14.0])])
def test_a_save_is_not_begun_again_for_the_end_of_a_grace(
    tmp_path: Path, late_s: float, given: list[float]
) -> None:
    one = Alone(tmp_path)
    one.save(late_s=late_s)
    assert one.given == [pytest.approx(left_s, abs=0.4) for left_s in given]


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
    assert one.given == [pytest.approx(left_s, abs=0.4)]
