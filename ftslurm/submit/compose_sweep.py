"""The tasks of one sweep, composed like single runs and a good deal faster.

Hydra takes half a second for one configuration, most of it to read and merge the same files again.
What is read depends on the chosen options of groups alone; so each set of choices is composed once,
and a task's plain values are put over a copy, by the same code of Hydra's and in the same order. A
task that differs from the one before in single values alone takes over that one's copy.

Private name used of Hydra 1.3: `ConfigLoaderImpl._apply_overrides_to_config`.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import SpecError
from ftslurm.run.secret import texts
from ftslurm.submit.compose import (
    Composed,
    as_text,
    checked,
    checked_override,
    config_folders,
    options_of,
    resolved,
    run_hydra_open,
    sentence,
    without_null,
)
from ftslurm.submit.override import parsed

MOST_TASKS = 100_000
"""More are a slip of the pen: composing them would take an hour, and no Slurm queues as many."""


def expand(overrides: Sequence[str], config_dir: Optional[Path] = None) -> list[list[str]]:
    """Overrides of each task: all combinations of the values that are named, the last key varying
    fastest. SpecError for what names no values or too many, or for values that are overridden."""
    folders = config_folders(config_dir)
    choices: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    """key without a prefix -> the override of it before"""
    for text in overrides:
        if "=" not in text or text.startswith("~"):
            choices[text] = [text]  # for the composer to refuse
            continue
        override = parsed(text)
        key = override.get_key_element()
        before = given.get(key.lstrip("+"), text)
        if before != text and parsed(before).is_sweep_override():
            raise SpecError(
                f"`{before}` is followed by `{text}`, which would take its place; leave one out"
            )
        given[key.lstrip("+")] = text
        choices[key] = [text]
        if override.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in _named(text, override, folders)]
    if math.prod(map(len, choices.values())) > MOST_TASKS:
        counts = " x ".join(str(len(words)) for words in choices.values() if len(words) > 1)
        raise SpecError(
            f"the sweep has {counts} tasks, more than {MOST_TASKS:,}; name fewer values"
        )
    return [list(words) for words in itertools.product(*choices.values())]


def _named(text: str, override: Any, folders: list[Path]) -> list[str]:
    """The values of one key."""
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    key = override.get_key_element()
    if isinstance(override.value(), Glob):
        return _matching(text, override, folders)
    if not override.is_discrete_sweep():
        raise SpecError(
            f"`{text}` is a range without single values; name them, e.g. {key}=0.1,0.2, or "
            "choose a sweeper that picks some, e.g. hydra/sweeper=optuna"
        )
    try:
        values = list(itertools.islice(override.sweep_string_iterator(), MOST_TASKS + 1))
    except (ValueError, HydraException) as error:
        raise SpecError(f"`{text}` cannot be counted through: {error}") from None
    if not values:
        raise SpecError(f"the sweep has no task: `{text}` names no value at all")
    if len(values) > MOST_TASKS:
        raise SpecError(f"`{text}` names more than {MOST_TASKS:,} values; name fewer")
    return values


def _matching(text: str, override: Any, folders: list[Path]) -> list[str]:
    """Options of a group by their names."""
    options = options_of(override.key_or_group, folders)
    if not options:
        raise SpecError(
            f"`{text}` chooses options of a config group by their names, and there is no group "
            f"`{override.key_or_group}`; name values, e.g. {override.key_or_group}=A,B"
        )
    names: list[str] = override.value().filter(options)
    if not names:
        raise SpecError(
            f"`{text}` fits no option; {override.key_or_group} has {', '.join(options)}"
        )
    return names


@dataclass
class _Working:
    """A configuration with the values of the task before, and what it came to."""

    choices: tuple[str, ...]
    words: dict[str, Any]
    """Key -> override, in their order."""
    config: Any
    values: dict[str, Any]
    texts: dict[str, str]
    """Top-level key -> its part of config.yaml."""


class SweepComposer:
    """Composes task after task."""

    def __init__(self, config_dir: Optional[Path], open_choices: dict[str, str]) -> None:
        self._folders = config_folders(config_dir)
        self._open_choices = open_choices
        self._accepted: dict[str, tuple[bool, Any]] = {}
        """override -> (whether it chooses an option, as Hydra is given it)"""
        self._bases: dict[tuple[str, ...], _Base] = {}
        self._working: Optional[_Working] = None

    def compose(self, overrides: Sequence[str]) -> Composed:
        """SpecError for what a single run would be refused for."""
        words = [self._accept(text) for text in without_null(overrides)]
        choices = tuple(override.input_line for is_choice, override in words if is_choice)
        values = [override for is_choice, override in words if not is_choice]
        base = self._base(choices)
        working, self._working = self._working, None
        if working is None or working.choices != choices or not _go_on(working, values):
            working = _begin(choices, base, values)
        # Whoever is given the values may keep them.
        plain = copy.deepcopy(working.values)
        composed = checked(plain, "".join(working.texts.values()), base.opened)
        if base.is_plain:
            self._working = working
        return composed

    def _accept(self, text: str) -> tuple[bool, Any]:
        if text not in self._accepted:
            override = parsed(checked_override(text, self._folders))
            is_choice = bool(options_of(override.key_or_group, self._folders))
            self._accepted[text] = (is_choice, override)
        return self._accepted[text]

    def _base(self, choices: tuple[str, ...]) -> _Base:
        from omegaconf import OmegaConf

        if choices not in self._bases:
            config, opened = run_hydra_open(list(choices), self._folders, self._open_choices)
            refers = any("$" in text for _, text in texts(OmegaConf.to_container(config)))
            self._bases[choices] = _Base(config, opened, is_plain=not refers)
        return self._bases[choices]


@dataclass(frozen=True)
class _Base:
    """What a set of choices comes to, before any value is put over it."""

    config: Any
    opened: dict[str, str]
    is_plain: bool
    """No value of it refers to another, or to what is elsewhere."""


def _begin(choices: tuple[str, ...], base: _Base, overrides: Sequence[Any]) -> _Working:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    config = copy.deepcopy(base.config)
    try:
        _apply(overrides, config)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise SpecError(sentence(error)) from None
    except AssertionError as error:  # see compose._run_hydra
        given = " ".join(override.input_line for override in overrides)
        raise SpecError(f"{sentence(error)} ({given})") from None
    values = resolved(config)
    parts = {name: as_text({name: value}) for name, value in values.items()}
    words = {override.key_or_group: override for override in overrides}
    return _Working(choices, words, config, values, parts)


def _go_on(working: _Working, overrides: Sequence[Any]) -> bool:
    """Change what differs from the task before. False: it is to be begun anew."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.base import SCMode
    from omegaconf.errors import OmegaConfBaseException

    words = {override.key_or_group: override for override in overrides}
    if list(words) != list(working.words) or not _are_single(overrides, words):
        return False
    if any("$" in word.input_line for word in overrides):
        return False  # it may refer to one that changes
    changed = [word for key, word in words.items() if word != working.words[key]]
    if not all(map(_is_simple, [*changed, *(working.words[w.key_or_group] for w in changed)])):
        return False
    try:
        _apply(changed, working.config)
        for name in {word.key_or_group.partition(".")[0] for word in changed}:
            value = working.config[name]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(
                    value, structured_config_mode=SCMode.DICT, throw_on_missing=True
                )
            working.values[name] = value
            working.texts[name] = as_text({name: value})
    except (HydraException, OmegaConfBaseException, ValueError):
        return False  # to be said as of a task that is begun anew
    working.words = words
    return True


