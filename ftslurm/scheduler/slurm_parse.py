"""Text of Slurm commands -> values. Pure, so that recorded outputs of any version can test it.

A value that a version leaves out becomes None or a default; a text that is not the command's
output at all raises SchedulerError.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Optional

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.protocol import (
    STATE_WORDS,
    UNKNOWN,
    JobState,
    NodeNeed,
    QueuedJob,
    Site,
    Terms,
)

Version = tuple[int, int, int]

_DEFAULT_ARRAY_SIZE = 1001

_VERSION = re.compile(r"\b(\d{2})\.(\d{2})(?:\.(\d+))?")
_PAIR = re.compile(r"(?:^|\s)([A-Za-z]\w*)=(\S*)")
_SECONDS = re.compile(r"(\d+)\s*(?:sec)?")
_SOCKETS = re.compile(r"\([^()]*\)")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_LIMIT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")

JOB_FORMAT = "%T|%r|%e"
"""squeue -o: state, reason, end time; no field a user can put text into."""

JOBS_FORMAT = f"%i|{JOB_FORMAT}"
"""squeue -o: the same behind the job's id, a task of an array as `70_1`."""

QUEUED_FORMAT = "%i|%E|%o"
"""squeue -o: job id, what it waits for, path of its script; only the last may hold a `|`."""

TERMS_FORMAT = "Requeue:4,EndTime:24"
"""squeue -O, which alone has Requeue: the fields padded to these widths."""

NODE_FORMAT = "%N|%T|%f|%G|%m"
"""sinfo -N -o: name, state, features, gres, memory in MB."""

# sinfo's long words (node_state_string) for nodes that no job comes to; a `*` behind any word says
# that the node does not answer, a `$` that it is in maintenance.
_OUT_OF_SERVICE = frozenset({"down", "drained", "draining", "drain", "fail", "failing", "error",
                             "unknown", "future", "inval", "maint"})  # fmt: skip


def parse_version(text: str) -> Version:
    """(major, minor, micro) of e.g. `slurm 23.11.8`, `slurm-wlm 22.05.8`, `22.05.7-Atos.1.1`."""
    match = _VERSION.search(text)
    if match is None:
        raise SchedulerError(f"`{text.strip()[:60]}` holds no Slurm version such as 23.11.8")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def parse_job(text: str) -> JobState:
    """State on the first line of `squeue -h -o JOB_FORMAT`; UNKNOWN when there is none."""
    line = text.strip().partition("\n")[0]
    if not line:
        return JobState(UNKNOWN, "squeue lists no such job")
    word, _, rest = line.partition("|")
    reason = rest.partition("|")[0]
    if word not in STATE_WORDS:
        return JobState(UNKNOWN, f"squeue says `{word}`, a word not known here")
    return JobState(word, "" if reason == "None" else reason)


def parse_jobs(text: str, job_ids: Sequence[str]) -> dict[str, JobState]:
    """Of each of `job_ids`, from `squeue -h -r -o JOBS_FORMAT`. Tasks that wait are told one by one
    there; were they told together (`70_[3-9%2]`, which may be cut short), those of the array that
    no line of their own has would be meant: none of them may pass for one that is over."""
    states = {}
    for line in text.splitlines():
        job_id, _, rest = line.partition("|")
        states[job_id.partition("[")[0]] = parse_job(rest)
    nobody = parse_job("")
    return {
        job_id: states.get(job_id) or states.get(f"{job_id.partition('_')[0]}_", nobody)
        for job_id in job_ids
    }


def parse_queued(text: str, script: str) -> list[QueuedJob]:
    """Those jobs of `squeue -h -o QUEUED_FORMAT` that were given `script`."""
    rows = [line.split("|", 2) for line in text.splitlines()]
    return [
        QueuedJob(row[0], "" if row[1] == "(null)" else row[1])
        for row in rows
        if len(row) == 3 and row[2] == script
    ]


def parse_serving(text: str, need: NodeNeed) -> list[str]:
    """Names of the nodes of `sinfo -h -N -o NODE_FORMAT` that jobs come to, those only that have
    what is needed. Of features, what is more than words with `&` between them cannot be told from
    here: then all nodes count."""
    wanted = set(need.features.split("&")) if re.fullmatch(r"[\w.&-]+", need.features) else set()
    memory_mb = _memory_mb(need.memory)
    found: dict[str, None] = {}
    for line in text.splitlines():
        name, state, features, gres, has_mb = [*line.strip().split("|"), "", "", "", ""][:5]
        word = state.rstrip("*~#!%$@^-+")
        is_away = word in _OUT_OF_SERVICE or "*" in state or "$" in state
        gpus = sum(gpus_by_type(gres).values())
        has_all = wanted <= set(features.split(",")) and gpus >= need.gpus
        if name and not is_away and has_all and _memory_mb(has_mb) >= memory_mb:
            found[name] = None  # a node of two partitions is listed twice
    return list(found)


def gpus_by_type(gres: str) -> dict[str, int]:
    """Of `gpu:h100:8(S:0-1),nic:2`, type -> count; an empty type for `gpu:8`."""
    found: dict[str, int] = {}
    for item in _SOCKETS.sub("", gres).split(","):
        name, *rest = item.strip().split(":")
        if name == "gpu":
            # The last number counts: a type may begin with one (`gpu:1g.10gb:7`, MIG).
            count = int(rest[-1]) if rest and rest[-1].isdigit() else 1
            kind = rest[0] if rest and not rest[0].isdigit() else ""
            found[kind] = found.get(kind, 0) + count
    return found


