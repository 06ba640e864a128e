"""sacct's table is read as Slurm prints it, and nothing in a job's name can make a row."""

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftslurm.scheduler.job_table import FIELDS, Table, gpus_of, known_fields, new_delimiter
from ftslurm.scheduler.slurm_parse import at

SEP = "^|t|^"
NAMES = list(FIELDS)


def row(job_id="7", state="COMPLETED", *, name="train", **values):
    """One line of the table, without its end."""
    record = {
        "JobID": job_id, "JobIDRaw": job_id, "Cluster": "c", "User": "ada", "UID": "1001",
        "Account": "lab", "Partition": "gpu", "State": state, "ExitCode": "0:0",
        "Submit": "2026-11-29T12:00:00", "Eligible": "2026-11-29T12:00:00",
        "Start": "2026-11-29T12:10:00", "End": "2026-11-29T13:10:00", "ElapsedRaw": "3600",
        "NNodes": "2", "NodeList": "n[1-2]", "AllocTRES": "cpu=4,gres/gpu=8,node=2",
        "Reason": "None", "Restarts": "0", "JobName": name, **values,
    }  # fmt: skip
    return SEP.join(record.get(field, "") for field in NAMES)


def runs(*lines):
    table = Table(NAMES, SEP)
    return list(table.runs(f"{line}\n" for line in "\n".join(lines).split("\n"))), table


def test_a_row_is_told_with_all_that_slurm_says():
    (run,), table = runs(row(FailedNode="n2", State="NODE_FAIL", ExitCode="1:0"))
    assert (run.job_id, run.user, run.uid, run.account, run.partition) == (
        "7", "ada", 1001, "lab", "gpu",
    )  # fmt: skip
    assert (run.elapsed_s, run.num_nodes, run.nodes, run.gpus) == (3600.0, 2, "n[1-2]", 8)
    assert (run.failed_node, run.state, run.code) == ("n2", "NODE_FAIL", 1)
    assert run.start_at - run.eligible_at == 600.0
    assert table.left_out == 0


@pytest.mark.parametrize(
    "name",
    ["a|b", "a\nb", f"a{SEP}b", "naïve 训练 \u2028 \x85 \x1c", "a\n\n\nb", "", " x "],
)
def test_whatever_a_job_is_called_columns_stay_where_they_are(name):
    (first, second), table = runs(row("7", name=name), row("8", "FAILED", ExitCode="3:0"))
    assert (first.job_id, first.name, first.state) == ("7", name, "COMPLETED")
    assert (second.job_id, second.state, second.code) == ("8", "FAILED", 3)
    assert table.left_out == 0


def test_a_name_cannot_make_a_row_without_knowing_the_delimiter():
    forged = row("9", "NODE_FAIL").replace(SEP, "^|^")
    found, _ = runs(row("7", name=f"x\n{forged}"), row("8"))
    assert [run.job_id for run in found] == ["7", "8"]
    assert new_delimiter() != new_delimiter()


def test_steps_go_to_the_run_they_follow():
    (first, second), _ = runs(
        row("7", "REQUEUED"), row("7.batch", "CANCELLED", ExitCode="0:15", name="batch"),
        row("7.0", "FAILED", ExitCode="9:0", name="ranks"),
        row("7", Restarts="1"), row("7.0", name="ranks"),
    )  # fmt: skip
    assert [(one.step_id, one.name) for one in first.steps] == [
        ("7.batch", "batch"),
        ("7.0", "ranks"),
    ]
    assert [one.step_id for one in second.steps] == ["7.0"]


def test_a_step_whose_job_is_not_there_accuses_no_other():
    found, table = runs(
        row("5.0", "FAILED", ExitCode="0:11"), row("7"), row("7.0", name="ranks"),
        row("71.0", "FAILED", ExitCode="0:11"), row("6.batch", "FAILED", ExitCode="1:0"),
        row("12+0"), row("12+0.0"), row("70_1"), row("70_1.batch"),
    )  # fmt: skip
    told = {one.job_id: [step.step_id for step in one.steps] for one in found}
    assert told == {"7": ["7.0"], "12+0": ["12+0.0"], "70_1": ["70_1.batch"]}
    assert table.left_out == 3


def test_a_job_that_lost_a_node_and_went_on_is_one_run():
    (run,), _ = runs(
        row(
            "7",
            "RESIZING",
            Start="2026-11-29T12:00:00",
            End="2026-11-29T12:01:00",
            ElapsedRaw="60",
            NodeList="n[1-3]",
        ),
        row("7.0", "CANCELLED", ExitCode="0:9"),
        row("7", "COMPLETED", Start="2026-11-29T12:01:00", ElapsedRaw="40", NodeList="n[1-2]"),
    )
    assert (run.state, run.elapsed_s) == ("COMPLETED", 100.0)
    assert run.start_at == at("2026-11-29T12:00:00")
    assert [one.step_id for one in run.steps] == ["7.0"]


