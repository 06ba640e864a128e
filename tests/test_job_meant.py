"""Which of a run's jobs is meant: each case once for everybody who asks."""

import itertools

import pytest

from ftslurm.files import write_json
from ftslurm.recovery.actions import STOP
from ftslurm.recovery.job_meant import JobsOnRecord, choose, to_ask_for
from ftslurm.recovery.on_record import jobs_on_record
from ftslurm.recovery.view import read_view
from ftslurm.run.attempts import Attempt, claim
from ftslurm.run.jobs import BY_BATCH, BY_PERSON, BY_SUBMIT, Job, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import UNKNOWN, JobState

RUNS = JobState("RUNNING")
WAITS = JobState("PENDING", "Resources")
BEHIND = JobState("PENDING", "Dependency")
HELD = JobState("PENDING", "JobHeldUser")
LEAVES = JobState("COMPLETING")
GOOD = JobState("COMPLETED")
FAILED = JobState("FAILED")
GONE = JobState("CANCELLED")
PREEMPTED = JobState("PREEMPTED")
NODE_FAIL = JobState("NODE_FAIL")
FORGOTTEN = JobState(UNKNOWN, "slurm_load_jobs error: Invalid job id specified")
AWAY = JobState(UNKNOWN, "Unable to contact slurm controller")
STRANGE = JobState(UNKNOWN, "squeue says `HIBERNATED`, a word not known here")
NOT_BEGUN = JobState(UNKNOWN, "the job has not begun")

FIRST = Job("7", "slurm", BY_SUBMIT, 1.0)
SUCCESSOR = Job("8", "slurm", BY_BATCH, 11.0, after="7")
THIRD = Job("9", "slurm", BY_BATCH, 21.0, after="8")
RESUMED = Job("9", "slurm", BY_PERSON, 31.0)
LATER = Job("10", "slurm", BY_BATCH, 41.0, after="9")


def claimed(job_id, at=10.0):
    return Attempt(1, job_id, 0, ["n1"], at)


