"""What one look at a node has read: values, without any judgement.

Values only: nothing here reads, writes or decides. A thing that is not supported gives no signal; a
thing that could not be read gives a line in `Reading.failures` and never a value made up for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

from ftslurm.errors import FormatError

Value = Union[bool, int, float, str]

# Kernel log. `value` is the number of an Xid or SXid; `text` the message behind it.
XID = "xid"
SXID = "sxid"
KERNEL_LOST = "kernel_lost"
"""Fallen off the bus, said without an Xid. True."""
AER = "aer"
"""From the log: `fatal`, `nonfatal` or `correctable`."""
MLX5 = "mlx5"
"""`command_timeout`, `health`, `unrecoverable`, `power` or `temperature`; `where`: the device."""

# Memory. Counters since the driver was loaded (volatile) or for life (aggregate).
ECC_MODE = "ecc_mode"
"""`enabled`, `disabled`, or what the driver says instead."""
ECC_DRAM_VOLATILE_UNCORRECTED = "ecc_dram_volatile_uncorrected"
ECC_SRAM_VOLATILE_UNCORRECTED = "ecc_sram_volatile_uncorrected"
ECC_DRAM_AGGREGATE_UNCORRECTED = "ecc_dram_aggregate_uncorrected"
ECC_SRAM_AGGREGATE_UNCORRECTED = "ecc_sram_aggregate_uncorrected"
ECC_DRAM_VOLATILE_CORRECTED = "ecc_dram_volatile_corrected"
ECC_SRAM_VOLATILE_CORRECTED = "ecc_sram_volatile_corrected"
SRAM_THRESHOLD = "sram_threshold"
"""True where the driver's own flag is set, False where it is there and not set."""
REMAP_PENDING = "remap_pending"
REMAP_FAILURE = "remap_failure"
REMAPS_UNCORRECTABLE = "remaps_uncorrectable"
REMAPS_CORRECTABLE = "remaps_correctable"
REMAP_BANKS_NONE = "remap_banks_none"
"""Banks that have no spare row left."""
REMAP_BANKS_LOW = "remap_banks_low"
UNREPAIRABLE_MEMORY = "unrepairable_memory"
REPAIR_PENDING = "repair_pending"
"""Channel or TPC repair that waits for a reset."""
RETIRED_PAGES = "retired_pages"
RETIRED_PAGES_DOUBLE_BIT = "retired_pages_double_bit"
RETIRED_PAGES_PENDING = "retired_pages_pending"
MIG_MODE = "mig_mode"

# NVLink and fabric. `link` is the link's number; None for the GPU as a whole.
NVLINK_LINKS_UP = "nvlink_links_up"
NVLINK_LINKS_MODEL = "nvlink_links_model"
"""Links that a GPU of this model has in its board, where that is known for sure."""
NVLINK_REPLAY = "nvlink_replay"
NVLINK_RECOVERY = "nvlink_recovery"
NVLINK_CRC = "nvlink_crc"
NVLINK5_MALFORMED = "nvlink5_malformed"
NVLINK5_OVERRUN = "nvlink5_overrun"
NVLINK5_INTEGRITY = "nvlink5_integrity"
NVLINK5_RECOVERY_FAILED = "nvlink5_recovery_failed"
NVLINK5_EFFECTIVE_BER = "nvlink5_effective_ber"
"""A ratio as a float, unpacked from mantissa and exponent."""
NVLINK5_SYMBOL_BER = "nvlink5_symbol_ber"
FABRIC_STATE = "fabric_state"
"""`not_supported`, `not_started`, `in_progress` or `completed`."""
FABRIC_STATUS = "fabric_status"
"""nvmlReturn of the fabric's set-up; 0 is success."""
FABRIC_MANAGER = "fabric_manager"
"""`active` or what systemd says instead; only on a board with NVSwitches."""

