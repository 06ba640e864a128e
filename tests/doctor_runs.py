"""Run directories made by hand, for what doctor reads in them: each fact is the test's."""

import json

from checkpoints import make_step

from ftslurm.files import write_json
from ftslurm.replay.trace import TraceRow, TraceWriter
from ftslurm.run.attempts import (
    STOPPED,
    Attempt,
    Outcome,
    append_event,
    claim,
    write_outcome,
)
from ftslurm.run.jobs import BY_SUBMIT, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, to_dict

BEGAN = 1_796_000_000.0
SITE = {"scheduler": "slurm", "version": "24.11.5", "kill_wait_s": 30, "job_requeue": True,
        "send_user_signal": False}  # fmt: skip


class OldRun:
    """Submitted at BEGAN, to two nodes of one rank each."""

    def __init__(self, runs, name="old", *, spec=None, deadline_s=60.0):
        self.layout = RunLayout(runs / name)
        self.layout.steps.mkdir(parents=True)
        self.layout.submit.mkdir()
        spec = spec or RunSpec()
        record = {
            "schema_version": 1, "run_id": name, "scheduler": "slurm", "site": SITE,
            "emergency_deadline_s": deadline_s, "spec": to_dict(spec),
        }  # fmt: skip
        write_json(self.layout.run_json, record)
        add_job(self.layout, "7", scheduler="slurm", queued_by=BY_SUBMIT, now=lambda: BEGAN)

    def event(self, attempt, kind, at, **facts):
        append_event(self.layout.attempt(attempt), kind, now=lambda: BEGAN + at, **facts)

    def attempt(
        self, at, *, steps, restored=None, saved_by=2, ranks=2, loss=0.5, tokens=100,
        nodes=("n1", "n2"),
    ):  # fmt: skip
        """Trains `steps`, a range of their numbers, a second each."""
        made = claim(
            self.layout,
            Attempt(0, "7", 0, list(nodes), claimed_at=BEGAN + at, tasks_per_node=1,
                    world_size=ranks),
        )  # fmt: skip
        self.event(made.number, "claimed", at)
        if restored is not None:
            self.event(made.number, "restored", at + 2, step=restored, saved_world_size=saved_by,
                       seconds=1.5)  # fmt: skip
        self.event(made.number, "first_step", at + 3, step=steps[0])
        trace = TraceWriter(self.layout.trace_file(made.number))
        for step in steps:
            trace.append(TraceRow(step, loss * step, 8 * step, tokens * step, 1.0))
        return made.number

    def save(self, attempt, step, at, *, seconds=4.0):
        make_step(self.layout, step, attempt=attempt, run_id=self.layout.root.name)
        self.event(attempt, "committed", at, step=step, seconds=seconds, bytes=1000)

    def decide(self, attempt, at, cause, *, action="restart", reason="because", exclude=(), **more):
        self.event(attempt, "ranks_ended", at, rc=1)
        self.event(attempt, "decided", at + 1, action=action, cause=cause)
        record = {"schema_version": 1, "action": action, "cause": cause, "reason": reason,
                  "decided_at": BEGAN + at + 1, "exclude": list(exclude), **more}  # fmt: skip
        write_json(self.layout.attempt(attempt).decision_json, record)

    def leave(self, attempt, step, at, *, committed):
        """A signal asked for it at `step`; `committed`: the newest step that was in time."""
        self.event(attempt, "signal", at, signal="USR1", step=step)
        outcome = Outcome(STOPPED, step, committed, signal="USR1", written_at=BEGAN + at + 50)
        write_outcome(self.layout.attempt(attempt), outcome)

    def rank_error(self, attempt, rank, at):
        record = {"schema_version": 1, "rank": rank, "node": "n2", "type": "Killed", "step": 30,
                  "message": "by somebody", "at": BEGAN + at, "traceback": []}  # fmt: skip
        write_json(self.layout.attempt(attempt).ranks / f"rank-{rank:05d}.json", record)

    def finding(self, attempt, kind, at):
        found = [{"kind": kind, "why": "it does not answer", "since": BEGAN + at - 1,
                  "at": BEGAN + at, "nodes": ["n2"], "ranks": [1]}]  # fmt: skip
        path = self.layout.attempt(attempt).root / "agents.json"
        path.write_text(json.dumps({"findings": found}))


def practised(runs):
    """All that the checklist asks for has happened to it."""
    run = OldRun(runs)
    run.attempt(30, steps=range(1, 26))
    run.save(1, 10, 45)
    run.save(1, 20, 56)
    run.decide(1, 60, "preempted", action="requeued")
    run.attempt(100, steps=range(21, 31), restored=20)
    run.rank_error(2, 1, 115)
    run.decide(2, 120, "unknown", reason="rank 1 was killed from outside",
               first_failure={"rank": 1, "node": "n2", "error": "killed"})  # fmt: skip
    run.attempt(130, steps=range(21, 31), restored=20)
    run.event(3, "rejected", 131, step=22, reason="a shard has another digest")
    run.event(3, "fell_back", 131, step=20, adopted=22, vanished=[])
    run.finding(3, "node_lost", 150)
    run.decide(3, 152, "node", exclude=["n2"])
    run.attempt(170, steps=range(21, 31), restored=20, saved_by=2, ranks=1)
    run.decide(4, 190, "network_transient")
    run.attempt(200, steps=range(21, 31), restored=20)
    run.decide(5, 220, "code", action="stop", reason="ValueError in the loop")
    return run
