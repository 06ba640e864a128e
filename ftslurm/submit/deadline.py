"""How long an emergency save may take, from what the site gives at submit. Pure.

What submit refuses and plans by, and what holds where nobody is told better when the time has come
(agent/deadline.py): settings change, and a job may wait in another partition than it was given.
"""

from __future__ import annotations

from ftslurm.run.deadline import LEAST_S, MARGIN_S, kill_s
from ftslurm.run.spec import RunSpec
from ftslurm.scheduler.protocol import Site
from ftslurm.submit.preemption import ways


def emergency_deadline_s(site: Site, spec: RunSpec) -> float:
    """Seconds from the stop signal to the latest moment at which the save still helps.

    Two things end a run with a warning, and the shorter time counts:

    - Time limit: the warn signal comes `cluster.signal_lead_s` before the limit, never later (seen
      6 to 8 s earlier). After the limit the job is TIMEOUT for good, so the save and the requeue
      must both be done before it; KillWait is no spare time.
    - Preemption: the signal comes when grace begins. At its end Slurm requeues by itself, TERMs all
      and kills after max(KillWait, 5) s, so a save may use both. Whether the first signal is TERM
      or, with send_user_signal, the warn signal changes its name, not its time. A partition, or
      with preempt/qos a QOS, whose PreemptMode is OFF has none of this.

    An own `checkpoint.emergency_deadline_s` wins.
    """
    if spec.checkpoint.emergency_deadline_s is not None:
        return spec.checkpoint.emergency_deadline_s
    times = [float(spec.cluster.signal_lead_s)]
    for way in ways(spec.cluster, site):
        if way.mode.upper() != "OFF":
            times.append(way.grace_s + kill_s(site.kill_wait_s))
    return max(LEAST_S, min(times) - MARGIN_S)
