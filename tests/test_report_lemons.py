"""A lemon is told from bad luck, and from bad programs, in small fleets and in large ones."""

import math
import random
import time

import pytest
from report_fleets import job, ordinary_fleet

from ftslurm.diagnosis import causes
from ftslurm.report import lemons as lemons_module
from ftslurm.report.fleet import Fleet
from ftslurm.report.lemons import NodeTally, Programs, judge, program_of, tail
from ftslurm.scheduler.hostlist import expand


def blamed(**tallies):
    return judge(tallies, Programs()).lemons


def fleet(*jobs, spread=1.0):
    found = Fleet()
    for number, (user, name, partition, nodes, cause) in enumerate(jobs):
        at = 3600.0 * number * spread
        found.add(job(number, user, name, partition, nodes, cause=cause, at=at), expand=expand)
    return found


def test_a_node_that_most_faults_are_blamed_on_is_a_lemon():
    (found,) = blamed(
        **{f"n{i}": NodeTally(20, 20.0) for i in range(9)}, n9=NodeTally(20, 20.0, blamed=5)
    )
    assert (found.node, found.failed, found.is_blamed) == ("n9", 5, True)
    assert found.expected == pytest.approx(0.5)
    assert found.chance == pytest.approx(20 * 0.1**5)


def test_one_fault_makes_no_lemon_and_neither_do_faults_on_all():
    assert blamed(n1=NodeTally(1, 1.0, blamed=1), n2=NodeTally(50, 50.0)) == []
    assert blamed(**{f"n{i}": NodeTally(10, 10.0, blamed=3) for i in range(20)}) == []
    assert blamed(n1=NodeTally(10, 10.0, blamed=10)) == []  # nothing to compare with


def test_a_node_of_few_long_jobs_is_no_lemon_for_faults_that_its_hours_explain():
    others = {f"n{i}": NodeTally(1000, 20.0) for i in range(9)}
    assert blamed(**others, n9=NodeTally(5, 700.0, blamed=5)) == []
    assert blamed(**others, n9=NodeTally(5, 20.0, blamed=5))


def test_a_node_that_breaks_programs_which_are_done_elsewhere_is_a_lemon():
    jobs = []
    for user in ("ada", "bob", "cyd", "dan", "eve", "fay", "gus", "hal"):
        jobs += [(user, "train-1", "gpu", [f"n{i}"], None) for i in range(12)]
        jobs.append((user, "train-2", "gpu", ["n12"], causes.CODE))
    (found,) = fleet(*jobs).judged.lemons
    assert (found.node, found.failed, found.is_blamed) == ("n12", 8, False)


def test_what_fails_within_minutes_on_one_node_is_one_event_as_when_storage_is_away():
    jobs = []
    for user in ("ada", "bob", "cyd", "dan", "eve", "fay", "gus", "hal"):
        jobs += [(user, "train-1", "gpu", [f"n{i}"], None) for i in range(12)]
    jobs += [(user, "train-2", "gpu", ["n12"], causes.CODE) for user, *_ in jobs[::12]]
    assert fleet(*jobs, spread=0.01).judged.lemons == []
    assert fleet(*jobs).judged.lemons != []


def test_a_sick_node_of_a_partition_of_four_is_found_though_it_is_never_blamed():
    fleets = [ordinary_fleet(seed, jobs=3000, sick={"debug2": 0.9}).judged for seed in range(8)]
    found = [[one.node for one in judged.lemons] for judged in fleets]
    print(f"sick: debug2; lemons of eight fleets: {found}")
    assert sum(nodes == ["debug2"] for nodes in found) >= 4


def test_a_script_that_fails_again_and_again_on_the_node_it_is_put_on_accuses_nobody():
    tried = [("ada", f"try-{i}", "gpu", ["n1"], causes.CODE) for i in range(10)]
    wide = [("bob", "big", "gpu", [f"m{i}" for i in range(100)], causes.CODE) for _ in range(6)]
    fine = [(f"u{i}", "train", "gpu", [f"n{2 + i % 9}"], None) for i in range(200)]
    assert fleet(*tried, *wide, *fine).judged.lemons == []
    mended = [("ada", "try", "gpu", ["n2"], None), ("bob", "big", "gpu", ["m1"], None)]
    assert fleet(*tried, *wide, *fine, *mended).judged.lemons == []


def test_a_script_that_broke_elsewhere_and_is_tried_again_on_one_node_does_not_accuse_it():
    jobs = []
    for place, user in enumerate(("ada", "bob", "cyd", "dan", "eve", "fay", "gus", "hal")):
        jobs += [(user, "train", "gpu", [f"n{2 + i}"], None) for i in range(8)]
        jobs.append((user, "train", "gpu", [f"n{2 + place}"], causes.CODE))
        jobs += [(user, "train", "gpu", ["n1"], causes.CODE)] * 6
        jobs += [(user, "train", "gpu", ["n1"], None)] * 2
    judged = fleet(*jobs).judged
    assert (judged.lemons, judged.suspects) == ([], [])


