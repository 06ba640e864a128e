"""Each cause that a report knows, brought about on real Slurm in as few jobs as show it.

What a rank can say or do is said or done in attempt after attempt of one job; what a node, the time
or the site does has a job of its own. All of them run side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from health_site import HealthSite
from lab import wait_until
from report_faults import PATIENCE_S, SLOW, Foreign, ToldRun
from report_ledger import Ledger, stamp_at
from report_told import begin, new_folder, report

from ftslurm.run.attempts import read_attempt

INTERVAL, STEPS = 10, 70
SAID = {
    1: (13, 1, "RuntimeError", "NCCL error: remote process exited or there was a network error, "
        "NET/IB : Got completion from peer 10.0.0.2 with status=12 opcode=0 len=0 vendor err 129"),
    2: (23, 0, "OSError", "[Errno 116] Stale file handle: '/lustre/tokens/shard-7'"),
    3: (33, 1, "DataError", "shard 7 of the token store is damaged"),
    4: (43, 0, "NumericError", "the loss of step 44 is nan"),
    5: (57, 1, "spoils newest", ""),
    6: (63, 0, "OSError", "[Errno 28] No space left on device"),
}  # fmt: skip
"""By attempt: steps done, rank, what it raises; or what it does to the checkpoints before it is
killed."""
RUINED = {1: (17, 1, "spoils all", "")}
GPU = {1: (17, 1, "RuntimeError", "CUDA error: uncorrectable ECC error encountered")}
SAYS = {"said": SAID, "ruined": RUINED, "sick": GPU}
CAUSES = {
    "said": ["network_transient", "storage", "data", "numeric", "unknown", "capacity", None],
    "ruined": ["unknown", "checkpoint"],  # who killed it nobody can know
    "sick": ["gpu", None],
    "slow": ["straggler", None],
    "late": ["time_limit", None],
}
"""Of each attempt; None: nothing has failed."""
LOST = {
    "said": [3, 3, 3, 13, 17, 3, 0],  # back behind the newest save: two of them, which is not whole
    "ruined": [17, 0],
    "sick": [7, 0],
    "slow": [0, 0],
    "late": [0, 0],
}
"""Steps behind the save that the next attempt had left."""
WAY = "Xid 48"
"""What the node's own hardware says when a rank reports its GPU."""
WORK_S, SLOW_SINCE, SLOW_RANK = 0.2, 12, 1
LIMIT_S, ENOUGH_S = 60, 40
"""The shortest limit that Slurm has, and what a run is left of it at least."""

SPOKEN = f"""
import builtins
import os
import signal
import time

from ftslurm import errors
from tests.fakes import rank, timed

SAYS = {SAYS}


def train_one_step(self):
    of = SAYS.get(self.spec.user.get("says"), {{}}).get(self.env.attempt)
    if of is None or of[:2] != (self.step, self.env.rank):
        return train(self)
    what, text = of[2:]
    layout = self.env.layout
    timed.wait_for_word(self)
    while self.spec.user["says"] == "sick" and not (layout.root / "is-sick").exists():
        time.sleep(0.05)
    timed.note(self.env, "injected")
    if what.startswith("spoils"):
        steps = sorted(layout.steps.glob("step-*"))
        for step in steps if what == "spoils all" else steps[-1:]:
            for index in step.glob("index-*.json"):
                index.write_bytes(bytes(index.stat().st_size))
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "NumericError":
        raise errors.NumericError(text, step=self.step + 1, value=float("nan"))
    raise (getattr(errors, what, None) or getattr(builtins, what))(text)


train, rank.FakeTraining.train_one_step = rank.FakeTraining.train_one_step, train_one_step
main = rank.main
"""


