"""Which nodes are kept out, and where in an allocation ranks run: values in, values out."""

import pytest

from ftslurm.recovery.exclusion import (
    excluded_now,
    fault_counts,
    hostlist_to_set,
    least_nodes,
    place,
    returns_in_a_row,
    still_counting,
    taken_back,
    too_many,
    troubles,
)
from ftslurm.run.layout import RunLayout
from ftslurm.run.node_memory import (
    BY_PERSON,
    EXCLUDED,
    FAULT,
    READMITTED,
    RETURNED,
    NodeEvent,
    note_node,
    read_node_events,
)
from ftslurm.run.spec import ClusterSpec, RecoverySpec


def history(*told):
    """`told`: (kind, node) in order; attempt i is that of the i-th."""
    return [NodeEvent(float(i), kind, node, i) for i, (kind, node) in enumerate(told, 1)]


def names(exclusions):
    return [one.node for one in exclusions]


@pytest.mark.parametrize(("budget", "told", "out"), [
    (1, [(FAULT, "n2")], ["n2"]),
    (2, [(FAULT, "n2")], []),
    (2, [(FAULT, "n2"), (FAULT, "n3"), (FAULT, "n2")], ["n2"]),
    (0, [(FAULT, "n2")] * 9, []),
    (0, [(EXCLUDED, "n2")], ["n2"]),
    (3, [(EXCLUDED, "n2"), (FAULT, "n1")], ["n2"]),
    (1, [(FAULT, "n2"), (READMITTED, "n2")], []),
    (2, [(FAULT, "n2"), (FAULT, "n2"), (READMITTED, "n2"), (FAULT, "n2")], []),
    (1, [(FAULT, "n3"), (FAULT, "n1"), (READMITTED, "n3"), (FAULT, "n3")], ["n1", "n3"]),
    (1, [(RETURNED, "n2")], []),
])  # fmt: skip
def test_a_node_is_out_after_its_budget_or_a_decision_and_back_when_readmitted(budget, told, out):
    assert names(excluded_now(history(*told), max_node_faults=budget)) == out


@pytest.mark.parametrize(("fault_days", "out"), [
    (1, ["n3"]), (3, ["n2", "n3"]), (0, ["n1", "n2", "n3"]),
])  # fmt: skip
def test_what_is_held_against_a_node_is_forgotten_in_time(fault_days, out):
    day = 86_400.0
    told = [
        NodeEvent(1 * day, FAULT, "n1", 1),
        NodeEvent(8 * day, EXCLUDED, "n2", 2),
        NodeEvent(9.5 * day, FAULT, "n3", 3),
        NodeEvent(9.6 * day, RETURNED, "n1", 3),
    ]
    counting = still_counting(told, fault_days=fault_days, now=10 * day)
    assert names(excluded_now(counting, max_node_faults=1)) == out


def test_a_node_that_a_person_has_readmitted_may_be_given_up_once_more():
    told = history((EXCLUDED, "n1"), (READMITTED, "n1"), (EXCLUDED, "n2"))
    told.append(NodeEvent(9.0, READMITTED, "n2", 9, cause=BY_PERSON))
    assert taken_back(told) == {"n1"}


def test_a_node_is_readmitted_as_often_as_somebody_says_so(tmp_path):
    layout = RunLayout(tmp_path)
    for kind in (EXCLUDED, READMITTED):
        assert note_node(layout, kind, "n2", attempt=4)
    assert not note_node(layout, EXCLUDED, "n2", attempt=4)
    assert note_node(layout, FAULT, "n2", attempt=4) and note_node(
        layout, READMITTED, "n2", attempt=4
    )
    assert excluded_now(read_node_events(layout), max_node_faults=1) == []


def test_faults_from_before_a_readmission_do_not_count():
    told = history((FAULT, "n1"), (FAULT, "n2"), (READMITTED, "n1"), (FAULT, "n1"), (FAULT, "n1"))
    assert fault_counts(told) == {"n1": 2, "n2": 1}
    assert troubles(told) == {"n1": 3, "n2": 1}


@pytest.mark.parametrize(("serving", "needed", "given_up"), [
    (["n1", "n2", "n3", "n4"], 2, []),
    (["n1", "n2", "n3", "n4"], 3, ["n3"]),
    (["n1", "n2", "n3", "n4"], 4, ["n3", "n1"]),
    (["n1", "n2", "n4"], 3, ["n1"]),  # n3 is down: to give it up would help nobody
    (["n2", "n4"], 3, []),  # nodes are away, and the job waits for those
])  # fmt: skip
def test_never_so_many_are_kept_out_that_the_job_cannot_start(serving, needed, given_up):
    out = excluded_now(history((FAULT, "n3"), (FAULT, "n1")), max_node_faults=1)
    assert names(too_many(out, serving=serving, needed=needed)) == given_up


