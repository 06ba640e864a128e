"""`ftslurm report` against reportseff on the same million rows of accounting: time, CPU, memory.

    python tests/bench/bench_report.py --rows 1000000 --rounds 5

Both ask a `sacct` on their PATH that answers with the rows a real 22.05 cluster has printed, again
and again under new numbers, users, nodes and times: each gets the fields and the delimiter it asks
for. reportseff lives in an environment of its own, made once from the package index.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from pairs import Comparison, median_with_interval, run_in_turn  # noqa: E402

from ftslurm.scheduler.job_table import FIELDS, at, known_fields  # noqa: E402

RECORDED = ROOT / "tests" / "data" / "slurm-22.05"
REPORTSEFF = "reportseff==2.10.3"
ROWS = 1_000_000
MARK = "\x1f"
_OTHERS = {
    "AllocCPUS": "4", "TotalCPU": "00:20.120", "Elapsed": "00:01:30", "Timelimit": "01:00:00",
    "ReqMem": "4000M", "MaxRSS": "81234K", "NTasks": "2", "AdminComment": "",
}  # fmt: skip
"""Of fields that were not recorded, which reportseff asks for."""
_NODE = re.compile(r"\d+")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="ftslurm-report-", dir=options.folder) as folder:
        figures = figures_of(
            Path(folder), rows=options.rows, rounds=options.rounds, venv=options.venv, progress=_say
        )
    for name, found in figures.items():
        told = ", ".join(f"{what} {statistics.median(all_):.4g}" for what, all_ in found.items())
        print(f"{name:12} {told}, {options.rows / statistics.median(found['wall s']):,.0f} rows/s")
    for line in comparisons(figures):
        middle, low, high = median_with_interval(line.ratios)
        print(f"{line.name}: ours/theirs {middle:.3f} (90 %: {low:.3f} to {high:.3f})")


def measure(
    folder: Path, *, rounds: int, progress: Callable[[str], None], rows: int = ROWS
) -> list[Comparison]:
    """For `make bench`."""
    return comparisons(figures_of(folder, rows=rows, rounds=rounds, venv=None, progress=progress))


def comparisons(figures: dict[str, dict[str, list[float]]]) -> list[Comparison]:
    ours, theirs = figures["ftslurm"], figures["reportseff"]
    return [
        Comparison(f"report, {what}", "reportseff 2.10.3", ours[what], theirs[what])
        for what in ("wall s", "CPU s", "peak MiB")
    ]


def figures_of(
    folder: Path,
    *,
    rows: int,
    rounds: int,
    venv: Optional[Path],
    progress: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Both print a line for each job."""
    theirs = venv or _reportseff(folder / "venv")
    environment = _with_fake_sacct(folder, rows)
    argv = {
        "ftslurm": [sys.executable, "-m", "ftslurm", "report", "--all-users", "--csv",
                    "--since", "2020-01-01"],
        "reportseff": [str(theirs / "bin" / "reportseff"), "--since", "2020-01-01", "--parsable"],
    }  # fmt: skip
    variants = {name: _timed(words, environment, folder) for name, words in argv.items()}
    run_in_turn(variants, rounds=1, progress=lambda _: progress("rows written"))
    return run_in_turn(variants, rounds=rounds, progress=progress)


def _timed(
    argv: Sequence[str], environment: dict[str, str], folder: Path
) -> Callable[[], dict[str, float]]:
    def once() -> dict[str, float]:
        began = time.perf_counter()
        process = subprocess.Popen(
            argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        lines = sum(chunk.count(b"\n") for chunk in iter(lambda: process.stdout.read(1 << 20), b""))  # type: ignore[union-attr]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - began
        assert process.returncode in (0, 1), f"{argv} ended with {process.returncode}"
        assert lines > 100, f"{argv} printed {lines} lines"
        # Of itself and of the sacct that it has waited for.
        return {
            "wall s": wall_s,
            "CPU s": usage.ru_utime + usage.ru_stime,
            "peak MiB": usage.ru_maxrss / 1024,
        }

    return once


def _reportseff(venv: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", REPORTSEFF]
    subprocess.run(pip, check=True)
    return venv


def _with_fake_sacct(folder: Path, rows: int) -> dict[str, str]:
    """An environment whose sacct and scontrol are this file."""
    commands = folder / "commands"
    commands.mkdir()
    for name in ("sacct", "scontrol"):
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


def sacct(words: Sequence[str]) -> None:
    if "--helpformat" in words:
        print((RECORDED / "helpformat.txt").read_text())
        return
    given = dict(word.partition("=")[::2] for word in words)
    names = given["--format"].split(",")
    seconds = os.environ.get("SLURM_TIME_FORMAT") == "%s"
    path = Path(os.environ["BENCH_FOLDER"]) / f"rows-{len(names)}-{names[-1]}-{seconds}"
    if not path.exists():
        with path.open("w") as stream:
            stream.writelines(_lines(names, int(os.environ["BENCH_ROWS"]), seconds=seconds))
    delimiter = given["--delimiter"].encode()
    end = delimiter + b"\n" if "--parsable" in words else b"\n"
    out = sys.stdout.buffer
    with path.open("rb") as stream, contextlib.suppress(BrokenPipeError):
        while chunk := stream.read(1 << 20):
            if end != b"\n":
                chunk = chunk.replace(b"\n", end)
            out.write(chunk.replace(MARK.encode(), delimiter))


def _lines(names: Sequence[str], count: int, *, seconds: bool) -> Iterator[str]:
    recorded = known_fields((RECORDED / "helpformat.txt").read_text(), FIELDS)
    assert recorded is not None
    rows = [
        dict(zip(recorded, line.split("^|^")))
        for line in (RECORDED / "sacct.txt").read_text().splitlines()
    ]
    most = max(int(re.split(r"[._]", row["JobID"])[0]) for row in rows)
    written, turn = 0, 0
    while True:
        for row in rows:
            if written == count:
                return
            yield MARK.join(_again(row, name, turn, most, seconds) for name in names) + "\n"
            written += 1
        turn += 1


def _again(row: dict[str, str], name: str, turn: int, most: int, seconds: bool) -> str:
    """A value of a recorded row, under a number, a user, a node and at a time of this turn's."""
    value = row.get(name, "")
    if name in _OTHERS:
        return "" if name == "NTasks" and "." not in row["JobID"] else _OTHERS[name]
    if name in ("JobID", "JobIDRaw"):
        number, dot, step = value.partition(".")
        return f"{int(number) + turn * most}{dot}{step}"
    if name == "User" and value:
        return f"{value}{turn % 97}"
    if name == "NodeList" and "[" not in value:
        return _NODE.sub(lambda found: str(int(found[0]) + turn % 500), value)
    if name in ("Submit", "Eligible", "Start", "End") and value[:4].isdigit():
        value = f"2026-{turn % 12 + 1:02}-{turn % 28 + 1:02}{value[10:]}"
        return f"{at(value):.0f}" if seconds else value
    return value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the rows go; default: TMPDIR")
    parser.add_argument("--venv", type=Path, help="one that has reportseff")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sacct"]:
        sacct(sys.argv[2:])
    elif sys.argv[1:2] == ["--scontrol"]:
        print("PartitionName=low MaxTime=UNLIMITED")
    else:
        main()
