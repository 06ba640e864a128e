"""`make bench`: every figure of the README's table, measured in pairs on this machine.

Prints a Markdown table with date and machine; --json FILE keeps the raw values too. Exit code 1
when a figure misses the goal that is stated for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "train"), str(HERE.parent / "cluster"),
                str(HERE.parent), str(HERE.parents[1])]  # fmt: skip
# Child processes and forked ranks import the benchmark's loops by name.
os.environ["OMP_NUM_THREADS"] = "1"

from pairs import Comparison, median_with_interval  # noqa: E402

if TYPE_CHECKING:
    from bench_sweep import Row
    from lab import Lab

PARTS = ("cold", "step", "checkpoint", "preempt", "sweep", "report")
MIB = 1 << 20
MOST_REPORTS, MOST_SWEEPS = 5, 3
"""Rounds of these."""
GRACE_S = 20.0
"""The lab's GraceTime of 15 s and KillWait of 5 s, which is where a preempted rank is killed."""


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    against: str
    figure: str
    interval: str
    seconds: str
    goal: str = ""
    met: Optional[bool] = None


def main() -> int:
    options = _options()
    comparisons: dict[str, list[Comparison]] = {}
    preempt_s: list[float] = []
    lines: list[Line] = []
    folder = Path(tempfile.mkdtemp(prefix="ftslurm-bench-", dir=options.folder))
    try:
        for part in options.only or PARTS:
            _say(f"{part}: measuring")
            if part == "sweep":
                lines += _measure_sweep(folder, options)
                continue
            if part == "report":
                comparisons[part] = _measure_report(folder, options)
                lines += [_report_line(comparison) for comparison in comparisons[part]]
                continue
            if part == "preempt":
                preempt_s = _measure_preempt(folder, options)
                lines.append(_preempt_line(preempt_s, options.size_mib))
                continue
            comparisons[part] = _measure(part, folder, options)
            lines += [_line(part, comparison) for comparison in comparisons[part]]
    finally:
        import shutil

        shutil.rmtree(folder)
    print(_table(lines, options))
    if options.json:
        raw = {part: [asdict(item) for item in found] for part, found in comparisons.items()}
        options.json.write_text(json.dumps({**raw, "preempt_s": preempt_s}, indent=1))
    return int(any(line.met is False for line in lines))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure ftslurm against what it replaces, in interleaved pairs.",
        epilog="examples: make bench    make bench ARGS='--only cold --rounds 31'",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of each comparison")
    parser.add_argument("--size-mib", type=int, default=1024, help="state of a rank")
    parser.add_argument("--tasks", type=int, default=1000, help="of a sweep on fake commands")
    parser.add_argument("--cluster-tasks", type=int, default=40, help="of one on a real cluster")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of accounting, for report")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: TMPDIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="raw values")
    return parser.parse_args()


def _measure(part: str, folder: Path, options: argparse.Namespace) -> list[Comparison]:
    if part == "cold":
        import bench_cold
        import launch

        from ftslurm.run.spec import RunSpec

        layout = launch.prepare(folder / "cold", RunSpec())
        attempt = launch.claim_attempt(layout)
        launch.log_path(layout, attempt, 0).write_text("a line\n")
        return bench_cold.measure(layout.root, rounds=2 * options.rounds, progress=_quiet)
    if part == "step":
        import bench_ranks

        return bench_ranks.measure_step(folder, rounds=8 * options.rounds, width=1024, batch=128)
    import bench_checkpoint

    return bench_checkpoint.measure(
        folder, size_bytes=options.size_mib * MIB, rounds=options.rounds, progress=_say
    )


def _measure_preempt(folder: Path, options: argparse.Namespace) -> list[float]:
    import bench_ranks

    return bench_ranks.measure_preempt(
        folder, rounds=options.rounds, size_bytes=options.size_mib * MIB, progress=_say
    )


def _measure_sweep(folder: Path, options: argparse.Namespace) -> list[Line]:
    """A round of a thousand tasks takes a minute and a half, the cluster's part another two."""
    import bench_sweep

    found = bench_sweep.measure_submit(
        folder,
        tasks=options.tasks,
        rival=bench_sweep.make_rival(folder),
        rounds=min(options.rounds, MOST_SWEEPS),
        progress=_say,
    )
    lines = _sweep_lines(bench_sweep.rows(found, f"queueing {options.tasks} no-op tasks"))
    try:
        with _lab() as lab:
            ended = bench_sweep.measure_on_cluster(lab, tasks=options.cluster_tasks)
    except OSError as error:
        _say(f"sweep: no cluster here ({error}), its lines are left out")
        return lines
    what = f"{options.cluster_tasks} no-op tasks to their end on Slurm"
    return lines + _sweep_lines(bench_sweep.rows(ended, what))


