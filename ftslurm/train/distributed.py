"""Process groups of an attempt: who this rank is, on which device, and over what it talks.

Opened once per process from the environment the batch script made; no torchrun, no environment
rendezvous. Three groups: `main` for the model, `control` for the agreement at step boundaries,
`checkpoint` for the background save, so that no two threads ever share one.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ftslurm.errors import RunError, SpecError
from ftslurm.run.gpu_request import has_gpus
from ftslurm.run.heartbeat import RESTORING, SAVING
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.spec import RunSpec
from ftslurm.train.interface import interface_towards

log = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 300
"""Ranks of one job step start within minutes of each other, or never."""
COLLECTIVE_TIMEOUT_S = 1800
"""torch's own default for gloo; a dead peer shows itself at once by its closed connection."""
WITHOUT_LIMIT_S = 7 * 86400
"""For a phase that has none."""
BIND_PATIENCE_S = 20
"""How long rank 0 waits for its port: the attempt before may still be leaving it."""
_BACKLOG = 4096
"""Ranks that may knock at once; the kernel takes net.core.somaxconn at most."""


@dataclass(frozen=True)
class Groups:
    """One rank's place among all, and its three process groups."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    main: dist.ProcessGroup
    """gloo or nccl: gradients, metrics."""
    control: dist.ProcessGroup
    """gloo: the word exchanged at step boundaries."""
    checkpoint: dist.ProcessGroup
    """gloo: belongs to the checkpointer's background thread."""
    node: str = ""
    """Where this rank runs, for messages."""


def choose_backend(asked: str, *, asked_for_gpus: bool, has_cuda: bool) -> str:
    """nccl or gloo; a GPU that was asked for and cannot be used is an error, not a slow run."""
    if asked == "gloo":
        return "gloo"
    if (asked == "nccl" or asked_for_gpus) and not has_cuda:
        gpus = "GPUs asked for" if asked_for_gpus else "no GPUs asked for"
        raise SpecError(
            f"parallel.backend `{asked}` and {gpus} need a GPU that torch can use, and there is "
            "none on this node; check the driver and the torch build, or set parallel.backend=gloo"
        )
    return "nccl" if asked == "nccl" or asked_for_gpus else "gloo"


def backend_of(spec: RunSpec) -> str:
    """choose_backend for this run on this machine."""
    return choose_backend(
        spec.parallel.backend,
        asked_for_gpus=has_gpus(spec.cluster),
        has_cuda=torch.cuda.is_available(),
    )


def open_groups(env: RankEnvironment, spec: RunSpec, *, run_id: str) -> Groups:
    """Meet the other ranks. Collective; raises RunError when they cannot be met."""
    backend = backend_of(spec)
    device = take_device(env, backend)
    store = _open_store(env)
    _choose_gloo_interface(env, store)
    dist.init_process_group(
        backend,
        # The prefix keeps a rank of another run or attempt, should it find this port, out.
        store=PrefixStore(f"{run_id}/{env.attempt}", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=device if backend == "nccl" else None,
    )
    return Groups(
        rank=env.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        device=device,
        main=_world(),
        control=_gloo_group(longest_s(spec, RESTORING, SAVING)),
        checkpoint=_gloo_group(longest_s(spec, SAVING)),
        node=env.node,
    )


def close_groups() -> None:
    """Leave all groups; only after a barrier, or peers see their connections closed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def take_device(env: RankEnvironment, backend: str) -> torch.device:
    """This rank's, current in this thread."""
    if backend == "gloo":
        return torch.device("cpu")
    # With --gpus-per-task or a site's task binding each rank sees its own GPU only, as number 0.
    device = torch.device("cuda", env.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _open_store(env: RankEnvironment) -> Store:
    """The key-value store on rank 0 through which the groups find each other."""

    try:
        listener = None
        if env.rank == 0:
            listener = retry_bind(lambda: listen(env.master_addr, env.master_port)).detach()
        return TCPStore(
            env.master_addr,
            env.master_port,
            env.world_size,
            is_master=env.rank == 0,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
            master_listen_fd=listener,
        )
    except (dist.DistError, OSError) as error:
        raise RunError(
            f"rank {env.rank} cannot meet the others at {env.master_addr}:{env.master_port} "
            f"({_first_line(error)}); the port may be taken or a firewall closed: the next attempt "
            "takes another port"
        ) from error


def listen(address: str, port: int) -> socket.socket:
    """Rank 0's listening socket. On that address alone when it is a number (cluster.interface):
    the store asks nobody who they are. A host's own name may resolve to 127.0.1.1 on that host, so
    with a name it listens on all."""
    try:
        host = str(ipaddress.ip_address(address))
    except ValueError:
        both = socket.has_dualstack_ipv6()
        any_family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(
            ("", port), family=any_family, dualstack_ipv6=both, backlog=_BACKLOG
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def retry_bind(
    bind: Callable[[], socket.socket],
    *,
    patience_s: float = BIND_PATIENCE_S,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> socket.socket:
    """Call `bind` until the port is free or patience ends; then its last error."""
    deadline = now() + patience_s
    while True:
        try:
            return bind()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or now() >= deadline:
                raise
            log.info("the rendezvous port is still in use, trying again")
            sleep(0.5)


def _choose_gloo_interface(env: RankEnvironment, store: Store) -> None:
    """Make gloo listen where the other nodes can reach it.

    Left alone gloo listens on the address that the host's own name resolves to, which on Debian is
    127.0.1.1. A rank on another node than rank 0 takes the interface of its route to rank 0; the
    ranks beside rank 0 take that of their route back to the first such rank.
    """
    first_far_rank = env.local_world_size
    if first_far_rank >= env.world_size or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if env.rank < first_far_rank:
        target = store.get("far_address").decode()
    else:
        target = env.master_addr
    name, address = interface_towards(target, env.master_port)
    if env.rank == first_far_rank:
        store.set("far_address", address)
    os.environ["GLOO_SOCKET_IFNAME"] = name


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "init_process_group has just run"
    return world


def longest_s(spec: RunSpec, *phases: str) -> float:
    """How long one rank may wait for another in these phases: ranks that read or write in them are
    done at times as far apart as the phase is long."""
    limits = (spec.recovery.phase_limit_s[phase] for phase in phases)
    return max(COLLECTIVE_TIMEOUT_S, *(limit_s or WITHOUT_LIMIT_S for limit_s in limits))


def _gloo_group(timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
