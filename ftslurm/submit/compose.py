"""conf/ and the command line's overrides become one RunSpec. The only module that imports Hydra.

Composing reads configs and nothing else; it writes no file and leaves Hydra's state as it was. What
is misspelt is one sentence with the names that would be right, never a traceback of Hydra's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import SpecError
from ftslurm.run.secret import is_secret, reference
from ftslurm.run.spec import RunSpec, from_dict, to_dict
from ftslurm.run.spec_check import check
from ftslurm.submit.assets import conf_folder
from ftslurm.submit.keepable import check_keepable
from ftslurm.submit.override import parsed, quoted

SCHEMA_NAME = "run_spec"
"""Name under which conf/config.yaml takes in the dataclasses."""

_NO_EXPERIMENT = "experiment=null"

_INTERNALS = ("full_key", "object_type", "reference_type")
_NOT_IN = re.compile(r"Key '(.+?)' (?:is )?not in '(\w+)'")


@dataclass(frozen=True)
class Composed:
    """What was asked for, and the same as text for the run directory."""

    spec: RunSpec
    text: str
    opened: dict[str, str]
    """Groups that nobody chose, with the option they were given."""


def compose(overrides: Sequence[str], config_dir: Optional[Path] = None) -> tuple[RunSpec, str]:
    """(checked spec, text of config.yaml). `config_dir` adds options to those of conf/."""
    composed = compose_run(overrides, config_dir)
    return composed.spec, composed.text


def compose_run(
    overrides: Sequence[str],
    config_dir: Optional[Path] = None,
    *,
    open_choices: Optional[dict[str, str]] = None,
    values: Optional[Mapping[str, Any]] = None,
) -> Composed:
    """As `compose`; groups that nobody chose (not even an experiment) take `open_choices`.
    `values`: dotted keys with what is put over all else."""
    folders = config_folders(config_dir)
    accepted = [checked_override(text, folders) for text in without_null(overrides)]
    config, opened = run_hydra_open(accepted, folders, open_choices or {})
    _put(config, values or {})
    return finished(config, opened)


def run_hydra_open(
    accepted: list[str], folders: list[Path], open_choices: Mapping[str, str]
) -> tuple[Any, dict[str, str]]:
    """(what Hydra composes, without what is its own, the groups that were left open with the option
    they took)."""
    from omegaconf import flag_override

    config = _run_hydra(accepted, folders)
    opened = {
        group: option
        for group, option in open_choices.items()
        if config.hydra.runtime.choices.get(group) is None
    }
    if opened:
        accepted = [*(f"{group}={option}" for group, option in opened.items()), *accepted]
        config = _run_hydra(accepted, folders)
    with flag_override(config, ["struct", "readonly"], [False, False]):
        del config["hydra"]  # a copy of the rest would have lost its types
    return config, opened


def finished(config: Any, opened: dict[str, str]) -> Composed:
    """Resolved and checked."""
    values = resolved(config)
    return checked(values, as_text(values), opened)


def checked(values: dict[str, Any], text: str, opened: dict[str, str]) -> Composed:
    """`values`: plain ones, whose text that is."""
    _check_shapes(values)
    spec = from_dict(values)
    check_keepable(to_dict(spec))
    check(spec)
    return Composed(spec, text, opened)


def _check_shapes(values: Mapping[str, Any]) -> None:
    """A reference in the place of a list or a map may come to anything: OmegaConf does not look."""
    for key, shape in _shapes():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        if not isinstance(value, shape):
            wanted = "a list" if shape is list else "a map"
            raise SpecError(f"{key} comes to `{value}`, and has to be {wanted}; refer to one")


@functools.cache
def _shapes() -> list[tuple[str, type]]:
    """Keys of lists and maps, those above others first."""
    shapes = []
    for prefix, kind in _nodes(RunSpec):
        for name, of in _fields(kind).items():
            shape = dict if dataclasses.is_dataclass(of) else typing.get_origin(of)
            if shape in (dict, list):
                shapes.append((f"{prefix}{name}", shape))
    return shapes


def _put(config: Any, values: Mapping[str, Any]) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key, value in values.items():
        try:
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            raise SpecError(sentence(error)) from None


def without_null(overrides: Sequence[str]) -> list[str]:
    """Hydra refuses the default written out, `experiment=null`; the last choice holds, as in it."""
    chosen = [text for text in overrides if text.startswith("experiment=")]
    if _NO_EXPERIMENT not in chosen:
        return list(overrides)
    others = [text for text in overrides if text not in chosen]
    return others if chosen[-1] == _NO_EXPERIMENT else [*others, chosen[-1]]


def _conf() -> Path:
    conf = conf_folder()
    if not (conf / "config.yaml").is_file():
        raise SpecError(
            f"`{conf}` has no config.yaml, so this installation of ftslurm is not whole; install "
            "its wheel again, or its checkout with pip install -e"
        )
    return conf


def config_folders(config_dir: Optional[Path]) -> list[Path]:
    """conf/, and the folder of options beside it."""
    return [_conf(), *_own_folder(config_dir)]


def _own_folder(config_dir: Optional[Path]) -> list[Path]:
    if config_dir is None:
        return []
    folder = config_dir.expanduser().resolve()
    if not folder.is_dir():
        raise SpecError(
            f"--config-dir `{config_dir}` is no folder; name one with e.g. cluster/*.yaml"
        )
    if "'" in str(folder):
        raise SpecError(f"--config-dir `{folder}` has a quote in its name, which Hydra cannot take")
    for path in sorted(folder.rglob("*.yaml")):
        relative = path.relative_to(folder)
        # Hydra would take conf/'s file and leave this one unread.
        if (_conf() / relative).exists():
            raise SpecError(
                f"`{path}` would be hidden by ftslurm's own `conf/{relative}`; rename it"
            )
    return [folder]


def _run_hydra(overrides: list[str], folders: list[Path]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    ConfigStore.instance().store(name=SCHEMA_NAME, node=RunSpec, provider="ftslurm")
    primary, *others = folders
    try:
        with _hydra_set_aside(), initialize_config_dir(str(primary), version_base="1.3"):
            return hydra_compose(
                "config", [*searchpath(others), *overrides], return_hydra_config=True
            )
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise SpecError(sentence(error)) from None
    except AssertionError as error:
        # OmegaConf's, e.g. of `user=${name} user.x=1`: put below what is no map.
        raise SpecError(f"{sentence(error)} ({' '.join(overrides)})") from None


@contextlib.contextmanager
def _hydra_set_aside() -> Iterator[None]:
    """A Hydra program may be running, whose sweep this run belongs to."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    running, runtime, base = GlobalHydra.instance(), JobRuntime.instance(), VersionBase.instance()
    program, name, version = running.hydra, runtime.get("name"), base.version_base
    running.clear()
    try:
        yield
    finally:
        running.hydra, base.version_base = program, version
        runtime.set("name", name)


