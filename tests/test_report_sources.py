"""Which runs a report is about: of the window, of the user; what cannot be read is said."""

import json
import os
import time
from pathlib import Path

import pytest
from test_job_table import row
from test_report_command import as_json, report, sacct

from ftslurm.files import write_json
from ftslurm.report import sources
from ftslurm.report.sources import NodeNames
from ftslurm.report.wanted import runs_below
from ftslurm.run.attempts import Attempt, claim
from ftslurm.run.jobs import add_job
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import CommandMissing
from ftslurm.scheduler.sacct import sees_others
from ftslurm.scheduler.slurm import CommandHangs, Completed

__all__ = ["sacct"]

HOUR_S = 3600.0


def make_run(name, job_id, *, claimed_at, root="runs", scheduler="slurm", nodes=("n1", "n2")):
    layout = RunLayout(Path(root) / name)
    layout.jobs.parent.mkdir(parents=True)
    write_json(layout.run_json, {"schema_version": 1, "run_id": name, "spec": {"steps": 10}})
    add_job(layout, job_id, scheduler=scheduler, queued_by="submit", now=lambda: claimed_at - 600.0)
    claim(layout, Attempt(0, job_id, 0, list(nodes), claimed_at))
    return layout


def slurm(job_id, state, start, *, hours=1.0, **values):
    return row(
        job_id, state, Submit=f"{start - 600:.0f}", Eligible=f"{start - 600:.0f}",
        Start=f"{start:.0f}", End=f"{start + 3600 * hours:.0f}", ElapsedRaw=f"{3600 * hours:.0f}",
        **values,
    )  # fmt: skip


def test_a_run_of_before_the_window_is_left_out(sacct, capsys):
    now = time.time()
    make_run("old", "7", claimed_at=now - 400 * 24 * HOUR_S)
    code, record = as_json(capsys, "--since", "1d")
    assert (code, record["jobs"]) == (0, [])
    make_run("new", "8", claimed_at=now - 2 * HOUR_S)
    _, record = as_json(capsys, "--since", "1d")
    assert [Path(job["run_dir"]).name for job in record["jobs"]] == ["new"]
    assert len(as_json(capsys, "runs/old")[1]["jobs"]) == 1  # named, it is reported


def test_of_runs_in_which_nothing_was_written_since_nothing_is_read(sacct, capsys, monkeypatch):
    now = time.time()
    for number in range(3):
        layout = make_run(f"old-{number}", str(number), claimed_at=now - 400 * 24 * HOUR_S)
        for path in [*layout.root.rglob("*")]:
            os.utime(path, (now - 390 * 24 * HOUR_S,) * 2)
    make_run("new", "8", claimed_at=now - 2 * HOUR_S)
    read, whole = [], sources.read_story
    monkeypatch.setattr(
        sources, "read_story", lambda layout, **more: read.append(layout) or whole(layout, **more)
    )
    _, record = as_json(capsys, "--since", "1d")
    assert [Path(job["run_dir"]).name for job in record["jobs"]] == ["new"]
    assert {layout.root.name for layout in read} == {"new"}
    _, record = as_json(capsys, "--since", "2020-01-01")
    assert len(record["jobs"]) == 4


def test_a_file_server_whose_clock_is_behind_hides_no_run(sacct, capsys):
    now = time.time()
    layout = make_run("here", "8", claimed_at=now - 1 * HOUR_S)
    for path in [*layout.root.rglob("*")]:
        os.utime(path, (now - 20 * HOUR_S,) * 2)
    _, record = as_json(capsys, "--since", "12h")
    assert [Path(job["run_dir"]).name for job in record["jobs"]] == ["here"]


@pytest.mark.parametrize("word", ["7_1", "7", "slurm-7_1.out"])
def test_a_job_that_is_named_is_told_by_the_run_below_that_it_is_of(sacct, capsys, word):
    begin = time.time() - 10 * HOUR_S
    make_run("r", "7_1", claimed_at=begin + 1)
    make_run("other", "70", claimed_at=begin)
    (sacct.folder / "runs/broken").mkdir()
    (sacct.folder / "runs/broken/run.json").write_text("{")
    Path("slurm-7_1.out").touch()
    sacct.rows(slurm("7_1", "FAILED", begin, ExitCode="1:0"))
    _, record = as_json(capsys, word)
    (job,) = record["jobs"]
    assert (job["job_id"], job["run_dir"], job["attempts"][0]["number"]) == ("7_1", "runs/r", 1)
    assert record["source"]["notes"] == []


