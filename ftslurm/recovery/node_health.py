"""What root's looks have found since an attempt was decided on: its nodes' epilogs run after that.

Only where a site has a folder for it (health.verdict_dir). What is found is noted like any decision
on a node, so that the claim that asks for it places no rank there.
"""

from __future__ import annotations

from pathlib import Path

from ftslurm.diagnosis.ask_nodes import RootsWords
from ftslurm.diagnosis.causes import GPU, NODE
from ftslurm.diagnosis.health_clues import believed_by, false_alarms, speaks_against_node
from ftslurm.errors import warn
from ftslurm.files import best_effort
from ftslurm.health.report import Told
from ftslurm.recovery.own_job import OwnJob
from ftslurm.run.attempts import claimed_numbers, read_attempt
from ftslurm.run.node_memory import BY_PERSON, EXCLUDED, READMITTED, note_node, read_node_events


def remember_roots_word(job: OwnJob) -> None:
    settings, numbers = job.record.spec.health, claimed_numbers(job.layout)
    if not (settings.verdict_dir and numbers and job.record.spec.recovery.max_node_faults):
        return
    attempt = read_attempt(job.layout, numbers[-1])
    words, notes = RootsWords(Path(settings.verdict_dir), attempt).wait()
    readmitted_at = {
        event.node: event.at
        for event in read_node_events(job.layout)
        if (event.kind, event.cause) == (READMITTED, BY_PERSON)
    }
    against = [
        (file, report.node, told)
        for file, report in words
        for told in report.verdicts
        if report.at > readmitted_at.get(report.node, 0.0)
        and speaks_against_node(told, believed_by(report, settings))
    ]
    codes = [(told.code, node) for _, node, told in against]
    alarms = false_alarms(codes, nodes=len(attempt.nodes))
    notes += [f"{told}, which is held against none of them" for told in alarms.values()]
    for note in notes:
        warn(note)
    firsts: dict[str, tuple[Path, Told]] = {}
    for file, node, told in against:
        if told.code not in alarms:
            firsts.setdefault(node, (file, told))
    for node, (file, first) in firsts.items():
        cause = NODE if first.gpu is None and not first.bus else GPU
        why = f"root's look found {first.code}: {first.sentence} (`{file}`)"
        with best_effort(f"what root says of node {node} is not on record"):
            note_node(
                job.layout,
                EXCLUDED,
                node,
                attempt=attempt.number,
                cause=cause,
                why=why,
                now=job.now,
            )
