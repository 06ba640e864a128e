"""What a Session promises a loop that is not ours, and what ranks leave behind when they fail."""

import json
import signal
from pathlib import Path

import launch
import pytest

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import RANK_FAILED, RANK_NEVER_RETRY, RANK_STOPPED
from ftslurm.files import read_json
from ftslurm.replay.trace import count_trained, read_trace
from ftslurm.run.attempts import FAILED, FINISHED, STOPPED, read_events, read_outcome, read_progress
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, RunSpec

pytestmark = pytest.mark.torch


def make_spec(
    entry: str, *, world_size: int = 2, steps: int = 8, interval_steps: int = 0
) -> RunSpec:
    return RunSpec(
        entry=entry,
        steps=steps,
        cluster=ClusterSpec(tasks_per_node=world_size),
        checkpoint=CheckpointSpec(interval_steps=interval_steps, interval_s=0),
        user={"lr": 0.1},
    )


def rank_errors(layout: RunLayout, attempt: int) -> dict[int, dict[str, object]]:
    records = [read_json(path) for path in sorted(layout.attempt(attempt).ranks.iterdir())]
    return {record["rank"]: record for record in records}


@pytest.fixture(scope="module")
def own_loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunLayout, launch.Ended]:
    """Saves whenever it may."""
    spec = make_spec("loops:own_with_exit_handler")
    spec.checkpoint.interval_s = 1e-6
    layout = launch.prepare(tmp_path_factory.mktemp("own") / "run", spec)
    return layout, launch.run_attempt(layout, world_size=2, module="ftslurm.train.entry")


def test_a_loop_of_your_own_runs_from_a_fresh_interpreter_to_done(
    own_loop: tuple[RunLayout, launch.Ended],
) -> None:
    layout, ended = own_loop
    assert ended.codes == [0, 0], ended.logs()
    assert all("an exit handler ran" in ended.log(rank) for rank in (0, 1))
    done = json.loads(layout.done.read_text())
    assert done["step"] == 8 and len(done["parameter_digest"]) == 64
    assert list(read_trace(layout)) == list(range(1, 9))
    committed = [e["step"] for e in read_events(layout.attempt(1)) if e["kind"] == "committed"]
    assert committed == [1, 3, 5, 7, 8], "overdue by the clock at every step, never twice in a row"
    progress = read_progress(layout.attempt(1))
    assert progress is not None
    assert (progress.phase, progress.step, progress.committed_step) == ("finished", 8, 8)


def test_a_run_that_chooses_its_interval_saves_otherwise_and_trains_the_same(
    tmp_path: Path, own_loop: tuple[RunLayout, launch.Ended]
) -> None:
    """Rank 1 is slow in each save; it is rank 0 that sees it, and decides."""
    spec = make_spec("loops:own_with_exit_handler", interval_steps=2)
    spec.checkpoint.interval, spec.checkpoint.interval_s = "auto", 1.0
    layout = launch.prepare(tmp_path / "run", spec)
    plan = {"FTSLURM_FAULTS": "slow@step:seconds=0.25;slow@staged:rank=1:seconds=0.6"}
    ended = launch.run_attempt(layout, world_size=2, environ=plan)
    assert ended.codes == [0, 0], ended.logs()
    events = read_events(layout.attempt(1))
    committed = [event["step"] for event in events if event["kind"] == "committed"]
    assert 2 <= len(committed) <= 3 and committed[-1] == 8, "by the clock alone, then no more"
    (paced,) = [event for event in events if event["kind"] == "paced"]
    assert paced["before_s"] == 1.0 and 0.4 < paced["stall_s"] < 60
    assert (paced["interval_s"], paced["limit"], paced["gpus"]) == (3600.0, "most", 2)
    progress = read_progress(layout.attempt(1))
    assert progress is not None and progress.interval_s == paced["interval_s"]
    digests = [read_json(run.done)["parameter_digest"] for run in (layout, own_loop[0])]
    assert digests[0] == digests[1]


def test_a_rank_killed_in_a_step_ends_the_others_and_the_next_attempt_ends_the_run(
    tmp_path: Path,
) -> None:
    spec = make_spec("example_loop:train", world_size=4, interval_steps=3)
    undisturbed = launch.prepare(tmp_path / "a", spec)
    assert launch.run_attempt(undisturbed, world_size=4).codes == [0] * 4

    layout = launch.prepare(tmp_path / "b", spec)
    plan = {"FTSLURM_FAULTS": "kill@step:rank=2:step=5:attempt=1"}
    launched = launch.Launch(layout, world_size=4, environ=plan, kill_wait_s=80)
    ended = launched.wait()
    assert ended.codes == [RANK_FAILED, RANK_FAILED, -signal.SIGKILL, RANK_FAILED], ended.logs()
    errors = rank_errors(layout, 1)
    assert sorted(errors) == [0, 1, 3]
    assert {error["type"] for error in errors.values()} == {"PeerLost"}
    assert all(error["step"] == 5 and error["at"] for error in errors.values())
    assert read_outcome(layout.attempt(1)) is None

    ended = launch.run_attempt(layout, world_size=4)
    assert ended.codes == [0] * 4, ended.logs()
    assert layout.done.exists()
    losses = {step: row.loss.hex() for step, row in read_trace(layout).items()}
    assert losses == {step: row.loss.hex() for step, row in read_trace(undisturbed).items()}
    digests = [
        json.loads(run.done.read_text())["parameter_digest"] for run in (layout, undisturbed)
    ]
    assert digests[0] == digests[1]
    twice = [step for step, count in count_trained(layout).items() if count > 1]
    restored = [event for event in read_events(layout.attempt(2)) if event["kind"] == "restored"]
    from_step = restored[0]["step"] if restored else 0
    assert twice == list(range(from_step + 1, 6))


