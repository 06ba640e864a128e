"""The figures of all jobs together, each checked against a fleet counted by hand."""

import dataclasses
import inspect
import re

import pytest

from ftslurm.cli import VERBS
from ftslurm.diagnosis import causes
from ftslurm.report import advice as advice_module
from ftslurm.report.advice import BY_CAUSE, WHOSE, findings
from ftslurm.report.fleet import Fleet, Goodput
from ftslurm.report.fold import fold
from ftslurm.report.jobs import FAILURES, FREE, AttemptReport, JobReport, report_of, within
from ftslurm.report.records import COLUMNS, csv_row, lost_gpu_hours
from ftslurm.report.text import clip, columns, fleet_lines, job_lines
from ftslurm.run.spec import RunSpec
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.job_table import JobRun


def attempt(cause=None, *, nodes="n[1-2]", hours=1.0, gpus=8, node=None, **values):
    return AttemptReport(
        state="X", cause=cause, start_at=0.0, end_at=3600.0 * hours,
        wait_s=60.0, elapsed_s=3600.0 * hours, num_nodes=2, gpus=gpus, nodes=nodes, node=node,
        **{"sentence": "", **values},
    )  # fmt: skip


def job(*attempts, state="completed", user="ada", job_id="7", run_dir=None):
    return JobReport(job_id, "train", user, "lab", "gpu", state, list(attempts), run_dir=run_dir)


def fleet(*jobs):
    found = Fleet()
    for one in jobs:
        found.add(one, expand=expand)
    return found


def test_hours_failures_and_waits_are_summed():
    found = fleet(
        job(attempt(causes.NODE, node="n2"), attempt(causes.PREEMPTED), attempt(hours=2.0)),
        job(attempt(causes.CODE, hours=0.5), state="failed", user="bob"),
    )
    assert (found.jobs, found.states) == (2, {"completed": 1, "failed": 1})
    assert found.total.gpu_hours == 8 * 4.5
    assert found.total.node_hours == 2 * 4.5
    assert (found.total.attempts, found.total.failures, found.total.wait_s) == (4, 2, 240.0)
    assert found.by["user"]["bob"].failures == 1
    assert found.by["cause"][causes.PREEMPTED].failures == 0
    assert found.by["node"]["n2"].failures == 1


def test_time_between_failures_counts_those_of_the_hardware_only():
    found = fleet(
        job(attempt(causes.NODE, node="n1"), attempt(causes.GPU, node="n2"), attempt()),
        job(attempt(causes.CODE), attempt(causes.PREEMPTED), state="failed"),
    )
    assert (found.node_faults, found.hardware_failures) == (2, 2)
    assert found.node_mtbf_h == 2 * 5 / 2
    assert found.gpu_mtbf_h == 8 * 5 / 2
    assert fleet(job(attempt())).gpu_mtbf_h is None


def test_a_job_that_failed_and_was_done_is_recovered_and_one_that_runs_is_neither():
    found = fleet(
        job(attempt(causes.NODE, node="n1"), attempt()),
        job(attempt(causes.CODE), state="failed"),
        job(attempt(causes.NODE, node="n1"), attempt(), state="running"),
        job(attempt(causes.PREEMPTED), attempt()),
    )
    assert found.recovered_share == 0.5


def test_coming_back_to_a_node_that_failed_the_job_is_counted():
    again = job(attempt(causes.NODE, node="n2"), attempt(nodes="n[2-3]"))
    elsewhere = job(attempt(causes.NODE, node="n2"), attempt(nodes="n[3-4]"))
    assert fleet(again, elsewhere).hit_again_share == 0.5
    assert fleet(job(attempt(), attempt())).hit_again_share is None


def test_what_was_lost_is_said_only_where_records_say_it():
    known = job(attempt(causes.NODE, lost_s=360.0), attempt(lost_s=0.0))
    unknown = job(attempt(causes.CODE, hours=3.0), state="failed")
    assert lost_gpu_hours(known) == pytest.approx(0.8)
    assert lost_gpu_hours(unknown) is None
    total = fleet(known, unknown).total
    assert total.lost_gpu_hours == pytest.approx(0.8)
    assert total.unknown_gpu_hours == 24.0