def test_a_partition_in_which_much_fails_is_not_held_against_another():
    source = random.Random(3)
    jobs = []
    for i in range(1200):
        cause = causes.CODE if source.random() < 0.4 else None
        jobs.append((f"u{i % 30}", "try", "debug", [f"d{source.randrange(4)}"], cause))
    for i in range(4000):
        cause = causes.CODE if source.random() < 0.02 else None
        jobs.append((f"u{i % 30}", "try", "gpu", [f"g{source.randrange(40)}"], cause))
    assert fleet(*jobs).judged.lemons == []


def test_scripts_that_are_mended_on_the_first_node_and_run_on_others_do_not_accuse_it():
    jobs = []
    for user in ("ada", "bob", "cyd", "dan", "eve", "fay", "gus", "hal"):
        jobs += [(user, "train", "gpu", ["n1"], causes.CODE)] * 3
        jobs += [(user, "train", "gpu", [f"n{2 + i}"], None) for i in range(12)]
        jobs.append((user, "train", "gpu", ["n1"], None))
    assert fleet(*jobs).judged.lemons == []


def test_ordinary_fleets_have_a_lemon_in_less_than_two_of_a_hundred():
    judged = [ordinary_fleet(seed).judged for seed in range(100)]
    accused = [seed for seed, one in enumerate(judged) if one.lemons]
    print(f"{len(accused)} of 100 fleets of healthy nodes had a lemon: {accused}")
    assert len(accused) <= 1
    suspected = sum(bool(one.suspects) for one in judged)
    print(f"{suspected} of 100 had a suspect")
    assert suspected <= 25


def test_a_small_partition_says_that_its_jobs_are_too_few_to_tell():
    nodes = {f"n{i}": NodeTally(5, 5.0) for i in range(3)}
    found = judge({**nodes, "n3": NodeTally(5, 5.0, blamed=3)}, Programs())
    assert found.lemons == []
    (suspect,) = found.suspects
    assert (suspect.node, suspect.failed) == ("n3", 3)
    assert suspect.chance == pytest.approx(8 * 0.25**3)
    assert found.is_too_few
    assert (found.nodes, found.faults, found.enough) == (4, 3, 5)
    (lemon,) = judge({**nodes, "n3": NodeTally(5, 5.0, blamed=5)}, Programs()).lemons
    assert lemon.node == "n3"  # and so many are enough


def test_enough_faults_are_those_that_make_a_lemon_and_one_less_does_not():
    for nodes, faults in ((4, 12), (40, 12), (500, 900)):
        enough = judge({f"n{i}": NodeTally(9, 9.0, blamed=(faults if i == 0 else 0))
                        for i in range(nodes)}, Programs()).enough  # fmt: skip
        for blamed, is_lemon in ((enough, True), (enough - 1, False)):
            others = {f"n{i}": NodeTally(9, 9.0) for i in range(2, nodes)}
            rest = NodeTally(9, 9.0, blamed=faults - blamed)
            found = judge({"n0": NodeTally(9, 9.0, blamed=blamed), "n1": rest, **others},
                          Programs())  # fmt: skip
            assert ("n0" in [one.node for one in found.lemons]) is is_lemon


def test_a_single_node_has_nothing_to_be_compared_with():
    found = judge({"n1": NodeTally(9, 9.0, blamed=9)}, Programs())
    assert (found.lemons, found.suspects, found.enough) == ([], [], None)
    assert found.is_too_few


def test_programs_of_two_users_that_fail_on_one_node_alone_make_it_a_suspect_and_no_lemon():
    jobs = []
    for user in ("ada", "bob"):
        jobs += [(user, "train", "gpu", [f"n{i % 3}"], None) for i in range(30)]
        jobs.append((user, "train", "gpu", ["n3"], causes.CODE))
    judged = fleet(*jobs).judged
    assert judged.lemons == []
    assert [(one.node, one.failed, one.users) for one in judged.suspects] == [("n3", 2, 2)]


def test_the_programs_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(lemons_module, "MOST_PAIRS", 10)
    programs = Programs()
    for user in range(100):
        programs.add(program_of(f"u{user}", "gpu", "train"), {"n1": False, "n2": False})
    assert sum(len(told) for told in programs.by_node().values()) <= 10
    assert program_of("u", "p", "sweep-17_x3") == program_of("u", "p", "sweep-2_x4")


def test_the_binomial_tail_is_the_sum_of_its_terms():
    for n, k, p in ((10, 3, 0.2), (50, 10, 0.1), (1, 1, 0.5), (7, 0, 0.3), (400, 5, 0.02)):
        exact = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
        assert tail(n, k, p) == pytest.approx(exact)
    assert (tail(10, 3, 0.0), tail(10, 3, 1.0), tail(2, 3, 0.5)) == (0.0, 1.0, 0.0)


def test_many_nodes_with_many_faults_take_no_time():
    tallies = {f"n{i}": NodeTally(8000, 8000.0, blamed=700 + i % 100) for i in range(500)}
    began = time.process_time()
    judge(tallies, Programs())
    took_s = time.process_time() - began
    print(f"{took_s:.2f} s")
    assert took_s < 5.0
