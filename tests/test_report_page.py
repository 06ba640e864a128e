"""The page is one file, carries the figures of --json, and nothing a user has named gets out."""

import json
import re
import xml.etree.ElementTree as ET

from test_job_table import row
from test_report_command import PREEMPTED_THEN_DONE, report, sacct

from ftslurm.cli import main

__all__ = ["sacct"]

EVIL = "</script><script>alert(1)</script>&\"'<b>"


def page_of(sacct, *rows):
    sacct.rows(*rows)
    code = report("--html", "report.html")
    return code, (sacct.folder / "report.html").read_text()


def embedded(text):
    found = re.search(r"<script type='application/json' id=data>(.*?)</script>", text, re.DOTALL)
    return json.loads(found[1])


def test_the_page_carries_the_figures_of_json(sacct, capsys):
    code, text = page_of(sacct, *PREEMPTED_THEN_DONE, row("8", "FAILED", ExitCode="3:0"))
    assert code == 1
    capsys.readouterr()
    main(["report", "--json"])
    record = json.loads(capsys.readouterr().out)
    found = embedded(text)
    assert found["fleet"] == record["fleet"]
    assert sorted(job["job_id"] for job in found["jobs"]) == ["7", "8"]
    assert f"<b>{record['fleet']['total']['failures']}</b>" in text
    assert "a node failed" in text  # of an attempt's bar


def test_nothing_is_fetched_and_nothing_runs(sacct):
    _, text = page_of(sacct, *PREEMPTED_THEN_DONE)
    assert not re.search(r"https?:|src=|<link|@import|url\(", text)
    assert text.count("<script") == 1
    assert "id=data" in text


def test_names_of_jobs_are_text_and_nothing_else(sacct):
    _, text = page_of(sacct, row("7", "FAILED", ExitCode="3:0", name=EVIL, User="<i>x</i>"))
    assert text.count("<script") == 1
    assert "<b>&" not in text
    assert "<i>" not in text
    assert embedded(text)["jobs"][0]["name"] == EVIL


def test_what_is_drawn_is_well_formed(sacct):
    _, text = page_of(sacct, *PREEMPTED_THEN_DONE, row("8", "FAILED", ExitCode="3:0", name=EVIL))
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 3  # causes, attempts, nodes; no run has records, so no goodput
    for drawing in drawings:
        quoted = re.sub(r"=([\w.-]+)(?=[ />])", r"='\1'", drawing)
        ET.fromstring(quoted)


def test_a_page_of_many_jobs_keeps_those_that_failed(sacct):
    rows = [row(str(n), "FAILED" if n == 1 else "COMPLETED", ExitCode="3:0") for n in range(1500)]
    _, text = page_of(sacct, *rows)
    found = embedded(text)
    assert found["fleet"]["jobs"] == 1500
    assert "1" in {job["job_id"] for job in found["jobs"]}
    assert len(found["jobs"]) <= 1001
    assert "more, which --json and --csv list" in text


def test_a_page_for_a_folder_that_is_not_there_is_refused_before_anything_is_read(sacct, capsys):
    assert report("--html", "no/such/report.html") == 2
    assert "there is no folder `no/such`" in capsys.readouterr().err
    assert not (sacct.folder / "asked").exists()
