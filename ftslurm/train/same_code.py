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
from ftslurm.run.same_code import Event, between_nodes, error, keep, with_earlier
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
    digests = {name: module.sha256 for name, module in mine.items()}
    other, theirs = broadcast_json([env.node, digests], group, world_size=env.world_size)
    first = {name: Module("", digest, env.attempt) for name, digest in theirs.items()}
    difference = between_nodes(mine, first, node=env.node, other=other)
    words = gather_json(difference, group, world_size=env.world_size)
    across = next((word for word in words if word), None)
    earlier = None
    if env.rank == 0 and across is None:
        earlier = with_earlier(env, record, mine, on_event=on_event)
    across, earlier = broadcast_json([across, earlier], group, world_size=env.world_size)
    if across is not None:
        raise error(record, across)
    if earlier is not None:
        raise CodeError(earlier)
    if env.rank == 0:
        keep(env, mine)
        log.info("%d modules are as they should be (%.2f s)", len(mine), time.monotonic() - began)
