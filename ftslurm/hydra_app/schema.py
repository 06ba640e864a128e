"""Options of `hydra/launcher=ftslurm`: RunSpec's own fields, so that the two cannot drift.

Same names, same types, and no defaults: what was given is told from what was not, and only that is
put over what conf/ composes. Which fields a program of somebody else's has is for submit/program.py
to say. Pure: nothing is read or written.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.run.spec import RunSpec
from ftslurm.submit.program_keys import is_for_program

MISSING = "???"
"""OmegaConf's word for a value that was not given."""

GROUPS = ("cluster", "recovery", "health")
"""Groups of conf/ whose options mean something to a program."""

GUARD = "ftslurm.hydra_app.guard.RefusePlainRun"


@dataclass
class Groups:
    """Options of conf/'s groups, or of those beside them in `config_dir`."""

    cluster: Optional[str] = None
    recovery: Optional[str] = None
    health: Optional[str] = None


_OWN: list[tuple[str, Any, Any]] = [
    ("groups", Groups, field(default_factory=Groups)),
    ("config_dir", Optional[str], field(default=None)),
    ("parallelism", Optional[int], field(default=None)),
    ("detach", bool, field(default=False)),
]
"""What a sweep has beside what each of its runs has."""


def hydra_node(target: str) -> dict[str, Any]:
    """What choosing the launcher puts below `hydra`: its options, and the refusal of a plain start,
    which Hydra would run without asking any launcher."""
    return {
        "launcher": launcher_options(target),
        "callbacks": {"ftslurm": {"_target_": GUARD}},
    }


def launcher_options(target: str) -> Any:
    """An instance of the generated dataclass."""
    own: list[tuple[str, Any, Any]] = [
        ("_target_", str, field(default=target)),
        # Hydra would take any nested `_target_` for something to make.
        ("_recursive_", bool, field(default=False)),
        *_OWN,
        *_without_defaults(RunSpec, "", top=True),
    ]
    return _made("FtslurmLauncherConf", own)()


def _made(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
    """A dataclass of this module, where pickle finds it: a configuration of a thousand tasks is
    copied that way."""
    made = dataclasses.make_dataclass(name, fields, namespace={"__module__": __name__})
    setattr(sys.modules[__name__], name, made)
    return made


def _without_defaults(kind: type, prefix: str, *, top: bool = False) -> list[tuple[str, Any, Any]]:
    fields: list[tuple[str, Any, Any]] = []
    for name, of in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(of):
            below = _without_defaults(typing.cast(type, of), f"{prefix}{name}.")
            if below:
                made = _made(f"{typing.cast(type, of).__name__}Options", below)
                fields.append((name, made, field(default_factory=made)))
        elif not is_for_program(f"{prefix}{name}"):
            continue
        elif typing.get_origin(of) is dict:
            fields.append((name, of, field(default_factory=dict)))
        elif top:
            # Hydra refuses to make a launcher that has a missing value right at the top.
            fields.append((name, Optional[of], field(default=None)))
        else:
            fields.append((name, of, field(default=MISSING)))
    return fields


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key of the spec -> value, of what was given. `options`: the launcher's, as plain
    values."""
    own = {name for name, _, _ in _OWN}
    return {
        key: value
        for key, value in _leaves(RunSpec, options, "")
        if key.partition(".")[0] not in own
    }


def chosen_groups(options: Mapping[str, Any]) -> list[str]:
    """Overrides that choose options of groups."""
    groups = options["groups"]
    return [f"{name}={groups[name]}" for name in GROUPS if groups[name] is not None]


def _leaves(kind: Any, options: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, of in typing.get_type_hints(kind).items():
        value = options.get(name, MISSING)
        if isinstance(value, str) and value == MISSING:
            continue
        if dataclasses.is_dataclass(of):
            yield from _leaves(of, value, f"{prefix}{name}.")
        elif typing.get_origin(of) is dict:
            for word, item in value.items():
                yield f"{prefix}{name}.{word}", item
        elif prefix or value is not None:
            yield f"{prefix}{name}", value
