"""The NVML binding against a fake library in C, and against nvidia-ml-py as the oracle."""

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest
from fakes.nvml import nodes

from ftslurm.health import nvml_types as n
from ftslurm.health import signals as s
from ftslurm.health.look import Parts, parse_lines
from ftslurm.health.nvml import Nvml
from ftslurm.health.nvml_links import bit_error_rate, model_links
from ftslurm.health.nvml_read import read_nvml

ORACLE = Path(__file__).resolve().parent / "fakes" / "nvml" / "oracle.py"
STRUCTS = {
    n.PciInfo: pynvml.nvmlPciInfo_t,
    n.Utilization: pynvml.c_nvmlUtilization_t,
    n.Value: pynvml.c_nvmlValue_t,
    n.FieldValue: pynvml.c_nvmlFieldValue_t,
    n.RowRemapperHistogram: pynvml.c_nvmlRowRemapperHistogramValues,
    n.MarginTemperature: pynvml.c_nvmlMarginTemperature_v1_t,
    n.RepairStatus: pynvml.c_nvmlRepairStatus_t,
    n.UnrepairableMemory: pynvml.c_nvmlUnrepairableMemory_v1_t,
    n.EccSramErrorStatus: pynvml.c_nvmlEccSramErrorStatus_v1_t,
    n.GpuFabricInfo: pynvml.c_nvmlGpuFabricInfo_v2_t,
    n.Memory: pynvml.c_nvmlMemory_v2_t,
    n.ProcessInfo: pynvml.c_nvmlProcessInfo_v3_t,
}
VERSIONS = {
    (n.EccSramErrorStatus, 1): pynvml.nvmlEccSramErrorStatus_v1,
    (n.MarginTemperature, 1): pynvml.nvmlMarginTemperature_v1,
    (n.RepairStatus, 1): pynvml.nvmlRepairStatus_v1,
    (n.UnrepairableMemory, 1): pynvml.nvmlUnrepairableMemory_v1,
    (n.GpuFabricInfo, 2): pynvml.nvmlGpuFabricInfo_v2,
    (n.Memory, 2): pynvml.nvmlMemory_v2,
}
# What a healthy GPU of each model does not say, because the part has no such thing.
NOT_OF_MODEL = {
    "H100": {s.RETIRED_PAGES, s.TEMPERATURE_SLOWDOWN, s.NVLINK5_MALFORMED},
    "H200": {s.RETIRED_PAGES, s.TEMPERATURE_SLOWDOWN, s.NVLINK5_MALFORMED},
    "A100": {s.RETIRED_PAGES, s.SRAM_THRESHOLD, s.FABRIC_STATE, s.TEMPERATURE_MARGIN},
    "B200": {s.RETIRED_PAGES, s.NVLINK_REPLAY, s.NVLINK_CRC},
    "V100": {s.REMAP_PENDING, s.RECOVERY_ACTION, s.FABRIC_STATE},
}
LINKS = {"H100": 18, "H200": 18, "A100": 12, "B200": 18, "V100": 6}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nodes.Node:
    monkeypatch.setenv(nodes.STATE_VARIABLE, str(tmp_path / "state"))
    return nodes.Node(tmp_path / "state", gpus=2)


def of(parts: Parts, kind: str, index: int = 0) -> list[s.Value]:
    return [
        signal.value
        for signal in parts.signals
        if signal.kind == kind and (signal.gpu is None or signal.gpu.index == index)
    ]


def test_constants_are_those_of_nvidia_ml_py() -> None:
    checked = 0
    for name, value in vars(n).items():
        if name.isupper() and isinstance(value, int):
            # It spells the v2 buffer of the bus id with DEVICE, as older nvml.h did.
            spelled = f"NVML_DEVICE_{name}" if name.startswith("PCI_") else f"NVML_{name}"
            assert getattr(pynvml, spelled) == value, name
            checked += 1
    assert checked > 50


