"""The torch-free rank with the answer of a real one to a disk that fails: saves and accounts may
fail, the training goes on.

`spec.user`: `beacon` names a file, on another disk, that rank 0 keeps up to date with what a person
could not read from the run while its disk is full: step, failed saves, newest committed step, pid.
"""

import json
import os
import sys
import time
from pathlib import Path

from ftslurm.checkpoint.records import IndexEntry, Parent
from ftslurm.errors import RANK_FAILED, RANK_NEVER_RETRY, CheckpointError, FtslurmError, RunError
from ftslurm.run.rank import RankEnvironment, stop_flag, write_rank_error
from ftslurm.train.progress import Recorder
from ftslurm.train.setbacks import Setbacks
from tests.fakes.rank import FakeTraining

RETRY_S = 0.2


class Account:
    """Takes the place of the trace: rank 0's whole account goes through the real Recorder."""

    def __init__(self, training):
        self._training = training

    def append(self, row):
        self._training.recorder.step(
            row.step,
            loss=row.loss,
            samples=row.samples,
            tokens=row.tokens,
            values={},
            committed_step=self._training.committed and self._training.committed.step,
            failed_saves=self._training.setbacks.total,
        )
        self._training.show()

    def close(self):
        self._training.recorder.close()


class StorageTraining(FakeTraining):
    def __init__(self, env):
        self.recorder = None
        if env.rank == 0:
            self.recorder = Recorder(
                env.layout, attempt=env.attempt, steps=0, log_interval_steps=9999
            )
        self.setbacks = Setbacks()
        super().__init__(env)
        self.trace = Account(self) if env.rank == 0 else None

    def save(self):
        """False, on all ranks, when it failed; RunError after too many that count."""
        if self.committed is not None and self.committed.step == self.step:
            return True
        failures = self.try_to_save()
        if not failures:
            self.setbacks.committed()
            return True
        # What is closed to one rank of these tests is closed to all.
        self.setbacks.failed([failure["errno"] for failure in failures], of_all=True)
        self.event("save_failed", step=self.step, reason=failures[0]["reason"])
        if self.setbacks.against_attempt > self.spec.checkpoint.max_failed_saves:
            raise RunError(f"saves have failed: {failures[0]['reason']}")
        return False

    def try_to_save(self):
        opened = self.peers.exchange(guarded(self.open_folder) if self.env.rank == 0 else None)[0]
        if "errno" in opened:
            return [opened]
        folder = type(self.env.run_dir)(opened["value"])
        written = self.peers.exchange(guarded(lambda: self.write(folder)))
        failures = [answer for answer in written if "errno" in answer]
        if not failures and self.env.rank == 0:
            entries = [IndexEntry(**answer["value"]) for answer in written]
            failures = [guarded(lambda: self.publish(folder, entries))]
        if any("errno" in failure for failure in failures) and self.env.rank == 0:
            guarded(lambda: self.store.discard_temporary(folder))
        failures = [f for f in self.peers.exchange(failures)[0] if "errno" in f]
        parent = self.peers.exchange(self.committed and vars(self.committed))[0]
        self.committed = parent and Parent(**parent)
        return failures

    def open_folder(self):
        return str(self.store.create_temporary(self.step, self.env.attempt))

    def finish(self):
        while not self.save():
            time.sleep(RETRY_S)
        return super().finish()

    def event(self, kind, **facts):
        if self.recorder:
            self.recorder.event(kind, facts)

    def progress(self, phase, loss=None):
        if self.recorder and loss is None:
            self.recorder.enter(phase, step=self.step, restored_step=self.restored_step)

    def show(self):
        told = {
            "step": self.step,
            "failed": self.setbacks.total,
            "committed": self.committed.step if self.committed else None,
            "attempt": self.env.attempt,
            "pid": os.getpid(),
        }
        place = self.spec.user["beacon"]
        with open(f"{place}.new", "w") as stream:
            json.dump(told, stream)
        Path(f"{place}.new").replace(place)


def guarded(work):
    """{"value": ...}, or why there is none."""
    try:
        return {"value": work()}
    except (OSError, FtslurmError) as error:
        return {"reason": str(error), "errno": errno_of(error)}


def errno_of(error):
    cause = error if isinstance(error, OSError) else error.__cause__
    return getattr(cause, "errno", None)


def main():
    stop_flag.install()
    env = RankEnvironment.read()
    training = None
    try:
        training = StorageTraining(env)
        return training.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends this rank, on record
        is_final = isinstance(error, CheckpointError) and errno_of(error) is None
        try:
            write_rank_error(env, error, step=training.step if training else None)
        finally:
            print(f"rank {env.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(RANK_NEVER_RETRY if is_final else RANK_FAILED)
