"""sacct that says nothing is waited for, and not for ever; a slow reader has its time."""

import subprocess
import time

import pytest
from test_job_table import row
from test_report_command import as_json, sacct

from ftslurm.report import command
from ftslurm.scheduler.sacct import NoAccounting, Query, open_table

__all__ = ["sacct"]

pytestmark = pytest.mark.timeout(300)
ANSWER_S = 4.0
FOR_EVER = "exec sleep 600"


def has_more_to_do(sacct, last):
    """Behind its rows."""
    path = sacct.folder / "bin/sacct"
    path.write_text(f"{path.read_text()}touch {sacct.folder}/said\n{last}\n")


@pytest.fixture
def started(sacct, monkeypatch):
    """The tables that were asked for. Each had its rows printed before anybody waited for them: how
    long that took is nothing that is looked at here."""
    tables, popen = [], subprocess.Popen

    class Kept(popen):
        def __init__(self, argv, **more):
            super().__init__(argv, **more)
            if argv[0] == "sacct" and "--helpformat" not in argv:
                tables.append(self)
                while not (sacct.folder / "said").exists():
                    time.sleep(0.01)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    return tables


@pytest.mark.parametrize("rows", [[], [row("7")]])
def test_accounting_that_hangs_is_given_up_and_that_is_said(
    sacct, started, capsys, monkeypatch, rows
):
    sacct.rows(*rows)
    has_more_to_do(sacct, FOR_EVER)
    monkeypatch.setattr(command, "Query", lambda *words: Query(*words, answer_s=ANSWER_S))
    code, record = as_json(capsys)
    assert code == 3
    (note,) = record["source"]["notes"][:1]
    assert f"it was silent for {ANSWER_S:g} s" in note
    assert ("broke off" in note) is bool(rows)
    assert [job["job_id"] for job in record["jobs"]] == [one[0] for one in rows]


def test_a_reader_that_takes_its_time_is_no_silence_of_saccts(sacct, started):
    sacct.rows(row("7"), row("8"))
    has_more_to_do(sacct, "exit 0")
    with open_table(Query(answer_s=ANSWER_S)) as (table, lines):
        runs = table.runs(lines)
        found = [next(runs).job_id]
        time.sleep(ANSWER_S + 2.0)  # the reader's, which is what is measured
        found += [run.job_id for run in runs]
    assert found == ["7", "8"]


def test_sacct_does_not_outlive_the_wait(sacct, started):
    has_more_to_do(sacct, FOR_EVER)
    with pytest.raises(NoAccounting), open_table(Query(answer_s=0.2)) as (table, lines):
        list(table.runs(lines))
    assert started[-1].returncode == -9
