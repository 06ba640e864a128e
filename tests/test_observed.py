"""What counts as a failure, and in how many GPU-hours, of this run and of those beside it."""

import os
from pathlib import Path

import pytest

from ftslurm.files import write_json
from ftslurm.run import observed
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
from ftslurm.run.observed import SIBLINGS, LookBack, Seen, gpus_of, look_back
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


@pytest.mark.parametrize(("outcome", "cause", "failures"), [
    (None, "node", 1),
    (None, "network_transient", 1),
    (UNSAVED, "preempted", 1),
    (None, "unknown", 0),  # a learning rate that takes the loss away, nobody can say of what
    (None, "failed", 0),
    (None, "hang", 0),
    (None, "oom_host", 0),  # a batch that is too large
    (None, "oom_gpu", 0),
    (SAVED, "preempted", 0),
])  # fmt: skip
def test_of_another_run_only_what_is_the_clusters_counts(tmp_path, outcome, cause, failures):
    layout = make_run(tmp_path / "run")
    train(make_run(tmp_path / "beside"), 1.0, outcome=outcome, cause=cause)
    assert seen_before(layout, 1).seen == Seen(failures, 8.0, 1)


def test_one_that_died_with_its_batch_shell_counts_for_others_once_it_is_followed(tmp_path):
    layout, beside = make_run(tmp_path / "run"), make_run(tmp_path / "beside")
    train(beside, 1.0)
    assert seen_before(layout, 1).seen == Seen(0, 8.0, 1)
    train(beside, 1.0)
    assert seen_before(layout, 1).seen == Seen(1, 16.0, 1)


class Counted:
    """Calls by which a file system is asked for something."""

    def __init__(self, monkeypatch):
        self.stats = self.listings = self.opens = 0
        for owner, name, counter in ((Path, "stat", "stats"), (os, "listdir", "listings"),
                                     (Path, "open", "opens"), (Path, "read_bytes", "opens"),
                                     (Path, "read_text", "opens")):  # fmt: skip
            self._count(monkeypatch, owner, name, counter)

    def _count(self, monkeypatch, owner, name, counter):
        real = getattr(owner, name)

        def counted(*args, **named):
            setattr(self, counter, getattr(self, counter) + 1)
            return real(*args, **named)

        monkeypatch.setattr(owner, name, counted)


def sweep_of(folder, tasks):
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text("{}")
    for number in range(tasks):
        train(make_run(folder / f"s-{number:04d}"), 1.0, cause="node")
    return RunLayout(folder / f"s-{tasks - 1:04d}")


def test_a_task_looks_at_the_few_that_began_before_it_however_many_there_are(tmp_path, monkeypatch):
    few, many = (sweep_of(tmp_path / name / "s", count) for name, count in (("a", 12), ("b", 40)))
    found = []
    for layout in (few, many):
        counted = Counted(monkeypatch)
        found.append((seen_before(layout, 1).seen, counted.stats, counted.listings, counted.opens))
        monkeypatch.undo()
    assert found[0] == found[1]
    seen, stats, listings, _ = found[0]
    assert seen == Seen(SIBLINGS, 8.0 * SIBLINGS, SIBLINGS)
    assert stats < 10 * SIBLINGS and listings < 10 * SIBLINGS
    first = RunLayout(few.root.with_name("s-0000"))
    assert seen_before(first, 1).seen == Seen()


def test_of_too_many_runs_those_are_looked_at_whose_names_are_the_newest(tmp_path, monkeypatch):
    layout = make_run(tmp_path / "run")
    monkeypatch.setattr(observed, "FOLDERS", 2)
    for day, hours in ((1, 1.0), (2, 2.0), (3, 4.0)):
        train(make_run(tmp_path / f"{'zyx'[day - 1]}-2026110{day}-120000-ab12"), hours)
    assert seen_before(layout, 1).seen == Seen(0, 8 * (2.0 + 4.0), 2)


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
