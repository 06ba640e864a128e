"""What one look at a node leaves for those after it: one record, in one file. Pure.

One file, so that it is replaced in one step. A probe that is killed before has changed nothing: the
next reads the same kernel lines again, and they count once. One that is killed after has left what
it found as not settled, and every look of this boot comes back to it until it is. Were the cursor
written by itself, the lines would be lost before it is acted upon, or count twice behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Optional

from ftslurm.errors import FormatError
from ftslurm.health import signals as s
from ftslurm.health.decision_table import BELOW_BASELINE, DECISION_TABLE, LEFT
from ftslurm.health.history import History, history_record, parse_history
from ftslurm.health.kernel_log import Cursor, cursor_record, parse_cursor
from ftslurm.health.nvml_read import SOURCE as NVML
from ftslurm.health.second_look import HASTE
from ftslurm.health.settings import NVIDIA_SMI
from ftslurm.health.signals import Reading, is_number, parse_reading, reading_record
from ftslurm.health.sysfs import SOURCE as SYSFS
from ftslurm.health.verdict import HARD, Verdict, rank
from ftslurm.health.xid_table import WORDS

SCHEMA_VERSION = 1

LOG_KINDS = frozenset({s.XID, s.SXID, s.KERNEL_LOST, s.AER, s.MLX5})

_MOST_FOUND = 256
_HARDWARE = (NVML, NVIDIA_SMI, SYSFS, HASTE)
_BY_BASELINE = {row.rule for row in DECISION_TABLE if row.test in (BELOW_BASELINE, LEFT)}
_BY_BASELINE.add("nic-missing")


@dataclass(frozen=True)
class Found:
    """A fault, or what a program has done to itself. The last look that found it is at `at`."""

    verdict: Verdict
    at: float
    is_settled: bool = False
    """Somebody has done, or decided not to do, what it asks for."""


@dataclass(frozen=True)
class Memory:
    boot_id: str
    cursor: Optional[Cursor] = None
    counts_from: Optional[float] = None
    """Lines of the kernel log of before are too old: nobody knows whether they counted once."""
    history: History = field(default_factory=History)
    found: tuple[Found, ...] = ()
    abandoned: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """By source: pid and start of a look that could not be killed."""
    last: Optional[Reading] = None
    verdicts: tuple[Verdict, ...] = ()
    """Of the last look."""
    reference: Optional[Reading] = None
    """What the next look compares with, where that is not simply the last; see `_reference`."""

    def baseline(self) -> Optional[Reading]:
        return self.reference or self.last

    def told(self, off: frozenset[str]) -> list[Verdict]:
        """The last look's verdicts, and what earlier ones have found and nobody has settled; worst
        first. `off`: rules that are no longer looked at."""
        known = {verdict.key for verdict in self.verdicts}
        unsettled = [
            one.verdict
            for one in self.found
            if not one.is_settled
            and one.verdict.word in HARD
            and one.verdict.key not in known
            and one.verdict.rule not in off
        ]
        return sorted((*self.verdicts, *unsettled), key=lambda verdict: rank(verdict.word))

    def found_since(self, at: float) -> list[Verdict]:
        """By looks behind that one."""
        return [one.verdict for one in self.found if one.at > at]


def of_boot(memory: Memory, boot_id: str) -> Memory:
    """What of it still holds: after a restart, what came again before, and how far a file of the
    kernel log was read."""
    if memory.boot_id == boot_id:
        return memory
    return Memory(boot_id, cursor=memory.cursor, history=memory.history)


def after_look(
    memory: Memory,
    reading: Reading,
    verdicts: Sequence[Verdict],
    *,
    judged_by: Optional[Reading],
) -> Memory:
    """With what a look has found; `judged_by` is its baseline."""
    found = {one.verdict.key: one for one in memory.found}
    for verdict in verdicts:
        if verdict.word in HARD or verdict.hands_to_run:
            found.pop(verdict.key, None)
            found[verdict.key] = Found(verdict, reading.at)
    return replace(
        memory,
        found=tuple(found.values())[-_MOST_FOUND:],
        last=hardware_of(reading),
        verdicts=tuple(verdicts)[:_MOST_FOUND],
        reference=_reference(reading, verdicts, judged_by),
    )


def hardware_of(reading: Reading) -> Reading:
    """Without the kernel's lines: there may be thousands, and none is compared with."""
    signals = tuple(one for one in reading.signals if one.kind not in LOG_KINDS)
    return replace(reading, signals=signals)


