"""Hydra's loader of the configuration of one task of a sweep, for a thousand of them.

Hydra composes a task from its files each time, once to see whether it can be and once when it is
launched. What is read depends on the chosen options of groups alone: so each set of choices is
composed by Hydra once, and the values of a task are put over a copy, by the same code of Hydra's.
Whatever is not plainly such a value is left to Hydra.

Private names used of Hydra 1.3: `ConfigLoaderImpl._apply_overrides_to_config`,
`get_overrides_dirname`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Optional


class QuickLoader:
    """In place of a `ConfigLoaderImpl`, whose everything else it passes on."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._parsed: dict[str, Any] = {}
        self._groups: dict[frozenset[str], Optional[frozenset[str]]] = {}
        """keys of a task -> those of them that choose options; None: not to be done here"""
        self._bases: dict[tuple[str, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: Any, sweep_overrides: Sequence[str]) -> Any:
        words = [(text, self._parse(text)) for text in sweep_overrides]
        keys = frozenset(override.key_or_group for _, override in words)
        if keys not in self._groups:
            # The first of its kind shows what Hydra takes its keys for.
            config = self._loader.load_sweep_config(master_config, list(sweep_overrides))
            self._groups[keys] = self._chosen(config, [override for _, override in words])
            return config
        groups = self._groups[keys]
        if groups is None:
            return self._loader.load_sweep_config(master_config, list(sweep_overrides))
        choices = tuple(text for text, override in words if override.key_or_group in groups)
        if choices not in self._bases:
            self._bases[choices] = self._loader.load_sweep_config(master_config, list(choices))
        return self._put(self._bases[choices], words, groups)

    def _parse(self, text: str) -> Any:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        if text not in self._parsed:
            self._parsed[text] = OverridesParser.create().parse_override(text)
        return self._parsed[text]

    @staticmethod
    def _chosen(config: Any, overrides: Sequence[Any]) -> Optional[frozenset[str]]:
        if any(item.is_hydra_override() or item.package or item.is_delete() for item in overrides):
            return None
        known = config.hydra.runtime.choices
        return frozenset(item.key_or_group for item in overrides if item.key_or_group in known)

    @staticmethod
    def _put(base: Any, words: Sequence[tuple[str, Any]], groups: frozenset[str]) -> Any:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
        from hydra.errors import ConfigCompositionException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        config = copy.deepcopy(base)
        OmegaConf.copy_cache(from_config=base, to_config=config)
        values = [override for _, override in words if override.key_or_group not in groups]
        try:
            ConfigLoaderImpl._apply_overrides_to_config(values, config)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException from error
        job = config.hydra.job
        config.hydra.overrides.task = [override.input_line for _, override in words]
        job.override_dirname = get_overrides_dirname(
            overrides=[override for _, override in words],
            kv_sep=job.config.override_dirname.kv_sep,
            item_sep=job.config.override_dirname.item_sep,
            exclude_keys=job.config.override_dirname.exclude_keys,
        )
        return config
