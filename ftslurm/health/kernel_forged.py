"""Which lines of a log file may be a user's own, and count for nothing. Pure.

The kernel prints a message that holds line breaks as several lines, each with the same time before
it (printk.c, record_print_text), and some messages hold what a user has named: `NAME[17]: segfault
at 0 ... in FILE`, `tmpfs: Unknown parameter 'NAME'`. In a file of syslog's, which reads /proc/kmsg,
what stands behind a line break in such a name looks like a message (both seen on Linux 6.18, by a
user without rights). From /dev/kmsg it comes escaped, so nothing of it is asked there.

A line is refused only where a line before it, of the same time, is of one of these forms. An error
of the hardware that is in the same microsecond as such a message is refused with it: nothing in a
file tells them apart. Where syslog leaves out the kernel's time, all lines count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MESSAGE_LINES = 256
MESSAGE_BYTES = 16384
"""More than the longest record (PRINTK_MESSAGE_MAX, 2 KiB with the kernel's times in it) takes up
in a file: at most 136 lines, each behind what syslog writes before it."""

_STAMP = re.compile(rb"\[ *\d{1,12}\.\d{6}\](?:\[ *[TC]\d+\])?(?: |$)")
"""Without a blank where the line is empty and syslog cuts off blanks."""
_USERS = re.compile(
    rb"(?:traps: )?(?:[#\\]\w{3}|.){0,15}\[\d+\]:? "
    rb"|.*?[ (]['\"`]"
    rb"|.* filesystem being (?:re)?mounted at "
    rb"|oom-kill:|Task in /",
    re.S,
)
"""A process by its name, of 15 letters at most (syslog may escape some), and its number; a quoted
name; the place of a mount (fs/namespace.c); a cgroup (cgroup1_rename once took line breaks)."""


def may_be_users(line: bytes, before: Sequence[bytes]) -> bool:
    """Whether `line` may be part of a user's name in a message that begins in the lines `before`
    it."""
    stamp = _STAMP.search(line)
    if stamp is None:
        return False
    for other in reversed(before):
        found = _STAMP.search(other)
        if found is None:  # syslog's own, `last message repeated 9 times`
            continue
        if found.group().rstrip() != stamp.group().rstrip():
            return False
        if _USERS.match(other, found.end()):
            return True
    return False
