"""Many runs as one sweep: planned and written together, queued as arrays, found when lost."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.sweep_slurm import slurm_on_path  # noqa: F401 - a fixture

from ftslurm.errors import RunError, SchedulerError, SpecError, UsageError
from ftslurm.files import read_json
from ftslurm.run.jobs import read_jobs
from ftslurm.run.record import read_record
from ftslurm.run.spec import ClusterSpec, RecoverySpec, RunSpec
from ftslurm.run.sweep_record import read_arrays, read_sweep, read_tasks, unanswered
from ftslurm.run.trust import require_own
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import Site
from ftslurm.scheduler.sbatch import RefusedError, UnclearError
from ftslurm.submit.packages import Interpreters
from ftslurm.submit.sweep import Sweep, Task
from ftslurm.submit.sweep_course import Course

TESTS = Path(__file__).resolve().parent
SITE = Site("slurm", "22.05.8", kill_wait_s=5, job_requeue=True, send_user_signal=True)


@pytest.fixture
def begin(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mytrain.py").write_text("def train(session): ...\n")

    def make(parallelism=None, scheduler="slurm", detach=False, site=SITE):
        return Sweep.begin(
            "sweep",
            runs_dir=Path("runs"),
            folder=folder,
            scheduler=open_scheduler(scheduler),
            site=site,
            kind="run",
            sweeper="basic",
            command=["ftslurm", "submit", "-m"],
            parallelism=parallelism,
            detach=detach,
        )

    return make


def test_what_the_site_has_told_is_not_asked_again(begin, slurm):
    slurm.program("scontrol", "#!/bin/sh\necho 'asked once more' >&2; exit 1\n")
    sweep = begin(site=replace(SITE, array_size=11))
    sweep.launch([task(number) for number in range(12)])
    assert [call["options"]["array"] for call in slurm.calls] == ["0-9", "0-1"]
    with pytest.raises(RefusedError, match="MaxArraySize is 0"):
        begin(site=replace(SITE, array_size=0)).launch([task(0)])


def task(number, *, entry="mytrain:train", continue_by="auto", files=None, **cluster):
    values = {"scheduler": "slurm", "nodes": 2, "tasks_per_node": 2, **cluster}
    spec = RunSpec(
        name="run",
        entry=entry,
        seed=number,
        runs_dir="runs",
        cluster=ClusterSpec(**values),
        recovery=RecoverySpec(continue_by=continue_by),
    )
    return Task(number, (f"seed={number}",), spec, f"seed: {number}\n", files or {})


def test_the_tasks_are_runs_like_any_other_and_one_array(begin, slurm):
    sweep = begin(parallelism=2)
    sweep.launch([task(number, files={"x.pkl": b"x"}) for number in range(3)])
    layout, (call,) = sweep.layout, slurm.calls
    assert call["options"]["array"] == "0-2%2" and call["options"]["nodes"] == "2"
    log = f"{layout.root}/{layout.sweep_id}-%4a/submit/%A_%a.out"
    assert call["options"]["output"] == log
    assert [one.run_id for one in read_tasks(layout)] == [layout.task_id(n) for n in range(3)]
    assert read_sweep(layout).parallelism == 2
    for number in range(3):
        run = layout.task(number)
        record = read_record(run)
        assert (record.run_id, record.spec.seed) == (run.root.name, number)
        assert f"FTSLURM_RUN_DIR={run.root}\n" in run.script.read_text()
        assert [job.job_id for job in read_jobs(run)] == [f"4000_{number}"]
        assert (run.submit / "x.pkl").read_bytes() == b"x"
        assert (run.code / "mytrain.py").exists() and (run.code / "ftslurm").is_dir()
        assert "mytrain.py" in read_json(run.code_json)["files"]
        require_own(run)
        # Written once for all.
        for name in ("train.pkl", "x.pkl", "code.json"):
            assert (run.submit / name).samefile(layout.task(0).submit / name)
    # A successor, or a person's resume, is a single job by the run's own command.
    assert layout.task(2).sbatch_command.read_text().endswith(f"{layout.task(2).script}\n")
    assert not [path for path in layout.root.parent.iterdir() if path != layout.root]


def test_a_task_that_may_be_short_begins_without_agents(begin, slurm):
    sweep = begin()
    sweep.launch([task(0, nodes=1), task(1)])
    scripts = [sweep.layout.task(number).script.read_text() for number in range(2)]
    begins = [re.search(r"agent\.keep[\s\\]+(\S+)", text)[1] for text in scripts]
    assert begins == ["--after", "env"]
    assert all("ftslurm.agent " in text for text in scripts)


def test_each_task_goes_on_with_its_own_runs_script(begin, slurm):
    slurm.array_size(11)
    sweep = begin()
    sweep.launch([task(number) for number in (3, 12, 14)])
    assert [call["options"]["array"] for call in slurm.calls] == ["3", "2,4"]
    for call, index, number in [(0, 3, 3), (1, 2, 12), (1, 4, 14)]:
        script = sweep.layout.task(number).script
        script.write_text(f"echo task {number}")
        words = slurm.calls[call]["argv"]
        done = subprocess.run(
            ["bash", *words[-2:]],
            env={"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": str(index)},
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"task {number}\n", done
        # The log lies where the run's own machinery looks for it.
        log = slurm.calls[call]["options"]["output"].replace("%1a", str(index))
        log = log.replace("%4a", f"{index:04d}")
        assert Path(log).parent == sweep.layout.task(number).submit
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", slurm.calls[0]["script"]], check=True)


def test_a_bad_task_among_a_hundred_leaves_nothing_and_is_named(begin, slurm, tmp_path):
    sweep = begin()
    tasks = [task(number) for number in range(100)]
    tasks[97] = task(97, partition="a b\n")
    with pytest.raises(SpecError, match=r"^task 97 \(seed=97\): .*partition"):
        sweep.launch(tasks)
    assert slurm.calls == [] and list((tmp_path / "project").iterdir()) == [
        tmp_path / "project" / "mytrain.py"
    ]


def test_tasks_that_ask_for_different_nodes_are_arrays_of_their_own(begin, slurm):
    sweep = begin(parallelism=4)
    sweep.launch([task(number, nodes=1 + number % 2) for number in range(6)])
    asked = [(call["options"]["nodes"], call["options"]["array"]) for call in slurm.calls]
    assert asked == [("1", "0,2,4%2"), ("2", "1,3,5%2")]
    assert [one.group for one in read_tasks(sweep.layout)] == [0, 1, 0, 1, 0, 1]


def test_tasks_that_ask_for_as_many_nodes_for_fewer_ranks_are_an_array_of_their_own(begin, slurm):
    sweep = begin()
    sweep.launch([task(0, nodes=3), task(1, nodes=2, spares=1), task(2, nodes=3)])
    assert [call["options"]["array"] for call in slurm.calls] == ["0,2", "1"]


def test_tasks_that_resubmit_run_side_by_side_and_each_has_its_own_next_jobs(begin, slurm):
    sweep = begin()
    sweep.launch([task(number, continue_by="resubmit", job_name="gpt") for number in range(2)])
    options = slurm.calls[0]["options"]
    assert options["job-name"] == "gpt" and "dependency" not in options
    assert "no-requeue" in options
    for number in range(2):
        command = sweep.layout.task(number).sbatch_command.read_text()
        assert f"--job-name=gpt-{sweep.layout.task_id(number)} " in command
        assert "--dependency=singleton" in command


def test_a_second_batch_joins_the_first_and_no_number_comes_twice(begin, slurm):
    sweep = begin()
    sweep.launch([task(0), task(1)])
    before = sweep.layout.sweep_json.read_bytes()
    sweep.launch([task(2), task(3, nodes=3)])
    assert [call["options"]["array"] for call in slurm.calls] == ["0-1", "2", "3"]
    assert len(read_tasks(sweep.layout)) == 4 and sweep.layout.sweep_json.read_bytes() == before
    assert (sweep.layout.task(3).code / "mytrain.py").exists()
    assert [path.name for path in sweep.layout.root.glob(".*")] == []
    with pytest.raises(RunError, match="given twice"):
        sweep.launch([task(1)])


def test_what_all_tasks_share_is_found_out_once(begin, slurm, monkeypatch):
    asked = []
    real = Interpreters.packages
    monkeypatch.setattr(Interpreters, "packages", lambda self: asked.append(self) or real(self))
    begin().launch([task(number) for number in range(20)])
    assert len(asked) == 1 and len(slurm.calls) == 1


def test_nothing_stays_of_a_sweep_that_slurm_does_not_take(begin, slurm):
    slurm.answers(rc=1, stdout="", stderr="sbatch: error: invalid partition specified: lwo\n")
    sweep = begin()
    with pytest.raises(RefusedError, match="lwo"):
        sweep.launch([task(0), task(1)])
    assert not sweep.layout.root.exists()


def test_a_sweep_whose_answer_is_lost_stays(begin, slurm):
    slurm.answers(rc=1, stdout="", stderr="sbatch: error: Socket timed out on send/recv\n")
    sweep = begin()
    with pytest.raises(UnclearError, match=f"`ftslurm resume {sweep.layout.root}` looks for it"):
        sweep.launch([task(0), task(1)])
    assert [array.numbers for array in unanswered(read_arrays(sweep.layout))] == [(0, 1)]


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: task(0, scheduler="local", nodes=1), "cluster.scheduler"),
        (lambda: Task(0, (), RunSpec(runs_dir="other", entry="mytrain:train"), ""), "runs_dir"),
        (lambda: Task(0, (), RunSpec(run_id="x", entry="mytrain:train"), ""), "run_id"),
        (lambda: task(0, entry="nowhere_to_be_found:train"), "nowhere_to_be_found"),
    ],
)
def test_a_task_that_belongs_elsewhere_is_refused(begin, make, why):
    with pytest.raises(SpecError, match=why):
        begin().launch([make()])


def test_a_sweep_without_tasks_or_room_for_one_is_refused(begin):
    with pytest.raises(UsageError, match="no tasks"):
        begin().launch([])
    with pytest.raises(UsageError, match="parallelism"):
        begin(parallelism=0)
    with pytest.raises(UsageError, match="detach"):
        begin(scheduler="local", detach=True)


def test_a_container_sees_the_shared_code_or_the_run_has_its_own(begin, slurm):
    sweep = begin()
    sweep.launch([
        task(0, container_image="img.sqsh", rank_python="python3"),
        task(1, container=["apptainer", "exec", "--bind", "{run_dir}", "img.sif"],
             rank_python="python3"),
    ])  # fmt: skip
    shared, own = sweep.layout.task(0), sweep.layout.task(1)
    mounts = f"--container-mounts={sweep.layout.code}:{sweep.layout.code},{shared.root}:"
    assert mounts in shared.script.read_text() and shared.code.is_symlink()
    assert not own.code.is_symlink() and (own.code / "mytrain.py").is_file()
    require_own(own)


def test_a_task_is_not_trusted_when_others_may_change_the_shared_code(begin, slurm):
    sweep = begin()
    sweep.launch([task(0)])
    sweep.layout.root.chmod(0o770)
    with pytest.raises(RunError, match="may be written by others"):
        require_own(sweep.layout.task(0))


AT_LIMIT = "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed\n"
REFUSED = "sbatch: error: invalid partition specified: lwo\n"


def test_what_a_limit_leaves_stays(begin, slurm):
    slurm.answers(rc=1, stdout="", stderr=AT_LIMIT)
    sweep = begin()
    outcome = sweep.launch([task(0), task(1)])
    assert sweep.layout.root.exists() and list(outcome.left) == [0, 1]


def course(tmp_path, monkeypatch, *, detach=True):
    """A course in a project of its own, and what it says."""
    (tmp_path / "mytrain.py").write_text("def train(session): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ftslurm.submit.sweep_course.site_of", lambda *_, **__: SITE)
    said = []
    made = Course(
        kind="run", sweeper="basic", command=["x"], parallelism=None, detach=detach, say=said.append
    )
    return made, made.begin(task(0).spec), said


def test_detached_at_a_limit_says_how_many_are_queued_and_how_to_queue_the_rest(
    tmp_path, monkeypatch, slurm
):
    made, layout, said = course(tmp_path, monkeypatch)
    slurm.answers(rc=1, stdout="", stderr=AT_LIMIT)
    assert made.launch([task(0), task(1)]) == []
    assert said[0] == f"sweep {layout.sweep_id}: of 2 tasks 0 are queued"
    assert said[2] == (
        "2 are not queued yet: Slurm takes no more jobs of yours just now; queue them later with "
        f"`ftslurm resume {layout.root}`"
    )


def test_of_groups_of_which_one_is_refused_the_others_run_and_its_tasks_have_failed(
    tmp_path, monkeypatch, slurm
):
    made, layout, said = course(tmp_path, monkeypatch)
    slurm.refuses(REFUSED, "group-000")
    (failed,) = made.launch([task(0), task(1, nodes=1)])
    assert (failed.number, failed.finished) == (0, False)
    assert failed.text.startswith("was not queued: sbatch refused the job") and "lwo" in failed.text
    assert said[0] == f"sweep {layout.sweep_id}: of 2 tasks 1 are queued"
    assert said[1] == f"sweep folder:  {layout.root}" and "lwo" in said[2]
    assert [bool(read_jobs(layout.task(number))) for number in (0, 1)] == [False, True]


def test_an_interrupt_while_tasks_are_queued_says_what_is_queued(tmp_path, monkeypatch, slurm):
    made, layout, said = course(tmp_path, monkeypatch)
    plain = subprocess.run

    def interrupted(argv, **options):
        if argv[0] == "sbatch" and "group-001" in argv[-2]:
            raise KeyboardInterrupt
        return plain(argv, **options)

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.launch([task(0), task(1, nodes=1), task(2, nodes=3)])
    assert said[-1].startswith("interrupted: 1 of 3 tasks are queued, 1 more may be")
    for verb in ("status", "resume", "cancel"):
        assert f"`ftslurm {verb} {layout.root}`" in said[-1]


def test_an_interrupt_before_anything_is_queued_leaves_nothing_and_says_so(
    tmp_path, monkeypatch, slurm
):
    made, layout, said = course(tmp_path, monkeypatch)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ftslurm.submit.executor.submit_tasks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.launch([task(0), task(1)])
    assert not layout.root.exists()
    assert said == ["interrupted before anything was queued; nothing is left of these tasks"]


def test_an_interrupt_before_further_tasks_are_written_promises_nothing_of_them(
    tmp_path, monkeypatch, slurm
):
    made, layout, said = course(tmp_path, monkeypatch)
    made.launch([task(0)])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.launch([task(1)])
    assert said[-1].endswith("nothing is left of these tasks") and layout.root.exists()


def test_nothing_stays_when_slurm_stops_answering_before_it_is_asked_for_a_job(begin, slurm):
    slurm.program("scontrol", "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    sweep = begin()
    with pytest.raises(SchedulerError, match="Unable to contact"):
        sweep.launch([task(0)])
    assert not sweep.layout.root.exists()


def test_an_interrupt_on_this_machine_says_what_was_started(tmp_path, monkeypatch):
    (tmp_path / "mytrain.py").write_text("def train(session): ...\n")
    monkeypatch.chdir(tmp_path)
    said = []
    local = [task(n, scheduler="local", nodes=1) for n in range(3)]
    made = Course(
        kind="run", sweeper="basic", command=["x"], parallelism=1, detach=False, say=said.append
    )
    layout = made.begin(local[0].spec)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ftslurm.submit.executor.submit_run", lambda run, scheduler: "local-1")
    monkeypatch.setattr("ftslurm.sweep.here._is_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.launch(local)
    assert said[1] == f"sweep folder:  {layout.root}"
    assert said[-1].startswith(
        "interrupted: 1 of 3 tasks were started, and what still runs goes on"
    )
    assert f"`ftslurm resume {layout.root}`" in said[-1]
