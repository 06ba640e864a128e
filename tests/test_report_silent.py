"""sacct that says nothing is waited for, and not for ever; a slow reader has its time."""

import subprocess
import time

import pytest
from test_job_table import row
from test_report_command import as_json, sacct

from ftslurm.report import command
from ftslurm.scheduler.sacct import NoAccounting, Query, open_table

__all__ = ["sacct"]

pytestmark = pytest.mark.timeout(120)
ANSWER_S = 4.0


def falls_silent(sacct):
    """Behind its rows, until it is killed."""
    path = sacct.folder / "bin/sacct"
    path.write_text(path.read_text() + "exec sleep 600\n")


@pytest.mark.parametrize("rows", [[], [row("7")]])
def test_accounting_that_hangs_is_given_up_and_that_is_said(sacct, capsys, monkeypatch, rows):
    sacct.rows(*rows)
    falls_silent(sacct)
    monkeypatch.setattr(command, "Query", lambda *words: Query(*words, answer_s=ANSWER_S))
    code, record = as_json(capsys)
    assert code == 3
    (note,) = record["source"]["notes"][:1]
    assert "it was silent for 4 s" in note
    assert ("broke off" in note) is bool(rows)
    assert [job["job_id"] for job in record["jobs"]] == [one[0] for one in rows]


def test_a_reader_that_takes_its_time_is_no_silence_of_saccts(sacct):
    sacct.rows(row("7"), row("8"))
    with open_table(Query(answer_s=5.0)) as (table, lines):
        runs = table.runs(lines)
        found = [next(runs).job_id]
        time.sleep(6.0)  # the reader's, which is what is measured
        found += [run.job_id for run in runs]
    assert found == ["7", "8"]


def test_sacct_does_not_outlive_the_wait(sacct):
    falls_silent(sacct)
    started = []
    popen = subprocess.Popen

    class Kept(popen):
        def __init__(self, *words, **more):
            super().__init__(*words, **more)
            started.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Kept)
        with pytest.raises(NoAccounting), open_table(Query(answer_s=0.2)) as (table, lines):
            list(table.runs(lines))
    assert started[-1].returncode == -9
