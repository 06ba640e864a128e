"""Every parser that a node's health is judged by, with what a good node gives it, and ways to spoil
that; for the fuzz tests.

A reader turns bytes into verdicts as a probe would: what was parsed is held against a baseline that
was read from the undamaged input.
"""

import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

from health_nodes import GPUS, NOW, looks, node, signal, xid

from ftslurm.errors import FormatError
from ftslurm.health import nvidia_smi, resume, sysfs
from ftslurm.health import signals as s
from ftslurm.health.history import History, Past, history_record, parse_history
from ftslurm.health.kernel_line import parse_line
from ftslurm.health.kernel_log import (
    Cursor,
    cursor_record,
    parse_cursor,
    read_kmsg,
    read_new,
    signals_of,
)
from ftslurm.health.kernel_tally import Tally
from ftslurm.health.look import Emitter, parse_lines
from ftslurm.health.memory import Memory, memory_record, parse_memory
from ftslurm.health.node_state import NodeState
from ftslurm.health.nvidia_smi_fields import CSV_FIELDS
from ftslurm.health.report import Report, Told, parse_report, report_record
from ftslurm.health.restored import Had, lacking
from ftslurm.health.settings import HealthSettings, thresholds_of
from ftslurm.health.settings_file import settings_of, to_record
from ftslurm.health.signals import Gpu, Reading, Signal, parse_reading, reading_record
from ftslurm.health.verdict import HARD, Verdict
from ftslurm.health.verdicts import judge

SMI = Path(__file__).parent / "data" / "health" / "smi"
GPU = Gpu(0, "GPU-00000000-0000-4000-8000-000000000000", "0000:1b:00")
BOOT_AT = NOW - 86400.0
_MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_FOLDER = tempfile.TemporaryDirectory(prefix="ftslurm-fuzz-", dir=_MEMORY_DISK)
_ROOT = Path(_FOLDER.name)
"""One for all: to make a folder for each of a million inputs is most of the time."""


@dataclass(frozen=True)
class Input:
    """`healthy`: what a good node gives; `spoil` may be done to it without a drain."""

    parse: Callable[[bytes], list[Signal]]
    healthy: tuple[bytes, ...]
    spoil: str = "cut lines noise"
    per_million: int = 0

    def drains(self, data: bytes, *, before: bytes = b"") -> list[Verdict]:
        """What keeps jobs off the node in one look at `data`, `before` being the baseline's."""
        found = self.parse(data)
        if not found:
            return []
        baseline = _reading(self._parsed(before), NOW - 600) if before else None
        verdicts = judge(_reading(found, NOW), baseline=baseline, history=History())
        return [one for one in verdicts if one.word in HARD]

    @lru_cache(maxsize=256)  # noqa: B019
    def _parsed(self, data: bytes) -> tuple[Signal, ...]:
        return tuple(self.parse(data))


def _reading(signals: Sequence[Signal], at: float) -> Reading:
    return Reading("boot-1", "node1", "epilog", at, (GPU,), tuple(signals))


def damaged(chance: random.Random, data: bytes, ways: str) -> bytes:
    """`data` as a pipe, a full disk or another writer may leave it; nothing new is said in it."""
    for _ in range(chance.randrange(1, 4)):
        way, at = chance.choice(ways.split()), chance.randrange(len(data) + 1)
        if way == "cut":
            data = data[:at]
        elif way == "lines":
            lines = data.split(b"\n")
            at = chance.randrange(len(lines))
            del lines[at : at + chance.randrange(1, 4)]
            data = b"\n".join(lines)
        else:
            noise = bytes(chance.choices(b'\x00\xff\x1b\xc3\t\n ;"{}[]~#%', k=chance.randrange(9)))
            data = data[:at] + noise + data[at:]
    return data


def garbled(chance: random.Random, one: bytes, other: bytes) -> bytes:
    """Of two inputs one that says anything at all."""
    at, end = chance.randrange(len(one) + 1), chance.randrange(len(other) + 1)
    data = bytearray(one[:at] + other[end:] if chance.random() < 0.5 else one)
    for _ in range(chance.randrange(9)):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


# The kernel log.


def _line(data: bytes) -> list[Signal]:
    event = parse_line(data, boot_at=BOOT_AT, now=NOW)
    return signals_of([event] if event else [], GPUS)


def _log_file(data: bytes) -> list[Signal]:
    path = _ROOT / "kern.log"
    path.write_bytes(data)
    new = read_new(path, None, boot_id="boot-1", boot_at=BOOT_AT, now=NOW)
    assert parse_cursor(cursor_record(new.cursor)) == new.cursor
    return signals_of(new.events, GPUS)


