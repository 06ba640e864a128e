"""Verdicts that root leaves for runs: written past every trap, and believed only from root."""

import json
import os
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ftslurm.errors import FormatError
from ftslurm.health import verdict_folder
from ftslurm.health.explain import first_line
from ftslurm.health.report import Report, Told, parse_report, report_record
from ftslurm.health.verdict_folder import JOBS_KEPT, read_verdicts, write_verdicts

USER = 12345
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root writes verdicts")

TOLD = Told("drain", "XID79", 3, "0000:4b:00", "off the bus", "xid-79", "NVIDIA", False, True, True)
REPORT = Report("n7", "77", "boot-1", 1000.0, "epilog", "drain", (TOLD,), gpus=8, wall_s=0.4,
                complaints=("a",), notes=("b", "c"), action="drained",
                reason="ftslurm:XID79", done="drained it")  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "verdicts"


def test_what_is_written_is_read_by_node_and_by_job(folder):
    assert write_verdicts(folder, REPORT) == ""
    periodic = replace(REPORT, context="periodic", job="", at=1060.0, word="ok", verdicts=())
    assert write_verdicts(folder, periodic) == ""
    assert read_verdicts(folder, ["n7"], job="77") == ([REPORT, periodic], [])
    assert read_verdicts(folder, ["n7"]) == ([periodic], [])
    assert read_verdicts(folder, ["n8"], job="77") == ([], [])
    assert read_verdicts(folder / "none", ["n7"]) == ([], [])


def test_anybody_may_read_and_only_root_write(folder):
    write_verdicts(folder, REPORT)
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_uid == 0
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_a_newer_epilog_of_a_requeued_job_takes_the_place_of_the_one_before(folder):
    for at in (1000.0, 2000.0):
        write_verdicts(folder, replace(REPORT, at=at))
    assert [report.at for report in read_verdicts(folder, ["n7"], job="77")[0]] == [2000.0]


def test_the_newest_jobs_of_a_node_are_kept(folder):
    for job in range(JOBS_KEPT + 3):
        write_verdicts(folder, replace(REPORT, job=str(job)))
        os.utime(folder / "n7" / f"{job}.json", (job, job))
    write_verdicts(folder, replace(REPORT, job="newest"))
    names = {path.stem for path in (folder / "n7").iterdir()}
    assert names == {"latest", "newest", *(str(job) for job in range(4, JOBS_KEPT + 3))}


@pytest.mark.parametrize("node", ["../n7", "", ".", "a/b", "n7\n"])
def test_a_name_that_is_none_leads_nowhere(folder, node):
    assert "is no name of a node" in write_verdicts(folder, replace(REPORT, node=node))
    assert not list(folder.parent.glob("**/*.json"))
    assert "is no name of a node" in read_verdicts(folder, [node])[1][0] or not folder.exists()


def test_a_folder_that_cannot_be_written_is_a_sentence(folder, tmp_path):
    said = write_verdicts(tmp_path / "missing" / "verdicts", REPORT)
    assert said.startswith(f"verdicts are not in `{tmp_path}/missing/verdicts`: ")
    folder.mkdir()
    folder.chmod(0o777)
    assert "can be written by others" in write_verdicts(folder, REPORT)
    folder.chmod(0o755)
    os.chown(folder, USER, USER)
    assert f"belongs to uid {USER}" in write_verdicts(folder, REPORT)
    assert not list(folder.iterdir())


def test_a_file_server_that_hangs_holds_up_no_epilog(folder, monkeypatch):
    monkeypatch.setattr(verdict_folder, "_write", lambda *_: time.sleep(60))
    began = time.monotonic()
    said = write_verdicts(folder, REPORT, deadline_s=0.3)
    assert said.endswith("it did not answer within 0.3 s") and time.monotonic() - began < 20


def test_links_that_a_user_has_planted_are_not_followed_by_the_writer(folder, tmp_path):
    """Where root once made the folder carelessly: each of its names leads to a file of root's."""
    target = tmp_path / "precious"
    target.mkdir()
    (target / "latest.json").write_text("precious")
    folder.mkdir()
    (folder / "n7").symlink_to(target)
    assert write_verdicts(folder, REPORT) != ""
    (folder / "n7").unlink()
    (folder / "n7").mkdir()
    for name in ("latest.json", "77.json"):
        (folder / "n7" / name).symlink_to(target / "latest.json")
        os.lchown(folder / "n7" / name, USER, USER)
    assert write_verdicts(folder, REPORT) == ""
    assert (target / "latest.json").read_text() == "precious"
    assert [path.name for path in target.iterdir()] == ["latest.json"]
    assert read_verdicts(folder, ["n7"], job="77")[0] == [REPORT]


