"""The Slurm scheduler says the right command and reads the answers that real versions give."""

import os
import stat
from pathlib import Path

import pytest

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.protocol import CommandMissing, NodeNeed, QueuedJob, RequeueImpossible
from ftslurm.scheduler.slurm import Completed, SlurmScheduler, run_command

OK = Completed(0, "", "")
DOWN = Completed(1, "Slurmctld(primary) at ftctl is DOWN\n", "")


class Commands:
    """Runs nothing: answers by a command's first two words, the last answer again and again."""

    def __init__(self, **answers):
        self.answers = {"scontrol_ping": [OK], **answers}
        self.seen = []

    def __call__(self, argv, timeout_s):
        assert 0 < timeout_s <= 60
        self.seen.append(argv)
        answers = self.answers.get("_".join(argv[:2]).replace("--", ""), self.answers.get(argv[0]))
        assert answers, f"unexpected {argv}"
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def count(self, *words):
        return sum(argv[: len(words)] == list(words) for argv in self.seen)


def squeue(line):
    return [Completed(0, f"{line}\n", "")]


def requeue(commands, **options):
    slept = []
    scheduler = SlurmScheduler(commands, sleep=slept.append)
    return scheduler.requeue("70_1", **options), slept


def test_a_requeue_names_one_array_task_and_leaves_ended_jobs_alone():
    commands = Commands(scontrol_requeue=[OK], squeue=squeue("COMPLETING|None|NONE"))
    assert requeue(commands) == (True, [])
    assert ["scontrol", "requeue", "Incomplete", "70_1"] in commands.seen


def test_a_requeue_that_killed_its_scontrol_was_accepted():
    commands = Commands(
        scontrol_requeue=[Completed(143, "", "")], squeue=squeue("COMPLETING|None|NONE")
    )
    assert requeue(commands) == (True, [])


def test_a_second_requeue_finds_the_job_pending_and_that_is_success():
    text = "Job is pending execution for job 70_1"
    commands = Commands(
        scontrol_requeue=[Completed(1, "", text)], squeue=squeue("PENDING|BeginTime|N/A")
    )
    assert requeue(commands) == (True, [])


@pytest.mark.parametrize("rc", [0, 1])
def test_a_cancelled_job_stays_cancelled(rc):
    # `Incomplete` leaves it alone, with code 0 (seen on 22.05).
    commands = Commands(
        scontrol_requeue=[Completed(rc, "", "")],
        squeue=squeue("CANCELLED|None|2026-11-29T15:16:43"),
    )
    assert requeue(commands) == (False, [])


@pytest.mark.parametrize(("restarts", "accepted"), [
    ("0", False),  # cancelled: being torn down, and not queued again
    ("1", True),
    ("", True),  # not to be had: the code 0 counts
])  # fmt: skip
def test_a_job_being_torn_down_comes_back_only_when_its_restart_count_has_risen(restarts, accepted):
    commands = Commands(
        scontrol_requeue=[OK],
        squeue=[*squeue("COMPLETING|None|NONE"), Completed(0, f"{restarts:<20}\n", "")],
    )
    assert requeue(commands, restart_count=0) == (accepted, [])
    assert commands.seen[-1][-1] == "--Format=RestartCnt"


def test_while_the_controller_is_away_only_ping_is_asked_and_the_requeue_comes_after():
    commands = Commands(
        scontrol_ping=[DOWN, DOWN, OK],
        scontrol_requeue=[OK],
        squeue=squeue("COMPLETING|None|NONE"),
    )
    accepted, slept = requeue(commands)
    assert accepted and len(slept) == 2
    assert commands.count("scontrol", "requeue") == 1


def test_a_controller_that_goes_away_in_between_is_asked_again():
    lost = Completed(1, "", "Unexpected message received for job 70_1")
    commands = Commands(
        scontrol_requeue=[lost, OK],
        squeue=[Completed(1, "", "slurm_load_jobs error: Unable to contact slurm controller"),
                *squeue("COMPLETING|None|NONE")],
    )  # fmt: skip
    accepted, slept = requeue(commands)
    assert accepted and len(slept) == 1


def test_a_job_still_running_after_an_unclear_answer_is_asked_for_again():
    commands = Commands(
        scontrol_requeue=[Completed(143, "", ""), OK],
        squeue=[*squeue("RUNNING|None|NONE"), *squeue("COMPLETING|None|NONE")],
    )
    accepted, slept = requeue(commands)
    assert accepted and len(slept) == 1


