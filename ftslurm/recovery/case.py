"""What a decision is made from, and what it says: an attempt's evidence, the run's history, values
alone. Pure; the rules are in policy.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

from ftslurm.run.attempts import Outcome

if TYPE_CHECKING:
    from ftslurm.diagnosis.finding import Finding


@dataclass(frozen=True)
class RankFailure:
    """The first rank that left a word on why it failed."""

    rank: int
    node: str
    error: str
    """Type and message."""
    log: str
    """Path of the rank's log."""
    step: Optional[int] = None
    """Steps it had applied; None: it had not come to count them, or left no word."""
    signature: Optional[str] = None
    """Type and head of the message, numbers left out: the same for the same error."""


@dataclass(frozen=True)
class PastAttempt:
    """What counts of an earlier attempt."""

    number: int
    failed: bool
    """It ended by a failure; preemptions, time limits and lost nodes are none."""
    progressed: bool
    """A step was committed in it."""
    cause: str = ""
    signature: Optional[str] = None
    step: Optional[int] = None
    """At which it failed, as far as that is known."""
    blamed_node: Optional[str] = None
    skipped: bool = False
    """It was followed by a skip over batches."""
    ended_run: bool = False
    """The run had stopped with it, so that a person has let it go on since."""
    program_fault: str = ""
    """As a GPU has named it."""


@dataclass(frozen=True)
class Evidence:
    """What an attempt left behind."""

    number: int
    rc: int
    """Exit code of the launcher: the highest of all ranks'."""
    term: bool
    """The batch shell was told to end: end of grace, requeue or time limit."""
    done: bool
    """The run's DONE exists."""
    outcome: Optional[Outcome]
    progressed: bool
    committed_step: Optional[int]
    """Newest committed step of the run now."""
    logs: str
    """Folder of the ranks' logs."""
    first_failure: Optional[RankFailure] = None
    order: Optional[str] = None
    """stop | pause: an operator's order that no rank has carried out."""
    ranks_signalled: bool = False
    """The ranks noted a stop signal."""
    limit_is_near: bool = False
    """The warn signal before the time limit is due or was sent, between attempts to nobody."""
    limit_passed: Optional[bool] = None
    """The time limit is behind us, by the clock; None: it is not known."""
    controller_away: bool = False
    """No rank was started, and slurmctld does not answer."""
    start_forgotten: bool = False
    """No rank was started, as slurmctld takes our job for one that still waits."""
    is_program: bool = False
    """The run is a program of the user's own: of steps nothing is known."""
    committed_digest: str = ""
    """That step's."""
    committed_before: Optional[int] = None
    """Committed step before the newest."""
    began_at: int = 0
    """Step that the attempt had to begin at."""
    step: Optional[int] = None
    """Last step that it is known to have trained; None: nothing tells."""
    stragglers: tuple[str, ...] = ()
    """Nodes that were named while it ran."""
    evicted: tuple[str, ...] = ()
    """Those of them because of which the ranks were asked to save and leave."""
    node_faults: dict[str, int] = field(default_factory=dict)
    """Faults of each node before this attempt."""
    finding: Optional[Finding] = None
    """What ended it; None: not asked for, or nobody could say."""
    unclassified: str = ""
    """Why there is no finding although it was asked for."""
    sick: dict[str, str] = field(default_factory=dict)
    """Node -> what its health says against it."""
    preflight_named: bool = False
    """A preflight has named those, and no rank was started."""
    asked_by: Optional[str] = None
    """Why the ranks were asked to leave (asked.py)."""


@dataclass(frozen=True)
class DecisiveLine:
    """Text that decided, and where it stands."""

    text: str
    file: Optional[str]
    line: Optional[int]


@dataclass(frozen=True)
class Blamed:
    """Where the cause lies, as far as it is known."""

    node: Optional[str]
    gpu: Optional[str]
    rank: Optional[int]


@dataclass(frozen=True)
class Decision:
    action: str
    cause: str
    reason: str
    """One sentence; for STOP it says what a person should do."""
    failures_in_a_row: int = 0
    """Failures without a newly committed step, this attempt included."""
    is_failure: bool = False
    """The attempt counts as failed."""
    budget: str = ""
    """What is left of the cause's budget."""
    confidence: Optional[float] = None
    blamed: Optional[Blamed] = None
    evidence: tuple[DecisiveLine, ...] = ()
    exclude: tuple[str, ...] = ()
    """Nodes on which the run is not placed again."""
    sick: dict[str, str] = field(default_factory=dict)
    """Those among them that their health speaks against, whatever ended the attempt, and how."""
    wait_s: float = 0.0
    """Before the next attempt."""
    restore_before: Optional[int] = None
    """The next attempt adopts only committed steps below this one."""
    skip_steps: Optional[tuple[int, int]] = None
    """First and last of the steps whose batches are passed over from now on."""
