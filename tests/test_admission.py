"""A job that begins goes on with its run, or leaves for good and says why."""

import dataclasses

import pytest
from checkpoints import make_step
from fakes.batch_loop import begin, begin_job, end, make_run, stopped
from fakes.slurm_queue import Slurm

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import read_json, write_json
from ftslurm.run.attempts import read_attempt
from ftslurm.run.control import PAUSE, STOP, control_files
from ftslurm.run.record import read_record
from ftslurm.run.spec import RunSpec, parse_time_s

ENOUGH = RunSpec().recovery.max_failures + 3
LIMIT_S = parse_time_s(RunSpec().cluster.time)


@pytest.fixture(autouse=True)
def signals_stay(monkeypatch):
    """This process is no verb's."""
    monkeypatch.setattr("ftslurm.recovery.recover.outlive_requeue", lambda: None)


def files_of(layout):
    return control_files(layout, read_record(layout))


def decision_of(layout, number):
    return read_json(layout.attempt(number).decision_json)


def test_an_order_is_there_until_it_has_been_acted_on(tmp_path, monkeypatch):
    layout, slurm = make_run(tmp_path, "requeue"), Slurm()
    begin(layout, slurm, monkeypatch)
    files_of(layout).give(STOP)
    stopped(layout, order=STOP)
    seen = []
    monkeypatch.setattr(slurm, "forbid_requeue", lambda _: seen.append(files_of(layout).read()))
    assert end(layout, slurm).action == "ended"
    assert seen == [STOP] and files_of(layout).read() is None


@pytest.mark.parametrize(("order", "action", "done"), [
    (STOP, "ended", "forbid 12"), (PAUSE, "paused", "requeuehold"),
])  # fmt: skip
def test_an_order_that_was_obeyed_is_acted_on_by_the_job_that_comes_back(
    tmp_path, monkeypatch, order, action, done
):
    layout, slurm = make_run(tmp_path, "requeue"), Slurm()
    begin(layout, slurm, monkeypatch)
    files_of(layout).give(order)
    stopped(layout, order=order)  # the batch node is lost before its shell can decide
    with pytest.raises(RunError, match=f"has obeyed the order `{order}`; this job leaves"):
        begin(layout, slurm, monkeypatch)
    assert (slurm.done[-1], decision_of(layout, 1)["action"]) == (done, action)
    assert files_of(layout).read() is None and not layout.attempt(2).root.exists()


@pytest.mark.parametrize(("order", "queue"), [(STOP, []), (PAUSE, ["14"])])
def test_or_by_its_successor(tmp_path, monkeypatch, order, queue):
    layout, slurm = make_run(tmp_path), Slurm()
    begin(layout, slurm, monkeypatch)
    stopped(layout, order=order)
    with pytest.raises(RunError, match="this job leaves"):
        begin_job("13", layout, slurm, monkeypatch)
    assert list(slurm.queue) == queue
    assert slurm.done[-1] == "hold 14" or not queue


