"""The questions of the checklist on checkpoints: what is in them, where they lie, what they take.

Pure.
"""

from __future__ import annotations

from typing import Optional

from ftslurm.doctor.answer import Answer, Asked, known, newest, partly, unknown, wrong
from ftslurm.doctor.line import FAIL, SKIPPED
from ftslurm.doctor.run_facts import percentile
from ftslurm.doctor.run_history import PastRun, Restore, Step
from ftslurm.run.mounts import IN_MEMORY, OF_CONTAINER, OWN_DISK
from ftslurm.run.wording import format_count

_NO_STEP = "no run on record has a checkpoint"
_SAVE = "let a run save: `ftslurm submit --wait --drill`"
_NEEDED = ("model", "optimizer", "rng", "step", "cursor")
_IF_USED = ("scheduler", "scaler")


def _newest_step(asked: Asked) -> Optional[tuple[PastRun, Step]]:
    own = [(run, run.step) for run in asked.runs if run.step is not None and not run.is_program]
    found = newest(own, lambda pair: pair[1].created_at or None)
    return found or (own[0] if own else None)


def data_of_step(asked: Asked) -> Answer:
    question = "a checkpoint holds model, optimizer, scheduler, scaler, RNG, step, data cursor"
    found = _newest_step(asked)
    if found is None:
        return unknown(question, _NO_STEP, _SAVE)
    run, step = found
    there = [part for part in (*_NEEDED, *_IF_USED) if part in step.parts]
    lacks = [part for part in _NEEDED if part not in step.parts]
    seen = f"step {step.step} of run {run.name} holds {', '.join(there) or 'nothing known here'}"
    if lacks:
        return partly(
            question,
            f"{seen}, not {', '.join(lacks)}",
            "a loop of your own may keep these itself; what `register` is given is saved",
            step.created_at or None,
        )
    unused = [part for part in _IF_USED if part not in step.parts]
    seen += f"; {' and '.join(unused)} only where a loop has one" if unused else ""
    return known(question, seen, step.created_at or None)


def protocol(asked: Asked) -> Answer:
    question = "saves of many ranks: manifest, checksums, published in one step"
    found = _newest_step(asked)
    if found is None:
        return unknown(question, _NO_STEP, _SAVE)
    run, step = found
    if step.problems:
        todo = "`ftslurm verify RUN` says more; a restore takes an older step"
        return wrong(question, f"run {run.name}: {step.problems[0]}", todo, step.created_at or None)
    seen = (
        f"step {step.step} of run {run.name}: manifest of {step.ranks} ranks and COMMITTED agree,"
        f" digests are {step.digest_algorithm}; records and sizes were checked just now, not every"
        f" byte (`ftslurm verify RUN` does that)"
    )
    return known(question, seen, step.created_at)


def pointer(asked: Asked) -> Answer:
    question = "steps never change, `latest` only points, a bad step is passed over by itself"
    events = [(at, run, why) for run in asked.runs for at, why in run.fallbacks]
    last = newest(events, lambda event: event[0])
    if last is None:
        return unknown(
            question,
            "no restore on record had to pass over a step, so it has not been shown here",
            "copy a run directory, change a byte of its newest step, resume the copy",
        )
    at, run, why = last
    return known(question, f"run {run.name} passed over a step and went on: {why}", at)


def fault_domain(asked: Asked) -> Answer:
    question = "one checkpoint at least lies outside the fault domain of the nodes that train"
    mount = asked.mount
    if mount is None:
        return unknown(question, "what lies under the runs is not known", "name them with --runs")
    where = f"runs lie on {mount.kind} from {mount.source}"
    if mount.kind in IN_MEMORY + OF_CONTAINER:
        return wrong(question, where, "that goes with its host; choose a shared file system")
    if mount.kind in OWN_DISK:
        return unknown(
            question,
            f"{where}, a disk of this machine",
            "whether nodes that train share its power or rack, only the site knows; copy finished"
            " steps elsewhere",
        )
    return partly(
        question,
        f"{where}, which outlives a node; ftslurm makes no second copy anywhere",
        "whether it shares power or rack with the nodes, only the site knows; copy steps that must"
        " outlive it (`ftslurm verify` takes a copy, too)",
    )


