"""The seventeen questions before production, each answered with evidence. Pure.

An answer is what runs have left on record, with its date, or what the site was asked; never what
ought to be so. What nobody has shown is not known, and the answer says what would show it. Those on
checkpoints are in checklist_saves.py, on failures and what is recorded of them in
checklist_failures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftslurm.doctor.answer import Answer, Asked, known, newest, partly, unknown, wrong
from ftslurm.doctor.checklist_failures import (
    attempts_traced,
    figures,
    isolation,
    monitored,
    practised,
    recovery_unit,
)
from ftslurm.doctor.checklist_saves import (
    data_of_step,
    fault_domain,
    measured,
    object_store,
    other_world_size,
    pointer,
    protocol,
    same_world_size,
)
from ftslurm.doctor.line import Line
from ftslurm.run.trained_twice import Twice
from ftslurm.run.wording import format_count

_A_RUN = "submit a short one: `ftslurm submit --wait --drill`"


def answers(asked: Asked) -> list[Answer]:
    """In the order of the checklist."""
    found = [
        _responsibilities(asked),
        recovery_unit(asked),
        data_of_step(asked),
        protocol(asked),
        pointer(asked),
        fault_domain(asked),
        measured(asked),
        object_store(asked),
        same_world_size(asked),
        other_world_size(asked),
        _gang(asked),
        isolation(asked),
        practised(asked),
        figures(asked),
        monitored(asked),
        attempts_traced(asked),
        _same_result(asked),
    ]
    return [answer.numbered(place + 1) for place, answer in enumerate(found)]


def _responsibilities(asked: Asked) -> Answer:
    question = "who answers for what: framework, launcher, training controller, queue, storage"
    last = newest(asked.runs, lambda run: run.submitted_at)
    if last is None:
        return unknown(question, "there is no run on record", _A_RUN)
    queue = f"Slurm {last.version}" if last.scheduler == "slurm" else "this machine alone"
    launcher = "srun" if last.scheduler == "slurm" else "the local scheduler"
    storage = asked.mount.kind if asked.mount else "a file system that is not known"
    seen = (
        f"run {last.name}: `{last.entry}` trains, {launcher} starts ranks, the batch loop of"
        f" ftslurm decides what follows an attempt, {queue} queues, {storage} keeps checkpoints;"
        " who is called when one of them fails, no record tells"
    )
    return known(question, seen, last.submitted_at)


def _gang(asked: Asked) -> Answer:
    question = "gang scheduling: no part of the ranks holds GPUs while the rest waits"
    lines: Mapping[str, Line] = asked.slurm or {}
    mode = lines.get("slurm.preempt_mode")
    begun = [one for run in asked.runs if run.scheduler == "slurm" for one in run.attempts]
    last = newest(begun, lambda one: one.claimed_at)
    if mode is None and last is None:
        return unknown(question, "no run under Slurm, and Slurm was not asked", _A_RUN)
    parts = []
    if last is not None:
        parts.append(
            f"the newest attempt had its {format_count(len(last.nodes), 'node')} at once (a job of"
            " Slurm starts with all of them or not at all; srun ends all ranks when one fails)"
        )
    if mode is not None:
        parts.append(mode.seen)
    at = last.claimed_at if last is not None else None
    if mode is not None and any(word in mode.seen for word in ("suspended", "take turns")):
        return partly(question, "; ".join(parts), mode.todo, at)
    return known(question, "; ".join(parts), at)


def _same_result(asked: Asked) -> Answer:
    question = "after a restore: loss, data position and the final model as without one"
    told = [run for run in asked.runs if run.twice is not None]
    last = newest(told, lambda run: run.twice.at if run.twice else None)
    if last is None or last.twice is None:
        return unknown(
            question,
            "no steps were trained twice, so nothing can be compared",
            "end a run with KILL between two saves, then ask again",
        )
    twice = last.twice
    seen = (
        f"run {last.name}: {twice.steps} steps were trained again after a restore;"
        f" {twice.same_data} of {twice.data} had the same samples and tokens, {_losses(twice)}; of"
        " the final model's quality no record tells"
    )
    if twice.same_data < twice.data:
        return wrong(question, seen, "data was not read on from where the step was saved", twice.at)
    if twice.same_loss < twice.losses:
        todo = "look whether the nodes were of one kind, and what in the loop is not deterministic"
        return wrong(question, seen, todo, twice.at)
    todo = "evaluate the final model beside one that was never interrupted"
    return partly(question, seen, todo, twice.at)


def _losses(twice: Twice) -> str:
    if not twice.losses:
        return "no loss had to be the same (other ranks, other code, or deterministic=false)"
    return f"{twice.same_loss} of {twice.losses} the same loss to the last bit"


def counted(found: Sequence[Answer]) -> dict[str, int]:
    states = [answer.state for answer in found]
    return {state: states.count(state) for state in sorted(set(states))}
