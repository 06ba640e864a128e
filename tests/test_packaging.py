"""The wheel by itself: built from the sdist, installed without torch, used from another folder."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fakes.project import Run, make_project, overrides

from ftslurm.errors import SpecError
from ftslurm.submit import compose

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("ftslurm", "conf", "slurm", "setup.py", "pyproject.toml", "README.md", "LICENSE")
BUILD_SDIST = "from setuptools.build_meta import build_sdist; build_sdist('.')"
WHERE = '\nimport ftslurm\nprint("ftslurm is", ftslurm.__file__, flush=True)\n'
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def run(*argv, cwd, env=None):
    done = subprocess.run(
        [*map(str, argv)], cwd=cwd, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build in the checkout leaves build/ there, and takes up what it finds
    in it."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(place, source / name)
    run(sys.executable, "-c", BUILD_SDIST, cwd=source)
    (sdist,) = source.glob("*.tar.gz")
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", sdist, cwd=source)
    (built,) = source.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A venv with the wheel and what it depends on, at our pins."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    options = ("--no-compile", "--constraint", ROOT / "constraints.txt")
    run(folder / "bin" / "python", *PIP, "install", *options, wheel, cwd=folder)
    return folder


@pytest.fixture
def ftslurm(environment, tmp_path, monkeypatch):
    """The installed command, in a folder that has nothing of the checkout and no Slurm on PATH."""
    folder = tmp_path / "project"
    folder.mkdir()
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sed", "env"):
        (tools / name).symlink_to(shutil.which(name))
    environ = {"PATH": str(tools), "HOME": str(folder)}

    def call(*arguments):
        return run(environment / "bin" / "ftslurm", *arguments, cwd=folder, env=environ)

    call.folder = folder
    return call


def test_a_wheel_holds_every_config_and_the_template_inside_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = [path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")]
    assert configs
    assert {f"ftslurm/{path}" for path in configs} <= names
    assert "ftslurm/slurm/train.sbatch.j2" in names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ftslurm").rglob("*.py")}
    # Hydra finds its plugins below a name of its own.
    place = "ftslurm/hydra_app/plugin/"
    assert {name.removeprefix(place) for name in modules} <= names
    assert "hydra_plugins/ftslurm_launcher/__init__.py" in names
    assert not any(name.startswith(place) for name in names)


def test_a_wheel_takes_no_name_in_site_packages_but_its_own(wheel):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ftslurm", "hydra_plugins"}
    assert not any("slurm/cluster/" in name for name in zipfile.ZipFile(wheel).namelist())


FIND_LAUNCHER = """
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
print(*(found.__name__ for found in Plugins.instance().discover(Launcher)))
"""


def test_an_installed_wheel_is_known_to_hydra(environment, tmp_path):
    found = run(environment / "bin" / "python", "-c", FIND_LAUNCHER, cwd=tmp_path)
    assert "FtslurmLauncher" in found.split()


def test_a_checkout_that_is_installed_is_known_to_hydra(tmp_path):
    assert "FtslurmLauncher" in run(sys.executable, "-c", FIND_LAUNCHER, cwd=tmp_path).split()


def test_an_installed_wheel_is_known_to_submitit(environment, tmp_path):
    code = "from submitit.core import plugins; print(*plugins.get_executors())"
    assert "ftslurm" in run(environment / "bin" / "python", "-c", code, cwd=tmp_path).split()


def test_an_installed_wheel_explains_itself(ftslurm):
    assert "submit" in ftslurm("--help")
    assert ftslurm("--version").strip()


@pytest.fixture
def other_conf(environment):
    """Somebody else's top-level package of the name, in the same environment."""
    (packages,) = (environment / "lib").glob("python*/site-packages")
    folder = packages / "conf"
    folder.mkdir()
    (folder / "config.yaml").write_text("theirs: true\n")
    yield
    shutil.rmtree(folder)


def test_a_job_for_slurm_is_planned_from_an_installed_wheel(ftslurm, other_conf):
    (ftslurm.folder / "conf").mkdir()
    (ftslurm.folder / "conf" / "config.yaml").write_text("mine: true\n")
    given = ("experiment=gpt_fsdp", "cluster=slurm", "cluster.nodes=2", "cluster.partition=gpu")
    said = ftslurm("submit", *given, "--dry-run")
    assert "#SBATCH --nodes=2" in said and "--partition=gpu" in said
    assert sorted(path.name for path in ftslurm.folder.iterdir()) == ["conf"]


def test_a_run_from_an_installed_wheel_takes_the_package_along_and_finishes(ftslurm):
    source = make_project(ftslurm.folder) / "tests" / "fakes" / "rank.py"
    source.write_text(source.read_text() + WHERE)
    given = overrides(steps=6, interval=3, step_s=0.01, more=["cluster=local"])
    ftslurm("submit", *given, "--wait")
    (root,) = (ftslurm.folder / "runs").iterdir()
    run_of = Run(root)
    assert run_of.decisions() == ["done"], run_of.says()
    package = root / "code" / "ftslurm"
    logs = [path.read_text() for path in run_of.layout.attempt(1).logs.iterdir()]
    assert logs and all(f"ftslurm is {package}/__init__.py" in text for text in logs), logs
    # As whole as what was installed: it could be submitted from.
    assert (package / "conf" / "config.yaml").is_file()
    assert "done" in ftslurm("status", root)
    assert "step 6" in ftslurm("verify", root)


def test_an_installation_without_configs_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(compose, "conf_folder", lambda: tmp_path)
    with pytest.raises(SpecError, match="is not whole; install its wheel again"):
        compose.compose([])
