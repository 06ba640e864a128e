"""The operator's verbs on runs that train: this machine as the scheduler, ranks without torch."""

import json
import time

import pytest
from fakes.chain import STEPS, Chain, ftslurm, wait_for
from fakes.project import slow, slow_while

from ftslurm.run.attempts import read_events, read_outcome, read_progress
from ftslurm.run.jobs import BY_PERSON, BY_SUBMIT, read_jobs
from ftslurm.scheduler import open_scheduler

pytestmark = pytest.mark.timeout(300)


class Operated(Chain):
    """A run and the verbs for it."""

    def start(self, *more, step_s=1.0):
        """`step_s`: in the first attempt."""
        self.submit(*slow(seconds=step_s), *more)
        self.wait_for_training(1)
        return self

    def submit_with_order(self, name, **more):
        """The order is there before the batch script comes to its first attempt."""
        go = self.folder / "go"
        setup = json.dumps([f"for _ in $(seq 1200); do [ -e {go} ] && break; sleep 0.1; done"])
        run = self.submit(f"cluster.setup={setup}", **more)
        (run.layout.control / name).touch()
        go.touch()
        return run

    def wait_for_training(self, attempt):
        def trains():
            progress = read_progress(self.run.layout.attempt(attempt))
            return progress is not None and progress.phase == "training" and progress.step > 0

        wait_for(trains, self.run.says)

    def order(self, verb, *options):
        done = self.says(verb, "--json", *options)
        assert done.returncode == 0, done.stdout + done.stderr + self.run.says()
        return json.loads(done.stdout)

    def says(self, verb, *options):
        return ftslurm(verb, str(self.run.layout.root), *options, cwd="/")

    def resume(self):
        """Resume by a new job, and look at that one from now on."""
        record = self.order("resume")
        self.job_id = record["job_id"]
        self.scheduler = open_scheduler("local", run_dir=self.run.layout.root)
        return record["result"]

    def orders_left(self):
        layout = self.run.layout
        return [path.name for path in layout.control.iterdir() if path != layout.acts]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    chain = Chain(tmp_path_factory.mktemp("undisturbed"))
    run = chain.submit()
    chain.wait("COMPLETED")
    return run


@pytest.fixture
def operated(tmp_path):
    return Operated(tmp_path)


def assert_as_undisturbed(operated, undisturbed):
    run = operated.run
    assert (run.digest, run.losses) == (undisturbed.digest, undisturbed.losses)
    assert operated.orders_left() == []


def test_a_run_saves_on_order_and_goes_on(operated, undisturbed, tmp_path):
    held = tmp_path / "held"
    held.touch()
    operated.submit("checkpoint.interval_steps=1000", *slow_while(held, since=1))
    operated.wait_for_training(1)
    assert operated.order("save", "--wait")["result"] == "saved"
    held.unlink()
    events = read_events(operated.run.layout.attempt(1))
    (done,) = [event for event in events if event["kind"] == "order_done"]
    assert done["step"] in [event["step"] for event in events if event["kind"] == "committed"]
    operated.wait("COMPLETED")
    assert operated.run.decisions() == ["done"]
    assert_as_undisturbed(operated, undisturbed)


def test_a_stopped_run_stays_away_until_it_is_resumed_and_loses_nothing(operated, undisturbed):
    operated.start()
    answer = operated.order("stop", "--wait")
    assert answer["result"] == "stopped" and "all committed" in answer["text"]
    operated.wait("COMPLETED")
    outcome = read_outcome(operated.run.layout.attempt(1))
    assert (outcome.order, outcome.signal) == ("stop", None)
    assert outcome.committed_step == outcome.step < STEPS
    assert operated.run.decisions() == ["ended"]
    assert operated.order("stop")["result"] == "not_running"
    for verb in ("pause", "save"):
        refused = operated.says(verb)
        assert refused.returncode == 1 and "not running" in refused.stderr, refused.stderr

    assert operated.resume() == "queued"
    operated.wait("COMPLETED")
    assert operated.run.decisions() == ["ended", "done"]
    assert operated.run.steps_trained_twice == 0
    assert_as_undisturbed(operated, undisturbed)
    assert [job.queued_by for job in read_jobs(operated.run.layout)] == [BY_SUBMIT, BY_PERSON]
    refused = operated.says("resume")
    assert refused.returncode == 1 and "has finished" in refused.stderr


def test_a_paused_run_keeps_its_job_and_goes_on_under_the_same_id(operated, undisturbed):
    operated.start()
    assert operated.order("pause", "--wait")["result"] == "paused"
    assert operated.scheduler.job_state(operated.job_id).is_held
    assert operated.run.decisions() == ["paused"]
    assert operated.order("pause")["result"] == "paused"
    time.sleep(1.5)  # longer than a requeued job waits here
    assert operated.scheduler.job_state(operated.job_id).is_held
    assert operated.order("resume")["result"] == "released"
    operated.wait("COMPLETED")
    assert operated.run.decisions() == ["paused", "done"]
    assert operated.run.steps_trained_twice == 0
    assert_as_undisturbed(operated, undisturbed)
    assert len(read_jobs(operated.run.layout)) == 1


def test_a_cancelled_run_says_what_it_loses_and_goes_on_when_resumed(operated, undisturbed):
    operated.start()
    answer = operated.order("cancel")
    assert answer["result"] == "cancelled" and "nothing is committed" in answer["text"]
    operated.wait("CANCELLED")
    assert operated.run.decisions() == ["ended"], "by the order that was left, not by a guess"
    assert operated.orders_left() == []
    assert operated.order("cancel")["result"] == "not_running"
    assert operated.resume() == "queued"
    operated.wait("COMPLETED")
    assert_as_undisturbed(operated, undisturbed)


def test_a_paused_run_may_be_stopped_for_good(operated):
    operated.start()
    operated.order("pause", "--wait")
    assert operated.order("stop")["result"] == "cancelled"
    operated.wait("CANCELLED")


def test_a_file_in_the_control_folder_stops_the_run_and_resume_does_not_meet_it_again(
    operated, undisturbed, tmp_path
):
    shared = tmp_path / "shared"
    shared.mkdir()
    operated.start(f"recovery.control_dir={shared}")
    (shared / f"{operated.run.layout.root.name}.stop").touch()
    operated.wait("COMPLETED")
    assert operated.run.decisions() == ["ended"] and list(shared.iterdir()) == []
    operated.resume()
    operated.wait("COMPLETED")
    assert_as_undisturbed(operated, undisturbed)


def test_an_order_given_while_no_rank_runs_is_obeyed_at_the_first_step(operated):
    run = operated.submit_with_order("stop")
    operated.wait("COMPLETED")
    assert run.decisions() == ["ended"], run.says()
    assert read_outcome(run.layout.attempt(1)).step == 1


def test_a_followed_log_goes_on_until_the_run_has_ended(operated):
    operated.start(step_s=0.2)
    followed = operated.says("logs", "--follow", "--rank", "1")
    assert followed.returncode == 0, followed.stderr
    assert operated.run.layout.done.exists(), "ended with the run, not before"


def test_a_run_that_fails_at_every_start_is_stopped_by_an_order_all_the_same(operated):
    run = operated.submit_with_order("stop", faults="exit@step:rank=1:step=0")
    operated.wait("COMPLETED")
    assert run.decisions() == ["ended"] and operated.orders_left() == [], run.says()
