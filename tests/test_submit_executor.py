"""The submitit plugin: what it submits and what it refuses."""

import json
import os
import sys
from pathlib import Path

import pytest
import submitit
from submitit.core.plugins import get_executors, get_job_environments

from ftslurm.errors import RunError, UsageError
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import ClusterSpec, RecoverySpec, RunSpec
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import ASKED, TaskRecord, add_array, add_tasks
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import Site
from ftslurm.scheduler.sbatch import RefusedError, UnclearError, parse_job_id, scrubbed
from ftslurm.submit.executor import (
    FtslurmExecutor,
    FtslurmJobEnvironment,
    submit_run,
)
from ftslurm.submit.freeze import freeze, plan_run
from ftslurm.submit.rank import TrainCall

TESTS = Path(__file__).resolve().parent
SITE = Site("slurm", "22.05.8", kill_wait_s=5, job_requeue=True, send_user_signal=True)


def _number(path):
    return int(path.stem.partition("-")[2])


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """fake_sbatch.py on PATH; returns a reader of its calls."""
    folder = tmp_path / "sbatch"
    folder.mkdir()
    place = folder / "bin" / "sbatch"
    place.parent.mkdir()
    text = (TESTS / "fake_sbatch.py").read_text()
    place.write_text(text.replace("/usr/bin/env python3", sys.executable, 1))
    place.chmod(0o755)
    monkeypatch.setenv("FAKE_SBATCH", str(folder))
    monkeypatch.setenv("PATH", f"{place.parent}:{os.environ['PATH']}")

    class Sbatch:
        @property
        def calls(self):
            return [
                json.loads(path.read_text())
                for path in sorted(folder.glob("call-*.json"), key=_number)
            ]

        def answers(self, **answer):
            (folder / "answer.json").write_text(json.dumps(answer))

    return Sbatch()


@pytest.fixture
def run(tmp_path):
    """Freezes a run for Slurm; returns its layout."""
    (tmp_path / "mytrain.py").write_text("def train(session): ...\n")

    def make(name="run", continue_by="auto", **cluster):
        values = {"scheduler": "slurm", "nodes": 2, "tasks_per_node": 2, **cluster}
        spec = RunSpec(
            name=name,
            entry="mytrain:train",
            runs_dir="runs",
            cluster=ClusterSpec(**values),
            recovery=RecoverySpec(continue_by=continue_by),
        )
        plan = plan_run(spec, "{}\n", open_scheduler("slurm"), SITE, folder=tmp_path)
        freeze(plan)
        return plan.layout

    return make


def test_submitit_finds_the_plugin_and_never_chooses_it_by_itself():
    assert get_executors()["ftslurm"] is FtslurmExecutor
    assert isinstance(get_job_environments()["ftslurm"], FtslurmJobEnvironment)
    assert FtslurmExecutor.affinity() < 0
    assert submitit.AutoExecutor.which() != "ftslurm"


def test_it_is_made_as_submitit_makes_it(tmp_path):
    auto = submitit.AutoExecutor(tmp_path / "logs", cluster="ftslurm")
    assert auto.folder == FtslurmExecutor(tmp_path / "logs").folder


def test_a_run_is_submitted_with_its_frozen_script_and_its_own_options(run, sbatch):
    layout = run(job_name="a 'b' $(c)", partition="low", exclude="n[1-2]", mem="1G")
    assert submit_run(layout, "slurm") == "4000"
    (call,) = sbatch.calls
    assert call["script"] == str(layout.script) and call["text"] == layout.script.read_text()
    assert "--parsable" in call["argv"]
    expected = {
        "job-name": "a 'b' $(c)",
        "partition": "low",
        "exclude": "n[1-2]",
        "mem": "1G",
        "nodes": "2",
        "ntasks-per-node": "2",
        "time": "01:00:00",
        "signal": "USR1@120",
        "open-mode": "append",
        "requeue": "",
        "output": f"{layout.submit}/%j.out",
    }
    assert expected.items() <= call["options"].items()


def test_a_run_that_resubmits_is_never_requeued_and_runs_one_job_at_a_time(run, sbatch):
    layout = run(continue_by="resubmit", job_name="gpt")
    submit_run(layout, "slurm")
    options = sbatch.calls[0]["options"]
    assert "no-requeue" in options and "requeue" not in options
    assert options["job-name"] == f"gpt-{layout.root.name}"
    assert options["dependency"] == "singleton"
    assert read_record(layout).continue_by == "resubmit"


HOSTILE = ["a b", "$(touch x)", '"', "'", "`id`", "-x", "--wrap=id", "\\", "a;b", "naïve 名前", "#"]


def test_sbatch_reads_a_hostile_job_name_as_it_was_written(run, sbatch):
    for name in HOSTILE:
        submit_run(run(job_name=name), "slurm")
    assert [call["options"]["job-name"] for call in sbatch.calls] == HOSTILE
    assert not Path("x").exists()


