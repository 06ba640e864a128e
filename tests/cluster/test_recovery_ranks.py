"""What ranks do wrong, on real Slurm: they hang, dawdle or die, and the first cause is named.

The ranks are torch-free. Runs go side by side, each driven to its end in a thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import pytest
from batch_runs import STEPS, Group, LabRun, lab_of_its_own
from fakes.project import slow as slow_steps
from lab import Lab, wait_until
from test_shared_fs import undisturbed_digest

from ftslurm.files import read_json
from ftslurm.run.attempts import read_progress

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEP_S = 0.1
STILL_S = 30
"""A machine may stand still for seconds, and its ranks' steps take longer; what was found is
printed, and the decided limits are held against a clock in test_hang.py, test_stragglers.py."""
KILL_WAIT_S = 60
"""Longer than any run takes to leave, however busy the machine."""
HANGS = {1: ("stopped", 2), 2: ("leaves out an exchange", 1)}
"""By attempt: what hangs the run, and who."""
WORK_S = 0.2
SLOW_SINCE = 12
DEATHS = {1: (signal.SIGKILL, 3), 2: (signal.SIGSEGV, 1)}
BUGGY = """
from tests.fakes import rank

class Buggy(rank.FakeTraining):
    def train_one_step(self):
        if self.step == 37 and self.env.rank == 1:
            raise KeyError("token 50257")
        return super().train_one_step()

rank.FakeTraining = Buggy
main = rank.main
"""


GREEDY = """
from tests.fakes import rank

class Greedy(rank.FakeTraining):
    def train_one_step(self):
        if self.step == 37 and self.env.rank == 1 and self.env.attempt == 1:
            self.hoard = b"x" * (600 << 20)
        return super().train_one_step()

rank.FakeTraining = Greedy
main = rank.main
"""


class WatchedRun(LabRun):
    """A run and what its agents have found."""

    named_at = 0
    """Step of a straggler when it was named."""

    def agents(self, attempt: int = 1) -> dict[str, Any]:
        path = self.run.layout.attempt(attempt).root / "agents.json"
        return read_json(path) if path.exists() else {}

    def findings(self, kind: str, attempt: int = 1) -> list[dict[str, Any]]:
        return [f for f in self.agents(attempt).get("findings", []) if f["kind"] == kind]

    def wait_for_finding(self, kind: str, *, timeout_s: float) -> dict[str, Any]:
        """What the agents say when they have found it: written then, and anew after 10 s."""

        def told() -> Optional[dict[str, Any]]:
            agents = self.agents()
            kinds = [finding["kind"] for finding in agents.get("findings", [])]
            return agents if kind in kinds else None

        return wait_until(
            told,
            timeout_s=timeout_s,
            seen=lambda: f"no {kind} in {self.agents()}\n{self.says()}",
        )

    def decision(self, attempt: int = 1) -> dict[str, Any]:
        return dict(read_json(self.run.layout.attempt(attempt).decision_json))

    def last_step_at(self, attempt: int = 1) -> float:
        progress = read_progress(self.run.layout.attempt(attempt))
        assert progress is not None
        return progress.written_at

    def rank_pid(self, rank: int) -> Optional[int]:
        for pid in self.rank_pids():
            try:
                with open(f"/proc/{pid}/environ", "rb") as environ:
                    if f"SLURM_PROCID={rank}".encode() in environ.read().split(b"\0"):
                        return pid
            except ProcessLookupError:
                continue
        return None


def hangs_twice(lab: Lab) -> WatchedRun:
    skip = "+user.skip={rank:1,step:50,attempt:2}"
    stop = "stop@step:rank=2:step=30:attempt=1"
    run = WatchedRun(lab, "hangs", skip, step_s=STEP_S, faults=stop)
    run.end_as("COMPLETED", timeout_s=200)
    return run


def holds_the_lock(lab: Lab) -> WatchedRun:
    hold = "hold@step:rank=2:step=30:attempt=1"
    run = WatchedRun(lab, "holds", step_s=STEP_S, faults=hold)
    run.end_as("COMPLETED", timeout_s=200)
    return run


def slow(lab: Lab) -> WatchedRun:
    """Rank 2 has four times the others' work from one step on."""
    plan = (
        f"slow@step:seconds={WORK_S};"
        f"slow@step:rank=2:attempt=1:since={SLOW_SINCE}:seconds={3 * WORK_S}"
    )
    # More steps than it may take until it is named.
    run = WatchedRun(lab, "slow", "steps=200", step_s=0, faults=plan)
    run.wait_for_training(1, timeout_s=200)  # other runs may be first
    run.named_at = run.wait_for_finding("straggler", timeout_s=120)["ranks"]["2"]["step"]
    run.ftslurm("stop", str(run.run.layout.root))
    run.end_as("COMPLETED")
    return run


