"""A run that is followed: a scheduler that answers from a list, and a clock that sleep moves on."""

from ftslurm.errors import SchedulerError
from ftslurm.files import write_json
from ftslurm.run.attempts import Attempt, Progress, claim, write_progress
from ftslurm.run.jobs import BY_BATCH, BY_SUBMIT, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import JobState
from ftslurm.submit.follow import Follower

RUNNING = JobState("RUNNING")


def progress(step=10, **values):
    return Progress(step, 100, **{"phase": "training", **values})


class Scheduler:
    """Answers one state after the other, the last again and again."""

    def __init__(self, states, name):
        self.states = list(states)
        self.name = name
        self.asked = []

    def job_state(self, job_id):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def hasten(self, job_id):
        self.asked.append("hasten")
        return True

    def signal_ranks(self, job_id, name):
        self.asked.append(name)
        if len(self.asked) == 1:
            raise SchedulerError("no step is running")


class Jobs(Scheduler):
    """Each job has states of its own."""

    def __init__(self, states, name):
        self.of_job, self.name, self.asked = {key: list(value) for key, value in states}, name, []

    def job_state(self, job_id):
        states = self.of_job[job_id]
        return states.pop(0) if len(states) > 1 else states[0]


def queue_job(tmp_path, job_id, by=BY_BATCH, after=None):
    (tmp_path / "submit").mkdir(exist_ok=True)
    add_job(RunLayout(tmp_path), job_id, scheduler="slurm", queued_by=by, after=after)


def followed(tmp_path, states, *, on_pause=None, kind=Scheduler, name="slurm", **options):
    """(ending, lines said, pauses, what the scheduler was asked)."""
    scheduler, said, pauses = kind(states, name), [], []
    queue_job(tmp_path, "7", BY_SUBMIT)
    clock = [0.0]

    def sleep(seconds):
        pauses.append(seconds)
        clock[0] += seconds
        if on_pause:
            on_pause(len(pauses))
        assert len(pauses) < 2000

    follower = Follower(
        RunLayout(tmp_path),
        scheduler,
        said.append,
        sleep=sleep,
        now=lambda: clock[0],
        **options,
    )
    return follower.follow(), said, pauses, scheduler.asked


def attempt(tmp_path, **values):
    layout = RunLayout(tmp_path)
    number = claim(layout, Attempt(0, "7", 0, ["n1"], 0.0)).number
    write_progress(layout.attempt(number), progress(**values))
    return layout.attempt(number)


def decide(paths, action, reason=""):
    write_json(
        paths.root / "decision.json", {"schema_version": 1, "action": action, "reason": reason}
    )
