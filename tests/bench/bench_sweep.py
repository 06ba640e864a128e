"""A sweep of no-op tasks, submitted and followed by ours and by hydra-submitit-launcher.

The launchers run the same 12-line Hydra program, each from a venv with the same Hydra; beside them
`ftslurm submit -m` sweeps over its own conf/. `measure_submit` counts on fake Slurm commands what
it takes until everything is queued; `measure_on_cluster` runs fewer tasks to their end on a
throwaway cluster, with wrappers on PATH that count every call.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from lab import Lab

ROOT = Path(__file__).resolve().parents[2]
THEIRS = "hydra-submitit-launcher==1.2.0"
SUBMIT, LAUNCHER, RIVAL = "submit -m", "hydra/launcher=ftslurm", "hydra/launcher=submitit_slurm"
COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo")
TIMEOUT_S = 600.0
LONGEST_S = 1500.0

APP = """import hydra
from omegaconf import DictConfig


@hydra.main(config_path=None, config_name=None, version_base="1.2")
def app(cfg: DictConfig) -> int:
    return cfg.n


if __name__ == "__main__":
    app()
"""

# Our launcher asks scontrol what the site is like, theirs asks sacct when all is queued.
FAKE = """#!/bin/sh
echo "${0##*/}" >>"$CALLS"
case "${0##*/} $*" in
sbatch*--parsable*) echo 100;;
sbatch*) echo "Submitted batch job 100";;
"scontrol show config"*) cat "$CONFIG";;
*"show partition"*) echo "PartitionName=all Default=YES MaxTime=UNLIMITED PreemptMode=OFF";;
sacct*) touch "$QUEUED"; exec sleep 600;;
esac
"""
CONFIG = """SLURM_VERSION = 24.11.5
MaxArraySize = 10001
JobRequeue = 1
KillWait = 30 sec
PreemptType = preempt/none
"""

# A job inherits PATH, so what its batch script asks is counted too.
WRAPPER = """#!/bin/sh
echo "${SLURM_JOB_ID:+job:}${0##*/}" >>"$CALLS"
exec "$(PATH=$PLAIN command -v "${0##*/}")" "$@"
"""


@dataclass(frozen=True)
class Taken:
    """What one sweep has taken."""

    wall_s: float
    cpu_s: float
    """Of the submitting process and the commands it ran."""
    peak_mib: Optional[float]
    calls: Mapping[str, int]
    """Scheduler command -> how often."""

    def __str__(self) -> str:
        return f"{self.wall_s:.1f} s, CPU {self.cpu_s:.1f} s"


def make_rival(folder: Path) -> Path:
    """The python of a venv with their launcher."""
    venv = folder / "rival"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", THEIRS]
    constraints = ROOT / "constraints.txt"
    subprocess.run([*pip, f"--constraint={constraints}"], check=True, stdout=subprocess.DEVNULL)
    return venv / "bin" / "python"


def measure_submit(
    folder: Path, *, tasks: int, rival: Path, rounds: int, progress: Callable[[str], None]
) -> dict[str, list[Taken]]:
    """Until everything is queued, each once a round, beginning with another one each time: ours
    detach, theirs is ended at its first question for the tasks' states."""
    shared = ["-m", f"+n=range({tasks})"]
    ours = [sys.executable, "app.py", *shared, *ours_options()]
    native = [sys.executable, "-m", "ftslurm", "submit", "-m", "--detach", "cluster=slurm",
              "cluster.nodes=1", "cluster.tasks_per_node=1", "entry=rank:noop:main",
              f"seed=range({tasks})"]  # fmt: skip
    commands = {
        SUBMIT: native,
        LAUNCHER: [*ours, "hydra.launcher.detach=true"],
        RIVAL: [str(rival), "app.py", *shared, "hydra/launcher=submitit_slurm"],
    }
    found: dict[str, list[Taken]] = {name: [] for name in commands}
    names = list(commands)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            place = folder / f"queue-{number}-{names.index(name)}"
            found[name].append(_queue(commands[name], place))
        told = (f"{name} {found[name][-1]}" for name in names)
        progress(f"sweep: round {number + 1} of {rounds}: {'; '.join(told)}")
    return found


def _queue(argv: Sequence[str], place: Path) -> Taken:
    place.mkdir()
    (place / "app.py").write_text(APP)
    (place / "noop.py").write_text("def main() -> None:\n    pass\n")
    (place / "config.txt").write_text(CONFIG)
    environ = {
        **os.environ,
        **_with_commands(place, FAKE, os.environ["PATH"]),
        "PYTHONPATH": str(ROOT),
        "CONFIG": str(place / "config.txt"),
        "QUEUED": str(place / "queued"),
    }
    # Who waits for the device would else wait for what the one before has left to be written.
    os.sync()
    return _run(argv, place, environ, until=place / "queued")


def measure_on_cluster(lab: Lab, *, tasks: int) -> dict[str, list[Taken]]:
    """Followed to the end of all tasks, on a cluster of four nodes; once, as it takes minutes."""
    home = lab.home(lab.user)
    rival = make_rival(home)
    shared = ["-m", f"+n=range({tasks})"]
    commands = {
        LAUNCHER: [str(lab.python), "app.py", *shared, *ours_options()],
        RIVAL: [str(rival), "app.py", *shared, "hydra/launcher=submitit_slurm"],
    }
    found = {}
    for name, argv in commands.items():
        place = home / f"sweep-{len(found)}"
        lab.run_as(lab.user, ["mkdir", str(place)])
        (place / "app.py").write_text(APP)
        environ = {**_with_commands(place, WRAPPER, lab.environment["PATH"])}
        environ["PYTHONPATH"] = str(lab.checkout)
        (place / "calls").touch(mode=0o666)
        (place / "calls").chmod(0o666)
        before, began = os.times(), time.perf_counter()
        lab.run_as(lab.user, argv, env=environ, cwd=place, timeout_s=LONGEST_S)
        wall_s, after = time.perf_counter() - began, os.times()
        cpu_s = (after.children_user - before.children_user) + (
            after.children_system - before.children_system
        )
        calls = Counter((place / "calls").read_text().split())
        found[name] = [Taken(wall_s, cpu_s, None, calls)]
    return found


def ours_options() -> list[str]:
    return ["hydra/launcher=ftslurm", "hydra.launcher.cluster.nodes=1"]


def _with_commands(place: Path, script: str, plain: str) -> dict[str, str]:
    """PATH and what the commands on it need; a folder of theirs in `place`."""
    commands = place / "bin"
    commands.mkdir()
    for name in COMMANDS:
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    return {"PATH": f"{commands}:{plain}", "PLAIN": plain, "CALLS": str(place / "calls")}


def _run(argv: Sequence[str], place: Path, environ: Mapping[str, str], *, until: Path) -> Taken:
    """To its end, or until that file is there."""
    began = time.perf_counter()
    with (place / "said").open("wb") as said:
        process = subprocess.Popen(
            argv, cwd=place, env=environ, stdout=said, stderr=said, start_new_session=True
        )
    queued_s: Optional[float] = None
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        taken_s = time.perf_counter() - began
        if pid:
            break
        if queued_s is None and (until.exists() or taken_s > TIMEOUT_S):
            queued_s = taken_s
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.02)
    if not until.exists():
        text = (place / "said").read_text(errors="replace")
        assert os.waitstatus_to_exitcode(status) == 0, text[-3000:]
    # Their first sacct is where the submission is over.
    calls = [name for name in (place / "calls").read_text().split() if name != "sacct"]
    cpu_s, peak_mib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    return Taken(queued_s or taken_s, cpu_s, peak_mib, Counter(calls))


