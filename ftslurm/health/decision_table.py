"""What each reading of the hardware means: data with source and date, no judgement of a case.

One row is one rule; several may read the same signal, a mild one and one for when it lasts. Signals
without a row (lifetime counts of corrected errors, remaps of corrected errors) mean nothing alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ftslurm.health import signals as s
from ftslurm.health.xid_table import (
    AFTER,
    DRAIN,
    NEEDS_REBOOT,
    NEEDS_REPAIR,
    NEEDS_RESET,
    RESET,
    UNKNOWN,
    WARN,
)

IS, IS_NOT, ANY_OF, AT_LEAST, ABOVE, AT_MOST = "is", "is not", "any of", ">=", ">", "<="
RISEN, PER_MINUTE = "risen by", "risen per minute by"
"""Since the baseline, never by the number itself."""
BITS = "has bits"
BELOW_BASELINE = "below baseline"
BELOW_OTHER, ABOVE_OTHER = "below another reading", "above another reading"
LEFT = "was"
"""The baseline was `bound`, and this is not."""

Bound = Union[bool, int, float, str, tuple[str, ...], tuple[int, ...]]

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
_FABRIC_S = 3 * _MINUTE_S
"""A boot, or a restart of the fabric manager, takes a minute or so and is no fault. A job that
began meanwhile fails, and the look behind it finds out whether it was more than that."""
_LEFTOVER_S = 2 * _MINUTE_S
"""Freeing the memory of eight GPUs takes a process seconds after its last signal."""


@dataclass(frozen=True)
class Row:
    rule: str
    kind: str
    test: str
    bound: Bound
    word: str
    code: str
    """For the reason: `ftslurm:` and this are what sinfo shows, 20 characters together."""
    meaning: str
    source: str
    where: str = ""
    """The end of the signal's `where`, for kinds that have many."""
    first: str = ""
    """The word until `reads` and `for_s` are reached."""
    reads: int = 1
    """Looks in a row in which it holds."""
    for_s: float = 0.0
    """How long it has to have held in all of them."""
    window_s: float = 0.0
    """Of a rise: what counts is its part of so much time."""
    needs: str = ""
    is_sticky: bool = False
    resumes: bool = False
    """Its end alone makes the node good again, without a reset or a reboot."""
    loaded: bool = False
    """Holds only on a GPU at work: an idle one lowers its link and its clocks."""
    trend: bool = False
    date: str = "2026-08"


_DCGM = "DCGM DcgmHealthWatch.cpp"
_NVSENTINEL = "NVSentinel nic-health-monitor"

