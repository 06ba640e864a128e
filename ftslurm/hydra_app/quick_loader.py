"""Hydra's loader of the configuration of one task of a sweep, for a thousand of them.

Hydra composes a task from its files each time, once to see whether it can be and once when it is
launched. What is read depends on the chosen options of groups alone: so each set of choices is
composed by Hydra once, and the values of a task are put over a copy, by the same code of Hydra's.
Whatever is not plainly such a value is left to Hydra. Who only asks whether a task can be composed,
as Hydra's sweepers do of each, looks at no copy, so that one is made when somebody does.

Private names used of Hydra 1.3: `ConfigLoaderImpl._apply_overrides_to_config`,
`get_overrides_dirname`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.hydra_app.common_part import take_common
from ftslurm.hydra_app.frozen import Frozen, copier, freeze_config
from ftslurm.hydra_app.reuse import Begun, are_values, as_change, put_back, references_at
from ftslurm.submit.override import plain_override

_TRIED = 16
"""Kinds of tasks, of as many as there are; a configuration of each takes some 300 KB."""

_Use = tuple[str, bool]
"""A key, and whether a map is given to it: which to Hydra is a value, of a group too."""


@dataclass(frozen=True)
class Parts:
    """A task as a base and what is put over it."""

    choices: tuple[str, ...]
    values: tuple[Any, ...]
    """Hydra's overrides."""
    words: tuple[Any, ...]
    """All of the task's, choices too, in their order."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """The same for tasks that differ in values alone."""
        return self.choices, frozenset((word.key_or_group, word.type) for word in self.values)

    @property
    def are_single(self) -> bool:
        """Whether each puts one value in the place of another, whatever the others do."""
        keys = {word.key_or_group for word in self.values}
        parents = {key[:place] for key in keys for place, sign in enumerate(key) if sign == "."}
        return (
            len(keys) == len(self.values)
            and parents.isdisjoint(keys)
            and not any(
                word.is_delete() or "$" in word.input_line or isinstance(word._value, (dict, list))
                for word in self.values
            )
        )


class QuickLoader:
    """In place of a `ConfigLoaderImpl`, whose everything else it passes on."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._parsed: dict[str, Any] = {}
        self._groups: dict[frozenset[_Use], Optional[frozenset[_Use]]] = {}
        """uses of a task -> those of them that choose options; None: not to be done here"""
        self._bases: dict[tuple[str, ...], Callable[[], Any]] = {}
        self._tried: dict[Any, Any] = {}
        """kind of tasks -> a configuration over which the values of one were put"""
        self._begun: dict[tuple[Any, ...], Begun] = {}
        """By the kind of tasks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: Any, sweep_overrides: Sequence[str]) -> Any:
        parts = self.parts(sweep_overrides)
        if parts is None:
            config = self._loader.load_sweep_config(master_config, list(sweep_overrides))
            self._learn(config, sweep_overrides)
            return config
        if self._has_been_put(parts):
            # Whoever looks only whether it can be composed looks no further.
            return later(lambda: self._made(master_config, parts))
        config = self._made(master_config, parts)
        if parts.are_single and len(self._tried) < _TRIED:
            self._tried[parts.kind] = self._made(master_config, parts)
        return config

    def _made(self, master_config: Any, parts: Parts) -> Any:
        config = self.base(master_config, parts.choices)
        put(parts, config)
        return config

    def _has_been_put(self, parts: Parts) -> bool:
        """Whether Hydra puts the values over a configuration that has had such values."""
        tried = self._tried.get(parts.kind) if parts.are_single else None
        if tried is None:
            return False
        try:
            apply([_given_anew(word) for word in parts.values], tried)
        except Exception:  # noqa: BLE001 - what it is Hydra says of a configuration as it should be
            return False
        return True

    def parts(self, overrides: Sequence[str]) -> Optional[Parts]:
        """None for what is left to Hydra. The first of its kind always is: it shows what Hydra
        takes the keys for."""
        from hydra.errors import HydraException

        try:
            words = tuple(self._parse(text) for text in overrides)
        except HydraException:
            return None  # which it says by itself
        groups = self._groups.get(_uses(words))
        # Which of several values is meant Hydra does not know either, and says so.
        if groups is None or any(word.is_sweep_override() for word in words):
            return None
        return Parts(
            tuple(word.input_line for word in words if _use(word) in groups),
            tuple(word for word in words if _use(word) not in groups),
            words,
        )

    def base(self, master_config: Any, choices: tuple[str, ...]) -> Any:
        """A copy of what these choices come to without any values."""
        if choices not in self._bases:
            config = self._loader.load_sweep_config(master_config, list(choices))
            self._bases[choices] = copier(config)
        return _as_of_now(self._bases[choices](), master_config)

    def freeze(
        self, master_config: Any, overrides: Sequence[str], *, run_id: str, number: int
    ) -> Frozen:
        """What `freeze_config` makes of what `load_sweep_config` gives."""
        parts = self.parts(overrides)
        if parts is None or not parts.are_single:
            config = self.load_sweep_config(master_config, overrides)
            return freeze_config(config, run_id=run_id, number=number, overrides=overrides)
        keys = {word.key_or_group for word in parts.values}
        if parts.kind not in self._begun:
            self._begun[parts.kind] = self._begin(master_config, parts.choices, keys)
        begun = self._begun[parts.kind]
        used, begun.used = begun.used, None
        config = _as_of_now(begun.copied() if used is None else used, master_config)
        if used is None:
            is_usable = begun.is_kept and are_values(config, keys, or_absent=True)
            put(parts, config)
        else:
            is_usable = True
            put(dataclasses.replace(parts, values=tuple(map(as_change, parts.values))), config)
        # Without a common part all is settled, and what was is not known.
        places = begun.common.places if is_usable and begun.common is not None else None
        references = None if places is None else references_at(config, places)
        frozen = freeze_config(
            config, run_id=run_id, number=number, overrides=overrides, common=begun.common
        )
        if references is not None and are_values(config, keys, or_absent=False):
            begun.used = config if put_back(config, references) else None
        return frozen

    def _begin(self, master_config: Any, choices: tuple[str, ...], keys: Collection[str]) -> Begun:
        from omegaconf.errors import OmegaConfBaseException

        config = self.base(master_config, choices)
        try:
            common = take_common(config, keys)
        except OmegaConfBaseException:
            # To be said as of a task.
            common, config = None, self.base(master_config, choices)
        return Begun(common, copier(config), is_kept=len(self._begun) < _TRIED)

    def effective(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """Of a task that can be composed: without those in whose place a later one puts another
        value."""
        kept: dict[str, str] = {}
        for word in map(self._parse, overrides):
            # A map is merged into what is there.
            is_map = isinstance(word._value, dict)
            key = word.input_line if is_map else word.get_key_element().lstrip("+")
            kept.pop(key, None)
            kept[key] = word.input_line.lstrip("+")
        return tuple(kept.values())

    def _parse(self, text: str) -> Any:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        if text not in self._parsed:
            plain = plain_override(text)
            parsed = plain if plain is not None else OverridesParser.create().parse_override(text)
            self._parsed[text] = parsed
        return self._parsed[text]

    def _learn(self, config: Any, overrides: Sequence[str]) -> None:
        words = [self._parse(text) for text in overrides]
        uses = _uses(words)
        if any(word.is_hydra_override() or word.package or word.is_delete() for word in words):
            self._groups[uses] = None
        elif uses not in self._groups:
            known = config.hydra.runtime.choices
            chosen = (use for use in uses if use[0] in known and not use[1])
            self._groups[uses] = frozenset(chosen)


def _use(word: Any) -> _Use:
    return word.key_or_group, isinstance(word._value, dict)


def _uses(words: Sequence[Any]) -> frozenset[_Use]:
    return frozenset(map(_use, words))


def _as_of_now(config: Any, master_config: Any) -> Any:
    """With what resolvers have given to the sweep's configuration by now, as Hydra gives it on."""
    from omegaconf import OmegaConf

    OmegaConf.copy_cache(from_config=master_config, to_config=config)
    return config


