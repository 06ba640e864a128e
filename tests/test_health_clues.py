"""What is known of nodes' health becomes a cause, and keeps the run off sick nodes. Pure."""

from dataclasses import replace

import failure_clues as texts
import pytest
from fakes.recovering import PLAIN

from ftslurm.diagnosis.classify import classify
from ftslurm.diagnosis.finding import Facts
from ftslurm.diagnosis.health_clues import health_clues, what_is_untold
from ftslurm.errors import PREFLIGHT_NAMED
from ftslurm.health.report import Report, Told
from ftslurm.health.settings import HealthSettings
from ftslurm.recovery.case import PastAttempt, RankFailure
from ftslurm.recovery.evidence import with_finding
from ftslurm.recovery.policy import decide
from ftslurm.run.attempts import STOPPED, Outcome
from ftslurm.run.spec import RecoverySpec

AT = texts.AT


def told(word, code, *, gpu=3, bus="0000:9b:00", sentence="so it is", rule="a-rule", **more):
    return Told(word, code, gpu, bus, sentence, rule, "a source", **more)


LINK = told("drain", "NVLINK-DOWN", sentence="fewer NVLinks than its model has")
WAITS = told("reset", "REMAP-WAIT", sentence="a remapped row that waits for a reset")
FAULT = told("warn", "XID31", sentence="Xid 31, MMU page fault", hands_to_run=True)


def clues_of(*verdicts, node="n2", settings=None, offset_s=0.0):
    report = Report(node, "118", "boot-1", AT, "probe", "drain", verdicts)
    settings = settings or HealthSettings()
    clues, notes = health_clues(report, f"{node}.json", settings=settings, offset_s=offset_s)
    return clues, notes


def finding_of(*clues):
    return classify(list(clues), texts.FACTS)


def test_a_verdict_against_a_node_names_cause_node_gpu_and_the_record():
    clues, notes = clues_of(LINK, offset_s=40.0)
    finding = finding_of(*texts.ECHOES, *clues)
    assert (finding.cause, finding.blamed_node, finding.blamed_gpu) == ("gpu", "n2", "0000:9b:00")
    assert finding.sick == {"n2": "NVLINK-DOWN of gpu3 at 0000:9b:00"}
    assert "fewer NVLinks than its model has" in finding.sentence
    assert (clues[0].file, clues[0].at, notes) == ("n2.json", AT - 40, [])
    nic, _ = clues_of(told("drain", "MLX5-DEAD", gpu=None, bus=""))
    assert (finding_of(*nic).cause, finding_of(*nic).blamed_node) == ("node", "n2")


def test_what_waits_for_a_reset_is_no_cause_beside_an_exception_and_still_costs_the_node():
    bug = texts.error("ValueError: bad shape")
    finding = finding_of(*clues_of(WAITS)[0], bug)
    assert finding.cause == "code" and list(finding.sick) == ["n2"]
    assert finding_of(*clues_of(WAITS)[0]).cause == "gpu"
    # An Xid came in the attempt's own time.
    xid = told("reset", "XID62", gpu=None, sentence="Xid 62, PMU halt")
    assert finding_of(*clues_of(xid)[0], bug).cause == "gpu"


def test_warnings_and_what_a_site_only_watches_say_nothing_and_the_unknown_is_a_note():
    warned = told("warn", "NVLINK-CRC")
    assert clues_of(warned, told("ignore", "XID14")) == ([], [])
    assert clues_of(LINK, settings=HealthSettings(mode="shadow")) == ([], [])
    assert clues_of(LINK, settings=HealthSettings(shadow=["a-rule"])) == ([], [])
    unknown = told("unknown", "UNREAD", gpu=None, bus="", sentence="could not tell from nvml")
    assert clues_of(unknown) == ([], ["could not tell from nvml"])


