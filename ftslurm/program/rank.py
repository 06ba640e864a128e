"""One rank of a program: `entry=rank:ftslurm.program.rank:main`, the process Slurm signals.

It starts the command of run.json's `spec.program`, passes its exit code on, and sees to it that the
program leaves in time when the rank is asked to. How the attempt ended is for ending.py to say.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import RunError, warn
from ftslurm.files import best_effort
from ftslurm.program import child as children
from ftslurm.program.beat import LOOK_S, Beat
from ftslurm.program.child import Inbox
from ftslurm.program.ending import ASKED
from ftslurm.program.environment import child_environment
from ftslurm.program.leaving import BY_CLOCK, Request, exit_code, push_due
from ftslurm.program.progress import note_start
from ftslurm.run.attempts import append_event
from ftslurm.run.control import LEAVING, LOOK_INTERVAL_S, ControlFiles
from ftslurm.run.deadline import AGENTS, MARGIN_S, read_deadline
from ftslurm.run.rank import (
    STOP_SIGNALS,
    RankEnvironment,
    StopFlag,
    stop_flag,
    write_rank_error,
)
from ftslurm.run.record import RunRecord, read_record

LATE_SIGNAL_S = 2.0
"""Before a bad end counts as a failure: Slurm's signals reach the ranks up to 0.8 s apart (seen),
and a program may die of its peers' end before its own rank is told."""

_TICK_S = 0.2
_TAIL_BYTES = 4096
_LINE_CHARACTERS = 200


class ProgramFailed(RunError):
    """Its exit code, and the last thing it said."""


def main() -> int:
    stop_flag.install()
    env = RankEnvironment.read()
    record = read_record(env.layout)
    env.layout.resume.mkdir(mode=0o700, exist_ok=True)
    if env.rank == 0:
        note_start(env.layout, env.attempt)
    folder = tempfile.TemporaryDirectory(prefix="ftslurm-")
    with folder as place, Inbox.opened() as inbox, Beat.begun(env) as beat:
        watch = Watch(env, record, inbox, stop_flag, beat, stop_file=Path(place) / "stop")
        code = watch.run()
    # The first rank that leaves makes the launcher TERM the others, and an interpreter that ends
    # gives signals their default back (not those that are ignored): the code would be lost.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return code