def test_nodes_are_tallied_by_distinct_jobs():
    found = fleet(
        job(attempt(causes.NODE, node="n2"), attempt(causes.NODE, node="n2", hours=9.0)),
        job(attempt(causes.CODE, node="n2"), state="failed"),
    )
    second, first = found.node_tallies["n2"], found.node_tallies["n1"]
    assert (second.jobs, second.hours, second.blamed) == (2, 11.0, 1)
    assert (first.jobs, first.hours, first.blamed) == (2, 11.0, 0)
    assert (found.by["node"]["n2"].jobs, found.by["node"]["n2"].attempts) == (1, 2)


def test_one_node_that_fails_under_eight_jobs_is_one_failure():
    found = fleet(*(job(attempt(causes.NODE, node="n1", gpus=1, hours=10.0)) for _ in range(8)))
    assert (found.node_faults, found.hardware_failures) == (1, 1)
    assert found.gpu_mtbf_h == 80.0
    assert found.node_tallies["n1"].blamed == 1
    later = fleet(*(job(attempt(causes.NODE, node="n1", hours=hours)) for hours in (1.0, 9.0)))
    assert later.node_faults == 2


def test_failures_of_jobs_without_gpus_say_nothing_of_gpus():
    jobs = [job(attempt(causes.NODE, node=f"c{i}", gpus=0)) for i in range(10)]
    found = fleet(*jobs, job(attempt(hours=10.0)))
    assert (found.node_faults, found.hardware_failures, found.gpu_mtbf_h) == (10, 0, None)


def test_a_failure_whose_start_is_lost_counts():
    lost = attempt(causes.NODE, node="n1")
    lost.start_at = None
    found = fleet(job(lost))
    assert (found.total.attempts, found.total.failures, found.node_faults) == (1, 1, 1)


def test_what_was_lost_by_a_preemption_or_a_time_limit_is_not_known_either():
    for cause in (causes.PREEMPTED, causes.TIME_LIMIT, causes.CANCELLED_USER):
        cut_short = job(attempt(cause, hours=10.0), attempt())
        assert lost_gpu_hours(cut_short) is None
        assert fleet(cut_short).total.unknown_gpu_hours == 80.0
    assert lost_gpu_hours(job(attempt(causes.PREEMPTED, lost_s=0.0), attempt())) == 0.0
    assert lost_gpu_hours(job(attempt())) == 0.0


def test_a_job_that_went_on_until_its_limit_has_recovered_and_a_cancelled_one_is_left_out():
    failed = attempt(causes.NODE, node="n1")
    to_its_limit = job(failed, attempt(causes.TIME_LIMIT), state="timeout")
    cancelled = job(failed, attempt(causes.CANCELLED_USER), state="cancelled")
    assert fleet(to_its_limit, cancelled).recovered_share == 1.0
    stood_still = job(failed, attempt(causes.TIME_LIMIT), state="failed")
    assert fleet(stood_still).recovered_share == 0.0


def test_tasks_that_wait_are_jobs_in_every_count():
    waiting = attempt(nodes="")
    waiting.start_at = None
    found = fleet(JobReport("70_[0-999]", "t", "ada", "l", "gpu", "waiting", [waiting], tasks=1000))
    assert found.jobs == found.total.jobs == found.by["user"]["ada"].jobs == 1000
    waiting.cause = causes.CANCELLED_USER
    gone = JobReport("71_[0-9]", "t", "ada", "l", "gpu", "cancelled", [waiting], tasks=10)
    assert fleet(gone).by["cause"][causes.CANCELLED_USER].jobs == 10
    text = "\n".join(job_lines(gone))
    assert "10 tasks " in text and "wait " not in text and "  1 has not begun" in text


def test_each_key_that_is_advised_is_one_of_a_run_and_each_verb_one_of_ours():
    advice = " ".join([*BY_CAUSE.values(), inspect.getsource(advice_module)])
    groups = {name: one for name, one in vars(RunSpec()).items() if dataclasses.is_dataclass(one)}
    keys = {f"{name}.{key.name}" for name, one in groups.items() for key in dataclasses.fields(one)}
    named = set(re.findall(rf"\b(?:{'|'.join(groups)})\.\w+", advice))
    assert len(named) > 10 and named <= keys
    assert set(re.findall(r"`ftslurm (\w+)", advice)) <= set(VERBS)


