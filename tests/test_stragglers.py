"""The slow rank is named within ten steps, noise is no finding, and nobody is blamed for all."""

import random
from collections import deque
from collections.abc import Callable
from statistics import median

import pytest
from fakes.views import rank_view

from ftslurm.diagnosis.stragglers import SlowFinding, StragglerLimits, Watcher
from ftslurm.run.heartbeat import RankView
from ftslurm.run.spec import RecoverySpec

LIMITS = StragglerLimits.of(RecoverySpec())
Own = Callable[[int, int], float]
"""Seconds that a rank computes of its own in a step."""


class Course:
    """Ranks that train in step: all take as long as the slowest, plus what they wait for."""

    def __init__(self, own: Own, *, ranks: int = 4, wait_s: float = 0.05) -> None:
        self.found: list[tuple[int, SlowFinding]] = []
        self._own, self._wait_s = own, wait_s
        self._walls = [deque([], maxlen=10) for _ in range(ranks)]
        self._owns = [deque([], maxlen=10) for _ in range(ranks)]
        self._watcher = Watcher(LIMITS)
        self._step = 0
        self._at = 0.0

    def run(self, steps: int, *, look_every: int = 1) -> list[tuple[int, SlowFinding]]:
        """The findings, each with the step after which it was made."""
        for _ in range(steps):
            self._step += 1
            owns = [self._own(rank, self._step) for rank in range(len(self._owns))]
            wall_s = max(owns) + self._wait_s
            self._at += wall_s
            for rank, own_s in enumerate(owns):
                self._walls[rank].append(wall_s)
                self._owns[rank].append(own_s)
            if self._step % look_every == 0:
                new = self._watcher.observe(self._views(owns, wall_s), at=self._at)
                self.found += [(self._step, finding) for finding in new]
        return self.found

    def _views(self, owns: list[float], wall_s: float) -> list[RankView]:
        return [
            rank_view(
                rank,
                step=self._step,
                step_wall_s=wall_s,
                step_own_s=own_s,
                step_cpu_s=own_s,
                window_wall_s=median(self._walls[rank]) if self._step > 10 else 0.0,
                window_own_s=median(self._owns[rank]) if self._step > 10 else 0.0,
                window_cpu_s=median(self._owns[rank]) if self._step > 10 else 0.0,
                usual_step_s=0.3,
            )
            for rank, own_s in enumerate(owns)
        ]


def steady(rank: int, step: int) -> float:
    return 0.2 + 0.001 * ((7 * rank + 3 * step) % 5)


def test_a_rank_four_times_slower_is_named_within_ten_steps() -> None:
    course = Course(lambda rank, step: steady(rank, step) * (4 if rank == 2 and step > 100 else 1))
    found = course.run(130)
    assert [(finding.kind, finding.ranks, finding.nodes) for _, finding in found] == [
        ("straggler", (2,), ("n2",))
    ]
    (step, finding) = found[0]
    assert 100 < step <= 110
    assert (
        "rank 2 on n2 computes 0.8" in finding.why and "4.0 times the ranks' median" in finding.why
    )
    assert "on a processor 4.0 times the median" in finding.why


def test_a_rank_whose_own_compute_is_not_known_can_only_lag() -> None:
    watcher = Watcher(LIMITS)
    views = [rank_view(rank, window_own_s=0.2) for rank in range(4)]
    views[1] = rank_view(1, window_own_s=0.0)
    assert watcher.observe(views, at=0.0) == []
    views[1] = rank_view(1, window_own_s=0.0, step=46)
    (finding,) = watcher.observe(views, at=1.0)
    assert finding.ranks == (1,) and "4 steps behind the foremost" in finding.why


def test_all_can_be_slow_though_no_ranks_own_compute_is_known() -> None:
    watcher, found = Watcher(LIMITS), []
    for number in range(1, 15):
        wall_s = 2.0 if number > 8 else 1.0
        views = [
            rank_view(rank, step=10 * number, window_own_s=0.0, window_wall_s=wall_s)
            for rank in range(4)
        ]
        found += watcher.observe(views, at=30.0 * number)
    (finding,) = found
    assert (finding.kind, finding.ranks) == ("slow_all", ())
    assert "whether one is to blame is not known" in finding.why


