"""What the tasks of a sweep have in common, settled once for all of them.

Of tasks that differ in single values alone most references come to the same: those that lead, over
whatever others, to nothing that differs between the tasks. They are settled in what all tasks
begin with; the others, and all whose outcome could depend on when or where they are looked up, in
each task. Where one might refer to the launcher's options or to the overrides, or is of a form that
is not known here, nothing is done.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Optional, cast

from ftslurm.hydra_app.settle import Place, references_in, settle
from ftslurm.run.secret import is_secret

_REFERENCE = re.compile(
    r"\$\{(?:now:(?P<now>[^${},]*)|(?P<env>oc\.env:[^${}]*)"
    r"|(?!hydra\}|[^}]*(?:launcher|overrides))(?:(?P<hydra>hydra:)|(?P<up>\.*))(?P<key>\w+(?:\.\w+)*))\}"
)
"""One that is plainly none to the launcher's options or to the overrides."""

_NUMBER = re.compile(r"[0-9]+(?:_[0-9]+)*")

_GUARD = "ftslurm"
"""Of hydra.callbacks: it has no say on a node."""
_OF_TASK = (
    "hydra.job.id",
    "hydra.job.num",
    "hydra.job.override_dirname",
    "hydra.runtime.output_dir",
)


@dataclass(frozen=True)
class Common:
    """Of a configuration from which the launcher's options were taken off."""

    options: dict[str, Any]
    """The launcher's."""
    places: tuple[Place, ...]
    """Of all references that are left to each task."""


def take_common(config: Any, keys: Collection[str]) -> Optional[Common]:
    """Settle in `config` what is the same for all tasks that differ in the values of `keys` alone,
    which refer to nothing. None, and nothing is changed, where that cannot be told."""
    from omegaconf import OmegaConf

    plain = cast("dict[str, Any]", OmegaConf.to_container(config))
    # Overrides stay as typed: what they refer to is relative to where they were put.
    del plain["hydra"]["overrides"]
    if not _has_plain_names(plain):
        return None
    found = dict(references_in(plain))
    inside = any(place[:2] == ("hydra", "launcher") for place in found)
    if inside or any("${" in _REFERENCE.sub("", text) for text in found.values()):
        return None
    times = {words for words, *more in OmegaConf.get_cache(config).get("now", {}) if not more}
    alike = _Alike(found, [*_OF_TASK, *keys], times)
    same = [place for place in found if alike.is_same(place)]
    OmegaConf.set_readonly(config.hydra, False)
    take_what_is_not_for_tasks(config.hydra)
    options = take_options(config.hydra)
    settle(config, lambda *_, **__: False, same)
    return Common(options, tuple(place for place in found if place not in same))


def _has_plain_names(plain: Any) -> bool:
    """Whether all maps in it have names that a key says in one way: an enum, a bool or a float can
    be written in several."""
    if isinstance(plain, dict):
        return all(type(name) in (str, int) for name in plain) and all(
            map(_has_plain_names, plain.values())
        )
    return not isinstance(plain, list) or all(map(_has_plain_names, plain))


def take_options(hydra: Any) -> dict[str, Any]:
    """The launcher's, off the configuration, where they are of no use to the task."""
    from omegaconf import OmegaConf

    options = cast("dict[str, Any]", OmegaConf.to_container(hydra.launcher))
    hydra.launcher = {"_target_": hydra.launcher._target_}
    return options


def take_what_is_not_for_tasks(hydra: Any) -> None:
    """Off the configuration: the guard, and secrets of the environment."""
    from omegaconf import flag_override

    with flag_override(hydra, "struct", False):
        hydra.callbacks.pop(_GUARD, None)
        for name in hydra.job.env_copy:
            # The job inherits the environment of the shell that submits.
            if is_secret(name, os.environ.get(name)):
                hydra.job.env_set.pop(name, None)


class _Alike:
    """Which references come to the same in all tasks."""

    def __init__(
        self, found: Mapping[Place, str], keys: Collection[str], times: Collection[str]
    ) -> None:
        self._found = found
        self._dotted = {place: ".".join(map(str, place)) for place in found}
        self._keys = [_numbered(key) for key in keys]
        self._times = times
        """Forms of the time that were looked up before, and are kept."""
        self._known: dict[Place, bool] = {}

    def is_same(self, place: Place) -> bool:
        if place not in self._known:
            self._known[place] = False  # of a circle, too
            is_given = any(_touch(self._dotted[place], key) for key in self._keys)
            references = _REFERENCE.finditer(self._found[place])
            self._known[place] = not is_given and all(
                self._is_same_at(place, match) for match in references
            )
        return self._known[place]

    def _is_same_at(self, place: Place, match: re.Match[str]) -> bool:
        if match["now"] is not None:
            return match["now"] in self._times
        if match["key"] is None or match["hydra"]:
            return False
        # One dot is where the reference itself is, each further one a level above.
        above = map(str, place[: -len(match["up"])]) if match["up"] else ()
        key = _numbered(".".join([*above, match["key"]]))
        if any(_touch(key, other) for other in self._keys):
            return False
        return all(
            self.is_same(place) for place, other in self._dotted.items() if _touch(key, other)
        )


def _numbered(key: str) -> str:
    """With the numbers in it as Python writes them: OmegaConf reads `l.01` and `l.1_0`, too."""
    return ".".join(
        part.replace("_", "").lstrip("0") or "0" if _NUMBER.fullmatch(part) else part
        for part in key.split(".")
    )


def _touch(key: str, other: str) -> bool:
    """Whether one is the other, or lies within it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
