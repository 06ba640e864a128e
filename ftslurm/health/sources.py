"""All that can be asked of a node, each source within its part of the time.

The kernel log and sysfs before NVML, which may hang; nvidia-smi only where NVML cannot be used, and
never after a hang: it would hang as well. What hung and could not be killed is not asked again
while it is still there. Reads only, and decides nothing but what it may ask.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from ftslurm.health import kernel_log, nvml_read, sysfs
from ftslurm.health import signals as s
from ftslurm.health.child import KILL_WAIT_S, TERM_WAIT_S, is_running
from ftslurm.health.job import JobFacts
from ftslurm.health.kernel_log import Cursor, NewEvents
from ftslurm.health.look import Parts
from ftslurm.health.second_look import HASTE
from ftslurm.health.settings import NVIDIA_SMI, HealthSettings
from ftslurm.health.signals import Failure, Gpu, Signal

DRIVER = "driver"
"""In `Hardware.abandoned`: NVML and nvidia-smi, which ask the same driver."""

_LEAST_S = 0.2
_KILL_S = TERM_WAIT_S + KILL_WAIT_S
_LOG_S = 2.0
_SYSFS_S = 2.0
_SYSFS_SHARE = 0.25
"""Of a look's time; half a second was too little beside ranks that keep all CPUs busy."""
_NVML_S, _NVML_SHORT_S = 10.0, 2.5
_NVML_SHARE = 0.3
"""Of a look's time, so that one that hangs can be looked at again, in all that is left then."""
_SMI_S = 10.0
_NO_TIME = "not asked: there was no time left"


@dataclass
class Budget:
    """How long a look may take, from now on. `is_short`: a few seconds."""

    whole_s: float
    is_short: bool
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.whole_s

    def left_s(self) -> float:
        return self.until - time.monotonic()

    def share(self, most_s: float) -> float:
        """A deadline for a child, which may need to be killed behind it; 0 where it is too late."""
        left_s = min(most_s, self.left_s() - _KILL_S)
        return left_s if left_s >= _LEAST_S else 0.0


@dataclass(frozen=True)
class Scope:
    """Where is looked, and by whom."""

    settings: HealthSettings
    in_job: bool
    """Of a user, within a job: only the job's GPUs are seen, and the log may be out of bounds."""

    def asks(self, source: str) -> bool:
        return source not in self.settings.skip


