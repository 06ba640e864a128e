"""Tasks of a sweep as arrays: split, limited, and found again when their answer was lost."""

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.sweep_slurm import CONFIG, slurm_on_path  # noqa: F401 - a fixture

from ftslurm.errors import RunError, SchedulerError
from ftslurm.run.jobs import add_job, read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import (
    ASKED,
    ArrayRecord,
    TaskRecord,
    add_array,
    read_arrays,
    read_tasks,
    unanswered,
)
from ftslurm.scheduler.arrays import (
    AT_LIMIT,
    NO_ROOM,
    Outcome,
    chunks,
    share_of_first,
    submit_groups,
)
from ftslurm.scheduler.lost_arrays import OPEN_S, find_lost, still_open
from ftslurm.scheduler.sbatch import (
    FullError,
    LimitError,
    NotReachedError,
    RefusedError,
    UnclearError,
    submit,
)
from ftslurm.scheduler.slurm import Completed
from ftslurm.sweep.queue import queue_tasks, room_beside
from tests.fakes.array_queue import ArrayQueue, make_sweep, queued

TESTS = Path(__file__).resolve().parent


def bare_sweep(root, number, groups=1):
    """A sweep's folder with as much as queueing needs."""
    layout = SweepLayout(root)
    layout.submit.mkdir(parents=True)
    for group in range(groups):
        layout.group_script(group).write_text("#!/bin/bash\n")
        layout.group_arguments(group).write_text("--job-name='a b'\n")
    for one in range(number):
        layout.task(one).submit.mkdir(parents=True)
    return layout


def submitted(layout, numbers, *, room=None, groups=1, size=1001, **options):
    """What came of tasks that take turns with their groups."""
    outcome = Outcome()
    tasks = [TaskRecord(n, layout.task_id(n), (), n % groups) for n in numbers]
    submit_groups(layout, tasks, room=room, outcome=outcome, run=array_size(size), **options)
    return outcome


def array_size(size):
    return lambda argv, timeout_s: Completed(0, CONFIG.format(size=size), "")


def test_fifteen_hundred_tasks_are_two_arrays_under_slurms_usual_limit(tmp_path):
    layout = bare_sweep(tmp_path / "s", 1500)
    asked = []
    queued = submitted(
        layout,
        range(1500),
        room=30,
        sbatch=lambda arguments: asked.append(arguments) or str(70 + len(asked)),
    ).arrays
    assert [words[2] for words in asked] == ["--array=0-999%20", "--array=0-499%10"]
    assert [words[3] for words in asked] == [
        f"--output={layout.root}/s-{digits}/submit/%A_%a.out" for digits in ("%4a", "1%3a")
    ]
    assert [words[-2:] for words in asked] == [
        [str(layout.group_script(0)), "0"],
        [str(layout.group_script(0, 1000)), "1000"],
    ]
    assert layout.group_script(0, 1000).read_text() == layout.group_script(0).read_text()
    assert asked[0][:2] == ["--parsable", "--job-name=a b"]
    assert [array.job_id(array.numbers[-1]) for array in queued] == ["71_999", "72_499"]
    assert [job.job_id for job in read_jobs(layout.task(1007))] == ["72_7"]


@pytest.mark.parametrize("size", [1, 9, 10, 11, 101, 1001, 10001, 100_001])
def test_every_tasks_log_has_the_name_of_its_own_folder(size):
    numbers = [0, 7, 9, 10, 99, 100, 999, 1000, 1234, 9999, 10_000, 12_345]
    seen = []
    for chunk in chunks(numbers, size):
        for number in chunk.numbers:
            index = number - chunk.offset
            assert 0 <= index < size
            head, percent, tail = chunk.pattern.partition("%")
            width = int(tail.removesuffix("a")) if percent else 0
            assert head + (f"{index:0{width}d}" if percent else "") == f"{number:04d}"
            seen.append(number)
    assert seen == numbers


@pytest.mark.parametrize("room", [0, 1, 300, 999])
def test_at_a_limit_on_jobs_as_many_are_queued_as_fit_with_few_calls(tmp_path, room):
    layout = bare_sweep(tmp_path / "s", 1000)
    calls, taken = [], 0

    def sbatch(arguments):
        nonlocal taken
        indexes = arguments[2].removeprefix("--array=")
        first, _, last = indexes.partition("-")
        number = int(last or first) - int(first) + 1
        calls.append(number)
        if taken + number > room:
            raise LimitError("AssocMaxSubmitJobLimit")
        taken += number
        return str(len(calls))

    outcome = submitted(layout, range(1000), sbatch=sbatch)
    assert len(outcome.taken) == taken == room
    assert outcome.left == dict.fromkeys(range(room, 1000), AT_LIMIT)
    assert len(calls) <= 20
    assert unanswered(read_arrays(layout)) == []
    assert [bool(read_jobs(layout.task(number))) for number in range(1000)] == [
        number < room for number in range(1000)
    ]


