"""The interval between saves that is chosen from what was measured: by numbers, and over a run that
is played without ranks."""

import math
import random

import pytest

from ftslurm.plan.failures import GPU_MTBF_H
from ftslurm.plan.intervals import Costs
from ftslurm.plan.plan import Ask, plan
from ftslurm.run.attempts import PACED
from ftslurm.run.observed import LookBack, Seen
from ftslurm.run.spec import CheckpointSpec
from ftslurm.train.pace import (
    LEAST_S,
    MOST_S,
    choose,
    gpu_mtbf_h,
    is_worth_a_change,
    middle,
)
from ftslurm.train.pacer import Pacer

AUTO = CheckpointSpec(interval="auto", interval_s=240.0, interval_steps=250)


def test_without_a_failure_seen_the_rate_is_the_seeds():
    assert gpu_mtbf_h(Seen()) == pytest.approx(GPU_MTBF_H)


@pytest.mark.parametrize(("failures", "gpu_hours", "low", "high"), [
    (0, 100_000, 100_000, 1_000_000),  # twice what one failure was due in, and none
    (5, 250_000, 45_000, 60_000),  # as the seeds have it
    (2, 48, 24, 150),  # a small job that fails every three hours: two failures tell
    (10, 240, 22, 32),
    (3000, 3000 * 7000.0, 6900, 7100),  # many: what was counted is what is
])  # fmt: skip
def test_what_was_seen_moves_the_rate_from_the_seeds_to_itself(failures, gpu_hours, low, high):
    assert low < gpu_mtbf_h(Seen(failures, gpu_hours)) < high


def test_more_failures_in_the_same_time_never_make_it_longer_nor_more_time_shorter():
    by_failures = [gpu_mtbf_h(Seen(count, 5_000.0)) for count in range(6)]
    by_hours = [gpu_mtbf_h(Seen(3, hours)) for hours in (1.0, 10.0, 1e3, 1e5, 1e7)]
    assert by_failures == sorted(by_failures, reverse=True)
    assert by_hours == sorted(by_hours)


@pytest.mark.parametrize("gpus", [64, 1024, 16_384])
@pytest.mark.parametrize("seen", [Seen(), Seen(7, 60_000.0), Seen(40, 20_000.0)])
@pytest.mark.parametrize("costs", [Costs(2.0, 300.0, 30.0), Costs(20.0, 60.0, 45.0)])
def test_it_is_the_interval_that_plan_names_for_the_same_numbers(gpus, seen, costs):
    chosen = choose(costs, seen, gpus=gpus)
    planned = plan(Ask(gpus, chosen.gpu_mtbf_h, costs))
    assert chosen.mtbf_s == pytest.approx(planned.mtbf_s)
    limits = (LEAST_S, max(MOST_S, 100 * costs.stall_s))
    assert chosen.interval_s == pytest.approx(min(max(planned.interval_s, limits[0]), limits[1]))
    assert (chosen.limit is None) == (chosen.interval_s == planned.exact_s)


@pytest.mark.parametrize(("costs", "seen", "gpus", "interval_s", "limit"), [
    (Costs(0.01, 0.0, 0.1), Seen(500, 100.0), 1000, LEAST_S, "least"),
    (Costs(0.5, 0.0, 3.0), Seen(), 4, MOST_S, "most"),
    (Costs(80.0, 0.0, 90.0), Seen(), 4, 8000.0, "most"),  # an hour would cost more than 1 %
    (Costs(0.5, 0.0, 600.0), Seen(100, 5000.0), 512, 600.0, "lag"),
    (Costs(0.0, 0.0, 0.0), Seen(), 8, LEAST_S, "least"),
])  # fmt: skip
def test_a_limit_is_kept_and_named(costs, seen, gpus, interval_s, limit):
    chosen = choose(costs, seen, gpus=gpus)
    assert (chosen.interval_s, chosen.limit) == (interval_s, limit)


@pytest.mark.parametrize(("best", "worth"), [(100, False), (124, False), (126, True), (81, False),
                                             (79, True)])  # fmt: skip
def test_a_little_off_the_best_is_left_alone(best, worth):
    assert is_worth_a_change(100.0, best) is worth


def test_one_odd_save_moves_the_measure_not_at_all():
    assert middle([2.0, 2.1, 900.0]) == 2.1
    assert middle([2.0, 900.0]) == 2.0


