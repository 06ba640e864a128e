"""One line of the kernel log, read into an event. Pure: any bytes give an event or None.

A message counts only at the very beginning of what the kernel has written, and behind a syslog
prefix only under the name `kernel`. Some messages of the kernel begin with the name of a process
and end with that of a file or a cgroup, all of them their user's choice (`NAME[17]: segfault at 0
... in FILE[401000+1000]`): so each form here is fixed for longer than such a name can be. What is
cut off, wrapped or no text at all is no event.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Optional, Union

from ftslurm.health.signals import AER, KERNEL_LOST, MLX5, SXID, XID, normal_bus

LINE_BYTES = 4096
"""What is longer is cut: a kernel record holds 1 KiB (printk's PRINTK_MESSAGE_MAX is 2 KiB)."""

FATAL, NONFATAL, CORRECTABLE = "fatal", "nonfatal", "correctable"

_COMMAND_CHARACTERS = 15
"""A process's name in the kernel is this long at most (TASK_COMM_LEN of linux/sched.h)."""


@dataclass(frozen=True)
class KernelEvent:
    """`kind`: xid, sxid, aer, mlx5 or kernel_lost. `count`: lines that have said the same."""

    kind: str
    number: int = 0
    bus: str = ""
    severity: str = ""
    """fatal, nonfatal or correctable where the message says so; the class of a mlx5 message."""
    link: Optional[int] = None
    pid: Optional[int] = None
    name: str = ""
    """Process of an Xid; driver of an AER message; device of a SXid."""
    text: str = ""
    at: Optional[float] = None
    """Of the last line that has said it."""
    count: int = 1


_KMSG = re.compile(r"(\d{1,10}),(\d{1,20}),(\d{1,20}),[^;]*;")
_PRIORITY = re.compile(r"<\d{1,3}>")
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,]\d{1,9})?(Z|[+-]\d\d:?\d\d)?\s+", re.ASCII
)
_SYSLOG = re.compile(r"([^\W\d]{3,5}\.? [ \d]\d \d\d:\d\d:\d\d)(?:\.\d{1,9})?\s+")
_SENDER = re.compile(r"(\S{1,255}) ([^\s:\[]{1,48})(?:\[\d*\])?: ?")
_LEVEL = re.compile(r"kern +:[a-z]+ *: +")
_UPTIME = re.compile(r"\[ *(\+?\d{1,12}\.\d{1,9})\](?:\[ *[TC]\d+\])? ?", re.ASCII)
_DATED = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] ?", re.ASCII)

_BUS = r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_XID = re.compile(rf"NVRM: Xid \({_BUS}([^)]{{0,40}})\): (\d{{1,4}})(?!\d)[,:]?\s*(.*)", re.S)
_SXID = re.compile(rf"(nvidia-nvswitch\d+): SXid \({_BUS}\): (\d{{1,6}})(?!\d)(?:,\s*(.*))?", re.S)
_SXID_DETAIL = re.compile(r"Severity \d+ |Data \{")
_SEVERITY = re.compile(r"(Fatal|Non-?fatal)\b(?:,\s*)?", re.I)
_LINK = re.compile(r"\blink (-?\d{1,3})\b", re.I)
_PROCESS = re.compile(r"pid='?(\d{1,10}|<unknown>)'?(?:,\s*|\s+)name=")
_OPENINGS = re.compile(
    r"(?:Ch|Channel|Graphics|Timeout|GPU|Uncorrectable|Contained|Uncontained|Row|An|NVLink|MMU"
    r"|errorString|DRAM|SRAM|Dynamic|intr|PMU|ESR|Class|SEC2|Reset|Fault|RLW|SAW|TLW|NETIR|MSE)\b"
)
_LOST = re.compile(
    rf"NVRM: (?:(?:The NVIDIA )?GPU (?:at )?{_BUS}(?![\w.]).{{0,200}}?\b)?fallen off the bus\b",
    re.S,
)
"""No user's: the bus, or the words, are past the 15 letters of a process's name."""
_FIRST_LINE = re.compile(r"Linux version \d+\.\d")
"""Of a boot, by linux_banner; the digits are past a process's name as well."""
_ANY_BUS = re.compile(r"\b([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\b")
_AER = re.compile(
    r"([\w-]{1,40}) ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): (?:AER: )?"
    r"(?:PCIe Bus Error: severity=([^,]{1,40}),|(?:Multiple )?((?:Un)?[Cc]orrect(?:ed|able)"
    r"(?: \((?:Non-)?Fatal\))?) error (?:message )?received(?: from|:) ?(\S*))",
)
_MLX5 = re.compile(r"mlx5_core ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])[:\s](.*)", re.S)
_MLX5_CLASSES = (
    ("command_timeout", re.compile(r"will cause a leak of a command resource|cmd_exec timeout")),
    ("unrecoverable", re.compile(r"unrecoverable|health recovery failed")),
    ("health", re.compile(r"health compromised|health poll failed|fatal error \d+ detected")),
    ("power", re.compile(r"insufficient power on the pcie slot")),
    ("temperature", re.compile(r"port module event.*high temperature")),
)
"""Linux drivers/net/ethernet/mellanox/mlx5/core (cmd.c, health.c, events.c); NVSentinel designs."""