# Presence and driver.
GPU_LOST = "gpu_lost"
"""True: NVML says GPU_IS_LOST, or PCI reads revision ff."""
RESET_REQUIRED = "reset_required"
NVML_UNUSABLE = "nvml_unusable"
"""nvmlReturn of a call without which nothing of NVML, or of one GPU, can be read: the start, the
count, a GPU's handle. `where`: the call."""
NVML_ERROR = "nvml_error"
"""The same of any other call. Neither is told for not supported, lost and reset required."""
INFOROM_CORRUPTED = "inforom_corrupted"
DRIVER_HANG = "driver_hang"
"""True: a call did not come back in its time. `text` says so where its child `cannot be killed`."""
UNKILLABLE = "cannot be killed"
GPU_COUNT_PCI = "gpu_count_pci"
GPU_COUNT_NVML = "gpu_count_nvml"
GPU_COUNT_GRES = "gpu_count_gres"
RECOVERY_ACTION = "recovery_action"
"""NVML field 230: 0 none ... 7 system reboot; only where its nvmlReturn is 0."""
LEFTOVER_PROCESS = "leftover_process"
"""Pid; `text`: its name; `where`: its pid and start, and `/job` where it is in the cgroup of the
job that has ended, `/user` where it is in none."""
PERSISTENCE_MODE = "persistence_mode"

# PCIe, clocks, heat.
PCIE_WIDTH = "pcie_width"
PCIE_WIDTH_MAX = "pcie_width_max"
PCIE_GEN = "pcie_gen"
PCIE_GEN_MAX = "pcie_gen_max"
PCIE_REPLAY = "pcie_replay"
AER_FATAL = "aer_fatal"
"""Counters of sysfs (aer_dev_fatal and its kin)."""
AER_NONFATAL = "aer_nonfatal"
AER_CORRECTABLE = "aer_correctable"
GPU_UTILISATION = "gpu_utilisation"
"""Percent."""
CLOCKS_EVENT = "clocks_event"
"""Mask of nvmlDeviceGetCurrentClocksEventReasons."""
POWER_W = "power_w"
TEMPERATURE = "temperature"
"""Degrees Celsius."""
TEMPERATURE_SLOWDOWN = "temperature_slowdown"
"""The threshold, in degrees Celsius."""
TEMPERATURE_MARGIN = "temperature_margin"
"""Degrees Celsius to the slowdown (T.Limit, from Hopper on)."""
MEMORY_TEMPERATURE = "memory_temperature"
MEMORY_TEMPERATURE_MAX = "memory_temperature_max"

# RDMA. `where`: device/port, a counter's with its name: `mlx5_0/1/symbol_error`.
RDMA_STATE = "rdma_state"
"""`ACTIVE`, `DOWN`, `INIT`, ... as sysfs names it, without the number."""
RDMA_PHYS_STATE = "rdma_phys_state"
RDMA_RATE = "rdma_rate"
"""Gb/s as a float."""
RDMA_COUNTER = "rdma_counter"

KINDS = frozenset(
    value
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, str) and name != "UNKILLABLE" and name[0] != "_"
)

_MOST = 1e20
"""A counter has 64 bits."""
_BUS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?\Z")


@dataclass(frozen=True)
class Gpu:
    """`bus` is `0000:9b:00`. A GPU that only the kernel log names has no index and no uuid."""

    index: Optional[int]
    uuid: str
    bus: str

    @property
    def place(self) -> str:
        """The bus; its number for one too far gone to tell its bus."""
        return self.bus or f"gpu{self.index}"


@dataclass(frozen=True)
class Signal:
    """One thing read. `baseline`: the same counter at the start of the job, where the reader knows
    it; `count`: how often the kernel log said the same."""

    kind: str
    value: Value
    gpu: Optional[Gpu] = None
    link: Optional[int] = None
    at: Optional[float] = None
    text: str = ""
    where: str = ""
    baseline: Optional[Value] = None
    count: int = 1

    @property
    def place(self) -> tuple[str, str, Optional[int], str]:
        """What makes two readings those of one counter. A kernel message names the bus alone."""
        return (self.kind, self.gpu.place if self.gpu else "", self.link, self.where)


