"""A run as an operator's verb finds it, and a scheduler that answers from what a test puts in."""

from ftslurm.errors import SchedulerError
from ftslurm.files import write_json
from ftslurm.operate.standing import OpenRun
from ftslurm.run.attempts import (
    STOPPED,
    Attempt,
    Outcome,
    Progress,
    claim,
    write_outcome,
    write_progress,
)
from ftslurm.run.control import PAUSE, SAVE, STOP, control_files
from ftslurm.run.jobs import BY_BATCH, BY_SUBMIT, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import RecoverySpec, RunSpec, to_dict
from ftslurm.scheduler.protocol import UNKNOWN, JobState

RUNNING = JobState("RUNNING")
QUEUED = JobState("PENDING", "Resources")
HELD = JobState("PENDING", "JobHeldUser")
CANCELLED = JobState("CANCELLED")
FORGOTTEN = JobState(UNKNOWN, "slurm_load_jobs error: Invalid job id specified")
AWAY = JobState(UNKNOWN, "Unable to contact slurm controller (connect failure)")


WAITING_BEHIND = JobState("PENDING", "Dependency")


class FakeScheduler:
    """Jobs with a list of states each: every look takes one, the last stays."""

    name = "slurm"

    def __init__(self, **states):
        self.states = {name.removeprefix("job_"): list(looks) for name, looks in states.items()}
        self.done = []
        self.queued = []
        self.after_release = [QUEUED]
        self.excluded = {}
        self.refusal = None

    def job_state(self, job_id):
        looks = self.states[job_id]
        return looks.pop(0) if len(looks) > 1 else looks[0]

    def _do(self, what, job_id, *states):
        if self.refusal:
            raise SchedulerError(self.refusal)
        self.done.append((what, job_id))
        if states:
            self.states[job_id] = list(states)

    def cancel(self, job_id):
        self._do("cancel", job_id, CANCELLED)

    def hold(self, job_id):
        self._do("hold", job_id, HELD)

    def release(self, job_id):
        self._do("release", job_id, *self.after_release)

    def hasten(self, job_id):
        if self.job_state(job_id).reason != "BeginTime":
            return False
        self._do("hasten", job_id)
        return True

    def was_cancelled(self, job_id):
        state = self.job_state(job_id)
        return state.word == "CANCELLED" if state.is_ended else None

    def excluded_nodes(self, job_id):
        return self.excluded.get(job_id, [])

    def exclude_nodes(self, job_id, nodes):
        self.excluded[job_id] = list(nodes)

    def serving_nodes(self, partition, need):
        return None

    def all_nodes(self):
        return None

    def waiting(self, script):
        assert script.name == "train.sbatch"
        return self.queued


def make_layout(folder):
    layout = RunLayout(folder / "main-1")
    for path in (layout.root, layout.submit, layout.attempts):
        path.mkdir(mode=0o700)
    spec = RunSpec(recovery=RecoverySpec(control_dir=str(folder / "shared")))
    record = {"schema_version": 1, "run_id": "main-1", "spec": to_dict(spec), "scheduler": "slurm"}
    write_json(layout.run_json, {**record, "continue_by": "requeue"})
    return layout


def make_run(layout, *looks):
    """The run of one job with these states, looked at one after the other."""
    add_job(layout, "7", scheduler="slurm", queued_by=BY_SUBMIT)
    return _open(layout, FakeScheduler(job_7=looks))


def make_run_with_successor(layout, current, *successor):
    add_job(layout, "7", scheduler="slurm", queued_by=BY_SUBMIT)
    add_job(layout, "8", scheduler="slurm", queued_by=BY_BATCH, after="7")
    return _open(layout, FakeScheduler(job_7=[current], job_8=successor))


def _open(layout, scheduler):
    record = read_record(layout)
    return OpenRun(layout, record, scheduler, control_files(layout, record))


def train(layout, *, step=47, committed=40, phase="training", job_id="7"):
    attempt = claim(layout, Attempt(0, job_id, 0, ["n1"], 0.0))
    progress = Progress(step=step, steps=100, committed_step=committed, phase=phase)
    write_progress(layout.attempt(attempt.number), progress)
    return layout.attempt(attempt.number)


def obey(paths, order):
    write_outcome(paths, Outcome(STOPPED, 47, 47, order=order))


def quick(seconds):
    """In place of sleep."""


def given_orders(run):
    return [order for order in (STOP, PAUSE, SAVE) if run.control.is_given(order)]
