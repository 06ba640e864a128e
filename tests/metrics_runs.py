"""A run directory made by hand, for its metrics: what is told, and when, is the test's."""

import time

from checkpoints import make_step

from ftslurm.cli import main
from ftslurm.files import write_json
from ftslurm.replay.trace import TraceRow, TraceWriter
from ftslurm.run.attempts import Attempt, Progress, append_event, claim, write_progress
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, to_dict

STEP_S, TOKENS = 2.0, 100
"""Of a step."""


class MadeRun:
    """Its first attempt was claimed an hour ago."""

    def __init__(self, folder, **spec):
        self.layout = RunLayout(folder / "r1")
        self.layout.steps.mkdir(parents=True)
        record = {"schema_version": 1, "run_id": "r1", "scheduler": "local", "config_digest": "0"}
        write_json(self.layout.run_json, {**record, "spec": to_dict(RunSpec(steps=60, **spec))})
        self.begun_at = time.time() - 3600.0

    def attempt(self, at, *, restored=None, trained_to, stopped_at=None, loss=0.5):
        """`at`: seconds after the run began. Trains from then on; the last word is as old."""
        made = claim(
            self.layout, Attempt(0, "12", 0, ["n1", "n2"], claimed_at=self.begun_at + at)
        )  # fmt: skip
        self.event(made.number, "claimed", at)
        first = restored or 0
        if restored is not None:
            self.event(made.number, "restored", at + 5, step=restored, seconds=4.0)
        if trained_to > first:
            self.event(made.number, "first_step", at + 5 + STEP_S, step=first + 1)
        trace = TraceWriter(self.layout.trace_file(made.number))
        for step in range(first + 1, trained_to + 1):
            trace.append(TraceRow(step, loss, step, TOKENS * step, STEP_S))
        last_at = at + 5 + STEP_S * (trained_to - first) if stopped_at is None else stopped_at
        word = Progress(
            step=trained_to, steps=60, loss=0.5, tokens_per_s=50.0, restored_step=restored,
            phase="training", written_at=self.begun_at + last_at,
        )  # fmt: skip
        write_progress(self.layout.attempt(made.number), word)
        return made.number

    def event(self, attempt, kind, at, **facts):
        paths = self.layout.attempt(attempt)
        append_event(paths, kind, now=lambda: self.begun_at + at, **facts)

    def commit(self, attempt, step, at, *, seconds, size=1000):
        make_step(self.layout, step, attempt=attempt)
        self.event(attempt, "committed", at, step=step, seconds=seconds, bytes=size)

    def decide(self, attempt, at, *, action="restart", cause="code"):
        self.event(attempt, "ranks_ended", at, rc=1)
        self.event(attempt, "decided", at + 1, action=action, cause=cause)
        record = {"schema_version": 1, "action": action, "cause": cause, "reason": "because",
                  "decided_at": self.begun_at + at + 1}  # fmt: skip
        write_json(self.layout.attempt(attempt).decision_json, record)


def eventful(folder):
    """Two saves of 3 and 5 s; a failure at step 25 that is found after 6 s; back to 20 (one of its
    three saves fails), to 40."""
    run = MadeRun(folder)
    run.attempt(0, trained_to=25)
    run.commit(1, 10, 26, seconds=3.0)
    run.commit(1, 20, 48, seconds=5.0, size=2000)
    run.decide(1, 61)
    run.attempt(70, restored=20, trained_to=40)
    run.event(2, "fell_back", 75, step=20, adopted=22, vanished=[22])
    run.event(2, "save_failed", 96, step=30, rank=0, reason="full", in_a_row=1)
    run.event(2, "save_skipped", 97, step=31)
    (run.layout.steps / "step-000000000030.tmp-0002").mkdir()
    (run.layout.steps / "step-000000000025.tmp-0001").mkdir()
    return run


def read_samples(text):
    """Labels (without run_id) and value of each series of a text, by name."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: word for key, word in sample.labels.items() if key != "run_id"}
            found.setdefault(sample.name.removeprefix("ftslurm_"), []).append(
                (labels, sample.value)
            )
    return found


def shown(capsys, *words):
    """What `ftslurm metrics` prints."""
    capsys.readouterr()
    assert main(["metrics", *map(str, words)]) == 0
    return capsys.readouterr().out


def only(samples, name):
    """The value of a metric that has one series; None where it has none."""
    if name not in samples:
        return None
    ((_, value),) = samples[name]
    return value