@dataclass(frozen=True)
class Failure:
    """What could not be read: neither healthy nor sick."""

    source: str
    """`nvml`, `kernel_log`, `sysfs`, ... : the same from one probe to the next."""
    text: str


@dataclass(frozen=True)
class Reading:
    """All of one look. `at` in UTC seconds; `context`: prolog, epilog, periodic or probe."""

    boot_id: str
    host: str
    context: str
    at: float
    gpus: tuple[Gpu, ...] = ()
    signals: tuple[Signal, ...] = ()
    failures: tuple[Failure, ...] = ()
    job: str = ""
    """Slurm job id that the node was held by, and `user`, the one who held it."""
    user: str = ""

    def of(self, kind: str) -> list[Signal]:
        return [signal for signal in self.signals if signal.kind == kind]


def normal_bus(text: str) -> str:
    """`0000:9b:00` of any form that NVML, nvidia-smi, lspci and the kernel print; `` of none."""
    match = _BUS.match(text.strip())
    if match is None:
        return ""
    domain = int(match.group(1) or "0", 16)
    return f"{domain:04x}:{match.group(2)}:{match.group(3)}".lower()


def reading_record(reading: Reading) -> dict[str, Any]:
    """For JSON; the file that it goes to has the schema_version."""
    signals = [{**vars(one), "gpu": vars(one.gpu) if one.gpu else None} for one in reading.signals]
    failures = [vars(one) for one in reading.failures]
    gpus = [vars(gpu) for gpu in reading.gpus]
    return {**vars(reading), "gpus": gpus, "signals": signals, "failures": failures}


def parse_reading(record: Mapping[str, Any]) -> Reading:
    """The reading again; FormatError where `record` is none."""
    try:
        reading = Reading(
            **{
                **record,
                "gpus": tuple(Gpu(**gpu) for gpu in record["gpus"]),
                "signals": tuple(
                    Signal(**{**signal, "gpu": Gpu(**signal["gpu"]) if signal["gpu"] else None})
                    for signal in record["signals"]
                ),
                "failures": tuple(Failure(**failure) for failure in record["failures"]),
            }
        )
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise FormatError(_not_a_reading(repr(error))) from None
    for signal in reading.signals:
        if not _is_signal(signal):
            raise FormatError(_not_a_reading(f"{signal!r:.200}"))
    texts = [reading.boot_id, reading.host, reading.context, reading.job, reading.user]
    texts += [text for failure in reading.failures for text in (failure.source, failure.text)]
    if not (
        is_number(reading.at) and all(map(_is_text, texts)) and all(map(_is_gpu, reading.gpus))
    ):
        raise FormatError(_not_a_reading(f"taken at {reading.at!r:.50}"))
    return reading


def _is_signal(signal: Signal) -> bool:
    numbers = [one for one in (signal.at, signal.link, signal.count) if one is not None]
    values = [signal.value] + ([] if signal.baseline is None else [signal.baseline])
    return (
        all(map(_is_text, (signal.kind, signal.text, signal.where)))
        and signal.kind in KINDS
        and all(map(is_number, numbers))
        and all(is_number(value) or _is_text(value) for value in values)
        and (signal.gpu is None or _is_gpu(signal.gpu))
    )


def _is_gpu(gpu: Gpu) -> bool:
    has_index = gpu.index is None or is_number(gpu.index)
    return has_index and _is_text(gpu.uuid) and _is_text(gpu.bus)


def is_number(value: object) -> bool:
    """Of those that a float holds; JSON writes NaN, Infinity and whole numbers without an end."""
    return isinstance(value, (int, float)) and -_MOST < value < _MOST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _not_a_reading(why: str) -> str:
    return (
        f"a stored reading of the node cannot be read ({why}); remove it, and the next probe "
        "begins a new one"
    )
