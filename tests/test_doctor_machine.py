"""What this machine and a folder have for a run is tried, and each refusal is a line of its own."""

import errno
import json
import os
import resource
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftslurm.cli import main
from ftslurm.doctor import folder_checks
from ftslurm.doctor.folder_checks import LEFT_S, OWN, check_folder
from ftslurm.doctor.host_checks import check_host
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN
from ftslurm.doctor.mounts import check_mount
from ftslurm.doctor.room import Need, check_room
from ftslurm.run.mounts import Mount, mount_of


def test_a_good_folder_passes_every_trial_and_is_left_as_it_was(tmp_path):
    lines = list(check_folder(tmp_path, need=Need(1e6, 3), size_bytes=8 << 20))
    states = {one.name: one.state for one in lines}
    assert set(states.values()) <= {OK, WARN}  # a slow disk may be told
    for name in ("exclusive_create", "rename", "append", "modes", "room"):
        assert states[f"folder.{name}"] == OK
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_doctor_that_was_killed_is_taken_away_by_the_next_one(tmp_path):
    old, young, other = (tmp_path / f"{OWN}{name}" for name in ("old", "young", "other"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "claim-0").touch()
    an_hour_ago = time.time() - LEFT_S - 60
    os.utime(old, (an_hour_ago, an_hour_ago))
    os.utime(other, (an_hour_ago, an_hour_ago))
    if os.geteuid() == 0:
        os.chown(other, 12345, -1)
    assert len(list(check_folder(tmp_path, need=None, size_bytes=0))) == 8
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {young.name} | ({other.name} if os.geteuid() == 0 else set())


def test_a_folder_that_cannot_hold_the_checkpoints_fails(tmp_path):
    lines = list(check_folder(tmp_path, need=Need(1e18, 3), size_bytes=0))
    room = next(one for one in lines if one.name == "folder.room")
    assert room.state == FAIL
    assert "checkpoint.keep_last" in room.todo


def test_a_folder_that_nobody_can_write_to_fails_with_a_sentence(tmp_path):
    (line,) = check_folder(tmp_path / "none", need=None, size_bytes=0)
    assert (line.state, line.name) == (FAIL, "folder.writable")


@pytest.mark.parametrize("name", ["file", "file/runs", "dangling", "dangling/runs"])
def test_what_is_no_folder_is_no_place_for_runs(tmp_path, name, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("/nowhere/at/all")
    argv = ["doctor", "--here", "--write-gb", "0", "--runs", str(tmp_path / name)]
    assert main(argv) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert f"folder.writable          `{tmp_path / name.partition('/')[0]}`: " in line


def test_below_a_folder_that_is_closed_that_folder_is_named(tmp_path, monkeypatch):
    really = os.lstat

    def refused(path, **more):
        if "closed/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return really(path, **more)

    monkeypatch.setattr(os, "lstat", refused)
    (tmp_path / "closed").mkdir()
    assert folder_checks.nearest(tmp_path / "closed/runs/deeper") == tmp_path / "closed"


def test_a_file_system_that_lets_all_win_a_claim_is_found(tmp_path, monkeypatch):
    really = os.open

    def lenient(path, flags, *rest, **more):
        return really(path, flags & ~os.O_EXCL, *rest, **more)

    monkeypatch.setattr(os, "open", lenient)
    lines = list(check_folder(tmp_path, need=None, size_bytes=0))
    line = next(one for one in lines if one.name == "folder.exclusive_create")
    assert line.state == FAIL
    assert "8 did" in line.seen


def fake_disk(*, free_bytes=1 << 40, inodes=0, free_inodes=0):
    return SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_blocks=1 << 30,
                           f_files=inodes, f_favail=free_inodes)  # fmt: skip


@pytest.mark.parametrize(
    ("disk", "need", "state", "word"),
    [
        ({}, None, OK, "--state-gb"),
        ({}, Need(1e9, 3), OK, "needed for 3 checkpoints"),
        ({"free_bytes": 5 * 10**9}, Need(1e9, 3), FAIL, "5.000 GB free"),
        ({"inodes": 10**6, "free_inodes": 50_000}, None, WARN, "50000 inodes left"),
        ({"free_bytes": 9 * 10**8}, None, WARN, "0.900 GB free"),
        ({"inodes": 10**6, "free_inodes": 50_000}, Need(1e9, 3, 2000), OK, "for 8000 files"),
        ({"inodes": 10**6, "free_inodes": 9_000}, Need(1e9, 3, 2000), FAIL, "9000 inodes"),
        ({"inodes": 0, "free_inodes": 0}, Need(1e9, 3, 2000), OK, "free"),
    ],
)
def test_room_is_held_against_what_is_kept_in_bytes_and_in_files(disk, need, state, word):
    line = check_room(Path("/"), need, look=lambda _: fake_disk(**disk))
    assert (line.state, word in line.seen) == (state, True), line


def mounted(kind, *options, source="server:/home"):
    return Mount("/home", kind, source, ",".join(options))


@pytest.mark.parametrize(
    ("mount", "state", "word"),
    [
        (mounted("lustre", "rw", "flock"), OK, "lustre"),
        (mounted("nfs4", "rw", "hard", "acdirmin=30"), OK, "nfs4"),
        (mounted("nfs", "rw", "hard", "acdirmax=60"), OK, "nfs"),
        (mounted("ext4", "rw"), OK, "a disk of this machine"),
        (mounted("nfs4", "rw", "soft", "timeo=600"), WARN, "soft"),
        (mounted("nfs4", "rw", "softerr"), WARN, "softerr"),
        (mounted("nfs4", "rw", "hard", "acdirmax=600"), WARN, "acdirmax=600"),
        (mounted("nfs", "rw", "hard", "actimeo=3600"), WARN, "actimeo=3600"),
        (mounted("tmpfs", "rw"), WARN, "goes with its host"),
        (mounted("overlay", "rw"), WARN, "goes with its host"),
        (mounted("lustre", "ro"), FAIL, "read-only"),
        (mounted("fuse.s3fs", "rw"), FAIL, "object store"),
        (None, SKIPPED, "does not tell"),
    ],
)
def test_each_mount_option_that_stands_against_a_run_is_named(mount, state, word):
    line = check_mount(mount)
    assert (line.state, word in line.seen) == (state, True), line
    assert bool(line.todo) is (state in (WARN, FAIL))


def test_the_mount_of_a_folder_is_the_longest_and_of_two_the_later(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 8:2 / /sh\\040ared rw,nosuid shared:1 - nfs4 s:/x rw,hard,acdirmax=90\n"
        "3 1 8:3 / /sh\\040ared rw - lustre s:/y rw\n"
        "torn\n"
    )
    assert mount_of(Path("/sh ared/runs"), table).kind == "lustre"
    assert mount_of(Path("/other"), table).source == "/dev/a"
    assert mount_of(Path("/other"), tmp_path / "none") is None


def refuse_folders(fd, really=os.fsync):
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "Invalid argument")
    return really(fd)