def put(parts: Parts, config: Any) -> None:
    """Over what the task's choices come to."""
    from hydra._internal.config_loader_impl import get_overrides_dirname

    apply(parts.values, config)
    hydra = config.hydra
    hydra.overrides.task = [word.input_line for word in parts.words]
    how = hydra.job.config.override_dirname
    hydra.job.override_dirname = get_overrides_dirname(
        overrides=parts.words,
        kv_sep=how.kv_sep,
        item_sep=how.item_sep,
        exclude_keys=how.exclude_keys,
    )


def apply(values: Sequence[Any], config: Any) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.errors import ConfigCompositionException
    from omegaconf.errors import OmegaConfBaseException

    try:
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException from error


def _given_anew(word: Any) -> Any:
    """`word` as it is put where it was put before: what was to be added is there by now."""
    from hydra.core.override_parser.types import OverrideType

    return dataclasses.replace(word, type=OverrideType.FORCE_ADD) if word.is_add() else word


def later(make: Callable[[], Any]) -> Any:
    """A DictConfig that becomes what `make` gives when somebody looks into it."""
    kind = _later()
    config = kind.__new__(kind)
    object.__getattribute__(config, "__dict__")["make"] = make
    return config


@functools.cache
def _later() -> Any:
    from omegaconf import DictConfig

    class Later(DictConfig):
        def __getattribute__(self, name: str) -> Any:
            state = object.__getattribute__(self, "__dict__")
            made = vars(state["make"]())
            object.__setattr__(self, "__class__", DictConfig)
            del state["make"]
            state.update(made)
            for node in state["_content"].values():
                node._set_parent(self)
            return getattr(self, name)

    return Later
