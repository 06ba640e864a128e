"""`ftslurm verify RUN|STEP_DIR`: every byte, and whether a restore would be safe.

Reads only; what it finds wrong stays where it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, TextIO

from ftslurm.checkpoint.choose import Choice, Fence, decide
from ftslurm.checkpoint.commit import COMMITTED, SCHEMA_VERSION
from ftslurm.checkpoint.published import step_folders
from ftslurm.checkpoint.records import MANIFEST
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.checkpoint.verification import Expectation, Verification, verify_step
from ftslurm.errors import EXIT_FAILED, EXIT_OK, CheckpointError, FormatError, UsageError
from ftslurm.files import read_json
from ftslurm.run import attempts
from ftslurm.run.layout import RunLayout, parse_step_name, parse_temporary_name
from ftslurm.run.sweep_layout import place_of_run

_DESCRIPTION = """\
Read every byte of a run's published steps, or of one step folder, and say from which step a restore
would continue. Exit 0 only if a restore would be safe: the newest published step and all others are
whole, hold nothing that was not saved, lie on one lineage, and (--expect-step) the step is the
expected one."""

_EXAMPLES = """\
examples:
  ftslurm verify runs/gpt-20260101            all steps of a run
  ftslurm verify runs/gpt-20260101/checkpoints/steps/step-000000012000
  ftslurm verify RUN --expect-step 12000      is that what a restore would take?
  ftslurm verify RUN --json | jq .restore     for scripts