# what; jobs, the newest claim, their states, whether the run has stopped; the one that is meant,
# those behind it, those alive
CASES = [
    ("no job and no claim", [], None, {}, False, None, [], []),
    ("one job waits", [FIRST], None, {"7": WAITS}, False, "7", [], ["7"]),
    ("one job runs", [FIRST], claimed("7"), {"7": RUNS}, False, "7", [], ["7"]),
    ("requeued", [FIRST], claimed("7"), {"7": WAITS}, False, "7", [], ["7"]),
    ("paused", [FIRST], claimed("7"), {"7": HELD}, False, "7", [], ["7"]),
    ("about to end", [FIRST], claimed("7"), {"7": LEAVES}, False, "7", [], ["7"]),
    ("ended", [FIRST], claimed("7"), {"7": GOOD}, True, "7", [], []),
    ("forgotten", [FIRST], claimed("7"), {"7": FORGOTTEN}, True, "7", [], []),
    ("nobody can say", [FIRST], claimed("7"), {"7": AWAY}, False, "7", [], ["7"]),
    ("a word of a newer Slurm", [FIRST], claimed("7"), {"7": STRANGE}, False, "7", [], ["7"]),
    ("a successor waits", [FIRST, SUCCESSOR], claimed("7"), {"7": RUNS, "8": BEHIND}, False,
     "7", ["8"], ["8", "7"]),
    ("the job before ends", [FIRST, SUCCESSOR], claimed("7"), {"7": LEAVES, "8": BEHIND}, False,
     "7", ["8"], ["8", "7"]),
    ("the job before is over", [FIRST, SUCCESSOR], claimed("7"), {"7": GOOD, "8": WAITS}, False,
     "8", [], ["8"]),
    ("the job before may come back", [FIRST, SUCCESSOR], claimed("7"),
     {"7": NODE_FAIL, "8": WAITS}, False, "8", [], ["8"]),
    ("it has come back", [FIRST, SUCCESSOR], claimed("7"), {"7": WAITS, "8": BEHIND}, False,
     "7", ["8"], ["8", "7"]),
    ("the successor was cancelled while it waited", [FIRST, SUCCESSOR], claimed("7"),
     {"7": RUNS, "8": GONE}, False, "7", [], ["7"]),
    ("of the job before nobody can say", [FIRST, SUCCESSOR], claimed("7"),
     {"7": AWAY, "8": BEHIND}, False, "7", ["8"], ["8", "7"]),
    ("of the successor nobody can say", [FIRST, SUCCESSOR], claimed("7"),
     {"7": GOOD, "8": STRANGE}, False, "8", [], ["8"]),
    ("the successor has begun", [FIRST, SUCCESSOR], claimed("8"), {"8": RUNS}, False,
     "8", [], ["8"]),
    ("it has begun and has one of its own", [FIRST, SUCCESSOR, THIRD], claimed("8"),
     {"8": RUNS, "9": BEHIND}, False, "8", ["9"], ["9", "8"]),
    ("the newest is gone, one in between lives", [FIRST, SUCCESSOR, THIRD], claimed("7"),
     {"7": GOOD, "8": WAITS, "9": GONE}, False, "8", [], ["8"]),
    ("all are over, one may come back", [FIRST, SUCCESSOR], claimed("7"),
     {"7": PREEMPTED, "8": GONE}, False, "7", [], []),
    ("all are over, the run had ended", [FIRST, SUCCESSOR], claimed("7"),
     {"7": GOOD, "8": GONE}, True, "7", [], []),
    ("all are over, the run was to go on", [FIRST, SUCCESSOR], claimed("7"),
     {"7": GOOD, "8": GONE}, False, "8", [], []),
    ("all are over, of the newest there is no word", [FIRST, SUCCESSOR], claimed("7"),
     {"7": FAILED, "8": FORGOTTEN}, False, "7", [], []),
    ("all are forgotten", [FIRST, SUCCESSOR], claimed("7"),
     {"7": FORGOTTEN, "8": FORGOTTEN}, False, "8", [], []),
    ("resumed by a person", [FIRST, RESUMED], claimed("7"), {"7": FORGOTTEN, "9": WAITS}, True,
     "9", [], ["9"]),
    ("resumed, and cancelled before it began", [FIRST, SUCCESSOR, RESUMED], claimed("7"),
     {"7": GOOD, "8": GONE, "9": GONE}, True, "9", [], []),
    ("resumed, over before it began, what was before it can no more come back",
     [FIRST, RESUMED], claimed("7"), {"7": NODE_FAIL, "9": FAILED}, False, "9", [], []),
    ("resumed, and its own successor is gone", [FIRST, RESUMED, LATER], claimed("9"),
     {"9": PREEMPTED, "10": GONE}, False, "9", [], []),
    ("resumed, and all are forgotten", [FIRST, RESUMED], claimed("7"),
     {"7": FORGOTTEN, "9": FORGOTTEN}, True, "7", [], []),
    ("resumed after it was to go on, and all are forgotten", [FIRST, RESUMED], claimed("7"),
     {"7": FORGOTTEN, "9": FORGOTTEN}, False, "9", [], []),
    ("resumed before any had begun", [FIRST, RESUMED], None, {"7": GONE, "9": WAITS}, False,
     "9", [], ["9"]),
    ("begun by a job that is not on record", [FIRST], claimed("5"), {"5": RUNS}, False,
     "5", [], ["5"]),
    ("that one has a successor", [FIRST, Job("8", "slurm", BY_BATCH, 11.0, after="5")],
     claimed("5"), {"5": RUNS, "8": BEHIND}, False, "5", ["8"], ["8", "5"]),
    ("none is on record, one has begun", [], claimed("5"), {"5": RUNS}, False, "5", [], ["5"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "jobs, newest, states, has_stopped, meant, behind, alive",
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_each_case_has_one_answer(jobs, newest, states, has_stopped, meant, behind, alive):
    on_record = to_ask_for(jobs, newest, scheduler="slurm")
    assert set(on_record.ids) == set(states), "nothing else is asked of Slurm"
    found = choose(on_record, states, action=STOP if has_stopped else None)
    assert (found.job.job_id if found.job else None) == meant
    assert [job.job_id for job in found.behind] == behind and list(found.alive) == alive
    assert found.state == states.get(meant, found.state)


def test_on_this_machine_only_the_newest_is_known():
    on_record = to_ask_for([FIRST, RESUMED], claimed("7"), scheduler="local")
    assert on_record.ids == ["9"]
    found = choose(on_record, {"9": NOT_BEGUN}, action=STOP)
    assert found.job.job_id == "9" and found.alive == ("9",)


@pytest.mark.parametrize(
    "third, may_come_back", [(THIRD, ("7", "8", "9")), (RESUMED, ("9",))], ids=["queued", "resumed"]
)
def test_whatever_the_states_what_is_not_over_is_alive_and_the_oldest_of_it_is_meant(
    third, may_come_back
):
    words = [RUNS, BEHIND, LEAVES, GOOD, PREEMPTED, FORGOTTEN, AWAY]
    on_record = JobsOnRecord((FIRST, SUCCESSOR, third), "7")
    for three, has_stopped in itertools.product(itertools.product(words, repeat=3), [False, True]):
        states = dict(zip(["7", "8", "9"], three, strict=True))
        found = choose(on_record, states, action=STOP if has_stopped else None)
        alive = [job_id for job_id in ("9", "8", "7") if not states[job_id].is_over]
        assert list(found.alive) == alive and found.state == states[found.job.job_id]
        if alive:
            assert found.job.job_id == alive[-1]
        elif any(states[job_id] == PREEMPTED for job_id in may_come_back):
            assert found.state == PREEMPTED, "it may come back, so it is asked for once more"


@pytest.fixture
def layout(tmp_path):
    made = RunLayout(tmp_path)
    made.submit.mkdir()
    return made


def on_record(layout, scheduler="slurm"):
    return jobs_on_record(layout, scheduler).ids


def test_a_job_that_is_written_down_twice_is_one(layout):
    for job_id in ("7", "8"):
        add_job(layout, job_id, scheduler="slurm", queued_by=BY_SUBMIT)
    layout.jobs.write_bytes(layout.jobs.read_bytes() * 2)
    assert on_record(layout) == ["8", "7"]


def test_a_claim_that_was_cut_off_or_is_damaged_is_no_start(layout):
    for job_id in ("7", "8", "9"):
        add_job(layout, job_id, scheduler="slurm", queued_by=BY_SUBMIT)
    claim(layout, claimed("7"))
    layout.attempt(2).root.mkdir()
    assert on_record(layout) == ["9", "8", "7"]
    write_json(layout.attempt(2).attempt_json, {"schema_version": 1, "adopted": []})
    assert on_record(layout) == ["9", "8", "7"]
    claim(layout, claimed("8"))
    assert on_record(layout) == ["9", "8"]


def test_what_was_decided_before_a_person_resumed_the_run_binds_the_new_job_no_more(layout):
    for job, by in (("7", BY_SUBMIT), ("9", BY_PERSON)):
        add_job(layout, job, scheduler="slurm", queued_by=by)
    paths = layout.attempt(claim(layout, claimed("7")).number)
    write_json(paths.decision_json, {"schema_version": 1, "action": "stop", "reason": "a bug"})
    known = jobs_on_record(layout, "slurm")
    resumed = read_view(layout, known, {"7": FAILED, "9": AWAY})
    assert resumed.job_id == "9" and not resumed.has_stopped
    alone = read_view(layout, JobsOnRecord((FIRST,), "7"), {"7": FAILED})
    assert alone.job_id == "7" and alone.has_stopped and alone.alive == ()
