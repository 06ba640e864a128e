"""A rank's heartbeat is cheap, never torn, and tells own work from waiting."""

import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import astuple
from pathlib import Path

import pytest

from ftslurm.agent.report import from_row
from ftslurm.run import heartbeat
from ftslurm.run.heartbeat import (
    RankView,
    beats_folder,
    dump_signal,
    is_private,
    read_notes,
    read_views,
)
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment

NODE = "n1"


def environment(rank: int = 0, node: str = NODE) -> RankEnvironment:
    return RankEnvironment(Path("/run"), 3, rank, 4, rank, 4, node, 0, "127.0.0.1", 1)


def opened(tmp_path: Path, rank: int = 0, node: str = NODE) -> "tuple[Pulse, Path]":
    environ = {"FTSLURM_BEATS": str(tmp_path / "beats")}
    folder = beats_folder(environ, 3)
    assert folder is not None
    return Pulse.open(environment(rank, node), environ), folder


def only_view(folder: Path) -> RankView:
    (view,) = read_views(folder, NODE)
    return view


def test_a_rank_is_seen_in_each_of_its_phases(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    view = only_view(folder)
    assert (view.rank, view.attempt, view.pid, view.phase) == (0, 3, os.getpid(), "starting")
    assert view.alive and view.proc_state in "RS"
    assert (view.usual_step_s, view.step_wall_s, view.collective_seq) == (0.0, 0.0, 0)
    pulse.phase("restoring")
    assert only_view(folder).phase == "restoring"
    pulse.restored(40)
    assert (only_view(folder).phase, only_view(folder).step) == ("compiling", 40)
    pulse.step_begins()
    pulse.step_ended(41)
    assert (only_view(folder).phase, only_view(folder).step) == ("training", 41)
    with pulse.aside("saving"):
        assert only_view(folder).phase == "saving"
    assert only_view(folder).phase == "training"
    pulse.phase("leaving")
    time.sleep(0.05)
    assert only_view(folder).phase_age_s >= 0.05 <= only_view(folder).age_s
    other, _ = opened(tmp_path, 1)
    pulse.remove()
    assert [view.rank for view in read_views(folder, NODE)] == [1]
    other.remove()
    assert not folder.parent.exists(), "the last one gives the memory back"


def test_waiting_and_evaluating_are_no_own_work(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    pulse.measure_over(4)
    for step in range(1, 6):
        pulse.step_begins()
        deadline = time.thread_time() + 0.02
        while time.thread_time() < deadline:
            pass
        with pulse.collective("all_reduce f32[4]"):
            time.sleep(0.06)
        with pulse.aside("evaluating"), pulse.collective("sum"):
            time.sleep(0.03)
        pulse.step_ended(step)
    view = only_view(folder)
    assert view.step_wall_s >= 0.075
    assert view.step_wall_s - view.step_own_s >= 0.055
    assert 0.015 <= view.step_cpu_s <= view.step_own_s + 0.005, "evaluation is taken off once"
    assert view.usual_step_s >= 0.075
    assert view.window_own_s < view.window_wall_s - 0.05


def test_one_long_step_does_not_change_what_is_usual(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    for step in range(1, 30):
        pulse.step_begins()
        pulse.step_ended(step, own_s=9.0 if step == 29 else 0.5)
    view = only_view(folder)
    assert view.step_own_s == 9.0 and view.window_own_s == 0.5
    assert view.usual_step_s < 0.01


def test_what_another_thread_waits_for_is_not_the_steps(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    pulse.step_begins()
    thread = threading.Thread(target=pulse.waited, args=(100.0,))
    thread.start()
    thread.join()
    pulse.step_ended(1)
    view = only_view(folder)
    assert view.step_own_s == pytest.approx(view.step_wall_s)


def test_a_collective_on_its_way_is_told_from_one_that_is_waited_for(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    first = pulse.enter("all_gather f32[8]")
    second = pulse.enter("reduce_scatter f32[8]")
    view = only_view(folder)
    assert (view.collective_seq, view.in_collective) == (second, False)
    with pulse.waiting(first):
        view = only_view(folder)
        assert (view.collective, view.in_collective) == ("all_gather f32[8]", True)
    pulse.leave(second)
    pulse.leave(second)
    view = only_view(folder)
    assert (view.collective, view.in_collective) == ("reduce_scatter f32[8]", False)
    assert all(note.inside_s is not None for note in read_notes(folder, 0))


def test_the_newest_collectives_are_kept_and_the_open_one_shows(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    for number in range(heartbeat.RING + 8):
        with pulse.collective(f"op {number}"):
            pass
    stuck = pulse.enter("the last " + "x" * 100)
    notes = read_notes(folder, 0)
    assert [note.seq for note in notes] == list(range(stuck - heartbeat.RING + 1, stuck + 1))
    assert notes[-1].inside_s is None and notes[-1].name.startswith("the last xxx")
    assert all(note.inside_s is not None for note in notes[:-1])
    assert notes[-2].name == f"op {stuck - 2}"
    assert read_notes(folder, 1) == []


def test_ranks_of_other_nodes_in_the_same_memory_are_left_out(tmp_path: Path) -> None:
    opened(tmp_path, 0)
    _, folder = opened(tmp_path, 1, node="n2")
    assert [view.rank for view in read_views(folder, NODE)] == [0]
    assert [view.rank for view in read_views(folder, "n2")] == [1]
    assert read_views(folder / "nothing", NODE) == []


def test_a_foreign_or_torn_file_is_no_rank(tmp_path: Path) -> None:
    _, folder = opened(tmp_path)
    (folder / "rank-00001").write_bytes(b"FTSB")
    (folder / "rank-00002").write_bytes(b"x" * heartbeat.SIZE_BYTES)
    (folder / "rank-00003").symlink_to(folder / "rank-00000")
    assert [view.rank for view in read_views(folder, NODE)] == [0]


def test_a_pipe_or_a_phase_of_another_version_hides_no_other_rank(tmp_path: Path) -> None:
    _, folder = opened(tmp_path)
    opened(tmp_path, 1)
    os.mkfifo(folder / "rank-00002")
    data = bytearray((folder / "rank-00001").read_bytes())
    for place in (heartbeat.PROGRESS_AT, heartbeat.PROGRESS_AT + heartbeat.SLOT):
        struct.pack_into("=Q", data, place + 8, 99)
    (folder / "rank-00001").write_bytes(data)
    assert [view.rank for view in read_views(folder, NODE)] == [0]


def test_nothing_that_another_user_has_laid_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may make the folder in /dev/shm first, and name a process of ours as a rank."""
    pulse, folder = opened(tmp_path)
    pulse.dumps_on(37)
    pulse.leave(pulse.enter("op"))
    assert (dump_signal(folder, 0), len(read_notes(folder, 0))) == (37, 1)
    own = os.getuid()
    monkeypatch.setattr(heartbeat.os, "getuid", lambda: own + 1)
    assert read_views(folder, NODE) == []
    assert (dump_signal(folder, 0), read_notes(folder, 0)) == (0, [])
    assert not is_private(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file away")
@pytest.mark.parametrize("theirs", ["file", "folder", "parent"])
def test_a_file_or_folder_of_another_users_is_no_rank(tmp_path: Path, theirs: str) -> None:
    _, folder = opened(tmp_path)
    path = {"file": folder / "rank-00000", "folder": folder, "parent": folder.parent}[theirs]
    os.chown(path, 65534, 65534)
    assert read_views(folder, NODE) == []


def test_a_name_that_is_no_text_costs_neither_the_rank_nor_its_readers(tmp_path: Path) -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes(b"\xff) \xfe(")
        pulse, folder = opened(tmp_path)
        assert pulse.path is not None and only_view(folder).alive
    finally:
        name.write_bytes(before)


def test_whatever_keeps_a_rank_from_its_heartbeat_it_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "start_ticks", lambda pid: [][0])
    pulse, _ = opened(tmp_path)
    pulse.phase("training")
    assert pulse.path is None and "has no heartbeat" in capsys.readouterr().err


def test_runs_that_share_a_folder_do_not_share_their_beats(tmp_path: Path) -> None:
    folders = [
        beats_folder({"FTSLURM_BEATS": str(tmp_path), "SLURM_JOB_ID": job}, 2) for job in ("7", "8")
    ]
    assert folders[0] == tmp_path / f"ftslurm-{os.getuid()}-7" / "attempt-0002" != folders[1]


def test_the_pipe_that_torch_makes_for_nccl_is_not_left_behind(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    os.mkfifo(f"{heartbeat.nccl_pipe_stem(folder)}0.pipe")
    pulse.remove()
    assert not folder.exists()


def test_what_is_told_later_changes_nothing_else_of_a_rank(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    before = only_view(folder)
    pulse.dumps_on(37)
    pulse.devices_wait("GPU-00000000-0000-4000-8000-000000000001")
    after = only_view(folder)
    assert (before.devices_wait, after.devices_wait, dump_signal(folder, 0)) == (False, True, 37)
    assert (after.pid, after.start_ticks, after.node) == (before.pid, before.start_ticks, NODE)
    assert (before.gpu, after.gpu) == ("", "GPU-00000000-0000-4000-8000-000000000001")


def test_only_a_compilation_after_the_first_step_is_no_part_of_it(tmp_path: Path) -> None:
    pulse, folder = opened(tmp_path)
    pulse.restored(0)
    walls_s = []
    for step in (1, 2):
        pulse.step_begins()
        with pulse.aside("compiling"):
            time.sleep(0.5)
        pulse.step_ended(step)
        walls_s.append(only_view(folder).step_wall_s)
    assert walls_s[0] >= 0.5 > walls_s[1]
    assert only_view(folder).phase == "training"


def test_outside_of_a_job_nobody_beats_and_all_goes_on() -> None:
    assert beats_folder({}, 1) is None
    assert beats_folder({"SLURM_JOB_ID": "local-7"}, 1) is None
    named = Path(f"/dev/shm/ftslurm-{os.getuid()}-77/attempt-0002")
    assert beats_folder({"SLURM_JOB_ID": "77"}, 2) == named
    pulse = Pulse.open(environment(), {})
    pulse.step_begins()
    pulse.step_ended(1)
    assert pulse.path is None
    pulse.remove()


def test_where_no_file_can_be_made_the_rank_trains_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beats").write_text("in the way")
    pulse, folder = opened(tmp_path)
    pulse.phase("training")
    assert read_views(folder, NODE) == []
    assert "rank 0 has no heartbeat" in capsys.readouterr().err


def test_a_folder_that_somebody_else_has_laid_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "beats").symlink_to(tmp_path / "theirs")
    pulse, _ = opened(tmp_path)
    assert pulse.path is None
    assert list((tmp_path / "theirs").iterdir()) == []


BEATING = """
    import sys, time
    from pathlib import Path
    from ftslurm.run.pulse import Pulse
    from ftslurm.run.rank import RankEnvironment
    environ = {"FTSLURM_BEATS": sys.argv[1]}
    env = RankEnvironment(Path("/run"), 3, 0, 4, 0, 4, "n1", 0, "127.0.0.1", 1)
    pulse = Pulse.open(env, environ)
    print("open", flush=True)
    step = 0
    while True:
        step += 1
        pulse.step_begins()
        seq = pulse.enter(f"op {step}")
        pulse.leave(seq)
        pulse.step_ended(step, own_s=float(step))
"""


@pytest.fixture
def beating(tmp_path: Path):
    argv = [sys.executable, "-c", textwrap.dedent(BEATING), str(tmp_path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"open\n"
    yield process, tmp_path / "attempt-0003"
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_beat_is_never_read_by_halves(beating) -> None:
    _, folder = beating
    steps = set()
    until = time.monotonic() + 120.0
    while len(steps) < 200 and time.monotonic() < until:
        view = only_view(folder)
        # `own_s` is the number of the step and the fifth field after it.
        assert view.step_own_s == view.step
        assert view.collective in ("", f"op {view.collective_seq}")
        steps.add(view.step)
    assert len(steps) == 200


def test_a_rank_stopped_in_the_midst_of_a_beat_is_seen_as_of_the_beat_before(
    tmp_path: Path,
) -> None:
    pulse, folder = opened(tmp_path)
    for step in (1, 2):
        pulse.step_begins()
        pulse.step_ended(step, own_s=float(step))
    # The next beat gets as far as its number, its phase and its step.
    beats = pulse._beats + 1
    place = heartbeat.PROGRESS_AT + heartbeat.SLOT * (beats & 1)
    struct.pack_into("=QQq", pulse._memory, place, beats, 5, 99)
    view = only_view(folder)
    assert (view.step, view.step_own_s, view.phase) == (2, 2.0, "training")


def test_a_stopped_and_a_dead_rank_are_told(beating) -> None:
    process, folder = beating
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    time.sleep(0.1)
    view = only_view(folder)
    assert (view.proc_state, view.alive) == ("T", True)
    assert view.age_s > 0.05
    process.kill()
    process.wait()
    view = only_view(folder)
    assert (view.proc_state, view.alive) == ("", False)


def test_another_process_with_the_same_number_is_not_the_rank(tmp_path: Path) -> None:
    _, folder = opened(tmp_path)
    view = only_view(folder)
    assert heartbeat.process_state(view.pid, view.start_ticks) != ""
    assert heartbeat.process_state(view.pid, view.start_ticks + 1) == ""


def test_a_rank_whose_number_is_a_containers_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = opened(tmp_path)
    own = heartbeat.pid_namespace()
    assert own > 0
    monkeypatch.setattr(heartbeat, "pid_namespace", lambda: own + 1)
    view = only_view(folder)
    assert (view.alive, view.proc_state) == (True, "?")


def test_a_view_that_has_travelled_is_as_much_older(tmp_path: Path) -> None:
    _, folder = opened(tmp_path)
    view = only_view(folder)
    later = from_row(astuple(view), 5.0)
    assert later.age_s == view.age_s + 5.0 and later.step_age_s == view.step_age_s + 5.0
    assert later.step == view.step and later.step_wall_s == view.step_wall_s


def test_a_step_costs_less_than_twenty_microseconds(tmp_path: Path) -> None:
    pulse, _ = opened(tmp_path)
    per_step_us = []
    for _ in range(100):
        began_at = time.thread_time()
        for step in range(100):
            pulse.step_begins()
            with pulse.collective("all_reduce f32[1000]"):
                pass
            pulse.step_ended(step)
        per_step_us.append((time.thread_time() - began_at) * 1e4)
    print(f"a step and one collective: {min(per_step_us):.1f} us")
    assert min(per_step_us) < 20
