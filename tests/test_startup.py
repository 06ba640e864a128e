"""What a cold command may load: the standard library and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from ftslurm.cli import VERBS

ROOT = Path(__file__).resolve().parent.parent
COLD = [verb for verb in VERBS if verb not in ("submit", "run", "data")]
FOREIGN = (
    "torch", "numpy", "h5py", "hydra", "omegaconf", "submitit", "jinja2", "xxhash", "yaml",
    "asyncio", "importlib.metadata",
)  # fmt: skip


def loaded_by(code: str) -> set[str]:
    """Modules in sys.modules after `code` ran in a fresh interpreter without site hooks."""
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n")[-2].split())


@pytest.mark.parametrize("verb", COLD)
def test_a_cold_verb_loads_the_standard_library_only(verb: str) -> None:
    module = VERBS[verb][0].partition(":")[0]
    found = loaded_by(f"import ftslurm.cli, {module}").intersection(FOREIGN)
    assert not found


def test_status_loads_nothing_slow_that_it_does_not_use() -> None:
    # hashlib loads OpenSSL, uuid asks what platform this is, tempfile brings random along.
    slow = {"hashlib", "uuid", "tempfile", "subprocess", "socket", "ctypes", "logging"}
    assert not loaded_by("import ftslurm.run.status").intersection(slow)


def test_claim_loads_what_decides_only_when_a_job_may_go_on() -> None:
    found = loaded_by("import ftslurm.recovery.claim")
    assert not found.intersection({"ftslurm.recovery.successor", "ftslurm.scheduler.sbatch"})


def test_help_loads_no_room() -> None:
    code = "from ftslurm.cli import main\nmain(['--help'])"
    rooms = {name for name in loaded_by(code) if name.startswith("ftslurm.")}
    assert rooms == {"ftslurm.cli", "ftslurm.errors"}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_explains_itself_with_an_example(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ftslurm", verb, "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage: ftslurm" in done.stdout
    assert "example" in done.stdout.lower()


def test_an_unknown_verb_lists_the_known_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ftslurm", "sumbit"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no verb `sumbit`" in done.stderr and "submit" in done.stderr


def test_what_keeps_the_agents_loads_next_to_nothing() -> None:
    found = loaded_by("import ftslurm.agent.keep")
    assert not found.intersection({"typing", "subprocess", "dataclasses", "ftslurm.scheduler"})


def test_a_first_claim_loads_nothing_that_decides_what_follows_an_attempt() -> None:
    # What claim_attempt itself loads.
    code = "import ftslurm.recovery.claim, ftslurm.recovery.admission, ftslurm.recovery.allocation"
    decides = {"policy", "evidence", "next_job", "recover", "standstill"}
    assert not loaded_by(code).intersection(f"ftslurm.recovery.{name}" for name in decides)
