"""All ranks of an attempt are about to train with one code, the one the run began with.

Collective, right before the first step: nobody trains before every node has been compared with rank
0's and rank 0's with the earlier attempts'; what is found ends all ranks with the same sentence.
"""

from __future__ import annotations

import logging
import time

import torch.distributed as dist

from ftslurm.errors import CodeError
from ftslurm.run.modules import Module, look
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import RunRecord
from ftslurm.run.same_code import (
    Event,
    between_nodes,
    error,
    keep,
    names,
    node_facts,
    with_earlier,
)
from ftslurm.train.exchange import broadcast_json, gather_json

log = logging.getLogger(__name__)


def check_same_code(
    env: RankEnvironment, record: RunRecord, group: dist.ProcessGroup, *, on_event: Event
) -> None:
    """CodeError on all ranks, or RunError where the next start may be better; else modules.json is
    there. `group`: a gloo group of all ranks."""
    began = time.monotonic()
    # Ranks of one node read the same files.
    mine = look(env.attempt) if env.local_rank == 0 else {}
    files = {name: [module.file, module.sha256] for name, module in mine.items()}
    other, theirs = broadcast_json([env.node, files], group, world_size=env.world_size)
    first = {name: Module(file, digest, env.attempt) for name, (file, digest) in theirs.items()}
    difference, rebuilt = between_nodes(env, record, mine, first, other=other)
    found = gather_json([difference, env.node, names(rebuilt)], group, world_size=env.world_size)
    across = next((sentence for sentence, _, _ in found if sentence), None)
    built = [(node, modules) for _, node, modules in found if modules]
    earlier = None
    if env.rank == 0 and across is None:
        if built:
            on_event("code_changed", node_facts(built))
        earlier = with_earlier(env, record, mine, on_event=on_event)
    across, earlier = broadcast_json([across, earlier], group, world_size=env.world_size)
    if across is not None:
        raise error(record, across)
    if earlier is not None:
        raise CodeError(earlier)
    if env.rank == 0:
        keep(env, mine)
        log.info("%d modules are as they should be (%.2f s)", len(mine), time.monotonic() - began)
