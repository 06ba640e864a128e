"""What each Xid means: data with source and date, no judgement of a case.

Read together with `verdicts_kernel`, which knows the state of the GPU. A rule's name in `rule` says
that the word depends on more than the number; `word` is then what holds when nothing else is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

DRAIN, AFTER, RESET, WARN, IGNORE, UNKNOWN = (
    "drain", "after", "reset", "warn", "ignore", "unknown",
)  # fmt: skip
"""Drain now, the job is dead or wrong | the job may end, then drain | the same, and a reset of the
GPU makes it good | write down | nothing | could not tell."""
WORDS = (DRAIN, RESET, AFTER, UNKNOWN, WARN, IGNORE)
"""Worst first."""

NEEDS_RESET, NEEDS_REBOOT, NEEDS_REPAIR = "reset", "reboot", "repair"

_CATALOG = "NVIDIA Xid-Catalog.xlsx (r590)"
_CATALOG_DATE = "2025-10-29"
_DAY_S = 86400.0


@dataclass(frozen=True)
class Repeat:
    """`times` of the same Xid on the same GPU within the window make `word`. A user's Xid has to
    come from as many `users`, and from no other GPU of the node as often: NVIDIA's workflows 13 and
    31 ask for other programs, and NVSentinel#374 tells one GPU from many."""

    times: int
    users: int
    word: str
    window_s: float = _DAY_S
    same_unit: bool = False
    """Of the same GPC and TPC, as the text names them."""


@dataclass(frozen=True)
class XidRow:
    xids: tuple[int, ...]
    meaning: str
    action: str
    """NVIDIA's immediate action / investigatory action."""
    word: str
    needs: str = ""
    of_user: bool = False
    """Of the program that ran: never a drain by itself, and the run is told."""
    is_sticky: bool = False
    rule: str = ""
    repeat: Optional[Repeat] = None
    volta: str = ""
    """The word on a V100 and older, where it differs."""
    source: str = _CATALOG
    date: str = _CATALOG_DATE


def _span(*parts: object) -> tuple[int, ...]:
    """`_span(8, (39, 41))` is 8, 39, 40, 41."""
    numbers: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            numbers.extend(range(part[0], part[1] + 1))
        elif isinstance(part, int):
            numbers.append(part)
    return tuple(numbers)


_TWO_USERS = Repeat(times=3, users=2, word=AFTER)
_AGAIN = Repeat(times=2, users=1, word=AFTER)