@pytest.mark.parametrize(
    "said, kind",
    [
        ("QOSMaxSubmitJobPerUserLimit\nJob violates accounting/QOS policy", LimitError),
        ("Batch job submission failed: Resource temporarily unavailable", FullError),
        ("AssocMaxNodePerJobLimit\nJob violates accounting/QOS policy (job submit limit, user's "
         "size and/or time limits)", RefusedError),
    ],
)  # fmt: skip
def test_a_limit_on_the_number_of_jobs_is_told_from_other_refusals(slurm, tmp_path, said, kind):
    slurm.answers(rc=1, stdout="", stderr=said)
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")
    with pytest.raises(RefusedError) as caught:
        submit(["--parsable", str(tmp_path / "job.sh")])
    assert type(caught.value) is kind


def test_a_site_without_arrays_says_so(tmp_path):
    layout = bare_sweep(tmp_path / "s", 1)
    assert "MaxArraySize is 0" in submitted(layout, [0], size=0).refused[0]


def test_a_cancelled_sweep_queues_nothing(tmp_path):
    layout = bare_sweep(tmp_path / "s", 1)
    layout.closed.touch()
    with pytest.raises(RunError, match="was cancelled"):
        submitted(layout, [0])
    assert not layout.arrays_jsonl.exists()


def test_a_sweep_that_is_cancelled_between_two_arrays_is_not_queued_further(tmp_path):
    layout = bare_sweep(tmp_path / "s", 2, groups=2)
    asked = []

    def sbatch(arguments):
        asked.append(arguments)
        layout.closed.touch()
        return "7"

    with pytest.raises(RunError, match="was cancelled"):
        submitted(layout, range(2), groups=2, sbatch=sbatch)
    assert len(asked) == 1 and [job.job_id for job in read_jobs(layout.task(0))] == ["7_0"]


def refusing(*groups, error=None):
    """An sbatch that does not take these groups."""
    ids = iter(range(70, 99))

    def sbatch(arguments):
        if int(Path(arguments[-2]).stem[-3:]) in groups:
            raise error or RefusedError("invalid partition")
        return str(next(ids))

    return sbatch


def test_a_group_that_slurm_refuses_is_refused_alone(tmp_path):
    layout = bare_sweep(tmp_path / "s", 6, groups=3)
    outcome = submitted(layout, range(6), groups=3, sbatch=refusing(1))
    assert outcome.refused == dict.fromkeys([1, 4], "invalid partition")
    assert sorted(outcome.taken) == [0, 2, 3, 5] and not outcome.left


def test_the_room_of_a_refused_group_is_the_others(tmp_path):
    layout = bare_sweep(tmp_path / "s", 6, groups=3)
    outcome = submitted(layout, range(6), room=3, groups=3, sbatch=refusing(0))
    assert [array.at_once for array in outcome.arrays] == [1, 2]


@pytest.mark.parametrize("error", [NotReachedError("connect failure"), UnclearError("timed out")])
def test_when_slurm_is_gone_the_rest_is_left_once_something_is_queued(tmp_path, error):
    layout = bare_sweep(tmp_path / "s", 3, groups=3)
    outcome = submitted(layout, range(3), groups=3, sbatch=refusing(1, error=error))
    assert outcome.taken == [0] and outcome.left == dict.fromkeys([1, 2], str(error))
    other = bare_sweep(tmp_path / "t", 3, groups=3)
    with pytest.raises(type(error)):
        submitted(other, range(3), groups=3, sbatch=refusing(0, error=error))


SIZES = (1, 2, 3, 7, 20)


@pytest.mark.parametrize("sizes", [*itertools.product(SIZES, repeat=3)])
def test_arrays_share_the_room_and_never_run_more_together(sizes):
    for room in range(sum(sizes) + 3):
        left, shares = room, []
        for place in range(len(sizes)):
            shares.append(share_of_first(left, sizes[place:]))
            left -= shares[-1]
        assert sum(shares) == min(room, sum(sizes))
        assert all(0 <= share <= size for share, size in zip(shares, sizes))
        assert shares.count(0) == max(0, len(sizes) - room), "one each, as far as it reaches"


