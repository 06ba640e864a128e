"""Torch ranks beat: phases, collectives by name, and own work told from waiting; DDP and FSDP2."""

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import launch
import pytest

from ftslurm.agent.stacks import take_stacks
from ftslurm.diagnosis.hang import HangLimits, HangMemory, hung
from ftslurm.diagnosis.stragglers import (
    SLOW_ALL,
    SLOW_HOLD_S,
    SlowFinding,
    StragglerLimits,
    Watcher,
)
from ftslurm.run.heartbeat import RankView, beat_file, read_notes, read_views
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, ParallelSpec, RunSpec

pytestmark = pytest.mark.torch

STEP_S = 0.02
"""Real work of a step of every rank."""


def make_spec(strategy: str, *, world_size: int, steps: int) -> RunSpec:
    return RunSpec(
        entry="example_loop:train",
        steps=steps,
        cluster=ClusterSpec(tasks_per_node=world_size),
        parallel=ParallelSpec(strategy=strategy),
        checkpoint=CheckpointSpec(interval_steps=0, interval_s=0),
        user={"lr": 0.1},
    )


class Watched:
    """An attempt whose beats are read while it runs."""

    def __init__(self, tmp_path: Path, spec: RunSpec, faults: str) -> None:
        layout = launch.prepare(tmp_path / "run", spec)
        self.folder = tmp_path / "beats" / "attempt-0001"
        self.world_size = spec.cluster.tasks_per_node
        environ = {"FTSLURM_BEATS": str(self.folder.parent), "FTSLURM_FAULTS": faults}
        self.launched = launch.Launch(layout, world_size=self.world_size, environ=environ)
        self.phases: set[str] = set()

    def looks(self, *, every_s: float = 0.02, deadline_s: float = 200) -> Iterator[list[RankView]]:
        """All looks at which all ranks are there, until they have trained and none is left."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            views = read_views(self.folder, "localhost")
            self.phases |= {view.phase for view in views}
            if len(views) == self.world_size:
                yield views
            elif not views and "training" in self.phases:
                return
            time.sleep(every_s)
        raise AssertionError(f"still running after {deadline_s} s: {views}")


def found_by_watching(
    watched: Watched, looks: Iterator[list[RankView]]
) -> "tuple[list[tuple[tuple[int, int], SlowFinding]], list[RankView]]":
    """The findings with the steps at the look before and at that look, and the last look in
    training."""
    watcher, found, last = Watcher(StragglerLimits()), [], []
    step = 0
    for views in looks:
        if all(view.phase == "training" for view in views):
            last = views
        new = watcher.observe(views, at=time.monotonic())
        before, step = step, max(view.step for view in views)
        found += [((before, step), finding) for finding in new]
    return found, last


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_of_four_ranks_the_one_that_works_four_times_as_much_is_named_within_ten_steps(
    tmp_path: Path, strategy: str
) -> None:
    slow_from = 25
    plan = f"slow@step:seconds={STEP_S};slow@step:rank=2:since={slow_from}:seconds={3 * STEP_S}"
    spec = make_spec(strategy, world_size=4, steps=100)
    watched = Watched(tmp_path, spec, plan)
    found, last = found_by_watching(watched, watched.looks())
    ended = watched.launched.wait()
    assert ended.codes == [0] * 4, ended.logs()
    assert [(finding.kind, finding.ranks) for _, finding in found] == [("straggler", (2,))], found
    # `since` counts from 0, steps from 1. No look has shown more steps without the finding, however
    # far the ranks go from one look to the next on a busy machine.
    before, step = found[0][0]
    assert before < slow_from + 11 and slow_from < step
    for view in last:
        print(
            f"{strategy} rank {view.rank}: wall {view.window_wall_s:.3f} s, own "
            f"{view.window_own_s:.3f} s, CPU {view.window_cpu_s:.3f} s"
        )
    waited_s = {view.rank: view.window_wall_s - view.window_own_s for view in last}
    assert waited_s.pop(2) < max(waited_s.values()), "the others wait for it"
    assert not list(watched.folder.glob("rank-*")), "whoever ends as it should leaves no beat"


@pytest.mark.timeout(400)
def test_five_hundred_undisturbed_steps_give_no_finding_and_the_same_collectives(
    tmp_path: Path,
) -> None:
    watched = Watched(tmp_path, make_spec("fsdp", world_size=2, steps=500), "")
    found, last = [], []
    watcher = Watcher(StragglerLimits())
    memory = HangMemory()
    names: set[str] = set()
    began_at = time.monotonic()
    for views in watched.looks(every_s=0.05, deadline_s=350):
        at = time.monotonic()
        found += [(at, one) for one in watcher.observe(views, at=at)]
        assert hung(views, memory, HangLimits(), at=time.monotonic()) is None
        notes = {rank: read_notes(watched.folder, rank) for rank in (0, 1)}
        by_seq = {note.seq: note.name for note in notes[0]}
        shared = [note for note in notes[1] if note.seq in by_seq]
        odd = [(note, by_seq[note.seq]) for note in shared if note.name != by_seq[note.seq]]
        assert odd == [], (odd, notes)
        names |= {note.name.split()[0] for note in notes[0]}
        last = views if views[0].phase == "training" else last
    ended = watched.launched.wait()
    assert ended.codes == [0, 0], ended.logs()
    # That all are slow for a minute may be true: others use this machine.
    known = [one for at, one in found if one.kind == SLOW_ALL and at >= began_at + SLOW_HOLD_S]
    assert [one for _, one in found if one not in known] == []
    assert "allreduce" in names and any("gather" in name for name in names), names
    assert any("reduce_scatter" in name for name in names), names
    assert statistics.median(view.usual_step_s for view in last) > 0


@pytest.mark.parametrize("action", ["stop", "hold"])
def test_a_rank_that_is_stuck_in_a_step_is_named(tmp_path: Path, action: str) -> None:
    spec = make_spec("ddp", world_size=2, steps=500)
    watched = Watched(tmp_path, spec, f"{action}@step:rank=1:step=30")
    limits = HangLimits(factor=3, floor_s=8)  # more than this machine itself may stand still
    memory = HangMemory()
    late_s = 0.0
    for views in watched.looks(every_s=0.1):
        at = time.monotonic()
        late_s = 0.0 if memory.looked_at is None else at - memory.looked_at
        finding = hung(views, memory, limits, at=at)
        if finding is not None:
            break
    assert finding is not None and finding.culprits == (1,), finding
    assert views[1].step == 30 and views[0].in_collective
    word = "is stopped (state T" if action == "stop" else "computing"
    assert word in finding.why
    assert finding.silent_s <= 3 * memory.usual_step_s + limits.floor_s + late_s
    print(finding.why)
    texts = take_stacks(views, watched.folder)
    assert "backward" in texts[0], texts[0]
    assert ("State: T (stopped)" if action == "stop" else "in _break") in texts[1], texts[1]
    for rank in (0, 1):
        watched.launched.signal(rank, 9)
    watched.launched.wait()
    assert beat_file(watched.folder, 1).exists()


def test_every_phase_is_told_and_an_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    spec = make_spec("ddp", world_size=1, steps=9)
    spec.entry, spec.checkpoint.interval_steps = "beat_loops:phases", 4
    layout = launch.prepare(tmp_path / "run", spec)
    environ = {"FTSLURM_BEATS": str(tmp_path / "beats")}
    ended = launch.run_attempt(layout, world_size=1, environ=environ)
    assert ended.codes == [0], ended.logs()
    phases = json.loads((layout.root / "phases-0.json").read_text())
    once = ["evaluating", "training", "saving", "training"]
    # The first evaluation is in the fourth step, and after the first the phase is training.
    assert phases == ["restoring", "compiling", *once, *once, "saving", "leaving"]
    told_s, whole_s = json.loads((layout.root / "walls-0.json").read_text())
    print(told_s, whole_s)
    for step, whole in whole_s.items():
        evaluated_s = 0.1 if int(step) % 4 == 0 else 0.0
        assert told_s[step] <= whole - evaluated_s, step
    assert {"4", "8"} < whole_s.keys() == told_s.keys()
    assert not (tmp_path / "beats").exists()


def test_what_is_compiled_in_the_midst_of_training_is_a_phase_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another shape at step 50 takes a minute: no hang, and no slow step."""
    import torch

    from ftslurm.train import beats

    pulse, phases = Pulse.unseen(), []
    pulse.restored(0)
    enter = pulse.phase
    monkeypatch.setattr(pulse, "phase", lambda name: (phases.append(name), enter(name)))
    monkeypatch.setattr(beats._notes, "pulse", pulse)
    compiled = torch.compile(lambda values: values + 1, backend="eager", dynamic=False)
    beats.watch_compiler()
    for step in (1, 2, 3):
        pulse.step_begins()
        compiled(torch.ones(2 if step < 3 else 5))
        pulse.step_ended(step)
    assert phases == ["compiling", "training"], "the first step compiles anyhow"


def test_nccl_keeps_its_record_where_the_attempts_evidence_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch makes of it needs a GPU; here are the names and the folder."""
    import torch

    from ftslurm.train.beats import prepare_nccl

    layout = launch.prepare(tmp_path / "run", make_spec("ddp", world_size=1, steps=1))
    attempt = launch.claim_attempt(layout)
    env = RankEnvironment.read(launch.rank_environ(layout, attempt, 0, 1, 1))
    pulse = Pulse.open(env, {"FTSLURM_BEATS": str(tmp_path / "beats")})
    environ: dict[str, str] = {}
    prepare_nccl(environ, env, pulse)
    assert environ == {}, "no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    environ = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}
    prepare_nccl(environ, env, pulse)
    evidence = layout.attempt(attempt).root / "evidence"
    assert evidence.is_dir()
    assert environ == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "5",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{evidence}/nccl-rank-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/beats/attempt-0001/nccl-",
    }