MEMORY = (
    Row("dram-uncorrectable", s.ECC_DRAM_VOLATILE_UNCORRECTED, RISEN, 1, RESET, "ECC-DRAM",
        "uncorrectable errors of the GPU's memory", f"{_DCGM} 1701", needs=NEEDS_RESET),
    Row("sram-uncorrectable", s.ECC_SRAM_VOLATILE_UNCORRECTED, RISEN, 1, RESET, "ECC-SRAM",
        "uncorrectable errors of the GPU's SRAM", "NVIDIA Xid-Catalog.xlsx, WORKFLOW_XID_48",
        needs=NEEDS_RESET),
    Row("sram-threshold", s.SRAM_THRESHOLD, IS, True, DRAIN, "SRAM-LIMIT",
        "SRAM errors above NVIDIA's threshold", "dcgm_errors.c:142 DCGM_FR_SRAM_THRESHOLD",
        needs=NEEDS_REPAIR, is_sticky=True),
    Row("sram-aggregate", s.ECC_SRAM_AGGREGATE_UNCORRECTED, ABOVE, 4, AFTER, "SRAM-LIFE",
        "more SRAM errors in its life than NVIDIA replaces at", "ml-engineering debug.md",
        needs=NEEDS_REPAIR, is_sticky=True),
    Row("dram-corrected", s.ECC_DRAM_VOLATILE_CORRECTED, RISEN, 20_000_000, WARN, "ECC-RATE",
        "very many corrected errors", "azurehpc-health-checks", trend=True),
    Row("sram-corrected", s.ECC_SRAM_VOLATILE_CORRECTED, RISEN, 10_000, WARN, "ECC-RATE",
        "very many corrected errors", "azurehpc-health-checks", trend=True),
    Row("remap-pending", s.REMAP_PENDING, IS, True, RESET, "REMAP-WAIT",
        "a remapped row that waits for a reset", "NVML; gpud; NVIDIA GPU memory error management",
        needs=NEEDS_RESET),
    Row("remap-failure", s.REMAP_FAILURE, IS, True, DRAIN, "REMAP-FAIL",
        "a row that could not be remapped", f"{_DCGM} 1893; gpud", needs=NEEDS_REPAIR,
        is_sticky=True),
    Row("remaps-many", s.REMAPS_UNCORRECTABLE, AT_LEAST, 512, WARN, "REMAPS",
        "nearly all spare rows used", f"{_DCGM} 1939"),
    Row("remaps-new", s.REMAPS_UNCORRECTABLE, RISEN, 2, WARN, "REMAPS-NEW",
        "new remapped rows", "ftslurm; after DCGM's limit of retired pages in a week",
        trend=True),
    Row("remap-banks-none", s.REMAP_BANKS_NONE, ABOVE, 0, WARN, "REMAP-BANK",
        "a bank without spare rows: its next error cannot be repaired", "NVML; ftslurm",
        trend=True),
    Row("remap-banks-low", s.REMAP_BANKS_LOW, RISEN, 1, WARN, "REMAP-BANK",
        "a bank with few spare rows left", "NVML; ftslurm", trend=True),
    Row("unrepairable", s.UNREPAIRABLE_MEMORY, IS, True, DRAIN, "MEM-BROKEN",
        "memory that cannot be repaired", f"{_DCGM} 1977", needs=NEEDS_REPAIR, is_sticky=True),
    Row("repair-pending", s.REPAIR_PENDING, IS, True, RESET, "REPAIR-WAIT",
        "a channel or TPC repair that waits for a reset", "NVIDIA Xid-Catalog.xlsx, 156 and 160",
        needs=NEEDS_RESET),
    Row("retired-pages", s.RETIRED_PAGES, AT_LEAST, 63, DRAIN, "PAGES-LIMIT",
        "as many retired pages as the board has room for", f"{_DCGM} 1782", needs=NEEDS_REPAIR,
        is_sticky=True),
    Row("retired-double-bit", s.RETIRED_PAGES_DOUBLE_BIT, RISEN, 2, AFTER, "PAGES-NEW",
        "new pages retired for double bit errors", f"{_DCGM} 1782", needs=NEEDS_REPAIR,
        is_sticky=True),
    Row("retired-pending", s.RETIRED_PAGES_PENDING, IS, True, RESET, "PAGES-WAIT",
        "a page to be retired by a reset", "Azure/azhpc-diagnostics#75", needs=NEEDS_RESET),
    Row("ecc-mode", s.ECC_MODE, IS_NOT, ("enabled", "disabled"), DRAIN, "ECC-MODE",
        "an ECC mode that the GPU cannot tell", "nvidia-smi 550.90.07 on a failing GPU",
        first=UNKNOWN, reads=2, needs=NEEDS_RESET),
)  # fmt: skip