def test_value_types_and_fabric_states_are_those_of_nvidia_ml_py() -> None:
    types = {
        "dVal": "DOUBLE", "uiVal": "UNSIGNED_INT", "ulVal": "UNSIGNED_LONG",
        "ullVal": "UNSIGNED_LONG_LONG", "sllVal": "SIGNED_LONG_LONG", "siVal": "SIGNED_INT",
        "usVal": "UNSIGNED_SHORT",
    }  # fmt: skip
    for number, member in n.VALUE_MEMBERS.items():
        assert getattr(pynvml, f"NVML_VALUE_TYPE_{types[member]}") == number
    for number, state in n.GPU_FABRIC_STATES.items():
        assert getattr(pynvml, f"NVML_GPU_FABRIC_STATE_{state.upper()}") == number


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_structs_have_the_layout_of_nvidia_ml_py(struct: type) -> None:
    oracle = STRUCTS[struct]
    assert ctypes.sizeof(struct) == ctypes.sizeof(oracle)
    assert [field[0] for field in struct._fields_] == [field[0] for field in oracle._fields_]
    for name, *_ in struct._fields_:
        ours, theirs = getattr(struct, name), getattr(oracle, name)
        assert ours.offset == theirs.offset, name
        # nvml.h has a byte and three of padding where nvidia-ml-py has an int.
        if (struct, name) != (n.GpuFabricInfo, "state"):
            assert ours.size == theirs.size, name


def test_struct_versions_are_those_of_nvidia_ml_py() -> None:
    for (struct, number), version in VERSIONS.items():
        assert n.version_of(struct, number) == version


@pytest.mark.parametrize("model", nodes.MODELS)
def test_a_healthy_node_is_read_whole(model: str, library: str, node: nodes.Node) -> None:
    nodes.Node(node.path, model)
    parts = read_nvml(deadline_s=60, library=library)
    assert not parts.failures
    assert [gpu.index for gpu in parts.gpus] == list(range(8))
    assert parts.gpus[0].bus == "0000:1b:00"
    assert of(parts, s.GPU_COUNT_NVML) == [8]
    assert of(parts, s.NVLINK_LINKS_UP) == of(parts, s.NVLINK_LINKS_MODEL) == [LINKS[model]]
    kinds = {signal.kind for signal in parts.signals}
    assert not kinds & NOT_OF_MODEL[model]
    assert not kinds & {s.NVML_ERROR, s.GPU_LOST, s.RESET_REQUIRED, s.DRIVER_HANG}
    assert {s.ECC_DRAM_VOLATILE_UNCORRECTED, s.PCIE_WIDTH, s.CLOCKS_EVENT} <= kinds
    assert kinds <= s.KINDS


@pytest.mark.parametrize("model", nodes.MODELS)
def test_nvidia_ml_py_reads_the_same_from_the_same_library(
    model: str, library: str, node: nodes.Node
) -> None:
    sick = nodes.Node(node.path, model, gpus=2)
    for key in [row[1] for row in sick.rows if row[0] == "*" and row[2] == 0]:
        if key not in ("persistence", "mig"):  # links of a partitioned GPU are not read
            sick.set(1, key, 1)
    sick.set(1, "link:2", 0)
    parts = read_nvml(deadline_s=60, library=library)
    done = subprocess.run(
        [sys.executable, str(ORACLE)],
        env={**os.environ, "LD_LIBRARY_PATH": str(Path(library).parent)},
        check=True,
        capture_output=True,
        timeout=60,
    )
    for record in json.loads(done.stdout):
        index = record.pop("index")
        assert (parts.gpus[index].uuid, parts.gpus[index].bus) == (
            record.pop("uuid"),
            s.normal_bus(record.pop("bus")),
        )
        assert len(record) > 15
        for kind, value in record.items():
            assert of(parts, kind, index) == [value], kind


