"""What rank 0 of a preflight has all do next, and that its word stays short on many nodes."""

import dataclasses
import json

from ftslurm.health.pairwise import GEMM, GPU_LIMITS, HBM, PAIR, Trial
from ftslurm.train.preflight_course import FIRST, MOST_GOES, Course, Step, step_of


def telling(names, *what, slow=(), dead=()):
    """Rank -> what the ranks of these nodes tell, one a node."""

    def trial(part, rank, name):
        seconds = None if name in dead else 9.0 if name in slow else 0.002
        return dataclasses.asdict(Trial(part, (name,), seconds, rank))

    return {
        rank: [[trial(part, rank, name) for part in what], dict.fromkeys(what, 1.0)]
        for rank, name in enumerate(names)
    }


def met(step):
    return {
        rank: [[dataclasses.asdict(Trial(PAIR, pair, 0.01))], {PAIR: 0.1}]
        for rank, pair in enumerate(step.pairs)
    }


def course_of(names, told, **ill):
    """Names of all steps, to the end."""
    course = Course(GPU_LIMITS, lambda kind, **facts: told.append((kind, facts)))
    step, names_of_steps = FIRST, []
    while step is not None:
        names_of_steps.append(step.name)
        heard = telling(names, GEMM, HBM, **ill) if step.pairs is None else met(step)
        following = course.after(step, heard, names)
        step = following and step_of(json.loads(json.dumps(following)))
    return names_of_steps


def test_good_nodes_are_tried_alone_in_three_rounds_and_once_more():
    told = []
    steps = course_of(["n1", "n2", "n3", "n4"], told)
    assert steps == ["go 1", "round 1", "round 2", "round 3", "go 2"]
    assert [kind for kind, _ in told].count("took") == len(steps)
    assert [kind for kind, _ in told].count("trial") == 8 + 3 * 2 + 8


def test_who_is_slow_alone_is_tried_again_and_who_fails_alone_meets_nobody():
    slow = course_of(["n1", "n2", "n3", "n4"], [], slow=["n3"])
    assert slow[4:] == [f"go {number}" for number in range(2, MOST_GOES + 1)]
    course = Course(GPU_LIMITS, lambda kind, **facts: None)
    names = ["n1", "n2", "n3", "n4"]
    following = step_of(course.after(FIRST, telling(names, GEMM, dead=["n2"]), names))
    assert "n2" not in {node for pair in following.pairs for node in pair}


def test_a_single_node_meets_nobody():
    assert course_of(["n1"], []) == ["go 1", "go 2"]


def test_what_all_of_eight_thousand_ranks_are_told_is_some_kilobytes():
    names = [f"node-{number:04}" for number in range(1000)]
    told = telling([name for name in names for _ in range(8)], GEMM, HBM)
    course = Course(GPU_LIMITS, lambda kind, **facts: None)
    answer = course.after(FIRST, told, names)
    assert len(step_of(answer).pairs) == 500
    assert len(json.dumps(answer)) < 20_000


def test_a_step_outlives_its_way_through_json():
    for step in (Step(2), Step(1, [("n1", "n2")])):
        assert step_of(json.loads(json.dumps(dataclasses.asdict(step)))) == step
