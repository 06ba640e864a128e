"""All ranks refuse together to train with other code than the run began with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

import launch
import pytest

from ftslurm.errors import RANK_FAILED, RANK_NEVER_RETRY
from ftslurm.files import read_json
from ftslurm.replay.trace import read_trace
from ftslurm.run.attempts import FAILED, read_events, read_outcome
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, RunSpec

pytestmark = pytest.mark.torch

LOOP = "from example_loop import train\n"
KILLED = {"FTSLURM_FAULTS": "kill@step:rank=1:step=5:attempt=1"}


class TwoNodes(launch.Launch):
    """Rank 1 is alone on a node of its own, whose code lies in another folder."""

    def _start(self, rank: int, environ: dict[str, str], module: Optional[str]) -> int:
        code = self.layout.code if rank == 0 else self.layout.root / "stale"
        environ |= {"SLURM_LOCALID": "0", "SLURMD_NODENAME": f"n{rank}", "SLURM_NODEID": str(rank)}
        log = launch.log_path(self.layout, self.attempt, rank)
        path = [str(code), *launch.PYTHON_PATH]
        return launch._ask({"environ": environ, "log": str(log), "python_path": path})


def prepare(root: Path, *, code: str = "frozen") -> RunLayout:
    spec = RunSpec(
        entry="mine:train",
        steps=8,
        code=code,
        cluster=ClusterSpec(tasks_per_node=2),
        checkpoint=CheckpointSpec(interval_steps=3, interval_s=0),
        user={"lr": 0.1},
    )
    layout = launch.prepare(root, spec)
    for folder in (layout.code, root / "stale"):
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(LOOP)
    return layout


def messages(layout: RunLayout, attempt: int) -> set[tuple[str, str]]:
    records = [read_json(path) for path in layout.attempt(attempt).ranks.iterdir()]
    assert len(records) == 2
    return {(record["type"], record["message"]) for record in records}


def test_a_loop_that_was_edited_between_attempts_is_not_trained(tmp_path: Path) -> None:
    layout = prepare(tmp_path / "run")
    ended = launch.run_attempt(layout, world_size=2, environ=KILLED)
    assert ended.codes[1] < 0, ended.logs()
    took = re.search(r"(\d+) modules are as they should be \((.*) s\)", ended.log(0))
    assert took is not None and int(took[1]) > 1000 and float(took[2]) < 5
    modules = read_json(layout.attempt(1).modules_json)["modules"]
    assert {"mine", "torch", "h5py.h5d", "ftslurm.files"} <= set(modules)

    source = layout.code / "mine.py"
    source.write_text(LOOP + "# another word\n")
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [RANK_NEVER_RETRY] * 2, ended.logs()
    ((kind, text),) = messages(layout, 2)
    assert kind == "CodeError"
    assert text.startswith(f"module `mine` (`{source}`) has changed since attempt 1; put it back")
    outcome = read_outcome(layout.attempt(2))
    assert outcome is not None and (outcome.result, outcome.retry) == (FAILED, False)
    assert max(read_trace(layout)) == 5 and not layout.attempt(2).modules_json.exists()

    source.write_text(LOOP)
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [0, 0], ended.logs()


def test_live_code_is_trained_as_it_is_and_the_change_is_in_the_journal(tmp_path: Path) -> None:
    layout = prepare(tmp_path / "run", code="live")
    launch.run_attempt(layout, world_size=2, environ=KILLED)
    (layout.code / "mine.py").write_text(LOOP + "# another word\n")
    ended = launch.run_attempt(layout, world_size=2)
    assert ended.codes == [0, 0], ended.logs()
    events = [e for e in read_events(layout.attempt(2)) if e["kind"] == "code_changed"]
    assert [event["modules"] for event in events] == [["mine"]]


@pytest.mark.parametrize("code, ends_with", [("frozen", RANK_NEVER_RETRY), ("live", RANK_FAILED)])
def test_a_node_with_stale_code_is_named_and_nobody_trains(
    tmp_path: Path, code: str, ends_with: int
) -> None:
    layout = prepare(tmp_path / "run", code=code)
    stale = layout.root / "stale" / "mine.py"
    stale.write_text(LOOP + "# an older word\n")
    ended = TwoNodes(layout, world_size=2).wait()
    assert ended.codes == [ends_with] * 2, ended.logs()
    ((_, text),) = messages(layout, 1)
    assert text.startswith(f"module `mine` (`{stale}`) on node n1 is not the one on n0; ")
    assert not read_trace(layout) and not layout.attempt(1).modules_json.exists()
