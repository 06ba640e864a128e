"""Accounting and node states are read as Slurm 22.05, 24.11 and 26.05 print them, or not at all."""

import time

import pytest

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.accounting import (
    parse_nodes,
    parse_runs,
    read_nodes,
    read_runs,
    run_of_attempt,
)
from ftslurm.scheduler.slurm import Completed

OLD = ["JobID", "State", "ExitCode", "Start", "End", "NodeList", "Reason"]
NEW = [*OLD, "FailedNode", "Restarts", "SLUID"]
HELP_2205 = "Account AdminComment AllocCPUS End ExitCode JobID NodeList\nReason Start State\n"
HELP_2411 = HELP_2205 + "Extra FailedNode Restarts SLUID StdErr\n"


def rows(*lines):
    return "".join("^|^".join(line.split("|")) + "\n" for line in lines)


class Slurm:
    """sacct and scontrol with the answers that a test gives."""

    def __init__(self, *, fields=HELP_2411, rows="", nodes="", rc=0):
        self.fields, self.rows, self.nodes, self.rc = fields, rows, nodes, rc
        self.seen = []

    def __call__(self, argv, timeout_s):
        assert 0 < timeout_s <= 3
        self.seen.append(argv)
        if isinstance(self.rc, Exception):
            raise self.rc
        if argv[:2] == ["sacct", "--helpformat"]:
            return Completed(0, self.fields, "")
        return Completed(self.rc, self.nodes if argv[0] == "scontrol" else self.rows, "")


def at(stamp):
    return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))


RUNS_2411 = rows(
    "118|REQUEUED|0:0|2026-11-29T13:00:00|2026-11-29T13:10:00|ftn[1-2]|None||0|s0",
    "118.batch|COMPLETED|0:0|2026-11-29T13:00:00|2026-11-29T13:10:00|ftn1|||0|s0",
    "118.0|CANCELLED|0:15|2026-11-29T13:00:01|2026-11-29T13:09:58|ftn[1-2]|||0|s0",
    "118|NODE_FAIL|1:0|2026-11-29T13:13:00|2026-11-29T13:20:00|ftn[1-3]|BeginTime|ftn3|1|s1",
    "118.0|OUT_OF_MEMORY|0:125|2026-11-29T13:13:01|2026-11-29T13:15:00|ftn[1-3]|||1|s1",
    "118|RUNNING|0:0|2026-11-29T13:23:00|Unknown|ftn[1-2]|BeginTime||2|s2",
)


def test_each_run_of_a_job_is_told_with_its_steps():
    first, second, third = parse_runs(RUNS_2411, NEW)
    assert (first.state, first.code, first.restarts) == ("REQUEUED", 0, 0)
    assert [step.step_id for step in first.steps] == ["118.batch", "118.0"]
    assert (second.failed_node, second.code) == ("ftn3", 1)
    assert second.end_at == at("2026-11-29T13:20:00")
    step = second.steps[0]
    assert (step.state, step.code, step.signal) == ("OUT_OF_MEMORY", 0, 125)
    assert (third.state, third.code, third.end_at) == ("RUNNING", None, None)


def test_the_run_of_an_attempt_is_found_by_the_restart_count():
    runs = parse_runs(RUNS_2411, NEW)
    assert run_of_attempt(runs, 1, at("2026-11-29T13:14:00")).state == "NODE_FAIL"
    assert run_of_attempt(runs, 7, at("2026-11-29T13:14:00")) is None


def test_an_older_job_of_the_same_number_is_not_taken_for_this_one():
    text = rows("118|TIMEOUT|0:0|2024-01-01T13:00:00|2024-01-01T13:10:00|ftn1|None||0|z")
    runs = parse_runs(text + RUNS_2411, NEW)
    assert run_of_attempt(runs, 0, at("2026-11-29T13:01:00")).state == "REQUEUED"


def test_without_a_column_for_it_the_time_tells():
    # 22.05 can lose the start of a run that did run.
    text = rows(
        "68|TIMEOUT|0:0|2024-01-01T13:00:00|2024-01-01T13:10:00|ftn1|None",
        "68|REQUEUED|0:0|None|2026-11-29T13:54:26|ftn7|None",
        "68|NODE_FAIL|0:0|2026-11-29T13:57:00|2026-11-29T13:58:00|ftn8|BeginTime",
        "68|PENDING|0:0|Unknown|Unknown|None assigned|BeginTime",
    )
    runs = parse_runs(text, OLD)
    assert run_of_attempt(runs, 0, at("2026-11-29T13:54:00")).state == "REQUEUED"
    assert run_of_attempt(runs, 1, at("2026-11-29T13:57:01")).state == "NODE_FAIL"
    assert run_of_attempt(runs[:2], 1, at("2026-11-29T13:57:01")) is None
    assert runs[3].reason == "BeginTime"