@pytest.mark.parametrize("limit", [1, 5, 40, 100])
@pytest.mark.parametrize("room", [1, 2, 8, 100])
@pytest.mark.parametrize("groups", [1, 3])
def test_parallelism_is_kept_also_where_a_limit_splits_arrays(tmp_path, limit, room, groups):
    layout = bare_sweep(tmp_path / "s", 60, groups=groups)
    queue = ArrayQueue()
    queue.limit = limit

    def sbatch(arguments):
        done = queue(["sbatch", *arguments])
        if done.returncode:
            raise LimitError(done.stderr)
        return done.stdout.strip()

    outcome = submitted(layout, range(60), room=room, groups=groups, sbatch=sbatch)
    at_once = [int(word.partition("%")[2]) for call in queue.calls for word in call
               if word.startswith("--array=")]  # fmt: skip
    assert sum(array.at_once for array in outcome.arrays) <= room
    assert all(1 <= one <= room for one in at_once)
    assert sorted([*outcome.taken, *outcome.left]) == list(range(60))
    assert set(outcome.left.values()) <= {AT_LIMIT, NO_ROOM}
    assert outcome.taken


def test_room_is_what_arrays_and_single_jobs_leave_at_the_most():
    array = ArrayRecord("queued", 0, tuple(range(10)), 0.0, 0, "70", 3)
    unlimited = ArrayRecord("queued", 0, (10, 11), 0.0, 0, "71", None)
    alive = [f"70_{n}" for n in range(10)]
    assert room_beside(8, [array], alive) == 5
    assert room_beside(8, [array], alive[:2]) == 6, "no more than are left of it"
    assert room_beside(8, [array, unlimited], [*alive, "71_10", "71_11"]) == 3
    assert room_beside(8, [array], [*alive, "88"]) == 4
    asked = ArrayRecord("asked", 0, (12, 13, 14), 0.0, 0, None, 2)
    assert room_beside(8, [array, asked], alive) == 3, "it may be there"
    assert room_beside(2, [array], alive) == 0


def test_who_is_alive_is_asked_before_more_are_queued(tmp_path, monkeypatch):
    queue = ArrayQueue()
    monkeypatch.setattr(subprocess, "run", queue)
    layout = make_sweep(tmp_path, 6, parallelism=2)
    tasks = read_tasks(layout)
    assert queue_tasks(layout, tasks[:1], parallelism=2).taken == [0]
    assert queue.count("squeue") == 0, "there is nobody yet"
    assert sorted(queue_tasks(layout, tasks[1:4], parallelism=2).taken) == [1, 2, 3]
    assert queue_tasks(layout, tasks[4:], parallelism=2).left == dict.fromkeys([4, 5], NO_ROOM)
    queue.put(["100_0"], "COMPLETED")
    assert queue_tasks(layout, tasks[4:], parallelism=2).taken == [4, 5]
    arrays = [word for call in queue.calls for word in call if word.startswith("--array=")]
    assert arrays == ["--array=0%1", "--array=1-3%1", "--array=4-5%1"]


def test_what_the_caller_knows_to_be_over_leaves_its_room(tmp_path, monkeypatch):
    queue = ArrayQueue()
    monkeypatch.setattr(subprocess, "run", queue)
    layout = make_sweep(tmp_path, 3)
    queued(layout, queue, [0], word="PREEMPTED")
    tasks = read_tasks(layout)[1:]
    assert queue_tasks(layout, tasks[:1], parallelism=1).taken == [], "it may come back"
    assert queue_tasks(layout, tasks[:1], parallelism=1, over=[0]).taken == [1]
    # One that turns up now was over when the caller looked.
    add_array(layout, ASKED, 0, [0], offset=0)
    queue.put(["90_0"], "RUNNING", command=f"{layout.group_script(0)} 0")
    queue.put(["100_1"], "COMPLETED")
    outcome = queue_tasks(layout, tasks[1:], parallelism=1, over=[0])
    assert outcome.left == {2: NO_ROOM} and outcome.taken == [0]