def _kmsg(data: bytes) -> list[Signal]:
    """Records are told apart by an empty line here; the kernel gives one a read."""
    records = iter(data.split(b"\n\n"))
    tally = Tally(BOOT_AT, NOW, is_new_boot=True)
    newest, _ = read_kmsg(lambda: next(records, b""), -1, tally, lambda: True)
    assert newest >= -1
    return signals_of(tally.events(), GPUS)


_HARMLESS = tuple(
    f"NVRM: Xid (PCI:0000:1b:00): {text}".encode()
    for text in (
        "31, pid=20311, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS",
        "13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 1, TPC 1, SM 1)",
        "145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 0x00000000)",
        "45, pid=1, name=a: 79, GPU, Ch 00000001 caused by previous Xid 149",
        "43, pid=35521, Ch 00000008",
    )
) + (
    b"nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV",
    b"nvidia 0000:1b:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=x, (y)",
    b"pcieport 0000:00:03.0: AER: Corrected error received: 0000:1b:00.0",
    b"mlx5_core 0000:0c:00.0: Port module event[error]: module 0, Cable error, High Temperature",
    b"Sep  2 10:00:00 node1 mallory: NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.",
    b"[    0.000000] Linux version 6.8.0-60-generic (buildd@host)",
    b"NVRM: The NVIDIA GPU 0000:1b:00.0 (PCI ID: 10de:2330)",
)
_PREFIXES = (b"", b"[  123.456789] ", b"Sep  2 10:00:00 node1 kernel: [  123.456789] ",
             b"2026-09-02T10:00:00.123456+02:00 node1 kernel: ", b"<3>[ 1.5] ")  # fmt: skip
_LINES = tuple(prefix + line for prefix in _PREFIXES for line in _HARMLESS)
_KMSG = b"\n\n".join(
    f"4,{number},{number}000,-;".encode() + line + b"\n SUBSYSTEM=pci"
    for number, line in enumerate(_HARMLESS)
)


# nvidia-smi.


def _smi_log(name: str, replaced: Sequence[tuple[str, str]] = ()) -> bytes:
    text = (SMI / name).read_text()
    for old, new in replaced:
        assert old in text, (name, old)
        text = text.replace(old, new)
    return text.encode()


def _first_gpu(name: str) -> bytes:
    """Of a log of two GPUs the first, which is well, without what its life has seen."""
    lines, starts = (SMI / name).read_text().splitlines(), []
    for at, line in enumerate(lines):
        starts += [at] if line.startswith("GPU ") else []
    text = "\n".join(lines[: starts[1]]) + "\n"
    for old, new in (("SEC-DED    : 2", "SEC-DED    : 0"), ("Uncorrectable            : 3",
                     "Uncorrectable            : 0")):  # fmt: skip
        assert old in text, old
        text = text.replace(old, new)
    return text.replace("Attached GPUs                             : 2",
                        "Attached GPUs                             : 1").encode()  # fmt: skip


_XML = _smi_log("x-v13.xml", [
    ("<channel_repair_pending>Yes", "<channel_repair_pending>No"), ("<sram_uncorrectable_secded>1",
     "<sram_uncorrectable_secded>0"), ("hw_thermal_slowdown>Active", "hw_thermal_slowdown>Not "
     "Active"), ("low>1 bank", "low>0 bank"),
])  # fmt: skip
_CSV = (
    ", ".join({"index": "0", "pci.bus_id": "00000000:1B:00.0", "uuid": GPU.uuid,
               "ecc.mode.current": "Enabled", "remapped_rows.pending": "No",
               "remapped_rows.failure": "No", "gpu_recovery_action": "None",
               "pcie.link.width.current": "16", "pcie.link.width.max": "16",
               "clocks_event_reasons.active": "0x0000000000000001", "utilization.gpu": "3 %",
               "temperature.gpu": "31", "persistence_mode": "Enabled",
               "fabric.state": "Completed", "fabric.status": "Success",
               "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded": "No",
               "retired_pages.pending": "[N/A]", "mig.mode.current": "Disabled"}.get(name, "0")
              for name in CSV_FIELDS)
    + "\n"
).encode()  # fmt: skip
_UUIDS = {GPU.uuid: GPU}
_LINKS = "".join([f"GPU 0: NVIDIA H200 (UUID: {GPU.uuid})\n",
                  *(f"\t Link {link}: 26.562 GB/s\n" for link in range(18))]).encode()  # fmt: skip
