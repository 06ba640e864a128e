"""The README's commands work as they stand there, on a machine without Slurm."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ftslurm
from ftslurm.health.settings import HealthSettings
from ftslurm.run.spec import RecoverySpec

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SLURM = {"sbatch", "srun", "scontrol", "squeue", "sacct", "scancel", "sinfo"}
# Shorter than what a newcomer sees, which is some minutes.
SHORTER = "steps=80 checkpoint.interval_steps=20 eval_interval_steps=40"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every command line of the bash blocks, continued lines joined, comments off."""
    text = "".join(blocks("bash")).replace("\\\n", " ")
    return [" ".join(shlex.split(line, comments=True)) for line in text.splitlines() if line]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the environment already made."""
    copy = tmp_path_factory.mktemp("readme") / "ftslurm"
    # Also what tests beside these write meanwhile (.hypothesis, caches).
    left_out = shutil.ignore_patterns(".*", "runs", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    # Old enough for make to find nothing to set up: it would change the environment that runs us.
    for name in ("pyproject.toml", "constraints.txt", "slurm/setup-venv.sh"):
        os.utime(copy / name, (0, 0))
    (copy / ".venv").symlink_to(Path(sys.prefix))
    return copy


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A PATH with all programs of this machine but Slurm's, and `ftslurm`."""
    programs = tmp_path_factory.mktemp("bin")
    for folder in (Path(sys.prefix) / "bin", Path("/usr/bin"), Path("/bin")):
        for program in _programs(folder):
            link = programs / program.name
            if program.name not in SLURM and not link.is_symlink():
                link.symlink_to(program)
    return {"PATH": str(programs), "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}


def _programs(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if os.access(path, os.X_OK) and path.is_file())


def run(
    command: str, checkout: Path, environ: dict[str, str], *, timeout_s: float = 150
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_the_loop_shown_is_the_loop_tested() -> None:
    shown, _three_lines = sorted(blocks("python"), key=len, reverse=True)
    assert shown == (ROOT / "tests" / "example_loop.py").read_text()
    assert len(shown.splitlines()) <= 30


def test_the_three_lines_shown_are_what_ftslurm_offers() -> None:
    _loop, shown = sorted(blocks("python"), key=len, reverse=True)
    names = set(re.findall(r"ftslurm\.(\w+)\(", shown))
    assert names and all(callable(getattr(ftslurm, name)) for name in names)


def test_every_make_target_shown_exists_and_is_explained() -> None:
    explained = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {command.split()[1] for command in commands() if command.startswith("make ")}
    assert {"submit", "test", "cluster-up", "cluster-down"} <= shown <= explained


def test_every_verb_shown_is_one(checkout: Path, environ: dict[str, str]) -> None:
    shown = [command for command in commands() if command.startswith("ftslurm ")]
    assert shown
    for verb in {command.split()[1] for command in shown}:
        assert run(f"ftslurm {verb} --help", checkout, environ).returncode == 0


def test_the_dry_run_shown_prints_a_script_and_writes_nothing(
    checkout: Path, environ: dict[str, str]
) -> None:
    (command,) = [line for line in commands() if line.endswith("--dry-run")]
    before = sorted(path.name for path in checkout.iterdir())
    done = run(command, checkout, environ)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=4" in done.stdout and "srun" in done.stdout
    assert sorted(path.name for path in checkout.iterdir()) == before


def test_every_key_of_health_is_explained() -> None:
    told = (ROOT / "slurm" / "site" / "README.md").read_text()
    for key in dataclasses.fields(HealthSettings):
        assert f"`{key.name}`" in told, f"health.{key.name} is not in slurm/site/README.md"


def test_every_key_of_recovery_is_explained_with_its_default() -> None:
    rows = re.findall(r"^\| (`[a-z].*?) \| (.*?) \| .* \|$", README, re.MULTILINE)
    told = {name: default for keys, default in rows for name in re.findall(r"`([a-z_]+)", keys)}
    for key in dataclasses.fields(RecoverySpec):
        assert key.name in told, f"recovery.{key.name} is not in the README"
        if isinstance(key.default, (bool, int, float)):
            default = str(key.default).lower().removesuffix(".0")
            assert default in told[key.name].split(", "), key.name


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_make_submit_with_a_drill_ends_and_leaves_a_run_that_verifies(
    checkout: Path, environ: dict[str, str]
) -> None:
    (command,) = [line for line in commands() if "drill=true" in line]
    done = run(f"{command.rstrip()} ".replace("ARGS=drill=true", f"ARGS='drill=true {SHORTER}'"),
               checkout, environ, timeout_s=390)  # fmt: skip
    told = done.stdout
    assert done.returncode == 0, told + done.stderr
    assert "cluster=local, because there is no sbatch on PATH" in told
    assert "DRILL: sent USR1" in told
    assert re.search(r"attempt 2 goes on from step \d+", told)
    assert re.search(r"finished: 80 steps, 2 attempts", told)
    folder = re.findall(r"run directory: (\S+)", told)[-1]
    for verb in ("status", "verify"):
        shown = run(f"ftslurm {verb} {folder}", checkout, environ)
        assert shown.returncode == 0, shown.stdout + shown.stderr


def test_a_store_is_built_from_text_as_shown(checkout: Path, environ: dict[str, str]) -> None:
    (command,) = [line for line in commands() if line.startswith("ftslurm data build")]
    done = run(command.replace("TEXT...", "README.md ftslurm"), checkout, environ)
    assert done.returncode == 0, done.stderr
    assert (checkout / "OUT.h5").exists()
