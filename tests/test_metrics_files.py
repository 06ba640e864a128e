"""RUN_ID.prom: whole, readable, renewed while the run goes on and when an attempt has ended."""

import errno
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.chain import ROOT, Chain, wait_for
from fakes.project import slow_while
from metrics_runs import MadeRun, only, read_samples

from ftslurm.cli import main
from ftslurm.errors import RunError
from ftslurm.files import write_json
from ftslurm.metrics import command, reading
from ftslurm.metrics.command import Keeper
from ftslurm.metrics.job_look import JobLooks
from ftslurm.metrics.reading import RunReader
from ftslurm.metrics.textfile import FIRST_LINE, KEPT_S, clear_old, require_folder
from ftslurm.run.acts import note_act


@pytest.fixture
def run(tmp_path):
    run = MadeRun(tmp_path)
    run.attempt(0, trained_to=25, stopped_at=3599)
    return run


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "textfiles"
    folder.mkdir()
    return folder


class Clock:
    """Time passes when somebody sleeps; `at` says what happens then, by second."""

    def __init__(self):
        self.now, self.slept, self.at = 0.0, [], {}

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        before, self.now = self.now, self.now + seconds
        for second, act in self.at.items():
            if before < second <= self.now:
                act()


def keeper(run, folder, clock, every_s=30.0):
    looks = JobLooks(clock=clock, ask=lambda root: False)
    reader = RunReader(run.layout, looks)
    return Keeper([reader], looks, folder, every_s, sleep=clock.sleep, clock=clock)


def told(folder):
    return read_samples((folder / "r1.prom").read_text())


def test_a_file_is_named_after_the_run_and_everybody_may_read_it(run, folder):
    assert main(["metrics", str(run.layout.root), "--textfile", str(folder)]) == 0
    (path,) = folder.iterdir()
    assert path.name == "r1.prom"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.read_bytes().startswith(FIRST_LINE + bytes(run.layout.root))
    assert only(told(folder), "run_training") == 1