def test_a_thousand_nodes_that_cannot_tell_make_one_note():
    by_node = {f"n{number}": ["could not tell from nvml"] for number in range(1000)}
    (note,) = what_is_untold({"n": [], **by_node})
    assert note == "the health of n0, n1, n2, n3, n4 and 995 more: could not tell from nvml"
    assert what_is_untold({"n1": []}) == []


def test_a_users_xid_is_the_programs_fault_whatever_libraries_print():
    clues, _ = clues_of(FAULT)
    finding = finding_of(*texts.ECHOES, *clues)
    assert (finding.cause, finding.program_fault, finding.sick) == ("code", "XID31", {})
    # What came of it later, by whatever clock: the ranks were found standing, and were ended.
    hung = texts.agent("hang: rank 0 has not ended a step for 40 s", at=AT - 60)
    assert finding_of(hung, *clues).cause == "code"
    # 43 and 45 come at any hard end.
    ended, _ = clues_of(told("warn", "XID43", hands_to_run=True))
    assert finding_of(hung, *ended).cause == "hang"
    assert finding_of(hung, *ended).program_fault == ""


def test_an_xid_in_the_nodes_log_may_be_of_another_jobs_program():
    line = texts.kernel("NVRM: Xid (PCI:0000:9b:00): 31, pid=4711, name=python, Ch 00000008")
    alone = finding_of(line)
    assert (alone.cause, alone.program_fault) == ("code", "")
    killed = texts.agent("hang: rank 0 has not ended a step for 40 s")
    assert finding_of(line, killed).cause == "hang"


def test_the_reason_that_root_wrote_on_a_node_is_heard():
    reason = "n2 MIXED+DRAIN reason ftslurm:XID79 gpu3 0000:9b:00 boot=ab12 2026-09-01T10:00Z"
    finding = finding_of(texts.node_state(reason), texts.error("RuntimeError: CUDA error: unknown"))
    assert (finding.cause, finding.blamed_node, finding.blamed_gpu) == ("gpu", "n2", "0000:9b:00")
    assert finding.sick["n2"].startswith("ftslurm:XID79 gpu3 0000:9b:00")


MANY = {rank: f"n{rank}" for rank in range(64)}


def told_by(count, *verdicts):
    return [clue for rank in range(count) for clue in clues_of(*verdicts, node=f"n{rank}")[0]]


def test_what_most_nodes_say_at_once_is_held_against_none_and_hides_no_error():
    facts = Facts(rc=1, step=37, nodes=MANY)
    bug = texts.error("KeyError: 'loss_scale'")
    finding = classify([*told_by(64, LINK), bug], facts)
    assert (finding.cause, finding.sick) == ("code", {})
    decision = decided(finding)
    assert decision.exclude == ()
    assert "64 of 64 nodes say NVLINK-DOWN of themselves at once, which is" in decision.reason
    alone = classify(told_by(64, LINK), facts)
    assert (alone.cause, alone.blamed_node, alone.sick) == ("gpu", None, {})
    assert alone.confidence < 0.5


@pytest.mark.parametrize(("count", "nodes", "verdict", "sick"), [
    (3, 64, LINK, 3),  # no more than 5 %
    (4, 64, LINK, 0),
    (4, 64, told("drain", "XID79"), 4),  # of the hardware: no rule and no driver is behind it
    (40, 64, told("drain", "XID79"), 0),
    (1, 1, LINK, 1),  # a run of one node, or of two, has no others to tell it from
    (2, 2, LINK, 2),
    (3, 4, LINK, 0),
])  # fmt: skip
def test_few_sick_nodes_are_believed(count, nodes, verdict, sick):
    facts = Facts(nodes={rank: f"n{rank}" for rank in range(nodes)})
    assert len(classify(told_by(count, verdict), facts).sick) == sick


def test_beside_a_false_alarm_a_node_with_a_fault_of_its_own_is_still_left_out():
    row, _ = clues_of(told("drain", "ROW-REMAP"), node="n9")
    finding = classify([*told_by(8, LINK), *row], Facts(nodes=MANY))
    assert (finding.cause, finding.blamed_node, list(finding.sick)) == ("gpu", "n9", ["n9"])