XID_TABLE = (
    XidRow((8, 11, 25), "GPU stopped, or a bad push buffer", "RESTART_APP / CHECK_APP", WARN,
           of_user=True),
    XidRow((13,), "graphics engine exception", "RESTART_APP / WORKFLOW_13", WARN, of_user=True,
           repeat=Repeat(times=2, users=2, word=AFTER, same_unit=True),
           source=f"{_CATALOG}; NVSentinel#911; k8s-device-plugin skip list"),
    XidRow((14,), "made up by the driver", "IGNORE", IGNORE),
    XidRow((31,), "MMU page fault", "RESTART_APP / WORKFLOW_31", WARN, of_user=True,
           repeat=_TWO_USERS, source=f"{_CATALOG}; NVSentinel#911"),
    XidRow((32,), "push buffer DMA error", "RESTART_APP / CHECK_APP", WARN, of_user=True,
           repeat=_TWO_USERS, source=f"{_CATALOG}; DCGM"),
    XidRow((37,), "driver firmware error", "IGNORE / CHECK_APP", WARN, of_user=True),
    XidRow((38,), "driver firmware watchdog", "IGNORE / CONTACT_SUPPORT", WARN),
    XidRow(_span((39, 41), (70, 72), (75, 77), 85, (126, 135)), "copy engine exception",
           "RESTART_APP / CONTACT_SUPPORT", WARN, of_user=True),
    XidRow((43,), "GPU stopped processing; it stays healthy", "IGNORE / CONTACT_SUPPORT", WARN,
           of_user=True, source=f"{_CATALOG}; k8s-device-plugin skip list"),
    XidRow((44,), "fault during a context switch", "IGNORE / CONTACT_SUPPORT", WARN),
    XidRow((45,), "channels removed, by a kill or after another Xid", "solo RESTART_FM",
           IGNORE, of_user=True, rule="follows",
           source=f"{_CATALOG}; gpud, k8s-device-plugin ignore it"),
    XidRow((46,), "GPU stopped, timeout", "RESET_GPU", RESET, needs=NEEDS_RESET),
    XidRow((48,), "double bit ECC error", "RESET_GPU; with 63/64 DRAIN_AND_RESET", DRAIN,
           needs=NEEDS_RESET, source=f"{_CATALOG}; DCGM; awsome-distributed-ai"),
    XidRow((54,), "auxiliary power not connected", "CHECK_MECHANICALS", DRAIN,
           needs=NEEDS_REPAIR, is_sticky=True),
    XidRow((60,), "video engine (SEC2) breakpoint", "RESTART_APP / CONTACT_SUPPORT", WARN),
    XidRow((61,), "PMU breakpoint", "RESTART_APP / CONTACT_SUPPORT", WARN, volta=RESET),
    XidRow((62,), "PMU halt", "RESET_GPU", RESET, needs=NEEDS_RESET),
    XidRow((63,), "row remap or page retirement recorded", "IGNORE / IGNORE", AFTER,
           needs=NEEDS_RESET, rule="remap_pending", source=f"{_CATALOG}; gpud#987"),
    XidRow((64,), "row remap failed", "RESET_GPU / CONTACT_SUPPORT", DRAIN,
           needs=NEEDS_REPAIR, is_sticky=True, rule="remap_failure",
           source=f"{_CATALOG}; awsome-distributed-ai PR#1190"),
    XidRow((66, 67), "illegal register access by the driver", "IGNORE / UPDATE_SWFW", WARN),
    XidRow((68,), "video decoder exception", "RESTART_APP", WARN, of_user=True),
    XidRow((69,), "graphics class error", "RESTART_APP / CHECK_APP", WARN, of_user=True),
    XidRow((74,), "NVLink error", "WORKFLOW_NVLINK_ERR", DRAIN, needs=NEEDS_RESET,
           rule="nvlink4", source=f"{_CATALOG}, WORKFLOW_NVLINK_ERR; DCGM"),
    XidRow((78,), "vGPU start failed", "UPDATE_SWFW", WARN),
    XidRow((79,), "GPU has fallen off the bus", "RESTART_BM / CONTACT_SUPPORT", DRAIN,
           needs=NEEDS_REBOOT),
    XidRow((80,), "push buffer check sum", "RESTART_APP", WARN),
    XidRow(_span((82, 84), 86, 88, 89, (96, 105), 139), "video, JPEG or optical flow engine",
           "RESTART_APP", WARN, of_user=True),
    XidRow((92,), "high rate of single bit errors", "IGNORE / CONTACT_SUPPORT", WARN,
           rule="trend"),
    XidRow((93,), "InfoROM wear", "IGNORE / CONTACT_SUPPORT", WARN),
    XidRow((94,), "contained memory error", "RESTART_APP; reset when convenient", RESET,
           needs=NEEDS_RESET, rule="remap_pending", source=f"{_CATALOG}; gpud PR#108"),
    XidRow((95,), "uncontained memory error", "RESET_GPU", DRAIN, needs=NEEDS_RESET,
           source=f"{_CATALOG}; DCGM; awsome-distributed-ai"),
    XidRow((106, 107), "SMBPBI test message", "IGNORE", IGNORE),
    XidRow((108,), "NVLink remote translation error", "IGNORE", WARN),
    XidRow((109,), "context switch timeout", "RESET_GPU / CONTACT_SUPPORT", RESET,
           needs=NEEDS_RESET, repeat=_AGAIN),
    XidRow((110,), "security fault", "RESET_GPU", RESET, needs=NEEDS_RESET),
    XidRow((119, 120), "GSP RPC timeout or GSP error", "RESET_GPU / UPDATE_SWFW", DRAIN,
           needs=NEEDS_RESET,
           source=f"{_CATALOG}; open-gpu-kernel-modules#446; Azure/azurehpc#714"),
    XidRow((121,), "C2C link error", "IGNORE / CONTACT_SUPPORT", WARN, repeat=_AGAIN),
    XidRow((136,), "NVLink training failed", "RESET_GPU", RESET, needs=NEEDS_RESET),
    XidRow((137,), "NVLink privilege error, of the program", "XID_137_FLOW", WARN, of_user=True),
    XidRow((140,), "unrecovered ECC error", "RESET_GPU / CONTACT_SUPPORT", DRAIN,
           needs=NEEDS_RESET, source=f"{_CATALOG}; DCGM"),
    XidRow((141, 142), "fast path or encoder", "IGNORE / CONTACT_SUPPORT", WARN),
    XidRow((143,), "GPU initialization error", "RESET_GPU", DRAIN, needs=NEEDS_RESET),
    XidRow(_span((144, 150)), "NVLink5 error", "decode table", WARN, needs=NEEDS_RESET,
           rule="nvlink5", source=f"{_CATALOG}; NVSentinel#1357; gpud#1174"),
    XidRow((151,), "key rotation failed", "RESTART_VM", DRAIN, needs=NEEDS_REBOOT),
    XidRow((152, 153), "DLA", "IGNORE", IGNORE),
    XidRow((154,), "recovery action changed", "follow its text", UNKNOWN, rule="action",
           source=f"{_CATALOG}; gpud, NVSentinel read the last parenthesis"),
    XidRow((155,), "NVLink taken down by software", "RESET_GPU", RESET, needs=NEEDS_RESET),
    XidRow((156,), "resource retirement", "RESET_GPU / IGNORE", RESET, needs=NEEDS_RESET),
    XidRow((157,), "resource retirement failed; repairs are used up", "CONTACT_SUPPORT", WARN),
    XidRow((158,), "fatal timeout", "RESET_GPU", RESET, needs=NEEDS_RESET),
    XidRow((159,), "CHI non-data error", "CHECK_UVM", RESET, needs=NEEDS_RESET),
    XidRow((160,), "channel retirement", "IGNORE / UPDATE_SWFW", WARN, needs=NEEDS_RESET,
           rule="repair_pending"),
    XidRow((161,), "channel retirement failed", "IGNORE / UPDATE_SWFW", WARN),
    XidRow((162,), "power smoothing at work again", "informational", IGNORE),
    XidRow((164, 165), "power smoothing low or exhausted", "informational", WARN),
    XidRow((163,), "power smoothing off", "blank", WARN),
    XidRow((167,), "PCIe fatal timeout", "blank", DRAIN, needs=NEEDS_REBOOT,
           source=f"{_CATALOG}; gpud"),
    XidRow((169,), "SEC2 halt", "blank", RESET, needs=NEEDS_RESET, source=f"{_CATALOG}; gpud"),
    XidRow((166, 170), "NVLink under confidential computing", "blank", WARN),
    XidRow((168,), "errors in protected memory; less of it is left", "blank", AFTER,
           needs=NEEDS_REBOOT, source=f"{_CATALOG}; awsome-distributed-ai"),
    XidRow((171, 172), "DRAM or SRAM, detail of an Xid 48", "-", DRAIN, needs=NEEDS_RESET),
    XidRow((56, 57, 58), "unused since A100; display or memory on older parts",
           "CONTACT_SUPPORT", WARN, volta=RESET),
    XidRow(_span((1, 7), 9, 10, 12, (15, 24), (26, 30), (33, 36), 42, 47, (49, 53), 55, 59, 65,
                 73, 81, 87, 90, 91, (111, 118), (122, 125), 138),
           "unused since A100", "CONTACT_SUPPORT", WARN),
)  # fmt: skip