class Causes:
    """All of it, done; `since`: as `report` takes it."""

    def __init__(self, site: HealthSite) -> None:
        self.site, self.lab = site, site.lab
        site.renew()
        site.run_in_slurm("prolog", "epilog")
        self.since = begin(self.lab)
        self.folder = new_folder(self.lab)
        self.ledger = Ledger(self.lab)
        self.foreign: dict[str, Foreign] = {}
        self.is_elsewhere = threading.Event()
        scenarios: dict[str, Callable[[], ToldRun]] = {
            "said": self._says_all, "ruined": self._is_ruined, "sick": self._falls_sick,
            "slow": self._is_slow, "late": self._is_late,
        }  # fmt: skip
        with self.ledger, ThreadPoolExecutor(max_workers=len(scenarios)) as pool:
            runs = {name: pool.submit(scenario) for name, scenario in scenarios.items()}
            # Beside `late`, and for as long.
            late = Foreign(self.lab, "late", "sleep 300", f"--time={LIMIT_S // 60}")
            self.run = {name: future.result() for name, future in runs.items()}
            assert self.lab.wait_for_end(late.job_id, PATIENCE_S) == "TIMEOUT"
            self.foreign["foreign late"] = late

    def _new(self, name: str, *more: str, nodes: int = 1, faults: str = "") -> ToldRun:
        given = [f"cluster.nodes={nodes}", f"+user.says={name}", f"steps={STEPS}",
                 f"checkpoint.interval_steps={INTERVAL}", "health.probe=never", *more]  # fmt: skip
        return ToldRun(self.lab, name, self.folder / "runs", *given, faults=faults,
                       entry="spoken", files={"tests/fakes/spoken.py": SPOKEN})  # fmt: skip

    def _says_all(self) -> ToldRun:
        run = self._new("said")
        assert run.end() == "COMPLETED", run.says()
        return run

    def _is_ruined(self) -> ToldRun:
        run = self._new("ruined")
        assert run.end() == "FAILED", run.says()
        return run

    def _falls_sick(self) -> ToldRun:
        """A rank says it, the run leaves, and the epilog finds the cause and drains the node."""
        # A rank is silent until its node is sick.
        run = self._new("sick", f"recovery.hang_floor_s={PATIENCE_S}")
        run.wait_for_training(1, timeout_s=PATIENCE_S)
        self.sick_node = self.lab.show_job(run.job_id)["NodeList"]
        self.fell_sick_at = time.time()
        self.site.nodes[self.sick_node].fall_sick(WAY)
        (run.run.layout.root / "is-sick").touch()
        wait_until(lambda: self.site.drained() or None, timeout_s=PATIENCE_S, seen=self.site.says)
        assert list(self.site.drained()) == [self.sick_node]
        # In accounting it begins later than its reason is there (22.05: seen): once nobody is left.
        self.lab.wait_for_nodes("drained", [self.sick_node], timeout_s=PATIENCE_S)
        self.seen_drained_at = time.time()
        self.lab.hasten(run.job_id, timeout_s=PATIENCE_S)
        run.wait_for_training(2, timeout_s=PATIENCE_S)
        self.is_elsewhere.set()
        assert run.end() == "COMPLETED", run.says()
        back = ["scontrol", "update", f"NodeName={self.sick_node}", "State=RESUME"]
        self.resumed_from = time.time()
        self.lab.run_as_root(*back)
        self.resumed_at = time.time()
        return run

    def _is_slow(self) -> ToldRun:
        """One of two nodes has four times the other's work, and a spare takes its place."""
        plan = (
            f"slow@step:seconds={WORK_S};"
            f"slow@step:rank={SLOW_RANK}:attempt=1:since={SLOW_SINCE}:seconds={3 * WORK_S}"
        )
        given = ["cluster.spares=1", "cluster.tasks_per_node=1", "recovery.evict=now"]
        # It takes three of four nodes, one of which is drained meanwhile.
        assert self.is_elsewhere.wait(2 * PATIENCE_S)
        run = self._new("slow", *given, nodes=2, faults=plan)
        assert run.end() == "COMPLETED", run.says()
        self.slow_node = read_attempt(run.run.layout, 1).nodes[SLOW_RANK]
        return run

    def _is_late(self) -> ToldRun:
        """root shortens the limit of a run, which hears of it in time."""
        run = self._new("late", "cluster.time=00:10:00", "steps=200", faults=SLOW)
        run.wait_for_training(1, timeout_s=PATIENCE_S)
        spent_s = time.time() - stamp_at(self.lab.show_job(run.job_id)["StartTime"])
        self._limit(run, 1 + int((spent_s + ENOUGH_S) // LIMIT_S))
        self.lab.wait_for_state(run.job_id, ["PENDING"], PATIENCE_S)
        self._limit(run, 10)
        self.lab.hasten(run.job_id)
        assert run.end() == "COMPLETED", run.says()
        return run

    def _limit(self, run: ToldRun, minutes: int) -> None:
        self.lab.run_as_root("scontrol", "update", f"JobId={run.job_id}", f"TimeLimit={minutes}")

    def report(self, *words: str) -> dict[str, Any]:
        return report(self.lab, self.folder, "--since", self.since, *words)