def test_a_job_that_is_named_is_told_by_slurm_where_its_run_cannot_be_read(sacct, capsys):
    begin = time.time() - 10 * HOUR_S
    layout = make_run("r", "7", claimed_at=begin + 1)
    write_json(layout.run_json, {"schema_version": 1, "spec": {}})
    sacct.rows(slurm("7", "FAILED", begin, ExitCode="1:0"))
    code, record = as_json(capsys, "7")
    (job,) = record["jobs"]
    assert (code, job["job_id"], job["state"], job["run_dir"]) == (1, "7", "failed", None)
    (note,) = record["source"]["notes"]
    assert "run `runs/r` is left out" in note
    assert as_json(capsys, "runs/r")[1]["jobs"] == []


@pytest.mark.parametrize("word", ["7_1", "7"])
def test_a_job_that_its_run_alone_tells_of_is_not_called_unknown(sacct, capsys, word):
    make_run("r", "7_1", claimed_at=time.time() - HOUR_S)
    for is_away in (False, True):
        if is_away:
            sacct.fails("sacct: error: Connection refused")
        code, record = as_json(capsys, word)
        assert (code, [job["run_dir"] for job in record["jobs"]]) == (0, ["runs/r"])
        assert "nothing is known" not in " ".join(record["source"]["notes"])
    assert "nothing is known of job 8" in " ".join(as_json(capsys, "8")[1]["source"]["notes"])


def test_a_user_without_a_name_is_told_of_a_job(sacct, capsys, monkeypatch):
    def nameless():
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nameless)
    sacct.rows(slurm("7", "FAILED", time.time() - 2 * HOUR_S, ExitCode="1:0"))
    for words in (["7"], ["7", "999"], ["--all-users"]):
        code, record = as_json(capsys, *words)
        assert (code, record["fleet"]["jobs"]) == (1, 1)


@pytest.mark.parametrize("error", [CommandMissing, CommandHangs])
def test_a_report_is_whole_where_nobody_says_who_sees_whom(sacct, capsys, monkeypatch, error):
    def silent(user):
        raise error("`sacctmgr` gave no answer")

    monkeypatch.setattr(sources, "sees_others", silent)
    sacct.rows(slurm("7", "FAILED", time.time() - 2 * HOUR_S, ExitCode="1:0"))
    code, record = as_json(capsys, "--all-users")
    assert (code, record["fleet"]["jobs"]) == (1, 1)
    assert report("--all-users") == 1
    assert "1 job (1 failed)" in capsys.readouterr().out


def test_a_run_of_another_user_is_left_out(sacct, capsys):
    make_run("mine", "7", claimed_at=time.time() - HOUR_S)
    assert as_json(capsys, "--user", "nobodyelse")[1]["jobs"] == []
    assert len(as_json(capsys)[1]["jobs"]) == 1
    assert len(as_json(capsys, "--all-users")[1]["jobs"]) == 1


def test_a_run_that_crosses_the_window_is_asked_for_whole_and_counted_within_it(sacct, capsys):
    begin = time.time() - 10 * HOUR_S
    make_run("r", "7", claimed_at=begin + 1)
    second = slurm("7", "FAILED", begin + 6 * HOUR_S, Restarts="1", ExitCode="1:0")
    sacct.rows(second)
    sacct.has_of_jobs(slurm("7", "NODE_FAIL", begin, FailedNode="n2"), second)
    _, record = as_json(capsys, "--since", "5h")
    (job,) = record["jobs"]
    assert job["run_dir"].endswith("runs/r")
    assert [one["state"] for one in job["attempts"]] == ["FAILED"]
    assert record["fleet"]["total"]["gpu_hours"] == pytest.approx(8.0)
    _, record = as_json(capsys, "--since", "1d")
    first = record["jobs"][0]["attempts"][0]
    assert (first["number"], first["cause"], first["node"], first["gpus"]) == (1, "node", "n2", 8)
    assert record["fleet"]["node_faults"] == 1