def test_batch_norm_under_ddp_goes_on_bit_for_bit(tmp_path: Path) -> None:
    spec = make_spec("loops:normalizing", steps=5)
    digests = []
    for name, attempt in (("a", 0), ("b", 1)):
        spec.user["signal"] = {"attempt": attempt, "rank": 1, "step": 2, "number": signal.SIGUSR1}
        layout = launch.prepare(tmp_path / name, spec)
        if attempt:
            assert launch.run_attempt(layout, world_size=2).codes == [RANK_STOPPED] * 2
        ended = launch.run_attempt(layout, world_size=2)
        assert ended.codes == [0, 0], ended.logs()
        digests.append(read_json(layout.done)["parameter_digest"])
    assert digests[0] == digests[1]


def test_batch_norm_that_nothing_keeps_equal_is_refused_by_name(tmp_path: Path) -> None:
    spec = make_spec("loops:normalizing", steps=2)
    spec.parallel.strategy = "fsdp"
    spec.user["signal"] = {"attempt": 0, "rank": 0, "step": 0, "number": 0}
    layout = launch.prepare(tmp_path / "run", spec)
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [RANK_FAILED] * 2, ended.logs()
    (failed,) = [e for e in read_events(layout.attempt(1)) if e["kind"] == "save_failed"]
    assert "model/1.running_mean" in failed["reason"] and "SyncBatchNorm" in failed["reason"]
    assert CheckpointStore(layout).published() == []


def test_a_save_that_misses_its_deadline_is_reported_and_holds_nobody(tmp_path: Path) -> None:
    spec = make_spec("loops:stopped_at_3")
    layout = launch.prepare(tmp_path / "run", spec, emergency_deadline_s=1.5)
    plan = {"FTSLURM_FAULTS": "hang@persist:rank=1"}
    ended = launch.run_attempt(layout, world_size=2, environ=plan)
    assert ended.codes == [RANK_STOPPED] * 2, ended.logs()
    assert not ended.killed
    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None and (outcome.result, outcome.committed_step) == (STOPPED, None)
    assert "did not commit" in outcome.reason
    assert CheckpointStore(layout).published() == []


def test_a_signal_before_the_first_step_stops_after_it(tmp_path: Path) -> None:
    layout = launch.prepare(tmp_path / "run", make_spec("loops:stopped_at_once"))
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [RANK_STOPPED] * 2, ended.logs()
    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None and (outcome.step, outcome.committed_step) == (1, 1)


def test_a_signal_in_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    layout = launch.prepare(tmp_path / "run", make_spec("loops:signalled_in_the_last"))
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [0, 0], ended.logs()
    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None and outcome.result == FINISHED and layout.done.exists()


def test_a_bug_on_one_rank_is_told_from_its_echoes(tmp_path: Path) -> None:
    layout = launch.prepare(tmp_path / "run", make_spec("loops:broken"))
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [RANK_FAILED, RANK_FAILED], ended.logs()
    errors = rank_errors(layout, 1)
    assert errors[1]["type"] == "ValueError" and "a bug of this rank" in str(errors[1]["message"])
    assert errors[0]["type"] == "PeerLost"
    assert float(str(errors[1]["at"])) < float(str(errors[0]["at"]))
    assert read_outcome(layout.attempt(1)) is None


def test_a_configuration_that_cannot_work_is_not_tried_again(tmp_path: Path) -> None:
    layout = launch.prepare(tmp_path / "run", make_spec("example_loop:no_such_function"))
    ended = launch.run_attempt(layout, world_size=1)
    assert ended.codes == [RANK_NEVER_RETRY], ended.logs()
    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None and outcome.result == FAILED and not outcome.retry
    assert "no_such_function" in outcome.reason


def test_damage_to_all_checkpoints_is_final_and_never_a_start_from_zero(tmp_path: Path) -> None:
    spec = make_spec("loops:stopped_at_3")
    layout = launch.prepare(tmp_path / "run", spec)
    assert launch.run_attempt(layout, world_size=2).codes == [RANK_STOPPED] * 2
    (step,) = layout.steps.iterdir()
    for shard in step.glob("shard-*"):
        shard.write_bytes(bytes(shard.stat().st_size))
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [RANK_NEVER_RETRY] * 2, ended.logs()
    outcome = read_outcome(layout.attempt(2))
    assert (
        outcome is not None and not outcome.retry and "does not start from step 0" in outcome.reason
    )
    assert step.exists() and not layout.trace_file(2).exists()