def _measure_report(folder: Path, options: argparse.Namespace) -> list[Comparison]:
    """A round of a million rows takes a minute."""
    import bench_report

    rounds = min(options.rounds, MOST_REPORTS)
    return bench_report.measure(folder / "report", rows=options.rows, rounds=rounds, progress=_say)


def _report_line(found: Comparison) -> Line:
    middle, low, high = median_with_interval(found.ratios)
    ours, theirs = statistics.median(found.ours_s), statistics.median(found.theirs_s)
    return Line(
        found.name, found.against, f"{middle:.3f}", f"{low:.3f} to {high:.3f}",
        f"{ours:.4g} / {theirs:.4g}", "< 1", middle < 1,
    )  # fmt: skip


@contextlib.contextmanager
def _lab() -> Iterator[Lab]:
    """A throwaway cluster; one that is up already is used and left up. OSError: there is none."""
    from lab import NUM_NODES, REPOSITORY, cluster
    from opening import open_lab

    was_up = cluster("status").returncode == 0
    started = cluster("up", f"--nodes={NUM_NODES}", f"--expose={REPOSITORY}")
    if started.returncode != 0:
        raise OSError((started.stderr or "it did not start").strip().splitlines()[-1])
    try:
        yield open_lab()
    finally:
        if not was_up:
            cluster("down")


def _sweep_lines(rows: list[Row]) -> list[Line]:
    goal, lines = 0.1, []
    for row in rows:
        middle, low, high = median_with_interval(row.ratios)
        spread = f"{low:.3f} to {high:.3f} (range of {len(row.ratios)})"
        line = Line(
            row.what, "hydra-submitit-launcher 1.2.0", f"{middle:.3f}",
            spread if len(row.ratios) > 1 else "once", row.told,
        )  # fmt: skip
        if row.what.endswith(("wall", "by the submitter")):
            line = replace(line, goal=f"<= {goal}", met=middle <= goal)
        lines.append(line)
    return lines


def _line(part: str, found: Comparison) -> Line:
    ours, theirs = statistics.median(found.ours_s), statistics.median(found.theirs_s)
    if part == "cold":
        middle, low, high = (1e3 * value for value in median_with_interval(found.differences_s))
        return Line(
            found.name, found.against, f"{middle:+.0f} ms", f"{low:+.0f} to {high:+.0f}",
            f"{ours:.3f} / {theirs:.3f}", "< +100 ms", middle < 100,
        )  # fmt: skip
    middle, low, high = median_with_interval(found.ratios)
    goal, met = "", None
    if part == "step":
        goal, met = "< 1.01", middle < 1.01
    return Line(
        found.name, found.against, f"{middle:.3f}", f"{low:.3f} to {high:.3f}",
        f"{ours:.3f} / {theirs:.3f}", goal, met,
    )  # fmt: skip


def _preempt_line(seconds: list[float], size_mib: int) -> Line:
    middle, low, high = median_with_interval(seconds)
    return Line(
        f"USR1 to COMMITTED, {size_mib} MiB a rank", f"a grace of {GRACE_S:.0f} s",
        f"{middle / GRACE_S:.3f}", f"{low / GRACE_S:.3f} to {high / GRACE_S:.3f}",
        f"{middle:.2f}", "< 0.25", middle / GRACE_S < 0.25,
    )  # fmt: skip


def _table(lines: list[Line], options: argparse.Namespace) -> str:
    where = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    head = [
        f"{time.strftime('%Y-%m-%d')}, {where}, Python {platform.python_version()}; "
        f"{options.rounds} rounds, state {options.size_mib} MiB, `make bench`",
        "",
        "| what | against | median | 90 % interval | seconds, ours / theirs | goal |",
        "|---|---|---|---|---|---|",
    ]
    rows = [
        f"| {line.what} | {line.against} | {line.figure} | {line.interval} | {line.seconds} | "
        f"{line.goal}{_verdict(line)} |"
        for line in lines
    ]
    return "\n".join(head + rows)


def _verdict(line: Line) -> str:
    return "" if line.met is None else (", met" if line.met else ", MISSED")


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _quiet(_text: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
