"""A rank crashes: how long to the next attempt's first step, with ranks forked and with cold ones.

    python tests/bench/bench_standby.py --rounds 5

Each round submits one run of either kind on this machine, kills a rank with SIGKILL some times
while it trains, and takes the parts from the run's own records. Prints medians, part by part.
"""

from __future__ import annotations

import argparse
import calendar
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from pairs import Comparison, median_with_interval, run_in_turn  # noqa: E402

from ftslurm.files import read_json  # noqa: E402
from ftslurm.run.attempts import read_attempt, read_events, read_progress  # noqa: E402
from ftslurm.run.layout import RunLayout  # noqa: E402
from ftslurm.scheduler import open_scheduler  # noqa: E402

DEADLINE_S = 120
PARTS = ("ranks gone", "decided", "claimed", "rank is python", "groups open", "restored",
         "first step")  # fmt: skip
TOTAL = "crash to first step"
_LOG_TIME = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)[.,](\d{3})")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="ftslurm-standby-", dir=options.folder) as folder:
        variants = {
            kind: _variant(Path(folder), kind == "standby", options) for kind in ("standby", "cold")
        }
        found = run_in_turn(variants, rounds=options.rounds, progress=_say)
    for kind, figures in found.items():
        print(f"{kind}: {len(figures[TOTAL]) * options.crashes} crashes, {options.ranks} ranks")
        for name, values in figures.items():
            unit = "MiB" if name.endswith("memory") else "s"
            middle, low, high = median_with_interval(values)
            print(f"  {name:<22} {middle:7.2f} {unit}  (90 %: {low:.2f} to {high:.2f})")
    pair = Comparison("standby", "cold", found["standby"][TOTAL], found["cold"][TOTAL])
    middle, low, high = median_with_interval(pair.ratios)
    print(f"paired ratio standby/cold: {middle:.2f} (90 %: {low:.2f} to {high:.2f}), "
          f"difference {statistics.median(pair.differences_s):+.2f} s")  # fmt: skip


