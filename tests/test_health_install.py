"""Installing the nodes' own copy: again, half, twice at once, and where it must not be."""

import fcntl
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from node_copy import PYTHON, ROOT, call

from ftslurm.errors import RunError, UsageError
from ftslurm.health.settings import HealthSettings
from ftslurm.health.settings_file import read_settings, to_record

USER = 12345
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs what root runs")


@pytest.fixture(scope="module")
def installer():
    """slurm/install_node.py as a module."""
    spec = importlib.util.spec_from_file_location("install_node", ROOT / "slurm/install_node.py")
    module = sys.modules["install_node"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["install_node"]


@pytest.fixture
def prefix(tmp_path, installer):
    """An installation of this test's own."""
    prefix = tmp_path / "opt" / "ftslurm"
    installer.install(prefix, None, PYTHON)
    return prefix


def settings_of(prefix):
    settings, complaint = read_settings(prefix / "etc/health.json")
    assert not complaint
    return settings


def given(tmp_path, **values):
    path = tmp_path / "given.json"
    path.write_text(json.dumps({**to_record(HealthSettings()), **values}))
    return path


def releases(prefix):
    return sorted(path.name for path in (prefix / "releases").iterdir())


def test_an_upgrade_keeps_the_settings_unless_others_are_given(prefix, installer, tmp_path):
    assert settings_of(prefix) == HealthSettings()
    said = installer.install(prefix, given(tmp_path, mode="shadow"), PYTHON)
    assert said.endswith("mode shadow") and settings_of(prefix).mode == "shadow"
    assert installer.install(prefix, None, PYTHON).endswith("mode shadow")
    assert settings_of(prefix).mode == "shadow"
    # The release before stays for looks that run in it.
    assert len(releases(prefix)) == 2
    assert str((prefix / "lib").readlink()) in {f"releases/{name}" for name in releases(prefix)}


def test_a_look_that_runs_during_an_upgrade_keeps_its_own_modules(prefix, installer):
    start = prefix / "lib/ftslurm/health/start.py"
    code = (
        "import runpy, sys; sys.argv = ['x', 'probe', '--help']\n"
        f"start = runpy.run_path({str(start)!r})['start']\n"
        "try: start()\nexcept SystemExit: print(sys.modules['ftslurm.health.command'].__file__)"
    )
    before = (prefix / "lib").resolve()
    said = call(PYTHON, "-I", "-S", "-c", code).stdout
    assert said.splitlines()[-1] == str(before / "ftslurm/health/command.py")


@pytest.mark.parametrize("content", [b"{", b'{"schema_version": 1, "mode": "loud"}'])
def test_settings_that_are_not_right_change_nothing(prefix, installer, tmp_path, content):
    before = releases(prefix)
    path = tmp_path / "given.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="ftslurm health settings --out FILE"):
        installer.install(prefix, path, PYTHON)
    (prefix / "etc/health.json").write_bytes(content)  # those that are there
    with pytest.raises(UsageError, match="ftslurm health settings --out FILE"):
        installer.install(prefix, None, PYTHON)
    assert releases(prefix) == before


def test_an_installation_that_is_cut_off_leaves_the_old_one_or_the_new(
    prefix, installer, tmp_path, monkeypatch
):
    """It breaks at its first step that changes a name, then at the second, and so on to the end."""
    steps = ("replace", "rename", "symlink_to", "mkdir")
    original = {name: getattr(Path, name) for name in steps}
    path, finished, at = given(tmp_path, mode="shadow"), False, 0
    while not finished:
        at, left = at + 1, [at + 1]

        def breaking(name, left=left):
            def step(self, *arguments, **options):
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
                return original[name](self, *arguments, **options)

            return step

        for name in steps:
            monkeypatch.setattr(Path, name, breaking(name))
        for name in ("_compile", "os.sync"):  # their seconds are not the point
            monkeypatch.setattr(f"install_node.{name}", lambda *_: None)
        try:
            installer.install(prefix, path, PYTHON)
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.undo()
        works = call(prefix / "bin/ftslurm-health", "probe", "--help")
        assert works.returncode == 0, (at, works.stderr)
        assert settings_of(prefix).mode in ("drain", "shadow")
        for name in ("prolog.sh", "epilog.sh", "healthcheck.sh"):
            assert os.access(prefix / "site" / name, os.X_OK)
    assert at > 8 and settings_of(prefix).mode == "shadow"
    assert all(not name.startswith(".") for name in releases(prefix))
    assert len(releases(prefix)) == 2


def test_it_installs_from_a_wheel_as_well_which_has_slurm_inside_the_package(tmp_path):
    package = tmp_path / "site-packages" / "ftslurm"
    left_out = shutil.ignore_patterns("__pycache__", "cluster", "train")
    shutil.copytree(ROOT / "ftslurm", package, ignore=left_out)
    shutil.copytree(ROOT / "slurm", package / "slurm", ignore=left_out)
    done = call(PYTHON, "-I", "-S", package / "slurm/install_node.py", "--prefix", tmp_path / "opt")
    assert done.returncode == 0, done.stderr
    assert call(tmp_path / "opt/bin/ftslurm-health", "probe", "--help").returncode == 0


def test_two_installations_at_once_do_not_mix(prefix, installer):
    fd = os.open(prefix / "releases", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(RunError, match="another installation into .* is under way"):
        installer.install(prefix, None, PYTHON)
    os.close(fd)


def unsafe_places(folder):
    """(PREFIX, what is said of it)."""
    for name in ("open", "theirs", "full", "sticky", "half"):
        (folder / name).mkdir()
    (folder / "open").chmod(0o777)
    yield folder / "open" / "opt" / "ftslurm", "may be written by others than root (mode 0777)"
    yield folder / "open", "may be written by others than root"
    os.chown(folder / "theirs", USER, USER)
    yield folder / "theirs" / "ftslurm", f"belongs to user {USER}"
    yield folder / "theirs", f"belongs to user {USER}"
    (folder / "link").symlink_to(folder / "theirs")
    yield folder / "link" / "ftslurm", f"belongs to user {USER}"
    (folder / "sticky").chmod(0o1777)
    (folder / "sticky" / "ftslurm").symlink_to(folder / "full")
    os.lchown(folder / "sticky" / "ftslurm", USER, USER)
    yield folder / "sticky" / "ftslurm", f"belongs to user {USER}"
    (folder / "full" / "bin").mkdir()
    yield folder / "full", "holds something else; name a folder of its own"
    for name in ("releases", "bin"):
        (folder / "half" / name).mkdir()
    os.chown(folder / "half" / "bin", USER, USER)
    yield folder / "half", f"belongs to user {USER}"
    yield Path("opt/ftslurm"), "has to be an absolute path"
    yield folder / "full" / ".." / "x", "has to be an absolute path"
    yield Path("/"), "has to be an absolute path"


def test_a_prefix_that_others_could_change_is_refused_and_nothing_is_made(installer, tmp_path):
    for prefix, said in list(unsafe_places(tmp_path)):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UsageError) as caught:
            installer.install(prefix, None, PYTHON)
        assert said in str(caught.value), (prefix, caught.value)
        assert sorted(tmp_path.rglob("*")) == before, prefix


def test_an_interpreter_that_others_could_change_is_refused(installer, tmp_path):
    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / "python3").symlink_to(PYTHON.resolve())
    os.chown(folder, USER, USER)
    for python, said in (
        (folder / "python3", f"belongs to user {USER}"),
        (tmp_path / "none", "is no Python that runs"),
        (Path("/bin/true"), "is no Python that runs"),
    ):
        with pytest.raises(UsageError) as caught:
            installer.install(tmp_path / "opt", None, python)
        assert said in str(caught.value)
    assert not (tmp_path / "opt").exists()