ENDS_OF_A_GPU = (48, 79, 95)
"""Each makes the peers complain of their links (gpu-node-health.md (c), Xid 74)."""

UNLISTED = XidRow((), "not in NVIDIA's catalogue", "none", WARN, source="awsome-distributed-ai")

BY_XID = {xid: row for row in XID_TABLE for xid in row.xids}


@dataclass(frozen=True)
class ActionRow:
    """NVML field 230 and the Xid 154 that tells of its change."""

    value: int
    names: tuple[str, ...]
    word: str
    needs: str = ""
    source: str = "DCGM DcgmHealthWatch.cpp 2111; cyclecloud-healthagent"
    date: str = "2026-08"


ACTION_TABLE = (
    ActionRow(0, ("none",), IGNORE),
    ActionRow(1, ("gpu reset required", "reset", "gpu reset"), RESET, NEEDS_RESET),
    ActionRow(2, ("node reboot required", "reboot", "node reboot"), DRAIN, NEEDS_REBOOT),
    ActionRow(3, ("drain p2p", "drain p2p traffic"), AFTER),
    ActionRow(4, ("drain and reset",), RESET, NEEDS_RESET),
    ActionRow(5, ("imex", "recover imex"), WARN),
    ActionRow(6, ("bus reset", "gpu bus reset"), RESET, NEEDS_RESET),
    ActionRow(7, ("system reboot",), DRAIN, NEEDS_REBOOT),
)