def even(lab: Lab) -> WatchedRun:
    """Beside the others, which are its background load."""
    run = WatchedRun(lab, "even", "steps=500", step_s=0.03, faults="slow@step:seconds=0.005")
    run.end_as("COMPLETED", timeout_s=200)
    return run


def dies_twice(lab: Lab) -> WatchedRun:
    run = WatchedRun(lab, "dies", *slow_steps(len(DEATHS)), step_s=STEP_S)
    for attempt, (number, rank) in DEATHS.items():
        run.wait_for_training(attempt, timeout_s=200)
        pid = run.rank_pid(rank)
        assert pid is not None, run.says()
        os.kill(pid, number)
    run.end_as("COMPLETED", timeout_s=200)
    return run


def buggy(lab: Lab) -> WatchedRun:
    files = {"tests/fakes/buggy.py": BUGGY}
    run = WatchedRun(lab, "buggy", "entry=rank:tests.fakes.buggy:main", files=files)
    run.end_as("FAILED", timeout_s=200)
    return run


def does_not_begin(lab: Lab) -> WatchedRun:
    files = {"lost.py": "import no_such_package\n\n\ndef main(rank): ...\n"}
    run = WatchedRun(lab, "lost", "entry=rank:lost:main", files=files)
    run.end_as("FAILED", timeout_s=200)
    return run


@pytest.fixture(scope="module")
def runs(lab: Lab) -> Group[WatchedRun]:
    scenarios = {"hangs": hangs_twice, "dies": dies_twice, "slow": slow, "buggy": buggy}
    with lab.changed(kill_wait_s=KILL_WAIT_S):
        return Group(lab, scenarios)


@pytest.fixture(scope="module")
def more_runs(lab: Lab) -> Group[WatchedRun]:
    return Group(lab, {"holds": holds_the_lock, "even": even, "wrong import": does_not_begin})


def assert_hang(run: WatchedRun, attempt: int, culprit: int) -> None:
    (finding,) = run.findings("hang", attempt)
    after_s = finding["at"] - run.last_step_at(attempt)
    print(f"found {after_s:.2f} s after the last step: {finding['why']}")
    decision = run.decision(attempt)
    assert (decision["cause"], decision["action"]) == ("hang", "restart"), run.says()
    assert decision["blamed"]["rank"] == culprit and f"rank {culprit} " in finding["why"], decision
    stacks = run.run.layout.attempt(attempt).root / "evidence" / "stacks"
    texts = {path.name: path.read_text() for path in stacks.iterdir()}
    assert sorted(texts) == [f"rank-{rank:05d}.txt" for rank in range(4)]
    for text in texts.values():
        # The stopped one cannot tell its own; the kernel tells its state.
        assert "train_one_step" in text or "State: T (stopped)" in text, text
    assert after_s <= 3 * STEP_S + 10 + STILL_S


@pytest.mark.parametrize("attempt", HANGS, ids=lambda attempt: HANGS[attempt][0])
def test_a_hang_is_found_soon_and_the_culprit_is_named(
    runs: Group[WatchedRun], attempt: int
) -> None:
    assert_hang(runs["hangs"], attempt, HANGS[attempt][1])


@pytest.mark.full
def test_a_rank_that_holds_the_interpreter_lock_is_found_and_shows_its_stack(
    more_runs: Group[WatchedRun],
) -> None:
    assert_hang(more_runs["holds"], 1, 2)