@pytest.mark.parametrize(("before_s", "cause"), [(60.0, "gpu"), (200_000.0, "code")])
def test_a_drain_of_days_ago_is_not_what_a_rank_has_failed_of(before_s, cause):
    reason = "n2 MIXED+DRAIN reason ftslurm:ROW-REMAP gpu3 0000:9b:00 boot=ab12 2026-09-01T10:00Z"
    drain = replace(texts.node_state(reason), at=AT - before_s)
    finding = finding_of(drain, texts.error("KeyError: 'loss_scale'"))
    assert finding.cause == cause and list(finding.sick) == ["n2"]
    assert finding_of(drain).cause == "gpu"


def decided(finding, *, history=(), rules=None, **evidence):
    evidence = with_finding(replace(PLAIN, step=70, **evidence), finding, "")
    return decide(history, evidence, rules or RecoverySpec())


@pytest.mark.parametrize("outcome", [None, Outcome(STOPPED, step=45, committed_step=45)])
def test_every_sick_node_is_left_out_whatever_ended_the_attempt(outcome):
    n1, _ = clues_of(told("after", "IB-FLAP", gpu=None, bus="", sentence="flaps"), node="n1")
    finding = finding_of(*clues_of(LINK)[0], *n1)
    evicted = ("n3",) if outcome else ()
    decision = decided(finding, outcome=outcome, evicted=evicted)
    assert decision.action == "restart"
    assert set(decision.exclude) == {"n1", "n2"} and set(decision.sick) == {"n1", "n2"}
    assert "n1 (IB-FLAP of the node)" in decision.reason
    nobody = decided(
        finding, outcome=outcome, evicted=evicted, rules=RecoverySpec(max_node_faults=0)
    )
    assert nobody.exclude == () and nobody.sick == {}


def test_a_program_that_ends_with_the_code_of_a_preflight_has_failed():
    flaps, _ = clues_of(told("after", "IB-FLAP", gpu=None, bus="", sentence="flaps"), node="n1")
    assert decided(finding_of(*flaps), rc=PREFLIGHT_NAMED).is_failure


FAILURE = RankFailure(3, "n2", "RuntimeError: CUDA error", "rank-3.log", step=70, signature="R")


def past(number, fault="XID31", *, step=50, progressed=False, ended_run=False):
    return PastAttempt(number, True, progressed, "code", "R", step, program_fault=fault,
                       ended_run=ended_run)  # fmt: skip


def test_a_fault_that_the_gpu_names_again_at_another_step_stops_the_run_after_one_confirmation():
    error = texts.error("RuntimeError: CUDA error: an illegal memory access was encountered")
    finding = finding_of(*clues_of(FAULT)[0], error)
    assert finding.program_fault == "XID31"
    first = decided(finding, first_failure=FAILURE)
    assert first.action == "restart", first.reason
    again = decided(finding, history=[past(3)], first_failure=FAILURE)
    assert again.action == "stop", again.reason
    assert "the GPU names the same fault of the program, XID31, as in attempt 3" in again.reason
    assert "mend the program" in again.reason
    for history in (
        [past(3, "XID13")],
        [past(2), past(3, "", progressed=True)],
        [past(3, ended_run=True)],
    ):
        assert decided(finding, history=history, first_failure=FAILURE).action == "restart"
    patient = RecoverySpec(budgets={**RecoverySpec().budgets, "code": 2})
    assert decided(finding, history=[past(3)], rules=patient).action == "restart"
    # Behind an exception of Python's own it stops nothing: the row needs the cause to be `code`.
    node_lost = replace(finding, cause="node")
    assert decided(node_lost, history=[past(3)], first_failure=FAILURE).action == "restart"


def test_without_a_word_on_health_there_is_nothing_of_it():
    finding = classify([texts.error("ValueError: x")], Facts(nodes=texts.NODES))
    assert (finding.sick, finding.program_fault) == ({}, "")