def _are_single(overrides: Sequence[Any], words: Mapping[str, Any]) -> bool:
    """Whether none of the keys is another or lies below it: then their order says nothing."""
    parents = {key[:place] for key in words for place, sign in enumerate(key) if sign == "."}
    return len(words) == len(overrides) and parents.isdisjoint(words)


def _is_simple(override: Any) -> bool:
    """Puts one value in the place of another."""
    is_new = override.is_add() or override.package is not None
    return not is_new and not isinstance(override.value(), (dict, list))


def _apply(overrides: Sequence[Any], config: Any) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    ConfigLoaderImpl._apply_overrides_to_config(overrides, config)


def for_sweeper(overrides: Sequence[str], config_dir: Optional[Path]) -> list[str]:
    """Overrides as a sweeper of Hydra's is given them; SpecError for a key that does not exist. The
    tasks that it makes of them are composed and checked one by one."""
    from hydra.core.override_parser.types import Glob

    folders = config_folders(config_dir)
    accepted = []
    for text in overrides:
        override = parsed(text) if "=" in text and not text.startswith("~") else None
        if override is None or not override.is_sweep_override():
            accepted.append(checked_override(text, folders))
        elif isinstance(override.value(), Glob):
            names = _matching(text, override, folders)
            accepted.append(f"{override.get_key_element()}=choice({','.join(names)})")
        else:
            accepted.append(text)
    return accepted
