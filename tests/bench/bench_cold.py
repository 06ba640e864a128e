"""What a cold command takes beyond bare Python: interleaved starts of both."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pairs import Comparison, run_in_turn

ROOT = Path(__file__).resolve().parents[2]
BARE = "python -c pass"


def measure(run_dir: Path, *, rounds: int, progress: Callable[[str], None]) -> list[Comparison]:
    """`run_dir`: a run for the verbs that read one."""
    commands = {
        "ftslurm --help": ["--help"],
        "ftslurm status RUN": ["status", str(run_dir)],
        "ftslurm logs RUN": ["logs", str(run_dir)],
        "ftslurm claim --help": ["claim", "--help"],
        "ftslurm recover --help": ["recover", "--help"],
    }
    variants = {BARE: _timed([sys.executable, "-c", "pass"])}
    for name, arguments in commands.items():
        variants[name] = _timed([sys.executable, "-m", "ftslurm", *arguments])
    run_in_turn(variants, rounds=1, progress=lambda _: progress("warming up"))
    found = run_in_turn(variants, rounds=rounds, progress=progress)
    return [Comparison(name, BARE, found[name]["s"], found[BARE]["s"]) for name in commands]


def _timed(argv: list[str]) -> Callable[[], dict[str, float]]:
    def once() -> dict[str, float]:
        began = time.perf_counter()
        subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        return {"s": time.perf_counter() - began}

    return once
