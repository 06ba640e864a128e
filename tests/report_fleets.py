"""Fleets of jobs as ordinary clusters have them, without a sick node unless one is asked for.

Users differ in how often their programs fail, scripts begin broken and break again for a stretch,
or fail every other time for one, the same script is tried again and again on the node that is free
first, partitions differ, jobs have one node or many, last minutes or days, nodes fail now and then
for no reason of their own, and every week the shared storage is away for an hour, which no job
survives.
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

    def __init__(self, source, user, name, partitions):
        self.user, self.name, self.source = user, name, source
        weights = [max(2, count // 5) for count in partitions.values()]
        self.partition = source.choices(list(partitions), weights)[0]
        self.nodes = min(source.choice([1, 1, 1, 1, 2, 4, 8]), partitions[self.partition])
        self.hours = source.choice([0.05, 0.5, 5.0, 50.0])
        self.rate = source.betavariate(0.5, 5.0)
        self.broken = source.choice([0, 0, 1, 3, 8])
        self.flaky = 0

    def fails(self):
        if not self.broken and self.source.random() < 0.03:
            self.broken = self.source.choice([1, 2, 5])
        if not self.flaky and self.source.random() < 0.02:
            self.flaky = 20
        self.broken -= bool(self.broken)
        self.flaky -= bool(self.flaky)
        rate = max(self.rate, 0.5 if self.flaky else 0.0)
        return bool(self.broken) or self.source.random() < rate


def cut_off_after(begin, hours):
    """Hours after which a job is ended by the storage; None: it is not."""
    away = (begin // (7 * DAY_S) + 1) * 7 * DAY_S
    return (away - begin) / 3600.0 if begin + 3600.0 * hours > away else None


def ordinary_jobs(seed, *, jobs=800, sick=None, days=20, begin_at=0.0, partitions=None):
    """`sick`: node -> how often it breaks what is on it. `partitions`: name -> nodes."""
    source, partitions = random.Random(seed), partitions or PARTITIONS
    scripts = [
        Script(source, f"u{user}", f"{what}-{user}", partitions)
        for user in range(25)
        for what in source.sample(["train", "eval", "sweep", "prep"], source.randint(1, 4))
    ]
    weights = [source.paretovariate(1.0) for _ in scripts]
    busy = {p: [begin_at] * count for p, count in partitions.items()}
    now = begin_at
    for number in range(jobs):
        now += source.expovariate(jobs / (days * DAY_S))
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
        cut_off = cut_off_after(begin, hours)
        if cut_off is not None:
            cause, blamed, hours = causes.UNKNOWN, None, cut_off
        for i in places:
            until[i] = begin + 3600.0 * hours
        name = f"{script.name}-{number}"
        yield job(number, script.user, name, script.partition, nodes, cause=cause, node=blamed,
                  at=begin, hours=hours)  # fmt: skip


def ordinary_fleet(seed, **values):
    fleet = Fleet()
    for one in ordinary_jobs(seed, **values):
        fleet.add(one, expand=expand)
    return fleet


ENDS = {
    causes.PREEMPTED: (6, "preempted"), causes.TIME_LIMIT: (3, "its time limit was up"),
    causes.NODE: (2, "a node failed"), causes.GPU: (1, "gpu3: Xid 79, fallen off the bus"),
    causes.NETWORK_TRANSIENT: (1, "rank 5 lost rank 12"), causes.HANG: (1, "no step for 300 s"),
    causes.OOM_GPU: (1, "CUDA out of memory on rank 3"), causes.CODE: (1, "ValueError: bad shape"),
    causes.STORAGE: (1, "EIO of a shard"),
}  # fmt: skip
"""Cause -> how often, against the others; what is said."""


def long_runs(seed, *, runs=8, days=20, begin_at=0.0, nodes=None):
    """Runs with records of their own, many attempts each."""
    source = random.Random(seed)
    names = nodes or [f"gpu{i}" for i in range(PARTITIONS["gpu"])]
    for number in range(runs):
        now = begin_at + source.random() * days * DAY_S / 3
        until = begin_at + days * DAY_S * (0.6 + 0.4 * source.random())
        attempts, step = [], 0
        while now < until:
            took_s = min(until - now, 3600.0 * source.expovariate(1 / 30.0))
            cause = source.choices(list(ENDS), [often for often, _ in ENDS.values()])[0]
            placed = source.sample(names, min(8, len(names)))
            is_last = now + took_s >= until
            lost = 0 if is_last else source.randint(0, 200)
            attempts.append(
                AttemptReport(
                    state="finished" if is_last else "failed",
                    cause=None if is_last else cause,
                    sentence="" if is_last else ENDS[cause][1],
                    start_at=now,
                    end_at=now + took_s,
                    wait_s=600.0,
                    elapsed_s=took_s,
                    num_nodes=len(placed),
                    gpus=8 * len(placed),
                    nodes=",".join(placed),
                    number=len(attempts) + 1,
                    steps_lost=lost,
                    node=placed[0] if cause in (causes.NODE, causes.GPU) and not is_last else None,
                    lost_s=2.0 * lost,
                    committed_step=step,
                    is_requeued=not is_last,
                )  # fmt: skip
            )
            step += int(took_s / 2.0) - lost
            now += took_s + 900.0 * source.random()
        yield JobReport(
            f"9{number:03}", f"gpt-{7 * (number + 1)}b-pretrain", f"u{number % 5}", "lab", "gpu",
            "completed", attempts, run_dir=f"runs/gpt-{number}", committed_step=step,
            last_step=step, step_s=2.0,
        )  # fmt: skip
