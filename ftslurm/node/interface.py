"""The address of one network interface of this node, for those who have to meet there.

Reads what the kernel says, nothing else; Linux only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path
from typing import Optional

from ftslurm.errors import RunError
from ftslurm.run.rank import node_name

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,14}")
"""15 characters at most (IFNAMSIZ less the zero)."""

_SIOCGIFADDR = 0x8915  # netdevice(7)
_IPV6 = Path("/proc/net/if_inet6")


def address_of(interface: str) -> str:
    """Its IPv4 address, else its IPv6 address that other nodes can reach."""
    address = ipv4_of(interface) or _ipv6(interface, _IPV6)
    if address is None:
        names = ", ".join(sorted(name for _, name in socket.if_nameindex()))
        raise RunError(
            f"cluster.interface `{interface}` has no address on node `{node_name()}`, which has "
            f"{names}; name one that every node of the job has"
        )
    return address


def ipv4_of(interface: str) -> Optional[str]:
    """Its first IPv4 address."""
    request = struct.pack("256s", os.fsencode(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:  # no such interface, or none of its addresses is IPv4
            return None
    return socket.inet_ntoa(answer[20:24])  # struct ifreq: 16 bytes of name, family, port, address


def _ipv6(interface: str, table: Path) -> Optional[str]:
    try:
        lines = table.read_text().splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return None
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        # A link-local one is of use only with the number that the reader's own node gives the link.
        if name == interface and not address.is_link_local:
            return str(address)
    return None
