"""What a value that nvidia-smi prints means, in whatever form it was printed. Pure.

A name that is not there gives no signal, never a zero: old drivers lack some, new ones rename them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Optional

from ftslurm.health import nvml_types as n
from ftslurm.health import signals as s
from ftslurm.health.signals import Gpu, Signal, Value

_NUMBER = re.compile(r"(-?[0-9]{1,20}(?:\.[0-9]{1,6})?) ?(?:x|w|c|%|mib|us|bank\(s\))?\Z")
_YES = {"yes": True, "no": False, "1": True, "0": False}
_ON = {"enabled": True, "disabled": False}
_ECC_MODES = {text: text for text in ("enabled", "disabled", "unknown error")}
_RECOVERY = {
    "none": 0, "reset": 1, "gpu reset": 1, "reboot": 2, "node reboot": 2, "drain p2p": 3,
    "drain and reset": 4, "recover imex domain": 5, "bus reset": 6, "system reboot": 7,
}  # fmt: skip
_FABRIC = {"not supported": "not_supported", "not started": "not_started",
           "in progress": "in_progress", "completed": "completed"}  # fmt: skip
_ABSENT = frozenset(
    {"", "n/a", "not supported", "requested functionality has been deprecated", "no data"}
)
_ERRORS = {"unknown error": n.ERROR_UNKNOWN, "err!": n.ERROR_UNKNOWN,
           "insufficient permissions": n.ERROR_NO_PERMISSION}  # fmt: skip
_REASONS = {
    "gpu_idle": 0x1, "idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4,
    "hw_slowdown": 0x8, "sync_boost": 0x10, "sw_thermal_slowdown": 0x20,
    "hw_slowdown/hw_thermal_slowdown": 0x40, "hw_thermal_slowdown": 0x40,
    "hw_slowdown/hw_power_brake": 0x80, "hw_power_brake_slowdown": 0x80, "hw_power_brake": 0x80,
    "hw_slowdown/hw_power_brake_slowdown": 0x80,
}  # fmt: skip
_REASON_PATH = re.compile(
    r"clocks_(?:event|throttle)_reasons?[/.](?:clocks_(?:event|throttle)_reason_)?(.+)\Z"
)


def cell(text: str) -> str:
    """A value as it is compared: no brackets, lower case."""
    return text.strip().strip("[]").strip().lower()


def whole(text: str) -> Optional[int]:
    value = number(text)
    return int(value) if value is not None and value == int(value) else None


def number(text: str) -> Optional[float]:
    match = _NUMBER.match(text)
    return float(match.group(1)) if match else None


# Kind, how its value is read, and its names: -q, -q -x, CSV; old names behind new ones.
_ROWS: tuple[tuple[str, Callable[[str], Optional[Value]], tuple[str, ...]], ...] = (
    (s.ECC_MODE, _ECC_MODES.get, ("ecc_mode/current", "ecc_mode/current_ecc", "ecc.mode.current")),
    (s.ECC_DRAM_VOLATILE_UNCORRECTED, whole, (
        "ecc_errors/volatile/dram_uncorrectable", "ecc.errors.uncorrected.volatile.dram",
        "ecc_errors/volatile/double_bit/device_memory",
        "ecc.errors.uncorrected.volatile.device_memory")),
    (s.ECC_DRAM_AGGREGATE_UNCORRECTED, whole, (
        "ecc_errors/aggregate/dram_uncorrectable", "ecc.errors.uncorrected.aggregate.dram",
        "ecc_errors/aggregate/double_bit/device_memory",
        "ecc.errors.uncorrected.aggregate.device_memory")),
    (s.ECC_DRAM_VOLATILE_CORRECTED, whole, (
        "ecc_errors/volatile/dram_correctable", "ecc.errors.corrected.volatile.dram",
        "ecc_errors/volatile/single_bit/device_memory",
        "ecc.errors.corrected.volatile.device_memory")),
    (s.ECC_SRAM_VOLATILE_CORRECTED, whole, (
        "ecc_errors/volatile/sram_correctable", "ecc.errors.corrected.volatile.sram")),
    (s.SRAM_THRESHOLD, _YES.get, (
        "ecc_errors/aggregate/sram_threshold_exceeded",
        "ecc.errors.uncorrected.aggregate.sram.thresholdexceeded")),
    (s.REMAPS_CORRECTABLE, whole, (
        "remapped_rows/correctable_error", "remapped_rows/remapped_row_corr",
        "remapped_rows.correctable")),
    (s.REMAPS_UNCORRECTABLE, whole, (
        "remapped_rows/uncorrectable_error", "remapped_rows/remapped_row_unc",
        "remapped_rows.uncorrectable")),
    (s.REMAP_PENDING, _YES.get, (
        "remapped_rows/pending", "remapped_rows/remapped_row_pending", "remapped_rows.pending")),
    (s.REMAP_FAILURE, _YES.get, (
        "remapped_rows/remapping_failure_occurred", "remapped_rows/remapped_row_failure",
        "remapped_rows.failure")),
    (s.REMAP_BANKS_LOW, whole, (
        "remapped_rows/bank_remap_availability_histogram/low",
        "remapped_rows/row_remapper_histogram/row_remapper_histogram_low",
        "remapped_rows.histogram.low")),
    (s.REMAP_BANKS_NONE, whole, (
        "remapped_rows/bank_remap_availability_histogram/none",
        "remapped_rows/row_remapper_histogram/row_remapper_histogram_none",
        "remapped_rows.histogram.none")),
    (s.UNREPAIRABLE_MEMORY, _YES.get, ("unrepairable_memory", "ecc_errors/unrepairable_memory")),
    (s.RETIRED_PAGES_DOUBLE_BIT, whole, (
        "retired_pages/double_bit_ecc", "retired_pages/double_bit_retirement/retired_count",
        "retired_pages.double_bit.count", "retired_pages.dbe")),
    (s.RETIRED_PAGES_PENDING, _YES.get, (
        "retired_pages/pending_page_blacklist", "retired_pages/pending_blacklist",
        "retired_pages/pending_retirement", "retired_pages.pending")),
    (s.RECOVERY_ACTION, _RECOVERY.get, ("gpu_recovery_action",)),
    (s.PCIE_WIDTH, whole, (
        "pci/gpu_link_info/link_width/current",
        "pci/pci_gpu_link_info/link_widths/current_link_width", "pcie.link.width.current")),
    (s.PCIE_WIDTH_MAX, whole, (
        "pci/gpu_link_info/link_width/max", "pci/pci_gpu_link_info/link_widths/max_link_width",
        "pcie.link.width.max")),
    (s.PCIE_GEN, whole, (
        "pci/gpu_link_info/pcie_generation/current",
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen", "pcie.link.gen.current",
        "pcie.link.gen.gpucurrent")),
    (s.PCIE_GEN_MAX, whole, (
        "pci/gpu_link_info/pcie_generation/max", "pci/pci_gpu_link_info/pcie_gen/max_link_gen",
        "pcie.link.gen.max")),
    (s.PCIE_REPLAY, whole, ("pci/replays_since_reset", "pci/replay_counter")),
    (s.GPU_UTILISATION, whole, ("utilization/gpu", "utilization/gpu_util", "utilization.gpu")),
    (s.CLOCKS_EVENT, lambda text: int(text, 16) if re.match(r"0x[0-9a-f]{1,16}\Z", text) else None,
     ("clocks_event_reasons.active", "clocks_throttle_reasons.active")),
    (s.POWER_W, number, (
        "gpu_power_readings/power_draw", "power_readings/power_draw",
        "gpu_power_readings/average_power_draw", "gpu_power_readings/instant_power_draw",
        "power.draw")),
    (s.TEMPERATURE, whole, ("temperature/gpu_current_temp", "temperature/gpu_temp",
                            "temperature.gpu")),
    (s.TEMPERATURE_SLOWDOWN, whole, ("temperature/gpu_slowdown_temp",
                                     "temperature/gpu_temp_slow_threshold")),
    (s.TEMPERATURE_MARGIN, whole, ("temperature/gpu_t_limit_temp", "temperature/gpu_temp_tlimit",
                                   "temperature.gpu.tlimit")),
    (s.MEMORY_TEMPERATURE, whole, ("temperature/memory_current_temp", "temperature/memory_temp",
                                   "temperature.memory")),
    (s.MEMORY_TEMPERATURE_MAX, whole, ("temperature/memory_max_operating_temp",
                                       "temperature/gpu_temp_max_mem_threshold")),
    (s.PERSISTENCE_MODE, _ON.get, ("persistence_mode",)),
    (s.FABRIC_STATE, _FABRIC.get, ("fabric/state", "fabric.state")),
    (s.MIG_MODE, _ON.get, ("mig_mode/current", "mig_mode/current_mig", "mig.mode.current")),
)  # fmt: skip

# A sum is told only where all its parts are; the second form is that of older drivers.
_SUMS = tuple(
    (kind, parts)
    for kind, age in (
        (s.ECC_SRAM_VOLATILE_UNCORRECTED, "volatile"),
        (s.ECC_SRAM_AGGREGATE_UNCORRECTED, "aggregate"),
    )
    for parts in (
        (f"ecc_errors/{age}/sram_uncorrectable_parity",
         f"ecc_errors/{age}/sram_uncorrectable_sec_ded"),
        (f"ecc_errors/{age}/sram_uncorrectable_parity",
         f"ecc_errors/{age}/sram_uncorrectable_secded"),
        (f"ecc_errors/{age}/sram_uncorrectable",),
        (f"ecc.errors.uncorrected.{age}.sram",),
    )
) + (
    (s.RETIRED_PAGES, ("retired_pages/single_bit_ecc", "retired_pages/double_bit_ecc")),
    (s.RETIRED_PAGES, ("retired_pages/multiple_single_bit_retirement/retired_count",
                       "retired_pages/double_bit_retirement/retired_count")),
    (s.RETIRED_PAGES, ("retired_pages.single_bit_ecc.count", "retired_pages.double_bit.count")),
)  # fmt: skip

CSV_FIELDS = (
    "index", "pci.bus_id", "uuid", "ecc.mode.current", "ecc.errors.uncorrected.volatile.dram",
    "ecc.errors.uncorrected.volatile.sram", "ecc.errors.uncorrected.aggregate.sram",
    "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded", "remapped_rows.uncorrectable",
    "remapped_rows.pending", "remapped_rows.failure", "remapped_rows.histogram.none",
    "retired_pages.single_bit_ecc.count", "retired_pages.double_bit.count",
    "retired_pages.pending", "gpu_recovery_action", "pcie.link.width.current",
    "pcie.link.width.max", "clocks_event_reasons.active", "utilization.gpu", "temperature.gpu",
    "persistence_mode", "fabric.state", "fabric.status", "mig.mode.current",
)  # fmt: skip
"""Asked for where no whole log can be had; a driver may know some of them only."""


def field_signals(gpu: Gpu, values: Mapping[str, str]) -> Iterator[Signal]:
    """Signals of one GPU's values by name; each kind once."""
    cells = {name: cell(text) for name, text in values.items()}
    yield from _fault_cells(gpu, cells)
    for kind, convert, names in _ROWS:
        for name in names:
            text = cells.get(name, "")
            value = None if text in _ABSENT and kind != s.FABRIC_STATE else convert(text)
            if value is not None and not _is_fault(text, kind):
                yield Signal(kind, value, gpu=gpu)
                break
    told = set()
    for kind, parts in _SUMS:
        numbers = [whole(cells.get(name, "")) for name in parts]
        if kind not in told and None not in numbers:
            told.add(kind)
            yield Signal(kind, sum(value for value in numbers if value is not None), gpu=gpu)
    yield from _combined(gpu, cells)