def test_hours_outside_the_window_do_not_count():
    whole = job(
        attempt(hours=1.0), attempt(causes.NODE, node="n1", hours=10.0), attempt(hours=20.0)
    )
    kept = within(whole, 7200.0, 12 * 3600.0).attempts
    assert [(one.cause, one.gpu_hours) for one in kept] == [(causes.NODE, 64.0), (None, 80.0)]
    assert within(whole, None, None) == whole
    assert within(whole, 21 * 3600.0, None).attempts == []


def test_what_a_resized_job_used_before_is_in_its_hours():
    one = attempt(more_node_s=3600.0, more_gpu_s=7200.0)
    assert (one.node_hours, one.gpu_hours) == (3.0, 10.0)
    half = within(job(one), 1800.0, None).attempts[0]
    assert (half.node_hours, half.gpu_hours) == (1.5, 5.0)


def test_text_shows_nothing_that_a_terminal_acts_on():
    evil = attempt(
        causes.NODE, node="n\x1b]0;x\x07", evidence=[{"text": "t", "file": "\x1b[2J", "line": 3}]
    )
    told = job(evil, attempt(), run_dir="/runs/\x1b[2J")
    lines = [*job_lines(told), *fleet_lines(fleet(told, told), None)]
    assert all(line.isprintable() for line in lines)
    assert "  -" in lines[2]  # of a run, an attempt of Slurm's alone has no number


def test_a_finding_says_whose_fault_it_was_and_what_it_cost():
    found = fleet(
        job(attempt(causes.GPU, node="n1", hours=9.0, lost_s=1800.0)),
        job(attempt(causes.CODE, hours=2.0), state="failed"),
    )
    told = {one.what.split(",")[0]: one.what for one in findings(found)}
    assert told["gpu"].startswith(
        "gpu, the cluster's fault: 1 attempt of 1 job on n1 (1), 4 GPU-hours lost; a GPU or its"
    )
    assert "1 attempt of 1 job, at most 16 GPU-hours lost; the program" in told["code"]
    without = findings(fleet(job(attempt(causes.CODE, gpus=0), state="failed")))
    assert "GPU-hours" not in without[0].what


def test_a_finding_names_the_nodes_that_were_blamed_most():
    often = ("n1", "n2", "n2", "n3", "n4", "n5", "n5", "n5")
    found = fleet(*(job(attempt(causes.NODE, node=node)) for node in often))
    assert "8 attempts of 8 jobs on n5 (3), n2 (2), n1 (1) and 2 other nodes," in (
        findings(found)[0].what
    )
    one = fleet(job(attempt(causes.CODE, node="n1"), state="failed"))
    assert "n1" not in findings(one)[0].what  # the rank that failed first was there


def test_names_of_any_script_stand_in_their_columns():
    names = ("ada", "ユーザー名が長い", "e\u0301lodie", "ab\x1b[31m")
    lines = [next(iter(job_lines(job(attempt(causes.CODE), user=name)))) for name in names]
    places = [columns(line[: line.index("completed")]) for line in lines]
    assert places == [22, 22, 22, 22]
    assert clip("日本語", 6) == "日本語" and clip("日本語x", 6) == "日本~"


def test_every_cause_has_somebody_whose_fault_it_is():
    assert set(WHOSE) == set(causes.MEANING)


def test_text_counts_one_as_one():
    lines = "\n".join(fleet_lines(fleet(job(attempt())), None))
    assert lines.startswith("1 job (1 completed), 1 attempt, 0 failures")
    assert fleet_lines(Fleet(), None)[0] == "0 jobs, 0 attempts, 0 failures"


def test_every_cause_is_a_failure_or_free_and_every_failure_has_advice():
    assert FREE | FAILURES | {causes.CANCELLED_ADMIN} == set(causes.MEANING)
    assert set(BY_CAUSE) >= FAILURES