def test_a_job_that_shrank_is_still_the_same_run():
    text = rows(
        "73|RESIZING|0:0|2026-11-29T13:00:00|2026-11-29T13:05:00|ftn[10-12]|None",
        "73.1|CANCELLED|0:9|2026-11-29T13:00:00|2026-11-29T13:05:00|ftn[10-12]|",
        "73|COMPLETED|0:0|2026-11-29T13:05:00|2026-11-29T13:09:00|ftn[10-11]|None",
        "73.2|COMPLETED|0:0|2026-11-29T13:06:00|2026-11-29T13:09:00|ftn[10-11]|",
    )
    (run,) = parse_runs(text, OLD)
    assert (run.state, run.start_at) == ("COMPLETED", at("2026-11-29T13:00:00"))
    assert [step.step_id for step in run.steps] == ["73.1", "73.2"]


def test_who_cancelled_a_job_is_told():
    (run,) = parse_runs(rows("5|CANCELLED by 5001|0:0|None|None|None assigned|None"), OLD)
    assert (run.state, run.cancelled_by) == ("CANCELLED", 5001)
    (run,) = parse_runs(rows("5|CANCELLED|0:15|None|None|ftn1|None"), OLD)
    assert run.cancelled_by is None


def test_the_code_of_a_failed_job_is_not_believed_while_it_is_zero():
    # Seen 8 s after slurmdbd was back; 16 s after it the row said 3:0.
    (run,) = parse_runs(rows("5|FAILED|0:0|None|None|ftn1|None"), OLD)
    assert (run.state, run.code) == ("FAILED", None)


def test_lines_of_another_number_of_columns_are_left_out():
    text = "sacct: a warning\n" + rows("5|COMPLETED|0:0|None|None|ftn1|None")
    assert len(parse_runs(text, OLD)) == 1


@pytest.mark.parametrize(("fields", "names"), [(HELP_2205, OLD), (HELP_2411, NEW)])
def test_only_fields_that_this_version_has_are_asked_for(fields, names):
    slurm = Slurm(fields=fields)
    assert read_runs("70_1", run=slurm) == []
    argv = slurm.seen[-1]
    wanted = [name for name in names if name not in ("NodeList", "SLUID")]
    assert f"--format={','.join(wanted)}" in argv
    assert {"--duplicates", "--parsable2", "--delimiter=^|^", "--jobs=70_1"} <= set(argv)


@pytest.mark.parametrize("slurm", [
    Slurm(rc=1),  # slurmdbd is away: `Problem talking to the database: Connection refused`
    Slurm(rc=SchedulerError("`sacct` gave no answer for 3 s")),
    Slurm(fields="Slurm accounting storage is disabled"),
])  # fmt: skip
def test_accounting_that_does_not_answer_is_unknown(slurm):
    assert read_runs("118", run=slurm) is None


NODES = """\
NodeName=ftn1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 State=IDLE+DRAIN ThreadsPerCore=1 Comment=a b Reason=Kill task failed [root@2026-11-29T14:00:00]
NodeName=ftn2 Arch=x86_64 State=DOWN* ThreadsPerCore=1 Reason=Not responding [slurm@2026-11-29T14:31:04]
NodeName=ftn3 Arch=x86_64 State=MIXED ThreadsPerCore=1 ExtSensorsTemp=n/s
"""  # noqa: E501


def test_a_nodes_state_and_reason_are_told():
    nodes = parse_nodes(NODES)
    assert (nodes["ftn1"].state, nodes["ftn1"].reason) == ("IDLE+DRAIN", "Kill task failed")
    assert nodes["ftn2"].reason_at == at("2026-11-29T14:31:04")
    assert (nodes["ftn3"].state, nodes["ftn3"].reason) == ("MIXED", "")


def test_nodes_are_asked_for_in_one_command():
    slurm = Slurm(nodes=NODES)
    assert set(read_nodes(["ftn1", "ftn2", "ftn3"], run=slurm)) == {"ftn1", "ftn2", "ftn3"}
    assert slurm.seen == [["scontrol", "--oneliner", "--all", "show", "node", "ftn[1-3]"]]
    assert read_nodes([], run=slurm) == {}


@pytest.mark.parametrize("rc", [1, SchedulerError("`scontrol` gave no answer for 3 s")])
def test_a_controller_that_does_not_answer_is_unknown(rc):
    assert read_nodes(["ftn1"], run=Slurm(rc=rc)) is None
