"""One task's configuration made into the next one's, as a copy costs more than what is put into it.

Only where each value and each settled reference stands in a node that holds one value and stays
that node: then the next task's take their places as they would in a copy. Whoever freezes says
when that is, before and after.

Private names used of OmegaConf: `_get_node`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.hydra_app.common_part import Common
from ftslurm.hydra_app.settle import Place, group_at, write


@dataclass
class Begun:
    """What the tasks of one kind begin with."""

    common: Optional[Common]
    """What is known of it."""
    copied: Callable[[], Any]
    is_kept: bool
    """Whether `used` may be: it takes some 300 KB."""
    used: Any = None
    """The configuration of the task before, in which all but its values is as in a copy."""


@dataclass(frozen=True)
class _Reference:
    holder: Any
    name: Any
    node: Any
    text: str


def are_values(config: Any, keys: Collection[str], *, or_absent: bool) -> bool:
    """Whether each of these keys is that of a node for one value."""
    from omegaconf import DictConfig, ValueNode

    for key in keys:
        node = config
        for part in key.split("."):
            if not isinstance(node, DictConfig) or not isinstance(node._value(), dict):
                return False
            node = node._get_node(part, validate_access=False)
            if node is None:
                break
        if not (or_absent if node is None else isinstance(node, ValueNode)):
            return False
    return True


def references_at(config: Any, places: Sequence[Place]) -> Optional[list[_Reference]]:
    """What is to be put back once they were settled; None where one is not there."""
    found = []
    for *above, name in places:
        holder = group_at(config, above)
        node = None if holder is None else holder._get_node(name)
        if node is None:
            return None
        found.append(_Reference(holder, name, node, node._value()))
    return found


def put_back(config: Any, references: Sequence[_Reference]) -> bool:
    """False, and the configuration is of no use, where another node has taken the place of one."""
    from omegaconf import OmegaConf, ValueNode

    OmegaConf.set_readonly(config.hydra, False)
    for one in references:
        if one.holder._get_node(one.name) is not one.node or not isinstance(one.node, ValueNode):
            return False
        write(one.holder, one.name, one.text)
    return True


def as_change(word: Any) -> Any:
    """An override of Hydra's as it is put where it was put before: the key is there by now."""
    from hydra.core.override_parser.types import OverrideType

    if word.type is OverrideType.CHANGE:
        return word
    return dataclasses.replace(word, type=OverrideType.CHANGE)