@dataclass
class Watch:
    """A program from its start to its end, and whether its rank was asked to leave meanwhile."""

    env: RankEnvironment
    record: RunRecord
    inbox: Inbox
    flag: StopFlag
    beat: Beat
    stop_file: Path
    request: Optional[Request] = None
    is_aware: bool = False
    """The program looked for the request by itself when it came."""

    def __post_init__(self) -> None:
        control_dir = self.record.spec.recovery.control_dir
        self._control = ControlFiles(self.env.layout, self.record.run_id, control_dir)
        self._looked_at = -LOOK_INTERVAL_S
        self._sent: Optional[signal.Signals] = None

    def run(self) -> int:
        """The rank's exit code."""
        if self._is_asked():
            return exit_code(0, was_asked=True)
        returncode, ended_at = self._run_program()
        if returncode != 0:
            self._wait_for_late_signal()
        if returncode != 0 and self.request is None:
            error = ProgramFailed(_failure(self.record.spec.program, returncode, self._last_line()))
            _say(str(error))
            write_rank_error(self.env, error, step=None, at=ended_at)
        return exit_code(returncode, was_asked=self.request is not None)

    def _run_program(self) -> tuple[int, float]:
        """(return code, UTC time of the end)."""
        program, folder = self.record.spec.program, _working_folder(self.env, self.record)
        # `python` is then the one that was unpacked on this node, as it is for the rank.
        is_unpacked = self.record.spec.cluster.environment is not None
        environ = child_environment(
            os.environ,
            self.env,
            run_id=self.record.run_id,
            stop_file=self.stop_file,
            path_first=Path(sys.executable).parent if is_unpacked else None,
            calls_file=self.beat.calls_file,
        )
        try:
            child = children.start(program, folder=folder, environ=environ)
        except OSError as error:
            raise ProgramFailed(
                f"`{program[0]}` cannot be run on {self.env.node} in `{folder}` ({error}); see "
                "that its nodes have what this machine has"
            ) from None
        while child.poll() is None:
            if self._is_asked():
                self._push(child)
                self.beat.leave()
            else:
                self.beat.look()
            self.inbox.wait(self._patience_s())
        ended_at = time.time()
        children.end_rest(child)
        return int(child.returncode), ended_at

    def _is_asked(self) -> bool:
        if self.request is None:
            self.request = self._new_request()
            if self.request is not None:
                self._begin_to_leave(self.request)
        return self.request is not None

    def _new_request(self) -> Optional[Request]:
        now, clock = time.time(), time.monotonic()
        if self.flag.is_set:
            since = self.flag.signalled_at
            return Request(self.flag.signal_name, None, now - (clock - since), since)
        if self.env.stop_at is not None and now >= self.env.stop_at:
            return Request(BY_CLOCK, None, now, clock)
        # One rank looks: the run directory is on a file system that all share.
        if self.env.rank == 0 and clock - self._looked_at >= LOOK_INTERVAL_S:
            self._looked_at = clock
            order = self._control.look()
            if order is not None and order.name in LEAVING:
                return Request(None, order.name, now, clock)
        return None

    def _begin_to_leave(self, request: Request) -> None:
        _say(f"asked to leave by {request.words}")
        try:
            self.stop_file.touch()
            self.is_aware = self.env.attempt_layout.aware.exists()
        except OSError as error:
            warn(f"the program cannot be told and gets TERM: {error}")
        if self.env.rank == 0:
            self._note(request)

    def _note(self, request: Request) -> None:
        with best_effort("not in the journal"):
            append_event(
                self.env.attempt_layout,
                ASKED,
                now=lambda: request.at,
                signal=request.signal_name,
                order=request.order,
            )

    def _push(self, child: subprocess.Popen[bytes]) -> None:
        assert self.request is not None
        asked_for_s = time.monotonic() - self.request.since
        deadline_s = self._deadline_s(self.request)
        due = push_due(asked_for_s, is_aware=self.is_aware, deadline_s=deadline_s)
        if due == signal.SIGKILL and self._sent is None:
            due = signal.SIGTERM  # this rank itself was stopped meanwhile: the next look kills
        if due is not None and due != self._sent:
            self._sent = due
            if self.is_aware or due == signal.SIGKILL:
                _say(f"the program is still there after {asked_for_s:.0f} s; it gets {due.name}")
            children.send(child, due)

    def _deadline_s(self, request: Request) -> float:
        """From the request on: what the node's agent has been told by now, else as at submit. What
        is told after an order, or after our own clock has asked, only shortens the time."""
        # None only where no scheduler was asked at submit: then no time is known to be left.
        known_s = self.record.emergency_deadline_s or 0.0
        if self.record.spec.checkpoint.emergency_deadline_s is not None:
            return known_s
        is_ours = request.order is not None or request.signal_name == BY_CLOCK
        if self.env.stop_at is not None and request.signal_name == BY_CLOCK:
            lead_s = self.record.spec.cluster.signal_lead_s
            known_s = self.env.stop_at + lead_s - MARGIN_S - request.at
        told = read_deadline(os.environ, self.env.attempt, asked_at=request.since)
        if told is None or told.by == AGENTS:
            return known_s
        told_s = told.until - request.since
        return min(told_s, known_s) if is_ours else told_s

    def _patience_s(self) -> float:
        if self.request is not None:
            return _TICK_S
        patience_s = LOOK_INTERVAL_S if self.beat.calls_file is None else LOOK_S
        if self.env.stop_at is None:
            return patience_s
        return min(patience_s, self.env.stop_at - time.time())

    def _wait_for_late_signal(self) -> None:
        deadline = time.monotonic() + LATE_SIGNAL_S
        while not self._is_asked() and time.monotonic() < deadline:
            self.inbox.wait(min(_TICK_S, deadline - time.monotonic()))

    def _last_line(self) -> str:
        """Of the rank's log, where the program's words have gone; none when it cannot be read."""
        try:
            with (self.env.attempt_layout.logs / f"rank-{self.env.rank}.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:_LINE_CHARACTERS] if said else ""


def _working_folder(env: RankEnvironment, record: RunRecord) -> Path:
    """Where the program was submitted from, in the code that the ranks use."""
    is_live = record.spec.code == "live"
    return (Path(record.code_folder) if is_live else env.layout.code) / record.code_place


def _failure(program: list[str], returncode: int, last_line: str) -> str:
    how = f"ended with code {returncode}"
    if returncode < 0:
        how = f"was killed by signal {-returncode} ({signal.strsignal(-returncode)})"
    said = f"; the last line of its log: {last_line}" if last_line else ""
    return f"`{shlex.join(program)[:_LINE_CHARACTERS]}` {how}{said}"


def _say(text: str) -> None:
    print(f"ftslurm: {text}", file=sys.stderr, flush=True)  # noqa: T201
