"""Two clusters share a file system: a run is resumed on the one that has its jobs."""

import dataclasses

import pytest
from fakes.array_queue import CONFIG, ArrayQueue, make_sweep, queued
from fakes.operated import (
    CANCELLED,
    FORGOTTEN,
    QUEUED,
    given_orders,
    make_layout,
    make_run,
    make_run_with_successor,
    quick,
)

from ftslurm.cli import main
from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import read_json, write_json
from ftslurm.operate import resume, standing
from ftslurm.operate.cancel import cancel
from ftslurm.operate.resume import resume as resume_run
from ftslurm.operate.stop import leave
from ftslurm.run.attempts import Attempt, claim
from ftslurm.run.control import STOP
from ftslurm.run.sweep_record import ASKED, add_array, read_arrays


@pytest.fixture
def forgotten(tmp_path, monkeypatch):
    """A run that was submitted on cluster alps, and of which Slurm here knows nothing."""
    monkeypatch.setattr(resume, "submit_again", lambda *asked, **more: "71")
    run = make_run(make_layout(tmp_path), FORGOTTEN)
    return dataclasses.replace(run, record=dataclasses.replace(run.record, site=SITE))


SITE = {"cluster": "alps"}


@pytest.fixture
def asked_on(monkeypatch):
    def asked_on(run, cluster, verb=resume_run, *more):
        monkeypatch.setattr(standing, "name_of_cluster", lambda: cluster)
        return verb(run, *more, sleep=quick)

    return asked_on


def test_a_run_is_not_resumed_on_a_cluster_that_knows_nothing_of_its_jobs(forgotten, asked_on):
    forgotten.control.give(STOP)
    with pytest.raises(RunError) as refused:
        asked_on(forgotten, "jura")
    command = forgotten.layout.sbatch_command
    assert str(refused.value) == (
        "the run's jobs are on cluster `alps`, and this is `jura`, which knows none of them: "
        f"resume it there, or, once none of them is left, queue it here by hand, `sh {command}`"
    )
    assert given_orders(forgotten) == [STOP]
    assert asked_on(forgotten, "Alps").result == "queued"


def test_there_it_is_not_cancelled_and_the_order_to_stop_is_left_to_it(forgotten, asked_on):
    with pytest.raises(RunError, match="and this is `jura`, .*: cancel it there"):
        asked_on(forgotten, "jura", cancel)
    assert (forgotten.scheduler.done, given_orders(forgotten)) == ([], [])
    answer = asked_on(forgotten, "jura", leave, STOP)
    assert (answer.result, given_orders(forgotten)) == ("ordered", [STOP])
    assert "nobody can say how job 7 stands (the run's jobs are on cluster `alps`" in answer.text
    assert asked_on(forgotten, "alps", cancel).result == "not_running"


def test_where_its_newest_attempt_was_claimed_its_jobs_are(forgotten, asked_on):
    claim(forgotten.layout, Attempt(0, "7", 0, ["n1"], 0.0, cluster="jura"))
    assert asked_on(forgotten, "jura").result == "queued"
    with pytest.raises(RunError, match="are on cluster `jura`, and this is `alps`"):
        asked_on(forgotten, "alps")


@pytest.mark.parametrize("other", [QUEUED, CANCELLED])
def test_where_slurm_knows_one_of_its_jobs_the_cluster_is_not_asked_for(
    tmp_path, monkeypatch, other
):
    """`scontrol show config` for each look would be more than the look itself."""

    def never():
        raise AssertionError("it was asked for")

    run = make_run_with_successor(make_layout(tmp_path), FORGOTTEN, other)
    run = dataclasses.replace(run, record=dataclasses.replace(run.record, site=SITE))
    monkeypatch.setattr(standing, "name_of_cluster", never)
    assert run.look().state == other


def test_nothing_is_queued_where_nobody_says_what_cluster_this_is(forgotten, monkeypatch):
    def away():
        raise SchedulerError("slurmctld is away")

    monkeypatch.setattr(standing, "name_of_cluster", away)
    with pytest.raises(RunError, match="nobody can say whether this is the cluster"):
        resume_run(forgotten, sleep=quick)
    forgotten.scheduler.refusal = "slurmctld is away"
    with pytest.raises(SchedulerError, match="the order to stop is left"):
        cancel(forgotten, sleep=quick)
    assert given_orders(forgotten) == [STOP]


def test_a_sweep_is_neither_resumed_nor_ended_there(tmp_path, monkeypatch, capsys):
    slurm = ArrayQueue()
    monkeypatch.setattr("subprocess.run", slurm)
    monkeypatch.setattr("fakes.array_queue.CONFIG", f"{CONFIG}ClusterName = jura\n")
    sweep = make_sweep(tmp_path, 2)
    queued(sweep, slurm, [0, 1])
    slurm.jobs.clear()
    for number in (0, 1):
        task = sweep.task(number)
        task.script.write_text(f"export FTSLURM_RUN_DIR={task.root}\n")
        write_json(task.run_json, {**read_json(task.run_json), "site": SITE})
    add_array(sweep, ASKED, 0, [0], now=lambda: 0.0)  # Slurm there may have it
    before = read_arrays(sweep)
    for named in (sweep.root, sweep.task(1).root):
        assert main(["resume", str(named)]) == 1
        said = capsys.readouterr().err
        assert "on cluster `alps`, and this is `jura`" in said
        # Which is of one task.
        assert ("sbatch.txt" in said) == (named != sweep.root)
    for verb in ("cancel", "stop"):
        assert main([verb, str(sweep.root)]) == 1
        assert "this is `jura`, which knows none of them: do it there" in capsys.readouterr().err
    assert slurm.count("sbatch") == 0 and read_arrays(sweep) == before
    assert not sweep.closed.exists()
    for verb in ("cancel", "stop"):
        assert main([verb, str(sweep.task(0).root)]) != 0
        assert "the order to stop is left" in capsys.readouterr().err
    assert sweep.task(0).control.joinpath(STOP).exists() and read_arrays(sweep) == before
