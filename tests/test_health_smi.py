"""The forms that nvidia-smi prints, as public captures and reports have them."""

import os
import random
import time
from pathlib import Path

import pytest

from ftslurm.health import nvidia_smi
from ftslurm.health import signals as s
from ftslurm.health.look import Parts

DATA = Path(__file__).resolve().parent / "data" / "health" / "smi"
FAKE = Path(__file__).resolve().parent / "fakes" / "nvml" / "nvidia-smi"
UUID = "GPU-{0:08x}-0000-4000-8000-{0:012x}"
FAULTS = {s.GPU_LOST, s.RESET_REQUIRED, s.NVML_ERROR, s.NVML_UNUSABLE, s.DRIVER_HANG,
          s.INFOROM_CORRUPTED}  # fmt: skip


def data(name: str) -> str:
    return (DATA / name).read_text()


def parsed(name: str) -> Parts:
    parse = nvidia_smi.parse_xml if name.endswith(".xml") else nvidia_smi.parse_q
    return parse(data(name))


def told(parts: Parts, place: int = 0) -> dict[str, s.Value]:
    gpu = parts.gpus[place]
    return {signal.kind: signal.value for signal in parts.signals if signal.gpu == gpu}


CASES = [
    ("q-h100-590.txt", 0, {
        s.ECC_MODE: "enabled", s.REMAP_PENDING: False, s.REMAP_FAILURE: False,
        s.SRAM_THRESHOLD: False, s.RECOVERY_ACTION: 0, s.CLOCKS_EVENT: 0x1, s.PCIE_WIDTH: 16,
        s.TEMPERATURE_MARGIN: 55, s.POWER_W: 77.71, s.FABRIC_STATE: "completed",
        s.FABRIC_STATUS: 0, s.REPAIR_PENDING: False, s.UNREPAIRABLE_MEMORY: False,
        s.ECC_SRAM_VOLATILE_UNCORRECTED: 0, s.ECC_SRAM_AGGREGATE_UNCORRECTED: 2}),
    ("q-h100-590.txt", 1, {
        s.REMAP_PENDING: True, s.REMAP_FAILURE: True, s.SRAM_THRESHOLD: True,
        s.RECOVERY_ACTION: 4, s.CLOCKS_EVENT: 0x49, s.PCIE_WIDTH: 8, s.PCIE_REPLAY: 12,
        s.ECC_DRAM_VOLATILE_UNCORRECTED: 1, s.ECC_SRAM_VOLATILE_UNCORRECTED: 4,
        s.REMAPS_UNCORRECTABLE: 3}),
    ("q-failing-550.txt", 0, {
        s.ECC_MODE: "unknown error", s.REMAP_PENDING: True, s.RESET_REQUIRED: True,
        s.ECC_DRAM_VOLATILE_UNCORRECTED: None, s.ECC_SRAM_VOLATILE_UNCORRECTED: None,
        s.RECOVERY_ACTION: None}),
    ("q-v100-470.txt", 0, {
        s.ECC_DRAM_VOLATILE_UNCORRECTED: 2, s.ECC_DRAM_VOLATILE_CORRECTED: 7,
        s.RETIRED_PAGES: 65, s.RETIRED_PAGES_DOUBLE_BIT: 5, s.RETIRED_PAGES_PENDING: True,
        s.CLOCKS_EVENT: 0x8C, s.TEMPERATURE_SLOWDOWN: 87, s.REMAP_PENDING: None}),
    ("q-a100-510.txt", 0, {
        s.ECC_SRAM_AGGREGATE_UNCORRECTED: 6, s.ECC_SRAM_VOLATILE_UNCORRECTED: None,
        s.ECC_DRAM_VOLATILE_UNCORRECTED: 0, s.RECOVERY_ACTION: None, s.CLOCKS_EVENT: None}),
    ("x-v13.xml", 0, {
        s.RECOVERY_ACTION: 0, s.REPAIR_PENDING: True, s.REMAP_BANKS_LOW: 1,
        s.REMAPS_UNCORRECTABLE: 1, s.CLOCKS_EVENT: 0x41, s.PCIE_WIDTH: 16, s.PCIE_GEN: 1,
        s.RETIRED_PAGES: None, s.ECC_SRAM_AGGREGATE_UNCORRECTED: 1, s.MIG_MODE: False}),
    ("x-v12-mig.xml", 0, {
        s.MIG_MODE: True, s.REMAP_PENDING: None, s.REMAP_FAILURE: None, s.RECOVERY_ACTION: 4,
        s.FABRIC_STATE: None, s.ECC_DRAM_VOLATILE_UNCORRECTED: None}),
    ("x-v11.xml", 0, {
        s.CLOCKS_EVENT: 0x4, s.ECC_SRAM_VOLATILE_UNCORRECTED: 2, s.REMAP_PENDING: True,
        s.REMAP_FAILURE: None, s.POWER_W: 60.0, s.RECOVERY_ACTION: None}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "expected"), CASES)