def test_one_trial_that_is_refused_leaves_the_others_standing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse_folders)
    lines = list(check_folder(tmp_path, need=Need(1e6, 3), size_bytes=0))
    assert len(lines) == 8
    assert [one.name for one in lines if one.state == FAIL] == ["folder.fsync"]
    assert "Invalid argument" in next(one.seen for one in lines if one.state == FAIL)


def test_what_is_written_to_measure_leaves_most_of_the_room_and_takes_some_seconds(
    tmp_path, monkeypatch
):
    """A disk of 40 MB, and one on which each block takes 2 s."""
    written = []
    monkeypatch.setattr(
        folder_checks, "_rate", lambda _, block, count: written.append(count) or 1e9
    )
    monkeypatch.setattr(os, "statvfs", lambda _: fake_disk(free_bytes=40 << 20))
    folder_checks.write_rate(tmp_path, 1 << 30)
    assert written == [1, 1]  # 8 of 40 MiB
    monkeypatch.setattr(os, "statvfs", lambda _: fake_disk())
    monkeypatch.setattr(
        folder_checks, "_rate", lambda _, block, count: written.append(count) or 2e6
    )
    folder_checks.write_rate(tmp_path, 1 << 30)
    assert written[2:] == [1, 3]  # 16 of 20 MB
    folder_checks.write_rate(tmp_path, 1 << 22)
    assert written[4:] == [1]


def test_a_disk_on_which_no_file_can_be_made_is_not_blamed_for_its_claims(tmp_path, monkeypatch):
    really = os.open

    def full(path, flags, *rest, **more):
        if flags & os.O_CREAT and "claim" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    found = {one.name: one for one in check_folder(tmp_path, need=None, size_bytes=0)}
    line = found["folder.exclusive_create"]
    assert (line.state, line.todo) == (FAIL, "make room, or ask for quota")
    assert found["folder.rename"].state == OK


def test_a_disk_without_room_for_a_folder_is_told_as_full(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_checks.tempfile, "mkdtemp", full)
    (line,) = check_folder(tmp_path, need=None, size_bytes=0)
    assert (line.state, line.todo) == (FAIL, "make room, or ask for quota")


def test_a_quota_that_is_met_while_measuring_is_told_as_one(tmp_path, monkeypatch):
    def full(size):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "urandom", full)
    found = {one.name: one for one in check_folder(tmp_path, need=None, size_bytes=1 << 22)}
    assert found["folder.speed"].state == FAIL
    assert "quota" in found["folder.speed"].todo
    assert found["folder.rename"].state == OK


def host(environ=None, *, staged_bytes=None, is_node=True, root=Path("/")):
    lines = check_host(
        environ or {}, staged_bytes=staged_bytes, stop_signal="USR1", is_node=is_node, root=root
    )
    return {one.name: one for one in lines}


def test_a_host_without_room_for_what_a_save_stages_fails():
    assert host(staged_bytes=1e15)["host.memory"].state == FAIL
    assert host(staged_bytes=1.0)["host.memory"].state == OK


