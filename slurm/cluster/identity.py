"""Names, numbers and paths of one cluster, all computed from its folder.

Two folders give two clusters that share no port, network, user or Slurm cluster name (but for an
unlucky hash, which `up` notices and refuses). Nothing here reads or writes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = Path("/var/tmp/ftslurm-cluster")
CONTROLLER_HOST = "ftctl"
MAX_NODES = 64
NUM_USERS = 2
NUM_GPUS = 2
FIRST_PORT = 26800  # below the ephemeral range, away from Slurm's and MariaDB's own


@dataclass(frozen=True)
class Identity:
    """One cluster's place on this machine."""

    folder: Path
    slot: int
    """0 for the default folder, else a number from the folder's path."""

    @property
    def suffix(self) -> str:
        return str(self.slot) if self.slot else ""

    @property
    def cluster_name(self) -> str:
        return f"ftslurm{self.suffix}"

    @property
    def bridge(self) -> str:
        return f"ftslurm{self.suffix}"

    @property
    def slurmctld_port(self) -> int:
        return FIRST_PORT + 4 * self.slot

    @property
    def slurmd_port(self) -> int:
        return self.slurmctld_port + 1

    @property
    def slurmdbd_port(self) -> int:
        return self.slurmctld_port + 2

    @property
    def mariadb_port(self) -> int:
        return self.slurmctld_port + 3

    @property
    def subnet(self) -> str:
        return f"10.117.{self.slot}.0/24"

    @property
    def controller_address(self) -> str:
        return f"10.117.{self.slot}.1"

    @property
    def user_names(self) -> list[str]:
        separator = "x" if self.slot else ""
        return [f"ftuser{i}{separator}{self.suffix}" for i in range(1, NUM_USERS + 1)]

    @property
    def user_comment(self) -> str:
        """The GECOS field that marks a user of this machine as made by this cluster."""
        return f"ftslurm cluster {self.folder}"

    @property
    def config_folder(self) -> Path:
        return self.folder / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.config_folder / "slurm.conf"

    @property
    def source_folder(self) -> Path:
        """Where `--expose PATH` appears, read-only, to users and nodes."""
        return self.folder / "src"

    @property
    def node_disk(self) -> Path:
        """Each node sees its own folder here: storage that outlives a kill of the node."""
        return self.folder / "local"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def mysql_socket(self) -> Path:
        return self.folder / "run" / "mysql.socket"

    @property
    def without_scontrol(self) -> Path:
        return self.folder / "without-scontrol"

    def node_folder(self, node: str) -> Path:
        return self.folder / "nodes" / node

    def node_address(self, node: str) -> str:
        return f"10.117.{self.slot}.{10 + node_number(node)}"

    def node_link(self, node: str) -> str:
        """The node's cable: the host's end of its veth pair (at most 15 characters)."""
        return f"{self.bridge}-{node}"

    def log(self, name: str) -> Path:
        return self.folder / "log" / name


def identify(folder: Path) -> Identity:
    if folder == DEFAULT_FOLDER:
        return Identity(folder, 0)
    return Identity(folder, zlib.crc32(str(folder).encode()) % 200 + 1)


def node_names(num_nodes: int) -> list[str]:
    return [f"n{i}" for i in range(1, num_nodes + 1)]


def node_number(node: str) -> int:
    return int(node[1:])
