"""One run, one code: its modules are compared between its nodes and with its earlier attempts.

Rank 0 keeps what the attempt has imported in attempts/N/modules.json, together with what earlier
attempts had, so that one file tells the whole run's. It is written only when the attempt may train
with it. With code=frozen a difference ends the run; with code=live it is noted and the new code is
what later attempts are compared with. What was built anew (see modules.py) is noted with either. A
disk that will not have or give the digests of a node costs the comparison, never the attempt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import CodeError, FormatError, RunError, warn
from ftslurm.files import (
    best_effort,
    claim_folder,
    encode_json,
    is_listed,
    patiently,
    read_json,
    write_atomic,
    write_json,
)
from ftslurm.run.attempts import append_event
from ftslurm.run.attempts import numbers as attempt_numbers
from ftslurm.run.layout import RunLayout
from ftslurm.run.modules import (
    Change,
    Copied,
    Module,
    changed_sentence,
    changes,
    expected,
    look,
    look_at,
    merged,
    node_sentence,
    parted,
    rebuilt_sentence,
)
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import RunRecord
from ftslurm.run.spec import LIVE

_NAMED_IN_EVENT = 20
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""What link(2) says where the file system, or a layer above it, has no hard links."""

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
        difference, rebuilt = between_nodes(env, record, mine, theirs, other=node)
        if difference is not None:
            raise error(record, difference)
        if rebuilt:
            warn(rebuilt_sentence(rebuilt, node=env.node, other=node))
            if env.rank == 0:  # the journal has one writer
                _journal(env, "code_changed", node_facts([(node, names(rebuilt))]))
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
    copied = _copied(env, record)
    before = expected(mine, _earlier(env.layout, env.attempt), copied)
    found = changes(mine, before)
    if not is_live:
        other, found = parted(found, mine, before, copied)
        if record.spec.program:
            other += _of_program(env, copied)
        if other:
            return changed_sentence(other)
    if found:
        on_event("code_changed", _facts(names(found)))
    return None


def _of_program(env: RankEnvironment, copied: Copied) -> list[Change]:
    """A program imports in processes of its own: its source, all of it, is to be as at submit."""
    sources = {name: digest for name, digest in copied.sha256.items() if name.endswith(".py")}
    places = {name: str(env.layout.code / name) for name in sources}
    before = {name: Module(places[name], digest, 0) for name, digest in sources.items()}
    return changes(look_at(places, env.attempt), before)


def between_nodes(
    env: RankEnvironment,
    record: RunRecord,
    mine: Mapping[str, Module],
    theirs: Mapping[str, Module],
    *,
    other: str,
) -> tuple[Optional[str], list[Change]]:
    """(one sentence when this node and `other` have imported different code, what is only built
    otherwise here)."""
    found = changes(mine, theirs)
    if not found:
        return None, []
    found, rebuilt = parted(found, mine, theirs, _copied(env, record))
    return (node_sentence(found, node=env.node, other=other) if found else None), rebuilt


def error(record: RunRecord, difference: str) -> Exception:
    """Between nodes: live code may have been saved while the ranks started, frozen code was not."""
    return RunError(difference) if record.spec.code == LIVE else CodeError(difference)


def keep(env: RankEnvironment, mine: Mapping[str, Module]) -> None:
    """Rank 0: these are the modules that the attempt trains with. A disk that is full or closed
    costs the record, not the attempt: the next one compares with an older record."""
    modules = merged(mine, _earlier(env.layout, env.attempt))
    with best_effort("the digests of this attempt's modules are not kept"):
        write_json(env.attempt_layout.modules_json, _record(env.node, modules))


def _earlier(layout: RunLayout, attempt: int) -> dict[str, Module]:
    """Of the newest attempt before this one that came so far; it holds the older ones' as well."""
    for number in reversed(attempt_numbers(layout)):
        if number < attempt:
            try:
                return _read(layout.attempt(number).modules_json)[1]
            except FileNotFoundError:
                continue
    return {}


def _copied(env: RankEnvironment, record: RunRecord) -> Copied:
    """What was taken along at submit, where the ranks import it from."""
    place = env.layout.code_json
    root = Path(record.code_folder) if record.spec.code == LIVE else env.layout.code
    # `python -m` puts the current folder on the path with its links resolved.
    roots = (str(root), str(root.resolve()))
    try:
        return Copied(read_json(place)["files"], roots)
    except FileNotFoundError:
        return Copied({}, roots)  # frozen by an older ftslurm
    except KeyError as error:
        raise FormatError(f"`{place}` lacks a field ({error})") from None


def _leave_or_read_first(
    env: RankEnvironment, mine: Mapping[str, Module]
) -> Optional[tuple[str, dict[str, Module]]]:
    """(node, modules) of the node that was there first; None: it is this one, or it cannot be told
    who was."""
    place = env.attempt_layout.first_modules_json
    try:
        with contextlib.suppress(FileNotFoundError):
            return _read(place)
        if _create(place, encode_json(_record(env.node, mine))):
            return None
        # Where there are no links the name is taken some time before the file is there.
        return patiently(lambda: _read(place), place, announced=True)
    except OSError as error:
        warn(f"the modules of node {env.node} are not compared with the other nodes': {error}")
        return None


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
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(place, data)
    finally:
        os.unlink(name)  # noqa: PTH108 - a str from mkstemp
    return True


def _create_without_links(place: Path, data: bytes) -> bool:
    """As `_create`, but for the others there is nothing to read for a moment."""
    if not claim_folder(place.with_suffix(".taken")) or is_listed(place):
        return False
    write_atomic(place, data)
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


def names(found: list[Change]) -> list[str]:
    return [change.name for change in found]


def node_facts(rows: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """Of the event for (node, modules that are built otherwise there)."""
    nodes = sorted({node for node, _ in rows})
    modules = sorted({name for _, some in rows for name in some})
    return {**_facts(modules), "nodes": nodes[:_NAMED_IN_EVENT], "num_nodes": len(nodes)}


def _facts(modules: list[str]) -> dict[str, Any]:
    return {"modules": modules[:_NAMED_IN_EVENT], "num_changed": len(modules)}


def _journal(env: RankEnvironment, kind: str, facts: dict[str, Any]) -> None:
    with best_effort(f"the event {kind} of {facts['modules']} is not kept"):
        append_event(env.attempt_layout, kind, **facts)