NVLINK = (
    Row("nvlink-down", s.NVLINK_LINKS_UP, BELOW_BASELINE, 0, DRAIN, "NVLINK-DOWN",
        "fewer NVLinks than this node had", f"{_DCGM} 2970; azurehpc-health-checks#162",
        first=WARN, reads=2, needs=NEEDS_RESET),
    Row("nvlink-model", s.NVLINK_LINKS_UP, BELOW_OTHER, (s.NVLINK_LINKS_MODEL,), DRAIN,
        "NVLINK-DOWN", "fewer NVLinks than its model has",
        "gpud#1085; NVSentinel#1481", first=WARN, reads=2, needs=NEEDS_RESET),
    Row("nvlink-replay", s.NVLINK_REPLAY, PER_MINUTE, 1, AFTER, "NVLINK-RPLY",
        "NVLink replays", f"{_DCGM} 2688; nvidia-resiliency-ext", first=WARN, reads=3,
        needs=NEEDS_RESET, trend=True),
    Row("nvlink-recovery", s.NVLINK_RECOVERY, RISEN, 1, WARN, "NVLINK-RCVR",
        "an NVLink that had to recover", f"{_DCGM} 2688"),
    Row("nvlink-recoveries", s.NVLINK_RECOVERY, RISEN, 2, AFTER, "NVLINK-RCVR",
        "an NVLink that had to recover again", f"{_DCGM} 2688", needs=NEEDS_RESET),
    Row("nvlink-crc", s.NVLINK_CRC, RISEN, 1, WARN, "NVLINK-CRC", "NVLink CRC errors", _DCGM),
    Row("nvlink-crc-rate", s.NVLINK_CRC, PER_MINUTE, 6000, AFTER, "NVLINK-CRC",
        "100 or more NVLink CRC errors a second", _DCGM, needs=NEEDS_RESET, trend=True),
    Row("nvlink5-malformed", s.NVLINK5_MALFORMED, RISEN, 1, AFTER, "NVLINK5-PKT",
        "malformed NVLink packets", f"{_DCGM} 2807", needs=NEEDS_RESET),
    Row("nvlink5-overrun", s.NVLINK5_OVERRUN, RISEN, 1, AFTER, "NVLINK5-OVR",
        "NVLink buffer overruns", f"{_DCGM} 2807", needs=NEEDS_RESET),
    Row("nvlink5-integrity", s.NVLINK5_INTEGRITY, RISEN, 1, AFTER, "NVLINK5-INT",
        "NVLink integrity errors", f"{_DCGM} 2807", needs=NEEDS_RESET),
    Row("nvlink5-recovery", s.NVLINK5_RECOVERY_FAILED, RISEN, 1, DRAIN, "NVLINK5-RCV",
        "an NVLink that could not recover", f"{_DCGM} 2807; ftslurm", needs=NEEDS_RESET),
    Row("nvlink5-ber", s.NVLINK5_EFFECTIVE_BER, ABOVE, 1e-6, WARN, "NVLINK5-BER",
        "a high bit error rate behind the correction", "cyclecloud-healthagent defaults.yaml",
        trend=True),
    Row("nvlink5-symbol-ber", s.NVLINK5_SYMBOL_BER, ABOVE, 1e-6, WARN, "NVLINK5-BER",
        "a high symbol error rate", _DCGM, trend=True),
    Row("fabric-state", s.FABRIC_STATE, ANY_OF, ("not_started", "in_progress"), DRAIN, "FABRIC",
        "a GPU that has not joined the fabric", f"{_DCGM} 3599; azhpc-images#506", first=WARN,
        reads=2, for_s=_FABRIC_S, resumes=True),
    Row("fabric-status", s.FABRIC_STATUS, IS_NOT, 0, DRAIN, "FABRIC",
        "a GPU that could not join the fabric", f"{_DCGM} 3599; azhpc-images#506", first=WARN,
        reads=2, for_s=_FABRIC_S, needs=NEEDS_REBOOT),
    Row("fabric-manager", s.FABRIC_MANAGER, IS_NOT, "active", DRAIN, "FABRICMGR",
        "no fabric manager on a board with NVSwitches", "gpud; cyclecloud-healthagent",
        first=WARN, reads=2, for_s=_FABRIC_S, resumes=True),
)  # fmt: skip

