"""Ranks without torch whose program has a bug; what it is is in `spec.user`.

`bug_step`: rank 1 raises when it has trained that step. `nan_step`: the loss of that step is NaN on
every rank, looked at as a Session does; `nan_batch`: that of the step that trains this batch.
"""

import sys

from ftslurm.run.skipped import batch_of_step, read_skips, skipped_batches
from ftslurm.train.numeric import LossWatch
from tests.fakes import rank


class FailingTraining(rank.FakeTraining):
    def train_one_step(self):
        told = super().train_one_step()
        user = self.spec.user
        if self.env.rank == 1 and self.step == user.get("bug_step"):
            raise ValueError(f"the bug of step {self.step}, object at {hex(id(self))}")
        batch = batch_of_step(self.step, skipped_batches(read_skips(self.env.layout)))
        is_bad = self.step == user.get("nan_step") or batch == user.get("nan_batch")
        LossWatch(self.spec.recovery).check(self.step, float("nan") if is_bad else 1.0)
        return told


def main():
    rank.FakeTraining = FailingTraining
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
