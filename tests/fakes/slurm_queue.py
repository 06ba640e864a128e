"""Slurm's queue in memory, as the recovery verbs ask it: what waits, what was done to it."""

import itertools

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.protocol import UNKNOWN, JobState, QueuedJob, Site, Terms
from ftslurm.scheduler.sbatch import RefusedError

SITE = Site("slurm", "24.11.5", 5, True, True, grace_s={"low": 15})


class Slurm:
    """A queue in memory, and sbatch: `queue` maps waiting jobs to what they wait for."""

    name = "slurm"

    def __init__(self, *, requeues=True, preempted=False, flag=True):
        self.requeues, self.preempted, self.flag = requeues, preempted, flag
        self.queue, self.done, self.answers = {}, [], []
        self.gone, self.ended, self.running = set(), {}, set()
        self.lost_in = ()
        self.ids = itertools.count(13)
        self.given = ["n1", "n2"]
        self.serving, self.excluded, self.keeps_list = None, {}, True
        self.listed = None

    def own_job_id(self, environ):
        return environ["SLURM_JOB_ID"]

    def nodes(self, environ):
        return self.given

    def master_address(self, nodes):
        return nodes[0]

    def end_time(self, job_id):
        return None

    def job_state(self, job_id):
        if job_id in self.running:
            return JobState("RUNNING")
        return JobState("PENDING" if job_id in self.queue else UNKNOWN)

    def controller_alive(self):
        return True

    def requeue(self, job_id, *, restart_count, hold=False):
        self.done.append("requeuehold" if hold else "requeue")
        if isinstance(self.requeues, Exception):
            raise self.requeues
        return self.requeues

    def terms(self, environ):
        return Terms(self.flag)

    def may_requeue(self, job_id):
        return self.flag

    def is_preempted(self, job_id):
        return self.preempted

    def was_cancelled(self, job_id):
        return None if self.gone is None else job_id in self.gone

    def end_word(self, job_id):
        return self.ended.get(job_id)

    def forbid_requeue(self, job_id):
        self.done.append(f"forbid {job_id}")

    def waiting(self, script):
        if self.answers and self.answers[0] == "no squeue":
            self.answers.pop(0)
            raise SchedulerError("squeue gave no answer")
        return [QueuedJob(job_id, after) for job_id, after in self.queue.items()]

    def serving_nodes(self, partition, need):
        return self.serving

    def all_nodes(self):
        return self.listed

    def excluded_nodes(self, job_id):
        return self.excluded.get(job_id, [])

    def exclude_nodes(self, job_id, nodes):
        self.done.append(f"exclude {job_id} {','.join(nodes)}")
        if self.keeps_list:
            self.excluded[job_id] = list(nodes)

    def hold(self, job_id):
        self.done.append(f"hold {job_id}")

    def cancel(self, job_id):
        self.done.append(f"cancel {job_id}")
        self.queue.pop(job_id, None)

    def sbatch(self, arguments):
        """As ftslurm.scheduler.sbatch.submit."""
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, (RefusedError,)):
            raise answer
        after = [word for word in arguments if word.startswith("--dependency=")][-1:]
        excluded = [word for word in arguments if word.startswith("--exclude=")]
        job_id = str(next(self.ids))
        self.queue[job_id] = "".join(f"{word.partition('=')[2]}(unfulfilled)" for word in after)
        self.excluded[job_id] = [n for word in excluded for n in word[10:].split(",")]
        self.done.append(" ".join(["sbatch", *after, *excluded]))
        if answer is not None:
            raise answer
        return job_id