# what a reader does not believe


def plant(path, how):
    record = json.dumps(report_record(REPORT))
    if how == "a link":
        path.with_name("real").write_text(record)
        path.symlink_to("real")
    elif how == "a fifo":
        os.mkfifo(path)
    elif how == "a folder":
        path.mkdir()
    elif how == "torn":
        path.write_text(record[:-30])
    elif how == "of another node":
        path.write_text(json.dumps({**report_record(REPORT), "node": "n8"}))
    elif how == "newer":
        path.write_text(json.dumps({**report_record(REPORT), "schema_version": 2}))
    else:
        path.write_text(record)
    if how == "a user's":
        os.chown(path, USER, 0)
    if how == "writable by all":
        path.chmod(0o646)
    if how == "writable by a group":
        path.chmod(0o664)


@pytest.mark.parametrize(("how", "said"), [
    ("a user's", f"is user {USER}'s with mode 0644"),
    ("writable by all", "with mode 0646"),
    ("writable by a group", "with mode 0664"),
    ("a link", "Too many levels of symbolic links"),
    ("a fifo", "is no regular file"),
    ("a folder", "is no regular file"),
    ("torn", "is not JSON"),
    ("of another node", "speaks of node `n8`"),
    ("newer", "is no record of ftslurm health of version 1"),
])  # fmt: skip
def test_only_what_root_alone_can_write_is_believed(folder, how, said):
    (folder / "n7").mkdir(parents=True)
    plant(folder / "n7" / "latest.json", how)
    reports, notes = read_verdicts(folder, ["n7"])
    assert reports == [] and len(notes) == 1 and said in notes[0], notes


@pytest.mark.parametrize("place", [".", "n7"])
@pytest.mark.parametrize("how", ["a user's", "writable by all"])
def test_the_folders_have_to_be_roots_as_well(folder, place, how):
    write_verdicts(folder, REPORT)
    if how == "a user's":
        os.chown(folder / place, USER, 0)
    else:
        (folder / place).chmod(0o777)
    reports, notes = read_verdicts(folder, ["n7"])
    assert reports == [] and "only what nobody but root can write is believed" in notes[0]


def test_the_folder_of_a_node_is_no_link(folder):
    write_verdicts(folder, REPORT)
    (folder / "n8").symlink_to("n7")
    reports, notes = read_verdicts(folder, ["n8"])
    assert reports == [] and "cannot be read" in notes[0]


def test_a_user_reads_them():
    """In a child that is nobody special, and in a folder that such a one may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name) / "verdicts"
        folder.parent.chmod(0o755)
        assert write_verdicts(folder, REPORT) == ""
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
            os._exit(0 if read_verdicts(folder, ["n7"])[0] == [REPORT] else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# the record


def test_a_record_survives_the_way_over_json_and_lets_a_newer_writers_keys_be():
    record = json.loads(json.dumps(report_record(REPORT)))
    assert parse_report(record, where="here") == REPORT
    record["colour"] = "red"
    record["verdicts"][0]["colour"] = "red"
    assert parse_report(record, where="here") == REPORT


KEYS = [*asdict(REPORT), "schema_version"]
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example({"at": 10**400}, {}, False)
@example({"wall_s": float("nan")}, {}, False)
@example({"gpus": -(10**400)}, {}, False)
@given(st.dictionaries(st.sampled_from(KEYS), JSON), st.dictionaries(st.sampled_from(
    list(asdict(TOLD))), JSON), st.booleans())  # fmt: skip
def test_no_record_crashes_the_reader(changes, told, deep):
    record = {**report_record(REPORT), **changes}
    if deep:
        record["verdicts"] = [{**asdict(TOLD), **told}]
    try:
        report = parse_report(json.loads(json.dumps(record)), where="here")
    except FormatError:
        return
    assert first_line(report) and all(isinstance(one, Told) for one in report.verdicts)
