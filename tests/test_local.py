"""The local scheduler behaves towards a batch script and its ranks as Slurm does."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.errors import SchedulerError
from ftslurm.files import write_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import ClusterSpec, RunSpec, to_dict
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.local_state import LocalJob, read_job, write_job
from ftslurm.scheduler.process import ProcessName

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 90


class Job:
    """run_batch in a process of its own, with one script."""

    def __init__(self, folder, script, *, time_limit="01:00:00", lead_s=0, kill_wait_s=10.0):
        self.layout = RunLayout(folder / "run")
        self.layout.submit.mkdir(parents=True)
        spec = RunSpec(cluster=ClusterSpec(time=time_limit, signal_lead_s=lead_s))
        record = {"schema_version": 1, "run_id": "r", "scheduler": "local", "spec": to_dict(spec)}
        write_json(self.layout.run_json, record)
        self.layout.script.write_text(f"cd {self.layout.root}\npython={sys.executable}\n{script}")
        self.scheduler = open_scheduler("local", run_dir=self.layout.root)
        call = (
            "import sys, pathlib; from ftslurm.scheduler.local import run_batch;"
            f"sys.exit(run_batch(pathlib.Path({str(self.layout.root)!r}), job_id='local-7',"
            f" kill_wait_s={kill_wait_s}, requeue_delay_s=0.1))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", call],
            env={**os.environ, "PYTHONPATH": str(ROOT), "SLURM_LEAK": "1"},
        )

    def file(self, name):
        return self.layout.root / name

    def wait_for(self, name, *, text="", deadline_s=DEADLINE_S):
        until(lambda: self.file(name).exists() and text in self.file(name).read_text(), deadline_s)

    def wait(self, deadline_s=DEADLINE_S):
        return self.process.wait(deadline_s)

    def state(self):
        return self.scheduler.job_state("local-7")


def until(condition, deadline_s=DEADLINE_S):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start_job(script, **options):
        jobs.append(Job(tmp_path, script, **options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()


RANKS = (
    '"$python" -m ftslurm.scheduler.local_ranks --ntasks 2 --output "log-%t" --kill-wait 10 -- '
    '"$python" -c "$rank" &\n'
    'launcher=$!; trap "term=1" TERM; trap "" USR1\n'
    "wait $launcher; rc=$?; while [ $rc -gt 128 ] && kill -0 $launcher 2>/dev/null; do "
    "wait $launcher; rc=$?; done\n"
)

# Says which signals came, in their order, and leaves after the first of LAST.
PATIENT_RANK = """rank='
import os, signal, sys, time
got = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
print("ready", os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"], flush=True)
while not set(got) & {LAST}: time.sleep(0.02)
print("got", *got, flush=True)
sys.exit(75)
'
export FTSLURM_RUN_DIR=$PWD
"""
LEAVES_ON_ANY = PATIENT_RANK.replace("LAST", '"SIGUSR1", "SIGTERM"')
LEAVES_ON_TERM = PATIENT_RANK.replace("LAST", '"SIGTERM"')


def test_a_script_sees_a_jobs_environment_and_its_code_is_the_jobs(start):
    job = start('env > seen; exit "${SLURM_RESTART_COUNT:-3}"')
    assert job.wait() == 3
    seen = job.file("seen").read_text().splitlines()
    assert "SLURM_JOB_ID=local-7" in seen
    assert any(line.startswith("SLURM_JOB_NODELIST=") for line in seen)
    assert "SLURM_LEAK=1" not in seen
    assert job.state().word == "FAILED"


def test_the_end_of_a_good_script_is_completed(start):
    job = start("true")
    assert job.wait() == 0
    assert job.state().word == "COMPLETED"
    assert job.scheduler.requeue("local-7") is False


def test_a_requeue_ends_the_script_and_runs_it_again_under_the_same_id(start):
    job = start(
        'if [ -n "${SLURM_RESTART_COUNT:-}" ]; then echo "$SLURM_JOB_ID" > again; exit 0; fi\n'
        'trap "echo term > trapped; exit 0" TERM; echo > ready; while :; do sleep 0.05; done'
    )
    job.wait_for("ready")
    assert job.state().word == "RUNNING"
    assert job.scheduler.requeue("local-7") is True
    assert job.scheduler.requeue("local-7") is True
    assert job.wait() == 0
    assert job.file("trapped").exists()
    assert job.file("again").read_text() == "local-7\n"
    assert read_job(job.layout).restart_count == 1


def test_a_script_that_asks_for_a_requeue_and_leaves_at_once_runs_again(start):
    ask = (
        "import pathlib; from ftslurm.scheduler import open_scheduler;"
        "open_scheduler('local', run_dir=pathlib.Path('.')).requeue('local-7')"
    )
    job = start(
        'echo run >> runs; [ -n "${SLURM_RESTART_COUNT:-}" ] && exit 0\n'
        f'trap "" TERM; "$python" -c "{ask}"; exit 0'
    )
    assert job.wait() == 0
    assert job.file("runs").read_text() == "run\nrun\n"


def test_a_script_that_ignores_term_is_killed_after_the_kill_wait(start):
    job = start('trap "" TERM; echo > ready; while :; do sleep 0.05; done', kill_wait_s=0.3)
    job.wait_for("ready")
    job.scheduler.cancel("local-7")
    assert job.wait() == 137
    assert job.state().word == "CANCELLED"
    assert job.scheduler.requeue("local-7") is False


def test_usr1_reaches_the_ranks_and_not_the_shell(start):
    job = start(LEAVES_ON_ANY + RANKS + 'echo "rc=$rc term=${term:-0}" > end')
    job.wait_for("log-0", text="ready 0 2")
    job.wait_for("log-1", text="ready 1 2")
    job.scheduler.signal_ranks("local-7", "USR1")
    assert job.wait() == 0
    # 143: the first exit brings the other rank TERM, maybe when its handlers are gone already.
    assert job.file("end").read_text() in ("rc=75 term=0\n", "rc=143 term=0\n")
    for rank in (0, 1):
        assert "got SIGUSR1" in job.file(f"log-{rank}").read_text()
    with pytest.raises(SchedulerError, match="no ranks"):
        job.scheduler.signal_ranks("local-7", "USR1")


def test_the_time_limit_warns_the_ranks_and_then_ends_the_job_for_good(start):
    """The ranks have 15 s to be there, and 8 to say what came."""
    job = start(LEAVES_ON_TERM + RANKS + "sleep 600", time_limit="00:20", lead_s=5, kill_wait_s=8)
    assert job.wait() != 0
    assert job.state().word == "TIMEOUT"
    assert "got SIGUSR1 SIGTERM" in job.file("log-0").read_text()


def test_a_bad_exit_of_one_rank_ends_the_others_and_the_highest_code_is_returned(start):
    rank = LEAVES_ON_ANY.replace(
        'print("ready"', 'os.environ["SLURM_PROCID"] == "1" and sys.exit(3); print("ready"'
    )
    job = start(rank + RANKS + 'echo "$rc" > end')
    job.wait()
    assert job.file("end").read_text() in ("75\n", "143\n")  # 143: TERM before its handler


def test_a_rank_that_ignores_term_after_a_bad_exit_is_killed(start):
    rank = (
        "rank='\nimport os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        'open("up-" + os.environ["SLURM_PROCID"], "w").close()\n'
        'while not all(os.path.exists(f"up-{r}") for r in "01"): time.sleep(0.02)\n'
        'os.environ["SLURM_PROCID"] == "1" and sys.exit(3)\nwhile True: time.sleep(10)\n'
        "'\n"
    )
    job = start(rank + RANKS.replace("-wait 10", "-wait 1") + 'echo "$rc" > end')
    job.wait()
    assert job.file("end").read_text() == "137\n"


def test_ranks_do_not_outlive_a_launcher_or_a_job_that_is_killed(start):
    rank = LEAVES_ON_ANY.replace('print("ready"', 'print(os.getpid(), flush=True); print("ready"')
    job = start(rank + RANKS)
    job.wait_for("log-0", text="ready")
    job.wait_for("log-1", text="ready")
    ranks = [ProcessName.of(int(job.file(f"log-{rank}").read_text().split()[0])) for rank in (0, 1)]
    assert all(ranks)
    job.process.kill()
    job.process.wait()
    until(lambda: not any(rank.is_alive for rank in ranks))
    state = job.state()
    assert (state.word, state.is_ended) == ("FAILED", True)
    assert "died" in state.reason


def test_a_job_whose_process_ends_while_it_is_looked_at_has_not_failed(tmp_path, monkeypatch):
    layout = RunLayout(tmp_path)
    layout.submit.mkdir()
    job = LocalJob("local-7", "COMPLETING", 0, runner_pid=os.getpid(), runner_started=1)
    write_job(layout, job)

    def last_word_first(name):
        write_job(layout, dataclasses.replace(job, word="COMPLETED"))
        return False

    monkeypatch.setattr(ProcessName, "is_alive", property(last_word_first))
    assert open_scheduler("local", run_dir=tmp_path).job_state("local-7").word == "COMPLETED"


def test_a_pid_used_again_is_not_taken_for_the_old_process():
    own = ProcessName.of(os.getpid())
    assert own.is_alive
    other = ProcessName(own.pid, own.started + 1)
    assert not other.is_alive
    assert other.send(signal.SIGKILL) is False


def test_local_job_of_another_run_or_before_its_start_is_unknown(tmp_path):
    layout = RunLayout(tmp_path)
    layout.submit.mkdir()
    scheduler = open_scheduler("local", run_dir=tmp_path)
    assert not scheduler.job_state("local-7").is_known
    with pytest.raises(SchedulerError, match="no local job"):
        scheduler.requeue("local-7")
    (layout.submit / "local.json").write_text(
        json.dumps({
            "schema_version": 1, "job_id": "local-8", "word": "RUNNING", "restart_count": 0,
            "runner_pid": os.getpid(), "runner_started": 0,
        })
    )  # fmt: skip
    assert not scheduler.job_state("local-7").is_known


AGAIN_ONCE = (
    'echo run >> runs; [ -n "${SLURM_RESTART_COUNT:-}" ] && exit 0\n'
    'trap "exit 0" TERM; echo > ready; while :; do sleep 0.05; done'
)


def test_a_requeue_into_a_hold_waits_for_its_release(start):
    job = start(AGAIN_ONCE)
    job.wait_for("ready")
    with pytest.raises(SchedulerError, match="only a waiting job can be held"):
        job.scheduler.hold("local-7")
    assert job.scheduler.requeue("local-7", hold=True) is True
    until(lambda: job.state().is_held)
    time.sleep(0.5)
    assert job.state().is_held and job.file("runs").read_text() == "run\n"
    job.scheduler.release("local-7")
    assert job.wait() == 0
    assert job.file("runs").read_text() == "run\nrun\n"


def test_a_job_that_is_held_can_be_cancelled(start):
    job = start(AGAIN_ONCE)
    job.wait_for("ready")
    job.scheduler.requeue("local-7", hold=True)
    until(lambda: job.state().is_held)
    job.scheduler.cancel("local-7")
    job.wait()
    assert job.state().word == "CANCELLED" and job.scheduler.was_cancelled("local-7")
