"""A job that has been told to end, and whose batch script has decided so: its agents leave.

They outlive TERM beside the ranks, whose last save may take all of the grace. Once nothing follows
in this job they would hold it until KillWait is over (30 s by default): whoever preempts it, its
epilogs and the run's next start would wait for them. Their srun cannot end them then: slurmctld
refuses that for a job that is completing (seen on 22.05). Decides nothing and writes nothing.
"""

from __future__ import annotations

from ftslurm.agent.leader import Leader
from ftslurm.agent.loop import tell
from ftslurm.agent.member import PART_S
from ftslurm.agent.trial import Trial
from ftslurm.recovery.actions import RESTART
from ftslurm.run.attempts import read_decision

LOOK_S = 1.0


class Parting:
    """The leader's. The decision is looked for once TERM has come: before, an order of Slurm's may
    still fail, and whatever becomes of the job is seen by its agents alone."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._has_begun = self._is_looking = False

    def term_came(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._leader.loop.every(LOOK_S, self._look)

    def _look(self) -> None:
        trial = self._leader.trial
        if trial is None or self._is_looking:
            return
        self._is_looking = True
        self._leader.loop.in_thread(lambda: _is_last(trial), self._looked, otherwise=False)

    def _looked(self, is_last: bool) -> None:
        self._is_looking = False
        if is_last:
            tell("the job ends, and its agents leave")
            self._leader.orders.give("part")
            self._leader.loop.later(PART_S, self._leader.loop.stop)


def _is_last(trial: Trial) -> bool:
    """Of this job's attempts. The decision is written on this node, whose client of a shared file
    system shows it at once."""
    try:
        action = str(read_decision(trial.paths).get("action", RESTART))
    except OSError:
        return False  # the next look may be luckier
    return action != RESTART
