"""Slurm's commands on a queue in memory, arrays and limits included; and a sweep's folder.

In place of subprocess.run: what is asked and done is written down, nothing is started.
"""

import itertools
import shlex
import subprocess
from pathlib import Path

from ftslurm.files import write_json
from ftslurm.run.attempts import Attempt, Progress, claim, write_progress
from ftslurm.run.jobs import BY_SUBMIT, add_job, read_jobs
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import (
    ASKED,
    QUEUED,
    RUN,
    SweepRecord,
    TaskRecord,
    add_array,
    add_tasks,
    parse_numbers,
    read_tasks,
    write_sweep,
)

CONFIG = "SLURM_VERSION = 22.05.8\nMaxArraySize = 1001\n"


class ArrayQueue:
    """`jobs`: id (`70_1`, `71`) -> [word, reason, command]."""

    def __init__(self):
        self.jobs = {}
        self.calls = []
        self.ids = itertools.count(100)
        self.limit = 10_000
        self.at_once = {}
        self.is_away = False
        self.name = "ftslurm"
        self.loses_answer = False

    def __call__(self, argv, **options):
        self.calls.append(list(argv))
        if self.is_away:
            return self._say(argv, 1, err="Unable to contact slurm controller (connect failure)")
        return getattr(self, f"_{argv[0]}")(argv)

    def count(self, *words):
        return sum(call[: len(words)] == list(words) for call in self.calls)

    def put(self, job_ids, word, reason="None", command="x"):
        for job_id in job_ids:
            self.jobs[job_id] = [word, reason, command]

    def refuse(self, group, why):
        """Of this group of a sweep sbatch takes nothing from now on."""
        plain = self._sbatch

        def sbatch(argv):
            return self._say(argv, 1, err=why) if f"group-{group:03d}" in argv[-2] else plain(argv)

        self._sbatch = sbatch

    @property
    def running(self):
        return [job_id for job_id, (word, _, _) in self.jobs.items() if word == "RUNNING"]

    def start(self):
        """What an endless cluster starts: of each array as many as it may run at once."""
        for job_id, job in self.jobs.items():
            array = job_id.partition("_")[0]
            beside = sum(one.partition("_")[0] == array for one in self.running)
            if job[0] == "PENDING" and beside < self.at_once.get(array, 1_000):
                job[0] = "RUNNING"

    def _say(self, argv, rc=0, out="", err=""):
        return subprocess.CompletedProcess(argv, rc, out, err)

    def _squeue(self, argv):
        option = dict(word.lstrip("-").partition("=")[::2] for word in argv[1:])
        wanted = set(option["jobs"].split(",")) if "jobs" in option else None
        lines = []
        for job_id, (word, reason, command) in self.jobs.items():
            array, _, index = job_id.partition("_")
            if wanted is not None and not {job_id, array} & wanted:
                continue
            if option.get("states") == "PENDING" and word != "PENDING":
                continue
            values = {"%i": job_id, "%T": word, "%r": reason, "%e": "N/A", "%A": array, "%F": array,
                      "%K": index or "N/A", "%j": self.name, "%o": command,
                      "%E": "(null)"}  # fmt: skip
            line = option["format"]
            for name, value in values.items():
                line = line.replace(name, value)
            lines.append(line)
        if wanted is not None and len(wanted) == 1 and not lines:
            return self._say(argv, 1, err="slurm_load_jobs error: Invalid job id specified")
        return self._say(argv, out="".join(f"{line}\n" for line in lines))

    def _sbatch(self, argv):
        words = [word for word in argv[1:] if not word.startswith("--")]
        (array,) = [word[8:] for word in argv if word.startswith("--array=")] or [""]
        numbers, _, at_once = array.partition("%")
        indexes = parse_numbers(numbers)
        live = sum(word in ("PENDING", "RUNNING") for word, _, _ in self.jobs.values())
        if live + max(1, len(indexes)) > self.limit:
            why = (
                "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed"
            )
            return self._say(argv, 1, err=f"{why}: Job violates accounting/QOS policy")
        job_id = str(next(self.ids))
        self.at_once[job_id] = int(at_once or len(indexes) or 1)
        names = [f"{job_id}_{index}" for index in indexes] or [job_id]
        self.put(names, "PENDING", "Resources", " ".join(words))
        if self.loses_answer:
            self.loses_answer = False
            raise KeyboardInterrupt
        return self._say(argv, out=f"{job_id}\n")

    def _scancel(self, argv):
        only = [word for word in argv if word.startswith("--state=")]
        names = [word for word in argv[1:] if not word.startswith("--")]
        for job_id, job in self.jobs.items():
            if not {job_id, job_id.partition("_")[0]} & set(names):
                continue
            if job[0] == "PENDING" or (job[0] == "RUNNING" and not only):
                job[:2] = ["CANCELLED", "None"]
        return self._say(argv)

    def _scontrol(self, argv):
        if argv[1] == "release":
            self.jobs[argv[2]][:2] = ["PENDING", "Resources"]
        throttle = [word.partition("=")[2] for word in argv if word.startswith("ArrayTaskThrottle")]
        if throttle:
            array = argv[2].partition("=")[2]
            self.at_once[array] = int(throttle[0])
            words = [job[0] for name, job in self.jobs.items() if name.startswith(f"{array}_")]
            if not {"PENDING", "RUNNING"}.issuperset(words):
                return self._say(argv, 1, err=f"{array}_[0-1]: Job has already finished\n")
        return self._say(argv, out=CONFIG if argv[1] == "show" else "")