def parse_line(
    line: Union[bytes, str], *, boot_at: Optional[float] = None, now: Optional[float] = None
) -> Optional[KernelEvent]:
    """The event of one line in any of the forms that dmesg, syslog, journalctl and /dev/kmsg print.

    `boot_at`, in UTC seconds, gives a time to lines that count from the boot; `now` gives a year to
    those that have none.
    """
    message, at = strip_prefix(_text(line), boot_at=boot_at, now=now)
    if message is None:
        return None
    # dmesg indents what follows a line break inside one message.
    message = message.lstrip(" ")
    event = _xid(message) or _sxid(message) or _lost(message) or _aer(message) or _mlx5(message)
    return None if event is None else _with_time(event, at)


def is_first_line(line: bytes) -> bool:
    """What the kernel says first: what stands before it in a file is of another boot."""
    message, _ = strip_prefix(_text(line))
    return message is not None and _FIRST_LINE.match(message) is not None


def _text(line: Union[bytes, str]) -> str:
    text = line[:LINE_BYTES]
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return text.rstrip("\r\n\0 ")


def _with_time(event: KernelEvent, at: Optional[float]) -> KernelEvent:
    return event if at is None else KernelEvent(**{**event.__dict__, "at": at})


def strip_prefix(
    text: str, *, boot_at: Optional[float] = None, now: Optional[float] = None
) -> tuple[Optional[str], Optional[float]]:
    """What the kernel wrote, and when; None instead where a process wrote it."""
    record = _KMSG.match(text)
    if record is not None:
        # The kernel's own facility is 0; what is written into /dev/kmsg gets another one
        # (Documentation/ABI/testing/dev-kmsg).
        is_kernel = int(record.group(1)) >> 3 == 0
        at = None if boot_at is None else boot_at + int(record.group(3)) / 1e6
        return (text[record.end() :] if is_kernel else None), at
    text = text[_match_end(_PRIORITY, text) :]
    at, is_stamped, text = _stamp(text, now)
    if is_stamped and not text.startswith(("NVRM:", "[")):
        sender = _SENDER.match(text)
        if sender is not None and _looks_like_host(text, sender):
            if sender.group(2) != "kernel":
                return None, at
            text = text[sender.end() :]
    text = text[_match_end(_LEVEL, text) :]
    return _kernel_stamp(text, at, boot_at, now)


def _looks_like_host(text: str, sender: re.Match[str]) -> bool:
    """`node1 kernel: ` is a sender; `mlx5_core 0000:0c:00.0: ` and `nvidia 0000:9b:00.0: ` are the
    kernel's own words behind a bare time (dmesg --time-format iso)."""
    return _ANY_BUS.match(text[sender.start(2) :]) is None and not text.startswith("nvidia-nvsw")


def _match_end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return 0 if match is None else match.end()


def _stamp(text: str, now: Optional[float]) -> tuple[Optional[float], bool, str]:
    iso = _ISO.match(text)
    if iso is not None:
        return _iso_time(iso), True, text[iso.end() :]
    syslog = _SYSLOG.match(text)
    if syslog is None:
        return None, False, text
    return _yearless_time(syslog.group(1), now), True, text[syslog.end() :]


def _kernel_stamp(
    text: str, at: Optional[float], boot_at: Optional[float], now: Optional[float]
) -> tuple[str, Optional[float]]:
    uptime = _UPTIME.match(text)
    if uptime is not None:
        is_since_boot = not uptime.group(1).startswith("+")  # dmesg --reltime has steps
        if boot_at is not None and at is None and is_since_boot:
            at = boot_at + float(uptime.group(1))
        return text[uptime.end() :], at
    dated = _DATED.match(text)
    if dated is not None:
        return text[dated.end() :], _local_time(dated.group(1), "%b %d %H:%M:%S %Y")
    return text, at


