"""`ftslurm health`: a look at this node and, where Slurm calls for it, what follows from it.

In a prolog, an epilog and the periodic check the exit code is for Slurm, which takes a node out of
service for it: a probe that cannot do its work says so, on stderr and in the node's log, and exits
with 0. `probe` looks and tells, by Nagios' exit codes, and changes nothing. None outlives its time:
a timer ends the process, should all else fail to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ftslurm.errors import EXIT_OK, FtslurmError, UsageError, warn
from ftslurm.health.node_log import log_line
from ftslurm.health.settings import HealthSettings
from ftslurm.health.settings_file import read_settings

if TYPE_CHECKING:
    from ftslurm.health.visit import Visit

_EPILOG = """examples:
  ftslurm health probe                   one line, and an exit code for Nagios
  ftslurm health probe --explain         what was read, each rule that fired, its source
  ftslurm health probe --json
  ftslurm health settings --out health.json health=shadow health.gpus_per_node=8
  /opt/ftslurm/bin/ftslurm-health breaker --reset

exit codes of probe: 0 ok, 1 warning, 2 critical (drain, reset, after), 3 could not tell.
Of prolog and epilog: 86 where Slurm is to take the node out of service, which the site's scripts
alone turn into the 1 that it looks at; else 0. Of periodic: 0.
conf/health/default.yaml explains the settings."""

_WORDS = {
    "prolog": "before a job (Prolog of slurm.conf)",
    "epilog": "after a job (Epilog)",
    "periodic": "every few minutes (HealthCheckProgram)",
    "probe": "look and tell; changes nothing",
}
SICK_NODE = 86
"""For the site's scripts. Not 1, which Python too ends with where it cannot even start: without its
library, without memory, with a disk that fails."""
_CALLS = 4
_SLACK_S = 20.0
"""For what is no call of Slurm: a start on a loaded node, jitter, a shared folder."""


def main(argv: Optional[list[str]] = None, *, settings: Optional[str] = None) -> int:
    """`settings`: the file of the copy that this is."""
    options = _parser().parse_args(argv)
    if options.word == "settings":
        return _write_settings(options)
    path = options.settings or settings
    if options.word == "breaker":
        return _reset_breaker(path)
    if options.word == "probe":
        return _probe(options, path)
    return _in_slurm(options, path)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ftslurm health",
        description="Look at this node and, where Slurm calls for it, act on what is found.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = made.add_subparsers(dest="word", metavar="WORD", required=True)
    file = argparse.ArgumentParser(add_help=False)
    file.add_argument("--settings", metavar="FILE", help="default: that of the installed copy")
    for word, text in _WORDS.items():
        look = words.add_parser(word, help=text, parents=[file], description=f"{word}: {text}")
        look.add_argument("--json", action="store_true", help="for programs; schema_version 1")
        look.add_argument("--explain", action="store_true", help="all that was read, every rule")
        look.add_argument(
            "--since",
            type=float,
            metavar="UTC_S",
            help="without a folder of state: older kernel lines do not count (default: an hour)",
        )
    text = "write conf/health to the file that a copy reads"
    example = "example: ftslurm health settings --out health.json health=shadow"
    composed = words.add_parser("settings", help=text, description=text, epilog=example)
    composed.add_argument("--out", type=Path, required=True, metavar="FILE")
    composed.add_argument("--config-dir", type=Path, metavar="DIR", help="adds options to conf/")
    composed.add_argument("overrides", nargs="*", metavar="health.KEY=VALUE")
    text = "let this node drain itself again"
    breaker = words.add_parser("breaker", help=text, parents=[file], description=text)
    breaker.add_argument("--reset", action="store_true", required=True)
    return made


def _write_settings(options: argparse.Namespace) -> int:
    try:
        from ftslurm.submit.node_settings import write_settings
    except ModuleNotFoundError:
        raise UsageError(
            "settings are composed from conf/ by ftslurm as it is installed for submitting; this "
            "copy has only what a node needs: run it there"
        ) from None
    write_settings(options.out, options.overrides, options.config_dir)
    return EXIT_OK


def _reset_breaker(path: Optional[str]) -> int:
    from ftslurm.health import latch
    from ftslurm.health.state_dir import StateDir

    settings, complaint = _read(path)
    if complaint:
        raise UsageError(complaint)
    with StateDir(Path(settings.state_dir)) as state:
        print(latch.reset(state, time.time()))  # noqa: T201
    return EXIT_OK


def _probe(options: argparse.Namespace, path: Optional[str]) -> int:
    from ftslurm.health import explain

    settings, complaint = _read(path)
    found = _visit(options, settings, complaint, settings.periodic_s)
    _print(options, found, settings, path)
    return explain.exit_code(found.report)


def _in_slurm(options: argparse.Namespace, path: Optional[str]) -> int:
    from ftslurm.health import explain

    if path is None:
        raise UsageError("give --settings FILE; bin/ftslurm-health of an installation has its own")
    settings, complaint = _read(path)
    try:
        found = _visit(options, settings, complaint, getattr(settings, f"{options.word}_s"))
    except (FtslurmError, OSError) as error:
        _say(f"this {options.word} could not look at the node: {error}")
        return EXIT_OK
    with contextlib.suppress(OSError):  # nobody reads it: what was done stands all the same
        _print(options, found, settings, path)
    report = found.report
    for complaint in report.complaints:
        _say(complaint)
    if report.is_sick or report.action not in ("", "none"):
        log_line(explain.first_line(report))
    return SICK_NODE if found.takes_out else EXIT_OK


def _read(path: Optional[str]) -> tuple[HealthSettings, str]:
    return read_settings(Path(path)) if path else (HealthSettings(), "")


def _visit(
    options: argparse.Namespace, settings: HealthSettings, complaint: str, budget_s: float
) -> Visit:
    from ftslurm.health.visit import visit

    # Ends the process by SIGALRM: no handler, which would wait for a call that hangs to return.
    signal.setitimer(signal.ITIMER_REAL, budget_s + _CALLS * settings.slurm_call_s + _SLACK_S)
    try:
        return visit(options.word, settings, complaint, since=options.since)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _print(
    options: argparse.Namespace, found: Visit, settings: HealthSettings, path: Optional[str]
) -> None:
    from ftslurm.health import explain
    from ftslurm.health.report import printable, report_record

    if options.json:
        print(json.dumps(report_record(found.report), indent=1, sort_keys=True))  # noqa: T201
        return
    lines = [explain.first_line(found.report)]
    if options.explain:
        lines += explain.explain(found.probe, found.report, settings, path or "the defaults")
    print("\n".join(map(printable, lines)))  # noqa: T201


def _say(text: str) -> None:
    warn(text)
    log_line(text)