@pytest.mark.parametrize("line", ["RUNNING|None|NONE", "COMPLETING|None|NONE"])
def test_a_job_that_slurm_never_requeues_is_told_from_other_refusals(line):
    text = "Requested operation is presently disabled for job 7"
    commands = Commands(scontrol_requeue=[Completed(1, "", text)], squeue=squeue(line))
    with pytest.raises(RequeueImpossible, match="presently disabled"):
        requeue(commands, restart_count=0)


def missing(argv, timeout_s):
    raise CommandMissing(f"`{argv[0]}` is not on PATH")


def test_without_scontrol_nothing_can_be_requeued_and_squeue_says_whether_slurm_is_there():
    def no_scontrol(argv, timeout_s):
        return missing(argv, timeout_s) if argv[0] == "scontrol" else OK

    scheduler = SlurmScheduler(no_scontrol)
    assert scheduler.controller_alive()
    with pytest.raises(RequeueImpossible, match="`scontrol` is not on PATH"):
        scheduler.requeue("12")


def test_a_requeue_into_a_hold_is_one_command():
    commands = Commands(scontrol_requeuehold=[OK], squeue=squeue("COMPLETING|None|NONE"))
    assert requeue(commands, hold=True) == (True, [])
    assert ["scontrol", "requeuehold", "Incomplete", "70_1"] in commands.seen


def test_only_a_waiting_job_is_held():
    # Slurm would accept a hold of a running job, and obey it much later.
    commands = Commands(squeue=squeue("RUNNING|None|NONE"))
    with pytest.raises(SchedulerError, match="only a waiting job can be held"):
        SlurmScheduler(commands).hold("12")
    commands = Commands(squeue=squeue("PENDING|Dependency|N/A"), scontrol_hold=[OK])
    SlurmScheduler(commands).hold("12")
    assert commands.seen[-1] == ["scontrol", "hold", "12"]


def test_a_hold_of_slurms_own_is_not_the_owners_to_release():
    text = "Access/permission denied for job 33"
    commands = Commands(scontrol_release=[Completed(1, "", text)])
    with pytest.raises(SchedulerError, match=text):
        SlurmScheduler(commands).release("33")


@pytest.mark.parametrize(("printed", "may"), [("0", False), ("1", True), ("", None)])
def test_whether_a_job_may_be_requeued_is_squeues_word(printed, may):
    stamp = "2026-11-30T12:03:03" if printed else ""
    commands = Commands(squeue=[Completed(0, f"{printed:<4}{stamp:<24}\n", "")])
    assert SlurmScheduler(commands).may_requeue("12") is may
    assert SlurmScheduler(missing).may_requeue("12") is None


@pytest.mark.parametrize(("printed", "is_so"), [
    ("2026-11-29T18:07:51", True), ("N/A", False), ("", None),
])  # fmt: skip
def test_a_job_is_preempted_when_it_has_a_time_of_it(printed, is_so):
    commands = Commands(squeue=[Completed(0, f"{printed} \n", "")])
    assert SlurmScheduler(commands).is_preempted("12") is is_so
    assert commands.seen[0][-1] == "--Format=PreemptTime"


FORGOTTEN = Completed(1, "", "slurm_load_jobs error: Invalid job id specified")


@pytest.mark.parametrize(("line", "accounting", "cancelled"), [
    ("CANCELLED|None|NONE", None, True),
    ("PREEMPTED|None|NONE", None, False),
    ("RUNNING|None|NONE", None, False),
    ("COMPLETING|None|NONE", "CANCELLED by 1007", True),
    ("COMPLETING|None|NONE", "PREEMPTED", False),
    ("COMPLETING|None|NONE", "RUNNING", None),  # it lags
    (FORGOTTEN, "CANCELLED by 1007", True),
    (FORGOTTEN, "NODE_FAIL", False),
    (FORGOTTEN, "", None),
    ("COMPLETING|None|NONE", Completed(1, "", "Connection refused"), None),
])  # fmt: skip
def test_a_cancelled_job_is_told_from_others_by_squeue_or_else_by_accounting(
    line, accounting, cancelled
):
    answer = [line] if isinstance(line, Completed) else squeue(line)
    told = [accounting] if isinstance(accounting, Completed) else squeue(accounting or "")
    assert SlurmScheduler(Commands(squeue=answer, sacct=told)).was_cancelled("12") is cancelled