def test_the_rows_of_an_older_job_of_the_same_number_are_not_the_runs(sacct, capsys):
    begin = time.time() - 10 * HOUR_S
    make_run("r", "7", claimed_at=begin + 1)
    mine = slurm("7", "COMPLETED", begin)
    older = slurm("7", "NODE_FAIL", begin - 9000 * HOUR_S, User="eve", FailedNode="n9")
    sacct.rows(mine)
    sacct.has_of_jobs(older, mine)
    _, record = as_json(capsys, "runs/r")
    (job,) = record["jobs"]
    assert [(one["number"], one["gpus"]) for one in job["attempts"]] == [(1, 8)]


def test_a_job_of_which_only_the_newest_row_is_left_is_the_runs_all_the_same(sacct, capsys):
    """A requeue sets the time of submission anew."""
    begin = time.time() - 10 * HOUR_S
    make_run("r", "7", claimed_at=begin + 1)
    sacct.rows(slurm("7", "FAILED", begin + 6 * HOUR_S, Restarts="1", ExitCode="1:0"))
    _, record = as_json(capsys, "runs/r")
    assert [one["number"] for one in record["jobs"][0]["attempts"]] == [1, None]


def test_a_folder_that_may_not_be_read_hides_no_other(tmp_path, monkeypatch):
    for name in ("a", "closed", "z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
    is_file = Path.is_file

    def refused(path):
        if "closed" in path.parts:
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    notes = []
    assert [path.name for path in runs_below(tmp_path, notes)] == ["a", "z"]
    assert "1 folders" in notes[0]


def test_a_folder_that_submit_is_building_is_no_run_yet(tmp_path):
    for name in ("a", ".a.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
    assert [path.name for path in runs_below(tmp_path, [])] == ["a"]


def test_a_named_run_that_may_not_be_read_is_refused_with_a_sentence(sacct, capsys, monkeypatch):
    make_run("r", "7", claimed_at=time.time())

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refused)
    assert report("runs/r") == 2
    assert "may not be read" in capsys.readouterr().err


def test_a_run_that_stops_being_readable_is_left_out_and_that_is_said(sacct, capsys, monkeypatch):
    make_run("r", "7", claimed_at=time.time())
    make_run("s", "8", claimed_at=time.time())
    read_story = sources.read_story

    def refused(layout, *, now):
        if layout.root.name == "r":
            raise PermissionError(13, "Permission denied", str(layout.root))
        return read_story(layout, now=now)

    monkeypatch.setattr(sources, "read_story", refused)
    _, record = as_json(capsys, "runs/r", "runs/s")
    assert [Path(job["run_dir"]).name for job in record["jobs"]] == ["s"]
    assert "run `runs/r` is left out" in record["source"]["notes"][0]


def test_jobs_of_many_runs_are_asked_for_in_several_calls(sacct, capsys, monkeypatch):
    monkeypatch.setattr(sources, "_IDS_AT_ONCE", 2)
    for number in range(5):
        make_run(f"r{number}", f"{70 + number}", claimed_at=time.time())
    code, record = as_json(capsys, "runs")
    assert (code, len(record["jobs"])) == (0, 5)
    assert "--jobs=74" in sacct.asked


def test_a_run_without_a_trace_is_told_as_such(sacct, capsys):
    layout = make_run("r", "7", claimed_at=time.time() - HOUR_S)
    record = {**json.loads(layout.run_json.read_text()), "spec": {"steps": 0, "program": ["a"]}}
    write_json(layout.run_json, record)
    sacct.rows(slurm("7", "COMPLETED", time.time() - 2 * HOUR_S))
    _, record = as_json(capsys, "runs/r")
    assert (record["fleet"]["runs_untold"], record["fleet"]["goodput"]["share"]) == (1, None)
    report("runs/r")
    assert "of 1 run, which left no trace" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("dbd", "version", "level", "sees"), [
    ("none", "22.05.8", "None", True),
    ("jobs", "24.11.5", "None", False),
    ("accounts,jobs,usage", "22.05.8", "", False),
    ("usage", "22.05.8", "None", True),
    ("jobs", "22.05.8", "Operator", True),
    ("jobs", "22.05.8", "Administrator", True),
    ("none", "26.05.5", "None", None),  # which says so whatever is set
    ("none", "26.05.5", "Operator", True),
    ("jobs", "26.05.9", "None", False),
    (None, "22.05.8", "None", None),  # it does not answer
])  # fmt: skip
def test_who_sees_jobs_of_others_is_slurmdbds_word_and_not_slurm_confs(dbd, version, level, sees):
    """The lines are of sacctmgr 22.05."""
    own = "PluginDir              = /usr/lib\nPrivateData            = jobs,nodes\n"
    of_dbd = (
        f"\nSlurmDBD configuration:\nPrivateData            = {dbd}\nPurgeJobAfter = NONE\n"
        f"SLURMDBD_VERSION       = {version}\n"
    )

    def run(argv, timeout_s):
        if "config" in argv:
            return Completed(1, "", "no") if dbd is None else Completed(0, own + of_dbd, "")
        assert argv[-2:] == ["ada", "format=AdminLevel"]
        return Completed(0, f"{level}\n", "")

    assert sees_others("ada", run=run) is sees