PRESENCE = (
    Row("kernel-lost", s.KERNEL_LOST, IS, True, DRAIN, "GPU-LOST", "a GPU fallen off the bus",
        "open-gpu-kernel-modules; NVIDIA Xid-Catalog.xlsx, 79", needs=NEEDS_REBOOT),
    Row("gpu-lost", s.GPU_LOST, IS, True, DRAIN, "GPU-LOST", "a GPU that is lost",
        "gcm pynvml_errors.py; shine-cluster#171", needs=NEEDS_REBOOT),
    Row("reset-required", s.RESET_REQUIRED, IS, True, RESET, "GPU-RESET",
        "a GPU that asks for a reset", "gcm pynvml_errors.py", needs=NEEDS_RESET),
    Row("inforom", s.INFOROM_CORRUPTED, IS, True, WARN, "INFOROM", "a damaged InfoROM",
        "cyclecloud-healthagent"),
    Row("driver", s.NVML_UNUSABLE, ANY_OF, (9, 12, 18), DRAIN, "DRIVER",
        "a driver that is not loaded, or not the library's",
        "mej/nhc csc_nvidia_smi.nhc; soperator#2684; NVSentinel#1423", first=UNKNOWN, reads=2,
        resumes=True),
    Row("nvml-error", s.NVML_UNUSABLE, ANY_OF, (10, 999), DRAIN, "NVML",
        "NVML, or a GPU, that cannot be talked to", "open-gpu-kernel-modules#387 and #1342",
        first=UNKNOWN, reads=2, resumes=True),
    Row("nvml-refused", s.NVML_UNUSABLE, IS_NOT, (9, 10, 12, 18, 999), UNKNOWN, "NVML",
        "NVML that does not let itself be asked", "gcm pynvml_errors.py"),
    # However often: the GPU works, and what the call would have told stays unknown.
    Row("nvml-answer", s.NVML_ERROR, ABOVE, 0, UNKNOWN, "NVML",
        "NVML that does not answer a question", "k8s-device-plugin#259 and #403"),
    Row("driver-hang", s.DRIVER_HANG, IS, True, DRAIN, "DRV-HANG",
        "a driver that does not answer", "gpud#117; open-gpu-kernel-modules#446; dcgm-exporter#84",
        first=UNKNOWN, reads=2, needs=NEEDS_REBOOT),
    Row("gpu-count", s.GPU_COUNT_NVML, BELOW_OTHER, (s.GPU_COUNT_PCI, s.GPU_COUNT_GRES), DRAIN,
        "GPU-COUNT", "fewer GPUs than the node should have", "deepops; cyclecloud-healthagent",
        first=WARN, reads=2, needs=NEEDS_REBOOT),
    Row("gpu-count-pci", s.GPU_COUNT_PCI, BELOW_OTHER, (s.GPU_COUNT_GRES,), DRAIN, "GPU-COUNT",
        "fewer GPUs on the PCI bus than the node should have", "deepops prolog-lspci",
        first=WARN, reads=2, needs=NEEDS_REBOOT),
    Row("persistence", s.PERSISTENCE_MODE, IS, False, WARN, "PERSISTENCE",
        "persistence mode is off", "gpud"),
    Row("leftover", s.LEFTOVER_PROCESS, AT_LEAST, 1, DRAIN, "LEFTOVER",
        "a process of a job that has ended", "deepops 50-exclusive-gpu; soperator", where="job",
        first=WARN, reads=2, for_s=_LEFTOVER_S, needs=NEEDS_REBOOT),
    # Nobody knows whose: a shared service under the user's name, or he himself by ssh, is no fault.
    Row("leftover-outside", s.LEFTOVER_PROCESS, AT_LEAST, 1, WARN, "LEFTOVER",
        "a process of the job's user outside of any job", "ftslurm; NVIDIA MPS", where="user"),
)  # fmt: skip

