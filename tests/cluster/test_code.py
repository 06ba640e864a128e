"""Code that changes under a run on real Slurm: between two attempts, and on one of its nodes.

Three runs side by side are preempted at once, after something was done to the code of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from batch_runs import LabRun
from fakes.project import slow
from lab import Lab

from ftslurm.files import read_json
from ftslurm.run.attempts import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

RANK = Path("tests", "fakes", "rank.py")


def edit(code: Path) -> None:
    with (code / RANK).open("a") as source:
        source.write("\n# another word\n")


@pytest.fixture(scope="module")
def runs(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LabRun]]:

    def submit(name: str, apart_from: str, *more: str) -> LabRun:
        # A node has CPUs for two ranks; the stale run has to come back to its nodes.
        placed = ["cluster.tasks_per_node=1", f'cluster.exclude="{apart_from}"']
        return LabRun(lab, name, *placed, *slow(), *more)

    with ThreadPoolExecutor() as pool:
        submitted = {
            # What is left of a run that stops is never trained.
            "edited": pool.submit(submit, "edited", "n1,n2", "steps=400"),
            "live": pool.submit(submit, "live", "n1,n2", "steps=80", "code=live"),
            "stale": pool.submit(submit, "stale", "n3,n4", "steps=400"),
        }
    runs = {name: run.result() for name, run in submitted.items()}
    for run in runs.values():
        run.wait_for_training(1)
    edit(runs["edited"].run.layout.code)
    edit(runs["live"].folder)
    target = runs["stale"].run.layout.code / RANK
    stale = target.with_name("stale.py")
    stale.write_text(target.read_text() + "\n# an older word\n")
    lab.run_inside("n2", "mount", "--bind", str(stale), str(target))
    try:
        lab.preempt(4, seconds=2)
        for run in runs.values():
            lab.hasten(run.job_id)
        runs["edited"].end_as("FAILED")
        runs["live"].end_as("COMPLETED")
        runs["stale"].end_as("FAILED")
        yield runs
    finally:
        lab.run_inside("n2", "umount", str(target))


def reason(run: LabRun) -> str:
    decision = read_json(run.run.layout.attempt(2).decision_json)
    assert decision["cause"] == "never_retry", run.says()
    return str(decision["reason"])


def test_a_preempted_run_whose_code_was_edited_stops_with_a_sentence(
    runs: dict[str, LabRun],
) -> None:
    run = runs["edited"]
    assert run.run.decisions() == ["requeued", "stop"], run.says()
    source = run.run.layout.code / RANK
    assert f"module `tests.fakes.rank` (`{source}`) has changed since attempt 1; put" in reason(run)


def test_a_preempted_live_run_goes_on_with_the_edited_code(runs: dict[str, LabRun]) -> None:
    run = runs["live"]
    assert run.run.decisions() == ["requeued", "done"], run.says()
    events = [e for e in read_events(run.run.layout.attempt(2)) if e["kind"] == "code_changed"]
    assert [event["modules"] for event in events] == [["tests.fakes.rank"]]
    assert run.run.steps_trained_twice == 0


def test_a_node_that_has_other_code_than_the_others_is_named(runs: dict[str, LabRun]) -> None:
    run = runs["stale"]
    assert run.run.decisions() == ["requeued", "stop"], run.says()
    source = run.run.layout.code / RANK
    text = reason(run)
    assert f"module `tests.fakes.rank` (`{source}`) on node n" in text
    assert "n2 is not the one on n1" in text or "n1 is not the one on n2" in text