SETTINGS = [
    ("ecc:dram:volatile:uncorrected", 3, s.ECC_DRAM_VOLATILE_UNCORRECTED, 3),
    ("ecc:dram:aggregate:uncorrected", 4, s.ECC_DRAM_AGGREGATE_UNCORRECTED, 4),
    ("sram:volatile:secded", 2, s.ECC_SRAM_VOLATILE_UNCORRECTED, 2),
    ("sram:aggregate:parity", 5, s.ECC_SRAM_AGGREGATE_UNCORRECTED, 5),
    ("sram:threshold", 1, s.SRAM_THRESHOLD, True),
    ("remap_pending", 1, s.REMAP_PENDING, True),
    ("remap_failure", 1, s.REMAP_FAILURE, True),
    ("remaps_uncorrectable", 512, s.REMAPS_UNCORRECTABLE, 512),
    ("banks:none", 1, s.REMAP_BANKS_NONE, 1),
    ("banks:low", 2, s.REMAP_BANKS_LOW, 2),
    ("unrepairable", 1, s.UNREPAIRABLE_MEMORY, True),
    ("repair:tpc", 1, s.REPAIR_PENDING, True),
    ("field:230", 4, s.RECOVERY_ACTION, 4),
    ("field:94", 12, s.PCIE_REPLAY, 12),
    ("pcie:width", 8, s.PCIE_WIDTH, 8),
    ("clocks", 0x48, s.CLOCKS_EVENT, 0x48),
    ("margin", -3, s.TEMPERATURE_MARGIN, -3),
    ("fabric:state", 1, s.FABRIC_STATE, "not_started"),
    ("persistence", 0, s.PERSISTENCE_MODE, False),
    ("ecc_mode", 0, s.ECC_MODE, "disabled"),
    ("link:3", 0, s.NVLINK_LINKS_UP, 17),
]


@pytest.mark.parametrize(("key", "value", "kind", "expected"), SETTINGS, ids=lambda v: str(v))
def test_each_fault_is_told_of_its_gpu_alone(
    key: str, value: object, kind: str, expected: object, library: str, node: nodes.Node
) -> None:
    node.set(1, key, value)
    parts = read_nvml(deadline_s=60, library=library)
    assert of(parts, kind, 1) == [expected]
    assert of(parts, kind, 0) != [expected]


def test_link_counters_carry_their_link(library: str, node: nodes.Node) -> None:
    node.set(0, "field:110", 7)  # replay of link 8
    node.set(0, "linkerror:17:1", 2)
    node.set(0, "field:100", 3)  # CRC of link 10: flits and data together
    node.set(0, "field:106", 4)
    parts = read_nvml(deadline_s=60, library=library)
    told = {(x.kind, x.link): x.value for x in parts.signals if x.link is not None and x.value}
    assert told == {
        (s.NVLINK_REPLAY, 8): 7, (s.NVLINK_RECOVERY, 17): 2, (s.NVLINK_CRC, 10): 7,
    }  # fmt: skip


def test_counters_of_nvlink5_are_scoped_fields(library: str, node: nodes.Node) -> None:
    nodes.Node(node.path, "B200").set(2, "field:214:5", 1).set(2, "field:220:5", 0x906)
    parts = read_nvml(deadline_s=60, library=library)
    told = {(x.kind, x.link): x.value for x in parts.signals if x.link is not None and x.value}
    assert told == {(s.NVLINK5_RECOVERY_FAILED, 5): 1, (s.NVLINK5_EFFECTIVE_BER, 5): 9e-6}


def test_a_bit_error_rate_is_unpacked() -> None:
    assert (bit_error_rate(0xFFF), bit_error_rate(0x10C), bit_error_rate(0)) == (0.0, 1e-12, 0.0)


def test_the_number_of_links_is_known_of_whole_boards_only() -> None:
    assert model_links("NVIDIA H100 80GB HBM3") == 18
    assert model_links("NVIDIA GB200") == 18
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA L40S", ""):
        assert model_links(name) is None


def test_disabled_links_do_not_count_as_down(library: str, node: nodes.Node) -> None:
    node.lacks("link:*")
    for link in range(12):
        node.set("*", f"link:{link}", 1)
    parts = read_nvml(deadline_s=60, library=library)
    assert of(parts, s.NVLINK_LINKS_UP) == [12]
    node.lacks("links")
    assert of(read_nvml(deadline_s=60, library=library), s.NVLINK_LINKS_UP) == []