def placed(nodes, *, wanted=2, least=None, unusable=(), faults=None):
    here = place(
        nodes, wanted=wanted, least=least or wanted, unusable=dict.fromkeys(unusable, "is out"),
        faults=faults or {},
    )  # fmt: skip
    return here.ranks_on, here.spares


def test_a_spare_stands_in_for_a_node_that_must_not_be_used():
    nodes = ["n1", "n2", "n3"]
    assert placed(nodes) == (["n1", "n2"], ["n3"])
    assert placed(nodes, unusable=["n2"]) == (["n1", "n3"], [])
    here = place(nodes, wanted=2, least=2, unusable={"n2": "is out"}, faults={})
    assert here.left_out == {"n2": "is out"}


def test_a_spare_is_preferred_to_a_node_with_a_fault_but_rank_0_stays_where_the_script_is():
    nodes = ["n1", "n2", "n3", "n4"]
    assert placed(nodes, faults={"n2": 1}) == (["n1", "n3"], ["n2", "n4"])
    assert placed(nodes, faults={"n1": 3}) == (["n1", "n2"], ["n3", "n4"])
    assert placed(nodes, wanted=4, faults={"n2": 1}) == (nodes, [])


@pytest.mark.parametrize("unusable", [["n1"], ["n2"], ["n2", "n3"]])
def test_an_allocation_that_cannot_serve_says_why(unusable):
    nodes = ["n1", "n2"] if len(unusable) == 1 else ["n1", "n2", "n3"]
    here = place(nodes, wanted=2, least=2, unusable=dict.fromkeys(unusable, "is out"), faults={})
    assert not here.serves
    assert "is out" in here.why_not and unusable[0] in here.why_not


def test_with_fewer_nodes_allowed_the_ranks_run_on_what_is_left():
    assert placed(["n1", "n2", "n3"], wanted=3, least=2, unusable=["n2"]) == (["n1", "n3"], [])
    assert placed(["n1", "n2", "n3"], wanted=3, least=2, unusable=["n2", "n3"]) == ([], [])
    assert placed(["n1", "n2", "n3"], wanted=2, least=1, unusable=["n2"]) == (["n1", "n3"], [])


@pytest.mark.parametrize(("recovery", "least"), [
    (RecoverySpec(), 4),
    (RecoverySpec(min_nodes=2), 2),
    (RecoverySpec(min_nodes=2, elastic_lr="refuse"), 4),
    (RecoverySpec(min_nodes=9), 4),
])  # fmt: skip
def test_fewer_nodes_are_taken_only_where_a_person_has_said_so(recovery, least):
    assert least_nodes(ClusterSpec(nodes=4), recovery) == least


def test_a_list_that_others_have_set_is_kept_and_of_ours_what_holds_now():
    told = history((FAULT, "n2"), (FAULT, "n3"), (READMITTED, "n2"), (RETURNED, "n9"))
    assert hostlist_to_set(["n2", "n7", "n9"], by_person=["n8"], ours=told, now=["n3"]) == [
        "n3", "n7", "n8", "n9",
    ]  # fmt: skip
    assert hostlist_to_set([], by_person=["n2"], ours=told, now=[]) == ["n2"]


def test_allocations_given_back_are_counted_since_the_newest_attempt():
    told = [NodeEvent(1.0, RETURNED, "n2", 1), NodeEvent(2.0, RETURNED, "n2", 2)] * 2
    assert returns_in_a_row(told, 2, since=0.0) == 2 == returns_in_a_row(told, 2, since=2.0)
    assert returns_in_a_row(told, 3, since=0.0) == 0 == returns_in_a_row(told, 2, since=2.5)


def test_what_is_noted_of_a_node_is_there_once_an_attempt_and_survives_a_torn_line(tmp_path):
    layout = RunLayout(tmp_path)
    assert read_node_events(layout) == []
    assert note_node(layout, FAULT, "n2", attempt=1, cause="gpu", why="Xid 79", now=lambda: 5.0)
    assert not note_node(layout, FAULT, "n2", attempt=1, cause="node")
    with layout.nodes_jsonl.open("a") as stream:
        stream.write("0badc0de {to")
    assert note_node(layout, FAULT, "n2", attempt=2)
    assert note_node(layout, RETURNED, "n2", attempt=2) and note_node(
        layout, RETURNED, "n2", attempt=2
    )
    first, *others = read_node_events(layout)
    assert first == NodeEvent(5.0, FAULT, "n2", 1, "gpu", "Xid 79")
    assert [(one.kind, one.attempt) for one in others] == [(FAULT, 2), (RETURNED, 2), (RETURNED, 2)]