@dataclass
class Hardware:
    gpus: list[Gpu] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    abandoned: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By source: pid and start of a child that could not be killed, this time or before."""

    def take(self, parts: Parts, source: str) -> None:
        self.gpus += parts.gpus
        self.signals += parts.signals
        self.failures += parts.failures
        if parts.abandoned:
            self.abandoned[source] = parts.abandoned


def read_log(
    scope: Scope, cursor: Optional[Cursor], *, boot_id: str, now: float, budget: Budget
) -> Optional[NewEvents]:
    """What the kernel has said since `cursor`; None where it is not asked."""
    if not scope.asks(kernel_log.SOURCE):
        return None
    return kernel_log.read_new(
        Path(scope.settings.kernel_log),
        cursor,
        boot_id=boot_id,
        boot_at=_boot_at(Path(scope.settings.sysfs_root)),
        now=now,
        budget_s=max(_LEAST_S, min(_LOG_S, budget.left_s() / 6)),
    )


def read_hardware(
    scope: Scope,
    budget: Budget,
    *,
    stuck: Mapping[str, tuple[int, str]],
    leftovers_of: Optional[JobFacts] = None,
    left: Collection[str] = (),
    is_last: bool = False,
) -> Hardware:
    """`stuck`: what was abandoned by looks before. `leftovers_of`: a job that has ended; without
    its `uid`, processes outside of a job's cgroup are not taken for its own. `left`: those found by
    the look before. `is_last`: the driver may have all the time that is left."""
    found = Hardware(abandoned={name: one for name, one in stuck.items() if is_running(*one)})
    buses = _ask_sysfs(scope, budget, found, leftovers_of, left)
    counts = [signal.value for signal in found.signals if signal.kind == s.GPU_COUNT_PCI]
    if DRIVER in found.abandoned:
        _tell_stuck(found)
    else:
        most_s = _most_nvml_s(budget, is_last)
        # In a job's cgroup NVML shows the GPUs of the job, and PCI those of others as well.
        nvml = _ask_nvml(scope, budget.share(most_s), [] if scope.in_job else buses)
        _take_driver(scope, budget, found, nvml, has_gpus=counts != [0])
    if scope.in_job:
        found.signals = [one for one in found.signals if one.kind != s.GPU_COUNT_NVML]
    elif scope.settings.gpus_per_node:
        found.signals.append(sysfs.gres_signal(scope.settings.gpus_per_node))
    found.signals = list(_with_index(found.signals, found.gpus))
    return found


def _ask_sysfs(
    scope: Scope,
    budget: Budget,
    found: Hardware,
    leftovers_of: Optional[JobFacts],
    left: Collection[str],
) -> list[str]:
    """Takes what it says; gives the buses of the GPUs that PCI has."""
    if not scope.asks(sysfs.SOURCE):
        return []
    deadline_s = budget.share(min(_SYSFS_S, _SYSFS_SHARE * budget.whole_s))
    if sysfs.SOURCE in found.abandoned:
        found.failures.append(
            Failure(sysfs.SOURCE, "not asked: a look of before still hangs in it")
        )
        return []
    if not deadline_s:
        found.failures.append(Failure(sysfs.SOURCE, _NO_TIME))
        return []
    parts = sysfs.read_sysfs(
        deadline_s=deadline_s,
        root=Path(scope.settings.sysfs_root),
        rdma=scope.asks("rdma"),
        job=leftovers_of.job_id if leftovers_of else "",
        uid=leftovers_of.uid if leftovers_of else None,
        left=left,
    )
    buses = [gpu.bus for gpu in parts.gpus]
    parts.gpus = []  # NVML has their names and numbers too
    found.take(parts, sysfs.SOURCE)
    return buses


def _tell_stuck(found: Hardware) -> None:
    text = f"process {found.abandoned[DRIVER][0]} of a look before still hangs, {s.UNKILLABLE}"
    found.signals.append(Signal(s.DRIVER_HANG, True, text=text))
    found.failures.append(Failure(nvml_read.SOURCE, f"not asked: {text}"))


def _take_driver(
    scope: Scope, budget: Budget, found: Hardware, nvml: Parts, *, has_gpus: bool
) -> None:
    """What NVML has said, and nvidia-smi where that is nothing."""
    why = [one.text for one in nvml.failures]
    has_hung = False
    for signal in nvml.signals:
        has_hung = has_hung or signal.kind == s.DRIVER_HANG
        if signal.kind == s.NVML_UNUSABLE and signal.gpu is None:
            why.append(f"{signal.where} gives {signal.value}")
    is_usable = scope.asks(nvml_read.SOURCE) and not why
    if is_usable or has_hung or not has_gpus:
        found.take(nvml, DRIVER)
        return
    smi = _ask_smi(scope, budget)
    if not smi.gpus:
        found.take(nvml, DRIVER)
    elif why:
        found.notes.append(f"nvidia-smi stood in for NVML: {'; '.join(why)}")
    found.take(smi, DRIVER)


def _most_nvml_s(budget: Budget, is_last: bool) -> float:
    if is_last:
        return budget.whole_s
    return _NVML_SHORT_S if budget.is_short else min(_NVML_S, _NVML_SHARE * budget.whole_s)


def _ask_nvml(scope: Scope, deadline_s: float, buses: Sequence[str]) -> Parts:
    if not scope.asks(nvml_read.SOURCE):
        return Parts()
    if not deadline_s:
        return Parts(failures=[Failure(HASTE, f"NVML was {_NO_TIME}")])
    return nvml_read.read_nvml(
        deadline_s=deadline_s,
        library=scope.settings.nvml_library,
        pci_buses=buses,
    )


def _ask_smi(scope: Scope, budget: Budget) -> Parts:
    deadline_s = budget.share(_SMI_S)
    if not scope.asks(NVIDIA_SMI) or not deadline_s:
        return Parts()
    from ftslurm.health import nvidia_smi  # late: few nodes need it

    return nvidia_smi.read_nvidia_smi(deadline_s=deadline_s, command=scope.settings.nvidia_smi)


def _with_index(signals: Iterable[Signal], gpus: Iterable[Gpu]) -> Iterable[Signal]:
    """What PCI has said of a GPU, under the name that NVML has for it."""
    by_bus = {gpu.bus: gpu for gpu in gpus if gpu.bus}
    for signal in signals:
        known = by_bus.get(signal.gpu.bus) if signal.gpu and signal.gpu.index is None else None
        yield replace(signal, gpu=known) if known else signal


def _boot_at(root: Path) -> Optional[float]:
    """When the kernel started, in UTC seconds by the clock of now (proc_stat(5), btime)."""
    try:
        lines = (root / "proc/stat").read_text(errors="replace").splitlines()
    except OSError:
        return None
    numbers = [line.split()[1:] for line in lines if line.startswith("btime ")]
    return float(numbers[0][0]) if numbers and numbers[0] and numbers[0][0].isdigit() else None
