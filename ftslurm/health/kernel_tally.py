"""The lines of a kernel log, counted into events: equal messages once, with how often they came.

Bounded: a flood of one message costs one event, a flood of many kinds costs what is kept, and what
is left out is told. Nothing is read or written here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Optional

from ftslurm.health.kernel_forged import MESSAGE_LINES, may_be_users
from ftslurm.health.kernel_line import LINE_BYTES, KernelEvent, is_first_line, parse_line
from ftslurm.health.signals import normal_bus

_MESSAGES = 1024
_MESSAGES_OF_ONE = 16
_ERRORS = 1024
"""Different messages kept: in all, and of one error of one GPU; different errors counted."""
_SKEW_S = 120.0
_WRAPPED_LINES = 6

_KEY = re.compile(rb"nvidia-nvswitch\d+: |mlx5_core |pcieport |nvidia \d")
_ERROR = re.compile(rb"\S*Xid \([^)]{0,60}\): \d{1,6}|(?:mlx5_core|pcieport|nvidia) \S+")
_REGISTERS = re.compile(rb"\): 74\b.{0,120}?\blink (-?\d+ ?\([^)]{0,99}\))", re.S)
"""Of an Xid 74 they say how bad it is, of all others the number does."""
_WRAPPED = re.compile(rb"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]{7,18})")


@dataclass
class _Entry:
    event: KernelEvent
    number: int
    """Of the last line that said it."""
    last: bytes
    count: int = 1

    def again(self, number: int, line: bytes) -> None:
        self.count += 1
        self.number, self.last = number, line


class Tally:
    """`is_new_boot`: what was read last is of another boot, so that old lines may come first."""

    def __init__(
        self, boot_at: Optional[float], now: Optional[float], *, is_new_boot: bool
    ) -> None:
        self._boot_at = boot_at
        self._now = now
        self._is_new_boot = is_new_boot
        self._line = 0
        self._before: deque[bytes] = deque(maxlen=0)
        self._wrapped: tuple[int, str] = (-_WRAPPED_LINES, "")
        self._clear()

    def _clear(self) -> None:
        self._by_message: dict[bytes, _Entry] = {}
        self._by_error: dict[bytes, list[_Entry]] = {}
        self._left_out = 0
        self._forged = 0

    def go_on_from(self, lines: Iterable[bytes]) -> None:
        """The lines that a file has before those to come. In a file, unlike in /dev/kmsg, a line
        may be part of another's message."""
        self._before = deque((*self._before, *lines), maxlen=MESSAGE_LINES)

    def add_all(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._line += 1
            # Spelt out: a log may have a million lines, and the prolog five seconds.
            if (
                b"Xid (" in line
                or b"mlx5_core" in line
                or b"rror" in line
                or b"fallen off" in line
                or b"Linux version " in line
            ):
                self._add(line)
            elif b"NVIDIA GPU" in line:
                self._begin_wrapped(line)
            self._before.append(line)

    def events(self) -> tuple[KernelEvent, ...]:
        """In the order of their last lines, and of those lines' times."""
        entries = sorted(self._by_message.values(), key=lambda entry: entry.number)
        return tuple(
            replace(entry.event, count=entry.count, at=self._time_of(entry)) for entry in entries
        )

    def _time_of(self, entry: _Entry) -> Optional[float]:
        if entry.count == 1:
            return entry.event.at
        last = parse_line(entry.last, boot_at=self._boot_at, now=self._now)
        return last.at if last else entry.event.at

    def complaint(self) -> str:
        texts = []
        if self._left_out:
            texts.append(
                f"more than {_ERRORS} different errors; {self._left_out} lines were left out"
            )
        if self._forged:
            texts.append(
                f"{self._forged} lines read like hardware errors and stand in the midst of a "
                "message with a name of a user's, which may have put them there"
            )
        return "; ".join(texts)

    def _add(self, line: bytes) -> None:
        message = _message(line)
        is_lost = b"fallen off" in message and b"Xid (" not in message
        bus = self._wrapped_bus() if is_lost else ""
        message += bus.encode()
        known = self._by_message.get(message)
        if known is not None:
            known.again(self._line, line[:LINE_BYTES])
            return
        if b"Linux version " in line and self._is_boot(line):
            return
        error = _error_of(message)
        of_error = self._by_error.get(error, [])
        is_full = len(of_error) >= _MESSAGES_OF_ONE or len(self._by_message) >= _MESSAGES
        if of_error and is_full:
            of_error[0].again(self._line, line[:LINE_BYTES])
            return
        event = parse_line(line, boot_at=self._boot_at, now=self._now)
        if event is None or self._is_of_before(event):
            return
        if may_be_users(line, self._before):
            self._forged += 1
            return
        if not of_error and len(self._by_error) >= _ERRORS:
            self._left_out += 1
            return
        entry = _Entry(replace(event, bus=event.bus or bus), self._line, line[:LINE_BYTES])
        self._by_message[message] = entry
        self._by_error[error] = [*of_error, entry]

    def _begin_wrapped(self, line: bytes) -> None:
        """`NVRM: The NVIDIA GPU 0000:18:00.0`, two lines before what is said of it."""
        match = _WRAPPED.search(line)
        if match is not None:
            self._wrapped = (self._line, normal_bus(match.group(1).decode("ascii")))

    def _wrapped_bus(self) -> str:
        begun, bus = self._wrapped
        return bus if self._line - begun < _WRAPPED_LINES else ""

    def _is_boot(self, line: bytes) -> bool:
        is_boot = is_first_line(line) and not may_be_users(line, self._before)
        if is_boot and self._is_new_boot:
            self._clear()
        return is_boot

    def _is_of_before(self, event: KernelEvent) -> bool:
        if not self._is_new_boot or event.at is None or self._boot_at is None:
            return False
        return event.at < self._boot_at - _SKEW_S


def _message(line: bytes) -> bytes:
    """The line without its times, by which equal ones are known."""
    start = line.find(b"NVRM: ")
    if start < 0:
        match = _KEY.search(line)
        start = match.start() if match else 0
    return line[start : start + LINE_BYTES]


def _error_of(message: bytes) -> bytes:
    """What it is about; a fatal one must not go under among those that are not."""
    match, registers = _ERROR.search(message), _REGISTERS.search(message)
    is_milder = any(word in message for word in (b"onfatal", b"on-fatal", b"on-Fatal", b"=Corr"))
    error = (match.group() if match else message[:60]) + (b"-" if is_milder else b"+")
    return error + registers.group(1) if registers else error
