"""An operator's orders in the training half: all ranks act at one step, and no order acts twice."""

import json
import os
from pathlib import Path

import launch
import pytest

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import RANK_STOPPED
from ftslurm.run.attempts import FINISHED, STOPPED, Outcome, read_events, read_outcome
from ftslurm.run.control import PAUSE, SAVE, STOP, ControlFiles
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, RunSpec
from ftslurm.train import orders as module
from ftslurm.train.orders import Lookout, Orders


class Now:
    """A look at every asking."""

    def __init__(self, files: ControlFiles) -> None:
        self._files = files

    @property
    def latest(self) -> object:
        return self._files.look()


class Told(Orders):
    """Keeps what it has put into the journal."""

    def __init__(self, files: ControlFiles) -> None:
        self.events: list[tuple[str, str, object]] = []
        super().__init__(
            files,
            lambda kind, facts: self.events.append((kind, facts["order"], facts.get("step"))),
        )


@pytest.fixture
def files(tmp_path: Path) -> ControlFiles:
    root = tmp_path / "run-1"
    root.mkdir()
    return ControlFiles(RunLayout(root), "run-1")


@pytest.fixture
def orders(files: ControlFiles, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(module, "Lookout", Now)
    return Told(files)


def given(files: ControlFiles) -> list[str]:
    return [order for order in (STOP, PAUSE, SAVE) if files.is_given(order)]


def test_an_ordered_save_is_asked_for_until_one_begins_and_kept_until_it_commits(
    files: ControlFiles, orders: Told
) -> None:
    assert orders.due(4, saved_step=None) is None
    files.give(SAVE)
    assert orders.due(5, saved_step=4) == SAVE
    assert orders.due(6, saved_step=4) == SAVE, "skipped: the save before was not through"
    assert orders.due(7, saved_step=7) is None
    orders.heard("committed", {"step": 4})
    assert given(files) == [SAVE], "step 4 was trained before the order was seen"
    orders.heard("committed", {"step": 7})
    assert given(files) == [] and orders.due(8, saved_step=7) is None
    assert orders.events == [("ordered", SAVE, 5), ("order_done", SAVE, 7)]


def test_a_save_at_the_boundary_at_which_the_order_was_seen_is_the_one_asked_for(
    files: ControlFiles, orders: Told
) -> None:
    files.give(SAVE)
    assert orders.due(5, saved_step=None) == SAVE
    orders.heard("committed", {"step": 5})
    assert orders.events[-1] == ("order_done", SAVE, 5)


def test_an_ordered_save_that_fails_is_reported_and_not_tried_again(
    files: ControlFiles, orders: Told
) -> None:
    files.give(SAVE)
    orders.due(5, saved_step=None)
    orders.heard("save_failed", {"step": 6, "reason": "disk full"})
    assert orders.due(7, saved_step=6) is None and given(files) == []
    assert orders.events[-1] == ("order_failed", SAVE, 6)


def test_a_save_ordered_again_while_the_first_is_written_is_made_as_well(
    files: ControlFiles, orders: Told
) -> None:
    place = files.give(SAVE)
    os.utime(place, ns=(1, 1_000))
    assert orders.due(5, saved_step=None) == SAVE
    os.utime(place, ns=(1, 2_000))
    assert orders.due(7, saved_step=6) == SAVE
    orders.heard("committed", {"step": 6})
    assert given(files) == [SAVE]
    orders.heard("committed", {"step": 8})
    assert given(files) == []


def test_a_look_that_is_older_than_the_end_of_an_order_does_not_bring_it_back(
    files: ControlFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.give(SAVE)
    orders = Told(files)  # looks once, then not for some seconds
    assert orders.due(5, saved_step=None) == SAVE
    orders.heard("committed", {"step": 6})
    assert orders.due(6, saved_step=6) is None
    assert [event[0] for event in orders.events] == ["ordered", "order_done"]


def test_a_folder_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    class Hanging:
        def look(self) -> None:
            threading.Event().wait()

    monkeypatch.setattr(module, "FIRST_LOOK_S", 0.05)
    assert Lookout(Hanging()).latest is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "order", "committed", "stay"),
    [
        (STOPPED, STOP, 9, [STOP, PAUSE]),
        (STOPPED, PAUSE, 9, [STOP, PAUSE]),
        (STOPPED, STOP, 5, [STOP, PAUSE, SAVE]),
        (STOPPED, None, 9, [STOP, PAUSE]),
        (FINISHED, None, 9, [STOP, PAUSE]),
    ],
)
def test_an_ended_attempt_takes_only_a_save_away_a_stop_has_to_be_found_should_its_job_die_now(
    files: ControlFiles, orders: Told, result: str, order: str, committed: int, stay: list[str]
) -> None:
    files.give(SAVE)
    orders.due(8, saved_step=None)
    files.give(STOP)
    files.give(PAUSE)
    orders.ended(Outcome(result, 9, committed, order=order))
    assert given(files) == stay


def test_a_stop_that_was_obeyed_is_said_to_be_and_not_obeyed_twice(
    files: ControlFiles, orders: Told
) -> None:
    files.give(STOP)
    assert orders.due(8, saved_step=None) == STOP
    orders.ended(Outcome(STOPPED, 9, 9, order=STOP))
    assert orders.events == [("ordered", STOP, 8), ("order_done", STOP, 9)]
    assert orders.due(9, saved_step=9) is None


def test_a_stop_that_is_found_while_a_signal_is_obeyed_is_obeyed_as_well(
    files: ControlFiles, orders: Told
) -> None:
    assert orders.leaving(None) is None and orders.leaving(SAVE) is None
    assert orders.leaving(PAUSE) == PAUSE
    files.give(STOP)
    assert orders.leaving(None) == orders.leaving(PAUSE) == STOP


@pytest.mark.torch
def test_two_ranks_save_on_order_stop_on_order_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    spec = RunSpec(
        entry="loops:ordered",
        steps=10,
        cluster=ClusterSpec(tasks_per_node=2),
        checkpoint=CheckpointSpec(interval_steps=0, interval_s=0),
        user={"lr": 0.1, "orders": {}},
    )
    undisturbed = launch.prepare(tmp_path / "a", spec)
    assert launch.run_attempt(undisturbed, world_size=2).codes == [0, 0]
    spec.user["orders"] = {"3": SAVE, "6": STOP}
    layout = launch.prepare(tmp_path / "b", spec)
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [RANK_STOPPED] * 2, ended.logs()

    outcome = read_outcome(layout.attempt(1))
    assert outcome is not None
    assert (outcome.order, outcome.signal, outcome.step, outcome.committed_step) == (
        STOP, None, 7, 7,
    )  # fmt: skip
    told = {
        (e["kind"], e["order"], e["step"]) for e in read_events(layout.attempt(1)) if "order" in e
    }
    assert told == {
        ("ordered", SAVE, 3),
        ("order_done", SAVE, 4),
        ("ordered", STOP, 6),
        ("order_done", STOP, 7),
    }
    assert [step.step for step in CheckpointStore(layout).published()] == [7, 4]
    files = ControlFiles(layout, layout.root.name)
    assert given(files) == [STOP], "it is left until the batch script has acted"
    files.take_away(STOP)

    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [0, 0], ended.logs()
    digests = [
        json.loads(run.done.read_text())["parameter_digest"] for run in (undisturbed, layout)
    ]
    assert digests[0] == digests[1]
