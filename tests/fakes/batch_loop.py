"""What a batch script asks of a run's verbs, against the queue of slurm_queue."""

import dataclasses
import itertools

from fakes.slurm_queue import SITE, Slurm

from ftslurm.files import write_json
from ftslurm.health.settings import HealthSettings
from ftslurm.recovery import keep_out
from ftslurm.recovery.claim import claim_attempt
from ftslurm.recovery.own_job import OwnJob
from ftslurm.recovery.recover import recover
from ftslurm.run.attempts import STOPPED, Outcome, write_outcome
from ftslurm.run.jobs import BY_SUBMIT, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import ClusterSpec, RecoverySpec, RunSpec, to_dict

OWN = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]"}


def make_run(folder, continue_by="resubmit", *, program=(), spec=None):
    """A run whose first job, 12, is queued."""
    layout = RunLayout(folder)
    layout.submit.mkdir()
    layout.steps.mkdir(parents=True)
    record = {
        "schema_version": 1,
        "run_id": "r",
        "scheduler": "slurm",
        "site": SITE.to_dict(),
        "continue_by": continue_by,
        "spec": to_dict(spec or RunSpec(program=list(program))),
    }
    write_json(layout.run_json, record)
    singleton = "--dependency=singleton " if continue_by == "resubmit" else ""
    layout.sbatch_command.write_text(f"sbatch --parsable --job-name=a {singleton}{layout.script}\n")
    add_job(layout, "12", scheduler="slurm", queued_by=BY_SUBMIT)
    return layout


def begin(layout, slurm, monkeypatch, environ=OWN):
    """The claim of a job, as its batch script asks for it."""
    monkeypatch.setattr("ftslurm.recovery.claim.open_scheduler", lambda *_, **__: slurm)
    said = claim_attempt(layout, environ, submit=slurm.sbatch)
    if said.startswith("go"):
        number = int(said.split()[1])
        (layout.attempt(number).logs / "rank-0.log").touch()
    return said


def begin_job(job_id, layout, slurm, monkeypatch):
    """That of another one, which waits no longer."""
    slurm.queue.pop(job_id, None)
    return begin(layout, slurm, monkeypatch, {**OWN, "SLURM_JOB_ID": job_id})


def stopped(layout, number=1, order=None):
    paths = layout.attempt(number)
    asked = {"order": order} if order else {"signal": "SIGUSR1"}
    write_outcome(paths, Outcome(STOPPED, step=20, committed_step=20, **asked))


def end(layout, slurm, *, attempt=1, rc=75, term=False, environ=OWN, clock=None):
    times = clock or itertools.count(1000.0)
    return recover(
        layout, slurm, environ, attempt=attempt, rc=rc, term=term, submit=slurm.sbatch,
        now=lambda: float(next(times)), sleep=lambda s: None,
    )  # fmt: skip


def allocated(folder, continue_by="requeue", given=("n1", "n2"), cluster=None, **recovery):
    """A run of two nodes, and the queue that has given it nodes."""
    spec = RunSpec(
        cluster=ClusterSpec(nodes=2, tasks_per_node=2, **(cluster or {})),
        recovery=RecoverySpec(agents=False, **recovery),
        health=HealthSettings(preflight="never"),
    )
    layout, slurm = make_run(folder, continue_by, spec=spec), Slurm()
    slurm.given = list(given)
    return layout, slurm


def own_job(layout, slurm):
    """That job, as its batch script has it, queueing with that Slurm and waiting for nothing."""
    job = OwnJob.of(layout, read_record(layout), slurm, OWN)
    return dataclasses.replace(job, submit=slurm.sbatch, sleep=lambda s: None)


def be_hasty(monkeypatch):
    """This process is no verb's, and waits for nothing."""
    monkeypatch.setattr("ftslurm.recovery.recover.outlive_requeue", lambda: None)
    monkeypatch.setattr(keep_out, "POLL_S", 0.01)
    monkeypatch.setattr("ftslurm.recovery.allocation.kill_wait_s", lambda job: 0.1)
    monkeypatch.setattr("ftslurm.recovery.successor.KEEP_OUT_S", 0.1)