def test_the_waiting_jobs_of_a_run_are_those_with_its_script():
    text = (
        "13|singleton(unfulfilled),afterany:12(unfulfilled)|/runs/a|b/train.sbatch\n"
        "14|(null)|/runs/a|b/train.sbatch\n15|afterany:12(unfulfilled)|/runs/other\n16|(null)|(null)\n"
    )
    commands = Commands(squeue=[Completed(0, text, "")])
    found = SlurmScheduler(commands).waiting(Path("/runs/a|b/train.sbatch"))
    assert [(job.job_id, job.waits_for("12")) for job in found] == [("13", True), ("14", False)]
    assert "--all" in commands.seen[0], "a partition may be hidden"


@pytest.mark.parametrize(("dependency", "waits"), [
    ("afterany:70_1(unfulfilled)", True),
    ("singleton(unfulfilled)", False),
    ("afterok:70_1(unfulfilled)", False),
    ("afterany:170_1(unfulfilled)", False),
    ("", False),
])  # fmt: skip
def test_a_successor_waits_for_its_own_predecessor(dependency, waits):
    assert QueuedJob("13", dependency).waits_for("70_1") is waits


@pytest.mark.parametrize("text", [
    "Invalid job id specified for job 987654",
    "Access/permission denied for job 33",
])  # fmt: skip
def test_a_refusal_for_good_is_an_error_that_quotes_it(text):
    commands = Commands(
        scontrol_requeue=[Completed(1, "", text)], squeue=squeue("RUNNING|None|NONE")
    )
    with pytest.raises(SchedulerError, match=text):
        requeue(commands)


def test_a_requeue_is_given_up_when_told_so():
    with pytest.raises(SchedulerError, match="does not answer"):
        requeue(Commands(scontrol_ping=[DOWN]), give_up=lambda: True)


@pytest.mark.parametrize(("line", "moved"), [
    ("PENDING|BeginTime|NONE", True),
    ("PENDING|Resources|NONE", False),
    ("PENDING|JobHeldUser|N/A", False),
    ("COMPLETING|None|NONE", False),
    ("RUNNING|None|NONE", False),
])  # fmt: skip
def test_only_a_job_that_waits_for_its_begin_time_is_hastened_and_never_to_now(line, moved):
    commands = Commands(squeue=squeue(line), scontrol_update=[OK])
    assert SlurmScheduler(commands).hasten("12") is moved
    updates = [argv for argv in commands.seen if argv[1] == "update"]
    assert updates == ([["scontrol", "update", "jobid=12", "StartTime=now+4"]] if moved else [])


def test_the_warn_signal_goes_to_the_steps_only():
    commands = Commands(scancel=[OK])
    SlurmScheduler(commands).signal_ranks("12", "USR1")
    assert commands.seen == [["scancel", "--signal=USR1", "12"]]


def test_a_state_that_cannot_be_had_is_unknown_with_the_reason():
    invalid = Completed(1, "", "slurm_load_jobs error: Invalid job id specified")
    state = SlurmScheduler(Commands(squeue=[invalid])).job_state("987654")
    assert not state.is_known and "Invalid job id" in state.reason


