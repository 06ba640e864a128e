"""Builds the fake libnvidia-ml.so.1 and writes the state file of a node for it (see nvml.c)."""

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATE_VARIABLE = "FTSLURM_FAKE_NVML"

_HEALTHY: dict[str, object] = {
    "ecc_mode": 1,
    "ecc:dram:volatile:uncorrected": 0, "ecc:dram:aggregate:uncorrected": 0,
    "ecc:dram:volatile:corrected": 0, "ecc:sram:volatile:corrected": 0,
    "ecc:sram:volatile:uncorrected": 0, "ecc:sram:aggregate:uncorrected": 0,
    "pcie:width": 16, "pcie:width_max": 16, "field:94": 0, "power_mw": 72500,
    "persistence": 1, "clocks": 1, "temperature": 31, "utilisation": 0, "mig": 0,
}  # fmt: skip
_REMAPPING: dict[str, object] = {
    "remaps_correctable": 0, "remaps_uncorrectable": 0, "remap_pending": 0, "remap_failure": 0,
    "banks:high": 0, "banks:partial": 0, "banks:low": 0, "banks:none": 0,
}  # fmt: skip
_HOPPER: dict[str, object] = {
    "sram:threshold": 0, "sram:aggregate:parity": 0, "sram:aggregate:secded": 0,
    "sram:volatile:parity": 0, "sram:volatile:secded": 0, "margin": 55, "field:230": 0,
    "fabric:state": 3, "fabric:status": 0, "fabric:mask": 0x2A, "pcie:gen": 5, "pcie:gen_max": 5,
    "field:82": 33, "repair:channel": 0, "repair:tpc": 0, "unrepairable": 0,
}  # fmt: skip


def _links(count: int) -> dict[str, object]:
    """Links 0-11 have fields for their counters; the others are asked for one by one."""
    blocks = {0: (32, 96), 1: (39, 102), 2: (46, 108), 3: (53, 114)}
    fields = {
        f"field:{low + link if link < 6 else high + link - 6}": 0
        for low, high in blocks.values()
        for link in range(min(count, 12))
    }
    errors = {f"linkerror:*:{number}": 0 for number in range(4)}
    return {"links": count, "link:*": 1, **fields, **errors}


def _links5(count: int) -> dict[str, object]:
    errors = {f"field:{field}:*": 0 for field in (206, 207, 211, 214)}
    # 15e-255: how a healthy link writes a bit error rate of nothing.
    rates = {f"field:{field}:*": 0xFFF for field in (220, 222)}
    return {"links": count, "link:*": 1, **errors, **rates}


MODELS: dict[str, dict[str, object]] = {
    "H100": {"name": "NVIDIA H100 80GB HBM3", **_REMAPPING, **_HOPPER, **_links(18),
             "banks:max": 2560},
    "H200": {"name": "NVIDIA H200", **_REMAPPING, **_HOPPER, **_links(18), "banks:max": 3072},
    "A100": {"name": "NVIDIA A100-SXM4-80GB", **_REMAPPING, **_links(12), "banks:max": 640,
             "pcie:gen": 4, "pcie:gen_max": 4, "threshold:1": 89, "threshold:2": 95,
             "field:82": 40},
    "B200": {"name": "NVIDIA B200", **_REMAPPING, **_HOPPER, **_links5(18), "banks:max": 5120},
    "V100": {"name": "Tesla V100-SXM2-32GB", **_links(6), "retired:single": 0,
             "retired:double": 0, "retired:pending": 0, "pcie:gen": 3, "pcie:gen_max": 3,
             "threshold:1": 87},
}  # fmt: skip


class Node:
    """A healthy node of eight GPUs, made sick line by line."""

    def __init__(self, path: Path, model: str = "H100", gpus: int = 8) -> None:
        self.path = path
        self.rows: list[tuple[str, str, object]] = [("*", "gpus", gpus)]
        self.rows += [("*", key, value) for key, value in {**_HEALTHY, **MODELS[model]}.items()]
        for index in range(gpus):
            uuid = f"GPU-{index:08x}-0000-4000-8000-{index:012x}"
            self.rows.append((str(index), "uuid", uuid))
            self.rows.append((str(index), "bus", f"00000000:{0x1B + 0x10 * index:02X}:00.0"))
        self.write()

    def set(self, gpu: object, key: str, value: object) -> "Node":
        self.rows.append((str(gpu), key, value))
        return self.write()

    def lacks(self, key: str) -> "Node":
        """A driver or a part that does not support it."""
        self.rows = [row for row in self.rows if row[1] != key]
        return self.write()

    def write(self) -> "Node":
        # By rename: it may be read at this moment.
        new = self.path.with_name(self.path.name + ".new")
        new.write_text("".join(f"{gpu} {key} {value}\n" for gpu, key, value in self.rows))
        new.replace(self.path)
        return self


def build(folder: Path, *flags: str) -> Path:
    """libnvidia-ml.so.1 in `folder`; a machine that runs these tests has a C compiler."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags,
         "-o", str(library), str(HERE / "nvml.c")],
        check=True, timeout=60,
    )  # fmt: skip
    return library
