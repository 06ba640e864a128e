"""The promise itself, on real Slurm with real torch: whatever happens, the same bits.

Every run here is 2 nodes x 2 ranks of an ordinary user, held against the same run undisturbed on
this machine: where ranks run is no part of the training.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from lab import Lab, wait_until
from spine import STEPS, Run, ftslurm, submit, undisturbed

from ftslurm.run.attempts import FINISHED, STOPPED, numbers, read_attempt
from ftslurm.run.layout import step_name

pytestmark = [pytest.mark.cluster, pytest.mark.torch, pytest.mark.timeout(600)]

KILLED_AT = 13


@pytest.fixture(scope="module")
def assert_same_bits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run, str], None]:
    """The undisturbed run of a strategy is made when it is first asked for."""
    baselines: dict[str, Run] = {}

    def assert_it(run: Run, strategy: str) -> None:
        if strategy not in baselines:
            baselines[strategy] = undisturbed(run, tmp_path_factory.mktemp("undisturbed"))
        baseline = baselines[strategy]
        assert sorted(run.losses) == list(range(1, STEPS + 1)), run.story()
        differing = [step for step, loss in run.losses.items() if loss != baseline.losses[step]]
        assert not differing, f"losses differ from step {differing[0]} on\n{run.story()}"
        assert run.parameter_digest == baseline.parameter_digest
        moves = len(set(run.losses.values())) > STEPS // 2
        assert moves, "the loss hardly moves: nothing is trained"

    return assert_it


def slow(attempt: int, *, since: int = 0) -> str:
    """A fault: each of this attempt's steps takes two seconds, from a step on."""
    return f"sleep@step:attempt={attempt}:since={since}:seconds=2"


def faults(*plan: str) -> dict[str, str]:
    return {"FTSLURM_FAULTS": ";".join(plan)}


@pytest.fixture(scope="module")
def preempted(lab: Lab) -> dict[str, Run]:
    """One on the nodes beside the other's. Both are preempted by TERM, and then, where the site
    says so, by the job's own signal; a rank of the first is killed before."""
    killed = f"kill@step:step={KILLED_AT}:rank=3:attempt=1"
    # None of those that are preempted is over before that, however busy the machine is.
    ddp = [killed, slow(2, since=KILLED_AT + 3), slow(3)]
    fsdp = [slow(1, since=7), slow(2)]
    runs = {
        "ddp": submit(lab, "parallel=ddp", name="ddp", environ=faults(*ddp)),
        "fsdp": submit(lab, "parallel=fsdp", name="fsdp", environ=faults(*fsdp)),
    }
    attempts = {"ddp": 2, "fsdp": 1}

    def trains_and_makes_room(strategy: str) -> None:
        run, attempt = runs[strategy], attempts[strategy]
        before = max([0, *run.trained(attempt - 1)]) if attempt > 1 else 4
        run.wait_for_step(attempt, before + 3)
        run.make_room()

    with ThreadPoolExecutor(max_workers=len(runs)) as pool:
        for signal in ("TERM", "USR1"):
            list(pool.map(trains_and_makes_room, runs))
            lab.set_send_user_signal(signal == "TERM")  # for the next time; no step runs now
            for strategy, run in runs.items():
                lab.hasten(run.job_id)
                attempts[strategy] += 1
        list(pool.map(Run.finish, runs.values()))
    return runs


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_preempted_by_either_signal_ends_with_the_same_bits(
    preempted: dict[str, Run], assert_same_bits: Callable[[Run, str], None], strategy: str
) -> None:
    run = preempted[strategy]
    assert_same_bits(run, strategy)
    first, second, last = run.outcomes()[-3:]
    assert first is not None and second is not None and last is not None, run.story()
    assert (first.result, second.result, last.result) == (STOPPED, STOPPED, FINISHED)
    assert (first.signal, second.signal) == ("SIGTERM", "SIGUSR1")
    # The emergency save holds the very step at which the ranks stopped: nothing is trained twice.
    assert run.restored_steps()[-2:] == [first.step, second.step]
    told = run.status()["attempts"]
    assert [attempt["signal"] for attempt in told[-3:]] == ["SIGTERM", "SIGUSR1", None]
    assert [attempt["steps_lost"] for attempt in told[-3:]] == [0, 0, 0]
    run.ftslurm("verify", str(run.layout.root))


