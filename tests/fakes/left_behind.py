"""What an attempt leaves behind, put into a run directory by hand, and Slurm's answers on it."""

import time

from test_accounting import HELP_2411, rows

from ftslurm.diagnosis.classify import classify
from ftslurm.diagnosis.clues import gather
from ftslurm.files import write_json
from ftslurm.run.attempts import Attempt, claim
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.scheduler.slurm import Completed

NOW = 1_700_000_000.0

TRACEBACK = """\
Traceback (most recent call last):
  File "/r/code/train.py", line 12, in <module>
    main()
  File "/r/code/train.py", line 9, in main
    raise ValueError("the bug of step 37")
"""

# As srun and slurmstepd of these versions print them.
KILLED = {
    "22.05": """\
slurmstepd-n1: error: *** STEP 118.2 ON n1 CANCELLED AT 2026-11-29T13:47:08 ***
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=118.2
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: n1: tasks 0-1: Exited with exit code 143
srun: error: n2: task 2: Terminated
""",
    "24.11": """\
srun: error: n2: task 3: Killed
srun: Terminating StepId=118.2
slurmstepd-n1: error: *** STEP 118.2 ON n1 CANCELLED AT 2026-11-29T13:47:08 ***
srun: error: n[1-2]: tasks 0-2: Exited with exit code 143
""",
    "26.05": """\
srun: error: n2: task 3: Killed
srun: Terminating StepId=118.2
[2026-11-29T14:19:25.707] error: *** STEP 118.2 ON n1 CANCELLED AT 2026-11-29T14:19:25 DUE to SIGNAL Terminated ***
srun: error: n1: tasks 0-1: Exited with exit code 143
srun: error: n2: task 2: Exited with exit code 1
""",  # noqa: E501
}


class Scheduler:
    name = "slurm"

    def __init__(self, preempted=None, delay_s=0.0):
        self.preempted, self.delay_s = preempted, delay_s

    def is_preempted(self, job_id):
        time.sleep(self.delay_s)
        return self.preempted


def make_run(folder):
    """Four ranks on two nodes, one attempt."""
    layout = RunLayout(folder / "run")
    layout.root.mkdir()
    spec = RunSpec(steps=60)
    spec.cluster.nodes, spec.cluster.tasks_per_node = 2, 2
    record = {
        "schema_version": 1,
        "run_id": "20260101-000000-gpt-abcdef",
        "scheduler": "slurm",
        "spec": to_dict(spec),
    }
    write_json(layout.run_json, record)
    claim(layout, Attempt(0, "118", 0, ["n1", "n2"], claimed_at=NOW))
    return layout


def leave(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def rank_error(paths, rank, at, kind, message, *, step=37, traceback=()):
    record = {"schema_version": 1, "rank": rank, "node": f"n{1 + rank // 2}", "step": step,
              "at": at, "type": kind, "message": message, "traceback": list(traceback)}  # fmt: skip
    write_json(paths.ranks / f"rank-{rank:05d}.json", record)


def found(layout, **options):
    options = {"rc": 1, "deadline_s": 5.0, **options}
    clues, facts = gather(layout, 1, **options)
    return classify(clues, facts), facts


def agents(paths, *findings):
    rows = [{"since": NOW, "at": NOW, "ranks": [], "nodes": [], "acted": True, **row}
            for row in findings]  # fmt: skip
    write_json(paths.root / "agents.json", {"schema_version": 1, "nodes": {}, "findings": rows})


def at(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def slurm(*lines, nodes="", rc=0):
    def run(argv, timeout_s):
        if argv[:2] == ["sacct", "--helpformat"]:
            return Completed(0, HELP_2411, "")
        return Completed(rc, nodes if argv[0] == "scontrol" else rows(*lines), "")

    return run


def job_row(state, code="0:0", failed="", restarts=0):
    return f"118|{state}|{code}|{at(NOW)}|{at(NOW + 60)}|None|{failed}|{restarts}"
