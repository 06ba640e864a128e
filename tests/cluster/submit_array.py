"""Run by a user: freezes NUMBER runs with the given overrides and submits them as one array.

python submit_array.py NUMBER OVERRIDE...      prints {"runs": [...], "jobs": [...]}
"""

import json
import sys
from pathlib import Path

from ftslurm.scheduler import open_scheduler
from ftslurm.submit.compose import compose_run
from ftslurm.submit.executor import FtslurmExecutor
from ftslurm.submit.freeze import freeze, plan_run
from ftslurm.submit.rank import TrainCall


def main(number: int, overrides: list[str]) -> None:
    scheduler = open_scheduler("slurm")
    site = scheduler.site()
    runs = []
    for seed in range(number):
        composed = compose_run([*overrides, f"seed={seed}"])
        plan = plan_run(composed.spec, composed.text, scheduler, site, folder=Path.cwd())
        freeze(plan)
        runs.append(str(plan.layout.root))
    jobs = FtslurmExecutor(Path.cwd() / "array").map_array(TrainCall(), runs)
    print(json.dumps({"runs": runs, "jobs": [job.job_id for job in jobs]}))


main(int(sys.argv[1]), sys.argv[2:])
