"""A rank out of a standby has its own streams and no other rank's."""

import time
from pathlib import Path

import pytest
from test_standby import Node

HALF_SENT = """
import os, socket, sys, time
from ftslurm.node.standby_link import STANDARD_STREAMS, Lines, address, likeness, send

connection = socket.socket(socket.AF_UNIX)
connection.connect(address(os.environ))
send(connection, {
    "module": "own_rank", "arguments": ["wait"], "environ": dict(os.environ),
    "cpus": sorted(os.sched_getaffinity(0)), "likeness": likeness(os.environ),
})
assert Lines(connection).first() == {"ready": True}
socket.send_fds(connection, [b"{"], list(STANDARD_STREAMS))
print("sent", file=sys.stderr)
time.sleep(60)
"""


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.end()


def test_a_rank_has_no_other_ranks_streams(node):
    """Streams come with the first byte of their order; a rank may be forked before the rest."""
    node.start_standby()
    (node.folder / "half_sent.py").write_text(HALF_SENT)
    environ = {**node.environ, "SLURM_PROCID": "4", "FTSLURM_ATTEMPT": "7"}
    half = node.start("half_sent", env=environ)
    assert half.stderr.readline() == "sent\n"
    standby = node.standby.pid
    while not streams(half.pid) < streams(standby):
        time.sleep(0.01)  # until it has them; the time limit of a test ends this
    rank = node.start_rank("wait")
    rank.stdout.readline()
    (forked,) = Path(f"/proc/{standby}/task/{standby}/children").read_text().split()
    assert not streams(half.pid) & streams(forked)


def streams(pid):
    """The pipes that a process has open."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {link for link in links if link.startswith("pipe:")}