def test_on_shared_processors_more_work_shows_by_the_work() -> None:
    """Four ranks on two cores: the others' steps take longer too, but not more processor."""
    watcher = Watcher(LIMITS)
    views = [rank_view(rank, window_own_s=0.2, window_cpu_s=0.1) for rank in range(4)]
    views[3] = rank_view(3, window_own_s=0.45, window_cpu_s=0.4)
    (finding,) = watcher.observe(views, at=0.0)
    assert finding.ranks == (3,)
    assert finding.why == (
        "rank 3 on n2 works 0.4 s a step on a processor, 4.0 times the ranks' median of 0.1 s; by "
        "the clock it computes 0.45 s a step of its own, 2.2 times the ranks' median of 0.2 s"
    )
    # Rank 0 keeps the books on its processor while the others do nothing of the kind on theirs.
    views = [rank_view(rank, window_own_s=1.0, window_cpu_s=0.01) for rank in range(4)]
    views[0] = rank_view(0, window_own_s=1.1, window_cpu_s=0.11)
    assert Watcher(LIMITS).observe(views, at=0.0) == []


def test_a_rank_that_gets_no_processor_or_no_data_is_named_when_that_lasts() -> None:
    watcher = Watcher(LIMITS)
    found = []
    for step in range(100, 160):
        views = [rank_view(0, step=step), rank_view(1, step=step)]
        starved = 101 <= step < 110 or step >= 120
        own_s = 4.0 if starved else 0.8
        views.append(rank_view(2, step=step, window_own_s=own_s, window_cpu_s=0.8))
        found += [(step, finding) for finding in watcher.observe(views, at=float(step))]
    ((step, finding),) = [(step, one) for step, one in found if one.kind == "straggler"]
    assert step == 140 and finding.ranks == (2,)
    assert "20 % of it on a processor: starved" in finding.why


def test_of_two_ranks_the_slow_one_is_named() -> None:
    course = Course(lambda rank, step: 0.8 if rank == 1 and step > 50 else 0.2, ranks=2)
    assert [finding.ranks for _, finding in course.run(80)] == [(1,)]


def test_both_ranks_of_a_slow_node_are_named_together() -> None:
    course = Course(lambda rank, step: 0.9 if rank in (4, 5) and step > 50 else 0.2, ranks=8)
    (finding,) = [finding for _, finding in course.run(90)]
    assert (finding.ranks, finding.nodes) == ((4, 5), ("n3",))


def test_it_is_told_once_and_again_when_it_comes_back_later() -> None:
    def own(rank: int, step: int) -> float:
        return 0.8 if rank == 1 and (50 < step <= 90 or step > 400) else 0.2

    steps = [step for step, finding in Course(own).run(450) if finding.kind == "straggler"]
    assert len(steps) == 2 and 50 < steps[0] <= 60 and 400 < steps[1] <= 410


def noisy(seed: int, *, load: bool) -> Own:
    """Steps scatter by 15 %, one in a hundred takes up to eight times as long; under load every
    rank is at times twice as slow, for some steps, each at times of its own."""
    draw = random.Random(seed)
    burdened: dict[int, int] = {}

    def own(rank: int, step: int) -> float:
        value = 0.2 * draw.lognormvariate(0, 0.15)
        if draw.random() < 0.01:
            value *= draw.uniform(2, 8)
        if load:
            if draw.random() < 0.08:
                burdened[rank] = step + draw.randrange(3, 25)
            if burdened.get(rank, 0) > step:
                value *= draw.uniform(1.5, 2.5)
        return value

    return own


@pytest.mark.parametrize("load", [False, True], ids=["alone", "under background load"])
def test_five_hundred_undisturbed_steps_are_no_finding(load: bool) -> None:
    for seed in range(20):
        found = Course(noisy(seed, load=load), ranks=4 + 4 * (seed % 2)).run(
            500, look_every=1 + seed % 3
        )
        assert found == [], (seed, found)


def test_tiny_steps_scatter_by_more_than_their_own_size_and_are_no_finding() -> None:
    draw = random.Random(5)
    course = Course(lambda rank, step: 0.001 * draw.lognormvariate(0, 0.8), wait_s=0.0)
    assert course.run(500) == []