_LINK_ERRORS = "".join([
    f"GPU 0: NVIDIA H200 (UUID: {GPU.uuid})\n",
    *(f"\t Link {link}: {name} Errors: 0\n" for link in range(18)
      for name in ("Replay", "Recovery", "CRC", "Malformed packet")),
    *(f"\t Link {link}: Effective BER: 15e-255\n" for link in range(18)),
]).encode()  # fmt: skip
_SAID = (
    b'Field "cuda_version" is not a valid field to query.\n',
    b"NVIDIA-SMI 590.44.01  Driver Version: 590.44.01  CUDA Version: 13.0\n",
)


def _text(parse: Callable[[str], list[Signal]]) -> Callable[[bytes], list[Signal]]:
    return lambda data: parse(data.decode(errors="replace"))


# sysfs: the content of several files.

_NEXT = b"<next file>"
_PORT = ("state", "phys_state", "rate", "counters/link_downed", "counters/symbol_error",
         "hw_counters/rnr_nak_retry_err")  # fmt: skip
_PORT_TEXTS = (b"4: ACTIVE\n", b"5: LinkUp\n", b"400 Gb/sec (4X NDR)\n", b"0\n", b"0\n", b"0\n")
_PCI = ("class", "vendor", "revision", "aer_dev_fatal", "aer_dev_nonfatal", "aer_dev_correctable")
_AER = b"Undefined 0\nDLP 0\nTOTAL_ERR_%s 0\n"
_PCI_TEXTS = (b"0x030200\n", b"0x10de\n", b"0xa1\n", _AER % b"FATAL", _AER % b"NONFATAL",
              _AER % b"COR")  # fmt: skip


def _sysfs(names: Sequence[str], place: str, read: Callable[[Path], list[Signal]]) -> Callable:
    root = _ROOT / place.replace("/", "-")
    for name in names:
        (root / place / name).parent.mkdir(parents=True, exist_ok=True)

    def parse(data: bytes) -> list[Signal]:
        texts = data.split(_NEXT) + [b""] * len(names)
        for name, text in zip(names, texts):
            (root / place / name).write_bytes(text)
        return read(root)

    return parse


def _port_of(root: Path) -> list[Signal]:
    return [one for port in sysfs.rdma_ports(root) for one in sysfs.port_signals(port)]


def _pci_of(root: Path) -> list[Signal]:
    gres = Signal(s.GPU_COUNT_GRES, 1)
    return [*sysfs.pci_signals(root), gres, *sysfs.fabric_manager_signals(root)]


# What a child that asks NVML has written, and what is stored from look to look.


def _child_lines() -> bytes:
    written: list[bytes] = []
    emitter = Emitter(written.append)
    emitter.calling("nvmlInit_v2")
    reading = node("h100")
    for gpu in reading.gpus[:1]:
        emitter.emit(gpu)
    for one in reading.signals:
        if one.gpu in (None, GPUS[0]):
            emitter.emit(one)
    return b"".join(written)


def _stored(use: Callable[[Any], list[Signal]]) -> Callable[[bytes], list[Signal]]:
    def parse(data: bytes) -> list[Signal]:
        try:
            return use(json.loads(data))
        except (ValueError, RecursionError, FormatError):
            return []

    return parse


def of_memory(record: Any) -> list[Signal]:
    memory = parse_memory(record) if isinstance(record, dict) else Memory("")
    judged_with(memory.history, memory.reference)
    return list(memory.last.signals) if memory.last else []


def of_reading(record: Any) -> list[Signal]:
    reading = parse_reading(record) if isinstance(record, dict) else node("none")
    judged_with(History(), reading)
    return list(reading.signals)


def of_history(record: Any) -> list[Signal]:
    assert not judged_with(parse_history(record), None)
    return []


def of_cursor(record: Any) -> list[Signal]:
    path = _ROOT / "short.log"
    path.write_bytes(_LINES[0] + b"\n")
    read_new(path, parse_cursor(record), boot_id="boot-1")
    return []


def of_drain_record(record: Any) -> list[Signal]:
    """Whatever it says, a drain with an administrator's reason is not lifted by it."""
    memory = resume.parse_drains(record)
    lacking(memory.drain.had if memory.drain else (), None)
    resume.may_resume(memory, boot_id="b", settings=HealthSettings(), now=NOW)
    if memory.drain is not None:
        state = NodeState("IDLE", frozenset({"DRAIN"}), "broken fan", "alice", NOW)
        assert not resume.still_ours(memory.drain, state)[0]
    return []


def of_settings(record: Any) -> list[Signal]:
    settings, complaint = settings_of(record, where="etc/health.json")
    assert not complaint or settings.mode == "shadow"
    thresholds_of(settings)
    return []


def of_report(record: Any) -> list[Signal]:
    report = parse_report(record, where="node1/latest.json")
    assert report.is_sick == (report.word in HARD)
    return []


