"""What was asked of a cluster before it is judged: its settings, and of what a run would use.

Values only. None stands for what could not be asked, never for what is not there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from ftslurm.scheduler.settings import Qos

_NUMBER = re.compile(r"(\d+)")
_NUMBERED = re.compile(r"(\w+)\[(\d+)\]")


@dataclass(frozen=True)
class Cluster:
    """`config`: key -> value, `` for `(null)`; `partition`: that of the run."""

    config: Mapping[str, str]
    partition: Mapping[str, str]
    version: tuple[int, int, int]
    qos: Optional[Mapping[str, Qos]] = None
    qos_name: str = ""
    """Of the run; empty: nobody has said."""
    is_default_qos: bool = False
    """Nobody has named it: it is what this user's jobs get."""
    gres: Optional[Mapping[str, str]] = None
    """Node of the partition -> its gres."""
    clock_off_s: Optional[float] = None
    nodes: int = 1
    """Of the run."""
    may_use: bool = True
    """This user the partition, by its AllowGroups."""
    account: str = ""
    """Of the run; empty: nobody has said."""
    above: Optional[Sequence[str]] = None
    """Accounts above that one."""

    def all(self, key: str) -> list[str]:
        """Later versions number what may come more than once, and print it so even when it comes
        once: `Prolog[0]`, `Prolog[1]`."""
        found = [(int(match[2]), self.config[match[0]]) for match in
                 map(_NUMBERED.fullmatch, self.config) if match and match[1] == key]  # fmt: skip
        values = [self.config.get(key, ""), *(value for _, value in sorted(found))]
        return [value for value in values if value not in ("", "(null)")]

    def get(self, key: str) -> str:
        return next(iter(self.all(key)), "")

    def number(self, key: str, default: int = 0) -> int:
        found = _NUMBER.match(self.get(key))
        return int(found[1]) if found else default

    def words(self, key: str) -> set[str]:
        return {word.strip() for word in self.get(key).split(",")}

    @property
    def partition_name(self) -> str:
        return self.partition.get("PartitionName", "")
