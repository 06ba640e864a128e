"""How bad the text of an NVLink Xid says that it is: 74 by its registers, 144 to 150 by its words.

Pure. Each gives the word of a verdict, and what in the text it comes from.
"""

from __future__ import annotations

import re

from ftslurm.health.xid_table import DRAIN, IGNORE, NVLINK4_BITS, NVLINK4_MILD, RESET, WARN

_REGISTERS = re.compile(r"\blink -?\d+\s*\(((?:\s*0x[0-9a-fA-F]{1,8},?){1,7})\s*\)", re.I)
_JUDGED_WORDS = (1, 3, 4, 5)
"""Of the seven; the others say where, not what."""
_INJECTED = re.compile(r"\bXC\d\s+i1\b")


def by_registers(text: str) -> tuple[str, str]:
    """Xid 74, of NVLink up to 4: the worst of what its bits mean.

    A bit that no row knows, and no registers at all, are as bad as the message.
    """
    unknown = _registers(text)
    words, names = set(), []
    for number, bits, name, _ in NVLINK4_BITS:
        mask = sum(1 << bit for bit in bits)
        if unknown.get(number, 0) & mask:
            names.append(name)
            words.add(NVLINK4_MILD.get(name, DRAIN))
            unknown[number] &= ~mask
    if not names or any(unknown.get(number) for number in _JUDGED_WORDS):
        words.add(DRAIN)
    worst = next(word for word in (DRAIN, RESET, WARN, IGNORE) if word in words)
    return worst, ", ".join(dict.fromkeys(names))


def _registers(text: str) -> dict[int, int]:
    """By their number, from 1 on, of `link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)`."""
    match = _REGISTERS.search(text)
    found = re.findall(r"0x([0-9a-fA-F]+)", match.group(1)) if match else []
    return {number: int(digits, 16) for number, digits in enumerate(found, start=1)}


def by_words(text: str) -> tuple[str, str]:
    """Xids 144 to 150, of NVLink 5: `UNIT Fatal|Nonfatal XC0 i0 Link 9 (...)`."""
    if _INJECTED.search(text):
        return IGNORE, "injected for a test"
    if text.startswith("NETIR_BER_EVENT"):
        return WARN, "a bit error rate"
    if re.search(r"\bFatal\b", text):
        return RESET, "fatal by its own text"
    return WARN, "not fatal by its own text"