BUS_AND_HEAT = (
    Row("pcie-width", s.PCIE_WIDTH, BELOW_BASELINE, 0, AFTER, "PCIE-WIDTH",
        "a narrower PCIe link than this GPU had", "deepops; ftslurm", first=WARN, reads=2,
        needs=NEEDS_REBOOT),
    Row("pcie-width-max", s.PCIE_WIDTH, BELOW_OTHER, (s.PCIE_WIDTH_MAX,), WARN, "PCIE-WIDTH",
        "a narrower PCIe link than the GPU can have", "deepops; risers may be x8"),
    Row("pcie-gen", s.PCIE_GEN, BELOW_OTHER, (s.PCIE_GEN_MAX,), AFTER, "PCIE-GEN",
        "a slower PCIe link under load", "nvtop#6; NVSentinel#890", first=WARN, reads=2,
        needs=NEEDS_REBOOT, loaded=True),
    Row("pcie-replay", s.PCIE_REPLAY, PER_MINUTE, 31, WARN, "PCIE-RPLY", "PCIe replays",
        f"{_DCGM} 1588: Gen5 x16", trend=True),
    Row("pcie-replays", s.PCIE_REPLAY, PER_MINUTE, 310, AFTER, "PCIE-RPLY",
        "many PCIe replays for minutes", f"{_DCGM} 1588, times ten", first=WARN, reads=2,
        for_s=5 * _MINUTE_S, needs=NEEDS_REBOOT),
    Row("aer-fatal", s.AER_FATAL, RISEN, 1, DRAIN, "AER-FATAL", "a fatal PCIe error",
        "gcm pcie_aer", needs=NEEDS_REBOOT),
    Row("aer-nonfatal", s.AER_NONFATAL, RISEN, 1, WARN, "AER", "a PCIe error", "gcm pcie_aer"),
    Row("aer-correctable", s.AER_CORRECTABLE, PER_MINUTE, 60, WARN, "AER",
        "many corrected PCIe errors", "gcm pcie_aer"),
    # gpud asks for 0.6 of the samples of ten minutes; here it is all of the looks, as there are
    # fewer, and as a GPU that is warm now and then only slows its job down.
    Row("hot", s.CLOCKS_EVENT, BITS, 0x40, AFTER, "HOT", "a GPU that slows down for its heat",
        "gpud hw-slowdown; DCGM", first=WARN, reads=3, for_s=10 * _MINUTE_S, resumes=True),
    Row("slowdown", s.CLOCKS_EVENT, BITS, 0x88, AFTER, "SLOWDOWN",
        "a GPU that its hardware slows down", "gpud hw-slowdown", first=WARN, reads=3,
        for_s=10 * _MINUTE_S, resumes=True),
    Row("warm", s.CLOCKS_EVENT, BITS, 0x20, WARN, "WARM", "a GPU that its driver slows for heat",
        "DCGM"),
    Row("margin", s.TEMPERATURE_MARGIN, AT_MOST, 0, AFTER, "TEMP", "a GPU at its heat limit",
        "gpud temperature", first=WARN, reads=2, for_s=5 * _MINUTE_S, resumes=True, loaded=True),
    Row("memory-hot", s.MEMORY_TEMPERATURE, ABOVE_OTHER, (s.MEMORY_TEMPERATURE_MAX,), AFTER,
        "TEMP-MEM", "memory above its heat limit", "gpud temperature", first=WARN, reads=2,
        for_s=5 * _MINUTE_S, resumes=True),
)  # fmt: skip

_FOUR_MINUTES = 4 * _MINUTE_S
_COUNT = s.RDMA_COUNTER

