"""`ftslurm report` with a sacct that answers from a file, or not at all."""

import csv
import io
import json
import os
import time
from pathlib import Path

import pytest
from test_job_table import NAMES, row

from ftslurm.cli import main
from ftslurm.report.fold import fold
from ftslurm.report.sources import Reading
from ftslurm.scheduler.sacct import parse_shown_job, sacct_time
from ftslurm.scheduler.slurm_parse import at

SHOWN = (
    "JobId=16 ArrayJobId=15 ArrayTaskId=2 JobName=a b JobState=FAILED UserId=ada(1001)"
    " GroupId=ada(1001) Account=lab QOS=normal JobState=RUNNING Reason=None Restarts=1"
    " ExitCode=0:0 RunTime=1-00:00:02 SubmitTime=2026-11-30T01:19:49"
    " EligibleTime=2026-11-30T01:19:54 StartTime=2026-11-30T01:19:54 EndTime=2026-12-01T02:19:54"
    " Partition=low NodeList=n[3-4] NumNodes=2 TRES=cpu=4,node=2,billing=4,gres/gpu=4"
)


MONTH = "2026-11"
NO_SOURCE = "fatal: Could not establish a configuration source"


class Sacct:
    """Prints the rows it was given, with the delimiter it is asked for; keeps what it was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        (folder / "bin").mkdir()
        self.rows("")
        self.fails("")
        said = f"cat {folder}/shown 2>/dev/null; cat {folder}/shown_error >&2"
        self._write("scontrol", f'{said}; exit "$(cat {folder}/shown_rc)"')
        self.controller_fails("")
        (folder / "shown_rc").write_text("1")
        self._write("sacctmgr", f'printf "%s\\n" "$@" >{folder}/events_asked; cat {folder}/events')
        self.had_events("")
        self._write(
            "sacct",
            f"""
if [ "$1" = --helpformat ]; then
  if [ -s {folder}/error ]; then cat {folder}/error >&2; exit 1; fi
  echo {" ".join(NAMES)}; exit 0
