"""Accounting as 22.05, 24.11 and 26.05 printed it on real clusters, and the jobs slurmctld knew."""

from collections import Counter
from pathlib import Path

import pytest

from ftslurm.report.fleet import Fleet
from ftslurm.report.fold import fold
from ftslurm.report.jobs import report_of
from ftslurm.report.logical import ending
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.job_table import Table, known_fields
from ftslurm.scheduler.sacct import parse_shown_job

DATA = Path(__file__).parent / "data"
COUNTS = {"22.05": (35, 21), "24.11": (11, 24), "26.05": (12, 24)}
"""Logical jobs; fields that this sacct had of those that were asked for then."""


def jobs_of(version, table_name="sacct.txt"):
    folder = DATA / f"slurm-{version}"
    columns = (DATA / "sacct-columns.txt").read_text().split()
    names = known_fields((folder / "helpformat.txt").read_text(), columns)
    table = Table(names, "^|^")
    with (folder / table_name).open(newline="\n") as lines:
        jobs = {job.job_id: job for job in fold(table.runs(lines))}
    assert table.left_out == 0
    return jobs, names


@pytest.mark.parametrize("version", COUNTS)
def test_every_row_is_read_and_every_job_counted_once(version):
    jobs, names = jobs_of(version)
    assert (len(jobs), len(names)) == COUNTS[version]
    words = Counter(run.state for job in jobs.values() for run in job.attempts)
    print(version, dict(words))
    assert all(job.state != "unknown" for job in jobs.values())
    fleet = Fleet()
    for job in jobs.values():
        fleet.add(report_of(job), expand=expand)
    assert fleet.jobs == len(jobs)


def test_a_job_that_was_requeued_is_one_with_two_attempts_in_each_version():
    for version, number in (("22.05", "4"), ("24.11", "3"), ("26.05", "3")):
        job = jobs_of(version)[0][number]
        assert [run.state for run in job.attempts][0] == "REQUEUED"
        assert len(job.attempts) == 2
        assert job.attempts[1].start_at > job.attempts[0].start_at


def test_tasks_of_an_array_are_jobs_of_their_own():
    assert {"8_0", "8_1", "8_2"} <= set(jobs_of("24.11")[0])
    assert {"9_0", "9_1", "9_2"} <= set(jobs_of("26.05")[0])


def test_rows_of_one_job_are_found_with_those_of_others_between_them():
    """sacct sorts by Submit: two jobs ran again after seven others had been submitted."""
    jobs, _ = jobs_of("22.05", "sacct-mixed.txt")
    assert [len(job.attempts) for job in jobs.values()] == [2, 1, 1, 1, 2, 1, 1, 1]
    assert [run.state for run in jobs["14"].attempts] == ["NODE_FAIL", "COMPLETED"]
    assert [run.state for run in jobs["18"].attempts] == ["REQUEUED", "COMPLETED"]
    assert [(end.cause, end.node) for end in map(ending, jobs["14"].attempts)] == [
        ("node", "n1"),
        (None, None),
    ]


def test_the_parts_of_a_het_job_are_one_job_in_each_of_its_runs():
    """Of a job of three parts that was requeued, 22.05 prints all parts of the first run and then
    all of the second."""
    jobs, _ = jobs_of("22.05", "sacct-het.txt")
    assert list(jobs) == ["1", "3", "5", "7", "9"]
    assert [job.parts for job in jobs.values()] == [2, 2, 2, 2, 3]
    told = [
        [
            (run.state, run.num_nodes, run.gpus, run.nodes, run.elapsed_s)
            for run in jobs[one].attempts
        ]
        for one in ("7", "9")
    ]
    assert told == [
        [("REQUEUED", 3, 5, "n1,n[2-3]", 5.0), ("COMPLETED", 3, 5, "n1,n[2-3]", 2.0)],
        [("REQUEUED", 3, 3, "n1,n2,n3", 4.0), ("COMPLETED", 3, 3, "n1,n2,n3", 2.0)],
    ]
    failed = report_of(jobs["1"])
    assert (failed.state, failed.failures[0].cause, failed.gpu_hours) == (
        "failed",
        "code",
        15 / 3600,
    )


def test_an_expedited_requeue_tells_its_exit_code():
    job = jobs_of("26.05")[0]["4"]
    assert [ending(run).cause for run in job.attempts] == ["code", "code"]
    assert "exit code 3, and queued again" in ending(job.attempts[0]).sentence


def test_our_agents_that_are_ended_with_their_job_are_no_failure():
    """Step `agents` is CANCELLED by 9 in jobs that ended well."""
    jobs, _ = jobs_of("22.05")
    agents = [
        (job, step)
        for job in jobs.values()
        for run in job.attempts
        for step in run.steps
        if step.name == "agents"
    ]
    assert len(agents) > 5
    assert any(step.signal == 9 for _, step in agents)
    assert all(ending(job.newest).cause is None for job, _ in agents if job.state == "completed")


@pytest.mark.parametrize("version", COUNTS)
def test_jobs_that_slurmctld_knows_are_read_in_each_version(version):
    lines = (DATA / f"slurm-{version}" / "jobs.txt").read_text().splitlines()
    found = [parse_shown_job(line) for line in lines]
    assert None not in found
    for run in found:
        assert run.user == "ada"
        assert run.uid
        assert run.state.isupper()
        assert (run.start_at is None) == (run.state == "PENDING")