Unfinished saves (step-N.tmp-A) are no steps and no failure. Nothing is moved or removed."""


@dataclass(frozen=True)
class Report:
    """All that was found; `findings` empty means that a restore would be safe."""

    path: Path
    steps: list[tuple[Path, Verification]]
    """Newest first."""
    restore: Optional[tuple[int, Path]]
    """What a restore would take."""
    findings: list[str]
    temporaries: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ftslurm verify",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", metavar="RUN|STEP_DIR", help="directory of a run, its id under ./runs, or a step"
    )
    parser.add_argument("--expect-step", type=int, metavar="N", help="fail if it is another step")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    path = place_of_run(arguments.path).resolve()
    if is_step_folder(path):
        meter = ProgressMeter([path])
        report = verify_folder(path, arguments.expect_step, on_bytes=meter.add)
    elif (path / "checkpoints").is_dir() or (path / "run.json").exists():
        layout = RunLayout(path)
        _refuse_a_program(layout)
        meter = ProgressMeter(step_folders(layout))
        report = verify_run(layout, arguments.expect_step, on_bytes=meter.add)
    else:
        raise UsageError(
            f"`{path}` is neither a run (no run.json, no checkpoints folder) nor a step folder"
        )
    meter.close()
    print(json.dumps(to_json(report)) if arguments.json else render(report))  # noqa: T201
    return EXIT_FAILED if report.findings else EXIT_OK


def _refuse_a_program(layout: RunLayout) -> None:
    try:
        spec = read_json(layout.run_json).get("spec") or {}
    except (FileNotFoundError, FormatError):
        return  # steps without a record of their run are read all the same
    if spec.get("program"):
        raise UsageError(
            f"`{layout.root}` is the run of a program: what it has saved is its own, in "
            f"`{layout.resume}`, and nobody else can say whether that is whole"
        )


def is_step_folder(path: Path) -> bool:
    """By its name or, for a copy under another name, by what is in it."""
    named = parse_step_name(path.name) is not None or parse_temporary_name(path.name) is not None
    return path.is_dir() and (named or (path / COMMITTED).exists() or (path / MANIFEST).exists())


def verify_folder(
    path: Path, expect_step: Optional[int], *, on_bytes: Callable[[int], None]
) -> Report:
    """One step folder, wherever it lies."""
    found = verify_step(path, full=True, expect=Expectation(step=expect_step), on_bytes=on_bytes)
    restore = (found.step, path) if found.ok and found.step is not None else None
    return Report(path, [(path, found)], restore, [*found.problems, *found.strangers])


def verify_run(
    layout: RunLayout, expect_step: Optional[int], *, on_bytes: Callable[[int], None]
) -> Report:
    """All published steps, and the choice a restore would make now."""
    store = CheckpointStore(layout)
    verified = [
        (path, store.verify(path, full=True, on_bytes=on_bytes)) for path in step_folders(layout)
    ]
    # A running job may have retired a step while it was being read.
    steps = [(path, found) for path, found in verified if path.exists()]
    choice, refusal = _choose(steps, _fence(layout))
    restore = None
    if choice.path is not None and choice.manifest is not None:
        restore = (choice.manifest.step, choice.path)
    return Report(
        layout.root,
        steps,
        restore,
        _findings(steps, choice, refusal, expect_step),
        temporaries=_names(layout.steps, lambda name: parse_temporary_name(name) is not None),
        quarantined=_names(layout.quarantine, lambda name: True),
    )


def _fence(layout: RunLayout) -> Fence:
    for number in reversed(attempts.numbers(layout)):
        try:
            return Fence(number, attempts.read_attempt(layout, number).adopted)
        except FileNotFoundError:
            continue  # killed between taking the number and writing attempt.json: never started
    return Fence()


def _choose(steps: list[tuple[Path, Verification]], fence: Fence) -> tuple[Choice, Optional[str]]:
    """What a restore would take, or why it would refuse to choose."""
    try:
        candidates = ((parse_step_name(path.name) or 0, path, found) for path, found in steps)
        return decide(candidates, fence), None
    except CheckpointError as error:
        return Choice(None, None, []), str(error)


def _findings(
    steps: list[tuple[Path, Verification]],
    choice: Choice,
    refusal: Optional[str],
    expect_step: Optional[int],
) -> list[str]:
    findings = [
        f"{path.name}: {text}" for path, found in steps for text in found.problems + found.strangers
    ]
    sound = {path for path, found in steps if found.ok}
    findings += [
        f"{rejected.path.name}: {rejected.reason}"
        for rejected in choice.rejected
        if rejected.path in sound
    ]
    if refusal is not None:
        findings.append(refusal)
    elif choice.manifest is None:
        findings.append("there is no step from which a restore could continue")
    elif expect_step is not None and choice.manifest.step != expect_step:
        findings.append(f"a restore would take step {choice.manifest.step}, not {expect_step}")
    return findings


def _names(folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if wanted(path.name))


def to_json(report: Report) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(report.path),
        "ok": not report.findings,
        "restore": report.restore and {"step": report.restore[0], "path": str(report.restore[1])},
        "findings": report.findings,
        "steps": [
            {
                "path": str(path),
                "step": found.step,
                "ok": found.ok,
                "problems": found.problems,
                "strangers": found.strangers,
                "is_unreadable": found.unreadable is not None,
                "bytes_read": found.bytes_read,
                "digest": found.committed_digest,
                "attempt": found.manifest and found.manifest.attempt,
                "world_size": found.manifest and found.manifest.world_size,
                "created_at": found.manifest and found.manifest.created_at,
            }
            for path, found in report.steps
        ],
        "temporaries": report.temporaries,
        "quarantined": report.quarantined,
    }


def render(report: Report) -> str:
    lines = [f"{report.path}"]
    if report.steps:
        lines.append(f"  {'step':>12}  {'attempt':>7}  {'ranks':>5}  {'read':>9}  result")
    for _, found in report.steps:
        manifest = found.manifest
        lines.append(
            f"  {'?' if found.step is None else found.step:>12}"
            f"  {manifest.attempt if manifest else '?':>7}"
            f"  {manifest.world_size if manifest else '?':>5}"
            f"  {format_bytes(found.bytes_read):>9}  {_result(found)}"
        )
    lines += [f"  unfinished, not a step: {name}" for name in report.temporaries]
    lines += [f"  in quarantine: {name}" for name in report.quarantined]
    lines += [f"finding: {finding}" for finding in report.findings]
    if report.restore is not None:
        lines.append(f"a restore would take step {report.restore[0]}: {report.restore[1]}")
    lines.append("safe to restore" if not report.findings else "NOT safe to restore")
    return "\n".join(lines).encode("ascii", "backslashreplace").decode()


def _result(found: Verification) -> str:
    if found.ok:
        return "ok"
    return "BAD" if found.unreadable is None else "unreadable"


def format_bytes(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


class ProgressMeter:
    """Bytes and per cent on stderr: at once on a terminal, else only when it takes longer."""

    def __init__(
        self,
        folders: list[Path],
        *,
        stream: Optional[TextIO] = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = sum(_size_bytes(folder) for folder in folders)
        self._stream = sys.stderr if stream is None else stream
        self._now = now
        self._is_terminal = self._stream.isatty()
        self._done = 0
        self._next_at = now() + (0.2 if self._is_terminal else 2.0)
        self._has_shown = False

    def add(self, count: int) -> None:
        self._done += count
        if self._now() < self._next_at:
            return
        self._next_at = self._now() + (0.2 if self._is_terminal else 10.0)
        share = 100 * self._done // max(self._total, 1)
        text = f"verify: {format_bytes(self._done)} of {format_bytes(self._total)} ({share} %)"
        print(  # noqa: T201
            f"\r{text}" if self._is_terminal else text,
            end="" if self._is_terminal else "\n",
            file=self._stream,
            flush=True,
        )
        self._has_shown = True

    def close(self) -> None:
        """Leave the line on a terminal."""
        if self._has_shown and self._is_terminal:
            print(file=self._stream)  # noqa: T201


def _size_bytes(folder: Path) -> int:
    try:
        return sum(path.lstat().st_size for path in folder.iterdir())
    except OSError:
        return 0  # for the meter only; the reading itself says what cannot be read