def test_links_of_a_partitioned_gpu_are_not_read(library: str, node: nodes.Node) -> None:
    parts = read_nvml(deadline_s=60, library=str(library)) if node.set(0, "mig", 1) else None
    assert parts is not None
    assert of(parts, s.MIG_MODE) == [True]
    assert (of(parts, s.NVLINK_LINKS_UP, 0), of(parts, s.NVLINK_LINKS_UP, 1)) == ([], [18])


def test_whatever_is_not_supported_gives_no_signal_and_spoils_no_other(
    library: str, tmp_path: Path, node: nodes.Node
) -> None:
    whole = read_nvml(deadline_s=60, library=library)
    count = {kind: len(of(whole, kind)) for kind in s.KINDS}
    keys = {row[1] for row in node.rows if row[0] == "*"} - {"gpus", "name"}
    keys = {key for key in keys if not key.startswith(("field:", "linkerror"))} | {"field:230"}
    for key in sorted(keys):
        lacking = nodes.Node(node.path, gpus=1).lacks(key)
        parts = read_nvml(deadline_s=60, library=library)
        assert lacking and not parts.failures
        assert not of(parts, s.NVML_ERROR), key
        now = {kind: len(of(parts, kind)) for kind in s.KINDS}
        assert all(now[kind] <= count[kind] for kind in s.KINDS), key
        assert now[s.TEMPERATURE] == (key != "temperature")


def test_a_field_that_failed_is_not_read_as_its_value(library: str, node: nodes.Node) -> None:
    node.set(0, "field:230", 2).set(0, "fieldcode:230", 3)
    assert of(read_nvml(deadline_s=60, library=library), s.RECOVERY_ACTION) == []
    node.set(0, "fieldcode:230", 2)
    assert not of(read_nvml(deadline_s=60, library=library), s.NVML_ERROR)
    node.set(0, "fieldcode:230", 999)
    assert of(read_nvml(deadline_s=60, library=library), s.NVML_ERROR) == [999]


@pytest.mark.parametrize(
    ("code", "kind", "value"),
    [
        (15, s.GPU_LOST, True),
        (16, s.RESET_REQUIRED, True),
        (14, s.INFOROM_CORRUPTED, True),
        (999, s.NVML_ERROR, 999),
        (10, s.NVML_ERROR, 10),
        (4, s.NVML_ERROR, 4),
        (77, s.NVML_ERROR, 77),
    ],
)
def test_every_code_of_a_call_is_told_apart(
    code: int, kind: str, value: object, library: str, node: nodes.Node
) -> None:
    node.set(1, "code:nvmlDeviceGetRemappedRows", code)
    parts = read_nvml(deadline_s=60, library=library)
    assert of(parts, kind, 1) == [value]
    assert of(parts, kind, 0) == []
    assert of(parts, s.REMAP_PENDING, 1) == []
    assert of(parts, s.TEMPERATURE, 1) == [31]


def test_a_driver_that_does_not_know_what_is_asked_is_not_at_fault(
    library: str, node: nodes.Node
) -> None:
    node.set(1, "code:nvmlDeviceGetTemperatureThreshold", 2)
    parts = read_nvml(deadline_s=60, library=library)
    assert of(parts, s.NVML_ERROR, 1) == []
    node.set(1, "code:nvmlDeviceGetHandleByIndex_v2", 2)
    assert of(read_nvml(deadline_s=60, library=library), s.NVML_UNUSABLE, 1) == [2]


def test_a_gpu_that_is_lost_whole_is_named_by_the_bus_that_is_left(
    library: str, node: nodes.Node
) -> None:
    node.set(1, "code:nvmlDeviceGetHandleByIndex_v2", 15)
    parts = read_nvml(deadline_s=60, library=library, pci_buses=["0000:1b:00", "0000:2b:00"])
    (lost,) = [signal for signal in parts.signals if signal.kind == s.GPU_LOST]
    assert lost.gpu == s.Gpu(1, "", "0000:2b:00") == parts.gpus[1]
    parts = read_nvml(deadline_s=60, library=library, pci_buses=["0000:1b:00"])
    assert parts.gpus[1].bus == ""