@dataclass(frozen=True)
class Row:
    """One figure of one of ours, against theirs."""

    what: str
    told: str
    """Ours / theirs: the median, with the range where there are several rounds."""
    ratios: list[float]
    """Round by round."""


def rows(found: Mapping[str, Sequence[Taken]], what: str) -> list[Row]:
    return [
        dataclasses.replace(row, what=f"{name}: {what}, {row.what}")
        for name in found
        if name != RIVAL
        for row in _compared(found[name], found[RIVAL])
    ]


def _compared(ours: Sequence[Taken], theirs: Sequence[Taken]) -> list[Row]:
    lines = [
        _row("wall", [one.wall_s for one in ours], [one.wall_s for one in theirs], "s"),
        _row("CPU", [one.cpu_s for one in ours], [one.cpu_s for one in theirs], "s"),
    ]
    peaks = [[one.peak_mib for one in side if one.peak_mib] for side in (ours, theirs)]
    if all(peaks):
        lines.append(_row("peak memory", *peaks, "MiB"))
    for where, by in (("", "by the submitter"), ("job:", "by the jobs")):
        mine, other = ([_counted(one, where) for one in side] for side in (ours, theirs))
        if any(mine) or any(other):
            ratios = [sum(a.values()) / max(1, sum(b.values())) for a, b in zip(mine, other)]
            told = f"{_named(mine)} / {_named(other)}"
            lines.append(Row(f"scheduler calls {by}", told, ratios))
    return lines


def _row(what: str, ours: Sequence[float], theirs: Sequence[float], unit: str) -> Row:
    told = f"{_spread(ours, unit)} / {_spread(theirs, unit)} {unit}"
    return Row(what, told, [mine / other for mine, other in zip(ours, theirs)])


def _spread(values: Sequence[float], unit: str) -> str:
    digits = 0 if unit == "MiB" else 1
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _counted(taken: Taken, where: str) -> dict[str, int]:
    return {
        name.removeprefix("job:"): count
        for name, count in taken.calls.items()
        if name.startswith("job:") == bool(where)
    }


def _named(rounds: Sequence[Mapping[str, int]]) -> str:
    """`1 sbatch + 3 scontrol`; `3 to 4 scontrol` where the rounds differ."""
    words = []
    for name in sorted({name for counts in rounds for name in counts}):
        counts = sorted({counts.get(name, 0) for counts in rounds})
        words.append(f"{' to '.join(map(str, (counts[0], *counts[1:][-1:])))} {name}")
    return " + ".join(words) or "none"