@pytest.mark.parametrize("order", [STOP, None])
def test_a_job_that_slurm_queues_again_after_its_stop_leaves(tmp_path, monkeypatch, order):
    layout, slurm = make_run(tmp_path, "requeue"), Slurm()
    begin(layout, slurm, monkeypatch)

    def away(job_id):
        raise SchedulerError("slurmctld does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(slurm, "forbid_requeue", away)
        if order:
            stopped(layout, order=order)
        assert end(layout, slurm, rc=78).action == ("ended" if order else "stop")
    with pytest.raises(RunError, match="attempt 1 has ended the run"):
        begin(layout, slurm, monkeypatch)
    assert slurm.done == ["forbid 12"]


def test_what_a_person_queues_after_an_order_that_nobody_acted_on_runs(tmp_path, monkeypatch):
    layout, slurm = make_run(tmp_path, "requeue"), Slurm()
    begin(layout, slurm, monkeypatch)
    stopped(layout, order=STOP)
    assert begin_job("50", layout, slurm, monkeypatch).startswith("go 2 ")


def killed(layout, slurm, monkeypatch, *, how_many, word):
    """Jobs of a run, each killed with its batch shell, and the id of the one that follows."""
    begin(layout, slurm, monkeypatch)
    for job_id in range(13, 13 + how_many - 1):
        slurm.ended[str(job_id - 1)] = word
        begin_job(str(job_id), layout, slurm, monkeypatch)
    slurm.ended[str(12 + how_many - 1)] = word
    return str(12 + how_many)


def test_a_run_whose_jobs_all_last_until_their_limit_for_nothing_ends(tmp_path, monkeypatch):
    layout, slurm = make_run(tmp_path), Slurm()
    following = killed(layout, slurm, monkeypatch, how_many=ENOUGH, word="TIMEOUT")
    with pytest.raises(RunError, match="without a newly committed step.*the ranks hang.*leaves"):
        begin_job(following, layout, slurm, monkeypatch)
    decision = decision_of(layout, ENOUGH)
    assert (decision["action"], decision["cause"]) == ("stop", "standstill")
    assert slurm.queue == {}
    # A person lets it go on, and the count begins anew.
    assert begin_job("50", layout, slurm, monkeypatch).startswith(f"go {ENOUGH + 1} ")
    slurm.ended["50"] = "TIMEOUT"
    (after_it,) = slurm.queue
    assert begin_job(after_it, layout, slurm, monkeypatch).startswith(f"go {ENOUGH + 2} ")


@pytest.mark.parametrize(("cause", "ends"), [("time_limit", True), ("preempted", False)])
def test_what_costs_nothing_ends_a_run_only_if_it_uses_whole_jobs_up(
    tmp_path, monkeypatch, cause, ends
):
    """Of both it was found out afterwards, from ranks that did not save in time."""
    layout, slurm = make_run(tmp_path, "requeue"), Slurm()
    for number in range(1, ENOUGH + 1):
        begin(layout, slurm, monkeypatch)
        decided = {"action": "requeued", "cause": cause, "reason": "x", "is_failure": False}
        write_json(layout.attempt(number).decision_json, {"schema_version": 1, **decided})
    if not ends:
        assert begin(layout, slurm, monkeypatch).startswith(f"go {ENOUGH + 1} ")
        return
    with pytest.raises(RunError, match="without a newly committed step"):
        begin(layout, slurm, monkeypatch)


@pytest.mark.parametrize("word", ["PREEMPTED", "NODE_FAIL"])
def test_a_storm_of_preemptions_or_lost_nodes_ends_no_run(tmp_path, monkeypatch, word):
    layout, slurm = make_run(tmp_path), Slurm()
    following = killed(layout, slurm, monkeypatch, how_many=ENOUGH + 3, word=word)
    assert begin_job(following, layout, slurm, monkeypatch).startswith("go ")


def test_a_job_that_slurm_itself_queues_again_was_not_at_its_limit(tmp_path, monkeypatch):
    layout, slurm = make_run(tmp_path, "requeue"), Slurm()
    for _ in range(ENOUGH + 3):
        assert begin(layout, slurm, monkeypatch).startswith("go ")


def test_one_step_that_was_committed_lets_the_run_go_on(tmp_path, monkeypatch):
    layout, slurm = make_run(tmp_path), Slurm()
    following = killed(layout, slurm, monkeypatch, how_many=ENOUGH, word="TIMEOUT")
    make_step(layout, 10)
    assert begin_job(following, layout, slurm, monkeypatch).startswith("go ")


@pytest.mark.parametrize(("apart_s", "goes_on"), [(LIMIT_S, False), (LIMIT_S - 1, True)])
def test_where_nobody_can_say_a_whole_limit_must_lie_between_two_jobs(
    tmp_path, monkeypatch, apart_s, goes_on
):
    layout, slurm = make_run(tmp_path), Slurm()
    following = killed(layout, slurm, monkeypatch, how_many=ENOUGH, word=None)
    newest = read_attempt(layout, ENOUGH)
    for number in range(1, ENOUGH + 1):
        at = newest.claimed_at - apart_s * (ENOUGH + 1 - number)
        attempt = dataclasses.asdict(read_attempt(layout, number))
        write_json(
            layout.attempt(number).attempt_json, {"schema_version": 1, **attempt, "claimed_at": at}
        )
    slurm.queue.clear()
    if goes_on:
        assert begin_job(following, layout, slurm, monkeypatch).startswith("go ")
    else:
        with pytest.raises(RunError, match="this job leaves"):
            begin_job(following, layout, slurm, monkeypatch)


@pytest.mark.parametrize("limit_passed", [True, False])
def test_a_job_that_was_told_to_end_counts_when_its_limit_had_passed(
    tmp_path, monkeypatch, limit_passed
):
    layout, slurm = make_run(tmp_path, "requeue"), Slurm()
    stop_at = {"FTSLURM_STOP_AT": "500" if limit_passed else "5000"}
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", **stop_at}
    for number in range(1, ENOUGH + 1):
        begin(layout, slurm, monkeypatch)
        decision = end(layout, slurm, attempt=number, rc=143, term=True, environ=environ)
        assert decision.action == "requeued"
    if limit_passed:
        with pytest.raises(RunError, match="the ranks hang"):
            begin(layout, slurm, monkeypatch)
        assert slurm.done[-1] == "forbid 12"
    else:
        assert begin(layout, slurm, monkeypatch).startswith("go ")