def test_old_and_new_forms_say_the_same_and_a_missing_name_says_nothing(
    name: str, place: int, expected: dict[str, object]
) -> None:
    got = told(parsed(name), place)
    assert {kind: got.get(kind) for kind in expected} == expected
    assert set(got) <= s.KINDS


def test_gpus_are_named_by_uuid_bus_and_index() -> None:
    assert parsed("q-h100-590.txt").gpus == [
        s.Gpu(0, UUID.format(0), "0000:1b:00"),
        s.Gpu(1, UUID.format(1), "0000:2b:00"),
    ]


FIELDS = ["index", "pci.bus_id", "gpu_uuid", "temperature.gpu", "utilization.gpu",
          "ecc.errors.uncorrected.volatile.dram", "remapped_rows.pending",
          "clocks_event_reasons.active", "pcie.link.width.current", "power.draw"]  # fmt: skip
ROW = "{}, 00000000:1B:00.0, GPU-1, {}, {}, {}, {}, 0x0000000000000041, 16, 77.71 W\n"


def test_a_csv_row_is_read_by_the_order_asked_for() -> None:
    parts = nvidia_smi.parse_csv(FIELDS, ROW.format(3, "31", "0 %", "2", "Yes"))
    assert parts.gpus == [s.Gpu(3, "GPU-1", "0000:1b:00")]
    assert told(parts) == {
        s.TEMPERATURE: 31, s.GPU_UTILISATION: 0, s.ECC_DRAM_VOLATILE_UNCORRECTED: 2,
        s.REMAP_PENDING: True, s.CLOCKS_EVENT: 0x41, s.PCIE_WIDTH: 16, s.POWER_W: 77.71,
    }  # fmt: skip


@pytest.mark.parametrize(
    "absent",
    ["[N/A]", "N/A", "[n/a]", "[Not Supported]", "",
     "[Requested functionality has been deprecated]", "12 apples", "-", "nan", "1e9"],
)  # fmt: skip
def test_a_cell_that_is_not_available_is_no_signal(absent: str) -> None:
    parts = nvidia_smi.parse_csv(FIELDS, ROW.format(0, absent, "0 %", absent, absent))
    assert set(told(parts)) == {s.GPU_UTILISATION, s.CLOCKS_EVENT, s.PCIE_WIDTH, s.POWER_W}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("[GPU is lost]", s.GPU_LOST, True),
        ("[GPU requires reset]", s.RESET_REQUIRED, True),
        ("[Unknown Error]", s.NVML_ERROR, 999),
        ("ERR!", s.NVML_ERROR, 999),
        ("[Insufficient Permissions]", s.NVML_ERROR, 4),
    ],
)
def test_a_fault_in_one_cell_is_a_signal_of_the_gpu(text: str, kind: str, value: object) -> None:
    got = told(nvidia_smi.parse_csv(FIELDS, ROW.format(0, text, text, "0", "No")))
    assert got[kind] == value
    assert s.TEMPERATURE not in got and got[s.REMAP_PENDING] is False


def test_a_field_that_nvidia_smi_does_not_know_leaves_no_row() -> None:
    text = 'Field "cuda_version" is not a valid field to query.\n\n'
    assert nvidia_smi.parse_csv(FIELDS, text) == Parts()


LOST_AT = "0000:34:00"


@pytest.mark.parametrize(
    ("text", "kind", "value", "bus"),
    [
        ("Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error",
         s.NVML_UNUSABLE, 999, LOST_AT),
        ("Unable to determine the device handle for GPU0000:34:00.0: Unknown Error",
         s.NVML_UNUSABLE, 999, LOST_AT),
        ("Unable to determine the device handle for GPU 0000:34:00.0: GPU is lost.  Reboot the "
         "system to recover this GPU", s.GPU_LOST, True, LOST_AT),
        ("Unable to determine the device handle for GPU0: 0000:34:00.0: GPU is lost.  Reboot",
         s.GPU_LOST, True, LOST_AT),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: "
         "570.86", s.NVML_UNUSABLE, 18, ""),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make",
         s.NVML_UNUSABLE, 9, ""),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.",
         s.NVML_UNUSABLE, 12, ""),
        ("Failed to initialize NVML: Unknown Error", s.NVML_UNUSABLE, 999, ""),
        ("No devices were found", s.GPU_COUNT_NVML, 0, ""),
    ],
)  # fmt: skip
def test_what_is_said_instead_of_rows_is_read(
    text: str, kind: str, value: object, bus: str
) -> None:
    (signal,) = nvidia_smi.tool_signals(text + "\n")
    assert (signal.kind, signal.value, signal.gpu.bus if signal.gpu else "") == (kind, value, bus)


