"""recovery.metrics_dir: the leader has the run's figures kept fresh, and loses nothing by it."""

import contextlib
import signal
import sys
import time
from pathlib import Path

import pytest
from fakes.agents import Job
from metrics_runs import only, read_samples
from test_render import rendered, spec

from ftslurm.errors import SpecError
from ftslurm.files import write_json
from ftslurm.run.attempts import Progress, append_event, write_progress
from ftslurm.run.spec import RecoverySpec, RunSpec
from ftslurm.run.spec_check import check

WITHIN_S = 60


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "textfiles"
    folder.mkdir()
    return folder


def wait(look):
    deadline = time.monotonic() + WITHIN_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def job(tmp_path, folder, nodes=1):
    return Job(tmp_path / "job", nodes=nodes, recovery={"metrics_dir": str(folder)})


@pytest.fixture(autouse=True)
def place(tmp_path):
    (tmp_path / "job").mkdir()


def children(job, word="metrics"):
    """Processes that keep this run's figures."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if word.encode() in words and str(job.layout.root).encode() in words:
                found.append(int(path.parent.name))
    return found


def nice_of(pid):
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[16])


def said(job, node="127.0.0.1"):
    return (job.folder / f"{node}.log").read_text()


def told(folder):
    """By now; nothing before the first file is there."""
    path = folder / "r.prom"
    return read_samples(path.read_text()) if path.exists() else {}


def test_the_leader_alone_has_it_kept_and_the_end_of_the_attempt_is_in_it(tmp_path, folder):
    with job(tmp_path, folder, nodes=2) as here:
        wait(lambda: (folder / "r.prom").exists())
        (child,) = children(here)
        assert nice_of(child) == 19
        assert only(told(folder), "run_waiting") == 1  # no attempt was claimed yet
        # What ends ranks does not end it.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            here_child(child).send(number)
        number = here.claim()
        paths = here.layout.attempt(number)
        append_event(paths, "first_step", step=1)
        write_progress(paths, Progress(step=5, steps=60, phase="training", written_at=time.time()))
        # With its leader it leaves, after a last word.
        here.processes["127.0.0.1"].kill()
        wait(lambda: not children(here))
        assert (only(told(folder), "run_training"), only(told(folder), "step")) == (1, 5)


def here_child(pid):
    from ftslurm.scheduler.process import ProcessName

    name = ProcessName.of(pid)
    assert name is not None
    return name


def test_the_end_of_an_attempt_is_written_while_the_job_still_lives(tmp_path, folder):
    with job(tmp_path, folder) as here:
        wait(lambda: (folder / "r.prom").exists())
        paths = here.layout.attempt(here.claim())
        write_progress(paths, Progress(step=5, steps=60, phase="training", written_at=time.time()))
        # The file says so after 30 s; a leader that begins anew says so at once.
        here.processes["127.0.0.1"].kill()
        wait(lambda: not children(here))
        before = only(told(folder), "metrics_timestamp_seconds")
        here.start("127.0.0.1")
        wait(lambda: only(told(folder), "metrics_timestamp_seconds") > before)
        began = only(told(folder), "metrics_timestamp_seconds")
        assert only(told(folder), "run_active") == 1
        decision = {"schema_version": 1, "action": "requeued", "cause": "node", "reason": "because"}
        write_json(paths.decision_json, decision)
        wait(lambda: only(told(folder), "run_waiting") == 1)
        assert only(told(folder), "metrics_timestamp_seconds") - began < 25  # not after 30 s


@pytest.mark.parametrize("why", ["no folder", "no client"])
def test_what_cannot_be_kept_is_said_once_and_disturbs_nobody(tmp_path, folder, why):
    here = job(tmp_path, folder / "gone" if why == "no folder" else folder)
    if why == "no client":
        hide_client(here)
    with here:
        wait(lambda: "nobody keeps the metrics" in said(here))
        expected = "there is no folder" if why == "no folder" else "is not installed"
        assert expected in said(here)
        number = here.claim()
        here.start_ranks(number)
        assert here.are_all_live()
        assert said(here).count("nobody keeps the metrics") == 1
        assert not list(folder.iterdir())


def hide_client(job):
    """From the agents' interpreter."""
    site = job.folder / "hidden" / "prometheus_client"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("raise ImportError('hidden')\n")
    environ = job.environ
    job.environ = lambda node: {
        **environ(node), "PYTHONPATH": f"{site.parent}:{environ(node)['PYTHONPATH']}"
    }  # fmt: skip


def test_without_the_key_nothing_is_started(tmp_path, folder):
    with Job(tmp_path / "job", nodes=1) as here:
        number = here.claim()
        here.start_ranks(number)
        assert not children(here)


@pytest.mark.parametrize(
    ("folder", "scheduler", "agents", "expected"),
    [
        ("metrics", "slurm", True, "absolute path"),
        ("/var/lib/node_exporter", "local", True, "beside the run"),
        ("/var/lib/node_exporter", "slurm", False, "beside the run"),
    ],
)
def test_a_folder_that_nobody_would_write_to_is_refused(folder, scheduler, agents, expected):
    refused = RunSpec()
    refused.cluster.scheduler, refused.recovery.agents = scheduler, agents
    refused.recovery.metrics_dir = folder
    with pytest.raises(SpecError, match=expected):
        check(refused)
    refused.cluster.scheduler, refused.recovery.agents = "slurm", True
    refused.recovery.metrics_dir = "/var/lib/node_exporter"
    check(refused)


@pytest.mark.parametrize("metrics_dir", [None, "/var/lib/node_exporter"])
def test_the_batch_script_has_the_last_word_where_figures_are_kept(metrics_dir):
    script = rendered(spec(RecoverySpec(metrics_dir=metrics_dir)))
    last_word = f'metrics "$FTSLURM_RUN_DIR" --textfile {metrics_dir}' in script
    assert last_word == ("trap last_word EXIT" in script) == (metrics_dir is not None)


def test_this_interpreter_has_the_client():
    """Else the tests above would show nothing."""
    import prometheus_client

    assert prometheus_client.__file__ and sys.executable