fi
printf '%s\\n' "$@" >{folder}/asked
file=rows
for word; do case $word in
  --delimiter=*) delimiter=${{word#--delimiter=}} ;;
  --jobs=*) [ -e {folder}/named ] && file=named ;;
esac; done
printf '%s' "$SLURM_TIME_FORMAT" >{folder}/time_format
export FILE={folder}/$file
DELIMITER=$delimiter python3 -c '
import os, sys
text = open(os.environ["FILE"]).read()
sys.stdout.write(text.replace("^|t|^", os.environ["DELIMITER"]))'
if [ -s {folder}/late ]; then cat {folder}/late >&2; exit 1; fi
""",
        )
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        monkeypatch.chdir(folder)

    def _write(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def rows(self, *lines: str) -> None:
        self._set_clock(lines)
        (self.folder / "rows").write_text("".join(f"{line}\n" for line in lines))

    def _set_clock(self, lines: tuple[str, ...]) -> None:
        """Lines of a fixed day are of the last seven days whenever they are read."""
        if any(MONTH in line for line in lines):
            clock = {"now": lambda: min(time.time(), at(f"{MONTH}-30T23:59:59"))}
            self._monkeypatch.setattr(Reading.__init__, "__kwdefaults__", clock)

    def has_of_jobs(self, *lines: str) -> None:
        """What it prints where it is asked for jobs by number, in place of the rows."""
        (self.folder / "named").write_text("".join(f"{line}\n" for line in lines))

    def fails(self, error: str, *, late: str = "") -> None:
        (self.folder / "error").write_text(error)
        (self.folder / "late").write_text(late)

    def controller_fails(self, error: str) -> None:
        (self.folder / "shown_error").write_text(error)

    def had_events(self, *lines: str) -> None:
        """Of nodes, as sacctmgr prints them."""
        (self.folder / "events").write_text("".join(f"{line}\n" for line in lines))

    def shows(self, *lines: str) -> None:
        self._set_clock(lines)
        (self.folder / "shown").write_text("".join(f"{line}\n" for line in lines))
        (self.folder / "shown_rc").write_text("0")

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().split("\n")


@pytest.fixture
def sacct(tmp_path, monkeypatch):
    return Sacct(tmp_path, monkeypatch)


def report(*words):
    return main(["report", *words])


def as_json(capsys, *words):
    code = report("--json", *words)
    return code, json.loads(capsys.readouterr().out)


PREEMPTED_THEN_DONE = (
    row("7", "PREEMPTED", Restarts="0"),
    row("7.0", "CANCELLED", ExitCode="0:15"),
    row("7", "NODE_FAIL", Restarts="1", FailedNode="n2", Start="2026-11-29T13:20:00"),
    row("7", "COMPLETED", Restarts="2", Start="2026-11-29T14:20:00"),
)


def test_one_line_a_job_with_its_attempts_folded(sacct, capsys):
    sacct.rows(*PREEMPTED_THEN_DONE, row("8"))
    assert report() == 1
    out = capsys.readouterr().out
    assert "3 (1 node, 1 preempted)" in out
    assert " n2 " in out
    assert "\n8 " not in out  # nothing is wrong with it
    assert "cluster.exclude" in out
    assert "2 jobs (2 completed), 4 attempts, 1 failure\n" in out
    assert any(word.startswith("--user=") for word in sacct.asked)
    assert "--starttime=now-7days" in sacct.asked


def test_nothing_failed_is_code_0(sacct, capsys):
    sacct.rows(row("8"), row("9", "CANCELLED by 1001"), row("10", "RUNNING", End="Unknown"))
    assert report("--all-users") == 0
    assert "--allusers" in sacct.asked
    assert "0 failures" in capsys.readouterr().out


def test_json_and_csv_give_the_same_numbers_as_the_text(sacct, capsys):
    sacct.rows(*PREEMPTED_THEN_DONE, row("8", "FAILED", ExitCode="3:0", name="a,\"b\n'"))
    code, record = as_json(capsys)
    assert code == 1
    assert record["source"] == {"accounting": "sacct", "notes": []}
    first, second = record["jobs"]
    assert first["causes"] == {"preempted": 1, "node": 1}
    assert (first["failures"], first["gpu_hours"]) == (1, 24.0)
    assert first["lost_gpu_hours"] is None
    assert (second["name"], second["state"]) == ("a,\"b\n'", "failed")
    fleet = record["fleet"]
    assert fleet["total"]["gpu_hours"] == 32.0
    assert fleet["gpu_mtbf_h"] == 32.0
    assert fleet["recovered_share"] == 0.5
    report("--csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [one["job_id"] for one in rows] == ["7", "8"]
    assert sum(float(one["gpu_hours"]) for one in rows) == 32.0
    assert (rows[0]["failed_node"], rows[0]["causes"]) == ("n2", "preempted:1 node:1")
    assert rows[1]["name"] == "a,\"b\n'"


def test_times_are_asked_for_in_seconds(sacct):
    assert report() == 0
    assert (sacct.folder / "time_format").read_text() == "%s"


def test_a_spreadsheet_takes_no_name_for_a_formula(sacct, capsys):
    sacct.rows(row("7", name='=HYPERLINK("x")', Account="@lab"), row("8", name="-a"))
    report("--csv")
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (first["name"], first["account"], second["name"]) == (
        '\'=HYPERLINK("x")',
        "'@lab",
        "'-a",
    )


def test_a_named_job_that_nobody_knows_is_nothing_to_read(sacct, capsys):
    assert report("999999") == 3
    assert "nothing is known of job 999999" in capsys.readouterr().err
    sacct.rows(row("8"))
    assert report("8", "999999") == 0
    assert "999999" in capsys.readouterr().err


def test_what_is_named_is_whole_and_that_is_said_where_bounds_were_given(sacct, capsys):
    sacct.rows(*PREEMPTED_THEN_DONE)
    assert report("7", "--since", "1m") == 1
    said = capsys.readouterr()
    assert "reported whole" in said.err
    assert "4 attempts" not in said.out
    assert "3 attempts" in said.out


def test_hours_before_since_do_not_count(sacct, capsys):
    sacct.rows(row("8"))  # 12:10 to 13:10, 8 GPUs
    _, record = as_json(capsys, "--since", "2026-11-29T12:40:00")
    assert record["fleet"]["total"]["gpu_hours"] == 4.0
    _, record = as_json(capsys, "--since", "today")
    assert record["fleet"]["total"]["gpu_hours"] == 8.0
    assert "sacct alone" in record["source"]["notes"][0]


def test_a_job_is_named_by_number_or_by_its_log(sacct, capsys):
    sacct.rows(*PREEMPTED_THEN_DONE)
    Path("slurm-7.out").touch()
    for word in ("7", "slurm-7.out"):
        assert report(word) == 1
        assert "--jobs=7" in sacct.asked
        assert "a node failed" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["no-such", "run.json", "."])
def test_what_is_nothing_to_report_on_is_refused_with_a_sentence(sacct, word, capsys):
    assert report(word) == 2
    assert f"`{word}`" in capsys.readouterr().err


def test_a_log_without_a_number_is_refused(sacct, capsys):
    Path("train.log").touch()
    assert report("train.log") == 2
    assert "no job id in its name" in capsys.readouterr().err


def test_without_accounting_the_controller_is_asked_and_that_is_said(sacct, capsys):
    sacct.fails("Slurm accounting storage is disabled\n")
    sacct.shows(SHOWN.replace("RUNNING", "NODE_FAIL").replace("JobState=FAILED ", ""))
    assert report("--all-users") == 1
    said = capsys.readouterr()
    assert "storage is disabled" in said.err
    assert "only jobs of the last minutes" in said.err
    assert "15_2" in said.out


def test_without_anything_to_read_the_code_is_3(sacct, capsys):
    sacct.fails(f"error: no host\nerror: no lookup\nsacct: {NO_SOURCE}\n")
    sacct.controller_fails(f"error: no host\nerror: no lookup\nscontrol: {NO_SOURCE}\n")
    assert report() == 3
    said = capsys.readouterr().err
    assert said.startswith("ftslurm: note: neither accounting nor slurmctld answers: ")
    assert said.count("\n") == 1
    assert said.count(NO_SOURCE) == 1 and "lookup" not in said


def test_a_table_that_breaks_off_is_said_and_what_came_is_reported(sacct, capsys):
    sacct.rows(*PREEMPTED_THEN_DONE)
    sacct.fails("", late="sacct: error: Problem talking to the database\n")
    code, record = as_json(capsys)
    assert code == 1
    assert len(record["jobs"]) == 1
    assert "broke off" in record["source"]["notes"][0]


def test_a_job_name_cannot_write_to_the_terminal(sacct, capsys):
    sacct.rows(row("7", "FAILED", ExitCode="3:0", name="\x1b[2J\x07evil"))
    report()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "evil" in out


def shown(*, name="train", keys="", end=""):
    return (
        f"JobId=16 {keys}JobName={name} UserId=ada(1001) GroupId=ada(1001) MCS_label=N/A"
        f" JobState=RUNNING ExitCode=0:0 NodeList=n1 {end}"
    )


def test_neither_a_comment_nor_a_name_changes_a_job_of_the_controller():
    run = parse_shown_job(shown(end="Comment=x JobState=NODE_FAIL NodeList=n7 WorkDir=/x"))
    assert (run.state, run.nodes) == ("RUNNING", "n1")
    name = "a UserId=root(0) ArrayJobId=15 ArrayTaskId=2"
    run = parse_shown_job(shown(name=name))
    assert (run.name, run.job_id, run.user, run.uid) == (name, "16", "ada", 1001)


def test_tasks_that_wait_and_parts_of_a_het_job_are_numbered_as_by_sacct():
    waiting = parse_shown_job(shown(keys="ArrayJobId=70 ArrayTaskId=3-9%2 "))
    assert waiting.job_id == "70_[3-9%2]"
    parts = [
        parse_shown_job(shown(keys=f"HetJobId=12 HetJobOffset={offset} ")) for offset in (0, 1)
    ]
    assert [one.job_id for one in parts] == ["12+0", "12+1"]
    (job,) = fold(parts)
    assert (job.job_id, job.parts) == ("12", 2)


def test_a_job_of_the_controller_is_read_whatever_its_name_says():
    run = parse_shown_job(SHOWN)
    assert (run.job_id, run.raw_id, run.name) == ("15_2", "16", "a b JobState=FAILED")
    assert (run.state, run.user, run.uid, run.gpus) == ("RUNNING", "ada", 1001, 4)
    assert (run.elapsed_s, run.num_nodes, run.nodes) == (86402.0, 2, "n[3-4]")
    assert run.end_at is None  # of a running job it is the end of its limit
    assert parse_shown_job("No jobs in the system") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [("7d", "now-7days"), ("12h", "now-12hours"), ("2026-11-30", "2026-11-30"), ("now", "now")],
)
def test_times_are_those_of_sacct_and_short_ones(text, told):
    assert sacct_time(text) == told


def test_a_time_that_is_none_is_refused(sacct, capsys):
    assert report("--since", "; rm") == 2
    assert "is no time" in capsys.readouterr().err


def test_a_date_that_is_none_is_refused_as_sacct_refuses_it(sacct, capsys):
    sacct.fails("", late="sacct: error: Invalid time specification (pos=5): 2026-13-45\n")
    for words in ([], ["--json"]):
        assert report("--since", "2026-13-45", *words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "sacct takes no such time (--since 2026-13-45, --until now)" in said.err


def test_a_window_that_ends_before_it_begins_is_refused_and_not_taken_for_no_accounting(
    sacct, capsys
):
    """The words of 22.05, 24.11 and 26.05."""
    said = "sacct: error: Start time (1795965485) requested is after end time (1795879085).\n"
    sacct.fails("", late=said)
    sacct.shows(SHOWN)
    assert report("--since", "1d", "--until", "2d") == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "(--since now-1days, --until now-2days): --since has to be earlier" in told.err


def test_a_user_that_nobody_knows_is_refused_and_not_taken_for_no_accounting(sacct, capsys):
    """The words of 22.05."""
    sacct.fails("", late="sacct: error: Invalid user id: nosuch\n")
    sacct.shows(SHOWN)
    assert report("--user", "nosuch") == 2
    told = capsys.readouterr()
    assert told.out == "" and "there is no user `nosuch` here" in told.err
    assert report("--all-users") == 0, "no user was asked for: something else is wrong"
    assert "sacct has no answer" in capsys.readouterr().err


def test_a_part_of_a_het_job_is_told_with_the_whole_of_it(sacct, capsys):
    sacct.rows(row("12+0", NNodes="1"), row("12+1", NNodes="1"))
    _, record = as_json(capsys, "12+1")
    assert "--jobs=12" in sacct.asked
    assert [(job["job_id"], job["attempts"][0]["num_nodes"]) for job in record["jobs"]] == [
        ("12", 2)
    ]


def test_a_table_that_breaks_off_before_anything_failed_is_not_code_0(sacct, capsys):
    sacct.rows(row("8"))
    sacct.fails("", late="sacct: error: Problem talking to the database\n")
    for words in ([], ["--csv"]):
        assert report(*words) == 3
        assert "broke off" in capsys.readouterr().err


def test_a_job_that_waits_has_no_attempt_in_text_table_or_sum(sacct, capsys):
    waits = {"Start": "Unknown", "End": "Unknown", "ElapsedRaw": "0"}
    sacct.rows(row("8", "PENDING", **waits), row("70_[0-99]", "PENDING", **waits), row("9"))
    _, record = as_json(capsys)
    report("--csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [one["attempts"] for one in rows] == ["0", "0", "1"]
    assert record["fleet"]["total"]["attempts"] == 1
    assert sum(int(one["tasks"]) for one in rows) == record["fleet"]["jobs"] == 102
    report("--runs")
    assert "0 attempts, 0 GPU-hours" in capsys.readouterr().out


def test_a_list_of_tasks_that_was_cut_is_no_step(sacct, capsys):
    cut = {"Start": "Unknown", "End": "Unknown", "ElapsedRaw": "0"}
    sacct.rows(row("7"), row("72_[1,3,...]", "PENDING", **cut))
    _, record = as_json(capsys)
    assert [(job["job_id"], job["tasks"]) for job in record["jobs"]] == [
        ("7", 1), ("72_[1,3,...]", 2),
    ]  # fmt: skip