def measured(asked: Asked) -> Answer:
    question = "measured: size of a version, save and load speed, room left, what is removed when"
    saved = [run for run in asked.runs if run.saves.seconds and run.step is not None]
    last = newest(saved, lambda run: run.committed_at)
    if last is None or last.step is None:
        return unknown(question, "no run on record says what its saves took", _SAVE)
    size, seconds = last.step.size_bytes, last.saves.seconds
    usual_s = percentile(seconds, 0.5)
    parts = [
        f"run {last.name}: a version has {size / 1e9:.3f} GB",
        f"saved in {usual_s:.1f} s in the middle and {percentile(seconds, 0.99):.1f} s at p99"
        f" of {len(seconds)} ({size / 1e9 / max(usual_s, 1e-3):.2f} GB/s)",
        f"{last.keep_last} are kept (checkpoint.keep_last)",
    ]
    loads = [one.seconds for one in last.restores if one.seconds is not None]
    parts.append(f"loaded in {loads[-1]:.1f} s" if loads else "how long a load takes is not known")
    if asked.free_bytes is not None:
        count = int(asked.free_bytes // max(size, 1))
        parts.append(f"{asked.free_bytes / 1e9:,.0f} GB free, room for {count:,} more")
    if not loads:
        return partly(
            question, "; ".join(parts), "preempt or resume the run once", last.committed_at
        )
    return known(question, "; ".join(parts), last.committed_at)


def object_store(asked: Asked) -> Answer:
    question = "object store: versions kept, least rights, encryption, access log"
    lines = asked.store
    if not lines:
        return unknown(
            question,
            "nothing of ftslurm writes to an object store, and none was named",
            "where you copy checkpoints to one, name it: --object-store s3://BUCKET",
        )
    seen = "; ".join(f"{line.name}: {line.seen}" for line in lines)
    todo = "; ".join(line.todo for line in lines if line.todo)
    states = {line.state for line in lines}
    if FAIL in states:
        return wrong(question, seen, todo, asked.at)
    if states == {SKIPPED}:
        return unknown(question, seen, "ask with the rights of whoever copies there")
    rights = "whether whoever copies has no more rights than that takes, only its policy tells"
    return partly(question, seen, "; ".join(filter(None, (todo, rights))), asked.at)


def same_world_size(asked: Asked) -> Answer:
    question = "a restore with the same number of ranks is a gate before production"
    alike = [
        (one, run) for run in asked.runs for one in run.restores
        if one.world_size is not None and one.world_size == _saved_by(run, one)
    ]  # fmt: skip
    last = newest(alike, lambda pair: pair[0].at)
    if last is None:
        seen = "no run on record was restored on as many ranks as had saved"
        return unknown(question, seen, _SAVE)
    one, run = last
    seen = (
        f"run {run.name} was restored at step {one.step} on {one.world_size} ranks, as many as had"
        f" saved; {format_count(len(alike), 'such restore')} in"
        f" {format_count(len(asked.runs), 'run')}; whether your releases wait for one, no record"
        " tells"
    )
    todo = "make a drill a step of your releases: `ftslurm submit --wait --drill`"
    return partly(question, seen, todo, one.at)


def _saved_by(run: PastRun, restore: Restore) -> Optional[int]:
    """Ranks; where the event does not say, those of the newest step."""
    if restore.saved_world_size is not None or run.step is None:
        return restore.saved_world_size
    return run.step.ranks


def other_world_size(asked: Asked) -> Answer:
    question = "a restore with another number of ranks: resharding, batch, learning rate, data"
    other = [
        (one, run) for run in asked.runs for one in run.restores
        if one.saved_world_size is not None and one.saved_world_size != one.world_size
    ]  # fmt: skip
    last = newest(other, lambda pair: pair[0].at)
    if last is None:
        return unknown(
            question,
            "no run on record went on with another number of ranks",
            "set recovery.min_nodes and take a node away, and compare the losses",
        )
    one, run = last
    seen = (
        f"run {run.name}: saved by {one.saved_world_size} ranks, restored at step {one.step} on"
        f" {one.world_size}; the global batch stays as it was (recovery.elastic_lr is for the rest)"
    )
    todo = "compare losses with a run of the full size: no record tells what it should have been"
    return partly(question, seen, todo, one.at)
