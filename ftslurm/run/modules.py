"""The modules a rank has imported, as digests of their files, and how two such sets differ.

Comparing is pure. `look` reads the files that sys.modules names, never what the interpreter itself
came with, and imports and runs nothing: a module that would load itself when touched is not
touched. Not seen: what has no file of its own, shared libraries that a module loads (their package
changes with them), what is imported later.

What a build writes, compiled modules first, is no text that a person changes: it differs because it
was made for another processor (ops built on each node with -march=native, a site's software tree
per kind of node) while the source beside it is the same. So it counts only as a file that the run
took along at submit and imports from its copy, of which there is one.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import PurePath
from types import ModuleType
from typing import Optional

_READERS = 8
"""Some 1,500 files for torch: what a shared file system takes for each to open overlaps."""
_INSTALLED = ("site-packages", "dist-packages")
_SHOWN = 3
_BUILT = "__config__.py"
"""numpy's and scipy's: compilers, paths and CPU features of the build."""


@dataclass(frozen=True)
class Module:
    """One imported module."""

    file: str
    sha256: str
    attempt: int
    """The first attempt that had it so; 0: it was so when the run was submitted."""


@dataclass(frozen=True)
class Change:
    """A module that is not what it was."""

    name: str
    file: str
    since: int
    """Attempt that had it otherwise, 0: at submit."""


@dataclass(frozen=True)
class Copied:
    """What the run took along when it was submitted."""

    sha256: Mapping[str, str]
    """By name below the root."""
    roots: tuple[str, ...]
    """The folder that ranks import it from, by all its names."""

    def name(self, file: str) -> Optional[str]:
        """Name of a file that was taken along, None for any other."""
        for root in self.roots:
            prefix = os.path.join(root, "")  # noqa: PTH118
            if file.startswith(prefix) and file[len(prefix) :] in self.sha256:
                return file[len(prefix) :]
        return None


def look(attempt: int, modules: Optional[Mapping[str, object]] = None) -> dict[str, Module]:
    """What this process has imported by now, by module name."""
    files = imported_files(sys.modules if modules is None else modules, stdlib=_stdlib())
    return look_at(files, attempt)


def look_at(files: Mapping[str, str], attempt: int) -> dict[str, Module]:
    """As `look`, of files by name."""
    with ThreadPoolExecutor(_READERS) as pool:
        digests = list(pool.map(_digest, files.values()))
    return {
        name: Module(file, digest, attempt)
        for (name, file), digest in zip(files.items(), digests)
        if digest is not None
    }


def imported_files(modules: Mapping[str, object], *, stdlib: Iterable[str]) -> dict[str, str]:
    """Module name -> file of what does not lie in the folders `stdlib`."""
    own = tuple(os.path.join(folder, "") for folder in stdlib)  # noqa: PTH118
    files: dict[str, str] = {}
    for name, module in list(modules.items()):
        file = _file(module)
        if file is None or not os.path.isabs(file):  # noqa: PTH117 - `torch.ops` says `_ops.py`
            continue
        if not file.startswith(own) or any(f"/{folder}/" in file for folder in _INSTALLED):
            files[name] = file
    return files


def _file(module: object) -> Optional[str]:
    if not isinstance(module, ModuleType):
        return None
    # Past the `__getattribute__` of lazy modules, which would import what they stand for.
    values = object.__getattribute__(module, "__dict__")
    spec = values.get("__spec__")
    file = spec.origin if getattr(spec, "has_location", False) else values.get("__file__")
    return file if isinstance(file, str) else None


def _stdlib() -> list[str]:
    paths = sysconfig.get_paths()
    return [paths["stdlib"], paths["platstdlib"]]


def _digest(file: str) -> Optional[str]:
    """None where there is no such file: generated modules have made-up names."""
    try:
        with open(file, "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except OSError:
        return None


def expected(
    now: Mapping[str, Module], earlier: Mapping[str, Module], copied: Copied
) -> dict[str, Module]:
    """What the modules of `now` were before: in an earlier attempt, else at submit. New modules are
    left out."""
    before: dict[str, Module] = {}
    for name, module in now.items():
        if name in earlier:
            before[name] = earlier[name]
            continue
        source = copied.name(module.file)
        if source is not None:
            before[name] = Module(module.file, copied.sha256[source], 0)
    return before


def changes(now: Mapping[str, Module], before: Mapping[str, Module]) -> list[Change]:
    """Modules of both that differ, by name. Where the file lies does not matter."""
    return [
        Change(name, now[name].file, before[name].attempt)
        for name in sorted(now.keys() & before.keys())
        if now[name].sha256 != before[name].sha256
    ]


def parted(
    found: list[Change], now: Mapping[str, Module], before: Mapping[str, Module], copied: Copied
) -> tuple[list[Change], list[Change]]:
    """(changes that a run may not go on with, what was merely built anew)."""
    other: list[Change] = []
    rebuilt: list[Change] = []
    for change in found:
        name = copied.name(change.file)
        is_one_file = name is not None and name == copied.name(before[change.name].file)
        is_free = _is_built(now[change.name].file) and not is_one_file
        (rebuilt if is_free else other).append(change)
    return other, rebuilt


def _is_built(file: str) -> bool:
    return file.endswith(tuple(EXTENSION_SUFFIXES)) or PurePath(file).name == _BUILT


def merged(now: Mapping[str, Module], earlier: Mapping[str, Module]) -> dict[str, Module]:
    """Both: as they are now, with the first attempt that had them so."""
    kept = {
        name: earlier[name]
        for name, module in now.items()
        if name in earlier and earlier[name].sha256 == module.sha256
    }
    return {**earlier, **now, **kept}


def changed_sentence(found: list[Change]) -> str:
    """Between attempts, for the run that stops of it."""
    first = found[0]
    since = f"attempt {first.since}" if first.since else "the run was submitted"
    return (
        f"module `{first.name}` (`{first.file}`) has changed since {since}{_others(found)}; put it "
        "back, or submit a new run (code=live would go on with what it finds)"
    )


def node_sentence(found: list[Change], *, node: str, other: str) -> str:
    """Between two nodes of one attempt."""
    first = found[0]
    return (
        f"module `{first.name}` (`{first.file}`) on node {node} is not the one on {other}"
        f"{_others(found)}; update or stage the environment anew there, or leave the node out with "
        "cluster.exclude"
    )


def rebuilt_sentence(found: list[Change], *, node: str, other: str) -> str:
    """Between two nodes of one attempt, for the log of a run that goes on."""
    first = found[0]
    return (
        f"module `{first.name}` (`{first.file}`) on node {node} is another build than on {other}"
        f"{_others(found)}; each goes on with its own"
    )


def _others(found: list[Change]) -> str:
    rest = [f"`{change.name}`" for change in found[1 : 1 + _SHOWN]]
    if not rest:
        return ""
    more = len(found) - 1 - len(rest)
    return f", with it {', '.join(rest)}" + (f" and {more} more" if more else "")