def test_findings_name_the_dearest_cause_first_and_what_wastes_the_time():
    found = fleet(
        job(attempt(causes.CODE, hours=1.0), state="failed"),
        job(attempt(causes.NODE, node="n1", hours=9.0), state="failed"),
    )
    found.goodput.add(Goodput(trained_s=80, lost_s=15, stall_s=1, restart_s=4))
    told = findings(found)
    assert [one.what.split(":")[0] for one in told[:2]] == [
        "node, the cluster's fault",
        "code, the program's fault",
    ]
    assert "15.0 % of the allocated time trained again or lost" in told[2].what
    assert "checkpoint.interval_s" in told[2].advice
    assert len(told) == 3
    assert found.goodput.share == 0.8


def test_attempts_of_a_job_by_accounting_say_how_long_they_waited():
    run = JobRun("7", "PREEMPTED", None, 0, 0, 700.0, 4300.0, None, "", 0, eligible_at=100.0,
                 submit_at=50.0, elapsed_s=3600.0, num_nodes=2, gpus=16)  # fmt: skip
    (logical,) = fold([run, JobRun("7", "PENDING", None, None, None, None, None, None, "", 1)])
    report = report_of(logical)
    assert (report.attempts[0].wait_s, report.attempts[0].gpu_hours) == (600.0, 16.0)
    assert report.attempts[0].is_requeued
    assert (report.state, report.attempts[1].wait_s) == ("waiting", None)


def test_text_fits_a_terminal_of_80_columns_but_for_names_and_paths():
    found = fleet(
        job(attempt(causes.NODE, node="n2", sentence="a node " * 30), attempt(), user="x" * 40),
        job(attempt(causes.CODE, hours=3000.0), state="failed", job_id="1234567_123"),
    )
    found.goodput.add(Goodput(trained_s=80, lost_s=15, stall_s=1, restart_s=4))
    found.runs_untold = 3
    long = job(attempt(causes.NODE, node="n" * 20, sentence="a node " * 30, rank=3), attempt())
    lines = [*fleet_lines(found, None), *fleet_lines(found, "user"), *list(job_lines(long))[1:]]
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_text_says_nothing_of_what_nobody_knows():
    told = "\n".join(fleet_lines(fleet(job(attempt())), None))
    assert "?" not in told
    assert "between failures" not in told
    assert "lemon nodes        none, of 2 nodes none was blamed for a failure" in told


def test_a_loss_that_is_not_known_is_no_loss_of_nothing():
    cut = job(attempt(causes.CODE, hours=3.0), state="failed")
    lines = fleet_lines(fleet(cut), None)
    (row,) = [line for line in lines if line.startswith(causes.CODE)]
    assert row.endswith(" 0+")
    assert any(line.lstrip().startswith("+: or more") for line in lines)
    assert any("at most" in line for line in lines)
    saved = fleet_lines(fleet(job(attempt(causes.CODE, lost_s=360.0), state="failed")), None)
    assert not any(line.lstrip().startswith("+:") for line in saved)


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "|", "%", "\t", "\r", "\n"])
def test_no_text_of_a_row_is_a_formula_for_a_spreadsheet(begin):
    evil = f"{begin}cmd|'/c calc'!A1"
    one = job(attempt(causes.NODE, node=evil), user=evil, job_id=evil, run_dir=evil)
    one.name = one.account = one.partition = evil
    told = dict(zip(COLUMNS, csv_row(one)))
    texts = ("job_id", "name", "user", "account", "partition", "failed_node", "run_dir")
    assert {told[name] for name in texts} == {f"'{evil}"}
    assert told["gpu_hours"] == 8.0  # a number stays one
    assert len(told) == len(csv_row(one))


def test_text_tells_lemons_from_nothing_seen_and_from_too_little_to_see():
    def faults(count, others=40):
        one = [job(attempt(causes.NODE, node="n1", nodes="n1")) for _ in range(count)]
        for place, failed in enumerate(one):
            failed.attempts[0].end_at = 7200.0 * place
        rest = [job(attempt(nodes=f"n{2 + i % 3}")) for i in range(others)]
        return "\n".join(fleet_lines(fleet(*one, *rest), None))

    assert "lemon nodes        none, of 3 nodes none was blamed" in faults(0)
    assert "too few faults to tell: 1 on 4 nodes, and 5 on one node" in faults(1)
    assert "lemon nodes        n1: more failures than chance would give" in faults(12)
    assert "! node n1: 12 faults said to be its own" in faults(12)
    assert "cluster.exclude=n1" in faults(12)
