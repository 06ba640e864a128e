"""A person's project folder with the torch-free rank as its code, and what its runs have left."""

import json
import shutil
from pathlib import Path

from ftslurm.files import read_json
from ftslurm.replay.trace import count_trained, read_trace
from ftslurm.run.layout import RunLayout

RANK = Path(__file__).resolve().parent / "rank.py"
ENTRY = "rank:tests.fakes.rank:main"


def make_project(folder):
    target = folder / "tests" / "fakes" / "rank.py"
    target.parent.mkdir(parents=True)
    shutil.copyfile(RANK, target)
    return folder


def overrides(*, steps, interval, step_s, more=()):
    return [
        f"entry={ENTRY}",
        f"steps={steps}",
        f"checkpoint.interval_steps={interval}",
        f"+user.step_s={step_s}",
        "recovery.backoff_s=0",
        *more,
    ]


def slow(attempts=1, seconds=1.0):
    """More overrides: none of the first attempts is done before somebody has acted on it, however
    busy the machine is."""
    return [f"+user.slow_attempts={attempts}", f"+user.slow_step_s={seconds}"]


def slow_while(path, *, since, seconds=1.0):
    """In every attempt, from the step `since` on, as long as there is the file."""
    return [f"+user.slow_while={path}", f"+user.slow_from={since}", f"+user.slow_step_s={seconds}"]


class Run:
    """What a finished or running run has left, as a test asks for it."""

    def __init__(self, root):
        self.layout = RunLayout(Path(root))

    @property
    def digest(self):
        return read_json(self.layout.done)["parameter_digest"]

    @property
    def losses(self):
        return {step: row.loss.hex() for step, row in read_trace(self.layout).items()}

    @property
    def steps_trained_twice(self):
        return sum(count - 1 for count in count_trained(self.layout).values())

    def decisions(self):
        paths = sorted(self.layout.attempts.glob("*/decision.json"))
        return [json.loads(path.read_text())["action"] for path in paths]

    def says(self):
        """All that helps to see why a run did not do what a test expects."""
        paths = [
            *self.layout.submit.glob("*.out"),
            *self.layout.submit.glob("*.err"),
            *self.layout.submit.glob("*.log"),
            *self.layout.attempts.glob("*/decision.json"),
            *self.layout.attempts.glob("*/logs/*"),
        ]
        return "\n".join(f"--- {path}\n{path.read_text()[-1500:]}" for path in sorted(paths))
