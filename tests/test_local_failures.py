"""What a run does about its program's own failures, from the rank that fails to the job's end."""

import json
import shutil

import pytest
from fakes.chain import ROOT, Chain, ftslurm

from ftslurm.files import read_json

FAILING = "entry=rank:tests.fakes.failing:main"


@pytest.fixture
def chain(tmp_path):
    chain = Chain(tmp_path)
    target = tmp_path / "tests" / "fakes" / "failing.py"
    shutil.copyfile(ROOT / "tests" / "fakes" / "failing.py", target)
    return chain


def decisions(run):
    return [read_json(path) for path in sorted(run.layout.attempts.glob("*/decision.json"))]


def restored(run):
    told = json.loads(ftslurm("status", str(run.layout.root), "--json", cwd="/").stdout)
    return [attempt["restored_step"] for attempt in told["attempts"]]


def test_a_bug_at_step_37_stops_after_one_confirmation_with_its_traceback_in_status(chain):
    run = chain.submit(FAILING, "steps=60", "+user.bug_step=37", step_s=0.005)
    chain.wait("FAILED")
    first, second = decisions(run)
    assert (first["action"], first["cause"], first["first_failure"]["step"]) == (
        "restart", "code", 37,
    )  # fmt: skip
    assert (second["action"], second["cause"]) == ("stop", "code"), run.says()
    assert restored(run) == [None, 30]
    for words in ("same error came at the same step, 37, as in attempt 1", "rank 1",
                  "the bug of step 37", "mend the program and submit again"):  # fmt: skip
        assert words in second["reason"]
    shown = ftslurm("status", str(run.layout.root), cwd="/").stdout
    assert "in train_one_step" in shown and "ValueError: the bug of step 37" in shown


def test_a_wrong_import_stops_at_once(chain):
    broken = chain.folder / "tests" / "fakes" / "broken.py"
    broken.write_text("def main():\n    import no_such_module\n")
    run = chain.submit("entry=rank:tests.fakes.broken:main")
    chain.wait("FAILED")
    (decision,) = decisions(run)
    assert (decision["action"], decision["cause"]) == ("stop", "code"), run.says()
    assert "no step was trained before it" in decision["reason"]
    assert "no_such_module" in decision["reason"]


def test_a_loss_that_is_nan_goes_back_one_step_further_then_stops(chain):
    run = chain.submit(FAILING, "+user.nan_step=27", step_s=0.005)
    chain.wait("FAILED")
    first, second = decisions(run)
    assert (first["action"], first["cause"], first["restore_before"]) == (
        "restart", "numeric", 20,
    )  # fmt: skip
    assert restored(run) == [None, 10], run.says()
    assert (second["action"], second["cause"]) == ("stop", "numeric")
    assert "after going back" in second["reason"] and "recovery.on_nan=skip" in second["reason"]
    # What was left behind is put aside, not lost.
    assert [path.name for path in run.layout.quarantine.iterdir()]


def test_if_asked_for_the_batches_that_led_to_it_are_passed_over(chain):
    run = chain.submit(FAILING, "+user.nan_batch=26", "recovery.on_nan=skip", step_s=0.005)
    chain.wait("COMPLETED")
    assert run.decisions() == ["restart", "restart", "done"], run.says()
    assert restored(run) == [None, 10, 10]
    second = decisions(run)[1]
    assert second["skip_steps"] == [11, 27]
    line = run.layout.skipped_jsonl.read_text()
    assert '"first":11' in line and '"last":27' in line
