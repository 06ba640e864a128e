"""nvidia-smi, for a node where libnvidia-ml cannot be used: its forms read into signals.

Parsers take what was printed and give what it says for sure: a cell that is not available, a name
that is missing, a line that was cut off give nothing. No parser raises. The exit status decides
nothing: 9, 12, 15 and 255 have all been seen for a lost GPU (nvidia_gpu_exporter#354).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Optional

from ftslurm.health import nvml_types as n
from ftslurm.health import signals as s
from ftslurm.health.child import NOT_RUN, Ended, run_command
from ftslurm.health.look import Parts
from ftslurm.health.nvidia_smi_fields import CSV_FIELDS, field_signals, whole
from ftslurm.health.nvml_links import model_links
from ftslurm.health.settings import NVIDIA_SMI
from ftslurm.health.signals import Failure, Gpu, Signal, normal_bus

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

SOURCE = NVIDIA_SMI

_BUS = r"((?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"
_GPU_LINE = re.compile(rf"GPU {_BUS}\Z")
_NO_HANDLE = re.compile(
    rf"^Unable to determine the device handle for\s+GPU ?(?:\d*: )?{_BUS}: (.{{1,120}})",
    re.M,
)
_PAIR = re.compile(r"( *)(\S.*?) *:(?: (.*))?\Z")
_HEADING = re.compile(r"( *)(\S.*?) *\Z")
_NVLINK_GPU = re.compile(r"GPU (\d{1,3}): (.{1,120}?) \(UUID: ([\w-]{1,80})\)\Z")
_NVLINK_UP = re.compile(r"\s+Link (\d{1,2}): (?:(\d{1,4}(?:\.\d{1,4})?) GB/s|(<inactive>))\Z")
_NVLINK_ERROR = re.compile(r"\s+Link (\d{1,2}): (\S[^:]{2,40}): (\d{1,20}|\d{1,2}e-\d{1,3})\Z")
_ERROR_KINDS = {
    "replay errors": s.NVLINK_REPLAY,
    "recovery errors": s.NVLINK_RECOVERY,
    "crc errors": s.NVLINK_CRC,
    "malformed packet errors": s.NVLINK5_MALFORMED,
    "buffer overrun errors": s.NVLINK5_OVERRUN,
    "local link integrity errors": s.NVLINK5_INTEGRITY,
    "link recovery failed events": s.NVLINK5_RECOVERY_FAILED,
    "effective ber": s.NVLINK5_EFFECTIVE_BER,
    "symbol ber": s.NVLINK5_SYMBOL_BER,
}
_TOOL_ERRORS = (
    (re.compile(r"Driver/library version mismatch"), n.ERROR_LIB_RM_VERSION_MISMATCH),
    (re.compile(r"couldn't communicate with the NVIDIA driver"), n.ERROR_DRIVER_NOT_LOADED),
    (re.compile(r"Failed to initialize NVML: Driver Not Loaded"), n.ERROR_DRIVER_NOT_LOADED),
    (re.compile(r"couldn't find libnvidia-ml"), n.ERROR_LIBRARY_NOT_FOUND),
    (re.compile(r"Failed to initialize NVML: Unknown Error"), n.ERROR_UNKNOWN),
)


def read_nvidia_smi(
    *,
    deadline_s: float,
    command: str = "nvidia-smi",
    env: Optional[Mapping[str, str]] = None,
) -> Parts:
    """All that it says, by calls in children, within `deadline_s` together."""
    parts = Parts()
    until = time.monotonic() + deadline_s
    environment = {**(os.environ if env is None else env), "LC_ALL": "C"}

    def ask(*arguments: str) -> str:
        left_s = until - time.monotonic()
        if left_s <= 0:
            parts.failures.append(Failure(SOURCE, f"no time left for {' '.join(arguments)}"))
            return ""
        parts.last_call = " ".join((command, *arguments))
        ended = run_command((command, *arguments), deadline_s=left_s, env=environment)
        text = ended.stdout.decode(errors="replace")
        _tell_the_end(parts, ended, parts.last_call)
        said = _outside_of_log(text) + "\n" + ended.stderr.decode(errors="replace")
        _add_new(parts, tool_signals(said))
        if arguments[0] == "nvlink" and ended.code != 0 and not ended.is_late:
            # Half a list of links would look like links that are down.
            parts.failures.append(Failure(SOURCE, f"{parts.last_call} ended with {ended.code}"))
            return ""
        return "" if ended.is_late or ended.is_cut else text

    found = parse_xml(ask("-q", "-x"))
    if not (found.gpus or found.failures or parts.signals or parts.failures):
        found = parse_q(ask("-q"))
        found = found if found.gpus or found.failures else _ask_for_rows(ask)
    parts.gpus.extend(found.gpus)
    parts.failures.extend(found.failures)
    _add_new(parts, found.signals)
    if found.gpus:
        of_uuid = {gpu.uuid: gpu for gpu in found.gpus}
        _add_new(parts, parse_nvlink_state(ask("nvlink", "-s"), of_uuid))
        _add_new(parts, parse_nvlink_errors(ask("nvlink", "-e"), of_uuid))
    elif not parts.signals and not parts.failures:
        parts.failures.append(Failure(SOURCE, f"{command} printed nothing that can be read"))
    return parts


def _ask_for_rows(ask: Callable[..., str]) -> Parts:
    """By CSV. One name that the driver does not know costs all rows: it is left out, and again."""
    fields = list(CSV_FIELDS)
    while fields:
        text = ask(f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
        refused = re.search(r'^Field "([\w.]{1,80})" is not a valid field to query', text, re.M)
        if refused is None or refused.group(1) not in fields:
            return parse_csv(fields, text)
        fields.remove(refused.group(1))
    return Parts()


def _tell_the_end(parts: Parts, ended: Ended, call: str) -> None:
    if ended.is_abandoned:
        parts.abandoned = (ended.pid, ended.start_ticks)
    if ended.is_late:
        stuck = f"; it {s.UNKILLABLE}" if ended.is_abandoned else ""
        parts.signals.append(Signal(s.DRIVER_HANG, True, text=f"{call} did not come back{stuck}"))
        parts.failures.append(Failure(SOURCE, f"{call} did not come back"))
    elif ended.code == NOT_RUN:
        said = ended.stderr.decode(errors="replace").strip()[-200:]
        parts.failures.append(Failure(SOURCE, f"{call} cannot be run: {said}"))


def _add_new(parts: Parts, signals: Sequence[Signal]) -> None:
    known = {signal.place for signal in parts.signals}
    parts.signals.extend(signal for signal in signals if signal.place not in known)


def tool_signals(text: str) -> list[Signal]:
    """What nvidia-smi says instead of a row or of everything; both of its streams have it."""
    found = []
    for match in _NO_HANDLE.finditer(text):
        gpu = Gpu(None, "", normal_bus(match.group(1)))
        said = match.group(2).strip()
        if said.startswith("GPU is lost"):
            found.append(Signal(s.GPU_LOST, True, gpu=gpu, text=said))
        elif said.startswith("GPU requires reset"):
            found.append(Signal(s.RESET_REQUIRED, True, gpu=gpu, text=said))
        elif said.startswith("Unknown Error"):
            where = "nvmlDeviceGetHandleByIndex_v2"
            found.append(Signal(s.NVML_UNUSABLE, n.ERROR_UNKNOWN, gpu=gpu, where=where, text=said))
    for pattern, code in _TOOL_ERRORS:
        tool = pattern.search(text)
        if tool:
            found.append(Signal(s.NVML_UNUSABLE, code, where="nvmlInit_v2", text=tool.group(0)))
    if re.search(r"^No devices were found\s*$", text, re.M):
        found.append(Signal(s.GPU_COUNT_NVML, 0))
    return found


def parse_xml(text: str) -> Parts:
    """`-q -x`, by the DTD versions 11 to 13."""
    start = text.find("<?xml")
    end = text.rfind("</nvidia_smi_log>")
    if start < 0 or end < 0:
        return Parts()
    import xml.etree.ElementTree as ET  # a tenth of a cold start, and rarely needed

    try:
        log = ET.fromstring(text[start:end] + "</nvidia_smi_log>")
    except (ET.ParseError, ValueError):
        return Parts()
    rows = [(gpu.get("id", ""), dict(_leaves(gpu, ""))) for gpu in log.findall("gpu")]
    return _parts(rows, log.findtext("attached_gpus", ""))


def _leaves(element: ET.Element, path: str) -> Iterator[tuple[str, str]]:
    for child in element:
        if child.tag in ("processes", "accounted_processes"):  # users choose what these say
            continue
        name = f"{path}{child.tag}"
        if len(child):
            yield from _leaves(child, f"{name}/")
        else:
            yield name, child.text or ""


def parse_q(text: str) -> Parts:
    """`-q`: names and values by indentation."""
    rows: list[tuple[str, dict[str, str]]] = []
    attached = ""
    headings: list[tuple[int, str]] = []
    for line in _whole_lines(text):
        start = _GPU_LINE.match(line)
        pair = _PAIR.match(line)
        shape = pair or _HEADING.match(line)
        if start:
            rows.append((start.group(1), {}))
            headings = []
        elif pair and pair.group(2) == "Attached GPUs" and not rows:
            attached = pair.group(3) or ""
        elif rows and shape and "processes" not in rows[-1][1]:
            indent, name = len(shape.group(1)), _name(shape.group(2))
            headings = [(depth, above) for depth, above in headings if depth < indent]
            if pair:
                path = "/".join([above for _, above in headings] + [name])
                rows[-1][1].setdefault(path, pair.group(3) or "")
            if indent == 4 and name == "processes":
                # Users choose what follows: nothing of it may look like a fault.
                rows[-1][1]["processes"] = ""
            # `HW Slowdown : Not Active` has both a value and others below it.
            headings.append((indent, name))
    return _parts(rows, attached)


def parse_csv(fields: Sequence[str], text: str) -> Parts:
    """`--query-gpu=FIELDS --format=csv,noheader`: by the order asked for, since nvidia-smi renames
    the names in its header. A row of another length is no row."""
    rows = []
    for line in _whole_lines(text):
        values = line.split(", ")
        if len(values) == len(fields):
            row = {name.lower(): value for name, value in zip(fields, values)}
            if normal_bus(row.get("pci.bus_id", "")):
                rows.append((row["pci.bus_id"], row))
    return _parts(rows, "")


def parse_nvlink_state(text: str, of_uuid: Mapping[str, Gpu]) -> list[Signal]:
    """`nvlink -s`: links up of each GPU that has any; a GPU without NVLink prints no link."""
    found = []
    for gpu, name, lines in _by_gpu(text, of_uuid):
        links = [match for match in map(_NVLINK_UP.match, lines) if match]
        all_down = any(re.search(r"all links are inactive", line, re.I) for line in lines)
        if links or all_down:
            found.append(Signal(s.NVLINK_LINKS_UP, sum(m.group(3) is None for m in links), gpu=gpu))
            model = model_links(name)
            if model is not None:
                found.append(Signal(s.NVLINK_LINKS_MODEL, model, gpu=gpu))
    return found


def parse_nvlink_errors(text: str, of_uuid: Mapping[str, Gpu]) -> list[Signal]:
    """`nvlink -e`, of NVLink up to 4 and of NVLink 5. Bucket 0 of FEC Errors is no error."""
    found = []
    for gpu, _, lines in _by_gpu(text, of_uuid):
        for match in filter(None, map(_NVLINK_ERROR.match, lines)):
            kind = _ERROR_KINDS.get(match.group(2).strip().lower())
            if kind is not None:
                link, written = int(match.group(1)), match.group(3)
                is_rate = kind in (s.NVLINK5_EFFECTIVE_BER, s.NVLINK5_SYMBOL_BER)
                if is_rate or "e" not in written:
                    value = _rate(written) if is_rate else int(written)
                    found.append(Signal(kind, value, gpu=gpu, link=link))
    return found


def _rate(written: str) -> float:
    return 0.0 if written.endswith("e-255") else float(written)


def _by_gpu(text: str, of_uuid: Mapping[str, Gpu]) -> Iterator[tuple[Gpu, str, list[str]]]:
    current: Optional[tuple[Gpu, str, list[str]]] = None
    for line in _whole_lines(text):
        start = _NVLINK_GPU.match(line)
        if start:
            if current:
                yield current
            gpu = of_uuid.get(start.group(3)) or Gpu(int(start.group(1)), start.group(3), "")
            current = (gpu, start.group(2), [])
        elif current:
            current[2].append(line.replace("\t", " "))
    if current:
        yield current


def _parts(rows: Sequence[tuple[str, dict[str, str]]], attached: str) -> Parts:
    """A GPU's index is its row, where no row is missing."""
    parts = Parts()
    rows = [(normal_bus(bus), row) for bus, row in rows if normal_bus(bus)]
    count = whole(attached.strip())
    if count is not None and count < len(rows):
        text = f"{len(rows)} GPUs are shown and {count} attached"
        return Parts(failures=[Failure(SOURCE, text)])
    if count is not None:
        parts.signals.append(Signal(s.GPU_COUNT_NVML, count))
    for place, (bus, row) in enumerate(rows):
        told = whole(row.get("index", ""))
        index = told if told is not None else place if count == len(rows) else None
        uuid = row.get("gpu_uuid", row.get("uuid", "")).strip()
        gpu = Gpu(index, uuid if uuid.startswith("GPU-") else "", bus)
        parts.gpus.append(gpu)
        parts.signals.extend(field_signals(gpu, row))
    return parts


def _outside_of_log(text: str) -> str:
    """A log has names of processes in it, which users choose."""
    start = min((at for at in map(text.find, ("<?xml", "===NVSMI LOG===")) if at >= 0), default=-1)
    if start < 0:
        return text
    end = text.rfind("</nvidia_smi_log>")
    return text[:start] + "\n" + (text[end:] if end > start else "")


def _whole_lines(text: str) -> list[str]:
    """Without the last one, where it was cut off: a number may lack digits there."""
    return [line.rstrip("\r") for line in text.split("\n")[:-1]]


def _name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
