"""What a node is, as far as it decides whether ranks on several nodes do the same: reads only.

CPU by what its instruction set offers, GPUs and their driver as the kernel module names them,
whatever the job was given of them; interfaces with an address.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ftslurm.node.interface import ipv4_of
from ftslurm.run.rank import node_name

# x86-64 psABI, 3.1.1: micro-architecture levels, by the words of /proc/cpuinfo.
_LEVELS = (
    ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    ("x86-64-v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}),
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
)
# Kernels of BLAS and oneDNN are chosen by these; sums come out in another order.
_FURTHER = ("avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_tile", "sve",
            "sve2", "bf16")  # fmt: skip
_DRIVER = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")


def machine(root: Path = Path("/")) -> dict[str, Any]:
    model, isa = _cpu(root)
    return {
        "node": node_name(),
        "cpu": model,
        "isa": isa,
        "gpus": _gpus(root),
        "driver": _driver(root),
        "interfaces": _interfaces(root),
        "route": _default_route(root),
        "python": platform.python_version(),
    }


def isa_of(machine_word: str, flags: Collection[str]) -> str:
    """e.g. `x86-64-v4 avx512_bf16 amx_tile`."""
    words = machine_word
    if machine_word == "x86_64":
        words = "x86-64"
        for name, needed in _LEVELS:
            if not needed <= set(flags):
                break
            words = name
    return " ".join([words, *(one for one in _FURTHER if one in flags)])


def _cpu(root: Path) -> tuple[str, str]:
    names: dict[str, str] = {}
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        names.setdefault(key.strip(), value.strip())
    flags = names.get("flags") or names.get("Features") or ""
    model = names.get("model name") or names.get("CPU part") or "unknown"
    return model, isa_of(platform.machine(), flags.split())


def _gpus(root: Path) -> dict[str, int]:
    """Model -> how many the node has."""
    found: Counter[str] = Counter()
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                found[value.strip()] += 1
    return dict(found)


def _driver(root: Path) -> str:
    try:
        first = (root / "proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    match = _DRIVER.search(first)
    return match[1] if match else ""


def _interfaces(root: Path) -> dict[str, str]:
    """Name -> address, of those that have one; `lo` is everywhere and leads nowhere."""
    names = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    found = {}
    for name in names:
        address = ipv4_of(name) if name != "lo" else None
        if address is not None:
            found[name] = address
    return found


def _default_route(root: Path) -> str:
    """Interface that leads out; empty: none does."""
    try:
        lines = (root / "proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return ""
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[1] == "00000000":
            return words[0]
    return ""
