"""Structs and constants of NVML's C interface (nvml.h), as many as are read here. Values only.

Each is held against nvidia-ml-py by a test; the attribute and field names are those of nvml.h, so
that one can be looked up by the other.
"""

from __future__ import annotations

from ctypes import (
    Structure,
    Union,
    c_char,
    c_double,
    c_int,
    c_int64,
    c_longlong,
    c_ubyte,
    c_uint,
    c_ulong,
    c_ulonglong,
    c_ushort,
    sizeof,
)

# nvmlReturn_t
SUCCESS = 0
ERROR_INVALID_ARGUMENT = 2
ERROR_NOT_SUPPORTED = 3
ERROR_NO_PERMISSION = 4
ERROR_INSUFFICIENT_SIZE = 7
ERROR_DRIVER_NOT_LOADED = 9
ERROR_LIBRARY_NOT_FOUND = 12
ERROR_FUNCTION_NOT_FOUND = 13
ERROR_CORRUPTED_INFOROM = 14
ERROR_GPU_IS_LOST = 15
ERROR_RESET_REQUIRED = 16
ERROR_LIB_RM_VERSION_MISMATCH = 18
ERROR_NO_DATA = 21
ERROR_VGPU_ECC_NOT_SUPPORTED = 22
ERROR_ARGUMENT_VERSION_MISMATCH = 25
ERROR_DEPRECATED = 26
ERROR_NOT_READY = 27
ERROR_UNKNOWN = 999

ABSENT = frozenset(
    {
        ERROR_NOT_SUPPORTED,
        ERROR_FUNCTION_NOT_FOUND,
        ERROR_NO_DATA,
        ERROR_VGPU_ECC_NOT_SUPPORTED,
        ERROR_ARGUMENT_VERSION_MISMATCH,
        ERROR_DEPRECATED,
        ERROR_NOT_READY,
    }
)
"""This GPU or this driver has no such value: neither a fault nor a reading."""

# nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlMemoryLocation_t
MEMORY_ERROR_TYPE_CORRECTED = 0
MEMORY_ERROR_TYPE_UNCORRECTED = 1
VOLATILE_ECC = 0
AGGREGATE_ECC = 1
MEMORY_LOCATION_DRAM = 2
MEMORY_LOCATION_SRAM = 7

# nvmlPageRetirementCause_t
PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS = 0
PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1

# nvmlTemperatureSensors_t, nvmlTemperatureThresholds_t
TEMPERATURE_GPU = 0
TEMPERATURE_THRESHOLD_SLOWDOWN = 1
TEMPERATURE_THRESHOLD_MEM_MAX = 2

# nvmlNvLinkErrorCounter_t; links
NVLINK_ERROR_DL_REPLAY = 0
NVLINK_ERROR_DL_RECOVERY = 1
NVLINK_ERROR_DL_CRC_FLIT = 2
NVLINK_ERROR_DL_CRC_DATA = 3
NVLINK_MAX_LINKS = 36

# Field identifiers. The counters of links 0-5 and of links 6-11 lie in two blocks each.
FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0 = 32
FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_L0 = 39
FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L0 = 46
FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L0 = 53
FI_DEV_MEMORY_TEMP = 82
FI_DEV_PCIE_REPLAY_COUNTER = 94
FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L6 = 96
FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_L6 = 102
FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L6 = 108
FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L6 = 114
FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS = 206
FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS = 207
FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS = 211
FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS = 214
FI_DEV_NVLINK_COUNT_EFFECTIVE_BER = 220
FI_DEV_NVLINK_COUNT_SYMBOL_BER = 222
FI_DEV_GET_GPU_RECOVERY_ACTION = 230

# nvmlValueType_t: which member of nvmlValue_t is filled.
VALUE_MEMBERS = {
    0: "dVal",
    1: "uiVal",
    2: "ulVal",
    3: "ullVal",
    4: "sllVal",
    5: "siVal",
    6: "usVal",
}

# nvmlGpuFabricState_t
GPU_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}

PCI_BUS_ID_BUFFER_V2_SIZE = 16
PCI_BUS_ID_BUFFER_SIZE = 32
DEVICE_UUID_V2_BUFFER_SIZE = 96
DEVICE_NAME_V2_BUFFER_SIZE = 96
GPU_FABRIC_UUID_LEN = 16


class PciInfo(Structure):
    _fields_ = [
        ("busIdLegacy", c_char * PCI_BUS_ID_BUFFER_V2_SIZE),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", c_char * PCI_BUS_ID_BUFFER_SIZE),
    ]


class Utilization(Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class Value(Union):
    _fields_ = [
        ("dVal", c_double),
        ("uiVal", c_uint),
        ("ulVal", c_ulong),
        ("ullVal", c_ulonglong),
        ("sllVal", c_longlong),
        ("siVal", c_int),
        ("usVal", c_ushort),
    ]


class FieldValue(Structure):
    _fields_ = [
        ("fieldId", c_uint),
        ("scopeId", c_uint),
        ("timestamp", c_int64),
        ("latencyUsec", c_int64),
        ("valueType", c_uint),
        ("nvmlReturn", c_uint),
        ("value", Value),
    ]


class Memory(Structure):
    """nvmlMemory_v2_t. `used` leaves out what the driver keeps for itself."""

    _fields_ = [
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


class ProcessInfo(Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3, and of _v2."""

    _fields_ = [
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    ]


class RowRemapperHistogram(Structure):
    _fields_ = [
        ("max", c_uint),
        ("high", c_uint),
        ("partial", c_uint),
        ("low", c_uint),
        ("none", c_uint),
    ]


class MarginTemperature(Structure):
    _fields_ = [("version", c_uint), ("marginTemperature", c_int)]


class RepairStatus(Structure):
    _fields_ = [
        ("version", c_uint),
        ("bChannelRepairPending", c_uint),
        ("bTpcRepairPending", c_uint),
    ]


class UnrepairableMemory(Structure):
    _fields_ = [("version", c_uint), ("unrepairableMemory", c_uint)]


class EccSramErrorStatus(Structure):
    _fields_ = [
        ("version", c_uint),
        ("aggregateUncParity", c_ulonglong),
        ("aggregateUncSecDed", c_ulonglong),
        ("aggregateCor", c_ulonglong),
        ("volatileUncParity", c_ulonglong),
        ("volatileUncSecDed", c_ulonglong),
        ("volatileCor", c_ulonglong),
        ("aggregateUncBucketL2", c_ulonglong),
        ("aggregateUncBucketSm", c_ulonglong),
        ("aggregateUncBucketPcie", c_ulonglong),
        ("aggregateUncBucketMcu", c_ulonglong),
        ("aggregateUncBucketOther", c_ulonglong),
        ("bThresholdExceeded", c_uint),
    ]


class GpuFabricInfo(Structure):
    """nvmlGpuFabricInfo_v2_t; version 3 has one byte more, which is not read."""

    _fields_ = [
        ("version", c_uint),
        ("clusterUuid", c_ubyte * GPU_FABRIC_UUID_LEN),
        ("status", c_uint),
        ("cliqueId", c_uint),
        ("state", c_ubyte),
        ("healthMask", c_uint),
    ]


def version_of(struct: type[Structure], number: int) -> int:
    """NVML_STRUCT_VERSION of nvml.h: the size, and the version in the top byte."""
    return sizeof(struct) | number << 24