RDMA = (
    Row("rdma-state", s.RDMA_STATE, LEFT, "ACTIVE", DRAIN, "IB-DOWN", "a port that is down",
        "gpud infiniband; cyclecloud-healthagent", first=WARN, reads=2, for_s=_FOUR_MINUTES,
        resumes=True),
    Row("rdma-phys-state", s.RDMA_PHYS_STATE, LEFT, "LinkUp", DRAIN, "IB-DOWN",
        "a port without a link", "gpud infiniband", first=WARN, reads=2, for_s=_FOUR_MINUTES,
        resumes=True),
    Row("rdma-rate", s.RDMA_RATE, BELOW_BASELINE, 0, AFTER, "IB-RATE", "a slower port than it was",
        "gpud infiniband", first=WARN, reads=2, resumes=True),
    Row("rdma-flap", _COUNT, RISEN, 1, WARN, "IB-FLAP", "a port that went down and came back",
        "gpud infiniband", where="link_downed"),
    Row("rdma-flaps", _COUNT, RISEN, 3, AFTER, "IB-FLAP", "a port that keeps going down",
        "gpud: 3 in 12 h; cyclecloud-healthagent", where="link_downed", window_s=12 * _HOUR_S),
    Row("rdma-carrier", _COUNT, RISEN, 2, WARN, "IB-FLAP", "a port that lost its carrier",
        "azurehpc-health-checks", where="carrier_changes"),
    Row("rdma-carriers", _COUNT, RISEN, 10, AFTER, "IB-FLAP", "a port that loses its carrier again",
        "azurehpc-health-checks: 5 in 24 h", where="carrier_changes", window_s=_DAY_S),
    *(Row(f"rdma-{name}", _COUNT, RISEN, 1, AFTER, "IB-ERRORS", meaning, _NVSENTINEL, where=name,
          first=WARN, reads=2)
      for name, meaning in (("excessive_buffer_overrun_errors", "buffer overruns of a port"),
                            ("local_link_integrity_errors", "link integrity errors of a port"),
                            ("rnr_nak_retry_err", "receivers that stay unready"))),
    Row("rdma-symbol", _COUNT, PER_MINUTE, 2, AFTER, "IB-ERRORS", "symbol errors of a port",
        _NVSENTINEL, where="symbol_error", first=WARN, reads=2, for_s=_HOUR_S),
    Row("rdma-recovery", _COUNT, PER_MINUTE, 5, AFTER, "IB-ERRORS", "a port that keeps recovering",
        _NVSENTINEL, where="link_error_recovery", first=WARN, reads=2),
    *(Row(f"rdma-{name}", _COUNT, PER_MINUTE, rate, WARN, "IB-ERRORS", meaning, _NVSENTINEL,
          where=name)
      for name, rate, meaning in (
          ("port_rcv_errors", 600, "receive errors of a port"),
          ("port_xmit_discards", 6000, "packets that a port dropped"),
          ("roce_slow_restart", 600, "congestion of a port"),
          ("local_ack_timeout_err", 60, "peers that did not answer; one that crashed does it too"),
          ("out_of_sequence", 60, "packets out of order; a peer that crashed does it too"))),
    *(Row(f"mlx5-{name}", s.MLX5, IS, name, word, code, meaning, source, needs=needs)
      for name, word, code, meaning, source, needs in (
          ("command_timeout", DRAIN, "MLX5-CMD", "a NIC that lost a command", _NVSENTINEL,
           NEEDS_REBOOT),
          ("health", DRAIN, "MLX5-HEALTH", "a NIC whose firmware stands still", _NVSENTINEL,
           NEEDS_REBOOT),
          ("unrecoverable", DRAIN, "MLX5-DEAD", "a NIC that cannot recover", _NVSENTINEL,
           NEEDS_REBOOT),
          ("power", WARN, "MLX5-POWER", "too little power for a NIC", "gpud kmsg_matcher.go", ""),
          ("temperature", WARN, "MLX5-TEMP", "a hot cable or module", "gpud kmsg_matcher.go",
           ""))),
)  # fmt: skip

DECISION_TABLE = (*MEMORY, *NVLINK, *PRESENCE, *BUS_AND_HEAT, *RDMA)

SATURATION = {
    "link_downed": 255,
    "link_error_recovery": 255,
    "excessive_buffer_overrun_errors": 15,
    "local_link_integrity_errors": 15,
    "symbol_error": 65535,
    "port_rcv_errors": 65535,
    "port_xmit_discards": 65535,
}
"""Where a counter stays once it is there (InfiniBand PortCounters; gpud#943): from then on a
difference of 0 says nothing."""