def test_a_rank_killed_in_a_step_costs_steps_and_no_bits(
    preempted: dict[str, Run], assert_same_bits: Callable[[Run, str], None]
) -> None:
    """The points of a save are killed at in test_batch_loop.py and train/test_save_points.py."""
    run = preempted["ddp"]
    assert_same_bits(run, "ddp")
    # A save is done when the disk has it: on a slow one, that of the tenth step is not.
    committed = max([0, *(one.step for one in read_attempt(run.layout, 2).adopted)])
    print(f"killed at step {KILLED_AT}; {committed} was committed")
    assert run.restored_steps()[:2] == [None, committed or None], run.story()
    lost = [attempt["steps_lost"] for attempt in run.status()["attempts"]]
    assert run.trained_twice() == sum(lost) == lost[0] == KILLED_AT - committed
    assert preempted["fsdp"].trained_twice() == 0


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_undisturbed_run_has_the_bits_of_one_on_another_machine(
    lab: Lab, assert_same_bits: Callable[[Run, str], None], strategy: str
) -> None:
    run = submit(lab, f"parallel={strategy}", name=f"calm-{strategy}")
    run.finish()
    assert_same_bits(run, strategy)
    assert run.trained_twice() == 0 and len(run.outcomes()) == 1


@pytest.mark.full
def test_a_damaged_checkpoint_is_stepped_over(
    lab: Lab, assert_same_bits: Callable[[Run, str], None]
) -> None:
    """The newest step rots while the run waits for its requeue: the one before is restored."""
    run = submit(lab, "parallel=ddp", name="rotten", environ=faults(slow(1, since=15)))
    run.wait_for_step(1, 15)
    run.make_room()
    before, newest = sorted(run.layout.steps.glob(f"step-{'?' * 12}"))[-2:]
    shard = next(newest.glob("shard-*.bin"))
    shard.chmod(0o600)
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    assert ftslurm(lab, "verify", str(newest), check=False)
    lab.hasten(run.job_id)
    run.finish()

    assert_same_bits(run, "ddp")
    assert run.restored_steps() == [None, int(before.name.split("-")[1])], run.story()
    assert [path.name.startswith(newest.name) for path in run.layout.quarantine.glob("step-*")]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_node_that_is_cut_off_costs_steps_and_no_bits(
    lab: Lab, assert_same_bits: Callable[[Run, str], None], strategy: str
) -> None:
    """A spare takes its place, as the agents say; the old ranks on it live on, beside the new."""
    lab.change_settings(slurmd_timeout_s=300)  # as sites have it: the agents are first
    name, plan = f"cut-{strategy}", faults(slow(1, since=12))
    run = submit(lab, f"parallel={strategy}", "cluster.spares=1", name=name, environ=plan)
    committed = run.layout.steps / step_name(10)
    wait_until(lambda: committed.exists() or None, timeout_s=180, seen=run.story)
    run.wait_for_step(1, 12)
    lost = read_attempt(run.layout, 1).nodes[1]
    lab.cut(lost)
    try:
        # Slurm waits for the lost node with the job's end.
        wait_until(lambda: run.layout.done.exists() or None, timeout_s=300, seen=run.story)
    finally:
        lab.join(lost)
    run.finish()
    assert_same_bits(run, strategy)
    assert numbers(run.layout) == [1, 2], run.story()
    restored = run.restored_steps()[1]
    assert restored is not None and restored >= 10 and restored % 10 == 0, run.story()
    assert run.trained_twice() == max(run.trained(1)) - restored
    second = read_attempt(run.layout, 2)
    assert lost not in second.nodes and second.job_id == run.job_id and second.restart_count == 0
