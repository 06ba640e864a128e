"""A run directory whose attempts a test makes by hand, and `recover` with a fake scheduler."""

import time

from ftslurm.errors import RANK_FAILED, SchedulerError
from ftslurm.files import write_json
from ftslurm.recovery.case import Evidence
from ftslurm.recovery.recover import recover
from ftslurm.run.attempts import AdoptedStep, Attempt, claim
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RecoverySpec, RunSpec, to_dict
from ftslurm.scheduler.protocol import JobState, Terms

PLAIN = Evidence(
    number=4,
    rc=RANK_FAILED,
    term=False,
    done=False,
    outcome=None,
    progressed=False,
    committed_step=40,
    logs="/runs/r/attempts/0004/logs",
)
"""A failure that nobody says anything of."""


class FakeScheduler:
    """Answers from what a test puts in."""

    name = "fake"
    word = "RUNNING"

    def __init__(self, *, accepts=True, refusal=None, alive=(True,), end_at=None):
        self.accepts, self.refusal, self.alive = accepts, refusal, list(alive)
        self.end_at = end_at
        self.requeued = []
        self.excluded = []

    def own_job_id(self, environ):
        return environ["SLURM_JOB_ID"]

    def end_time(self, job_id):
        return self.end_at

    def job_state(self, job_id):
        return JobState(self.word)

    def controller_alive(self):
        return self.alive.pop(0) if len(self.alive) > 1 else self.alive[0]

    def requeue(self, job_id, *, restart_count, hold):
        self.requeued.append(job_id)
        if self.refusal:
            raise SchedulerError(self.refusal)
        return self.accepts

    def was_cancelled(self, job_id):
        return not self.accepts

    def is_preempted(self, job_id):
        return False

    def terms(self, environ):
        return Terms(True, self.end_at)

    def may_requeue(self, job_id):
        return True

    def waiting(self, script):
        return []

    def nodes(self, environ):
        return ["n1", "n2"]

    def serving_nodes(self, *_):
        return None

    def all_nodes(self):
        return None

    def excluded_nodes(self, job_id):
        return self.excluded

    def exclude_nodes(self, job_id, names):
        self.excluded = list(names)

    def forbid_requeue(self, job_id):
        pass


def make_layout(tmp_path):
    layout = RunLayout(tmp_path)
    spec = RunSpec(steps=60, recovery=RecoverySpec(max_failures=2, backoff_s=0))
    spec.cluster.nodes, spec.cluster.tasks_per_node = 2, 2
    layout.steps.mkdir(parents=True)
    layout.submit.mkdir()
    record = {
        "schema_version": 1,
        "run_id": "gpt-test",
        "scheduler": "local",
        "spec": to_dict(spec),
    }
    write_json(layout.run_json, record)
    return layout


def begin(layout, *, adopted=()):
    """One attempt whose ranks were started."""
    attempt = claim(layout, Attempt(
        number=0, job_id="12", restart_count=0, nodes=["n1", "n2"], claimed_at=1.0,
        adopted=[AdoptedStep(step, "d") for step in adopted],
    ))  # fmt: skip
    paths = layout.attempt(attempt.number)
    (paths.logs / "rank-0.log").touch()
    return paths


def rank_error(paths, rank, at, message, kind="ValueError", node="n1"):
    write_json(paths.ranks / f"rank-{rank:05d}.json", {
        "schema_version": 1, "rank": rank, "node": node, "step": 3, "at": at, "type": kind,
        "message": message, "traceback": [],
    })  # fmt: skip


def decide(layout, scheduler=None, *, attempt=1, rc=1, term=False, sleep=time.sleep):
    return recover(
        layout, scheduler or FakeScheduler(), {"SLURM_JOB_ID": "12"},
        attempt=attempt, rc=rc, term=term, sleep=sleep,
    )  # fmt: skip
