"""One run, one code: its modules are compared between its nodes and with its earlier attempts.

Rank 0 keeps what the attempt has imported in attempts/N/modules.json, together with what earlier
attempts had, so that one file tells the whole run's. It is written only when the attempt may train
with it. With code=frozen a difference ends the run; with code=live it is noted and the new code is
what later attempts are compared with.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import CodeError, FormatError, RunError
from ftslurm.files import encode_json, read_json, write_json
from ftslurm.run.attempts import append_event, numbers
from ftslurm.run.layout import RunLayout
from ftslurm.run.modules import (
    Change,
    Module,
    changed_sentence,
    changes,
    expected,
    look,
    look_at,
    merged,
    node_sentence,
)
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import RunRecord
from ftslurm.run.spec import LIVE

_NAMED_IN_EVENT = 20

Event = Callable[[str, dict[str, Any]], None]


def check_alone(env: RankEnvironment, record: RunRecord) -> None:
    """For ranks that have no group to ask: what they have imported is what the run's code is.

    Nobody waits. The node that is there first leaves its digests, the later ones compare theirs.
    """
    if env.local_rank != 0:
        return
    mine = look(env.attempt)
    first = _leave_or_read_first(env, mine)
    if first is not None:
        node, theirs = first
        difference = between_nodes(mine, theirs, node=env.node, other=node)
        if difference is not None:
            raise error(record, difference)
    if env.rank == 0:
        difference = with_earlier(
            env, record, mine, on_event=lambda kind, facts: _journal(env, kind, facts)
        )
        if difference is not None:
            raise CodeError(difference)
        keep(env, mine)


def with_earlier(
    env: RankEnvironment, record: RunRecord, mine: Mapping[str, Module], *, on_event: Event
) -> Optional[str]:
    """Rank 0: one sentence when the run cannot go on with these modules."""
    is_live = record.spec.code == LIVE
    root = Path(record.code_folder) if is_live else env.layout.code
    # `python -m` puts the current folder on the path with its links resolved.
    roots = [str(root), str(root.resolve())]
    copied = _copied(env.layout)
    before = expected(mine, _earlier(env.layout, env.attempt), copied, roots)
    found = changes(mine, before)
    if record.spec.program and not is_live:
        found += _of_program(env, copied)
    if not found:
        return None
    if not is_live:
        return changed_sentence(found)
    on_event("code_changed", _facts(found))
    return None


def _of_program(env: RankEnvironment, copied: Mapping[str, str]) -> list[Change]:
    """A program imports in processes of its own: its source, all of it, is to be as at submit."""
    sources = {name: digest for name, digest in copied.items() if name.endswith(".py")}
    places = {name: str(env.layout.code / name) for name in sources}
    before = {name: Module(places[name], digest, 0) for name, digest in sources.items()}
    return changes(look_at(places, env.attempt), before)


def between_nodes(
    mine: Mapping[str, Module], theirs: Mapping[str, Module], *, node: str, other: str
) -> Optional[str]:
    """One sentence when this node and another one have imported different code."""
    found = changes(mine, theirs)
    return node_sentence(found, node=node, other=other) if found else None


def error(record: RunRecord, difference: str) -> Exception:
    """Between nodes: live code may have been saved while the ranks started, frozen code was not."""
    return RunError(difference) if record.spec.code == LIVE else CodeError(difference)


def keep(env: RankEnvironment, mine: Mapping[str, Module]) -> None:
    """Rank 0: these are the modules that the attempt trains with. A disk that is full or closed
    costs the record, not the attempt: the next one compares with an older record."""
    modules = merged(mine, _earlier(env.layout, env.attempt))
    try:
        write_json(env.attempt_layout.modules_json, _record(env.node, modules))
    except OSError as error:
        print(  # noqa: T201
            f"ftslurm: warning: the digests of this attempt's modules are not kept: {error}",
            file=sys.stderr,
        )


def _earlier(layout: RunLayout, attempt: int) -> dict[str, Module]:
    """Of the newest attempt before this one that came so far; it holds the older ones' as well."""
    for number in reversed(numbers(layout)):
        if number < attempt:
            try:
                return _read(layout.attempt(number).modules_json)[1]
            except FileNotFoundError:
                continue
    return {}


def _copied(layout: RunLayout) -> dict[str, str]:
    """Digests of RUN/code by name, from submit."""
    try:
        files: dict[str, str] = read_json(layout.code_json)["files"]
    except FileNotFoundError:
        return {}  # frozen by an older ftslurm
    except KeyError as error:
        raise FormatError(f"`{layout.code_json}` lacks a field ({error})") from None
    return files


def _leave_or_read_first(
    env: RankEnvironment, mine: Mapping[str, Module]
) -> Optional[tuple[str, dict[str, Module]]]:
    """(node, modules) of the node that was there first; None: it is this one."""
    place = env.attempt_layout.first_modules_json
    with contextlib.suppress(FileNotFoundError):
        return _read(place)
    data = encode_json(_record(env.node, mine))
    if _create(place, data):
        return None
    return _read(place)


def _create(place: Path, data: bytes) -> bool:
    """True for exactly one caller. The file is whole from the start: link(2) refuses a name that is
    taken, on NFS too."""
    descriptor, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.link(name, place)
    except FileExistsError:
        return False
    finally:
        os.unlink(name)  # noqa: PTH108 - a str from mkstemp
    return True


def _record(node: str, modules: Mapping[str, Module]) -> dict[str, Any]:
    rows = {name: asdict(module) for name, module in modules.items()}
    return {"schema_version": 1, "node": node, "modules": rows}


def _read(path: Path) -> tuple[str, dict[str, Module]]:
    record = read_json(path)
    try:
        rows = record["modules"]
        modules = {
            name: Module(row["file"], row["sha256"], row["attempt"]) for name, row in rows.items()
        }
        return str(record["node"]), modules
    except (KeyError, TypeError) as error:
        raise FormatError(f"`{path}` lacks a field ({error}); it is not whole") from None


def _facts(found: list[Change]) -> dict[str, Any]:
    names = [change.name for change in found[:_NAMED_IN_EVENT]]
    return {"modules": names, "num_changed": len(found)}


def _journal(env: RankEnvironment, kind: str, facts: dict[str, Any]) -> None:
    append_event(env.attempt_layout, kind, **facts)
