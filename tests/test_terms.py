"""On which terms a job runs: one question to Slurm, by the job's own number, with patience."""

import time

import pytest

from ftslurm.scheduler.protocol import CommandMissing, Terms
from ftslurm.scheduler.slurm import CommandHangs, Completed, SlurmScheduler

JOB = {"SLURM_JOB_ID": "12"}
NO_LIMIT = "0   N/A                     "
AWAY = "slurm_load_jobs error: Unable to contact slurm controller"


class Slurm:
    """Answers squeue with what it prints, or raises it, the last one again and again."""

    def __init__(self, *squeue, is_away=False):
        self.squeue, self.is_away = list(squeue), is_away
        self.asked = []

    def __call__(self, argv, timeout_s):
        self.asked.append((argv[0], timeout_s))
        self.argv = argv
        if argv[0] == "scontrol":
            return Completed(int(self.is_away), "", "")
        answer = self.squeue.pop(0) if len(self.squeue) > 1 else self.squeue[0]
        if isinstance(answer, Exception):
            raise answer
        return Completed(int(answer == AWAY), answer.replace(AWAY, ""), "")


@pytest.mark.parametrize(("printed", "terms"), [
    ("1   2026-11-30T12:03:03     ", Terms(True, time.mktime((2026, 11, 30, 12, 3, 3, 0, 0, -1)))),
    (NO_LIMIT, Terms(False, None)),
    ("1   Unknown                 ", Terms(True, None)),
])  # fmt: skip
def test_the_terms_of_a_job_are_one_question(printed, terms):
    slurm = Slurm(f"{printed}\n")
    assert SlurmScheduler(slurm).terms(JOB) == terms
    assert slurm.asked == [("squeue", 10.0)]


@pytest.mark.parametrize("answer", [
    "", "slurm_load_jobs error", AWAY, CommandHangs("no answer"), CommandMissing("no squeue"),
])  # fmt: skip
def test_a_scheduler_that_does_not_answer_says_no_terms(answer):
    terms = SlurmScheduler(Slurm(answer)).terms(JOB)
    assert terms == Terms() and not terms.are_known


def test_where_no_command_of_slurms_is_there_nothing_is_known():
    def missing(argv, timeout_s):
        raise CommandMissing(f"`{argv[0]}` is not on PATH")

    assert SlurmScheduler(missing).terms(JOB) == Terms()


def test_a_busy_slurmctld_is_waited_for_where_one_that_is_away_is_not():
    busy = Slurm(CommandHangs("no answer for 10 s"), NO_LIMIT)
    assert SlurmScheduler(busy).terms(JOB) == Terms(may_requeue=False)
    assert busy.asked == [("squeue", 10.0), ("scontrol", 10.0), ("squeue", 60.0)]
    away = Slurm(CommandHangs("no answer for 10 s"), is_away=True)
    assert SlurmScheduler(away).terms(JOB) == Terms()
    assert away.asked == [("squeue", 10.0), ("scontrol", 10.0)]