def quick(seconds):
    """In place of sleep."""


def arrays(queue):
    """The indexes that sbatch was asked for."""
    return [word for call in queue.calls for word in call if word.startswith("--array=")]


def make_sweep(folder, count, *, parallelism=None, groups=1, scheduler="slurm", shared=()):
    layout = SweepLayout(Path(folder) / "runs" / "sweep-1")
    layout.submit.mkdir(parents=True, mode=0o700)
    write_sweep(
        layout,
        SweepRecord(
            "sweep-1", "sweep", 0.0, RUN, scheduler, "basic",
            ("ftslurm", "submit", "-m", "seed=0,1"), str(folder), parallelism, False,
        ),
    )  # fmt: skip
    for group in range(groups):
        layout.group_script(group).write_text("#!/bin/sh\n")
        layout.group_arguments(group).write_text(shlex.join(["--nodes=1"]))
    spec = to_dict(RunSpec())
    for number in range(count):
        run = layout.task(number)
        for path in (run.root, run.submit):
            path.mkdir(mode=0o700)
        record = {"schema_version": 1, "run_id": layout.task_id(number), "spec": spec}
        record |= {"scheduler": scheduler, "continue_by": "requeue"}
        write_json(run.run_json, record, durable=False)
        run.sbatch_command.write_text(f"sbatch --parsable --nodes=1 {run.script}\n")
    add_tasks(
        layout,
        [
            TaskRecord(number, layout.task_id(number), (*shared, f"seed={number}"), number % groups)
            for number in range(count)
        ],
    )
    return layout


def queued(layout, queue, numbers, array_id="70", word="RUNNING", reason="None"):
    """As a submitter leaves it that lived."""
    add_array(layout, ASKED, 0, numbers)
    array = add_array(layout, QUEUED, 0, numbers, array_id=array_id)
    for number in numbers:
        add_job(layout.task(number), array.job_id(number), scheduler="slurm", queued_by=BY_SUBMIT)
    queue.put([array.job_id(number) for number in numbers], word, reason)


def task_of(layout, job_id):
    """The number of the task whose job it is."""
    return next(
        task.number
        for task in read_tasks(layout)
        if job_id in [job.job_id for job in read_jobs(layout.task(task.number))]
    )


def train(layout, number, *, step=47, job_id=None):
    run = layout.task(number)
    attempt = claim(run, Attempt(0, job_id or f"70_{number}", 0, ["n1"], 0.0))
    write_progress(
        run.attempt(attempt.number), Progress(step=step, steps=100, committed_step=step // 10 * 10)
    )
    return run.attempt(attempt.number)


def decide(paths, action, reason=""):
    write_json(paths.decision_json, {"schema_version": 1, "action": action, "reason": reason})


def finish(layout, number, value=None):
    run = layout.task(number)
    decide(train(layout, number, step=100), "done", "all 100 steps are trained")
    if value is not None:
        write_json(run.root / "value.json", {"schema_version": 1, "value": value})
    write_json(run.done, {"schema_version": 1})