def searchpath(folders: Sequence[Path]) -> list[str]:
    """The override that has Hydra look there, too."""
    paths = ",".join(f"'file://{folder}'" for folder in folders)
    return [f"hydra.searchpath=[{paths}]"] if folders else []


def sentence(error: BaseException) -> str:
    """Hydra's message in one line; for an unknown key in a YAML file with the keys near it."""
    cause = error.__cause__ if error.__cause__ is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    body = " ".join(line for line in lines if not line.startswith(_INTERNALS))
    body = body.partition("Config search path")[0].strip().rstrip(".;")
    match = _NOT_IN.search(body)
    ours = {kind.__name__: name for name, kind in _nodes(RunSpec)}
    if match is not None and match[2] in ours:
        where = re.match(r"In '(.*?)'", body)
        prefix = ours[match[2]]
        return _unknown_key(prefix + match[1], f"in `{where[1]}.yaml`" if where else "")
    key = getattr(cause, "full_key", None)
    first = next(iter(str(error).splitlines()), "") if cause is not error else ""
    return (f"`{key}`: " if key else "") + body + (f" ({first})" if first else "")


_FREE_NAMES = ("user.", "cluster.env.", "recovery.budgets.", "recovery.phase_limit_s.",
               "health.limits.")  # fmt: skip
"""Keys of tables; which names these take is the spec's to say (spec_check.py)."""


