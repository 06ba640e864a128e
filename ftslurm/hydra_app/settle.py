"""A configuration settled: what it refers to and what resolvers give is put in its place.

Left as it was written is each reference that only the node may look up, and each call of a resolver
that would be given one: no resolver sees a text in the place of a secret. What is concatenated with
them is settled: of `s3://${oc.env:KEY}@bucket/${uid:}` the last part. Left too are references to
lists and groups that hold something left, and calls that give an object.

What a call that is left draws at random would be another on each rank: that is refused, as far as
it is in the call's arguments. A resolver with a cache draws once, as the cache goes along.

OmegaConf parses a text each time that it is looked up, which costs more than all else; meanwhile it
is given the tree of a text that it has parsed before.

Used of OmegaConf beside what it documents: the tree of `grammar_parser.parse`,
`resolve_parse_tree`, and by private names `_get_full_key`, `_get_node`. Replaced: `base.parse`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any, Optional

from ftslurm.errors import SpecError
from ftslurm.submit.compose import left_as_references

_MISSING = "???"
"""OmegaConf's word for a value that is not there."""
_OBJECT = ""
"""Why a value is left, instead of an environment variable's name."""
_PLAIN = (str, bytes, int, float, bool, type(None), Enum, PurePath)
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _AskedError(Exception):
    """With the name of an environment variable that is looked up on the node."""


@contextlib.contextmanager
def noting(is_left: Callable[..., bool]) -> Iterator[list[str]]:
    """Within, `oc.env` raises for a name that `is_left(name, value, has_default=)`; the names that
    were asked for are in the list."""
    asked: list[str] = []

    def noted(name: str, value: Optional[str], *, has_default: bool) -> bool:
        if is_left(name, value, has_default=has_default):
            asked.append(name)
            raise _AskedError(name)
        return False

    with left_as_references(noted), _parsing_once():
        yield asked


@contextlib.contextmanager
def _parsing_once() -> Iterator[None]:
    from omegaconf import base

    names = vars(base)
    parse, names["parse"] = names["parse"], _parsed
    try:
        yield
    finally:
        names["parse"] = parse


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    from omegaconf.grammar_parser import parse

    return parse(text)


Place = tuple[Any, ...]
"""Of a value in a configuration: the names and numbers that lead to it."""


def settle(
    config: Any, is_left: Callable[..., bool], places: Optional[Sequence[Place]] = None
) -> dict[str, str]:
    """Settle `config` in place; with `places`, which are those of all its references, nothing else
    is looked at. What is left: its key, as OmegaConf writes it -> the environment variable that it
    asks for, "" where an object is the reason. OmegaConfBaseException for what cannot be resolved,
    SpecError for what would be another at each read."""
    with noting(is_left) as asked:
        return settle_noted(config, asked, places)


def settle_noted(
    config: Any, asked: list[str], places: Optional[Sequence[Place]] = None
) -> dict[str, str]:
    """As `settle`, within `noting`."""
    settling = _Settling(asked)
    if places is None:
        settling.container(config)
    else:
        settling.places(config, places)
    return settling.left


def references_in(plain: Any, above: Place = ()) -> Iterator[tuple[Place, str]]:
    """The references in what OmegaConf.to_container gives, unresolved, in their order."""
    for name, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if isinstance(value, (dict, list)):
            yield from references_in(value, (*above, name))
        elif isinstance(value, str) and "${" in value:
            yield (*above, name), value