def judged_with(history: History, baseline: Optional[Reading]) -> list[Verdict]:
    """What keeps jobs off a good node that is judged by this memory of earlier looks."""
    good = node("h100")
    verdicts = looks([good, replace(good, at=NOW + 60)], baseline, history=history)
    return [one for one in verdicts if one.word in HARD]


_PAST = History((Past("XID79", NOW - 60, bus=GPU.bus, boot_id="boot-0"), Past("reset", NOW - 9)))
_GOOD = node("h100", xid(31), signal(s.ECC_MODE, "enabled", 0))
_MEMORY = Memory(
    "boot-1", cursor=Cursor("boot-1", 9, 9), history=_PAST, last=_GOOD, reference=_GOOD
)

_TOLD = Told("drain", "XID79", 0, GPU.bus, "gone", "xid-79", "NVIDIA")
_REPORT = Report("node1", "7", "boot-1", NOW, "epilog", "drain", (_TOLD,), notes=("a", "b"))
_CAUSE = resume.Cause("gpu-lost", "GPU-LOST", "drain", GPU.bus, "reboot", False, True, "boot-0")
_HAD = (Had("gpu_count_pci", "", None, "", 8.0), Had("rdma_state", "", None, "mlx5_0/1", None))
_OWN = resume.Drains(
    resume.OwnDrain(
        "node1", "ftslurm:GPU-LOST gpu0", NOW - 60, (_CAUSE,), passes=(NOW - 9,), had=_HAD
    ),
    (NOW - 86400,),
    ((NOW - 86400, GPU.bus),),
    ("rdma-state  mlx5_0/1",),
)
_RECORDS: dict[str, tuple[Callable[[Any], list[Signal]], Any, int]] = {
    "history": (of_history, history_record(_PAST), 20_000),
    "cursor": (of_cursor, cursor_record(Cursor("boot-1", 9, 9)), 20_000),
    "stored reading": (of_reading, reading_record(_GOOD), 5_000),
    "memory": (of_memory, memory_record(_MEMORY), 5_000),
    "drain record": (of_drain_record, resume.drains_record(_OWN), 10_000),
    "settings": (of_settings, to_record(HealthSettings()), 10_000),
    "report": (of_report, report_record(_REPORT), 10_000),
}
RECORDS = {
    name: (use, json.loads(json.dumps(record)), number)
    for name, (use, record, number) in _RECORDS.items()
}
"""Who reads it, what a good one holds, and its part of a million inputs."""

INPUTS = {
    "kernel line": Input(_line, _LINES, "cut noise", 500_000),
    "kernel log file": Input(_log_file, (b"\n".join(_LINES) + b"\n",), per_million=5_000),
    "kmsg": Input(_kmsg, (_KMSG,), "cut noise", 15_000),
    "nvidia-smi -q -x": Input(_text(lambda text: nvidia_smi.parse_xml(text).signals), (_XML,),
                              per_million=60_000),
    "nvidia-smi -q": Input(_text(lambda text: nvidia_smi.parse_q(text).signals),
                           (_first_gpu("q-h100-590.txt"),), per_million=20_000),
    "nvidia-smi csv": Input(_text(lambda text: nvidia_smi.parse_csv(CSV_FIELDS, text).signals),
                            (_CSV,), per_million=110_000),
    "nvidia-smi nvlink -s": Input(_text(lambda text: nvidia_smi.parse_nvlink_state(text, _UUIDS)),
                                  (_LINKS,), per_million=60_000),
    "nvidia-smi nvlink -e": Input(_text(lambda text: nvidia_smi.parse_nvlink_errors(text, _UUIDS)),
                                  (_LINK_ERRORS,), per_million=15_000),
    "nvidia-smi says": Input(_text(nvidia_smi.tool_signals), _SAID, per_million=110_000),
    "sysfs port": Input(_sysfs(_PORT, "sys/class/infiniband/mlx5_0/ports/1", _port_of),
                        (_NEXT.join(_PORT_TEXTS),), per_million=5_000),
    "sysfs pci": Input(_sysfs(_PCI, "sys/bus/pci/devices/0000:1b:00.0", _pci_of),
                       (_NEXT.join(_PCI_TEXTS),), per_million=5_000),
    "NVML child": Input(lambda data: parse_lines(data).signals, (_child_lines(),),
                        per_million=15_000),
    **{name: Input(_stored(use), (json.dumps(record).encode(),), per_million=number)
       for name, (use, record, number) in RECORDS.items()},
}  # fmt: skip
assert sum(one.per_million for one in INPUTS.values()) == 1_000_000