def test_the_job_inherits_nothing_that_steers_sbatch_or_srun(run, sbatch, monkeypatch):
    foreign = {
        "SBATCH_PARTITION": "x", "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "y", "SRUN_DEBUG": "1",
        "PMIX_RANK": "0", "SUBMITIT_EXECUTOR": "local",
    }  # fmt: skip
    for name, value in {**foreign, "SLURM_CONF": "/etc/s.conf", "KEPT": "k"}.items():
        monkeypatch.setenv(name, value)
    submit_run(run(), "slurm")
    environ = sbatch.calls[0]["environ"]
    assert not set(foreign) & set(environ)
    assert (environ["SLURM_CONF"], environ["KEPT"]) == ("/etc/s.conf", "k")


def test_scrubbing_looks_at_whole_prefixes():
    environ = {"MY_SLURM_X": "1", "SLURMX": "1", "SLURM_CONF_SERVER": "1", "SLURM_CONF": "1"}
    assert set(scrubbed(environ)) == {"MY_SLURM_X", "SLURMX", "SLURM_CONF"}


@pytest.mark.parametrize(
    "output, job_id",
    [
        ("77\n", "77"),
        ("77;cluster2\n", "77"),
        ("Welcome to job 12!\nquota: 5\n\n77;c\n\n", "77"),
        ("motd\r\n77\r\n", "77"),
    ],
)
def test_the_job_id_is_the_last_line_whatever_a_site_prints(output, job_id):
    assert parse_job_id(output) == job_id


@pytest.mark.parametrize("output", ["", "\n", "Submitted batch job 77\n", ";c\n", "77x\n"])
def test_an_answer_without_a_job_id_says_to_look_before_submitting_again(output):
    with pytest.raises(UnclearError, match="before you submit again"):
        parse_job_id(output)


def test_a_refusal_shows_what_sbatch_said(run, sbatch):
    sbatch.answers(rc=1, stdout="", stderr="sbatch: error: invalid partition specified: lwo\n")
    with pytest.raises(RefusedError, match="invalid partition specified: lwo"):
        submit_run(run(), "slurm")


@pytest.mark.parametrize(
    "said",
    [
        "Socket timed out on send/recv operation",
        "Zero Bytes were transmitted or received",
        "Message receive failure",
        "Message send failure",
        "Unable to contact slurm controller (send failure)",
        "Unable to contact slurm controller (receive failure)",
        "Unexpected message received",
    ],
)
def test_a_lost_answer_is_not_taken_for_a_refusal(run, sbatch, said):
    sbatch.answers(rc=1, stdout="", stderr=f"sbatch: error: Batch job submission failed: {said}\n")
    with pytest.raises(UnclearError, match="unclear whether there is a job") as caught:
        submit_run(run(job_name="a b"), "slurm")
    assert said in str(caught.value) and "squeue --me '--name=a b'" in str(caught.value)


def test_an_sbatch_that_was_killed_is_not_taken_for_a_refusal(run, monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\nkill -KILL $$\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UnclearError, match="ended by signal 9"):
        submit_run(run(), "slurm")


def test_a_controller_that_was_not_reached_has_no_job(run, sbatch):
    said = "sbatch: error: Unable to contact slurm controller (connect failure)\n"
    sbatch.answers(rc=1, stdout="", stderr=said)
    with pytest.raises(RefusedError, match="connect failure"):
        submit_run(run(), "slurm")


def test_a_machine_without_sbatch_names_the_local_way(run, monkeypatch, tmp_path):
    layout = run()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RefusedError, match="cluster=local"):
        submit_run(layout, "slurm")


def test_runs_are_submitted_together_only_as_tasks_of_a_sweep(run, sbatch, tmp_path):
    roots = [str(run(name).root) for name in ("a", "b")]
    plugin = FtslurmExecutor(tmp_path / "logs")
    with pytest.raises(UsageError, match="tasks of one sweep"):
        plugin.map_array(TrainCall(), roots)
    with pytest.raises(UsageError, match="tasks of one sweep"), plugin.batch():
        for root in roots:
            plugin.submit(TrainCall(), root)
    assert sbatch.calls == []


@pytest.fixture
def sweep(run, sbatch, tmp_path):
    """Three runs in the folder of a sweep, which asks for one of them what for no other."""
    (tmp_path / "sbatch/bin/scontrol").write_text("#!/bin/sh\necho SLURM_VERSION = 22.05.8\n")
    (tmp_path / "sbatch/bin/scontrol").chmod(0o755)
    layout = SweepLayout(tmp_path / "s")
    layout.submit.mkdir(parents=True)
    layout.sweep_json.write_text("{}")
    for group in (0, 1):
        layout.group_script(group).write_text("#!/bin/bash\n")
        layout.group_arguments(group).write_text(f"--job-name=g{group}\n")
    for number in range(3):
        run(f"run{number}").root.rename(layout.task(number).root)
    add_tasks(layout, [TaskRecord(n, layout.task_id(n), (), int(n == 1)) for n in range(3)])
    return layout