def test_names_of_nodes_are_held_once_and_in_bounds(monkeypatch):
    monkeypatch.setattr(sources, "_NAMES_HELD", 100)
    names = NodeNames()
    assert names.of("n[1-3]")[2] is names.of("n3")[0]
    for number in range(50):
        names.of(f"rack{number}n[1-10]")
    assert sum(map(len, names._lists.values())) <= 100
    assert names.of("[") == []


def test_a_run_named_in_two_spellings_is_one(sacct, capsys):
    layout = make_run("r", "7", claimed_at=time.time() - HOUR_S)
    sacct.rows(slurm("7", "COMPLETED", time.time() - 2 * HOUR_S))
    log = layout.root / "r.out"
    log.touch()
    for words in (("r", str(log)), (str(layout.root.absolute()), "runs/r", "runs/../runs/r")):
        _, record = as_json(capsys, *words)
        assert (len(record["jobs"]), record["fleet"]["jobs"]) == (1, 1)
        assert record["source"]["notes"] == record["jobs"][0]["notes"] == []
    make_run("a", "8", claimed_at=time.time() - HOUR_S)
    _, record = as_json(capsys, "r", "a", str(layout.root.absolute()))
    assert [job["run_dir"] for job in record["jobs"]] == ["runs/r", "runs/a"]


@pytest.mark.parametrize("words", [(), ("runs",)])
@pytest.mark.parametrize("spec", [{}, []])
def test_a_run_of_a_later_version_hides_no_other(sacct, capsys, spec, words):
    begin = time.time() - 2 * HOUR_S
    for name, job_id in (("damaged", "7"), ("fine", "8")):
        make_run(name, job_id, claimed_at=begin + 1)
    write_json(RunLayout(Path("runs/damaged")).run_json, {"schema_version": 1, "spec": spec})
    sacct.rows(slurm("7", "COMPLETED", begin), slurm("8", "COMPLETED", begin))
    _, record = as_json(capsys, *words)
    assert [Path(job["run_dir"]).name for job in record["jobs"]] == ["fine"]
    assert "damaged or of a later version: " in record["source"]["notes"][0]


def test_a_number_that_came_back_is_of_the_run_that_noted_it(sacct, capsys):
    """slurmctld has lost its state in between, and counts from 1 again."""
    begin = time.time() - 100 * HOUR_S
    starts = {"older": begin, "newer": begin + 50 * HOUR_S}
    rows = []
    for name, start in starts.items():
        make_run(name, "7", claimed_at=start + 1)
        rows.append(
            slurm("7", "COMPLETED", start, name=name, hours=9.0 if name == "older" else 1.0)
        )
    sacct.rows(*rows)
    _, record = as_json(capsys)
    told = {Path(job["run_dir"]).name: job for job in record["jobs"]}
    assert {name: job["gpu_hours"] for name, job in told.items()} == {"older": 72.0, "newer": 8.0}
    assert [job["notes"] for job in told.values()] == [[], []]
    sacct.rows(rows[1])  # accounting has forgotten the older one
    _, record = as_json(capsys, "runs")
    assert record["fleet"]["total"]["gpu_hours"] == 8.0
