"""What a look at a node leaves behind, in one form for all who read it.

The same record is printed by --json, kept for a run in its attempt's evidence, and left in the
site's verdict folder. Values only: nothing here reads or writes. A record that comes back is not
trusted: what is not of this form is a FormatError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.errors import FormatError
from ftslurm.health.xid_table import AFTER, DRAIN, IGNORE, RESET, UNKNOWN, WARN, WORDS

if TYPE_CHECKING:
    from ftslurm.health.drain import Action
    from ftslurm.health.probe import Probe
    from ftslurm.health.verdict import Verdict

SCHEMA_VERSION = 1
OK = "ok"
SICK = (DRAIN, RESET, AFTER)
"""Words of a fault of the node's."""

# https://nagios-plugins.org/doc/guidelines.html, "Plugin Return Codes"
NAGIOS = {
    **dict.fromkeys(SICK, (2, "CRITICAL")),
    UNKNOWN: (3, "UNKNOWN"),
    WARN: (1, "WARNING"),
    OK: (0, "OK"),
}


@dataclass(frozen=True)
class Told:
    """One verdict. `gpu` is the index, None for one that only the kernel log names, or for none."""

    word: str
    code: str
    gpu: Optional[int]
    bus: str
    sentence: str
    rule: str
    source: str
    hands_to_run: bool = False
    sticky: bool = False
    earlier: bool = False
    """Found by a look before this one, while the same job held the node."""

    @property
    def place(self) -> str:
        gpu = "" if self.gpu is None else f"gpu{self.gpu}"
        return " ".join(part for part in (gpu, self.bus) if part)


@dataclass(frozen=True)
class Report:
    """`word` is the worst of this look's verdicts; `ok` where none means anything."""

    node: str
    job: str
    boot_id: str
    at: float
    context: str
    word: str
    verdicts: tuple[Told, ...] = ()
    gpus: int = 0
    signals: int = 0
    wall_s: float = 0.0
    complaints: tuple[str, ...] = ()
    """What somebody has to put right: settings, a folder."""
    notes: tuple[str, ...] = ()
    """What else there is to know of the look."""
    action: str = ""
    """What was done about it: the acting's own word, empty where nobody was to act."""
    reason: str = ""
    """The node's reason that it wrote."""
    done: str = ""
    """The acting in a sentence."""

    @property
    def is_sick(self) -> bool:
        return self.word in SICK


def report_of(
    probe: Probe, *, node: str, action: Optional[Action] = None, complaints: Sequence[str] = ()
) -> Report:
    reading = probe.reading
    now = [told_of(verdict) for verdict in probe.verdicts]
    before = [told_of(verdict, earlier=True) for verdict in probe.during]
    return Report(
        node=node,
        job=reading.job,
        boot_id=reading.boot_id,
        at=reading.at,
        context=reading.context,
        word=min((one.word for one in now if one.word != IGNORE), key=WORDS.index, default=OK),
        verdicts=(*now, *before),
        gpus=len(reading.gpus),
        signals=len(reading.signals),
        wall_s=probe.wall_s,
        complaints=tuple(complaints),
        notes=probe.notes,
        action=action.word if action else "",
        reason=action.reason if action else "",
        done=action.sentence if action else "",
    )


def told_of(verdict: Verdict, *, earlier: bool = False) -> Told:
    return Told(
        word=verdict.word,
        code=verdict.code,
        gpu=verdict.gpu.index if verdict.gpu else None,
        bus=verdict.gpu.bus if verdict.gpu else "",
        sentence=printable(verdict.sentence),
        rule=verdict.rule,
        source=verdict.source,
        hands_to_run=verdict.hands_to_run,
        sticky=verdict.sticky,
        earlier=earlier,
    )


def printable(text: str) -> str:
    """Of a text that a user may have chosen, such as a process's name: terminals obey some."""
    return "".join(char if char.isprintable() else "?" for char in text)


def report_record(report: Report) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **asdict(report)}


def parse_report(record: object, *, where: str) -> Report:
    """FormatError for what is none, or of a newer form. Keys of a newer writer are left out."""
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        raise FormatError(f"`{where}` is no record of ftslurm health of version {SCHEMA_VERSION}")
    values = _values(record, _REPORT, where)
    if not all(0 <= values[name] < _MOST for name in ("at", "wall_s", "gpus", "signals")):
        raise FormatError(f"`{where}` has a number that cannot be right")
    verdicts = record.get("verdicts")
    if not isinstance(verdicts, list) or values["word"] not in NAGIOS:
        raise FormatError(f"`{where}` has no verdicts that this ftslurm knows")
    told = tuple(Told(**_values(one, _TOLD, where)) for one in verdicts)
    if not all(one.word in WORDS for one in told):
        raise FormatError(f"`{where}` has a verdict that this ftslurm does not know")
    texts = {name: tuple(values[name]) for name in ("complaints", "notes")}
    if not all(isinstance(text, str) for found in texts.values() for text in found):
        raise FormatError(f"`{where}` has notes that are no texts")
    return Report(**{**values, **texts, "verdicts": told})


_MOST = 1e12
_TEXT, _NUMBER, _FLAG = (str,), (int, float), (bool,)
_TOLD: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("word", "code", "bus", "sentence", "rule", "source"), _TEXT),
    "gpu": (int, type(None)),
    **dict.fromkeys(("hands_to_run", "sticky", "earlier"), _FLAG),
}
_REPORT: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("node", "job", "boot_id", "context", "word"), _TEXT),
    **dict.fromkeys(("action", "reason", "done"), _TEXT),
    "gpus": (int,),
    "signals": (int,),
    **dict.fromkeys(("at", "wall_s"), _NUMBER),
    **dict.fromkeys(("complaints", "notes"), (list,)),
}


def _values(record: object, types: Mapping[str, tuple[type, ...]], where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise FormatError(f"`{where}` has a verdict that is no object")
    for name, kinds in types.items():
        if type(record.get(name)) not in kinds:
            raise FormatError(f"`{where}` has no `{name}` that can be read")
    return {name: record.get(name) for name in types}