@pytest.fixture
def killed(tmp_path, slurm):
    """A sweep whose submitter was killed when Slurm had taken its array and nobody knew yet."""
    layout = bare_sweep(tmp_path / "s", 3)
    slurm.program("sbatch", "#!/bin/sh\nkill -KILL $PPID\n")
    program = (
        "import sys; from pathlib import Path\n"
        "from ftslurm.run.sweep_layout import SweepLayout\n"
        "from ftslurm.run.sweep_record import TaskRecord\n"
        "from ftslurm.scheduler.arrays import Outcome, submit_groups\n"
        "tasks = [TaskRecord(n, '', (), 0) for n in range(3)]\n"
        "submit_groups(SweepLayout(Path(sys.argv[1])), tasks, room=None, outcome=Outcome())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(layout.root)], cwd=TESTS.parent)
    assert done.returncode == -9
    assert read_arrays(layout)[-1].event == "asked" and not read_jobs(layout.task(0))
    return layout


def shows(*rows, rc=0):
    text = "".join(f"{row}\n" for row in rows)
    return lambda argv, timeout_s: Completed(rc, text, "squeue: error: Unable to contact")


@pytest.mark.parametrize("argument", [" {}", ""], ids=["22.05", "24.11"])
def test_an_array_whose_submitter_was_killed_is_found_by_its_script(killed, argument):
    script, other = killed.group_script(0), killed.group_script(0, 1000)
    rows = [
        f"8|0|{other}{argument.format(1000)}",
        f"9|1|/elsewhere/group-000.sbatch{argument.format(0)}",
        f"7|N/A|{script}{argument.format(0)}",
    ]
    mine = [f"12|{index}|{script}{argument.format(0)}" for index in range(3)]
    (found,) = find_lost(killed, run=shows(*rows, *mine))
    assert found.array_id == "12" and found.numbers == (0, 1, 2)
    assert [job.job_id for job in read_jobs(killed.task(2))] == ["12_2"]
    assert find_lost(killed, run=shows(rc=1)) == []  # nothing is lost any more: nobody is asked


def test_an_array_that_slurm_has_forgotten_is_told_by_a_task_that_began(killed):
    add_job(killed.task(1), "12_1", scheduler="slurm", queued_by="submit")
    (found,) = find_lost(killed, run=shows())
    assert found.array_id == "12" and len(read_jobs(killed.task(1))) == 1


def test_an_array_that_slurm_never_took_is_no_longer_waited_for(killed):
    asked_at = read_arrays(killed)[-1].at
    later = {"run": shows(), "now": lambda: asked_at + OPEN_S}
    assert find_lost(killed, **later) == []
    assert read_arrays(killed)[-1].event == "left"
    assert unanswered(read_arrays(killed)) == [] and still_open(killed) == {}


def test_an_sbatch_that_may_still_be_on_its_way_is_not_taken_for_refused(killed):
    asked_at = read_arrays(killed)[-1].at
    soon = asked_at + OPEN_S - 1
    assert find_lost(killed, run=shows(), now=lambda: soon) == []
    until = time.strftime("%H:%M:%S", time.localtime(asked_at + OPEN_S))
    assert list(still_open(killed)) == [0, 1, 2] and until in still_open(killed)[0]
    # It arrives after all.
    row = f"12|0|{killed.group_script(0)} 0"
    (found,) = find_lost(killed, run=shows(row), now=lambda: soon)
    assert found.array_id == "12" and still_open(killed) == {}


def test_a_task_that_may_have_a_job_is_not_queued_again(tmp_path, monkeypatch):
    queue = ArrayQueue()
    monkeypatch.setattr(subprocess, "run", queue)
    layout = make_sweep(tmp_path, 3)
    add_array(layout, ASKED, 0, [0, 1])
    outcome = queue_tasks(layout, read_tasks(layout), parallelism=None)
    assert outcome.taken == [2] and list(outcome.left) == [0, 1]
    queue.put(["70_0", "70_1"], "RUNNING", command=f"{layout.group_script(0)} 0")
    assert queue_tasks(layout, read_tasks(layout)[:2], parallelism=None).taken == [0, 1]
    assert queue.count("sbatch") == 1


def test_nothing_is_believed_while_slurm_does_not_answer(killed):
    with pytest.raises(SchedulerError):
        find_lost(killed, run=shows(rc=1))
    assert len(unanswered(read_arrays(killed))) == 1


def test_another_array_of_the_same_tasks_is_not_taken_for_the_lost_one(killed):
    script = killed.group_script(0)
    rows = [f"12|{index}|{script} 0" for index in range(3)]
    find_lost(killed, run=shows(*rows))
    # Asked for once more, and lost again.
    with pytest.raises(UnclearError):
        submitted(killed, [0, 2], sbatch=_lose)
    (found,) = find_lost(killed, run=shows(*rows, f"13|0|{script} 0", f"13|2|{script} 0"))
    assert found.array_id == "13" and found.numbers == (0, 2)


def _lose(arguments):
    raise UnclearError("lost its connection")
