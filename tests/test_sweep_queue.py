"""Tasks of a sweep as arrays: split, limited, and found again when their answer was lost."""

import subprocess
import sys
from pathlib import Path

import pytest
from fakes.sweep_slurm import CONFIG, slurm_on_path  # noqa: F401 - a fixture

from ftslurm.errors import RunError, SchedulerError
from ftslurm.run.jobs import add_job, read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import read_arrays, unanswered
from ftslurm.scheduler.arrays import chunks, find_lost, submit_array
from ftslurm.scheduler.protocol import Site
from ftslurm.scheduler.sbatch import LimitError, RefusedError, UnclearError, submit
from ftslurm.scheduler.slurm import Completed

TESTS = Path(__file__).resolve().parent
SITE = Site("slurm", "22.05.8", kill_wait_s=5, job_requeue=True, send_user_signal=True)


def bare_sweep(root, number):
    """A sweep's folder with as much as queueing needs."""
    layout = SweepLayout(root)
    layout.submit.mkdir(parents=True)
    layout.group_script(0).write_text("#!/bin/bash\n")
    layout.group_arguments(0).write_text("--job-name='a b'\n")
    for one in range(number):
        layout.task(one).submit.mkdir(parents=True)
    return layout


def array_size(size):
    return lambda argv, timeout_s: Completed(0, CONFIG.format(size=size), "")


def test_fifteen_hundred_tasks_are_two_arrays_under_slurms_usual_limit(tmp_path):
    layout = bare_sweep(tmp_path / "s", 1500)
    asked = []
    queued = submit_array(
        layout,
        0,
        range(1500),
        parallelism=30,
        sbatch=lambda arguments: asked.append(arguments) or str(70 + len(asked)),
        run=array_size(1001),
    )
    assert [words[2] for words in asked] == ["--array=0-999%20", "--array=0-499%10"]
    assert [words[3] for words in asked] == [
        f"--output={layout.root}/s-{digits}/submit/%A_%a.out" for digits in ("%4a", "1%3a")
    ]
    assert [words[-2:] for words in asked] == [
        [str(layout.group_script(0)), "0"],
        [str(layout.group_script(0)), "1000"],
    ]
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

    run = array_size(1001)
    queued = submit_array(layout, 0, range(1000), parallelism=None, sbatch=sbatch, run=run)
    assert sum(len(array.numbers) for array in queued) == taken == room
    assert len(calls) <= 20
    assert unanswered(read_arrays(layout)) == []
    assert [bool(read_jobs(layout.task(number))) for number in range(1000)] == [
        number < room for number in range(1000)
    ]


@pytest.mark.parametrize(
    "said, kind",
    [
        ("QOSMaxSubmitJobPerUserLimit\nJob violates accounting/QOS policy", LimitError),
        ("Batch job submission failed: Resource temporarily unavailable", LimitError),
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
    with pytest.raises(RefusedError, match="MaxArraySize is 0"):
        submit_array(layout, 0, [0], parallelism=None, run=array_size(0))


def test_a_cancelled_sweep_queues_nothing(tmp_path):
    layout = bare_sweep(tmp_path / "s", 1)
    layout.closed.touch()
    with pytest.raises(RunError, match="was cancelled"):
        submit_array(layout, 0, [0], parallelism=None, run=array_size(1001))
    assert not layout.arrays_jsonl.exists()


@pytest.fixture
def killed(tmp_path, slurm):
    """A sweep whose submitter was killed when Slurm had taken its array and nobody knew yet."""
    layout = bare_sweep(tmp_path / "s", 3)
    slurm.program("sbatch", "#!/bin/sh\nkill -KILL $PPID\n")
    program = (
        "import sys; from pathlib import Path\n"
        "from ftslurm.run.sweep_layout import SweepLayout\n"
        "from ftslurm.scheduler.arrays import submit_array\n"
        "submit_array(SweepLayout(Path(sys.argv[1])), 0, [0, 1, 2], parallelism=None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(layout.root)], cwd=TESTS.parent)
    assert done.returncode == -9
    assert read_arrays(layout)[-1].event == "asked" and not read_jobs(layout.task(0))
    return layout


def shows(*rows, rc=0):
    text = "".join(f"{row}\n" for row in rows)
    return lambda argv, timeout_s: Completed(rc, text, "squeue: error: Unable to contact")


def test_an_array_whose_submitter_was_killed_is_found_by_its_script(killed):
    script = killed.group_script(0)
    rows = [f"8|0|{script} 1000", "9|1|/elsewhere/group-000.sbatch 0", f"7|N/A|{script} 0"]
    mine = [f"12|{index}|{script} 0" for index in range(3)]
    (found,) = find_lost(killed, run=shows(*rows, *mine))
    assert found.array_id == "12" and found.numbers == (0, 1, 2)
    assert [job.job_id for job in read_jobs(killed.task(2))] == ["12_2"]
    assert find_lost(killed, run=shows(rc=1)) == []  # nothing is lost any more: nobody is asked


def test_an_array_that_slurm_has_forgotten_is_told_by_a_task_that_began(killed):
    add_job(killed.task(1), "12_1", scheduler="slurm", queued_by="submit")
    (found,) = find_lost(killed, run=shows())
    assert found.array_id == "12" and len(read_jobs(killed.task(1))) == 1


def test_an_array_that_slurm_never_took_is_no_longer_waited_for(killed):
    assert find_lost(killed, run=shows()) == []
    assert read_arrays(killed)[-1].event == "refused"
    assert unanswered(read_arrays(killed)) == []


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
        submit_array(killed, 0, [0, 2], parallelism=None, sbatch=_lose, run=array_size(1001))
    (found,) = find_lost(killed, run=shows(*rows, f"13|0|{script} 0", f"13|2|{script} 0"))
    assert found.array_id == "13" and found.numbers == (0, 2)


def _lose(arguments):
    raise UnclearError("lost its connection")
