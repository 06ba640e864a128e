"""A program's run directory with attempts in it, and the environment of its ranks."""

from ftslurm.files import write_json
from ftslurm.run.attempts import Attempt, claim
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import PROGRAM_ENTRY, ClusterSpec, RunSpec, to_dict

ENVIRON = {
    "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n2", "FTSLURM_ATTEMPT": "1", "FTSLURM_TASKS_PER_NODE": "2",
    "MASTER_ADDR": "n1", "MASTER_PORT": "20001",
}  # fmt: skip


def make_run(root, *, program=("true",), deadline_s=60.0):
    layout = RunLayout(root)
    for folder in (layout.code, layout.submit, layout.resume, layout.attempts):
        folder.mkdir(parents=True)
    spec = RunSpec(
        entry=PROGRAM_ENTRY,
        program=list(program),
        cluster=ClusterSpec(scheduler="local", tasks_per_node=1),
    )
    write_json(layout.run_json, {
        "schema_version": 1, "run_id": "run-1", "scheduler": "local", "spec": to_dict(spec),
        "emergency_deadline_s": deadline_s,
    })  # fmt: skip
    return layout


def claim_next(layout):
    attempt = Attempt(number=0, job_id="7", restart_count=0, nodes=["n1", "n2"], claimed_at=1.0)
    return claim(layout, attempt).number
