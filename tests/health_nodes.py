"""Readings of made-up nodes, for the tests of what they mean: healthy ones, and what differs."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from ftslurm.health import signals as s
from ftslurm.health.history import History
from ftslurm.health.kernel_line import parse_line
from ftslurm.health.kernel_log import read_new, signals_of
from ftslurm.health.signals import Failure, Gpu, Reading, Signal
from ftslurm.health.verdict import Thresholds, Verdict
from ftslurm.health.verdicts import judge, remember

BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
GPUS = tuple(Gpu(index, f"GPU-{index}", f"0000:{bus}:00") for index, bus in enumerate(BUSES))
BOOT, NOW, LOOK_S = "boot-1", 1_800_000_000.0, 60.0

_MEMORY = {
    s.ECC_MODE: "enabled",
    s.ECC_DRAM_VOLATILE_UNCORRECTED: 0,
    s.ECC_SRAM_VOLATILE_UNCORRECTED: 0,
    s.SRAM_THRESHOLD: False,
    s.REMAP_PENDING: False,
    s.REMAP_FAILURE: False,
    s.REMAPS_UNCORRECTABLE: 0,
    s.REMAP_BANKS_NONE: 0,
    s.UNREPAIRABLE_MEMORY: False,
}
_PAGES = {s.RETIRED_PAGES: 5, s.RETIRED_PAGES_DOUBLE_BIT: 1, s.RETIRED_PAGES_PENDING: False}
_BUS = {s.PCIE_WIDTH: 16, s.PCIE_WIDTH_MAX: 16, s.PCIE_GEN: 5, s.PCIE_GEN_MAX: 5}
_WORK = {
    s.GPU_UTILISATION: 98,
    s.CLOCKS_EVENT: 4,
    s.TEMPERATURE: 55,
    s.TEMPERATURE_MARGIN: 25,
    s.PERSISTENCE_MODE: True,
}
_FABRIC = {s.FABRIC_STATE: "completed", s.FABRIC_STATUS: 0}
_LINKS = {s.NVLINK_LINKS_UP: 18, s.NVLINK_LINKS_MODEL: 18}

MODELS: dict[str, dict[str, Any]] = {
    "h100": {**_MEMORY, **_BUS, **_WORK, **_FABRIC, **_LINKS, s.RECOVERY_ACTION: 0},
    # A driver before R565 has no recovery action.
    "a100": {**_MEMORY, **_BUS, **_WORK, s.NVLINK_LINKS_UP: 12, s.NVLINK_LINKS_MODEL: 12},
    "pcie": {**_MEMORY, **_BUS, **_WORK, s.RECOVERY_ACTION: 0},
    # NVML tells neither rows nor volatile errors of a GPU that is cut into instances.
    "mig": {**_BUS, **_WORK, s.MIG_MODE: True},
    "v100": {**_PAGES, **_BUS, **_WORK, s.NVLINK_LINKS_UP: 6, s.NVLINK_LINKS_MODEL: 6},
    "bare": {**_BUS, **_WORK},
    "none": {},
}


def node(
    model: str = "h100",
    *signals: Signal,
    boot_id: str = BOOT,
    at: float = NOW,
    context: str = "epilog",
    failures: Iterable[Failure] = (),
    job: str = "7",
    user: str = "alice",
) -> Reading:
    """A healthy node of that model, but for `signals`, which replace what they are about."""
    count = 0 if model == "none" else len(GPUS)
    healthy = [
        Signal(kind, count) for kind in (s.GPU_COUNT_PCI, s.GPU_COUNT_NVML, s.GPU_COUNT_GRES)
    ]
    gpus = GPUS[:count]
    for gpu in gpus:
        healthy += [Signal(kind, value, gpu) for kind, value in MODELS[model].items()]
    given = {signal.place for signal in signals if signal.kind not in (s.XID, s.SXID, s.AER)}
    kept = [signal for signal in healthy if signal.place not in given]
    return Reading(
        boot_id, "node1", context, at, gpus, (*kept, *signals), tuple(failures), job, user
    )


def signal(kind: str, value: Any, index: Optional[int] = 1, **rest: Any) -> Signal:
    return Signal(kind, value, None if index is None else GPUS[index], **rest)


def logged(*lines: str, times: int = 1) -> list[Signal]:
    """What the kernel has said, through the parser, without the reader."""
    events = [parse_line(line) for line in lines * times]
    return signals_of([event for event in events if event is not None], GPUS)


def xid(number: int, text: str = "", *, bus: str = "43", at: Optional[float] = None) -> Signal:
    line = f"NVRM: Xid (PCI:0000:{bus}:00): {number}" + (f", {text}" if text else "")
    (one,) = logged(line)
    return Signal(one.kind, one.value, one.gpu, one.link, at, one.text, one.where)


def looks(
    readings: Iterable[Reading],
    baseline: Optional[Reading],
    *,
    history: Optional[History] = None,
    thresholds: Optional[Thresholds] = None,
) -> list[Verdict]:
    """Verdicts of the last of several looks, each of which remembers those before."""
    history, verdicts = history or History(), []
    for reading in readings:
        verdicts = judge(reading, baseline=baseline, history=history, thresholds=thresholds)
        history = remember(history, reading, verdicts, baseline=baseline)
    return verdicts


def of_case(case: Mapping[str, Any]) -> list[Verdict]:
    """A case of tests/data/health, as often looked at as it says. Its log goes through a file and
    the reader, `seen` before the first look; with `users` each of them has it in a job of his own.
    """
    model, users = case.get("model", "h100"), case.get("users", [])
    given = [_given(one) for one in case.get("signals", [])]
    failures = [Failure(source, text) for source, text in case.get("failures", [])]
    before = [_given(one) for one in case.get("baseline", [])]
    baseline = node(model, *before, at=NOW - 600, boot_id=case.get("boot", BOOT))
    readings = []
    with tempfile.TemporaryDirectory() as folder:
        log = _Log(Path(folder) / "kern.log", case)
        for look in range(len(users) or case.get("looks", 1)):
            # A line of the log is read once.
            told = log.new(case.get("log", []) if users or look == 0 else [])
            user = users[look] if users else "alice"
            readings.append(node(model, *given, *told, at=NOW + LOOK_S * look, failures=failures,
                                 job=str(7 + look), user=user))  # fmt: skip
    return looks(readings, baseline)


class _Log:
    """A case's kernel log, read as a probe reads it."""

    def __init__(self, path: Path, case: Mapping[str, Any]) -> None:
        self.path, self.case, self.cursor = path, case, None
        if "seen" in case:
            self.new(case["seen"])
        if case.get("reboot"):
            self.cursor = replace(self.cursor, boot_id="boot-0")

    def new(self, lines: Iterable[str]) -> list[Signal]:
        with self.path.open("a") as stream:
            stream.writelines(f"{line}\n" for line in list(lines) * self.case.get("times", 1))
        if self.case.get("rotated") and self.cursor is not None:
            self.path.rename(self.path.with_name("kern.log.1"))
            self.path.touch()
        new = read_new(self.path, self.cursor, boot_id=BOOT)
        assert not new.failures
        self.cursor = new.cursor
        return signals_of(new.events, GPUS)


def _given(one: Mapping[str, Any]) -> Signal:
    index = one.get("gpu")
    return Signal(**{**one, "gpu": None if index is None else GPUS[index]})
