"""What is told of an attempt's end, and what is found from it: the values of this room. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.run.srun_lines import RankExit

OWNER = "owner"
OTHER = "other"


@dataclass(frozen=True)
class Clue:
    """One line of text that somebody left, and where it is to be read."""

    kind: str
    """rank_error | log | launcher | accounting | node_state | agent | kernel | health"""
    text: str
    at: Optional[float] = None
    """UTC seconds by the leader's clock; of a line without a time, when its file was last written.
    """
    rank: Optional[int] = None
    node: Optional[str] = None
    file: Optional[str] = None
    line: Optional[int] = None
    """From 1."""
    context: str = ""
    """The traceback that `text` ends, if it ends one."""
    step: Optional[int] = None
    """Of a rank's own record: steps it had trained."""
    is_past: bool = False
    """Of a log: the program has gone on writing since, so this was no end."""


@dataclass(frozen=True)
class Facts:
    """What is known of an attempt beside its texts."""

    rc: int = 0
    """Exit code of the launcher."""
    preempted: Optional[bool] = None
    cancelled_by: Optional[str] = None
    """owner | other; None: it was not cancelled, or nobody can say."""
    step: Optional[int] = None
    """Last step trained before the end; None: none, or it is not known."""
    job_id: Optional[str] = None
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Rank -> node."""
    exits: Mapping[int, RankExit] = field(default_factory=dict)
    """How each rank ended, as far as the launcher told."""
    unasked: tuple[str, ...] = ()
    """Sources that could not be asked, a sentence each."""


@dataclass(frozen=True)
class Finding:
    cause: str
    """A word of causes.py."""
    confidence: float
    """0 to 1."""
    blamed_rank: Optional[int]
    blamed_node: Optional[str]
    """Only where a node can be at fault: node, gpu, hang, straggler; of network and storage, where
    the kernel of one node alone tells of it."""
    blamed_gpu: Optional[str]
    """PCI address."""
    clues: list[Clue]
    """Those that decided, best first."""
    sentence: str
    signature: str = ""
    """Name of the row that decided."""
    is_of_one_node: bool = False
    """Of an attempt's several nodes only one told of it: it may lie in what that node alone has."""
    sick: dict[str, str] = field(default_factory=dict)
    """Node -> what its health says against it, whatever ended the attempt."""
    program_fault: str = ""
    """What a GPU itself says of the program, e.g. `XID31`: the same fault is known again by it."""
    doubt: str = ""
    """What so many nodes say of themselves that it is held against none."""