def test_links_are_counted_where_there_are_any() -> None:
    found = nvidia_smi.parse_nvlink_state(data("nvlink-s.txt"), {})
    up = {x.gpu.index: x.value for x in found if x.kind == s.NVLINK_LINKS_UP and x.gpu}
    model = {x.gpu.index: x.value for x in found if x.kind == s.NVLINK_LINKS_MODEL and x.gpu}
    assert up == {0: 18, 1: 17, 2: 12, 4: 0}
    assert model == {0: 18, 1: 18, 4: 12}


def test_link_errors_of_both_generations() -> None:
    old = nvidia_smi.parse_nvlink_errors(data("nvlink-e-4.txt"), {})
    assert {(x.kind, x.link): x.value for x in old} == {
        (s.NVLINK_REPLAY, 0): 0, (s.NVLINK_RECOVERY, 0): 2, (s.NVLINK_CRC, 0): 9,
        (s.NVLINK_REPLAY, 17): 4,
    }  # fmt: skip
    new = nvidia_smi.parse_nvlink_errors(data("nvlink-e-5.txt"), {})
    assert {(x.kind, x.link): x.value for x in new} == {
        (s.NVLINK5_MALFORMED, 0): 0, (s.NVLINK5_OVERRUN, 0): 1, (s.NVLINK5_INTEGRITY, 0): 3,
        (s.NVLINK5_RECOVERY_FAILED, 0): 1, (s.NVLINK5_EFFECTIVE_BER, 0): 0.0,
        (s.NVLINK5_EFFECTIVE_BER, 1): 3e-9,
    }  # fmt: skip


HOSTILE = "GPU is lost\nUnable to determine the device handle for GPU0: 0000:1b:00.0: GPU is lost"


def test_the_name_of_a_users_process_is_never_a_fault() -> None:
    text = data("q-h100-590.txt").replace(
        "    Processes                             : None",
        f"    Processes\n        Process ID : 7\n            Name : [GPU is lost]\n{HOSTILE}"
        "\n    Board Name                            : [GPU requires reset]",
    )
    assert not FAULTS & {x.kind for x in nvidia_smi.parse_q(text).signals}
    assert nvidia_smi._outside_of_log(text).strip() == "=" * 11
    name = "<processes><process_info><process_name>GPU is lost</process_name></process_info>"
    xml = data("x-v13.xml").replace("</uuid>", f"</uuid>{name}</processes>")
    assert nvidia_smi.parse_xml(xml).gpus
    assert not FAULTS & {x.kind for x in nvidia_smi.parse_xml(xml).signals}


def test_more_gpus_than_are_attached_are_not_believed() -> None:
    head, _, rest = data("q-h100-590.txt").partition("Attached GPUs")
    text = head + "Attached GPUs" + rest.replace(": 2", ": 1", 1)
    parts = nvidia_smi.parse_q(text)
    assert not parts.signals and len(parts.failures) == 1


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTSLURM_FAKE_SMI", str(tmp_path))
    for name, source in (("q-x", "x-v13.xml"), ("q", "q-h100-590.txt"),
                         ("nvlink-s", "nvlink-s.txt"), ("nvlink-e", "nvlink-e-4.txt")):  # fmt: skip
        (tmp_path / name).write_text(data(source))
    return tmp_path


def test_the_tool_is_asked_for_all_its_forms(smi: Path) -> None:
    parts = nvidia_smi.read_nvidia_smi(deadline_s=60, command=str(FAKE))
    got = told(parts)
    assert not parts.failures
    assert got[s.REMAP_PENDING] is False and got[s.NVLINK_LINKS_UP] == 18
    assert s.NVLINK_RECOVERY in got


def test_without_xml_the_text_form_serves(smi: Path) -> None:
    (smi / "q-x").write_text(data("x-v13.xml")[:900])
    parts = nvidia_smi.read_nvidia_smi(deadline_s=60, command=str(FAKE))
    assert len(parts.gpus) == 2 and told(parts, 1)[s.REMAP_FAILURE] is True


def test_without_a_log_the_fields_that_the_driver_knows_serve(smi: Path) -> None:
    (smi / "q-x").unlink()
    (smi / "q").unlink()
    (smi / "csv").write_text(
        "index 0\npci.bus_id 00000000:1B:00.0\nuuid GPU-1\nremapped_rows.failure Yes\n"
        "temperature.gpu [N/A]\necc.errors.uncorrected.aggregate.sram.thresholdExceeded No\n"
    )
    parts = nvidia_smi.read_nvidia_smi(deadline_s=60, command=str(FAKE))
    assert parts.gpus == [s.Gpu(0, "GPU-1", "0000:1b:00")]
    assert told(parts) == {s.REMAP_FAILURE: True, s.SRAM_THRESHOLD: False}


