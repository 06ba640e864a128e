"""`python -m ftslurm.node.preflight COMMAND...`: tries the nodes before the ranks of an attempt.

Started by the batch script where `claim` has asked for it. COMMAND starts one rank of the preflight
in the place of each rank; what they say is heard, judged and left in attempts/N/preflight.json. It
always ends by its deadline, and by exit code says what the batch script is to do: PREFLIGHT_NAMED,
a node is bad and no rank may start; RANK_STOPPED, asked to leave, or, without an outcome, it could
not be ended and may still hold the GPUs. Whatever else happens, a failure of its own above all, is
told and is no reason to keep the ranks waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

from ftslurm.errors import EXIT_OK, PREFLIGHT_NAMED, RANK_STOPPED, FtslurmError, warn
from ftslurm.files import best_effort, write_json
from ftslurm.health.pairwise import CPU_LIMITS, GPU_LIMITS
from ftslurm.node.leave_word import leave_word
from ftslurm.node.preflight_lines import parse
from ftslurm.node.preflight_report import NAMED, Heard, Report, report
from ftslurm.parent import die_with_parent
from ftslurm.run.attempts import append_event, read_attempt
from ftslurm.run.gpu_request import ranks_use_gpus
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import stop_flag
from ftslurm.run.record import read_record

DEADLINE_S = 300.0
"""Of the whole. What its parts may take is in train/preflight.py."""
LAST_S = 10.0
"""From when most ranks have ended, for the others."""
TERM_WAIT_S = 5.0
KILL_WAIT_S = 2.0
_TICK_S = 0.1

_KILLED_BY_WARNING = {128 + signal.SIGUSR1, 128 + signal.SIGUSR2, 128 + signal.SIGTERM}
"""Of a rank that had not come to catch it: Python was being loaded."""


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    stop_flag.install()
    try:
        layout = RunLayout(Path(environ["FTSLURM_RUN_DIR"]))
        stop_at = float(environ.get("FTSLURM_STOP_AT") or 0)
        return preflight(layout, int(environ["FTSLURM_ATTEMPT"]), argv, stop_at=stop_at)
    except (FtslurmError, OSError, LookupError, TypeError, ValueError) as error:
        warn(f"no preflight ({type(error).__name__}: {error}); the ranks start without it")
        return EXIT_OK


def preflight(
    layout: RunLayout,
    number: int,
    command: Sequence[str],
    *,
    stop_at: float = 0.0,
    deadline_s: float = DEADLINE_S,
) -> int:
    """`stop_at`: UTC seconds at which the warn signal is due, 0: not known."""
    if stop_at and time.time() + deadline_s > stop_at:
        warn("no preflight: the end of the job is near; the ranks start without it")
        return EXIT_OK
    paths, spec = layout.attempt(number), read_record(layout).spec
    step = _Step(command, paths.root / "preflight.log", deadline_s=deadline_s)
    step.run()
    if step.asked_by:
        _say(f"left on {step.asked_by}")
        with best_effort("not in the journal"):
            append_event(paths, "signal", signal=step.asked_by)
        # On TERM, too: at the start of grace Slurm sends it to tasks and not to the batch shell,
        # and what has ended one task of this step (--kill-on-bad-exit=0) does not send it.
        leave_word(layout, number, step.asked_by)
        return RANK_STOPPED
    attempt = read_attempt(layout, number)
    limits = GPU_LIMITS if ranks_use_gpus(spec) else CPU_LIMITS
    tasks = attempt.tasks_per_node or spec.cluster.tasks_per_node
    found = report(step.heard, attempt.nodes, tasks, limits)
    record = {"schema_version": 1, **found.record(), "wall_s": round(step.wall_s, 1)}
    with best_effort("the preflight is not on record"):
        write_json(paths.preflight_json, {**record, "at": time.time()})
        append_event(paths, "preflight", word=found.word, bad=sorted(found.bad))
    _tell(found, step)
    if found.word == NAMED:
        return PREFLIGHT_NAMED
    if step.is_left_behind:
        warn(
            f"tasks of the preflight were still there {TERM_WAIT_S:.0f} s after TERM and may hold "
            "the GPUs; no rank is started"
        )
        return RANK_STOPPED
    return EXIT_OK


class _Step:
    """The job step of the preflight's ranks, listened to until it ends or is cut off."""

    def __init__(self, command: Sequence[str], log: Path, *, deadline_s: float) -> None:
        self.log, self.cut, self.asked_by = log, "", ""
        self.is_left_behind = False
        """Ranks of it may live on: srun had to be killed, and a KILL ends srun alone."""
        self.heard = Heard()
        self.wall_s = 0.0
        self._command, self._deadline_s = command, deadline_s
        self._read_to = 0
        self._most_ended_at: Optional[float] = None

    def run(self) -> None:
        """On return it has ended or is abandoned. `asked_by`: the signal that asked to leave."""
        began = time.monotonic()
        with self.log.open("ab") as log:
            step = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(),
            )
        while True:
            code = step.poll()
            self.wall_s = time.monotonic() - began
            self._listen()
            self.asked_by = self.heard.stopped_by or stop_flag.signal_name or ""
            if code is not None or self.asked_by or self._is_over():
                break
            time.sleep(_TICK_S)
        if code in _KILLED_BY_WARNING and not self.asked_by:
            self.asked_by = signal.Signals(code - 128).name
        if code is None:
            self._end(step)
        elif code == 0:
            self.heard.all_ended = True

    def _is_over(self) -> bool:
        if 2 * len(self.heard.ended) > len(self.heard.here) and self._most_ended_at is None:
            self._most_ended_at = self.wall_s
        if self.wall_s > self._deadline_s:
            self.cut = f"cut off after {self._deadline_s:.0f} s"
        elif self._most_ended_at is not None and self.wall_s > self._most_ended_at + LAST_S:
            self.cut = f"cut off {LAST_S:.0f} s after most of its ranks had ended"
        return bool(self.cut)

    def _listen(self) -> None:
        with self.log.open("rb") as log:
            log.seek(self._read_to)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._read_to += len(whole) + len(newline)
        for text in whole.decode(errors="replace").splitlines():
            told = parse(text)
            if told is not None:
                self.heard.add(told, at_s=self.wall_s)

    def _end(self, step: subprocess.Popen[bytes]) -> None:
        """srun ends its tasks at TERM; what it cannot end, it waits for until Slurm gives it up."""
        step.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(TERM_WAIT_S)
            return
        self.is_left_behind = bool(self.heard.here - self.heard.ended)
        step.kill()
        try:
            step.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            warn(f"the preflight's `{self._command[0]}` does not end and is left behind")


def _tell(found: Report, step: _Step) -> None:
    spent = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found.seconds.items())
    cut = f", {step.cut}" if step.cut else ""
    _say(f"{found.count} nodes in {step.wall_s:.1f} s ({spent or 'no part was done'}){cut}")
    for sentence in found.sentences():
        _say(sentence)
    if found.word == "broken":
        warn(f"the preflight itself failed, see `{step.log}`; the ranks start without it")


def _say(text: str) -> None:
    print(f"ftslurm: preflight: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