def test_a_job_that_shrank_has_used_what_each_of_its_rows_did():
    early = {"Submit": "2026-11-29T11:00:00", "Eligible": "2026-11-29T11:00:00"}
    late = {"Submit": "2026-11-29T22:00:00", "Eligible": "2026-11-29T22:00:00"}
    (run,), _ = runs(
        row("7", "RESIZING", Start="2026-11-29T12:00:00", ElapsedRaw="36000", NNodes="100",
            NodeList="n[1-100]", AllocTRES="gres/gpu=800", FailedNode="n100", **early),
        row("7", "RESIZING", Start="2026-11-29T22:00:00", ElapsedRaw="3600", NNodes="2",
            NodeList="n[1-2]", AllocTRES="gres/gpu=16", **late),
        row("7", "COMPLETED", Start="2026-11-29T23:00:00", ElapsedRaw="3600", NNodes="1",
            NodeList="n1", AllocTRES="gres/gpu=8", **late),
    )  # fmt: skip
    assert (run.elapsed_s * run.gpus + run.more_gpu_s) / 3600 == 10 * 800 + 16 + 8
    assert (run.elapsed_s * run.num_nodes + run.more_node_s) / 3600 == 10 * 100 + 2 + 1
    assert run.start_at - run.eligible_at == 3600.0
    assert run.nodes.startswith("n[1-100],")
    assert run.failed_node == "n100"


SHRANK = {
    "22.05": ("15:39:38", "15:39:45", "7", "15:39:42"),
    "26.05": ("15:39:42", "15:39:45", "3", "15:39:42"),
}
"""Start, End, ElapsedRaw and Submit of the row behind the resize, as seen of 3 nodes that were one
after 4 of 7 seconds."""


@pytest.mark.parametrize("version", SHRANK)
@pytest.mark.parametrize("again", [False, True])
def test_the_time_before_a_resize_counts_once_in_each_version(version, again):
    start, end, elapsed, submit = (
        f"2026-11-30T{one}" if ":" in one else one for one in SHRANK[version]
    )
    first = {"Start": "2026-11-30T15:39:38", "End": "2026-11-30T15:39:42", "ElapsedRaw": "4"}
    own = {"Start": start, "End": end, "ElapsedRaw": elapsed, "Submit": submit, "NNodes": "1"}
    rows = [
        row("5", "RESIZING", NNodes="3", **first),
        row("5", "RESIZING" if again else "COMPLETED", **own),
    ]
    if again:  # 2 nodes for 5 seconds more
        begins = start if version == "22.05" else end
        lasts = "12" if version == "22.05" else "5"
        rows.append(row("5", NNodes="2", Start=begins, End="2026-11-30T15:39:50", ElapsedRaw=lasts))
    (run,), _ = runs(*rows)
    assert run.elapsed_s == (12.0 if again else 7.0)
    node_s = run.elapsed_s * run.num_nodes + run.more_node_s
    assert node_s == 4 * 3 + 3 * 1 + (5 * 2 if again else 0)


def test_a_code_of_0_is_none_while_the_job_runs():
    (running, late), _ = runs(row("7", "RUNNING", End="Unknown"), row("8", "FAILED"))
    assert (running.code, running.end_at) == (None, None)
    assert late.code is None  # slurmdbd has come back and does not know yet


def test_who_cancelled_is_told_where_slurm_says():
    (by, plain), _ = runs(row("7", "CANCELLED by 1001"), row("8", "CANCELLED"))
    assert (by.state, by.cancelled_by, plain.cancelled_by) == ("CANCELLED", 1001, None)


def test_gpus_are_counted_once_however_they_are_named():
    assert gpus_of("cpu=4,gres/gpu=8,gres/gpu:h100=8") == 8
    assert gpus_of("gres/gpu:a100=2,gres/gpu:h100=8") == 10
    assert gpus_of("cpu=4,node=1") == 0
    assert gpus_of("gres/gpumem=80G,gres/gpu=1") == 1


def test_only_fields_that_this_sacct_knows_are_asked_for():
    old = "JobID JobIDRaw State ExitCode JobName Reserved"
    assert known_fields(old) == ["JobID", "JobIDRaw", "State", "ExitCode", "JobName"]
    assert known_fields("usage: sacct") is None


def test_a_row_that_is_short_or_no_row_is_left_out_and_counted():
    table = Table(NAMES, SEP)
    found = list(table.runs(["sacct: warning: x\n", row("7") + "\n", "\n"]))
    assert [run.job_id for run in found] == ["7"]
    assert table.left_out == 1


def test_a_row_that_broke_off_is_no_part_of_the_name_before_it():
    torn = SEP.join(row("9").split(SEP)[:6])
    (run,), table = runs(row("8", name="ok"), torn)
    assert (run.name, table.left_out) == ("ok", 1)


def test_seconds_are_taken_as_they_are():
    (run,), _ = runs(row("7", Eligible="1795996800", Start="1795997700", End="Unknown"))
    assert (run.start_at, run.start_at - run.eligible_at, run.end_at) == (1795997700.0, 900.0, None)


def test_times_are_those_of_the_callers_zone(monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        for stamp in ("2026-03-08T01:59:59", "2026-03-08T03:00:01", "2026-07-01T12:34:56"):
            assert at(stamp) == time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
        assert at("None") is at("Unknown") is at("2026-13-01T00:00:00") is at("") is None
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_table_is_never_held():
    lines = (row(str(n // 4), "COMPLETED") + "\n" for n in range(10_000))
    tracemalloc.start()
    count = sum(1 for _ in Table(NAMES, SEP).runs(lines))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{count} rows, {peak / 1e6:.1f} MB at most")
    assert count == 10_000
    assert peak < 1e6


@given(st.text(), st.text(alphabet="^|t\n:7+_.", max_size=200))
def test_garbage_gives_rows_or_nothing_and_never_an_error(text, other):
    for lines in ((text,), (other,), (row("7"), text), (row("7", name=other), row("8", text))):
        runs(*lines)