class Trial:
    """One run on this machine."""

    def __init__(self, folder: Path, *, standby: bool, ranks: int) -> None:
        self._folder = folder
        self._environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
        }
        said = self._ftslurm(
            "submit", "cluster=local", f"cluster.tasks_per_node={ranks}", "parallel=fsdp",
            "steps=1000000", "checkpoint.interval_steps=5", "recovery.backoff_s=0",
            "recovery.max_failures=100", f"recovery.standby={str(standby).lower()}",
            f"runs_dir={folder}/runs", "--json",
        )  # fmt: skip
        record = json.loads(said)
        self.layout = RunLayout(Path(record["run_dir"]))
        self._job_id = record["job_id"]

    def crash(self, attempt: int) -> dict[str, float]:
        """Kill the last rank of a training attempt; seconds of each part up to the next step."""
        self._wait(lambda: self._step(attempt) > self._committed(attempt) > 0)
        victim = self._rank()
        crashed_at = time.time()
        os.kill(victim, signal.SIGKILL)
        self._wait(lambda: self._event(attempt + 1, "first_step") is not None)
        moments = [crashed_at, *self._moments(attempt)]
        parts = {name: after - before for name, before, after in zip(PARTS, moments, moments[1:])}
        return {**parts, TOTAL: moments[-1] - crashed_at}

    def wait_for_standby(self) -> dict[str, float]:
        """Its memory, once it is ready."""
        self._wait(lambda: self._standby_log() is not None)
        found = self._standby_log()
        assert found is not None
        return {"standby's memory": float(found)}

    def cancel(self) -> None:
        self._ftslurm("cancel", str(self.layout.root))
        scheduler = open_scheduler("local", run_dir=self.layout.root)
        self._wait(lambda: scheduler.job_state(self._job_id).is_ended)

    def _moments(self, attempt: int) -> list[float]:
        decided = read_json(self.layout.attempt(attempt).root / "decision.json")
        claimed = read_attempt(self.layout, attempt + 1)
        log = (self.layout.attempt(attempt + 1).logs / "rank-0.log").read_text().splitlines()
        stamps = [(line, _at(line)) for line in log]
        begun = next(at for line, at in stamps if at and "Starting with" in line)
        open_at = next(at for line, at in stamps if at and " rank 0 of " in line)
        last = [self._event(attempt + 1, kind) for kind in ("restored", "first_step")]
        gone = self._event(attempt, "ranks_ended")
        moments = [gone, decided["decided_at"], claimed.claimed_at, begun, open_at, *last]
        assert all(moments), moments
        return moments

    def _rank(self) -> int:
        """The last one's process: with a standby that forks it, one of its children."""
        mine = f"FTSLURM_RUN_DIR={self.layout.root}".encode()
        modules = {
            int(entry.name): _module(entry)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and mine in _words(entry / "environ")
        }
        return max(
            pid
            for pid, module in modules.items()
            if module == "ftslurm.submit.rank"
            or (module == "ftslurm.node.standby" and modules.get(_parent(pid)) == module)
        )

    def _event(self, attempt: int, kind: str) -> Optional[float]:
        layout = self.layout.attempt(attempt)
        events = read_events(layout) if layout.root.exists() else []
        return next((event["at"] for event in events if event["kind"] == kind), None)

    def _step(self, attempt: int) -> int:
        progress = read_progress(self.layout.attempt(attempt))
        return 0 if progress is None else progress.step

    def _committed(self, attempt: int) -> int:
        progress = read_progress(self.layout.attempt(attempt))
        return 0 if progress is None else progress.committed_step or 0

    def _standby_log(self) -> Optional[str]:
        for path in self.layout.submit.glob("*.*"):
            if path.suffix in (".out", ".err"):
                found = re.search(r"standby on .* ready .*, (\d+) MiB", path.read_text())
                if found:
                    return found[1]
        return None

    def _wait(self, look: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not look():
            assert time.monotonic() < deadline, self._says()
            time.sleep(0.05)

    def _says(self) -> str:
        logs = [*self.layout.submit.glob("*.out"), *self.layout.attempts.glob("*/logs/*-0.log")]
        return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in sorted(logs))

    def _ftslurm(self, *arguments: str) -> str:
        argv = [sys.executable, "-m", "ftslurm", *arguments]
        done = subprocess.run(
            argv, cwd=self._folder, env=self._environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def _variant(
    folder: Path, standby: bool, options: argparse.Namespace
) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        place = Path(tempfile.mkdtemp(dir=folder))
        trial = Trial(place, standby=standby, ranks=options.ranks)
        try:
            memory = trial.wait_for_standby() if standby else {}
            crashes = [trial.crash(number + 1) for number in range(options.crashes)]
        finally:
            trial.cancel()
        _say(f"  {'standby' if standby else 'cold'}: "
             + ", ".join(f"{crash[TOTAL]:.1f} s" for crash in crashes))  # fmt: skip
        names = crashes[0]
        return {
            name: statistics.median(crash[name] for crash in crashes) for name in names
        } | memory

    return measure


def _words(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().split(b"\0")
    except OSError:
        return []


def _module(process: Path) -> str:
    words = _words(process / "cmdline")
    return words[words.index(b"-m") + 1].decode() if b"-m" in words else ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _at(line: str) -> Optional[float]:
    found = _LOG_TIME.search(line)
    if found is None:
        return None
    text = found[1].replace(" ", "T")
    is_utc = "Z" in line.split()[0]
    moment = time.strptime(text, "%Y-%m-%dT%H:%M:%S")
    seconds = calendar.timegm(moment) if is_utc else time.mktime(moment)
    return seconds + int(found[2]) / 1000


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--crashes", type=int, default=2, help="of each run")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="on the file system to measure; default: /tmp")
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