def _iso_time(iso: re.Match[str]) -> Optional[float]:
    zone = (iso.group(3) or "").replace("Z", "+0000").replace(":", "")
    text = f"{iso.group(1)} {iso.group(2)}{zone}"
    return _local_time(text, "%Y-%m-%d %H:%M:%S%z" if zone else "%Y-%m-%d %H:%M:%S")


def _yearless_time(text: str, now: Optional[float]) -> Optional[float]:
    """Of this year, or of the last one where it would lie ahead by more than a day."""
    if now is None:
        return None
    year = datetime.datetime.fromtimestamp(now).year
    at = _local_time(f"{text} {year}", "%b %d %H:%M:%S %Y")
    if at is not None and at > now + 86400:
        at = _local_time(f"{text} {year - 1}", "%b %d %H:%M:%S %Y")
    return at


def _local_time(text: str, form: str) -> Optional[float]:
    try:
        return datetime.datetime.strptime(text, form).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _xid(message: str) -> Optional[KernelEvent]:
    match = _XID.match(message)
    if match is None:
        return None
    pid, name, text = _process(match.group(4))
    severity = ""
    if 144 <= int(match.group(3)) <= 150:
        found = re.search(r"\b(Fatal|Nonfatal)\b", text)
        severity = found.group(1).lower() if found else ""
    return KernelEvent(
        XID,
        int(match.group(3)),
        normal_bus(match.group(1)),
        severity=severity,
        link=_link(text),
        pid=pid,
        name=name,
        text=text,
    )


def _process(tail: str) -> tuple[Optional[int], str, str]:
    """Pid, name and text of `pid=17, name=my, app, Ch 00000001`: a name may hold commas."""
    process = _PROCESS.match(tail)
    if process is None:
        return None, "", tail
    pid = int(process.group(1)) if process.group(1).isdigit() else None
    rest = tail[process.end() :]
    commas = [at for at, letter in enumerate(rest[: _COMMAND_CHARACTERS + 3]) if letter == ","]
    known = [at for at in commas if _OPENINGS.match(rest[at + 1 :].lstrip())]
    if known or commas:
        at = (known or commas)[0]
        return pid, rest[:at].strip("'"), rest[at + 1 :].strip()
    name, _, text = rest.partition(" ")
    if not _OPENINGS.match(text):
        name, text = rest[: _COMMAND_CHARACTERS + 2], ""
    return pid, name.strip("'"), text


def _link(text: str) -> Optional[int]:
    match = _LINK.search(text)
    return int(match.group(1)) if match else None


def _sxid(message: str) -> Optional[KernelEvent]:
    match = _SXID.match(message)
    text = "" if match is None else match.group(4) or ""
    # Lines with the registers of an error have its number again and are no error of their own.
    if match is None or _SXID_DETAIL.match(text):
        return None
    severity = _SEVERITY.match(text)
    return KernelEvent(
        SXID,
        int(match.group(3)),
        normal_bus(match.group(2)),
        severity=severity.group(1).lower().replace("-", "") if severity else "",
        link=_link(text),
        name=match.group(1),
        text=text,
    )


def _lost(message: str) -> Optional[KernelEvent]:
    if _LOST.match(message) is None:
        return None
    bus = _ANY_BUS.search(message)
    return KernelEvent(KERNEL_LOST, bus=normal_bus(bus.group(1)) if bus else "", text=message)


def _aer(message: str) -> Optional[KernelEvent]:
    match = _AER.match(message)
    if match is None:
        return None
    word = (match.group(3) or match.group(4)).lower()
    if word.startswith("correct"):
        severity = CORRECTABLE
    else:
        severity = NONFATAL if "non-fatal" in word else FATAL if "(fatal)" in word else ""
    bus = normal_bus(match.group(5) or "") or normal_bus(match.group(2))
    return KernelEvent(AER, bus=bus, severity=severity, name=match.group(1), text=message)


def _mlx5(message: str) -> Optional[KernelEvent]:
    match = _MLX5.match(message)
    if match is None:
        return None
    text = match.group(2).lower()
    for severity, pattern in _MLX5_CLASSES:
        if pattern.search(text):
            bus = normal_bus(match.group(1))
            return KernelEvent(MLX5, bus=bus, severity=severity, name="mlx5_core", text=message)
    return None
