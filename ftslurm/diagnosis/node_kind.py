"""What kind of node this is: its GPUs' models, its RDMA ports, the rate of its interface.

Reads only, in a process of its own, `python -m ftslurm.diagnosis.node_kind`: a call may hang in the
driver or in a network card's firmware. What is read is printed before what may hang is asked for, a
JSON object a line. Where GPUs are not shown (a step without gres under ConstrainDevices), or
there is no driver, nothing is said of them, nor where one is cut up (MIG): NVML names the whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from ctypes import c_void_p
from pathlib import Path
from typing import Any, Optional

from ftslurm.health.nvml import LIBRARY, Nvml
from ftslurm.health.nvml_types import SUCCESS
from ftslurm.health.signals import RDMA_RATE
from ftslurm.health.sysfs import port_signals, rdma_ports

DEADLINE_S = 20.0
"""On GPUs without persistence mode the driver loads first, GPU by GPU."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ftslurm.diagnosis.node_kind")
    parser.add_argument("--interface", default="", help="by which the nodes reach each other")
    parser.add_argument("--gpus", action="store_true", help="tell of GPUs")
    parser.add_argument("--library", default=LIBRARY)
    options = parser.parse_args(argv)
    if options.interface:
        _say("interface_mbps", interface_mbps(options.interface))
    _say("ports", ports())
    if options.gpus:
        _say("gpus", gpus(Nvml(options.library)))
    return 0


def look_argv(interface: Optional[str], library: Optional[str]) -> list[str]:
    """The command. `library`: NVML; None: GPUs do not count."""
    argv = [sys.executable, "-m", "ftslurm.diagnosis.node_kind"]
    if interface is not None:
        argv.append(f"--interface={interface}")
    if library is not None:
        argv += ["--gpus", f"--library={library}"]
    return argv


def parse(said: bytes) -> dict[str, Any]:
    """What the command has told until its end, as likeness.Kind has it."""
    told: dict[str, Any] = {}
    for line in said.splitlines():
        try:
            fact = json.loads(line)
        except ValueError:  # a library may print as well; or the end of what was cut off
            continue
        if isinstance(fact, dict):
            told.update(fact)
    return told


def interface_mbps(name: str, root: Path = Path("/")) -> Optional[int]:
    """None: the kernel does not know it, as of a bridge or of one that is down."""
    try:
        speed = int((root / "sys/class/net" / name / "speed").read_text())
    except (OSError, ValueError):  # EINVAL: it is down, or has none (sysfs-class-net)
        return None
    return speed if speed > 0 else None


def ports(root: Path = Path("/")) -> dict[str, int]:
    """Link layer and rate of the ports that are up -> how many; empty without RDMA."""
    found: Counter[str] = Counter()
    for port in rdma_ports(root):
        rates = [one.value for one in port_signals(port) if one.kind == RDMA_RATE]
        if rates:  # of one that is up
            found[f"{_link_layer(port)} {rates[0]:g} Gb/s"] += 1
    return dict(found)


def gpus(nvml: Nvml) -> Optional[dict[str, int]]:
    """Model -> how many; None where none is shown, or one does not tell its name or is cut up."""
    if nvml.start() != SUCCESS:
        return None
    code, count = nvml.device_count()
    found: Counter[str] = Counter()
    for index in range(count if code == SUCCESS else 0):
        code, device = nvml.device(index)
        if code == SUCCESS:
            code, name = nvml.text("nvmlDeviceGetName", device)
        if code != SUCCESS or _is_cut_up(nvml, device):
            found.clear()
            break
        found[name] += 1
    nvml.stop()
    return dict(found) or None


def _is_cut_up(nvml: Nvml, device: c_void_p) -> bool:
    code, modes = nvml.numbers("nvmlDeviceGetMigMode", device, 2)  # now, and when it is reset
    return code == SUCCESS and modes[0] == 1


def _link_layer(port: Path) -> str:
    try:
        return (port / "link_layer").read_text().strip()
    except OSError:
        return "RDMA"


def _say(name: str, value: Any) -> None:
    if value is not None:
        print(json.dumps({name: value}), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
