"""What NVML says of each GPU, as signals. Reads only; judges nothing.

A return code decides what a call has told: success gives a signal, one of `nvml_types.ABSENT` none,
a lost GPU, a required reset and a spoiled InfoROM a signal of their own, and every other code the
signal `nvml_unusable` or `nvml_error` with the code and the call. `read_nvml` does it in a child
with a deadline: a GSP fault makes each call last 45 s, or for ever (open-gpu-kernel-modules#446).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import replace
from typing import Optional

from ftslurm.health import nvml_types as n
from ftslurm.health import signals as s
from ftslurm.health.look import Emitter, Parts, look_in_child
from ftslurm.health.nvml import LIBRARY, Nvml
from ftslurm.health.nvml_links import read_links
from ftslurm.health.signals import Gpu, Signal, Value, normal_bus

SOURCE = "nvml"

_START, _COUNT, _HANDLE = "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"
_NEEDED = (_START, _COUNT, _HANDLE)
"""Without these nothing can be read; each of the others is one value less."""

# Function, its two integers, kind.
_ECC_COUNTERS = (
    (n.MEMORY_ERROR_TYPE_UNCORRECTED, n.VOLATILE_ECC, n.MEMORY_LOCATION_DRAM,
     s.ECC_DRAM_VOLATILE_UNCORRECTED),
    (n.MEMORY_ERROR_TYPE_UNCORRECTED, n.AGGREGATE_ECC, n.MEMORY_LOCATION_DRAM,
     s.ECC_DRAM_AGGREGATE_UNCORRECTED),
    (n.MEMORY_ERROR_TYPE_CORRECTED, n.VOLATILE_ECC, n.MEMORY_LOCATION_DRAM,
     s.ECC_DRAM_VOLATILE_CORRECTED),
    (n.MEMORY_ERROR_TYPE_CORRECTED, n.VOLATILE_ECC, n.MEMORY_LOCATION_SRAM,
     s.ECC_SRAM_VOLATILE_CORRECTED),
)  # fmt: skip
_SRAM_UNCORRECTED = (
    (n.VOLATILE_ECC, s.ECC_SRAM_VOLATILE_UNCORRECTED),
    (n.AGGREGATE_ECC, s.ECC_SRAM_AGGREGATE_UNCORRECTED),
)
_NUMBERS = (
    ("nvmlDeviceGetCurrPcieLinkWidth", (), s.PCIE_WIDTH),
    ("nvmlDeviceGetMaxPcieLinkWidth", (), s.PCIE_WIDTH_MAX),
    ("nvmlDeviceGetCurrPcieLinkGeneration", (), s.PCIE_GEN),
    # The lower of what the GPU and its slot can do (nvml.h).
    ("nvmlDeviceGetMaxPcieLinkGeneration", (), s.PCIE_GEN_MAX),
    ("nvmlDeviceGetTemperature", (n.TEMPERATURE_GPU,), s.TEMPERATURE),
    ("nvmlDeviceGetTemperatureThreshold", (n.TEMPERATURE_THRESHOLD_SLOWDOWN,),
     s.TEMPERATURE_SLOWDOWN),
    ("nvmlDeviceGetTemperatureThreshold", (n.TEMPERATURE_THRESHOLD_MEM_MAX,),
     s.MEMORY_TEMPERATURE_MAX),
)  # fmt: skip
_FIELDS = {
    (n.FI_DEV_GET_GPU_RECOVERY_ACTION, 0): s.RECOVERY_ACTION,
    (n.FI_DEV_PCIE_REPLAY_COUNTER, 0): s.PCIE_REPLAY,
    (n.FI_DEV_MEMORY_TEMP, 0): s.MEMORY_TEMPERATURE,
}


def read_nvml(
    *,
    deadline_s: float,
    library: str = LIBRARY,
    pci_buses: Sequence[str] = (),
) -> Parts:
    """All of it, in a child. A hang gives `driver_hang` and what was read before it.

    `pci_buses` names GPUs that are too far gone to say where they are. In a job's cgroup NVML shows
    the GPUs of the job and no others.
    """

    def look(emitter: Emitter) -> None:
        _Look(library, emitter).all()

    parts, ended = look_in_child(look, source=SOURCE, deadline_s=deadline_s)
    if ended.is_late:
        stuck = f"; its child {s.UNKILLABLE}" if ended.is_abandoned else ""
        text = f"{parts.last_call} did not come back in {deadline_s:g} s{stuck}"
        parts.signals.append(Signal(s.DRIVER_HANG, True, text=text))
    return name_by_elimination(parts, pci_buses)


def name_by_elimination(parts: Parts, pci_buses: Sequence[str]) -> Parts:
    """A GPU without a bus gets the one that is left over, where only one choice is left: NVML
    numbers the GPUs in the order of their buses."""
    seen = {gpu.bus for gpu in parts.gpus}
    nameless = sorted({gpu.index for gpu in parts.gpus if not gpu.bus and gpu.index is not None})
    missing = sorted(set(pci_buses) - seen)
    if len(nameless) != len(missing):
        return parts
    bus_of = dict(zip(nameless, missing))

    def named(gpu: Gpu) -> Gpu:
        return gpu if gpu.bus or gpu.index is None else replace(gpu, bus=bus_of[gpu.index])

    parts.gpus = [named(gpu) for gpu in parts.gpus]
    parts.signals = [
        replace(signal, gpu=named(signal.gpu)) if signal.gpu else signal for signal in parts.signals
    ]
    return parts


class _Look:
    """One pass over all GPUs."""

    def __init__(self, library: str, emitter: Emitter) -> None:
        self.emitter = emitter
        self.index: Optional[int] = None
        self.gpu: Optional[Gpu] = None
        self.nvml = Nvml(library, on_call=self.calling)
        self.told: set[tuple[str, str]] = set()

    def calling(self, call: str) -> None:
        self.emitter.calling(call if self.index is None else f"{call} of GPU {self.index}")

    def all(self) -> None:
        if not self.works(self.nvml.start(), _START):
            return
        code, count = self.nvml.device_count()
        if self.works(code, _COUNT):
            self.say(s.GPU_COUNT_NVML, count)
            for index in range(min(count, 256)):
                self.index = index
                self.one(index)
        self.index = None
        self.nvml.stop()

    def one(self, index: int) -> None:
        self.told.clear()
        code, device = self.nvml.device(index)
        uuid = bus = ""
        code_bus = code
        if not code:
            _, uuid = self.nvml.text("nvmlDeviceGetUUID", device)
            code_bus, pci = self.nvml.filled("nvmlDeviceGetPciInfo_v3", device, n.PciInfo)
            bus = normal_bus(pci.busId.decode(errors="replace")) if not code_bus else ""
        self.gpu = Gpu(index, uuid, bus)
        self.emitter.emit(self.gpu)
        if self.works(code, _HANDLE):
            self.works(code_bus, "nvmlDeviceGetPciInfo_v3")
            self.memory(device)
            self.remaps(device)
            self.retired(device)
            self.bus_and_heat(device)
            self.state(device)
        self.gpu = None

    def works(self, code: int, call: str) -> bool:
        """Whether `call` has told something; if not, what its code says is told, once a GPU."""
        if code == n.SUCCESS:
            return True
        kind, value, where = {
            n.ERROR_GPU_IS_LOST: (s.GPU_LOST, True, ""),
            n.ERROR_RESET_REQUIRED: (s.RESET_REQUIRED, True, ""),
            n.ERROR_CORRUPTED_INFOROM: (s.INFOROM_CORRUPTED, True, ""),
        }.get(code, (s.NVML_UNUSABLE if call in _NEEDED else s.NVML_ERROR, code, call))
        # To a field or an enum younger than itself a driver says INVALID_ARGUMENT.
        is_absent = code in n.ABSENT or (code == n.ERROR_INVALID_ARGUMENT and call != _HANDLE)
        if not is_absent and (kind, where) not in self.told:
            self.told.add((kind, where))
            self.say(kind, value, where=where, text=call)
        return False

    def say(
        self, kind: str, value: Value, *, link: Optional[int] = None, where: str = "",
        text: str = "",
    ) -> None:  # fmt: skip
        self.emitter.emit(Signal(kind, value, gpu=self.gpu, link=link, where=where, text=text))

    def memory(self, device: c_void_p) -> None:
        name = "nvmlDeviceGetEccMode"
        code, modes = self.nvml.numbers(name, device, 2)
        if self.works(code, name):
            self.say(s.ECC_MODE, "enabled" if modes[0] else "disabled")
        name = "nvmlDeviceGetMemoryErrorCounter"
        for error, counter, location, kind in _ECC_COUNTERS:
            code, value = self.nvml.count(name, device, error, counter, location)
            if self.works(code, name):
                self.say(kind, value)
        name = "nvmlDeviceGetSramEccErrorStatus"
        code, sram = self.nvml.filled(name, device, n.EccSramErrorStatus)
        if self.works(code, name):
            self.say(
                s.ECC_SRAM_VOLATILE_UNCORRECTED, sram.volatileUncParity + sram.volatileUncSecDed
            )
            self.say(
                s.ECC_SRAM_AGGREGATE_UNCORRECTED, sram.aggregateUncParity + sram.aggregateUncSecDed
            )
            self.say(s.SRAM_THRESHOLD, bool(sram.bThresholdExceeded))
            return
        name = "nvmlDeviceGetMemoryErrorCounter"
        for counter, kind in _SRAM_UNCORRECTED:
            code, value = self.nvml.count(
                name, device, n.MEMORY_ERROR_TYPE_UNCORRECTED, counter, n.MEMORY_LOCATION_SRAM
            )
            if self.works(code, name):
                self.say(kind, value)

    def remaps(self, device: c_void_p) -> None:
        name = "nvmlDeviceGetRemappedRows"
        code, values = self.nvml.numbers(name, device, 4)
        if self.works(code, name):
            self.say(s.REMAPS_CORRECTABLE, values[0])
            self.say(s.REMAPS_UNCORRECTABLE, values[1])
            self.say(s.REMAP_PENDING, bool(values[2]))
            self.say(s.REMAP_FAILURE, bool(values[3]))
        name = "nvmlDeviceGetRowRemapperHistogram"
        code, banks = self.nvml.filled(name, device, n.RowRemapperHistogram)
        if self.works(code, name):
            self.say(s.REMAP_BANKS_LOW, banks.low)
            self.say(s.REMAP_BANKS_NONE, banks.none)
        name = "nvmlDeviceGetUnrepairableMemoryFlag_v1"
        code, memory = self.nvml.filled(name, device, n.UnrepairableMemory)
        if self.works(code, name):
            self.say(s.UNREPAIRABLE_MEMORY, bool(memory.unrepairableMemory))
        name = "nvmlDeviceGetRepairStatus"
        code, repair = self.nvml.filled(name, device, n.RepairStatus)
        if self.works(code, name):
            pending = repair.bChannelRepairPending or repair.bTpcRepairPending
            self.say(s.REPAIR_PENDING, bool(pending))

    def retired(self, device: c_void_p) -> None:
        """Parts before Ampere retire pages instead of remapping rows."""
        name = "nvmlDeviceGetRetiredPages"
        code, single = self.nvml.retired_pages(
            device, n.PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS
        )
        code_double, double = self.nvml.retired_pages(
            device, n.PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
        )
        if self.works(code, name) and self.works(code_double, name):
            self.say(s.RETIRED_PAGES, single + double)
            self.say(s.RETIRED_PAGES_DOUBLE_BIT, double)
        name = "nvmlDeviceGetRetiredPagesPendingStatus"
        code, pending = self.nvml.number(name, device)
        if self.works(code, name):
            self.say(s.RETIRED_PAGES_PENDING, bool(pending))

    def bus_and_heat(self, device: c_void_p) -> None:
        for name, arguments, kind in _NUMBERS:
            code, value = self.nvml.number(name, device, *arguments)
            if self.works(code, name):
                self.say(kind, value)
        name = "nvmlDeviceGetMarginTemperature"
        code, margin = self.nvml.filled(name, device, n.MarginTemperature)
        if self.works(code, name):
            self.say(s.TEMPERATURE_MARGIN, margin.marginTemperature)
        name = "nvmlDeviceGetPowerUsage"
        code, power_mw = self.nvml.number(name, device)
        if self.works(code, name):
            self.say(s.POWER_W, power_mw / 1000)
        name = "nvmlDeviceGetUtilizationRates"
        code, rates = self.nvml.filled(name, device, n.Utilization)
        if self.works(code, name):
            self.say(s.GPU_UTILISATION, rates.gpu)
        name = "nvmlDeviceGetCurrentClocksEventReasons"
        code, mask = self.nvml.count(name, device)
        if code == n.ERROR_FUNCTION_NOT_FOUND:  # its name before driver 535
            name = "nvmlDeviceGetCurrentClocksThrottleReasons"
            code, mask = self.nvml.count(name, device)
        if self.works(code, name):
            self.say(s.CLOCKS_EVENT, mask)

    def state(self, device: c_void_p) -> None:
        code, values = self.nvml.fields(device, list(_FIELDS))
        self.works(code, "nvmlDeviceGetFieldValues")
        for field, (field_code, value) in values.items():
            if self.works(field_code, f"nvmlDeviceGetFieldValues({field[0]})"):
                self.say(_FIELDS[field], value)
        name = "nvmlDeviceGetPersistenceMode"
        code, mode = self.nvml.number(name, device)
        if self.works(code, name):
            self.say(s.PERSISTENCE_MODE, bool(mode))
        name = "nvmlDeviceGetGpuFabricInfoV"
        code, fabric = self.nvml.filled(name, device, n.GpuFabricInfo)
        if self.works(code, name):
            state = n.GPU_FABRIC_STATES.get(fabric.state, str(fabric.state))
            self.say(s.FABRIC_STATE, state, text=f"health mask {fabric.healthMask:#x}")
            if state == "completed":
                self.say(s.FABRIC_STATUS, fabric.status)
        name = "nvmlDeviceGetMigMode"
        code, modes = self.nvml.numbers(name, device, 2)
        has_mig = self.works(code, name) and modes[0] == 1
        if code == n.SUCCESS:
            self.say(s.MIG_MODE, has_mig)
        if not has_mig:  # the links of a partitioned GPU are down by design
            read_links(self.nvml, device, works=self.works, say=self.say)
