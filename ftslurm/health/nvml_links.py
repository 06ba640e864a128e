"""NVLink as NVML tells it: how many links are up, and the error counters of each. Reads only.

How many links there should be depends on the board: an H100 of a PCIe card has 12 of its 18, a pair
without a bridge has none. So the number that is up is told, and the number of the model only where
its name leaves no doubt.
"""

from __future__ import annotations

import re
from ctypes import c_void_p
from typing import Callable, Optional, Protocol

from ftslurm.health import nvml_types as n
from ftslurm.health import signals as s
from ftslurm.health.nvml import Field, Nvml
from ftslurm.health.signals import Value


class Say(Protocol):
    def __call__(self, kind: str, value: Value, *, link: Optional[int] = None) -> None: ...


# Links of boards that are sold with all of them wired, by product name
# (nvidia-smi nvlink -s: shared captures of H100, H200, A100, V100 and GB200).
_MODEL_LINKS = (
    (re.compile(r"V100-SXM"), 6),
    (re.compile(r"A100-SXM"), 12),
    (re.compile(r"H100 80GB HBM3\Z"), 18),
    (re.compile(r"H200\Z"), 18),
    (re.compile(r"\bG?B[23]00\Z"), 18),
)

# Counters of NVLink up to 4: block of links 0-5, block of links 6-11, counter number, kind.
_COUNTERS = (
    (n.FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L0, n.FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L6,
     n.NVLINK_ERROR_DL_REPLAY, s.NVLINK_REPLAY),
    (n.FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L0, n.FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L6,
     n.NVLINK_ERROR_DL_RECOVERY, s.NVLINK_RECOVERY),
    (n.FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0, n.FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L6,
     n.NVLINK_ERROR_DL_CRC_FLIT, s.NVLINK_CRC),
    (n.FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_L0, n.FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_L6,
     n.NVLINK_ERROR_DL_CRC_DATA, s.NVLINK_CRC),
)  # fmt: skip
_NVLINK5 = {
    n.FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS: s.NVLINK5_MALFORMED,
    n.FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS: s.NVLINK5_OVERRUN,
    n.FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS: s.NVLINK5_INTEGRITY,
    n.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS: s.NVLINK5_RECOVERY_FAILED,
    n.FI_DEV_NVLINK_COUNT_EFFECTIVE_BER: s.NVLINK5_EFFECTIVE_BER,
    n.FI_DEV_NVLINK_COUNT_SYMBOL_BER: s.NVLINK5_SYMBOL_BER,
}
_BER = {s.NVLINK5_EFFECTIVE_BER, s.NVLINK5_SYMBOL_BER}


def read_links(
    nvml: Nvml, device: c_void_p, *, works: Callable[[int, str], bool], say: Say
) -> None:
    """Says nothing at all of a GPU without NVLink."""
    links = _link_states(nvml, device, works)
    if not links:
        return
    say(s.NVLINK_LINKS_UP, sum(links.values()))
    code, name = nvml.text("nvmlDeviceGetName", device)
    model = model_links(name) if code == n.SUCCESS else None
    if model is not None:
        say(s.NVLINK_LINKS_MODEL, model)
    fields: dict[Field, tuple[int, int]] = {}
    wanted = [(_block_field(low, high, link), 0) for low, high, _, _ in _COUNTERS for link in links
              if link < 12] + [(field, link) for field in _NVLINK5 for link in links]  # fmt: skip
    code, fields = nvml.fields(device, wanted)
    works(code, "nvmlDeviceGetFieldValues")
    _say_counters(nvml, device, list(links), fields, say)
    for (field, link), (code, value) in fields.items():
        kind = _NVLINK5.get(field)
        if kind is not None and code == n.SUCCESS:
            say(kind, bit_error_rate(value) if kind in _BER else value, link=link)


def model_links(name: str) -> Optional[int]:
    """Links that a GPU of this product name has in its board; None where that is not sure."""
    return next((links for pattern, links in _MODEL_LINKS if pattern.search(name)), None)


def bit_error_rate(packed: int) -> float:
    """Of mantissa (bits 8-11) and exponent (bits 0-7); `15e-255` is how NVML writes zero."""
    mantissa, exponent = packed >> 8 & 0xF, packed & 0xFF
    return 0.0 if exponent == 0xFF else float(f"{mantissa}e-{exponent}")


def _link_states(
    nvml: Nvml, device: c_void_p, works: Callable[[int, str], bool]
) -> dict[int, bool]:
    name = "nvmlDeviceGetNvLinkState"
    states: dict[int, bool] = {}
    for link in range(n.NVLINK_MAX_LINKS):
        code, state = nvml.number(name, device, link)
        if code == n.ERROR_INVALID_ARGUMENT:  # past the last link of this model
            break
        if works(code, name):
            # Other than 0 and 1 is asleep or idle by plan (nvml.h, NVML_NVLINK_STATE_SLEEP).
            states[link] = state != 0
        elif code not in n.ABSENT:
            return {}  # no count from a GPU that stops answering halfway
    return states


def _block_field(low: int, high: int, link: int) -> int:
    return low + link if link < 6 else high + link - 6


def _say_counters(
    nvml: Nvml,
    device: c_void_p,
    links: list[int],
    fields: dict[Field, tuple[int, int]],
    say: Say,
) -> None:
    """Links that have no field of their own are asked for one by one."""
    absent: set[int] = set()
    for link in links:
        totals: dict[str, int] = {}
        for low, high, counter, kind in _COUNTERS:
            code, value = fields.get(
                (_block_field(low, high, link), 0), (n.ERROR_NOT_SUPPORTED, 0)
            ) if link < 12 else (n.ERROR_NOT_SUPPORTED, 0)  # fmt: skip
            if code != n.SUCCESS and counter not in absent:
                code, value = nvml.count("nvmlDeviceGetNvLinkErrorCounter", device, link, counter)
                if code in n.ABSENT:
                    absent.add(counter)
            if code == n.SUCCESS:
                totals[kind] = totals.get(kind, 0) + value
        for kind, total in totals.items():
            say(kind, total, link=link)
