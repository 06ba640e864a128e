"""What a site says of health: one set of keys for conf/health, for a run and for a node's own copy.

conf/health is composed into these keys for every run, and `ftslurm health settings` writes them to
the one file that a root-owned copy reads (settings_file.py). Keys of the node are without effect on
a run, and those of a run on the node. Values only: nothing here reads or writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftslurm.errors import SpecError

if TYPE_CHECKING:
    from ftslurm.health.verdict import Thresholds

DRAIN_MODE, SHADOW_MODE = "drain", "shadow"
NVIDIA_SMI = "nvidia_smi"
SOURCES = ("kernel_log", "nvml", NVIDIA_SMI, "rdma", "sysfs")
"""What may be left out as a whole."""


@dataclass
class HealthSettings:
    """Read only; not frozen because OmegaConf cannot merge into a frozen dataclass (2.3.1)."""

    # Judging: the node's copy and a run's own look.
    mode: str = DRAIN_MODE
    """drain | shadow: shadow looks, judges and reports, and leaves every node as it is."""
    skip: list[str] = field(default_factory=list)
    """Rules, or whole sources, that are not looked at."""
    shadow: list[str] = field(default_factory=list)
    """Rules that report only."""
    limits: dict[str, float] = field(default_factory=dict)
    """Another bound for a row of the decision table, by its rule."""
    unknown_probes: int = 3
    """Looks in a row in which NVML could not be read, on a node with GPUs, that drain it."""
    trends_drain: bool = False
    """Two kinds of trend on one GPU drain its node after the job."""
    cooling_rise_c: float = 10.0
    """Hotter by so much at the same load is reported as cooling."""
    sympathetic_s: float = 10.0
    """An NVLink error this near to the loss of a peer GPU is its echo."""
    gpus_per_node: int = 0
    """Physical GPUs of a node that has any, slices not counted; 0: not compared."""

    # Where is looked.
    kernel_log: str = "/dev/kmsg"
    """That device, or a file of the kernel's facility alone, which no user can write into."""
    nvml_library: str = "libnvidia-ml.so.1"
    nvidia_smi: str = "nvidia-smi"
    """Stands in where NVML cannot be loaded."""
    sysfs_root: str = "/"
    """Folder that holds sys/."""
    verdict_dir: str = ""
    """Shared folder of root's, readable by all, that a run reads its nodes' verdicts in."""

    # The node's own copy.
    state_dir: str = "/var/lib/ftslurm"
    prolog_s: float = 5.0
    """Most a probe may take in the prolog."""
    epilog_s: float = 30.0
    periodic_s: float = 45.0
    slurm_call_s: float = 3.0
    """Most that one of at most three calls of Slurm may take."""
    breaker_nodes: int = 2
    """Nodes that may be drained by us within the window, whatever the share."""
    breaker_share: float = 0.05
    """Share of the GPU nodes that may be."""
    breaker_window_s: float = 600.0
    breaker_same: int = 3
    """So many nodes with one signature and no hardware Xid: the fault is not theirs."""
    resume: bool = True
    """Our own drain is lifted when its cause is gone; never that of anyone else."""
    resume_passes: int = 3
    """Healthy looks in a row that it takes, and the least time between two that count."""
    resume_gap_s: float = 60.0
    resumes_per_week: int = 2

    # A run.
    probe: str = "on_failure"
    """on_failure | always | never: each node looks at itself when an attempt with GPUs has failed;
    always also without GPUs, and after an eviction. Never in grace, nor when all is well."""
    preflight: str = "on_suspicion"
    """on_suspicion | always | never: a test of nodes and links before the ranks start."""


