"""The one binding of libnvidia-ml.so.1. Every call gives its return code beside its value.

A symbol that an old library lacks is ERROR_FUNCTION_NOT_FOUND, a library that is not there
ERROR_LIBRARY_NOT_FOUND; nothing here raises, and nothing is changed on the GPU. A call may hang for
ever in the driver: use it in a child (`nvml_read.read_nvml`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    byref,
    c_int,
    c_uint,
    c_ulonglong,
    c_void_p,
    create_string_buffer,
)
from typing import Any, Optional

from ftslurm.health import nvml_types as n

LIBRARY = "libnvidia-ml.so.1"

Field = tuple[int, int]
"""Field identifier and scope: the link for a field of a link, else 0."""

_VERSIONED = {
    n.EccSramErrorStatus: 1,
    n.MarginTemperature: 1,
    n.RepairStatus: 1,
    n.UnrepairableMemory: 1,
    n.GpuFabricInfo: 2,
    n.Memory: 2,
}


_MORE_PROCESSES = 16
"""Room for those that begin between two calls."""
_NOT_AVAILABLE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE"""


def _no_trace(call: str) -> None:
    del call


class Nvml:
    """`on_call` hears the name of each function before it is entered."""

    def __init__(self, path: str = LIBRARY, *, on_call: Callable[[str], None] = _no_trace) -> None:
        self._on_call = on_call
        on_call(f"dlopen({path})")
        try:
            self._library: Optional[ctypes.CDLL] = ctypes.CDLL(path)
        except OSError:
            self._library = None

    def call(self, name: str, *arguments: Any) -> int:
        """nvmlReturn_t of `name`, which is called with ctypes values."""
        if self._library is None:
            return n.ERROR_LIBRARY_NOT_FOUND
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return n.ERROR_FUNCTION_NOT_FOUND
        self._on_call(name)
        return int(function(*arguments))

    def start(self) -> int:
        return self.call("nvmlInit_v2")

    def stop(self) -> int:
        return self.call("nvmlShutdown")

    def device_count(self) -> tuple[int, int]:
        count = c_uint()
        return self.call("nvmlDeviceGetCount_v2", byref(count)), count.value

    def device(self, index: int) -> tuple[int, c_void_p]:
        handle = c_void_p()
        return self.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)), handle

    def text(self, name: str, device: c_void_p) -> tuple[int, str]:
        """Of nvmlDeviceGetUUID and its kin."""
        size = max(n.DEVICE_UUID_V2_BUFFER_SIZE, n.DEVICE_NAME_V2_BUFFER_SIZE)
        buffer = create_string_buffer(size)
        code = self.call(name, device, buffer, c_uint(size))
        return code, buffer.value.decode(errors="replace")

    def number(self, name: str, device: c_void_p, *arguments: int) -> tuple[int, int]:
        """Of the functions that take small integers and give one unsigned int."""
        value = c_uint()
        code = self.call(name, device, *map(c_uint, arguments), byref(value))
        return code, value.value

    def count(self, name: str, device: c_void_p, *arguments: int) -> tuple[int, int]:
        """As `number`, for an unsigned long long."""
        value = c_ulonglong()
        code = self.call(name, device, *map(c_uint, arguments), byref(value))
        return code, value.value

    def numbers(self, name: str, device: c_void_p, how_many: int) -> tuple[int, list[int]]:
        """Of the functions that give several unsigned ints."""
        values = [c_uint() for _ in range(how_many)]
        code = self.call(name, device, *(byref(value) for value in values))
        return code, [value.value for value in values]

    def filled(self, name: str, device: c_void_p, struct: Any) -> tuple[int, Any]:
        """`struct()` filled in, with its version set where it has one."""
        value = struct()
        if struct in _VERSIONED:
            value.version = n.version_of(struct, _VERSIONED[struct])
        return self.call(name, device, byref(value)), value

    def retired_pages(self, device: c_void_p, cause: int) -> tuple[int, int]:
        """How many pages; asked without a buffer, NVML says the size it would need."""
        count = c_uint(0)
        code = self.call(
            "nvmlDeviceGetRetiredPages",
            device,
            c_uint(cause),
            byref(count),
            POINTER(c_ulonglong)(),
        )
        return (n.SUCCESS if code == n.ERROR_INSUFFICIENT_SIZE else code), count.value

    def processes(self, device: c_void_p) -> tuple[int, dict[int, Optional[int]]]:
        """Pid -> bytes that it holds, None where the driver cannot say; one that has begun since
        the list was measured is left out."""
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        count = c_uint(0)
        code = self.call(name, device, byref(count), POINTER(n.ProcessInfo)())
        if code == n.ERROR_FUNCTION_NOT_FOUND:  # drivers before 510
            name = name.replace("_v3", "_v2")
            code = self.call(name, device, byref(count), POINTER(n.ProcessInfo)())
        if code != n.ERROR_INSUFFICIENT_SIZE:
            return code, {}
        size = count.value + _MORE_PROCESSES
        count, found = c_uint(size), (n.ProcessInfo * size)()
        code = self.call(name, device, byref(count), found)
        if code:
            return code, {}
        return code, {
            one.pid: None if one.usedGpuMemory == _NOT_AVAILABLE else one.usedGpuMemory
            for one in found[: count.value]
        }

    def fields(
        self, device: c_void_p, wanted: Sequence[Field]
    ) -> tuple[int, dict[Field, tuple[int, int]]]:
        """Code and value of each field. Where the call as a whole fails, none has been read."""
        asked = (n.FieldValue * len(wanted))()
        for slot, (field, scope) in zip(asked, wanted):
            slot.fieldId, slot.scopeId = field, scope
            slot.nvmlReturn = n.ERROR_NOT_SUPPORTED
        code = self.call("nvmlDeviceGetFieldValues", device, c_int(len(wanted)), asked)
        if code:
            return code, {}
        return code, {(slot.fieldId, slot.scopeId): _field(slot) for slot in asked}


def _field(slot: Any) -> tuple[int, int]:
    """The value counts only with the slot's own nvmlReturn; an unknown type is no value."""
    member = n.VALUE_MEMBERS.get(slot.valueType)
    if slot.nvmlReturn != n.SUCCESS:
        return int(slot.nvmlReturn), 0
    value = getattr(slot.value, member) if member else math.nan
    return (n.SUCCESS, int(value)) if math.isfinite(value) else (n.ERROR_NOT_SUPPORTED, 0)