def checked_override(text: str, folders: list[Path]) -> str:
    """`text` as Hydra is given it; SpecError when its key or option does not exist."""
    if text.startswith("~"):
        raise SpecError(f"`{text}` takes a key away; every key has a value, set the one you want")
    override = parsed(text)
    key = override.key_or_group
    if override.is_sweep_override():
        is_text = key.partition(".")[0] == "user" or _kind(key) in (str, Optional[str])
        hint = f"; if it is one value, quote it: {quoted(text)}" if is_text else ""
        raise SpecError(
            f"`{text}` names several values, which needs several runs; submit them one by one{hint}"
        )
    if re.split(r"[./]", key)[0] == "hydra":
        raise SpecError(
            f"`{text}` would have no effect; ftslurm uses Hydra to compose, nothing else"
        )
    options = options_of(key, folders)
    if options:
        _check_option(key, override.value(), options)
        return text
    if key == "user" or key.startswith(_FREE_NAMES):
        # Free names: `user.x=1` without the `+` that Hydra asks for where no x exists yet.
        return "++" + text.lstrip("+")
    _check_key(key, folders)
    return text


def options_of(group: str, folders: list[Path]) -> list[str]:
    """Options of a config group, none when there is no such group."""
    if not re.fullmatch(r"\w+(/\w+)*", group):
        return []
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _check_option(group: str, value: Any, options: list[str]) -> None:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in options:
            raise SpecError(
                f"{group} has no option `{name}`{_near(str(name), options)}; "
                f"choose {', '.join(options)}"
            )


def _check_key(key: str, folders: list[Path]) -> None:
    node: Any = RunSpec
    for part in key.split("."):
        fields = _fields(node)
        if part not in fields:
            groups = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
            raise SpecError(_unknown_key(key, "", groups))
        node = fields[part]


def _kind(key: str) -> Any:
    """Type of the value at a dotted key, None when there is no such key."""
    node: Any = RunSpec
    for part in key.split("."):
        node = _fields(node).get(part)
    return node


def _fields(node: Any) -> dict[str, Any]:
    """Name -> type of the fields of a dataclass, none for any other type."""
    return typing.get_type_hints(node) if dataclasses.is_dataclass(node) else {}


def _unknown_key(key: str, where: str, groups: Iterable[str] = ()) -> str:
    every = [prefix + name for prefix, kind in _nodes(RunSpec) for name in _fields(kind)]
    node: Any = RunSpec
    parent: list[str] = []
    for part in key.split("."):
        if not _fields(_fields(node).get(part)):
            break
        node = _fields(node)[part]
        parent.append(part)
    names = sorted({*_fields(node), *(groups if not parent else ())})
    of = f" of {'.'.join(parent)}" if parent else ""
    note = f" ({where})" if where else ""
    return f"no key `{key}`{note}{_near(key, [*every, *groups])}; keys{of} are {', '.join(names)}"


def _nodes(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted prefix, dataclass) of `node` and all dataclasses below it."""
    yield prefix, node
    for name, kind in _fields(node).items():
        if dataclasses.is_dataclass(kind):
            yield from _nodes(kind, f"{prefix}{name}.")


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f", did you mean `{close[0]}`" if close else ""


def resolved(config: Any) -> dict[str, Any]:
    """Plain values; secret-looking environment variables stay references."""
    from omegaconf import OmegaConf
    from omegaconf.base import SCMode
    from omegaconf.errors import OmegaConfBaseException

    try:
        with left_as_references(_is_secret):
            values = OmegaConf.to_container(
                config, resolve=True, structured_config_mode=SCMode.DICT, throw_on_missing=True
            )
    except OmegaConfBaseException as error:
        raise SpecError(sentence(error)) from None
    return typing.cast("dict[str, Any]", values)


def as_text(values: Any) -> str:
    """As OmegaConf.to_yaml, of values that are plain already: it would wrap each of them first."""
    import yaml
    from omegaconf._utils import get_omega_conf_dumper

    text: str = yaml.dump(
        values,
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
        Dumper=get_omega_conf_dumper(),
    )
    return text


@contextlib.contextmanager
def left_as_references(is_left: Callable[..., bool]) -> Iterator[None]:
    """`oc.env` gives back its own text for a name that `is_left(name, value, has_default=)`, also
    through other references."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def environment(name: str, *default: Optional[str]) -> Optional[str]:
        if is_left(name, os.environ.get(name), has_default=bool(default)):
            return reference(name, *default)
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", environment, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _is_secret(name: str, value: Optional[str], *, has_default: bool) -> bool:
    return is_secret(name, value)