def _memory_mb(text: str) -> int:
    """Of sbatch's `64G`, MB without a letter; 0 for what says nothing of how much."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        return 0
    return int(int(match[1]) * 1024.0 ** "KMGT".index((match[2] or "M").upper()) / 1024)


def at(stamp: str) -> Optional[float]:
    """UTC seconds, for which Slurm's commands are asked (`clean_environment`); of local time, too.
    None for `Unknown`, `N/A` and the like."""
    if stamp.isascii() and stamp.isdigit():
        return float(stamp)
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def parse_end_time(text: str) -> Optional[float]:
    """UTC seconds of the first line's end time; None when there is none (N/A, unlimited)."""
    return at(text.strip().partition("\n")[0].rpartition("|")[2])


def parse_terms(text: str) -> Terms:
    """Of `squeue -h -O TERMS_FORMAT`; nothing in them where it has printed nothing."""
    word, _, stamp = text.strip().partition(" ")
    return Terms({"0": False, "1": True}.get(word), parse_end_time(stamp.strip()))


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: key -> value, `(null)` as an empty text."""
    values = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            value = value.strip()
            values[key.strip()] = "" if value == "(null)" else value
    if "SLURM_VERSION" not in values:
        raise SchedulerError("`scontrol show config` printed no SLURM_VERSION; is this Slurm?")
    return values


def parse_partitions(text: str) -> list[dict[str, str]]:
    """`scontrol show partition -o`: one dict per partition."""
    rows = [dict(_PAIR.findall(line)) for line in text.splitlines()]
    return [row for row in rows if "PartitionName" in row]


def parse_site(config_text: str, partition_text: str) -> Site:
    """The settings that decide how a run is stopped and queued again."""
    config = parse_config(config_text)
    version = parse_version(config["SLURM_VERSION"])
    partitions = parse_partitions(partition_text)
    default = [row["PartitionName"] for row in partitions if row.get("Default") == "YES"]
    return Site(
        scheduler="slurm",
        version=config["SLURM_VERSION"],
        kill_wait_s=_seconds(config.get("KillWait", ""), default=30),
        job_requeue=config.get("JobRequeue", "1") == "1",
        send_user_signal=sends_user_signal(config, version),
        default_partition=default[0] if default else None,
        grace_s={row["PartitionName"]: _seconds(row.get("GraceTime", "")) for row in partitions},
        preempt_mode={row["PartitionName"]: row.get("PreemptMode", "OFF") for row in partitions},
        preempt_by_qos=config.get("PreemptType") == "preempt/qos",
        max_time_s={row["PartitionName"]: _limit_s(row.get("MaxTime", "")) for row in partitions},
        expedited_requeue=_expedites(config, version),
        requeue_exit=exit_codes(config.get("RequeueExit", "")),
        requeue_exit_hold=exit_codes(config.get("RequeueExitHold", "")),
        cluster=config.get("ClusterName", ""),
        array_size=parse_array_size(config),
        findings=_findings(config, version),
    )


def parse_array_size(config: Mapping[str, str]) -> int:
    """MaxArraySize; 0: no arrays."""
    return int(config.get("MaxArraySize") or _DEFAULT_ARRAY_SIZE)


def user_signal_setting(version: Version) -> tuple[str, str]:
    """The key and the word by which preemption sends a job's own signal in this version."""
    if version >= (23, 2, 0):
        return "PreemptParameters", "send_user_signal"
    return "SlurmctldParameters", "preempt_send_user_signal"


def ignored_user_signals(config: Mapping[str, str], version: Version) -> list[tuple[str, str]]:
    """(key, word) of settings that ask for it where or as this version does not read it."""
    words = {"send_user_signal", "preempt_send_user_signal"}
    return [
        (place, found)
        for place in ("PreemptParameters", "SlurmctldParameters", "SchedulerParameters")
        for found in sorted(_words(config.get(place, "")) & words)
        if (place, found) != user_signal_setting(version)
    ]


def sends_user_signal(config: Mapping[str, str], version: Version) -> bool:
    key, word = user_signal_setting(version)
    return word in _words(config.get(key, ""))


def _expedites(config: Mapping[str, str], version: Version) -> bool:
    """25.11.0 to 25.11.2 queue a job again that has ended well; before, the option is refused."""
    words = _words(config.get("SlurmctldParameters", ""))
    return version >= (25, 11, 3) and "enable_expedited_requeue" in words


def _findings(config: Mapping[str, str], version: Version) -> list[str]:
    key, word = user_signal_setting(version)
    findings = [
        f"{place}={found} is accepted and ignored by Slurm {config['SLURM_VERSION']}; it reads "
        f"{key}={word}"
        for place, found in ignored_user_signals(config, version)
    ]
    if config.get("JobRequeue") == "0":
        findings.append("JobRequeue=0: only jobs submitted with --requeue can be queued again")
    if 1 in exit_codes(config.get("RequeueExit", "")):
        findings.append("RequeueExit holds 1: Slurm queues a run again that stopped for a person")
    return sorted(findings)


def _words(setting: str) -> set[str]:
    return {word.strip() for word in setting.split(",")}


def _seconds(text: str, *, default: int = 0) -> int:
    match = _SECONDS.match(text)
    return int(match[1]) if match else default


def _limit_s(text: str) -> Optional[int]:
    """Seconds of a printed time limit; None for UNLIMITED or none."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def exit_codes(text: str) -> list[int]:
    """Exit codes of e.g. `1-3,75`."""
    codes: list[int] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = item.partition("-")
        if first.isdigit() and (last or first).isdigit():
            codes.extend(range(int(first), min(int(last or first), 255) + 1))
    return codes
