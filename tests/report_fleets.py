"""Fleets of jobs as ordinary clusters have them, without a sick node unless one is asked for.

Users differ in how often their programs fail, scripts begin broken and break again for a stretch,
the same script is tried again and again on the node that is free first, partitions differ, jobs
have one node or many, last minutes or days, and nodes fail now and then for no reason of their own.
"""

import random

from ftslurm.diagnosis import causes
from ftslurm.report.fleet import Fleet
from ftslurm.report.jobs import AttemptReport, JobReport
from ftslurm.scheduler.hostlist import expand

PARTITIONS = {"debug": 4, "gpu": 30, "old": 10}
DAY_S = 86_400.0


def job(number, user, name, partition, nodes, *, cause=None, node=None, at=0.0, hours=1.0):
    one = AttemptReport(
        state="FAILED" if cause else "COMPLETED", cause=cause, sentence="", start_at=at,
        end_at=at + 3600.0 * hours, wait_s=0.0, elapsed_s=3600.0 * hours, num_nodes=len(nodes),
        gpus=8 * len(nodes), nodes=",".join(nodes), node=node,
    )  # fmt: skip
    state = "failed" if cause else "completed"
    return JobReport(str(number), name, user, "lab", partition, state, [one])


class Script:
    """One of a user's: broken until it is mended, and again after some changes."""

    def __init__(self, source, user, name):
        self.user, self.name, self.source = user, name, source
        self.partition = source.choices(list(PARTITIONS), [2, 6, 2])[0]
        self.nodes = min(source.choice([1, 1, 1, 1, 2, 4, 8]), PARTITIONS[self.partition])
        self.hours = source.choice([0.05, 0.5, 5.0, 50.0])
        self.rate = source.betavariate(0.5, 5.0)
        self.broken = source.choice([0, 0, 1, 3, 8])

    def fails(self):
        if not self.broken and self.source.random() < 0.03:
            self.broken = self.source.choice([1, 2, 5])
        self.broken -= bool(self.broken)
        return bool(self.broken) or self.source.random() < self.rate


def ordinary_fleet(seed, *, jobs=800, sick=None):
    """`sick`: node -> how often it breaks what is on it."""
    source = random.Random(seed)
    scripts = [
        Script(source, f"u{user}", f"{what}-{user}")
        for user in range(25)
        for what in source.sample(["train", "eval", "sweep", "prep"], source.randint(1, 4))
    ]
    weights = [source.paretovariate(1.0) for _ in scripts]
    busy = {p: [0.0] * count for p, count in PARTITIONS.items()}
    fleet, now = Fleet(), 0.0
    for number in range(jobs):
        now += source.expovariate(jobs / (20 * DAY_S))
        script = source.choices(scripts, weights)[0]
        until = busy[script.partition]
        # The first that are free, as Slurm takes them.
        places = sorted(range(len(until)), key=lambda i: (max(until[i], now), i))[: script.nodes]
        begin = max(now, *(until[i] for i in places))
        nodes = [f"{script.partition}{i}" for i in places]
        hours, cause, blamed = script.hours, None, None
        struck = [node for node in nodes if source.random() < (sick or {}).get(node, 0.0)]
        if source.random() < 0.0002 * hours * len(nodes):
            cause, blamed = causes.NODE, source.choice(nodes)
        elif script.fails() or struck:
            cause, hours = causes.CODE, hours * source.random() ** 3
        for i in places:
            until[i] = begin + 3600.0 * hours
        name = f"{script.name}-{number}"
        fleet.add(
            job(number, script.user, name, script.partition, nodes, cause=cause, node=blamed,
                at=begin, hours=hours),
            expand=expand,
        )  # fmt: skip
    return fleet
