"""What counts as a failure, and in how many GPU-hours, of this run and of those beside it."""

import os

import pytest

from ftslurm.files import write_json
from ftslurm.run.attempts import (
    FINISHED,
    PACED,
    STOPPED,
    Attempt,
    Outcome,
    Progress,
    append_event,
    claim,
    write_outcome,
    write_progress,
)
from ftslurm.run.layout import RunLayout
from ftslurm.run.observed import LookBack, Seen, gpus_of, look_back
from ftslurm.run.planned import in_force, planned_interval_s
from ftslurm.run.record import read_record
from ftslurm.run.spec import CheckpointSpec, RunSpec, to_dict
from ftslurm.run.status import main as status

HOUR_S = 3600.0


def make_run(folder, *, scheduler="slurm", **cluster):
    layout = RunLayout(folder)
    layout.root.mkdir(parents=True)
    spec = RunSpec()
    for key, value in {"nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4, **cluster}.items():
        setattr(spec.cluster, key, value)
    write_json(layout.run_json, {
        "schema_version": 1, "run_id": folder.name, "scheduler": scheduler, "spec": to_dict(spec),
    })  # fmt: skip
    return layout


def train(layout, hours, *, outcome=None, cause=None, world_size=None):
    """An attempt that has trained so long; without an outcome it was killed."""
    number = claim(layout, Attempt(
        number=0, job_id="1", restart_count=0, nodes=["n1", "n2"], claimed_at=0.0,
        world_size=world_size,
    )).number  # fmt: skip
    paths = layout.attempt(number)
    if hours is not None:
        append_event(paths, "first_step", now=lambda: 1000.0, step=1)
        end_at = 1000.0 + HOUR_S * hours
        write_progress(paths, Progress(step=9, steps=9, phase="training", written_at=end_at))
    if outcome is not None:
        write_outcome(paths, outcome)
    if cause is not None:
        write_json(paths.decision_json, {"schema_version": 1, "cause": cause})
    return paths


def seen_before(layout, number):
    return look_back(layout, read_record(layout), number)


SAVED = Outcome(STOPPED, step=9, committed_step=9)
UNSAVED = Outcome(STOPPED, step=9, committed_step=4)


@pytest.mark.parametrize(("outcome", "cause", "failures"), [
    (None, None, 1),  # killed with its batch shell
    (None, "node", 1),
    (None, "unknown", 1),
    (None, "code", 0),
    (None, "cancelled_user", 0),
    (SAVED, "asked_to_leave", 0),
    (UNSAVED, "asked_to_leave", 1),
    (Outcome(FINISHED, step=9, committed_step=9), "finished", 0),
])  # fmt: skip
def test_a_failure_is_an_end_without_a_save_that_came_by_chance(tmp_path, outcome, cause, failures):
    layout = make_run(tmp_path / "run")
    train(layout, 3.0, outcome=outcome, cause=cause)
    assert seen_before(layout, 2).seen == Seen(failures, 8 * 3.0, 0)


def test_only_training_counts(tmp_path):
    layout = make_run(tmp_path / "run")
    train(layout, None, cause="node")  # it died before its first step
    train(layout, 1.0, cause="node", world_size=4)  # on half the ranks
    train(layout, 5.0)  # the attempt that asks
    assert seen_before(layout, 3).seen == Seen(1, 4.0, 0)


def test_runs_beside_it_count_but_for_one_that_may_still_run_and_those_of_another_kind(tmp_path):
    layout = make_run(tmp_path / "run")
    beside = make_run(tmp_path / "beside", gpus_per_node=8)
    train(beside, 1.0, cause="gpu")
    train(beside, 2.0)  # nothing was decided: it may run
    train(make_run(tmp_path / "here", scheduler="local"), 7.0, cause="node")
    (tmp_path / "torn" / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "torn" / "run.json").write_text("{")
    (tmp_path / "notes").mkdir()
    assert seen_before(layout, 1).seen == Seen(1, 16 * 3.0, 1)
    (tmp_path / "beside").chmod(0o755)
    os.chown(tmp_path / "beside" / "attempts", 12345, -1) if os.geteuid() == 0 else None
    if os.geteuid() == 0:
        assert seen_before(layout, 1).seen == Seen()  # another user's


def test_what_a_save_costs_is_what_the_newest_attempt_has_measured(tmp_path):
    layout = make_run(tmp_path / "run")
    for cost in (1.0, 2.0):
        append_event(train(layout, 1.0, outcome=SAVED), PACED, stall_s=cost, lag_s=10 * cost)
    assert seen_before(layout, 3) == LookBack(Seen(0, 16.0, 0), 2.0, 20.0)
    assert seen_before(layout, 2) == LookBack(Seen(0, 8.0, 0), 1.0, 10.0)


@pytest.mark.parametrize(("cluster", "world_size", "gpus"), [
    ({"gpus_per_node": 8, "nodes": 2, "tasks_per_node": 8}, 16, 16),
    ({"gpus_per_node": 8, "nodes": 2, "tasks_per_node": 1}, 1, 8),
    ({"gpus_per_task": 2, "nodes": 2, "tasks_per_node": 4}, 8, 16),
    ({"nodes": 2, "tasks_per_node": 4}, 8, 8),
])  # fmt: skip
def test_gpus_are_counted_and_ranks_where_there_are_none(cluster, world_size, gpus):
    spec = RunSpec()
    for key, value in cluster.items():
        setattr(spec.cluster, key, value)
    assert gpus_of(spec, world_size) == gpus


def test_the_planned_interval_is_the_shorter_one_or_that_which_was_chosen():
    fixed = CheckpointSpec(interval_s=240.0, interval_steps=100)
    chosen = Progress(step=1, steps=9, interval_s=700.0)
    assert planned_interval_s(fixed) == 240.0
    assert planned_interval_s(fixed, chosen, step_s=0.5) == 50.0
    assert planned_interval_s(CheckpointSpec(interval_s=0.0)) is None
    auto = CheckpointSpec(interval="auto", interval_s=240.0, interval_steps=100)
    assert planned_interval_s(auto, chosen, step_s=0.5) == 700.0
    assert planned_interval_s(auto, None, step_s=0.5) == 240.0
    assert in_force(fixed, chosen) is fixed
    assert (in_force(auto, chosen).interval_s, in_force(auto, chosen).interval_steps) == (700.0, 0)


def test_status_shows_the_newest_choice_and_what_it_was_made_from(tmp_path, capsys):
    layout = make_run(tmp_path / "run")
    paths = train(layout, 1.0)
    facts = {"before_s": 240.0, "stall_s": 1.5, "lag_s": 30.0, "failures": 2, "runs": 3,
             "gpu_hours": 60.0, "gpus": 8, "gpu_mtbf_h": 97.0, "mtbf_s": 43650.0}  # fmt: skip
    append_event(paths, PACED, interval_s=90.0, limit=None, **facts)
    append_event(paths, PACED, interval_s=360.0, limit="lag", **facts)
    status([str(layout.root)])
    said = next(line for line in capsys.readouterr().out.splitlines() if "saves every" in line)
    for part in ("saves every 6 min, no sooner than", "costs 1.5 s", "durable after 30 s",
                 "every 12.1 h on 8 GPUs", "2 failures in 60 GPU-hours of 3 runs"):  # fmt: skip
        assert part in said
