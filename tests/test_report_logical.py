"""Rows of accounting become logical jobs, and each run of one gets the cause its state tells."""

import time
import tracemalloc

import pytest

from ftslurm.diagnosis import causes
from ftslurm.report import fold as fold_module
from ftslurm.report.fold import fold, split_waiting
from ftslurm.report.logical import ending
from ftslurm.scheduler.job_table import JobRun, StepRow


def run(job_id="7", state="COMPLETED", **values):
    """A run of a job; times in seconds."""
    defaults = {
        "cancelled_by": None, "code": 0, "signal": 0, "start_at": 100.0, "end_at": 200.0,
        "failed_node": None, "reason": "", "restarts": None, "user": "ada", "uid": 1001,
        "name": "train", "submit_at": 90.0,
    }  # fmt: skip
    return JobRun(job_id, state, **{**defaults, **values})


def step(state="COMPLETED", signal=0, code=0, step_id="7.0", name="ranks"):
    return StepRow(step_id, state, code, signal, 200.0, name)


def jobs(*runs):
    return list(fold(iter(runs)))


def test_requeues_preemptions_and_lost_nodes_of_one_job_are_its_attempts():
    (job,) = jobs(
        run(state="PREEMPTED", restarts=0), run(state="NODE_FAIL", restarts=1, failed_node="n2"),
        run(state="REQUEUED", restarts=2), run(state="RUNNING", restarts=3),
    )  # fmt: skip
    assert [one.state for one in job.attempts] == ["PREEMPTED", "NODE_FAIL", "REQUEUED", "RUNNING"]
    assert job.state == "running"


def test_a_job_is_held_while_it_may_come_back_and_no_longer():
    def many():
        yield run("7", "NODE_FAIL", submit_at=0.0, end_at=5e4)
        for number in range(100, 1100):
            yield run(str(number), submit_at=100.0 * number, end_at=100.0 * number + 50)
            given.append(number)

    given = []
    found = fold(many())
    assert next(found).job_id == "100"
    assert len(given) < 40  # those of an hour
    rest = [job.job_id for job in found]
    assert rest.count("7") == 1
    assert rest.index("7") == pytest.approx(5e4 / 100 - 100, abs=2)  # those that ended before


def long_queue(jobs, back):
    """All submitted at once, each ended days later; of every tenth job `back` more runs follow."""
    for number in range(jobs):
        is_back = number % 10 == 0
        state = "PREEMPTED" if is_back else "COMPLETED"
        yield run(str(number), state, submit_at=0.0, start_at=1e5, end_at=2e5 + number)
    for turn in range(1, back + 1):
        for number in range(0, jobs, 10):
            state = "PREEMPTED" if turn < back else "FAILED"
            at = 2e5 * turn + number
            yield run(str(number), state, submit_at=at, start_at=at + 5, end_at=at + 2e5, code=1)


def shape(job):
    return job.job_id, job.state, [(one.state, one.submit_at) for one in job.attempts]


def test_past_the_most_that_are_held_the_numbers_stay_the_same(monkeypatch):
    """Those that have ended are given up first, so the jobs that come back are still held."""
    whole = sorted(shape(job) for job in fold(long_queue(3000, 2)))
    assert [len(runs) for _, _, runs in whole].count(3) == 300
    monkeypatch.setattr(fold_module, "MOST_HELD", 310)
    given = told = most = 0

    def counted():
        nonlocal given
        for one in long_queue(3000, 2):
            given += 1
            yield one

    few = []
    for job in fold(counted()):
        told += len(job.attempts)
        most = max(most, given - told)
        few.append(shape(job))
    assert sorted(few) == whole
    assert most <= 3 * 310


def test_memory_does_not_grow_with_rows_past_the_most_that_are_held(monkeypatch):
    monkeypatch.setattr(fold_module, "MOST_HELD", 200)
    peaks = []
    for jobs in (2_000, 20_000):
        tracemalloc.start()
        assert sum(1 for _ in fold(long_queue(jobs, 1))) >= jobs
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(peaks)
    assert peaks[1] < 1.5 * peaks[0]


def test_tasks_that_wait_in_one_row_are_split_off_it_by_number():
    (row,) = jobs(
        run("70_[3-9:2,12%2]", "PENDING"),
    )
    found = list(split_waiting([row], ["70_5", "70_6", "70_12", "71_3", "8", "70_x"]))
    assert [(job.job_id, job.tasks) for job in found] == [
        ("70_5", 1), ("70_12", 1), ("70_[3-9:2,12%2]", 3),
    ]  # fmt: skip
    assert [job.newest.job_id for job in found[:2]] == ["70_5", "70_12"]
    assert list(split_waiting([row], ["70"])) == [row]
    assert [job.job_id for job in split_waiting(jobs(run("70_[1]", "PENDING")), ["70_1"])] == [
        "70_1"
    ]
    (huge,) = jobs(run("70_[0-4000000]", "PENDING"))
    assert [job.tasks for job in split_waiting([huge], ["70_4000000"])] == [1, 4_000_000]