def test_shared_memory_is_judged_for_nccl_and_not_for_saves_which_are_staged_elsewhere(
    tmp_path, monkeypatch
):
    shm = fake_disk(free_bytes=64 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: shm)
    assert host(staged_bytes=1e15)["host.shared_memory"].state == WARN
    shm = fake_disk(free_bytes=8 << 30)
    assert host(staged_bytes=1e15)["host.shared_memory"].state == OK


def test_the_memory_of_a_login_node_is_not_judged():
    found = host(staged_bytes=1e15, is_node=False)
    for name in ("host.shared_memory", "host.memory"):
        assert found[name].state == SKIPPED
        assert "srun ftslurm doctor --here" in found[name].seen


@pytest.mark.parametrize(
    ("member", "files"),
    [
        ("0::/job/step", {"cgroup/job/memory.max": "4000000000", "cgroup/job/memory.current": "1",
                          "cgroup/job/step/memory.max": "max"}),
        ("5:cpu,memory:/job", {"cgroup/memory/job/memory.limit_in_bytes": "4000000000",
                               "cgroup/memory/job/memory.usage_in_bytes": "1",
                               "cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}),
    ],
)  # fmt: skip
def test_the_memory_of_a_job_is_that_of_its_cgroup(tmp_path, member, files):
    files = {f"sys/fs/{name}": text for name, text in files.items()}
    files["proc/self/cgroup"] = f"{member}\n"
    files["proc/meminfo"] = "MemAvailable: 64000000 kB\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    line = host(staged_bytes=5e9, root=tmp_path)["host.memory"]
    assert line.state == FAIL
    assert "4.0 GB of the job's memory free" in line.seen
    (tmp_path / "proc/self/cgroup").unlink()
    assert host(staged_bytes=5e9, root=tmp_path)["host.memory"].state == OK


def test_a_signal_that_nccl_takes_for_itself_fails():
    assert host({"NCCL_PROXY_DUMP_SIGNAL": "10"})["host.signal_clash"].state == FAIL
    assert host({"NCCL_PROXY_DUMP_SIGNAL": "12"})["host.signal_clash"].state == OK


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("NCCL_SOCKET_IFNAME", "ib7", WARN),
        ("NCCL_SOCKET_IFNAME", "ib", OK),
        ("NCCL_SOCKET_IFNAME", "ib0,mlx9", OK),
        ("NCCL_SOCKET_IFNAME", "^docker0,virbr0", OK),
        ("NCCL_SOCKET_IFNAME", "=eth0,eth7", OK),
        ("NCCL_SOCKET_IFNAME", "=eth,ib", WARN),
        ("GLOO_SOCKET_IFNAME", "eth0", OK),
        ("GLOO_SOCKET_IFNAME", "eth", WARN),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", WARN),
    ],
)
def test_an_interface_that_is_not_there_is_named(tmp_path, variable, value, state):
    for name in ("sys/class/net/eth0", "sys/class/net/ib0", "sys/class/net/lo"):
        (tmp_path / name).mkdir(parents=True)
    assert host({variable: value}, root=tmp_path)["host.interface"].state == state


def test_little_locked_memory_is_named_where_there_is_rdma(monkeypatch, tmp_path):
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert host(root=tmp_path)["host.locked_memory"].state == OK
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert host(root=tmp_path)["host.locked_memory"].state == WARN
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert host()["host.locked_memory"].state == OK


def test_the_verb_prints_lines_for_people_and_for_programs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--here", "--write-gb", "0"]) == 0
    text = capsys.readouterr().out
    assert "folder.exclusive_create" in text
    assert main(["doctor", "--here", "--write-gb", "0", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    names = [line["name"] for line in record["lines"]]
    assert all(name in text for name in names)
    assert main(["doctor", "--here", "--write-gb", "0", "--state-gb", "1e9"]) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nodes", "0"], "`0` is not above 0"),
        (["--keep", "1.5"], "`1.5` is no whole number"),
        (["--state-gb", "nan"], "`nan` is no number from 0 on"),
        (["--write-gb", "-1"], "`-1` is no number from 0 on"),
        (["--signal", "FOO"], "choose from"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused_with_a_sentence(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--here", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--here", "--partition", "gpu"], "--partition is of no use with --here"),
        (["--checklist", "--state-gb", "980"], "--state-gb is of no use with --checklist"),
        (["--checklist", "runs/a", "--keep", "5"], "--keep is of no use with --checklist"),
    ],
)
def test_an_option_that_nothing_is_done_with_is_refused(arguments, told, capsys):
    assert main(["doctor", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_an_object_store_is_no_folder_for_runs(capsys):
    assert main(["doctor", "--here", "--runs", "s3://bucket/runs"]) == 2
    assert "name a folder there" in capsys.readouterr().err


def test_without_slurm_the_verb_ends_with_3_and_says_what_was_not_looked_at(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor", "--write-gb", "0", "--state-gb", "1e-6"]) == 3
    text = capsys.readouterr().out
    assert "Slurm was not asked" in text
    assert "nothing of ftslurm writes to one" in text
    assert "6 not looked at" in text
