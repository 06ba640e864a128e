"""Programs from `ftslurm run --` to DONE, on this machine, without Slurm and without torch."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.programs import AWARE, UNAWARE, steps_seen
from fakes.project import Run

from ftslurm.errors import SchedulerError
from ftslurm.files import read_json
from ftslurm.scheduler import open_scheduler

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 200
"""Five chains at once took 16 s among all other tests, and 78 s on two cores at a load of 14: this
is there for what hangs."""
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)
WORDS = ["a b", "x'y\"z", "", "ü€😀", "$HOME `id`", "--", "new\nline"]

FAILING = "import sys\nprint('begun')\nsys.exit('no such luck')\n"

EARLY = """
import json, os, sys, time
from pathlib import Path
place, run = Path(os.environ["FTSLURM_RESUME_DIR"]), Path(os.environ["FTSLURM_RUN_DIR"])
if os.environ["RANK"] == "0":
    (place / "words").write_text(json.dumps([sys.argv[1:], os.getcwd()]))
    sys.exit(0)
time.sleep(2)
(place / "last").touch()
if (run / "DONE").exists():
    sys.exit("DONE before the last rank has ended")
"""


class Chain:
    """A program in a folder of its own, and the run that was submitted from there."""

    def __init__(self, folder, source, *words, ranks=1, more=()):
        folder.mkdir()
        (folder / "train.py").write_text(source)
        given = ["cluster=local", f"cluster.tasks_per_node={ranks}", "--json", *more]
        done = ftslurm("run", *given, "--", sys.executable, "train.py", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        self.run, self.job_id = Run(record["run_dir"]), record["job_id"]
        self.layout = self.run.layout
        self.scheduler = open_scheduler("local", run_dir=self.layout.root)

    def ask_to_leave(self):
        """As soon as there is somebody to hear it: ranks may be further than who has started
        them."""

        def is_heard():
            try:
                self.scheduler.signal_ranks(self.job_id, "USR1")
            except SchedulerError:
                return False
            return True

        wait_for(is_heard, self.run.says)

    @property
    def step(self):
        path = self.layout.resume / "state-0"
        return int(path.read_text()) if path.exists() else 0

    def wait_until_it_looks(self, ranks=1):
        """And until all of them run: one that is asked before does not start."""
        wait_for(self.layout.attempt(1).aware.exists, self.run.says)
        each = range(ranks)
        wait_for(lambda: all(steps_seen(self.layout, rank) for rank in each), self.run.says)

    def end_as(self, word):
        wait_for(lambda: self.scheduler.job_state(self.job_id).is_ended, self.run.says)
        assert self.scheduler.job_state(self.job_id).word == word, self.run.says()
        return self


def ftslurm(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "ftslurm", *arguments],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip


def wait_for(look, seen):
    deadline = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.1)


def status(run):
    return json.loads(ftslurm("status", str(run.layout.root), "--json", cwd="/").stdout)


def unaware(folder):
    chain = Chain(folder, UNAWARE)
    wait_for(lambda: chain.step > 3, chain.run.says)
    chain.ask_to_leave()
    return chain.end_as("COMPLETED")


def aware(folder):
    chain = Chain(folder, AWARE, ranks=2)
    chain.wait_until_it_looks(2)
    chain.ask_to_leave()
    return chain.end_as("COMPLETED")


def failing(folder):
    return Chain(folder, FAILING, more=["recovery.max_failures=1"]).end_as("FAILED")


def early(folder):
    return Chain(folder, EARLY, *WORDS, ranks=2).end_as("COMPLETED")


def ordered(folder):
    chain = Chain(folder, AWARE.replace("step < 40", "step < 4000"))
    chain.wait_until_it_looks()
    (chain.layout.control / "stop").touch()
    wait_for(chain.run.decisions, chain.run.says)
    wait_for(lambda: chain.scheduler.job_state(chain.job_id).is_ended, chain.run.says)
    return chain


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """All at once, since they mostly wait; a test takes its own, and with it what went wrong."""
    folder = tmp_path_factory.mktemp("chains")
    scenarios = (unaware, aware, failing, early, ordered)
    with ThreadPoolExecutor(max_workers=len(scenarios)) as pool:
        yield {each.__name__: pool.submit(each, folder / each.__name__) for each in scenarios}


def test_a_program_that_knows_of_nothing_goes_on_from_its_own_file(chains):
    chain = chains["unaware"].result()
    run = chain.run
    assert run.decisions() == ["requeued", "done"], run.says()
    first, second = steps_seen(run.layout)
    assert first == 0 and 3 < second < 40 and chain.step == 40
    assert run.layout.done.exists()

    told = status(run)
    assert (told["state"], told["steps"], told["last_step"]) == ("done", None, None)
    assert told["program"] == [sys.executable, "train.py"]
    before, after = told["attempts"]
    assert [before["ended"], before["signal"]] == ["stopped", "SIGUSR1"]
    assert [after["ended"], after["restart_count"]] == ["finished", 1]
    text = ftslurm("status", str(run.layout.root), cwd="/").stdout
    assert f"program: {sys.executable} train.py" in text and "stopped on SIGUSR1" in text
    assert "step" not in text


def test_three_lines_give_a_program_the_time_to_save_at_the_signal(chains):
    run = chains["aware"].result().run
    assert run.decisions() == ["requeued", "done"], run.says()
    for rank in (0, 1):
        first, second = steps_seen(run.layout, rank)
        assert first == 0 and 0 < second < 40, run.says()


def test_a_program_that_fails_again_and_again_stops_the_run_with_a_sentence(chains):
    run = chains["failing"].result().run
    assert run.decisions() == ["restart", "stop"], run.says()
    reason = read_json(run.layout.attempt(2).decision_json)["reason"]
    assert "2 failures in a row without a change in RUN/resume" in reason
    assert "ended with code 1; the last line of its log: no such luck" in reason
    assert status(run)["state"] == "stopped"
    assert "no such luck" in ftslurm("status", str(run.layout.root), cwd="/").stdout
    assert not run.layout.done.exists()


def test_a_rank_that_ends_early_ends_no_run_and_every_word_arrives_as_typed(chains):
    run = chains["early"].result().run
    assert run.decisions() == ["done"], run.says()
    assert (run.layout.resume / "last").exists()
    words, folder = json.loads((run.layout.resume / "words").read_text())
    assert words == WORDS and folder == str(run.layout.code)


def test_a_program_that_is_ordered_to_stop_saves_and_is_not_queued_again(chains):
    chain = chains["ordered"].result()
    assert chain.run.decisions() == ["ended"], chain.run.says()
    decision = read_json(chain.layout.attempt(1).decision_json)
    assert "stopped by the order `stop`" in decision["reason"]
    assert chain.step > 0 and not (chain.layout.control / "stop").exists()