def test_sources_that_others_could_change_are_not_installed(
    prefix, installer, tmp_path, monkeypatch
):
    sources = tmp_path / "checkout" / "ftslurm"
    unloaded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installer.PACKAGE / "health", sources / "health", ignore=unloaded)
    for name in installer.ALONE:
        shutil.copy(installer.PACKAGE / name, sources / name)
    monkeypatch.setattr(installer, "PACKAGE", sources)
    monkeypatch.delenv("SUDO_UID", raising=False)
    installer.install(prefix, None, PYTHON)
    before = releases(prefix)
    for place in (sources / "health/probe.py", sources / "health", sources.parent):
        place.chmod(place.stat().st_mode | 0o020)
        with pytest.raises(
            UsageError, match=f"must not install from `{place}`: .*others may write"
        ):
            installer.install(prefix, None, PYTHON)
        place.chmod(place.stat().st_mode & ~0o022)
    os.chown(sources / "files.py", USER, USER)
    with pytest.raises(UsageError, match=f"user {USER} or others"):
        installer.install(prefix, None, PYTHON)
    assert releases(prefix) == before
    monkeypatch.setenv("SUDO_UID", str(USER))
    installer.install(prefix, None, PYTHON)


@pytest.mark.parametrize("owner", [USER, None])
def test_a_slurm_conf_that_others_could_change_or_that_is_missing_is_refused(
    installer, tmp_path, monkeypatch, owner
):
    """It names plugins and scripts."""
    conf = tmp_path / "slurm.conf"
    if owner:
        conf.touch()
        os.chown(conf, owner, 0)
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(UsageError, match="root must not use `.*slurm.conf`"):
        installer.install(tmp_path / "opt", None, PYTHON)
    assert not (tmp_path / "opt").exists()


def test_a_copy_that_is_torn_takes_no_node_out_of_service(prefix):
    (prefix / "lib/ftslurm/health/probe.py").unlink()
    shutil.rmtree(prefix / "lib/ftslurm/health/__pycache__")
    done = call(prefix / "bin/ftslurm-health", "prolog")
    assert done.returncode == 3 and "No module named 'ftslurm.health.probe'" in done.stderr
    assert call(prefix / "site/prolog.sh").returncode == 0


def make(tmp_path, *arguments):
    argv = ["make", "--old-file=.venv/.complete", "install-node", f"PREFIX={tmp_path / 'opt'}",
            f"PY={sys.executable}", *arguments]  # fmt: skip
    done = call(*argv, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_make_installs_with_settings_of_conf_and_keeps_those_that_are_there(tmp_path):
    make(tmp_path, "ARGS=health=shadow health.gpus_per_node=8")
    settings = settings_of(tmp_path / "opt")
    assert (settings.mode, settings.gpus_per_node) == ("shadow", 8)
    assert [path.name for path in tmp_path.iterdir()] == ["opt"]
    assert "--settings" not in make(tmp_path, "--dry-run")
    assert "--settings" in make(tmp_path, "--dry-run", "ARGS=health=default")
    assert "--settings" in make(tmp_path, "--dry-run", f"PREFIX={tmp_path / 'other'}")