# Xid 74: bits of the seven registers behind `link N`, words counted from 1.
_W = "NVIDIA Xid-Catalog.xlsx (r590), WORKFLOW_NVLINK_ERR"
NVLINK4_BITS: tuple[tuple[int, tuple[int, ...], str, str], ...] = (
    (1, (0, 23, 30), "ignore", _W),
    (1, (1, 20), "sympathetic", _W),
    (1, (4, 5), "ECC or parity", _W),
    (1, (8, 9, 12, 16, 17, 24, 28), "mechanical or hardware", _W),
    (1, (21, 22), "marginal signal", _W),
    (1, (27, 29), "to be reported when repeated", _W),
    (3, (0, 1, 2, 6), "ECC or parity", _W),
    (3, (13,), "unexpected", _W),
    (3, (16, 19), "to be diagnosed when repeated", _W),
    (3, (17, 18), "to be reported", _W),
    (4, (16, 17), "sympathetic", _W),
    (4, (18,), "sympathetic, fabric reset", _W),
    (5, (18, 19, 21, 22, 24, 25, 27, 28), "ECC or parity", _W),
    (5, (20, 23, 26, 29), "threshold notice", _W),
)
NVLINK4_MILD = {
    "ignore": IGNORE,
    "sympathetic": WARN,
    "threshold notice": WARN,
    "sympathetic, fabric reset": RESET,
}
"""All other classes drain, as does a line without registers."""


@dataclass(frozen=True)
class SxidRow:
    sxids: tuple[int, ...]
    meaning: str
    word: str
    needs: str = ""
    source: str = "gpud components/accelerator/nvidia/sxid"
    date: str = "2026-08"


SXID_TABLE = (
    SxidRow(_span(10003, 12020, 22003, 22011, (23001, 23017)), "always fatal to the fabric",
            DRAIN, NEEDS_REBOOT),
    SxidRow((20001, 20009, 20012), "NVLink replay, short error rate or retraining", IGNORE),
    SxidRow(_span(11004, 11012, (11021, 11023), 12021, 12023, 12028, 15008, 15011, 19049, 22013,
                  (24001, 24003)), "not fatal", WARN,
            source="gpud components/accelerator/nvidia/sxid; imbue-ai/cluster-health whitelist"),
)  # fmt: skip
BY_SXID = {sxid: row for row in SXID_TABLE for sxid in row.sxids}
SXID_FATAL = SxidRow((), "fatal by its own text", DRAIN, NEEDS_REBOOT)
SXID_OTHER = SxidRow((), "not fatal by its own text", WARN)
