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
from pathlib import Path
from types import FrameType
from typing import Optional

from ftslurm.errors import EXIT_OK, FtslurmError, UsageError, warn
from ftslurm.metrics.exposition import render, require_client
from ftslurm.metrics.reading import Facts, RunReader
from ftslurm.metrics.samples import samples_of
from ftslurm.metrics.textfile import clear_old, require_folder, write
from ftslurm.run.layout import RunLayout

LOOK_S = 0.5
"""How often is looked whether an attempt has ended: a job leaves soon after."""

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
    readers = [RunReader(RunLayout(folder.resolve())) for folder in options.run]
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
        Keeper(readers, options.textfile, options.every).run()
    return EXIT_OK


def _interrupt_once(number: int, frame: Optional[FrameType]) -> None:
    """A parent's death sends its signal once more for each of the parent's other threads (Linux,
    forget_original_parent), into the last word that the first one has asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _renew(reader: RunReader, folder: Path) -> Facts:
    facts = reader.read()
    text = render({facts.story.run_id: samples_of(facts)})
    write(folder, facts.story.run_id, reader.layout.root, text)
    return facts


class Keeper:
    """Keeps the files of runs fresh until all are done, or it is interrupted."""

    def __init__(
        self,
        readers: Sequence[RunReader],
        folder: Path,
        every_s: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers, self._folder, self._every_s = readers, folder, every_s
        self._sleep, self._clock = sleep, clock
        self._newest: dict[RunReader, Optional[Facts]] = dict.fromkeys(readers)
        self._said: set[str] = set()

    def run(self) -> None:
        try:
            while not self.write_all():
                self._wait()
        except KeyboardInterrupt:
            self.write_all()

    def write_all(self) -> bool:
        """Whether all are done."""
        for reader in self._readers:
            try:
                self._newest[reader] = _renew(reader, self._folder)
            except (FtslurmError, OSError) as error:
                self._say(f"the metrics of `{reader.layout.root.name}` are not renewed: {error}")
        return all(one is not None and one.story.state == "done" for one in self._newest.values())

    def _wait(self) -> None:
        """Until it is time, or the one run there is has ended an attempt, which is told at once."""
        until = self._clock() + self._every_s
        while self._clock() < until:
            self._sleep(min(LOOK_S, max(0.0, until - self._clock())))
            if len(self._readers) == 1 and self._has_ended(self._readers[0]):
                return

    def _has_ended(self, reader: RunReader) -> bool:
        facts = self._newest[reader]
        attempts = facts.story.attempts if facts else []
        if not attempts or attempts[-1].ended != "running" or attempts[-1].action:
            return False
        return reader.layout.attempt(attempts[-1].number).decision_json.exists()

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(what)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftslurm metrics",
        description="A run's figures as Prometheus text: the same numbers as `ftslurm report`.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--textfile", type=Path, metavar="DIR", help="write RUN_ID.prom there, not to the screen")
    add("--every", type=float, metavar="S", help="again each S seconds, until all runs are done")
    return parser
