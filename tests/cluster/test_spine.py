"""The promise itself, on real Slurm with real torch: whatever happens, the same bits.

Every run here is 2 nodes x 2 ranks of an ordinary user, held against an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lab import Lab
from spine import STEPS, Run, ftslurm, submit

from ftslurm.run.attempts import FINISHED, STOPPED

pytestmark = [pytest.mark.cluster, pytest.mark.torch, pytest.mark.timeout(600)]

Baseline = Callable[[str], Run]


@pytest.fixture(scope="module")
def baseline(lab: Lab) -> Baseline:
    """An undisturbed run of each strategy, made when it is first asked for."""
    runs: dict[str, Run] = {}

    def of(strategy: str) -> Run:
        if strategy not in runs:
            runs[strategy] = submit(lab, f"parallel={strategy}", name=f"base-{strategy}")
            runs[strategy].finish()
        return runs[strategy]

    return of


def assert_same_bits(run: Run, undisturbed: Run) -> None:
    assert sorted(run.losses) == list(range(1, STEPS + 1)), run.story()
    differing = [step for step, loss in run.losses.items() if loss != undisturbed.losses[step]]
    assert not differing, f"losses differ from step {differing[0]} on\n{run.story()}"
    assert run.parameter_digest == undisturbed.parameter_digest


def test_two_undisturbed_runs_are_equal_bit_for_bit(lab: Lab, baseline: Baseline) -> None:
    again = submit(lab, "parallel=ddp", name="again-ddp")
    again.finish()
    assert_same_bits(again, baseline("ddp"))
    assert again.trained_twice() == 0
    assert len(set(again.losses.values())) > STEPS // 2, "the loss hardly moves: nothing is trained"


@pytest.mark.parametrize(
    ("strategy", "send_user_signal"),
    [("ddp", False), ("fsdp", True)],
    ids=["ddp-TERM", "fsdp-USR1"],
)
def test_a_run_preempted_twice_ends_with_the_same_bits(
    lab: Lab, baseline: Baseline, strategy: str, send_user_signal: bool
) -> None:
    undisturbed = baseline(strategy)
    lab.set_send_user_signal(send_user_signal)
    run = submit(lab, f"parallel={strategy}", name=f"twice-{strategy}")
    run.wait_for_step(1, 7)
    run.preempt()
    run.wait_for_step(2, run.trained(1)[-1] + 3)
    run.preempt()
    run.finish()

    assert_same_bits(run, undisturbed)
    first, second, last = run.outcomes()
    assert first is not None and second is not None and last is not None, run.story()
    assert (first.result, second.result, last.result) == (STOPPED, STOPPED, FINISHED)
    signal = "SIGUSR1" if send_user_signal else "SIGTERM"
    assert (first.signal, second.signal) == (signal, signal)
    # The emergency save holds the very step at which the ranks stopped: nothing is trained twice.
    assert run.restored_steps() == [None, first.step, second.step]
    assert run.trained_twice() == 0

    told = run.status()
    assert [attempt["signal"] for attempt in told["attempts"]] == [signal, signal, None]
    assert sum(attempt["steps_lost"] for attempt in told["attempts"]) == 0
    run.ftslurm("verify", str(run.layout.root))


def test_a_rank_killed_in_a_step_costs_steps_and_no_bits(lab: Lab, baseline: Baseline) -> None:
    """The points of a save are killed at in test_batch_loop.py and train/test_save_points.py."""
    plan = {"FTSLURM_FAULTS": "kill@step:step=27:rank=3:attempt=1"}
    run = submit(lab, "parallel=ddp", name="killed", environ=plan)
    run.finish()
    assert_same_bits(run, baseline("ddp"))
    assert run.restored_steps() == [None, 20], run.story()
    lost = [attempt["steps_lost"] for attempt in run.status()["attempts"]]
    assert run.trained_twice() == sum(lost) == 7


@pytest.mark.full
def test_a_damaged_checkpoint_is_stepped_over(lab: Lab, baseline: Baseline) -> None:
    """The newest step rots while the run waits for its requeue: the one before is restored."""
    run = submit(lab, "parallel=ddp", name="rotten")
    run.wait_for_step(1, 15)
    nodes = lab.show_job(run.job_id)["NodeList"]
    lab.preempt(2, nodelist=nodes, seconds=2)
    lab.wait_for_state(run.job_id, ["PENDING"], timeout_s=90)
    newest = max(run.layout.steps.glob("step-*"))
    shard = next(newest.glob("shard-*.bin"))
    shard.chmod(0o600)
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    assert ftslurm(lab, "verify", str(newest), check=False)
    lab.hasten(run.job_id)
    run.finish()

    assert_same_bits(run, baseline("ddp"))
    assert run.restored_steps() == [None, 10], run.story()
    assert [path.name.startswith(newest.name) for path in run.layout.quarantine.glob("step-*")]


@pytest.mark.full
def test_a_node_that_is_cut_off_costs_steps_and_no_bits(lab: Lab, baseline: Baseline) -> None:
    """Slurm finds the node dead after some 35 s and requeues; the old ranks on it live on."""
    run = submit(lab, "parallel=ddp", name="cut")
    run.wait_for_step(1, 12)
    node = "n2"
    assert lab.show_job(run.job_id)["NodeList"] == "n[1-2]", "the idle nodes were n1 to n4"
    lab.cut(node)
    lab.hasten(run.job_id, timeout_s=90)
    run.finish()
    lab.join(node)
    assert_same_bits(run, baseline("ddp"))
    assert run.restored_steps()[-1] == 10, run.story()
    assert len(run.outcomes()) == 2
