"""The nodes of an attempt are asked for their health: each looks at itself (look_here.py), and what
root's own looks have left in a shared folder is read.

One job step does it, beside all else that is asked: the agents' step has no GPUs in its sight. It
is cut off at a deadline; of a node that has not answered by then nothing is known. Nothing here
decides anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Optional

from ftslurm.diagnosis.health_clues import few
from ftslurm.errors import FormatError, SchedulerError
from ftslurm.files import read_json
from ftslurm.health.report import Report, parse_report
from ftslurm.run.attempts import Attempt
from ftslurm.run.gpu_request import has_gpus
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord
from ftslurm.scheduler.launch import looks_argv
from ftslurm.scheduler.protocol import Scheduler

LOOK_S = 11.0
"""Most that a look may take, srun and all. A healthy node needs one or two seconds, one whose
driver hangs says so after eight."""
TERM_S = 1.0
"""From TERM to KILL. What an srun that is killed leaves behind ends by the look's own deadlines."""
SHORT_S = 3.0
"""For a look, where the rest has told the cause without it. Longer if all nodes have answered and
the step lasts: it then waits for GPU memory, without which the next attempt would fail."""
NODE_FILES_S = 0.7
"""For the files that the nodes leave, once the step is over: there may be thousands."""
READ_S = 5.0
"""For root's folder: it may be on another file system than the run, and that one away."""
# By FTSLURM_ATTEMPT the agents would take the step for a leftover of the ranks; the others would
# leave it a part of a node's GPUs, or ask for those of nodes that are not there (srun(1)).
_NOT_HANDED_ON = {"FTSLURM_ATTEMPT", "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU",
                  "SLURM_GPU_BIND"}  # fmt: skip

_PROLOG = "prolog"

Word = tuple[Path, Report]
"""On one node's health, and where it is to be read."""


class Looks:
    """Under way, in the background: Slurm may take its time to say that it is there."""

    def __init__(
        self, nodes: Sequence[str], folder: Path, argv: Sequence[str], scheduler: Scheduler
    ) -> None:
        self._nodes, self._folder, self._argv, self._scheduler = nodes, folder, argv, scheduler
        self._until = time.monotonic() + LOOK_S
        self._why_not = f"see `{folder}/step.log`"
        self._process: Optional[subprocess.Popen[bytes]] = None
        # Not waited for at the end of the process: the step ends by the looks' own deadlines.
        self._thread = threading.Thread(target=self._work, name="looks", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float:
        """Until all is over."""
        return max(0.0, self._until + 2 * TERM_S - time.monotonic())

    def wait(self, *, is_short: bool = False) -> tuple[list[Word], list[str]]:
        """(what the nodes say of themselves, what they do not)."""
        if is_short:
            self._thread.join(min(self.left_s, SHORT_S))
        if not is_short or self._have_all_answered():
            self._thread.join(self.left_s)
        if self._thread.is_alive() and self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM)
        words, silent = [], []
        until = time.monotonic() + NODE_FILES_S
        for node in self._nodes:
            path = self._folder / f"{node}.json"
            try:
                if time.monotonic() > until:
                    raise FormatError("the time was up")
                words.append((path, parse_report(read_json(path), where=str(path))))
            except (OSError, FormatError):
                silent.append(node)
        said = f"the health of {few(silent)} ({self._why_not})"
        return words, [said] if silent else []

    def _have_all_answered(self) -> bool:
        try:
            there = {path.name for path in self._folder.iterdir()}
        except OSError:
            return False
        return {f"{node}.json" for node in self._nodes} <= there

    def _work(self) -> None:
        try:
            self._look()
        except (OSError, SchedulerError) as error:
            self._why_not = str(error)

    def _look(self) -> None:
        if not self._scheduler.controller_alive():  # srun would try to reach it for 9 s
            raise SchedulerError("slurmctld does not answer")
        with (self._folder / "step.log").open("ab") as log:
            process = self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: os.environ[name] for name in os.environ.keys() - _NOT_HANDED_ON},
                start_new_session=True,
            )
        try:
            process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_S)
            return


def begin_looks(
    scheduler: Scheduler,
    layout: RunLayout,
    record: RunRecord,
    attempt: Attempt,
    nodes: Sequence[str],
) -> Optional[Looks]:
    """None where no node is to look: in a run without GPUs, or where nobody wants it."""
    cluster, settings = record.spec.cluster, record.spec.health
    if scheduler.name != cluster.scheduler or settings.probe == "never":
        return None
    if not nodes or not (has_gpus(cluster) or settings.probe == "always"):
        return None
    folder = layout.attempt(attempt.number).looks
    folder.mkdir(parents=True, exist_ok=True)
    module = [sys.executable, "-m", "ftslurm.diagnosis.look_here"]
    argv = [*looks_argv(cluster, nodes), *module, str(layout.root), str(attempt.number)]
    return Looks(nodes, folder, argv, scheduler)


class RootsWords:
    """Being read, in the background."""

    def __init__(self, folder: Path, attempt: Attempt) -> None:
        self._folder, self._attempt = folder, attempt
        self._heard: list[tuple[list[Word], list[str]]] = []
        self._thread = threading.Thread(target=self._work, name="verdicts", daemon=True)
        self._thread.start()

    def wait(self, within_s: float = READ_S) -> tuple[list[Word], list[str]]:
        """(on each node of the attempt, of its own time; what is not believed)."""
        self._thread.join(within_s)
        return self._heard[0] if self._heard else ([], [f"`{self._folder}` does not answer"])

    def _work(self) -> None:
        self._heard.append(words_of_root(self._folder, self._attempt))


def words_of_health(
    own: tuple[list[Word], list[str]], roots: tuple[list[Word], list[str]]
) -> tuple[list[Word], list[str]]:
    """The nodes' own and root's, which is of no use where a node has started anew since."""
    boots = {report.node: report.boot_id for _, report in own[0]}
    current = [
        word for word in roots[0] if boots.get(word[1].node, word[1].boot_id) == word[1].boot_id
    ]
    return [*own[0], *current], [*own[1], *roots[1]]


def words_of_root(folder: Path, attempt: Attempt) -> tuple[list[Word], list[str]]:
    """(on each node of the attempt, since its claim; what is not believed). The prolog of the
    attempt's own job has looked before the claim. What a program of another job on the node has
    done is none of it."""
    from ftslurm.health.verdict_folder import read_verdicts  # late: many sites have none

    job = attempt.raw_job_id or attempt.job_id
    reports, notes = read_verdicts(folder, attempt.nodes, job=job)
    words = []
    for one in reports:
        is_since, is_own = one.at >= attempt.claimed_at, one.job == job
        if is_since or (is_own and one.context == _PROLOG):
            words.append((folder / one.node, one if is_since and is_own else _nobodys(one)))
    return words, notes


def _nobodys(report: Report) -> Report:
    verdicts = tuple(replace(told, hands_to_run=False) for told in report.verdicts)
    return replace(report, verdicts=verdicts)
