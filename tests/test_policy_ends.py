"""Whatever fails in whichever order, a run that cannot get past a step stops after a number of
attempts that its budgets bound; and what costs nothing never stops it."""

import random
from dataclasses import replace

import pytest

from ftslurm.diagnosis import causes
from ftslurm.diagnosis.finding import Finding
from ftslurm.errors import RANK_FAILED
from ftslurm.recovery.case import Evidence, PastAttempt, RankFailure
from ftslurm.recovery.policy import decide
from ftslurm.run.spec import RecoverySpec

WALL, INTERVAL = 37, 10
FAILURES = [
    cause
    for cause in causes.MEANING
    if cause not in ("preempted", "time_limit", "cancelled_user", "cancelled_admin")
]


class Run:
    """Attempts against a wall: none trains step WALL. Steps are committed as they are due."""

    def __init__(self, draw, rules):
        self.draw, self.rules = draw, rules
        self.committed, self.history = [], []

    def attempt(self, cause):
        number = len(self.history) + 1
        begin = max(self.committed, default=0)
        step = min(WALL, begin + self.draw.randint(0, WALL))
        new = [due for due in range(INTERVAL, step + 1, INTERVAL) if due > begin]
        self.committed += new
        evidence = Evidence(
            number=number,
            rc=RANK_FAILED,
            term=False,
            done=False,
            outcome=None,
            progressed=bool(new),
            committed_step=max(self.committed, default=None),
            committed_before=max(self.committed[:-1], default=None),
            logs="/logs",
            began_at=begin,
            step=step,
            first_failure=RankFailure(1, "n1", "E: x", "/log", step=step, signature="E: x"),
            finding=Finding(cause, self.draw.random(), 1, "n1", None, [], "so it was"),
        )
        if cause == "preempted":
            evidence = replace(evidence, first_failure=None)
        decision = decide(self.history, evidence, self.rules)
        self.note(number, decision, step, progressed=bool(new))
        return decision

    def note(self, number, decision, step, *, progressed):
        if decision.restore_before is not None:
            self.committed = [one for one in self.committed if one < decision.restore_before]
        self.history.append(PastAttempt(
            number, decision.is_failure, progressed, decision.cause, "E: x", step, "n1",
            skipped=decision.skip_steps is not None,
        ))  # fmt: skip


@pytest.mark.parametrize("on_nan", ["stop", "rollback", "skip"])
@pytest.mark.parametrize("seed", range(150))
def test_a_run_that_cannot_get_past_a_step_stops(seed, on_nan):
    draw = random.Random(seed)
    run = Run(draw, RecoverySpec(on_nan=on_nan))
    some = draw.sample(FAILURES, draw.randint(1, 4))
    # Between two newly committed steps at most so many, and a rollback may take one back once or
    # twice.
    most = (WALL // INTERVAL + 3) * (max(run.rules.budgets.values()) + 1)
    for _ in range(most):
        decision = run.attempt(draw.choice(some))
        assert 0 <= decision.wait_s <= run.rules.backoff_max_s
        if decision.action == "stop":
            return
    raise AssertionError(f"{most} attempts, and no end: {[past.cause for past in run.history]}")


def test_preemptions_never_stop_a_run_and_never_wait():
    run = Run(random.Random(1), RecoverySpec())
    for _ in range(200):
        decision = run.attempt("preempted")
        assert (decision.action, decision.wait_s) == ("requeued", 0)
