"""Who is named after nodes were tried alone and in pairs, for every case that is small enough."""

import random
from itertools import combinations

import pytest

from ftslurm.health.pairwise import (
    CPU_LIMITS,
    GEMM,
    GPU_LIMITS,
    HBM,
    P2P,
    PAIR,
    Trial,
    apart,
    judge,
    next_round,
    worst,
)

USUAL_S = 0.01


def names(count):
    return [f"n{number}" for number in range(count)]


def play(count, *, slow=(), dead=(), links=(), seed=0):
    """All rounds among nodes of which some are slow or dead; what is judged, and how many."""
    nodes, trials, done, chance = names(count), [], 0, random.Random(seed)
    while pairs := next_round(nodes, trials, CPU_LIMITS, done):
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met)) and set(met) <= set(nodes)
        for pair in pairs:
            seconds = USUAL_S * chance.uniform(0.7, 1.9)
            if set(pair) & set(slow) or pair in links or pair[::-1] in links:
                seconds = 20 * USUAL_S
            trials.append(Trial(PAIR, pair, None if set(pair) & set(dead) else seconds))
        done += 1
        assert done <= 7
    return judge(trials, CPU_LIMITS, nodes=nodes), done


def minorities(count):
    nodes = names(count)
    sizes = range((count + 1) // 2)
    return [bad for size in sizes for bad in combinations(nodes, size)]


@pytest.mark.parametrize("count", range(3, 11))
@pytest.mark.parametrize("illness", ["slow", "dead"])
def test_any_minority_of_bad_nodes_is_named_and_nobody_else(count, illness):
    for seed, bad in enumerate(minorities(count)):
        found, _ = play(count, seed=seed, **{illness: bad})
        assert set(found.bad) == set(bad), (bad, found)


@pytest.mark.parametrize("count", range(4, 10))
def test_one_slow_link_hides_no_bad_node_and_costs_no_good_one(count):
    for link in combinations(names(count), 2):
        for bad in [(), *((node,) for node in names(count))]:
            found, _ = play(count, slow=bad, links=[link])
            assert set(found.bad) == set(bad), (link, bad, found)
            if not bad and found.links:
                assert found.links == [link]


def test_of_three_nodes_a_slow_link_alone_names_nobody():
    for link in combinations(names(3), 2):
        found, _ = play(3, links=[link])
        assert not found.bad and found.links == [link]


def test_healthy_nodes_meet_in_three_rounds_and_a_link_is_told_of_at_the_third_time():
    assert [play(count)[1] for count in (1, 2, 3, 4, 5, 64, 65)] == [0, 1, 3, 3, 3, 3, 3]
    pair = ("n0", "n1")
    others = [Trial(PAIR, (node, "n9"), USUAL_S) for node in (*pair, "n2", "n3")]
    for times in (1, 2, 3):
        slow = [Trial(PAIR, pair, 1.0)] * times
        found = judge([*others, *slow], CPU_LIMITS, nodes=names(10))
        assert found.links == ([pair] if times == 3 else [])
    once_well = [*others, *slow, Trial(PAIR, pair, USUAL_S)]
    assert not judge(once_well, CPU_LIMITS, nodes=names(10)).links


@pytest.mark.parametrize("seconds", [1.0, None])
def test_of_two_nodes_nobody_can_say_which_is_bad(seconds):
    found = judge([Trial(PAIR, ("n0", "n1"), seconds)], CPU_LIMITS, nodes=names(2))
    assert not found.bad and not found.links
    assert bool(found.notes) == (seconds is None)


def test_where_most_are_bad_nobody_is_named_and_it_is_said():
    nodes = names(4)
    for bad in combinations(nodes, 3):
        found, _ = play(4, dead=bad)
        assert not found.bad and found.notes
    wrong = [Trial(HBM, (node,), None, number, wrong="read") for number, node in enumerate(nodes)]
    found = judge(wrong, GPU_LIMITS, nodes=nodes)
    assert not found.bad and len(found.notes) == 4


def alone(what, *seconds, tasks=1):
    """One trial a rank."""
    return [Trial(what, (f"n{rank // tasks}",), value, rank) for rank, value in enumerate(seconds)]


def test_a_slow_gpu_is_named_with_its_rank_by_its_peers_of_all_nodes():
    trials = alone(GEMM, 1.0, 1.0, 1.02, 0.98, 1.6, 1.0, tasks=2)
    found = judge(trials, GPU_LIMITS, nodes=names(3))
    assert list(found.bad) == ["n2"]
    assert found.bad["n2"].startswith("rank 4 on it takes 1.60 s at best for multiplying matrices")
    assert apart(trials, GPU_LIMITS) == {("n2", 4)}


def test_one_good_time_clears_and_a_cpu_may_be_slower_than_a_gpu():
    slow = alone(GEMM, 1.0, 1.0, 3.0)
    assert judge(slow, GPU_LIMITS, nodes=names(3)).bad
    assert not judge(slow, CPU_LIMITS, nodes=names(3)).bad
    again = [*slow, Trial(GEMM, ("n2",), 1.1, 2)]
    assert not judge(again, GPU_LIMITS, nodes=names(3)).bad


def test_of_two_nodes_the_slower_one_is_named_for_what_it_does_alone():
    found = judge(alone(GEMM, 1.0, 2.0), GPU_LIMITS, nodes=names(2))
    assert list(found.bad) == ["n1"]


def test_wrong_bits_need_no_peer():
    trial = Trial(HBM, ("n0",), None, 0, wrong="read 1 words of memory other than it had written")
    found = judge([trial], GPU_LIMITS, nodes=["n0"])
    assert found.bad == {"n0": "rank 0 on it read 1 words of memory other than it had written"}
    # Which of two it was that summed wrongly, nobody knows.
    pair = Trial(PAIR, ("n0", "n1"), None, wrong="got another sum")
    assert not judge([pair], GPU_LIMITS, nodes=names(2)).bad


def test_what_fails_on_one_is_held_against_it_and_what_fails_on_all_against_nobody():
    one = [*alone(HBM, 1.0, 1.0), Trial(HBM, ("n2",), None, 2, why="CUDA error: ECC")]
    assert judge(one, GPU_LIMITS, nodes=names(3)).bad == {
        "n2": "rank 2 on it did not come through a memory test (CUDA error: ECC)"
    }
    everyone = [Trial(HBM, (node,), None, 0, why="no such library") for node in names(3)]
    found = judge(everyone, GPU_LIMITS, nodes=names(3))
    assert not found.bad and "no such library" in found.notes[0]


@pytest.mark.parametrize("seconds", [(1.0, None), (1.0, None, 1.0, None)])
def test_where_only_half_came_through_nobody_is_named_for_it(seconds):
    found = judge(alone(HBM, *seconds), GPU_LIMITS, nodes=names(len(seconds)))
    assert not found.bad and "half or more did not come through a memory test" in found.notes[0]


def test_how_long_a_memory_test_takes_is_held_against_nobody():
    assert not judge(alone(HBM, 1.0, 1.0, 30.0), GPU_LIMITS, nodes=names(3)).bad


def test_a_minority_that_falls_silent_is_named():
    silent = {"n1": "it stopped answering"}
    assert judge([], GPU_LIMITS, nodes=names(3), silent=silent).bad == silent
    for nodes in (names(2), ["n1"]):
        found = judge([], GPU_LIMITS, nodes=nodes, silent=silent)
        assert not found.bad and found.notes


def test_what_several_ranks_had_together_is_as_good_as_the_worst_says():
    good, slow = Trial(P2P, ("n0",), 1.0), Trial(P2P, ("n0",), 2.0)
    dead, wrong = Trial(P2P, ("n0",), None), Trial(P2P, ("n0",), None, wrong="got others")
    assert worst([good, slow]) == slow
    assert worst([good, dead]) == dead
    assert worst([wrong, good]) == wrong