def test_a_reader_sees_the_old_file_or_the_new_one(run, folder, monkeypatch):
    """Never the one that is being written: the collector takes each *.prom for a file."""
    seen = []
    replace = Path.replace

    def look(self, target):
        seen.append([path.name for path in folder.glob("*.prom")])
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    for _ in range(2):
        assert main(["metrics", str(run.layout.root), "--textfile", str(folder)]) == 0
    assert seen == [[], ["r1.prom"]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--every", "30"], "--textfile"),
        (["--every", "0", "--textfile", "."], "--every is 0"),
        (["--textfile", "no-such-folder"], "collector.textfile.directory"),
    ],
)
def test_wrong_use_is_refused_with_a_sentence(run, options, said, capsys):
    assert main(["metrics", str(run.layout.root), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_may_not_be_written_is_refused_with_a_sentence(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(RunError, match="mode 1777"):
        require_folder(folder)


def test_it_is_written_anew_each_interval_until_the_run_is_done(run, folder):
    clock = Clock()
    times = []
    clock.at[29] = lambda: times.append(only(told(folder), "metrics_timestamp_seconds"))
    clock.at[31] = lambda: times.append(only(told(folder), "metrics_timestamp_seconds"))
    clock.at[45] = lambda: write_json(run.layout.done, {"schema_version": 1})
    keeper(run, folder, clock).run()
    assert times[0] < times[1]
    assert only(told(folder), "run_finished") == 1


def test_the_end_of_an_attempt_is_told_at_once(run, folder):
    """The job leaves soon after, and nobody would take back that it trains."""
    clock = Clock()
    seen = []
    clock.at[10] = lambda: run.decide(1, 3599, action="requeued")
    clock.at[11.5] = lambda: seen.append(only(told(folder), "run_waiting"))
    clock.at[12] = lambda: seen.append(list(clock.slept)) or interrupt()
    keeper(run, folder, clock).run()
    assert seen[0] == 1
    assert max(seen[1]) <= command.LOOK_S


def test_the_last_word_does_not_wait_for_the_report(run, folder, monkeypatch):
    """A job's end kills whoever writes it: accounting may answer in seconds, or not at all."""
    clock, read, written = Clock(), [], []
    real = reading.read_report

    def report(*args, **named):
        read.append(clock.now)
        if len(read) > 1 and folder.exists():
            written.append(only(told(folder), "run_waiting"))
        return real(*args, **named)

    monkeypatch.setattr(reading, "read_report", report)
    clock.at[10] = lambda: run.decide(1, 3599, action="requeued")
    clock.at[12] = interrupt
    keeper(run, folder, clock).run()
    assert len(read) == 2 and 10 <= read[1] <= 10 + command.LOOK_S
    assert written == [1], "it was on the disk before the report was read"
    assert only(told(folder), "attempts_ended") is not None


def test_an_attempt_that_is_shorter_than_the_interval_is_told_of_too(run, folder):
    clock, seen = Clock(), []

    def look():
        seen.append((only(told(folder), "attempts_total"), only(told(folder), "run_needs_person")))

    clock.at[3] = lambda: run.decide(1, 3599)
    clock.at[5] = lambda: run.attempt(3600, trained_to=26)
    clock.at[5.5] = look
    clock.at[7] = lambda: run.decide(2, 3606, action="stop")
    clock.at[7.5] = look
    clock.at[8] = interrupt
    keeper(run, folder, clock).run()
    assert seen == [(2, 0), (2, 1)]


def test_a_run_that_is_done_is_told_at_once(run, folder):
    clock = Clock()
    clock.at[10] = lambda: write_json(run.layout.done, {"schema_version": 1})
    keeper(run, folder, clock).run()
    assert clock.now <= 10 + command.LOOK_S
    assert only(told(folder), "run_finished") == 1


def interrupt():
    raise KeyboardInterrupt


def test_interrupted_it_writes_a_last_time(run, folder):
    clock = Clock()

    def end():
        note_act(run.layout, "cancel", "cancelled", "12")
        interrupt()

    clock.at[5] = end
    keeper(run, folder, clock).run()
    assert only(told(folder), "run_active") == 0


def test_a_run_that_cannot_be_read_is_said_once_and_its_last_file_stays(run, folder, capsys):
    clock = Clock()
    hidden = run.layout.root.with_name("away")
    clock.at[1] = lambda: run.layout.root.rename(hidden)
    clock.at[95] = lambda: hidden.rename(run.layout.root)
    clock.at[130] = interrupt
    before = []
    clock.at[94] = lambda: before.append(only(told(folder), "metrics_timestamp_seconds"))
    keeper(run, folder, clock).run()
    assert capsys.readouterr().err.count("are not renewed") == 1
    assert only(told(folder), "metrics_timestamp_seconds") > before[0]


def test_what_cannot_be_written_is_tried_once_an_interval_and_once_for_each_change(
    run, folder, monkeypatch
):
    """A whole look at the run each time: not three a second because the folder is full."""
    clock, tried, real = Clock(), [], command._renew
    is_full = [False]

    def renew(reader, *args, **named):
        tried.append((clock.now, named["in_haste"]))
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(reader, *args, **named)

    monkeypatch.setattr(command, "_renew", renew)
    clock.at[10] = lambda: is_full.__setitem__(0, True)
    clock.at[100] = lambda: run.decide(1, 3599)
    clock.at[200] = lambda: run.attempt(3600, trained_to=26)
    clock.at[600] = interrupt
    keeper(run, folder, clock).run()
    assert len(tried) <= 600 / 30 + 6
    changes = [now for now, in_haste in tried[:-1] if in_haste]
    assert changes == [pytest.approx(at, abs=2 * command.LOOK_S) for at in (100, 200)]


def test_a_run_that_could_never_be_told_of_is_tried_once_an_interval(run, folder, monkeypatch):
    clock, tried = Clock(), []

    def renew(*args, **named):
        tried.append(clock.now)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "_renew", renew)
    clock.at[600] = interrupt
    keeper(run, folder, clock).run()
    assert len(tried) <= 600 / 30 + 2


def test_a_listing_that_is_stale_does_not_have_the_run_read_over_and_over(run, folder, monkeypatch):
    """The decision is there, and the story that is read still is the one without it."""
    clock, tried, real = Clock(), [], command._renew
    first = []

    def renew(reader, *args, **named):
        tried.append(clock.now)
        first[:1] = first[:1] or [real(reader, *args, **named)]
        return first[0]

    monkeypatch.setattr(command, "_renew", renew)
    clock.at[10] = lambda: run.decide(1, 3599)
    clock.at[300] = interrupt
    keeper(run, folder, clock).run()
    assert len(tried) <= 300 / 30 + 4


def test_a_file_system_that_is_away_for_a_moment_does_not_end_it(run, folder, monkeypatch):
    """Path.exists lets ESTALE, EIO and EACCES through."""
    clock, real, seen = Clock(), Path.exists, []

    def exists(path, **named):
        if 5 < clock.now < 8 and path.is_relative_to(run.layout.root):
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, **named)

    monkeypatch.setattr(Path, "exists", exists)
    clock.at[10] = lambda: run.decide(1, 3599, action="requeued")
    clock.at[11] = lambda: seen.append(only(told(folder), "run_waiting"))
    clock.at[12] = interrupt
    keeper(run, folder, clock).run()
    assert seen == [1]


def test_the_report_is_read_anew_where_something_has_changed_and_seldom_else(run, monkeypatch):
    read, clock = [], Clock()
    real = reading.read_report
    monkeypatch.setattr(reading, "read_report", lambda *a, **k: read.append(1) or real(*a, **k))
    reader = RunReader(run.layout, JobLooks(), clock=clock)
    counts = []
    for change in (None, None, lambda: run.decide(1, 3599), None, lambda: clock.sleep(301)):
        if change:
            change()
        reader.read()
        counts.append(len(read))
    assert counts == [1, 1, 2, 2, 3]


def test_a_report_that_takes_long_is_read_seldom(run, monkeypatch):
    clock, read = Clock(), []

    def slow(layout, now):
        read.append(clock.now)
        clock.sleep(20.0)
        return reading.Report(None, None, [])

    monkeypatch.setattr(reading, "read_report", slow)
    reader = RunReader(run.layout, JobLooks(), clock=clock)
    while clock.now < 2500:
        reader.read()
        clock.sleep(30.0)
    assert len(read) == 2 and read[1] >= 20.0 / reading.REPORT_SHARE


@pytest.mark.parametrize(("took_s", "times"), [(20.0, 3), (1.0, 14)])
def test_a_restart_has_a_long_report_read_anew_but_seldom(run, monkeypatch, took_s, times):
    clock, read, states = Clock(), [], iter(range(1000))
    story = reading.read_story

    def slow(layout, now):
        read.append(clock.now)
        clock.sleep(took_s)
        return reading.Report(None, None, [])

    def changes(layout, now):
        return replace(story(layout, now=now), state=f"{next(states)}")

    monkeypatch.setattr(reading, "read_report", slow)
    monkeypatch.setattr(reading, "read_story", changes)
    reader = RunReader(run.layout, JobLooks(), clock=clock)
    while clock.now < 400:
        reader.read()
        clock.sleep(30.0 - took_s)
    assert len(read) == times


def test_only_own_files_of_a_week_ago_are_cleared_away(run, folder):
    main(["metrics", str(run.layout.root), "--textfile", str(folder)])
    names = {"ours-old.prom": FIRST_LINE, "ours-new.prom": FIRST_LINE, "node.prom": b"# HELP up\n",
             "ours-old.txt": FIRST_LINE}  # fmt: skip
    now = time.time()
    for name, text in names.items():
        (folder / name).write_bytes(text)
        if "new" not in name:
            os.utime(folder / name, (now, now - KEPT_S - 60))
    (folder / "link.prom").symlink_to(folder / "ours-new.prom")
    clear_old(folder)
    left = {path.name for path in folder.iterdir()}
    assert left == {"r1.prom", "ours-new.prom", "node.prom", "ours-old.txt", "link.prom"}


def test_beside_a_run_that_trains_it_says_so_and_ends_with_the_run(tmp_path, folder):
    """The whole of it, with real ranks (without torch) and the real command."""
    chain = Chain(tmp_path / "project")
    held = tmp_path / "held"
    held.touch()
    more = ["steps=60", *slow_while(held, since=5)]
    run = chain.submit(*more, faults="eio@step:rank=1:step=17:attempt=1")
    root = run.layout.root
    path = folder / f"{root.name}.prom"
    argv = [sys.executable, "-m", "ftslurm", "metrics", root, "--textfile", folder, "--every", ".2"]
    process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)})
    seen = []

    def look():
        if path.exists():
            now = read_samples(path.read_text())
            seen.append((only(now, "run_training"), only(now, "step"), only(now, "attempts_total")))

    def shows_steps():
        look()
        return len({step for trains, step, _ in seen if trains}) > 2

    def is_over():
        look()
        return process.poll() is not None

    wait_for(shows_steps, run.says)
    held.unlink()
    wait_for(is_over, run.says)
    assert process.returncode == 0
    look()
    counts = [attempts for _, _, attempts in seen if attempts]
    assert counts == sorted(counts) and set(counts) == {1, 2}
    last = read_samples(path.read_text())
    assert (only(last, "run_finished"), only(last, "step")) == (1, 60)
    assert last["attempts_ended"] == [({"cause": "storage"}, 1.0)]
    assert only(last, "rto_seconds") > 0
