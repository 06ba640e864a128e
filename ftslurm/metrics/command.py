"""`ftslurm metrics RUN...`: a run's figures as Prometheus text.

Reads runs, writes into the folder it is given and nowhere else. With --every a file that cannot be
renewed keeps its last content and its time stamp, which is what tells that it is stale; the reason
is said once.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Optional

from ftslurm.errors import EXIT_OK, FtslurmError, UsageError, warn
from ftslurm.metrics.exposition import render, require_client
from ftslurm.metrics.job_look import JobLooks
from ftslurm.metrics.reading import Facts, RunReader
from ftslurm.metrics.samples import samples_of
from ftslurm.metrics.textfile import clear_old, require_folder, write
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import place_of_run

LOOK_S = 0.3
"""How often is looked whether an attempt has begun or ended: a job leaves soon after."""

_DESCRIPTION = """\
A run's figures as Prometheus text: the same numbers as `ftslurm report`.
With --every, and only then, the scheduler is asked now and then of runs that give no sign: one that
has no job left needs a person."""
_EXAMPLES = """\
examples:
  ftslurm metrics runs/gpt-20261130-101500
  ftslurm metrics runs/gpt-* --textfile /var/lib/node_exporter/ftslurm
  ftslurm metrics runs/gpt-20261130-101500 --textfile metrics --every 30

recovery.metrics_dir=FOLDER has a run do the last by itself for as long as its job lives.
Alert rules: slurm/site/alerts.yml"""


def main(argv: Optional[list[str]] = None) -> int:
    options = _parser().parse_args(argv)
    if options.every is not None and not options.textfile:
        raise UsageError("--every renews files; say with --textfile in which folder")
    if options.every is not None and not options.every > 0:
        raise UsageError(f"--every is {options.every}; give the seconds between two writes")
    require_client()
    looks = JobLooks()
    readers = [RunReader(RunLayout(place_of_run(name).resolve()), looks) for name in options.run]
    if options.textfile is None:
        told = [reader.read() for reader in readers]
        runs = {facts.story.run_id: samples_of(facts) for facts in told}
        sys.stdout.write(render(runs).decode())
        return EXIT_OK
    require_folder(options.textfile)
    clear_old(options.textfile)
    if options.every is None:
        for reader in readers:
            _renew(reader, options.textfile)
    else:
        signal.signal(signal.SIGINT, _interrupt_once)
        Keeper(readers, looks, options.textfile, options.every).run()
    return EXIT_OK


def _interrupt_once(number: int, frame: Optional[FrameType]) -> None:
    """A parent's death sends its signal once more for each of the parent's other threads (Linux,
    forget_original_parent), into the last word that the first one has asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _renew(reader: RunReader, folder: Path, *, in_haste: bool = False) -> Facts:
    facts = reader.read(in_haste=in_haste)
    text = render({facts.story.run_id: samples_of(facts)})
    write(folder, facts.story.run_id, reader.layout.root, text)
    return facts


class Keeper:
    """Keeps the files of runs fresh until all are done, or it is interrupted; in between it has the
    scheduler asked of runs that give no sign."""

    def __init__(
        self,
        readers: Sequence[RunReader],
        looks: JobLooks,
        folder: Path,
        every_s: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers, self._looks = readers, looks
        self._folder, self._every_s = folder, every_s
        self._sleep, self._clock = sleep, clock
        self._newest: dict[RunReader, Optional[Facts]] = dict.fromkeys(readers)
        self._said: set[str] = set()
        self._known = (0, True)
        """The newest attempt of the one run there is, and whether it is over: as it was looked at
        last, whether or not it could be told."""

    def run(self) -> None:
        try:
            while not self.write_all():
                self._wait()
        except KeyboardInterrupt:
            self.write_all(in_haste=True)

    def write_all(self, *, in_haste: bool = False) -> bool:
        """Whether all are done. `in_haste`: whoever is to write may be killed any moment."""
        for reader in self._readers:
            try:
                self._newest[reader] = _renew(reader, self._folder, in_haste=in_haste)
            except (FtslurmError, OSError) as error:
                self._say(f"the metrics of `{reader.layout.root.name}` are not renewed: {error}")
        return all(one is not None and one.story.state == "done" for one in self._newest.values())

    def _wait(self) -> None:
        """Until it is time, or the one run there is has begun or ended an attempt, which is told at
        once."""
        until = self._clock() + self._every_s
        while self._clock() < until:
            self._sleep(min(LOOK_S, max(0.0, until - self._clock())))
            if len(self._readers) == 1 and self._has_changed(self._readers[0]):
                self.write_all(in_haste=True)
                return
            self._looks.ask_next()

    def _has_changed(self, reader: RunReader) -> bool:
        """An attempt has begun or ended since the figures were read, or since the last look. False
        where nobody can look: a file system that is away for a moment ends nobody here."""
        facts, layout = self._newest[reader], reader.layout
        if facts is None:
            return False  # nothing was told yet that could be untrue
        if facts.story.attempts:
            newest = facts.story.attempts[-1]
            is_over = newest.ended != "running" or bool(newest.action)
            self._known = max(self._known, (newest.number, is_over))
        number, is_over = self._known
        with suppress(OSError):
            if is_over and layout.attempt(number + 1).attempt_json.exists():
                self._known = (number + 1, False)
                return True
            if not is_over and (
                layout.attempt(number).decision_json.exists() or layout.done.exists()
            ):
                self._known = (number, True)
                return True
        return False

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(what)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftslurm metrics",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", nargs="+", metavar="RUN", help="run directories, or ids of runs under ./runs")
    add("--textfile", type=Path, metavar="DIR", help="write RUN_ID.prom there, not to the screen")
    add("--every", type=float, metavar="S", help="again each S seconds, until all runs are done")
    return parser