def left_by_jobs(last: Optional[Reading]) -> frozenset[str]:
    """Processes, by their `where`, that the last look has found behind a job."""
    found = last.of(s.LEFTOVER_PROCESS) if last else []
    return frozenset(one.where for one in found if one.where.endswith("/job"))


def settled(memory: Memory, verdicts: Sequence[Verdict]) -> Memory:
    keys = {verdict.key for verdict in verdicts}
    found = [
        replace(one, is_settled=True) if one.verdict.key in keys else one for one in memory.found
    ]
    return replace(memory, found=tuple(found))


def _reference(
    reading: Reading, verdicts: Sequence[Verdict], judged_by: Optional[Reading]
) -> Optional[Reading]:
    """What was worse in this look than before it stays compared with that: a port would else be
    down for one look only, and fine from then on. After a look that could not read all, it is what
    that one was judged by. None: the look itself."""
    if judged_by is None or judged_by.boot_id != reading.boot_id:
        return None
    if any(failure.source in _HARDWARE for failure in reading.failures):
        return judged_by
    worse = {
        verdict.signals[0].place
        for verdict in verdicts
        if verdict.signals and verdict.rule in _BY_BASELINE
    }
    if not worse:
        return None
    others = [one for one in hardware_of(reading).signals if one.place not in worse]
    kept = [one for one in judged_by.signals if one.place in worse]
    return replace(reading, signals=(*others, *kept))


def memory_record(memory: Memory) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "boot_id": memory.boot_id,
        "cursor": cursor_record(memory.cursor) if memory.cursor else None,
        "counts_from": memory.counts_from,
        "history": history_record(memory.history),
        "found": [asdict(one) for one in memory.found],
        "abandoned": {source: list(child) for source, child in memory.abandoned.items()},
        "last": reading_record(memory.last) if memory.last else None,
        "verdicts": [asdict(verdict) for verdict in memory.verdicts],
        "reference": reading_record(memory.reference) if memory.reference else None,
    }


def parse_memory(record: Mapping[str, Any]) -> Memory:
    """The memory again; FormatError where the record is none."""
    try:
        boot_id, counts_from = record["boot_id"], record["counts_from"]
        if not isinstance(boot_id, str):
            raise FormatError(f"a boot id is a text, not {boot_id!r:.80}")
        return Memory(
            boot_id,
            cursor=parse_cursor(record["cursor"]),
            counts_from=None if counts_from is None else float(counts_from),
            history=parse_history(record["history"]),
            found=tuple(map(_parse_found, record["found"])),
            abandoned={
                str(source): (int(pid), str(ticks))
                for source, (pid, ticks) in record["abandoned"].items()
            },
            last=_parse_reading(record["last"]),
            verdicts=tuple(map(_parse_verdict, record["verdicts"])),
            reference=_parse_reading(record["reference"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(
            f"no memory of earlier looks can be read from it ({error!r:.200})"
        ) from None


def _parse_reading(record: Any) -> Optional[Reading]:
    return parse_reading(record) if record is not None else None


def _parse_found(record: Mapping[str, Any]) -> Found:
    at, is_settled = record["at"], record["is_settled"]
    if not is_number(at) or not isinstance(is_settled, bool):
        raise FormatError("what a look has found has no time")
    return Found(_parse_verdict(record["verdict"]), at, is_settled)


_TEXTS = ("word", "code", "sentence", "rule", "source", "needs")
_FLAGS = ("hands_to_run", "sticky", "auto_resume", "trend")
assert {*_TEXTS, *_FLAGS, "gpu", "signals"} == {item.name for item in fields(Verdict)}


def _parse_verdict(record: Mapping[str, Any]) -> Verdict:
    texts = {name: record[name] for name in _TEXTS}
    flags = {name: record[name] for name in _FLAGS}
    is_whole = all(isinstance(text, str) for text in texts.values()) and all(
        isinstance(flag, bool) for flag in flags.values()
    )
    if not is_whole or texts["word"] not in WORDS:
        raise FormatError(f"no verdict: {record!r:.200}")
    gpus = [record["gpu"]] if record["gpu"] is not None else []
    parts = {"gpus": gpus, "signals": record["signals"], "failures": []}
    read = parse_reading({"boot_id": "", "host": "", "context": "", "at": 0.0, **parts})
    return Verdict(gpu=read.gpus[0] if gpus else None, signals=read.signals, **texts, **flags)