@pytest.mark.parametrize(
    ("own_share", "wait_s", "cause"),
    [(1.7, 0.0, "all compute slower"), (1.0, 0.2, "their own compute is as before, they wait")],
    ids=["cooling", "file system"],
)
def test_when_throughput_falls_to_sixty_percent_it_is_found_and_nobody_is_blamed(
    own_share: float, wait_s: float, cause: str
) -> None:
    course = Course(noisy(3, load=False), wait_s=0.0)
    assert course.run(200) == []
    slowed = noisy(4, load=False)
    course._own, course._wait_s = (lambda rank, step: own_share * slowed(rank, step)), wait_s
    found = course.run(300)
    assert [(finding.kind, finding.ranks, finding.nodes) for _, finding in found] == [
        ("slow_all", (), ())
    ]
    step, finding = found[0]
    assert cause in finding.why and "no rank is to blame" in finding.why
    assert step <= 400


def test_where_no_waiting_is_seen_nobody_is_acquitted_either() -> None:
    """On CUDA the devices wait, and every host seems to compute all the time."""
    course = Course(lambda rank, step: 0.2 if step < 200 else 0.4, wait_s=0.0)
    (finding,) = [finding for _, finding in course.run(420)]
    assert finding.kind == "slow_all" and "whether one is to blame is not known" in finding.why


def test_a_short_slowness_of_all_is_nobodys_concern() -> None:
    course = Course(lambda rank, step: 0.5 if 200 < step <= 220 else 0.2)
    assert course.run(400) == []


def test_a_rank_half_as_slow_again_is_warned_of_and_not_called_all() -> None:
    course = Course(lambda rank, step: 0.45 if rank == 3 and step > 200 else 0.2, wait_s=0.0)
    found = course.run(420)
    assert [(finding.kind, finding.ranks) for _, finding in found] == [("drift", (3,))]
    assert "is slow, though no straggler yet" in found[0][1].why


def test_a_slow_drift_is_warned_of_before_it_is_a_straggler() -> None:
    draw = random.Random(11)

    def own(rank: int, step: int) -> float:
        growth = 1 + max(0, step - 150) * (0.004 if rank == 1 else 0)
        return 0.2 * growth * draw.lognormvariate(0, 0.05)

    found = Course(own).run(400)
    assert [(finding.kind, finding.ranks) for _, finding in found] == [("drift", (1,))]
    step, finding = found[0]
    assert 150 < step < 350 and "times the other ranks' own compute" in finding.why


def test_a_rank_three_steps_behind_is_named_and_one_that_was_seen_earlier_is_not() -> None:
    watcher = Watcher(LIMITS)
    behind = [rank_view(0, step=60), rank_view(1, step=57), rank_view(2, step=60)]
    assert watcher.observe(behind, at=0.0) == []  # perhaps only read some steps apart
    (finding,) = watcher.observe(behind, at=1.0)
    assert finding.ranks == (1,) and "3 steps behind" in finding.why
    # Its node was last heard five steps ago; by now it may be as far.
    seen_earlier = [rank_view(0, step=60), rank_view(1, step=55, step_age_s=5.0)]
    watcher = Watcher(LIMITS)
    assert [watcher.observe(seen_earlier, at=at) for at in (0.0, 1.0)] == [[], []]


def test_ranks_that_train_in_step_and_are_read_some_steps_apart_are_no_stragglers() -> None:
    watcher = Watcher(LIMITS)
    for look in range(1, 10):
        step = 20 * look
        views = [rank_view(0, step=step), rank_view(1, step=step + 7, step_age_s=0.0)]
        assert watcher.observe(views, at=float(look)) == []


def test_who_saves_or_evaluates_is_not_compared_and_a_lone_rank_is_no_straggler() -> None:
    watcher = Watcher(LIMITS)
    views = [rank_view(0), rank_view(1, phase="saving", window_own_s=9.0), rank_view(2)]
    assert watcher.observe(views, at=0.0) == []
    assert watcher.observe([rank_view(0, window_own_s=9.0)], at=1.0) == []


def test_it_can_be_switched_off() -> None:
    watcher = Watcher(StragglerLimits(factor=0))
    assert watcher.observe([rank_view(0), rank_view(1, window_own_s=99.0)], at=0.0) == []