def test_a_rank_four_times_slower_is_named_soon(runs: Group[WatchedRun]) -> None:
    run = runs["slow"]
    (finding,) = run.findings("straggler")
    print(f"slow since step {SLOW_SINCE}, named at {run.named_at}: {finding['why']}")
    assert finding["ranks"] == [2] and len(finding["nodes"]) == 1, finding
    assert run.named_at <= SLOW_SINCE + 10 + STILL_S / WORK_S / 4


@pytest.mark.full
def test_an_even_run_has_no_finding(more_runs: Group[WatchedRun]) -> None:
    assert more_runs["even"].agents()["findings"] == []


@pytest.mark.parametrize("attempt", DEATHS, ids=lambda attempt: DEATHS[attempt][0].name)
def test_a_rank_killed_from_outside_is_named_and_the_run_goes_on(
    runs: Group[WatchedRun], attempt: int
) -> None:
    run = runs["dies"]
    decision = run.decision(attempt)
    print(f"{decision['cause']} {decision['blamed']} {decision['reason']}")
    assert decision["action"] == "restart", run.says()
    assert decision["blamed"]["rank"] == DEATHS[attempt][1], decision


@pytest.mark.parametrize("name", ["hangs", "dies"])
def test_what_the_run_has_trained_is_bit_for_bit_as_if_nothing_had_happened(
    runs: Group[WatchedRun], name: str
) -> None:
    run = runs[name].run
    assert run.digest == undisturbed_digest()
    assert sorted(run.losses) == list(range(1, STEPS + 1))


def test_the_agents_do_not_delay_the_end_of_the_job(runs: Group[WatchedRun]) -> None:
    """They ignore TERM; Slurm alone would wait for KillWait."""
    run = runs["dies"]
    run.lab.wait_for_runs(run.job_id, ["COMPLETED"])
    (over,) = [r["End"] for r in run.lab.sacct_rows(run.job_id) if r["JobID"] == run.job_id]
    decided_at = run.decision(3)["decided_at"]
    after_s = datetime.fromisoformat(over).timestamp() - decided_at
    print(f"over {after_s:.1f} s after the decision")
    assert after_s < KILL_WAIT_S / 2


def test_a_bug_stops_the_run_after_one_confirmation(runs: Group[WatchedRun]) -> None:
    run = runs["buggy"]
    assert run.run.decisions() == ["restart", "stop"], run.says()
    assert [run.decision(n)["cause"] for n in (1, 2)] == ["code", "code"]
    assert "token 50257" in run.ftslurm("status", str(run.run.layout.root))


@pytest.mark.full
def test_a_wrong_import_stops_the_run_at_once(more_runs: Group[WatchedRun]) -> None:
    run = more_runs["wrong import"]
    assert run.run.decisions() == ["stop"] and run.decision()["cause"] == "code", run.says()
    assert "no_such_package" in run.decision()["reason"]


@pytest.fixture
def memory_lab() -> Iterator[Lab]:
    """A cluster that counts memory."""
    with lab_of_its_own("memory", "--memory-cgroup=on") as lab:
        yield lab


@pytest.mark.full
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").exists(), reason="no cgroup v1 here")
def test_a_rank_that_the_kernel_kills_for_its_memory_is_told_from_one_that_somebody_kills(
    memory_lab: Lab,
) -> None:
    files = {"tests/fakes/greedy.py": GREEDY}
    placed = ["entry=rank:tests.fakes.greedy:main", "cluster.mem=500M"]
    run = WatchedRun(memory_lab, "greedy", *placed, files=files)
    run.end_as("COMPLETED", timeout_s=100)
    decision = run.decision()
    print(f"{decision['cause']} {decision['blamed']} {decision['reason']}")
    assert (decision["cause"], decision["action"]) == ("oom_host", "restart"), run.says()
    # Not the blamed one: in a step with a kill, srun calls whoever ends first `Out Of Memory`.
    assert decision["first_failure"]["rank"] == 1, run.says()