def _combined(gpu: Gpu, cells: Mapping[str, str]) -> Iterator[Signal]:
    """What several cells say together."""
    repairs = {
        text
        for name, text in cells.items()
        if name.rpartition("/")[2] in ("channel_repair_pending", "tpc_repair_pending")
    }
    if repairs & {"yes", "no"}:
        yield Signal(s.REPAIR_PENDING, "yes" in repairs, gpu=gpu)
    # Before drivers had a recovery action (DTD v12).
    if _YES.get(cells.get("gpu_reset_status/reset_required", "")):
        yield Signal(s.RECOVERY_ACTION, 1, gpu=gpu)
    elif _YES.get(cells.get("gpu_reset_status/drain_and_reset_recommended", "")):
        yield Signal(s.RECOVERY_ACTION, 4, gpu=gpu)
    if cells.get("fabric/state", cells.get("fabric.state")) == "completed":
        status = cells.get("fabric/status", cells.get("fabric.status", ""))
        if status == "success":
            yield Signal(s.FABRIC_STATUS, n.SUCCESS, gpu=gpu)
        elif status not in _ABSENT:
            yield Signal(s.FABRIC_STATUS, n.ERROR_UNKNOWN, gpu=gpu, text=status[:80])
    mask, is_told = 0, False
    for name, text in cells.items():
        match = _REASON_PATH.match(name)
        bit = _REASONS.get(match.group(1)) if match else None
        if bit is not None and text in ("active", "not active"):
            is_told = True
            mask |= bit if text == "active" else 0
    if is_told and not any(name.endswith("reasons.active") for name in cells):
        yield Signal(s.CLOCKS_EVENT, mask, gpu=gpu)


def _is_fault(text: str, kind: str) -> bool:
    """The ECC mode is told as it is, Unknown Error too: that was seen on a failing GPU."""
    return text in ("gpu is lost", "gpu requires reset") or (text in _ERRORS and kind != s.ECC_MODE)


def _fault_cells(gpu: Gpu, cells: Mapping[str, str]) -> Iterator[Signal]:
    """nvidia-smi writes a fault into the single cell that it spoils, not into the row."""
    texts = set(cells.values())
    if "gpu is lost" in texts:
        yield Signal(s.GPU_LOST, True, gpu=gpu, text="nvidia-smi: GPU is lost")
    if "gpu requires reset" in texts:
        yield Signal(s.RESET_REQUIRED, True, gpu=gpu, text="nvidia-smi: GPU requires reset")
    for text in sorted(texts & set(_ERRORS)):
        where = min(name for name, value in cells.items() if value == text)
        yield Signal(s.NVML_ERROR, _ERRORS[text], gpu=gpu, where=where, text=text)