_CHOICES = {
    "mode": (DRAIN_MODE, SHADOW_MODE),
    "probe": ("on_failure", "always", "never"),
    "preflight": ("on_suspicion", "always", "never"),
}
_AT_LEAST_ONE = ("unknown_probes", "breaker_same", "resume_passes")
_ABOVE_ZERO = ("prolog_s", "epilog_s", "periodic_s", "slurm_call_s", "cooling_rise_c")
_ABSOLUTE = ("sysfs_root", "state_dir", "kernel_log")
_RULES_WITHOUT_A_ROW = ("recovery-action", "aer-log", "nic-missing", "cooling", "trend")
_TOO_MUCH = 1e18
"""JSON writes infinity, and whole numbers that no float can hold."""


def check_settings(settings: HealthSettings) -> None:
    """SpecError for the first value that cannot be right, by the key a run knows it by."""
    for key, sentence in wrong_values(settings):
        raise SpecError(f"health.{key} {sentence}")


def wrong_values(settings: HealthSettings) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with its value and what would be right)."""
    values = vars(settings)
    for key, choices in _CHOICES.items():
        if values[key] not in choices:
            yield key, f"is `{values[key]}`; choose {' or '.join(choices)}"
    for key, value in values.items():
        if isinstance(value, (int, float)):
            least = 1 if key in _AT_LEAST_ONE else 0
            if not least <= value < _TOO_MUCH:
                yield key, f"is {value}; it has to be at least {least}"
            elif key in _ABOVE_ZERO and not value:
                yield key, f"is {value}; it has to be above 0"
    if settings.breaker_share > 1:
        yield "breaker_share", f"is {settings.breaker_share}; it is a share, from 0 to 1"
    for key in _ABSOLUTE:
        if not values[key].startswith("/"):
            yield key, f"is `{values[key]}`; give an absolute path"
    if settings.verdict_dir and not settings.verdict_dir.startswith("/"):
        yield "verdict_dir", f"is `{settings.verdict_dir}`; give an absolute path, or nothing"
    if settings.skip or settings.shadow or settings.limits:
        yield from _wrong_rules(settings)


def _wrong_rules(settings: HealthSettings) -> Iterator[tuple[str, str]]:
    from ftslurm.health import decision_table as table

    rules = {row.rule for row in table.DECISION_TABLE} | set(_RULES_WITHOUT_A_ROW)
    rules |= {f"unread-{source}" for source in (*SOURCES, "probe")}
    for key, names, known in (
        ("skip", settings.skip, rules | set(SOURCES)),
        ("shadow", settings.shadow, rules),
    ):
        for name in names:
            if name not in known and not _is_numbered(name):
                yield key, f"names `{name}`, which is no rule{near(name, known)}"
    with_bound = (table.AT_LEAST, table.ABOVE, table.AT_MOST, table.RISEN, table.PER_MINUTE)
    tests = {row.rule: row.test for row in table.DECISION_TABLE if row.test in with_bound}
    for name, bound in settings.limits.items():
        if name not in tests:
            yield "limits", f"names `{name}`, which has no bound{near(name, tests)}"
        elif not -_TOO_MUCH < bound < _TOO_MUCH:
            yield "limits", f"gives `{name}` the bound {bound}; give a number"
        elif bound <= 0 and tests[name] in (table.RISEN, table.PER_MINUTE):
            yield "limits", f"gives `{name}` the bound {bound}, which any look would reach"


def _is_numbered(name: str) -> bool:
    """`xid-79` or `sxid-12020`."""
    kind, _, number = name.partition("-")
    return kind in ("xid", "sxid") and number.isascii() and number.isdigit()


def near(name: str, known: Iterable[str]) -> str:
    """`, did you mean ...`, where something is near."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean `{close[0]}`" if close else ""


def thresholds_of(settings: HealthSettings) -> Thresholds:
    """As the judging takes them. Imported here: composing a run needs none of its tables."""
    from ftslurm.health.verdict import Thresholds

    return Thresholds(
        off=frozenset(settings.skip),
        limits=dict(settings.limits),
        unknown_probes=settings.unknown_probes,
        trends_drain=settings.trends_drain,
        sympathetic_s=settings.sympathetic_s,
        cooling_rise_c=settings.cooling_rise_c,
    )