@pytest.mark.parametrize(("environ", "job_id"), [
    ({"SLURM_JOB_ID": "71"}, "71"),
    ({"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "2"}, "70_2"),
])  # fmt: skip
def test_the_last_task_of_an_array_is_not_taken_for_the_whole_array(environ, job_id):
    assert SlurmScheduler().own_job_id(environ) == job_id


TASK_2 = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "2"}
QUESTIONS = {
    "job_state": lambda scheduler, job_id: scheduler.job_state(job_id),
    "end_time": lambda scheduler, job_id: scheduler.end_time(job_id),
    "is_preempted": lambda scheduler, job_id: scheduler.is_preempted(job_id),
    "may_requeue": lambda scheduler, job_id: scheduler.may_requeue(job_id),
    "requeue": lambda scheduler, job_id: scheduler.requeue(job_id, restart_count=0),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(("environ", "job_id", "named"), [
    ({"SLURM_JOB_ID": "72", **TASK_2}, "70_2", "72"),
    ({"SLURM_JOB_ID": "70", **TASK_2}, "70_2", "70_2"),  # 70 is the whole array's
    ({"SLURM_JOB_ID": "72", **TASK_2}, "70_1", "70_1"),
    ({"SLURM_JOB_ID": "72"}, "72", "72"),
    ({}, "70_2", "70_2"),
])  # fmt: skip
def test_our_own_task_of_an_array_is_asked_for_without_the_whole_array(
    question, environ, job_id, named
):
    commands = Commands(scontrol_requeue=[OK], squeue=squeue("COMPLETING|None|NONE"))
    QUESTIONS[question](SlurmScheduler(commands, environ=environ), job_id)
    asked = [argv[3] for argv in commands.seen if argv[0] == "squeue"]
    assert asked and set(asked) == {f"--jobs={named}"}
    acted = [argv[-1] for argv in commands.seen if argv[:2] == ["scontrol", "requeue"]]
    assert set(acted) <= {job_id}, "only what is asked is named so"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    def make(text):
        path = tmp_path / "squeue"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def test_a_users_own_defaults_do_not_change_what_a_command_prints(tool, monkeypatch):
    tool("env")
    for name in ("SQUEUE_FORMAT", "SLURM_TIME_FORMAT", "SINFO_FORMAT", "SLURM_CLUSTERS",
                 "SACCT_FEDERATION", "SLURM_BITSTR_LEN"):  # fmt: skip
        monkeypatch.setenv(name, "relative")
    monkeypatch.setenv("SLURM_CONF", "/site/slurm.conf")
    seen = run_command(["squeue"], 10).stdout.splitlines()
    assert not any(line.endswith("=relative") for line in seen)
    assert "SLURM_CONF=/site/slurm.conf" in seen and "LC_ALL=C" in seen
    assert "SLURM_BITSTR_LEN=0" in seen, "lists of tasks are whole"
    assert "SLURM_TIME_FORMAT=%s" in seen, "no hour comes twice"


def test_death_by_a_signal_reads_as_in_a_shell(tool):
    tool("kill -TERM $$")
    assert run_command(["squeue"], 10).rc == 143


def test_a_command_that_hangs_or_is_missing_is_a_sentence(tool):
    tool("exec sleep 30")
    with pytest.raises(SchedulerError, match="gave no answer for 0.2 s"):
        run_command(["squeue"], 0.2)
    with pytest.raises(SchedulerError, match="not on PATH.*cluster=local"):
        run_command(["squeue-that-is-not-there"], 5)


def test_the_nodes_that_could_serve_are_those_of_the_partition():
    commands = Commands(sinfo=[Completed(0, "n1|idle|h100|gpu:8|9\nn2|down*|h100|gpu:8|9\n", "")])
    assert SlurmScheduler(commands).serving_nodes("low", NodeNeed("h100", 8)) == ["n1"]
    assert commands.seen[-1][0] == "sinfo" and "--partition=low" in commands.seen[-1]
    assert SlurmScheduler(commands).serving_nodes(None, NodeNeed()) == ["n1"]
    assert not any("partition" in word for word in commands.seen[-1])


@pytest.mark.parametrize("answers", [
    {"scontrol_ping": [DOWN]}, {"sinfo": [Completed(1, "", "Invalid partition name")]},
])  # fmt: skip
def test_where_nobody_can_say_which_nodes_could_serve_it_says_so(answers):
    assert SlurmScheduler(Commands(**answers)).serving_nodes("low", NodeNeed()) is None


@pytest.mark.parametrize(("answers", "nodes"), [
    ({"sinfo": [Completed(0, "n2\nn1\nn1\n", "")]}, ["n1", "n2"]),
    ({"sinfo": [Completed(0, "", "")]}, None),  # PrivateData=nodes
    ({"sinfo": [Completed(1, "", "Unable to contact slurm controller")]}, None),
    ({"scontrol_ping": [DOWN]}, None),
])  # fmt: skip
def test_all_nodes_that_slurm_has_are_told_once_each_or_nobody_can_say(answers, nodes):
    assert SlurmScheduler(Commands(**answers)).all_nodes() == nodes


@pytest.mark.parametrize(("line", "nodes"), [
    ("n[1-3]", ["n1", "n2", "n3"]), ("(null)", []), ("", []),
])  # fmt: skip
def test_the_nodes_a_job_is_kept_off_are_read(line, nodes):
    assert SlurmScheduler(Commands(squeue=squeue(line))).excluded_nodes("70_1") == nodes


def test_a_job_is_kept_off_nodes_and_a_refusal_is_told():
    update = ["scontrol", "update", "jobid=70_1", "ExcNodeList=n1,n3"]
    commands = Commands(scontrol_update=[OK])
    SlurmScheduler(commands).exclude_nodes("70_1", ["n1", "n3"])
    assert commands.seen == [update]
    running = Completed(1, "", "Job is no longer pending execution for job 70_1")
    with pytest.raises(SchedulerError, match="no longer pending"):
        SlurmScheduler(Commands(scontrol_update=[running])).exclude_nodes("70_1", ["n1"])
    gone = Completed(1, "", "slurm_load_jobs error: Invalid job id specified")
    with pytest.raises(SchedulerError, match="Invalid job id"):
        SlurmScheduler(Commands(squeue=[gone])).excluded_nodes("70_1")
