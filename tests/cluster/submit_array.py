"""Run by a user: submits a sweep of NUMBER tasks, which differ in their seeds.

python submit_array.py NUMBER OVERRIDE...      prints {"runs": [...], "jobs": [...]}
"""

import json
import sys
from pathlib import Path

from ftslurm.run.jobs import read_jobs
from ftslurm.scheduler import open_scheduler
from ftslurm.submit.compose import compose_run
from ftslurm.submit.sweep import Sweep, Task


def main(number: int, overrides: list[str]) -> None:
    scheduler = open_scheduler("slurm")
    tasks = []
    for seed in range(number):
        composed = compose_run([*overrides, f"seed={seed}"])
        tasks.append(Task(seed, (f"seed={seed}",), composed.spec, composed.text))
    sweep = Sweep.begin(
        "array",
        runs_dir=Path(tasks[0].spec.runs_dir),
        folder=Path.cwd(),
        scheduler=scheduler,
        site=scheduler.site(),
        kind="run",
        sweeper="basic",
        command=sys.argv,
        parallelism=None,
        detach=True,
    )
    sweep.launch(tasks)
    runs = [sweep.layout.task(task.number) for task in tasks]
    jobs = [read_jobs(run)[0].job_id for run in runs]
    print(json.dumps({"runs": [str(run.root) for run in runs], "jobs": jobs}))


main(int(sys.argv[1]), sys.argv[2:])