def test_tasks_of_a_sweep_are_an_array_a_group(sweep, sbatch):
    plugin = submitit.AutoExecutor(sweep.submit, cluster="ftslurm")
    plugin.update_parameters(ftslurm_array_parallelism=2)
    with plugin.batch():
        jobs = [plugin.submit(TrainCall(), str(sweep.task(n).root)) for n in range(3)]
    asked = [(call["options"]["job-name"], call["options"]["array"]) for call in sbatch.calls]
    assert asked == [("g0", "0,2%1"), ("g1", "1%1")]
    assert [job.job_id for job in jobs] == ["4000_0", "4001_1", "4000_2"]
    assert [job.paths.folder for job in jobs] == [sweep.task(n).submit for n in range(3)]
    assert jobs[0].num_tasks == 4


def test_of_an_array_that_is_found_again_only_tasks_that_were_asked_for_are_read(
    sweep, sbatch, tmp_path
):
    add_array(sweep, ASKED, 1, [1])
    squeue = tmp_path / "sbatch/bin/squeue"
    squeue.write_text(f"#!/bin/sh\necho '70|1|{sweep.group_script(1)}'\n")
    squeue.chmod(0o755)
    sweep.task(1).run_json.write_text("{")
    jobs = FtslurmExecutor(sweep.submit).map_array(
        TrainCall(), [str(sweep.task(number).root) for number in (0, 2)]
    )
    assert [job.job_id for job in jobs] == ["4000_0", "4000_2"]
    assert [job.job_id for job in read_jobs(sweep.task(1))] == ["70_1"]


def test_a_batch_that_is_not_taken_whole_gives_no_handles_of_other_runs(sweep, sbatch, tmp_path):
    place = tmp_path / "sbatch/bin/sbatch"
    place.rename(place.with_name("plain"))
    refuse = "*group-000*) echo 'invalid partition' >&2; exit 1;;"
    place.write_text(f'#!/bin/sh\ncase "$*" in {refuse} esac\nexec {place.parent}/plain "$@"\n')
    place.chmod(0o755)
    plugin = FtslurmExecutor(sweep.submit)
    with pytest.raises(RunError, match="1 of 3 tasks .* invalid partition"), plugin.batch():
        for number in range(3):
            plugin.submit(TrainCall(), str(sweep.task(number).root))
    assert [bool(read_jobs(sweep.task(number))) for number in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    "parameters",
    [
        {"partition": "low"},
        {"nodes": 2},
        {"slurm_partition": "low"},
        {"setup": ["id"]},
        {"tiem": 3},
    ],
)
def test_a_parameter_without_effect_is_an_error_directly(tmp_path, parameters):
    with pytest.raises(UsageError, match=next(iter(parameters))):
        FtslurmExecutor(tmp_path).update_parameters(**parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {"slurm_partition": "low"},
        {"local_setup": ["id"]},
        {"partition": "low"},
        {"max_num_timeout": 3},
        {"nodes": 2},
        {"timeout_min": 60},
        {"ftslurm_partition": "low"},
        {"tiem": 3},
    ],
)
def test_a_parameter_without_effect_is_an_error_through_auto_executor(tmp_path, parameters):
    auto = submitit.AutoExecutor(tmp_path, cluster="ftslurm")
    with pytest.raises((UsageError, NameError)):
        auto.update_parameters(**parameters)
    assert auto._executor.parameters == {}


def test_a_foreign_constructor_argument_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="slurm_max_num_timeout"):
        submitit.AutoExecutor(tmp_path, cluster="ftslurm", slurm_max_num_timeout=1)


def test_other_executors_keep_what_auto_executor_does_for_them(tmp_path):
    auto = submitit.AutoExecutor(tmp_path, cluster="debug")
    auto.update_parameters(slurm_partition="low", ftslurm_array_parallelism=2, timeout_min=3)


def test_only_frozen_runs_can_be_submitted(tmp_path, run, sbatch):
    plugin = FtslurmExecutor(tmp_path / "sweep")
    with pytest.raises(UsageError, match="submits runs"):
        plugin.submit(print, "hello")
    with pytest.raises(RunError, match="is no frozen run"):
        plugin.submit(TrainCall(), str(tmp_path))
    with pytest.raises(RunError, match="is no frozen run"):
        plugin.submit(TrainCall())
    assert sbatch.calls == []


def test_a_frozen_run_is_named_by_its_submit_folder(run, sbatch):
    layout = run()
    job = FtslurmExecutor(layout.submit).submit(TrainCall())
    assert job.job_id == "4000" and job.num_tasks == 4
    assert RunLayout(layout.root).script.is_file()
