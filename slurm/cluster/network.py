"""The cluster's private network: one bridge on the host, one cable (veth pair) per node.

Nothing is routed in or out. The bridge carries the folder as its alias, so that it is recognised
as ours, and never somebody else's device taken down.
"""

from __future__ import annotations

import ipaddress
import json
from typing import Any, Optional

from errors import ClusterError
from identity import Identity
from processes import attempt, run


def create_bridge(identity: Identity) -> None:
    prefix = identity.subnet.rpartition("/")[2]
    run(["ip", "link", "add", identity.bridge, "type", "bridge"])
    run(["ip", "link", "set", identity.bridge, "alias", str(identity.folder)])
    address = f"{identity.controller_address}/{prefix}"
    run(["ip", "address", "add", address, "dev", identity.bridge])
    run(["ip", "link", "set", identity.bridge, "up"])


def remove_bridge(identity: Identity) -> None:
    if _owner(identity) == str(identity.folder):
        run(["ip", "link", "delete", identity.bridge])


def refuse_foreign_network(identity: Identity) -> None:
    """Raise if the bridge's name or addresses belong to somebody else."""
    owner = _owner(identity)
    if owner is not None:
        whose = f"of the cluster in `{owner}`" if owner else "not of these tools"
        raise ClusterError(
            f"network device `{identity.bridge}` exists and is {whose}; if nobody needs it, "
            f"`ip link delete {identity.bridge}`"
        )
    ours = ipaddress.ip_network(identity.subnet)
    for device in _ip_json("-4", "address", "show"):
        for address in device.get("addr_info", []):
            theirs = ipaddress.ip_network(f"{address['local']}/{address['prefixlen']}", False)
            if theirs.overlaps(ours):
                raise ClusterError(
                    f"device `{device['ifname']}` has network {theirs}, which overlaps the "
                    f"cluster's {ours}; choose another --folder to get other addresses"
                )


def plug_in(identity: Identity, node: str, *, pid: int) -> None:
    """Give a node, known by its first process, an eth0 whose other end is on the bridge."""
    link = identity.node_link(node)
    # A just killed node's cable vanishes with its namespace, a moment after its last process.
    attempt(["ip", "link", "delete", link])
    peer = ["peer", "name", "eth0", "netns", str(pid)]
    run(["ip", "link", "add", link, "type", "veth", *peer])
    run(["ip", "link", "set", link, "master", identity.bridge, "up"])


def remove_links(identity: Identity, nodes: list[str]) -> None:
    """Remove cables now rather than when the kernel gets round to the dead namespaces."""
    for node in nodes:
        if attempt(["ip", "link", "show", identity.node_link(node)]).returncode == 0:
            attempt(["ip", "link", "delete", identity.node_link(node)])


def set_link(identity: Identity, node: str, *, up: bool) -> None:
    """Pull a node's cable, or plug it in again. The node is told nothing but `no carrier`."""
    run(["ip", "link", "set", identity.node_link(node), "up" if up else "down"])


def is_linked(identity: Identity, node: str) -> bool:
    shown = attempt(["ip", "-json", "link", "show", identity.node_link(node)])
    if shown.returncode != 0:
        return False
    return "UP" in json.loads(shown.stdout)[0]["flags"]


def _owner(identity: Identity) -> Optional[str]:
    """The alias of the bridge; empty without one; None when there is no such device."""
    shown = attempt(["ip", "-json", "link", "show", identity.bridge])
    if shown.returncode != 0:
        return None
    return str(json.loads(shown.stdout)[0].get("ifalias", ""))


def _ip_json(*arguments: str) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = json.loads(run(["ip", "-json", *arguments]))
    return [device for device in shown if device]
