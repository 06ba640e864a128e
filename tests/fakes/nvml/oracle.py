"""Reads each GPU through nvidia-ml-py and prints what it got, under the names of our signals."""

import json
from collections.abc import Callable
from ctypes import byref

import pynvml as p


def sram(handle: object) -> p.c_nvmlEccSramErrorStatus_v1_t:
    status = p.c_nvmlEccSramErrorStatus_v1_t()
    p.nvmlDeviceGetSramEccErrorStatus(handle, byref(status))
    return status


def fabric(handle: object) -> int:
    info = p.c_nvmlGpuFabricInfoV_t()
    p.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info.state


def field(handle: object, number: int) -> int:
    (value,) = p.nvmlDeviceGetFieldValues(handle, [number])
    if value.nvmlReturn:
        raise p.NVMLError(value.nvmlReturn)
    return value.value.ullVal


def links_up(handle: object) -> int:
    up = 0
    for link in range(p.NVML_NVLINK_MAX_LINKS):
        try:
            up += p.nvmlDeviceGetNvLinkState(handle, link)
        except p.NVMLError_InvalidArgument:
            break
    return up


def ecc(error: int, counter: int, location: int) -> Callable[[object], int]:
    return lambda handle: p.nvmlDeviceGetMemoryErrorCounter(handle, error, counter, location)


READERS: dict[str, Callable[[object], object]] = {
    "ecc_mode": lambda h: "enabled" if p.nvmlDeviceGetEccMode(h)[0] else "disabled",
    "ecc_dram_volatile_uncorrected": ecc(1, 0, 2),
    "ecc_dram_aggregate_uncorrected": ecc(1, 1, 2),
    "ecc_dram_volatile_corrected": ecc(0, 0, 2),
    "ecc_sram_volatile_corrected": ecc(0, 0, 7),
    "sram_threshold": lambda h: bool(sram(h).bThresholdExceeded),
    "remaps_correctable": lambda h: p.nvmlDeviceGetRemappedRows(h)[0],
    "remaps_uncorrectable": lambda h: p.nvmlDeviceGetRemappedRows(h)[1],
    "remap_pending": lambda h: bool(p.nvmlDeviceGetRemappedRows(h)[2]),
    "remap_failure": lambda h: bool(p.nvmlDeviceGetRemappedRows(h)[3]),
    "remap_banks_low": lambda h: p.nvmlDeviceGetRowRemapperHistogram(h).low,
    "remap_banks_none": lambda h: p.nvmlDeviceGetRowRemapperHistogram(h).none,
    "unrepairable_memory": lambda h: bool(p.nvmlDeviceGetUnrepairableMemoryFlag_v1(h)),
    "repair_pending": lambda h: any(p.nvmlDeviceGetRepairStatus(h)),
    "retired_pages_double_bit": lambda h: len(p.nvmlDeviceGetRetiredPages(h, 1)),
    "retired_pages_pending": lambda h: bool(p.nvmlDeviceGetRetiredPagesPendingStatus(h)),
    "pcie_width": p.nvmlDeviceGetCurrPcieLinkWidth,
    "pcie_width_max": p.nvmlDeviceGetMaxPcieLinkWidth,
    "pcie_gen": p.nvmlDeviceGetCurrPcieLinkGeneration,
    "pcie_gen_max": p.nvmlDeviceGetMaxPcieLinkGeneration,
    "pcie_replay": lambda h: field(h, 94),
    "recovery_action": lambda h: field(h, 230),
    "memory_temperature": lambda h: field(h, 82),
    "temperature": lambda h: p.nvmlDeviceGetTemperature(h, 0),
    "temperature_slowdown": lambda h: p.nvmlDeviceGetTemperatureThreshold(h, 1),
    "temperature_margin": p.nvmlDeviceGetMarginTemperature,
    "power_w": lambda h: p.nvmlDeviceGetPowerUsage(h) / 1000,
    "gpu_utilisation": lambda h: p.nvmlDeviceGetUtilizationRates(h).gpu,
    "clocks_event": p.nvmlDeviceGetCurrentClocksEventReasons,
    "persistence_mode": lambda h: bool(p.nvmlDeviceGetPersistenceMode(h)),
    "mig_mode": lambda h: bool(p.nvmlDeviceGetMigMode(h)[0]),
    "fabric_state": lambda h: ["not_supported", "not_started", "in_progress", "completed"][
        fabric(h)
    ],
    "nvlink_links_up": links_up,
}


def main() -> None:
    p.nvmlInit()
    rows = []
    for index in range(p.nvmlDeviceGetCount()):
        handle = p.nvmlDeviceGetHandleByIndex(index)
        row: dict[str, object] = {
            "index": index,
            "uuid": p.nvmlDeviceGetUUID(handle),
            "bus": p.nvmlDeviceGetPciInfo(handle).busId,
        }
        for name, reader in READERS.items():
            # What the GPU does not support, our binding leaves out too.
            try:
                row[name] = reader(handle)
            except p.NVMLError_NotSupported:
                continue
        rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