class _Settling:
    def __init__(self, asked: list[str]) -> None:
        self.left: dict[str, str] = {}
        self._asked = asked
        self._settled: dict[int, tuple[Any, list[str]]] = {}
        """By the id of a list or group, which is kept so that no other gets that id."""

    def container(self, config: Any, plain: Any = None) -> list[str]:
        """Settle a list or group; why some of it is left. `plain`: what is in it, unresolved."""
        from omegaconf import OmegaConf

        if id(config) in self._settled:
            return self._settled[id(config)][1]
        plain = OmegaConf.to_container(config) if plain is None else plain
        reasons: list[str] = []
        for name, value in list(plain.items() if isinstance(plain, dict) else enumerate(plain)):
            if isinstance(value, (dict, list)):
                reasons += self.container(config[name], value)
            elif isinstance(value, str) and OmegaConf.is_interpolation(config, name):
                reason = self._leaf(config, name, value)
                if reason is not None:
                    reasons.append(reason)
                    self.left[config._get_full_key(name)] = reason
        self._settled[id(config)] = (config, reasons)
        return reasons

    def places(self, config: Any, places: Sequence[Place]) -> None:
        from omegaconf import OmegaConf

        for *above, name in places:
            holder = group_at(config, above)
            if holder is not None and OmegaConf.is_interpolation(holder, name):
                text = holder._get_node(name)._value()
                reason = self._leaf(holder, name, text)
                if reason is not None:
                    self.left[holder._get_full_key(name)] = reason

    def _leaf(self, holder: Any, name: Any, text: str) -> Optional[str]:
        """Settle one value; why it, or a part of it, is left."""
        from omegaconf import OmegaConf
        from omegaconf.errors import InterpolationToMissingValueError

        try:
            value = self._read(lambda: holder[name])
            inside = self.container(value) if OmegaConf.is_config(value) else []
            if not inside and _put(holder, name, value):
                return None
            reason = inside[0] if inside else _OBJECT
        except InterpolationToMissingValueError:
            write(holder, name, _MISSING)
            return None
        except _AskedError as asked:
            reason = str(asked)
        self._settle_parts(holder, name, text)
        return reason

    def _read(self, read: Callable[[], Any]) -> Any:
        """_AskedError where the node is needed for it, whatever a resolver has made of that."""
        from omegaconf.errors import OmegaConfBaseException

        self._asked.clear()
        try:
            value = read()
        except OmegaConfBaseException:
            if not self._asked:
                raise
        if self._asked:
            raise _AskedError(self._asked[0])
        return value

    def _settle_parts(self, holder: Any, name: Any, text: str) -> None:
        """Of a value that is left: what does not ask the node."""
        parts = _parts(text)
        if len(parts) == 1:
            self._refuse_drawn(holder, name, parts[0])
            return
        settled = run = ""
        for part, following in zip(parts, [*parts[1:], None]):
            if not _is_interpolation(part):
                run += _unescaped(part.getText(), before_open=_opens(following))
                continue
            try:
                run += str(self._part(holder, name, part))
            except _AskedError:
                self._refuse_drawn(holder, name, part)
                settled += _escaped(run, before_open=True) + part.getText()
                run = ""
        write(holder, name, settled + _escaped(run))

    def _part(self, holder: Any, name: Any, tree: Any) -> Any:
        from omegaconf import AnyNode
        from omegaconf.errors import OmegaConfBaseException

        node = AnyNode(tree.getText(), key=name, parent=holder)
        try:
            return self._read(lambda: holder.resolve_parse_tree(tree, node, key=name))
        except OmegaConfBaseException as error:
            error.full_key = holder._get_full_key(name)
            raise

    def _refuse_drawn(self, holder: Any, name: Any, tree: Any) -> None:
        """`tree`: of what is left, in which the node resolves all that is within."""
        for call in _calls(tree):
            try:
                drawn = {
                    _ADDRESS.sub("", repr(self._part(holder, name, call))) for _ in ("once", "more")
                }
            except _AskedError:
                self._refuse_drawn(holder, name, call)
                continue
            if len(drawn) > 1:
                raise SpecError(
                    f"`{holder._get_full_key(name)}` is resolved where the task runs, and the "
                    f"`{call.getText()}` in it gives something else each time, so on each rank and "
                    "in each attempt; give that a key of its own and refer to the key"
                )


def group_at(config: Any, place: Sequence[Any]) -> Any:
    """The list or group there; None where a value has taken the place of one on the way."""
    for name in place:
        config = config._get_node(name)
        if config is None or not isinstance(config._value(), (dict, list)):
            return None
    return config


def _put(holder: Any, name: Any, value: Any) -> bool:
    """Whether it can be kept: no object, and no list or map with one in it. Lists and maps become
    OmegaConf's."""
    from omegaconf.errors import ValidationError

    if not _is_plain(value):
        return False
    try:
        write(holder, name, _escaped(value) if isinstance(value, str) else value)
    except ValidationError:
        return False
    return True


def _is_plain(value: Any) -> bool:
    from omegaconf import OmegaConf

    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return OmegaConf.is_config(value) or isinstance(value, _PLAIN)


def write(holder: Any, name: Any, value: Any) -> None:
    from omegaconf import OmegaConf, flag_override

    if not OmegaConf.is_readonly(holder):  # a flag that is set has all below looked through
        holder[name] = value
        return
    with flag_override(holder, "readonly", False):
        holder[name] = value


def _parts(text: str) -> list[Any]:
    """Texts and interpolations of a value, as OmegaConf's grammar has them."""
    return list(_parsed(text).getChild(0).getChildren())


def _is_interpolation(tree: Any) -> bool:
    return type(tree).__name__ == "InterpolationContext"


def _calls(tree: Any) -> Iterator[Any]:
    """The outermost calls of resolvers within."""
    for child in tree.getChildren() if tree.getChildCount() else ():
        if type(child).__name__ == "InterpolationResolverContext":
            yield child
        else:
            yield from _calls(child)


def _opens(tree: Any) -> bool:
    return tree is not None and tree.getText().startswith(("${", "\\${"))


def _unescaped(text: str, *, before_open: bool) -> str:
    if text == "\\${":
        return "${"
    is_escape = before_open and not text.strip("\\")
    return text[: len(text) // 2] if is_escape else text


def _escaped(text: str, *, before_open: bool = False) -> str:
    """As OmegaConf reads `text` out of a value."""
    text = _INTERPOLATION.sub(lambda match: match[1] * 2 + "\\${", text)
    if before_open:
        text += "\\" * (len(text) - len(text.rstrip("\\")))
    return text
