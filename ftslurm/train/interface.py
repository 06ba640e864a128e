"""Which network interface leads to another host. Standard library only; sends no packet."""

from __future__ import annotations

import socket

from ftslurm.errors import RunError
from ftslurm.node.interface import ipv4_of


def interface_towards(host: str, port: int) -> tuple[str, str]:
    """(name, own IPv4 address) of the interface that routes to `host`."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # connect(2) on a datagram socket only picks the route.
            probe.connect((host, port))
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(
            f"there is no IPv4 route to `{host}` ({error}); name the interface in "
            "GLOO_SOCKET_IFNAME"
        ) from None
    for _, name in socket.if_nameindex():
        if ipv4_of(name) == address:
            return name, address
    raise RunError(
        f"no interface has the address {address} that leads to `{host}`; name the interface in "
        "GLOO_SOCKET_IFNAME"
    )