def test_of_a_long_list_of_tasks_each_is_found_without_a_look_at_all():
    every_third = ",".join(map(str, range(1, 30_000, 3)))
    (row,) = jobs(run(f"70_[{every_third}%5]", "PENDING"))
    began = time.process_time()
    found = list(split_waiting([row], [f"70_{number}" for number in range(30_000)]))
    assert time.process_time() - began < 10.0  # a tenth of a second; four minutes were it all
    assert [job.job_id for job in found] == [f"70_{number}" for number in range(1, 30_000, 3)]


def test_a_job_that_shrank_is_one_run_with_other_jobs_between_its_rows():
    (job, other) = jobs(
        run("7", "RESIZING", num_nodes=3, elapsed_s=100.0, nodes="n[1-3]",
            steps=[step("CANCELLED", 9)]),
        run("8", submit_at=150.0),
        run("7", submit_at=200.0, start_at=200.0, end_at=300.0, num_nodes=2, elapsed_s=100.0,
            state="FAILED", code=1, steps=[step("OUT_OF_MEMORY", 125)]),
    )  # fmt: skip
    assert (job.job_id, len(job.attempts), other.job_id) == ("7", 1, "8")
    (whole,) = job.attempts
    assert (whole.start_at, whole.submit_at, whole.elapsed_s) == (100.0, 90.0, 200.0)
    assert whole.more_node_s == 100.0
    assert [one.state for one in whole.steps] == ["CANCELLED", "OUT_OF_MEMORY"]
    assert ending(whole).cause == causes.OOM_HOST


def test_an_old_job_of_the_same_number_is_another_job():
    old = run(restarts=0, end_at=200.0)
    new = run(restarts=0, submit_at=1e9, start_at=1e9, end_at=1e9 + 5)
    assert [len(job.attempts) for job in jobs(old, new)] == [1, 1]


@pytest.mark.parametrize(
    "changed", [{"user": "bob"}, {"name": "other"}, {"submit_at": 1e9}, {"cluster": "far"}]
)
def test_without_a_restart_count_another_owner_name_or_year_is_another_job(changed):
    assert len(jobs(run(state="REQUEUED"), run(**changed))) == 2
    assert len(jobs(run(state="REQUEUED"), run(submit_at=201.0))) == 1


def test_rows_of_before_an_upgrade_all_say_that_they_are_the_first():
    queued_again = [
        run(state="PREEMPTED", restarts=0),
        run(state="REQUEUED", restarts=0, submit_at=300.0, start_at=310.0, end_at=400.0),
        run(restarts=0, submit_at=500.0, start_at=510.0, end_at=600.0),
    ]
    assert [len(job.attempts) for job in jobs(*queued_again)] == [3]
    other = run(restarts=0, user="bob", submit_at=500.0)
    assert [len(job.attempts) for job in jobs(*queued_again[:2], other)] == [2, 1]


def test_array_tasks_are_jobs_and_a_range_that_waits_is_one_row_of_many():
    found = jobs(run("70_1"), run("70_2", "FAILED"), run("70_[3-9,12%2]", "PENDING"))
    assert [(job.job_id, job.tasks, job.state) for job in found] == [
        ("70_1", 1, "completed"), ("70_2", 1, "failed"), ("70_[3-9,12%2]", 8, "waiting"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("70_[0-10:5]", 3), ("70_[1]", 1), ("70_[1,2,...]", 2), ("70_[]", 1), ("70", 1)],
)
def test_tasks_of_a_range_are_counted(text, tasks):
    assert jobs(run(text, "PENDING"))[0].tasks == tasks


def test_a_het_job_is_one_job_with_the_resources_of_all_its_parts():
    (job,) = jobs(
        run("12+0", "NODE_FAIL", gpus=8, num_nodes=1, nodes="n1", restarts=0),
        run("12+0", gpus=8, num_nodes=1, nodes="n1", restarts=1),
        run("12+1", "NODE_FAIL", gpus=4, num_nodes=2, nodes="n[5-6]", restarts=0, failed_node="n5"),
        run("12+1", gpus=4, num_nodes=2, nodes="n[5-6]", restarts=1),
    )  # fmt: skip
    assert (job.job_id, job.parts, len(job.attempts)) == ("12", 2, 2)
    assert (job.attempts[0].gpus, job.attempts[0].nodes) == (12, "n1,n[5-6]")
    assert job.attempts[0].failed_node == "n5"


def test_a_word_for_a_state_that_nobody_knows_is_no_failure():
    (job,) = jobs(run(state="FROBNICATED"))
    assert job.state == "unknown"
    assert ending(job.newest).cause == causes.UNKNOWN