def test_a_gpu_lost_in_the_middle_says_it_once(library: str, node: nodes.Node) -> None:
    node.set(0, "code:*", 15)
    parts = read_nvml(deadline_s=60, library=library)
    assert of(parts, s.GPU_LOST, 0) == [True]
    assert {x.kind for x in parts.signals if x.gpu and x.gpu.index == 0} == {s.GPU_LOST}


@pytest.mark.parametrize("code", [9, 18, 12, 999, 4])
def test_a_driver_that_does_not_start_is_told_by_its_code(
    code: int, library: str, node: nodes.Node
) -> None:
    node.set("*", "code:nvmlInit_v2", code)
    parts = read_nvml(deadline_s=60, library=library)
    assert [(x.kind, x.value, x.where) for x in parts.signals] == [
        (s.NVML_UNUSABLE, code, "nvmlInit_v2")
    ]
    assert not parts.gpus


def test_a_missing_library_is_its_code_and_no_gpu() -> None:
    parts = read_nvml(deadline_s=60, library="libnvidia-ml-is-not-here.so.1")
    assert [(x.kind, x.value) for x in parts.signals] == [(s.NVML_UNUSABLE, 12)]


def test_a_symbol_that_an_old_library_lacks_is_not_supported(
    tmp_path: Path, node: nodes.Node
) -> None:
    old = str(nodes.build(tmp_path, "-DOLD_DRIVER"))
    assert Nvml(old).call("nvmlDeviceGetSramEccErrorStatus") == n.ERROR_FUNCTION_NOT_FOUND
    parts = read_nvml(deadline_s=60, library=old)
    assert not parts.failures and not of(parts, s.NVML_ERROR)
    assert of(parts, s.SRAM_THRESHOLD) == of(parts, s.TEMPERATURE_MARGIN) == []
    assert of(parts, s.CLOCKS_EVENT) == [1]
    assert of(parts, s.ECC_SRAM_VOLATILE_UNCORRECTED) == [0]


@pytest.mark.parametrize("way", ["hang", "stuck"])
def test_a_hanging_driver_costs_its_deadline_and_keeps_what_was_read(
    way: str, library: str, node: nodes.Node
) -> None:
    node.set(1, f"{way}:nvmlDeviceGetPowerUsage", 1)
    began = time.monotonic()
    parts = read_nvml(deadline_s=10, library=library)
    assert time.monotonic() - began < 60
    (hang,) = [signal for signal in parts.signals if signal.kind == s.DRIVER_HANG]
    assert "nvmlDeviceGetPowerUsage of GPU 1" in hang.text
    assert of(parts, s.POWER_W, 0) and of(parts, s.REMAP_PENDING, 1)
    assert "nvml" in [failure.source for failure in parts.failures]


def test_a_library_that_crashes_takes_only_the_child_with_it(
    library: str, node: nodes.Node
) -> None:
    node.set(0, "crash:nvmlDeviceGetMigMode", 1)
    parts = read_nvml(deadline_s=60, library=library)
    (failure,) = parts.failures
    assert "-11" in failure.text and "nvmlDeviceGetMigMode of GPU 0" in failure.text
    assert of(parts, s.REMAP_PENDING, 0) == [False]
    assert not of(parts, s.DRIVER_HANG)


def test_garbage_from_the_child_gives_no_signal() -> None:
    rng = random.Random(5)
    whole = b'\n{"signals": {"kind": "gpu_lost", "value": true, "gpu": null}}\n'
    pieces = [b'{"signals": ', b'{"gpus": 1}', b'{"calling": []}', b"[[[[", b"\xff\x00", b"null",
              b'{"signals": {"kind": "no_such", "value": 1, "gpu": null}}',
              b'{"signals": {"kind": "xid", "value": {}, "gpu": null}}']  # fmt: skip
    for _ in range(2000):
        data = b"\n".join(rng.choice(pieces) + rng.randbytes(rng.randrange(9)) for _ in range(6))
        assert parse_lines(data).signals == []
    assert len(parse_lines(data + whole).signals) == 1
    assert parse_lines(b"[" * 100_000).signals == []
