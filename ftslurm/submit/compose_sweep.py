"""The tasks of one sweep, composed like single runs and a good deal faster.

Hydra takes half a second for one configuration, most of it to read and merge the same files again.
What is read depends on the chosen options of groups alone; so each set of choices is composed once,
and a task's plain values are put over a copy, by the same code of Hydra's and in the same order.

Private name used of Hydra 1.3: `ConfigLoaderImpl._apply_overrides_to_config`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import SpecError
from ftslurm.submit.compose import (
    Composed,
    checked_override,
    config_folders,
    finished,
    options_of,
    parsed,
    run_hydra_open,
    sentence,
    without_null,
)


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Overrides of each task: all combinations of the values that are named, the last key varying
    fastest."""
    choices: dict[str, list[str]] = {}
    for text in overrides:
        if "=" not in text or text.startswith("~"):
            choices[text] = [text]  # for the composer to refuse
            continue
        override = parsed(text)
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices[key] = [text]
        elif override.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise SpecError(
                f"`{text}` is a range without single values; name them, e.g. {key}=0.1,0.2, or "
                "choose a sweeper that picks some, e.g. hydra/sweeper=optuna"
            )
    return [list(words) for words in itertools.product(*choices.values())]


class SweepComposer:
    """Composes task after task."""

    def __init__(self, config_dir: Optional[Path], open_choices: dict[str, str]) -> None:
        self._folders = config_folders(config_dir)
        self._open_choices = open_choices
        self._accepted: dict[str, tuple[str, bool, Any]] = {}
        """override -> (as Hydra is given it, whether it chooses an option, parsed)"""
        self._bases: dict[tuple[str, ...], tuple[Any, dict[str, str]]] = {}

    def compose(self, overrides: Sequence[str]) -> Composed:
        """SpecError for what a single run would be refused for."""
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        words = [self._accept(text) for text in without_null(overrides)]
        base, opened = self._base(tuple(text for text, is_choice, _ in words if is_choice))
        config = copy.deepcopy(base)
        try:
            ConfigLoaderImpl._apply_overrides_to_config(
                [override for _, is_choice, override in words if not is_choice], config
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise SpecError(sentence(error)) from None
        return finished(config, opened)

    def _accept(self, text: str) -> tuple[str, bool, Any]:
        if text not in self._accepted:
            accepted = checked_override(text, self._folders)
            override = parsed(accepted)
            is_choice = bool(options_of(override.key_or_group, self._folders))
            self._accepted[text] = (accepted, is_choice, override)
        return self._accepted[text]

    def _base(self, choices: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
        from omegaconf import flag_override

        if choices not in self._bases:
            config, opened = run_hydra_open(list(choices), self._folders, self._open_choices)
            with flag_override(config, ["struct", "readonly"], [False, False]):
                del config["hydra"]  # a copy of the rest would have lost its types
            self._bases[choices] = config, opened
        return self._bases[choices]


def for_sweeper(overrides: Sequence[str], config_dir: Optional[Path]) -> list[str]:
    """Overrides as a sweeper of Hydra's is given them; SpecError for a key that does not exist. The
    tasks that it makes of them are composed and checked one by one."""
    folders = config_folders(config_dir)
    accepted = []
    for text in overrides:
        is_swept = "=" in text and not text.startswith("~") and parsed(text).is_sweep_override()
        accepted.append(text if is_swept else checked_override(text, folders))
    return accepted