class Played:
    """A run on rank 0 as the session drives it, with a clock of its own and no ranks."""

    def __init__(self, spec=AUTO, *, gpus=1024, before=None, is_first=True):
        self.events, self.saves, self.now = [], [], 0.0
        self.pacer = Pacer(
            spec, gpus=gpus, is_first=is_first, look_back=lambda: before,
            on_event=lambda kind, facts: self.events.append({"kind": kind, **facts}),
        )  # fmt: skip
        self._saved_at, self._commits = 0.0, []

    def train(self, for_s, *, step_s=1.0, stall_s=2.0, lag_s=5.0, spread=0.05, seed=1):
        """Some jitter is in the steps, the same in each run of a seed."""
        jitter, until, extra_s = random.Random(seed), self.now + for_s, 0.0
        while self.now < until:
            took_s = step_s * jitter.uniform(1.0 - spread, 1.0 + spread) + extra_s
            self.now, extra_s = self.now + took_s, 0.0
            self.pacer.step(took_s)
            while self._commits and self._commits[0][0] <= self.now:
                self.pacer.heard("committed", {"step": 1, "seconds": self._commits.pop(0)[1]})
            interval_s = self.pacer.interval_s()
            if 0 < interval_s <= self.now - self._saved_at:
                self.saves.append(self.now)
                self._saved_at, extra_s = self.now, stall_s
                self._commits.append((self.now + lag_s, lag_s))
                self.pacer.saved()
        return self

    @property
    def chosen(self):
        return [event["interval_s"] for event in self.events if event["kind"] == PACED]


def test_the_first_save_comes_when_configured_and_its_cost_sets_the_interval():
    run = Played().train(7200)
    (event,) = [event for event in run.events if event["kind"] == PACED]
    assert run.saves[0] == pytest.approx(240.0, abs=2.0) and event["before_s"] == 240.0
    assert event["stall_s"] == pytest.approx(2.0, abs=0.2) and event["lag_s"] == 5.0
    best = plan(Ask(1024, event["gpu_mtbf_h"], Costs(event["stall_s"], 0.0, 5.0))).interval_s
    assert event["interval_s"] == pytest.approx(best, rel=1e-4)
    assert run.saves[2] - run.saves[1] == pytest.approx(best, abs=5.0)
    assert (event["gpus"], event["failures"], event["runs"]) == (1024, 0, 1)


def test_saves_that_become_dear_widen_the_interval_and_jitter_does_not():
    run = Played().train(7200)
    before = run.chosen
    run.train(3600 * 4, stall_s=30.0)
    assert len(before) == 1 and run.chosen[-1] > 3.0 * before[-1]
    assert len(run.chosen) <= 4  # the median of five is passed once


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_vary_more_than_a_save_costs_do_not_drive_the_interval_about(seed):
    """A stall of 0.3 s among steps of 0.5 to 1.5 s; 8,192 GPUs, so that no limit holds it."""
    run = Played(gpus=8192)
    run.train(4 * 3600, stall_s=0.3, spread=0.5, seed=seed)
    settled = len(run.chosen)
    run.train(20 * 3600, stall_s=0.3, spread=0.5, seed=seed + 100)
    later = run.chosen[settled - 1 :]
    # By the last five saves alone it is changed some fifty times, by a factor of five.
    assert len(later) <= 12, later
    assert max(later) / min(later) < 2.5, later


def test_failures_that_were_seen_narrow_it():
    intervals = []
    for failures in (0, 3, 30):
        run = Played(before=LookBack(Seen(failures, 20_000.0, 3))).train(7200)
        intervals.append(run.chosen[0])
        assert run.events[0]["failures"] == failures and run.events[0]["runs"] == 4
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] / intervals[2] > 3.0


def test_an_attempt_begins_with_what_the_one_before_has_measured():
    before = LookBack(Seen(2, 900.0, 0), stall_s=1.5, lag_s=12.0)
    run = Played(before=before).train(3)
    (event,) = run.events
    assert (event["stall_s"], event["lag_s"], event["before_s"]) == (1.5, 12.0, 240.0)
    assert run.pacer.interval_s() == pytest.approx(event["interval_s"], rel=1e-4) != 240.0


def test_a_save_in_the_first_step_costs_what_nobody_knows_and_nothing_is_chosen():
    run = Played()
    run.pacer.saved()
    run.pacer.step(60.0)
    run.pacer.heard("committed", {"step": 1, "seconds": 1.0})
    assert run.events == [] and run.pacer.interval_s() == 240.0


def test_fixed_intervals_and_other_ranks_are_left_as_they_are():
    fixed = Played(CheckpointSpec(interval_s=60.0, interval_steps=7)).train(600)
    assert fixed.events == [] and fixed.pacer.interval_s() == 60.0
    assert fixed.pacer.interval_steps == 7
    other = Played(is_first=False).train(600)
    assert other.events == [] and other.saves == [] and other.pacer.interval_s() == 0.0
    # Steps count on all ranks alike, or on none.
    assert other.pacer.interval_steps == Played().pacer.interval_steps == 0


def test_what_is_logged_can_be_written_to_a_journal():
    (event,) = Played().train(3600).events
    assert all(
        value is None or isinstance(value, (int, str)) or math.isfinite(value)
        for value in event.values()
    )
