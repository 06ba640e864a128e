"""`ftslurm report` against reportseff on the same rows of accounting: time, CPU, memory.

    python tests/bench/bench_report.py --rows 100000 300000 1000000 --rounds 5

Both ask the `sacct` of accounting_rows.py for every run of every job of all users, and print a line
for each job: reportseff its efficiency, report why its attempts ended, what it used and lost, and
it sums the fleet. Asked for are the 12 fields of the one and the 21 of the other. CPU time is that
of the tool without sacct's; wall time is all of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from accounting_rows import sacct  # noqa: E402
from pairs import Comparison, median_with_interval, run_in_turn  # noqa: E402

REPORTSEFF = "reportseff==2.10.3"
ROWS = 1_000_000
FIGURES = ("wall s", "CPU s", "peak MiB")
Figures = dict[str, dict[str, list[float]]]
"""Tool -> figure -> one value a round."""


def measure(
    folder: Path,
    *,
    rows: int,
    rounds: int,
    progress: Callable[[str], None],
    venv: Optional[Path] = None,
) -> list[Comparison]:
    """For `make bench`."""
    theirs = venv or make_rival(folder / "rival")
    found = figures_of(folder, rows=rows, rounds=rounds, venv=theirs, progress=progress)
    ours, others = found["ftslurm"], found["reportseff"]
    return [
        Comparison(
            f"report of {rows:,} rows, {what}", "reportseff 2.10.3", ours[what], others[what]
        )
        for what in FIGURES
    ]


def figures_of(
    folder: Path, *, rows: int, rounds: int, venv: Path, progress: Callable[[str], None]
) -> Figures:
    """Both print a line for each job, and as many."""
    place = folder / f"{rows}"
    environ = _with_fake_sacct(place, rows)
    argv = {
        "ftslurm": [sys.executable, "-m", "ftslurm", "report", "--all-users", "--csv",
                    "--since", "2020-01-01"],
        # It has no option for all runs of a job, and passes on what it is given.
        "reportseff": [str(venv / "bin" / "reportseff"), "--since", "2020-01-01", "--parsable",
                       "--extra-args", "--allusers -D"],
    }  # fmt: skip
    variants = {name: _timed(words, environ, place) for name, words in argv.items()}
    written = run_in_turn(variants, rounds=1, progress=lambda _: progress("rows written"))
    lines = {name: values["lines"][0] for name, values in written.items()}
    assert len(set(lines.values())) == 1, f"they tell of different jobs: {lines}"
    return run_in_turn(variants, rounds=rounds, progress=progress)


def make_rival(venv: Path) -> Path:
    """A venv with reportseff."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", REPORTSEFF]
    subprocess.run(pip, check=True, stdout=subprocess.DEVNULL)
    return venv


def _timed(
    argv: Sequence[str], environ: dict[str, str], folder: Path
) -> Callable[[], dict[str, float]]:
    def once() -> dict[str, float]:
        began = time.perf_counter()
        process = subprocess.Popen(
            argv, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None and process.stderr is not None
        lines = 0
        while chunk := process.stdout.read(1 << 20):
            lines += chunk.count(b"\n")
        said = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - began
        assert process.returncode in (0, 1), f"{argv} ended with {process.returncode}: {said}"
        assert lines > 100, f"{argv} printed {lines} lines: {said}"
        sacct_s = float((folder / "sacct-cpu-s").read_text())
        # The peak is of the largest single process, sacct among them.
        return {"wall s": wall_s, "CPU s": usage.ru_utime + usage.ru_stime - sacct_s,
                "peak MiB": usage.ru_maxrss / 1024, "lines": float(lines)}  # fmt: skip

    return once


def _with_fake_sacct(folder: Path, rows: int) -> dict[str, str]:
    """An environment whose commands of Slurm are this file."""
    commands = folder / "commands"
    commands.mkdir(parents=True)
    for name in ("sacct", "scontrol", "sacctmgr"):
        path = commands / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} --{name} "$@"\n')
        path.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "BENCH_ROWS": str(rows),
        "BENCH_FOLDER": str(folder),
    }


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="ftslurm-report-", dir=options.folder) as made:
        folder = Path(made)
        venv = options.venv or make_rival(folder / "rival")
        for rows in options.rows:
            found = figures_of(folder, rows=rows, rounds=options.rounds, venv=venv, progress=_say)
            for name, values in found.items():
                told = ", ".join(
                    f"{what} {statistics.median(values[what]):.4g}" for what in FIGURES
                )
                print(f"{rows:>10,} rows  {name:10} {told}", flush=True)
            for what in FIGURES:
                line = Comparison(what, "", found["ftslurm"][what], found["reportseff"][what])
                middle, low, high = median_with_interval(line.ratios)
                print(f"{'':17} {what}: ours/theirs {middle:.3f} (90 %: {low:.3f} to {high:.3f})")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[ROWS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the rows go; default: TMPDIR")
    parser.add_argument("--venv", type=Path, help="one that has reportseff")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sacct"]:
        sacct(sys.argv[2:])
    elif sys.argv[1:2] == ["--sacctmgr"]:
        pass  # no node was ever out of service
    elif sys.argv[1:2] == ["--scontrol"]:
        print("PartitionName=low MaxTime=UNLIMITED")
    else:
        main()