BATCH_KILLED = step("CANCELLED", 9, step_id="7.batch", name="batch")
BATCH_TERMED = step("CANCELLED", 15, step_id="7.batch", name="batch")
NO_OUTPUT = step("CANCELLED", 53, step_id="7.batch", name="batch")
"""As sacct of 22.05, 24.11 and 26.05 has them."""
RAISED = step("FAILED", code=1)
"""Of a rank that exits with 1 where srun then kills the others."""
ENDINGS = [
    (run(state="RUNNING", code=0), None, ""),
    (run(state="COMPLETED"), None, ""),
    (run(state="PREEMPTED"), causes.PREEMPTED, "preempted"),
    (run(state="TIMEOUT"), causes.TIME_LIMIT, "time limit"),
    (run(state="DEADLINE"), causes.TIME_LIMIT, "deadline"),
    (run(state="NODE_FAIL", failed_node="n2"), causes.NODE, "node failed"),
    (run(state="BOOT_FAIL"), causes.NODE, "boot"),
    (run(state="REQUEUED"), None, "requeued"),
    (run(state="REQUEUED", code=3), causes.CODE, "exit code 3, and queued again"),
    (run(state="CANCELLED", cancelled_by=1001), causes.CANCELLED_USER, "owner"),
    (run(state="CANCELLED", cancelled_by=0), causes.CANCELLED_ADMIN, "user id 0"),
    (run(state="CANCELLED", nodes="n1"), causes.CANCELLED_USER, "does not say by whom"),
    (run(state="CANCELLED", nodes=""), causes.CANCELLED_USER, "it depends on has failed"),
    (run(state="OUT_OF_MEMORY", signal=125), causes.OOM_HOST, "memory"),
    (run(state="FAILED", code=3), causes.CODE, "exit code 3"),
    (run(state="FAILED", code=0, signal=11), causes.CODE, "signal 11"),
    (run(state="FAILED", code=None, signal=None), causes.UNKNOWN, "not known"),
    (run(state="FAILED", code=1, steps=[step("OUT_OF_MEMORY", 125)]), causes.OOM_HOST, "7.0"),
    (run(state="FAILED", code=0, signal=9, steps=[step("FAILED", 9)]), causes.UNKNOWN, "signal 9"),
    (run(state="FAILED", signal=9, steps=[BATCH_KILLED]), causes.UNKNOWN, "signal 9"),
    (run(state="FAILED", signal=15, steps=[BATCH_TERMED]), causes.UNKNOWN, "signal 15"),
    (run(state="FAILED", signal=53, steps=[NO_OUTPUT]), causes.CODE, "could not open its output"),
    (run(steps=[step("CANCELLED", 10)]), causes.CODE, "COMPLETED, but step 7.0 died of signal 10"),
    (run(steps=[step("OUT_OF_MEMORY", 125)]), causes.OOM_HOST, "COMPLETED, but"),
    (run(steps=[step("CANCELLED", 9, name="agents")]), None, ""),
    (run(steps=[step("CANCELLED", 15)]), None, ""),
    (run(steps=[step("FAILED", 11, step_id="7.extern")]), None, ""),
    (run(state="FAILED", code=9, steps=[step("CANCELLED", 9)]), causes.UNKNOWN, "was killed"),
    (run(state="FAILED", code=137, steps=[step("CANCELLED", 9)]), causes.UNKNOWN, "was killed"),
    (run(state="FAILED", code=15, steps=[step("CANCELLED", 15)]), causes.UNKNOWN, "(-K)"),
    (run(state="FAILED", code=137), causes.UNKNOWN, "128 + 9: what it ran was killed"),
    (run(state="FAILED", code=143), causes.UNKNOWN, "128 + 15: what it ran was killed"),
    (run(state="FAILED", code=143, steps=[RAISED]), causes.CODE, "exit code 143"),
    (run(state="FAILED", code=15, steps=[step("CANCELLED", 15), RAISED]), causes.CODE, "15"),
    (run(state="FAILED", code=143, steps=[RAISED, step("CANCELLED", 15)]), causes.UNKNOWN, "128"),
    (run(state="FAILED", code=137, steps=[step("FAILED", code=137)]), causes.UNKNOWN, "128 + 9"),
    (run(state="FAILED", code=9), causes.CODE, "exit code 9"),
    (run(state="FAILED", code=1, steps=[step("CANCELLED", 9)]), causes.CODE, "exit code 1"),
    (run(state="FAILED", code=9, steps=[step("CANCELLED", 9, name="agents")]), causes.CODE, "9"),
    (run(steps=[step("FAILED", 11), step(step_id="7.2")]), None, ""),
    (run(steps=[step("FAILED", 11), step(step_id="7.batch")]), causes.CODE, "signal 11"),
    (run(steps=[step(), step("FAILED", 11, step_id="7.2")]), causes.CODE, "signal 11"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "cause", "told"), ENDINGS)
def test_the_state_of_a_run_and_its_steps_tell_its_cause(one, cause, told):
    found = ending(one)
    assert found.cause == cause
    assert told in found.sentence
    assert found.node == one.failed_node