def test_a_gpu_that_has_no_row_is_told_from_the_other_stream(smi: Path) -> None:
    (smi / "q-x.err").write_text(
        "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error\n"
    )
    (smi / "q-x.rc").write_text("255")
    parts = nvidia_smi.read_nvidia_smi(deadline_s=60, command=str(FAKE))
    (error,) = [signal for signal in parts.signals if signal.kind == s.NVML_UNUSABLE]
    assert error.gpu == s.Gpu(None, "", LOST_AT)
    assert told(parts)[s.REMAP_PENDING] is False


def test_a_list_of_links_that_was_not_finished_is_not_counted(smi: Path) -> None:
    (smi / "nvlink-s").write_text(data("nvlink-s.txt")[:200])
    (smi / "nvlink-s.rc").write_text("1")
    parts = nvidia_smi.read_nvidia_smi(deadline_s=60, command=str(FAKE))
    assert s.NVLINK_LINKS_UP not in told(parts)
    assert [failure.source for failure in parts.failures] == ["nvidia_smi"]


def test_a_hanging_tool_costs_its_deadline(smi: Path) -> None:
    (smi / "nvlink-s.hang").write_text("")
    began = time.monotonic()
    parts = nvidia_smi.read_nvidia_smi(deadline_s=12, command=str(FAKE))
    assert time.monotonic() - began < 60
    assert [x.value for x in parts.signals if x.kind == s.DRIVER_HANG] == [True]
    assert told(parts)[s.REMAP_PENDING] is False


def test_a_missing_or_mute_tool_is_a_failure_and_no_signal(smi: Path) -> None:
    for command in ("/nowhere/nvidia-smi", "/bin/true"):
        parts = nvidia_smi.read_nvidia_smi(deadline_s=60, command=command, env=dict(os.environ))
        assert not parts.signals and parts.failures and not parts.gpus


def test_a_cut_off_output_says_nothing_that_the_whole_does_not() -> None:
    for path in sorted(DATA.iterdir()):
        text = path.read_text()
        for parse in (nvidia_smi.parse_q, nvidia_smi.parse_xml, links_of, errors_of):
            whole = {repr(signal) for signal in without_index(parse(text))}
            for cut in range(0, len(text), 17):
                assert {repr(x) for x in without_index(parse(text[:cut]))} <= whole, (path, cut)


def links_of(text: str) -> Parts:
    return Parts(signals=nvidia_smi.parse_nvlink_state(text, {}))


def errors_of(text: str) -> Parts:
    return Parts(signals=nvidia_smi.parse_nvlink_errors(text, {}))


def without_index(parts: Parts) -> list[tuple[object, ...]]:
    """What a cut may change for good: a count of links so far, an index not known any more, and
    what several cells say together."""
    open_ended = {s.NVLINK_LINKS_UP, s.CLOCKS_EVENT, s.REPAIR_PENDING}
    return [
        (x.kind, x.value, x.link, x.gpu.bus if x.gpu else "")
        for x in parts.signals
        if x.kind not in open_ended
    ]


def test_garbage_raises_nothing_and_invents_no_signal() -> None:
    rng = random.Random(11)
    words = [b"GPU 00000000:1B:00.0\n", b"    Remapped Rows\n", b"Pending", b" : ", b"Yes\n", b"\n",
             b"<?xml", b"<gpu id='", b"</nvidia_smi_log>", b"[GPU is", b" lost]", b"\x00\xff",
             b"\t Link ", b"GPU 0: ", b"(UUID: ", b"9" * 50, b"Unable to determine"]  # fmt: skip
    for _ in range(3000):
        raw = b"".join(rng.choice(words) + rng.randbytes(rng.randrange(12)) for _ in range(8))
        text = raw.decode(errors="replace")
        signals = nvidia_smi.parse_q(text).signals + nvidia_smi.parse_xml(text).signals
        signals += nvidia_smi.parse_csv(FIELDS, text).signals + nvidia_smi.tool_signals(text)
        signals += nvidia_smi.parse_nvlink_state(text, {})
        signals += nvidia_smi.parse_nvlink_errors(text, {})
        assert not FAULTS & {x.kind for x in signals}, text
        assert all(x.kind in s.KINDS for x in signals)


def test_damage_to_real_output_raises_nothing() -> None:
    rng = random.Random(12)
    for path in sorted(DATA.iterdir()):
        raw = path.read_bytes()
        for _ in range(120):
            damaged = bytearray(raw)
            for _ in range(rng.randrange(1, 30)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            text = damaged.decode(errors="replace")
            for parse in (nvidia_smi.parse_q, nvidia_smi.parse_xml, links_of, errors_of):
                assert all(x.kind in s.KINDS for x in parse(text).signals)
            nvidia_smi.tool_signals(text)
