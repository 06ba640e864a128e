"""The benchmark's arithmetic, and that every part of it runs."""

import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent / "bench"
sys.path.insert(0, str(BENCH))
from bench_sweep import LAUNCHER, RIVAL, Taken, rows  # noqa: E402
from pairs import Comparison, median_with_interval, run_in_turn  # noqa: E402


@pytest.mark.parametrize(("n", "rank"), [(15, 4), (16, 5), (21, 7), (31, 11)])
def test_the_interval_is_that_of_the_sign_test(n, rank):
    """Ranks after the table of Conover, Practical Nonparametric Statistics: 90 % at least."""
    assert median_with_interval(range(1, n + 1)) == (statistics.median(range(1, n + 1)), rank,
                                                     n + 1 - rank)  # fmt: skip


def test_few_values_give_their_whole_range():
    assert median_with_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert median_with_interval([7.0]) == (7.0, 7.0, 7.0)


def test_the_interval_holds_the_true_median_nine_times_in_ten():
    chance = random.Random(5)
    hits = 0
    for _ in range(2000):
        _, low, high = median_with_interval([chance.expovariate(1.0) for _ in range(15)])
        hits += low <= 0.6931 <= high
    assert hits / 2000 >= 0.9


def test_a_slow_minute_weighs_on_both_halves_of_a_pair():
    slow = [1.0, 9.0, 1.0, 9.0, 1.0]
    found = Comparison("a", "b", [2 * s for s in slow], slow)
    assert median_with_interval(found.ratios) == (2.0, 2.0, 2.0)


def test_variants_take_turns_in_being_first():
    order = []
    variants = {name: lambda name=name: order.append(name) or {"s": 1.0} for name in "ab"}
    found = run_in_turn(variants, rounds=3, progress=lambda text: None)
    assert "".join(order) == "abbaab"
    assert found == {"a": {"s": [1.0] * 3}, "b": {"s": [1.0] * 3}}


def test_rounds_of_a_sweep_are_compared_one_by_one_and_told_with_their_range():
    def taken(wall_s, **calls):
        return Taken(wall_s, wall_s / 2, 50.0 + wall_s, calls)

    found = {
        LAUNCHER: [taken(2, sbatch=1, scontrol=3), taken(3, sbatch=1, scontrol=4)],
        RIVAL: [taken(20, sbatch=1), taken(60, sbatch=1)],
    }
    wall, cpu, peak, calls = rows(found, "queueing")
    assert wall.what == f"{LAUNCHER}: queueing, wall" and wall.ratios == [0.1, 0.05]
    assert wall.told == "2.5 (2.0 to 3.0) / 40.0 (20.0 to 60.0) s"
    assert cpu.told.startswith("1.2 (1.0 to 1.5) / ") and peak.told.startswith("52 (52 to 53) / ")
    assert (calls.told, calls.ratios) == ("1 sbatch + 3 to 4 scontrol / 1 sbatch", [4.0, 5.0])
    assert rows({name: some[:1] for name, some in found.items()}, "x")[0].told == "2.0 / 20.0 s"


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_every_part_of_the_benchmark_runs_to_its_table():
    # Not the sweep's: it builds a venv of its own and starts a cluster.
    parts = ["--only", "cold", "step", "checkpoint", "preempt"]
    argv = [sys.executable, str(BENCH / "run.py"), "--rounds", "2", "--size-mib", "8", *parts]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert done.returncode in (0, 1) and len(rows) == 1 + 5 + 1 + 8 + 1, done.stdout + done.stderr
