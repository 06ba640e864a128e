"""How nodes see each other's writes, judged. Pure.

Commits and claims rest on what is written here: a name that one node has made comes into sight on
the others within files.VIEW_LAG_S, a file that was written and closed is read whole, what replaces
a file is seen in its place, and of many who make a name one wins.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence

from ftslurm.doctor.line import Line, fail, ok, skipped, warn
from ftslurm.doctor.node_facts import NodeFacts, Trialled, names
from ftslurm.files import VIEW_LAG_S

LATE_S = 10.0
"""A wait that a person notices at each new attempt."""

_ANOTHER = "choose another file system for runs (--runs, runs_dir)"
_CACHES = (
    "new attempts and restores wait for it; on NFS mount with lookupcache=positive and a lower"
    " acdirmax, on FUSE with a lower negative_timeout and attr_timeout"
)


def check_shared(trialled: Trialled) -> Line:
    name = "across.shared"
    blind = [one.node for one in trialled.nodes if not one.sees_folder]
    mounts = Counter(_mount_of(one) for one in trialled.nodes)
    if blind:
        on = f"{names(blind)} {'do' if len(blind) > 1 else 'does'} not see the runs' folder"
        todo = "choose a folder on a file system that all nodes share (--runs, runs_dir)"
        return fail(name, f"{on} ({names(list(mounts), '; ')})", todo)
    if not trialled.made:
        return fail(name, f"{trialled.nodes[0].node} may not write in it", _ANOTHER)
    if len({text.partition(" ")[0] for text in mounts}) > 1:
        told = f"it is not the same mount on all nodes: {names(list(mounts), '; ')}"
        return warn(name, told, "caches and rights may differ by node: mount it alike")
    return ok(name, f"{len(trialled.nodes)} nodes see it ({names(list(mounts), '; ')})")


def _mount_of(one: NodeFacts) -> str:
    mount = one.hello.get("mount")
    return f"{mount[0]} from {mount[1]}" if mount else "mount unknown"


def check_sight(trialled: Trialled) -> list[Line]:
    others = [one for one in trialled.nodes[1:] if one.sees_folder and one.seen]
    if not trialled.made or not others:
        told = "it takes two nodes that see it and say so"
        told = told if trialled.made else "nothing could be made in it"
        return [skipped("across.new_file", told), skipped("across.reread", told)]
    return [_new_file(others), _listing(others), _growth(others), _reread(others)]


def _new_file(others: Sequence[NodeFacts]) -> Line:
    name = "across.new_file"
    early = [one.node for one in others if "new" in one.missed.get("there", [])]
    if early or any("error" in one.missed for one in others):
        return skipped(name, "no node had looked for the file in vain before it was made")
    return _delay(name, "found", others, "a file that a node has looked for in vain")


def _listing(others: Sequence[NodeFacts]) -> Line:
    """What is listed is waited for; what is not, is taken for missing."""
    name, what = "across.listing", "a new name in a folder's listing"
    unseen = [one.node for one in others if "listed" not in one.seen.get("seen_s", {})]
    if unseen:
        todo = "a checkpoint that is not listed is taken for missing, and older ones are restored"
        told = f"{what} is not there after {_looked_s(others):.0f} s on {names(unseen)}"
        return fail(name, told, f"{todo}; {_ANOTHER}")
    return _delay(name, "listed", others, what)


def _growth(others: Sequence[NodeFacts]) -> Line:
    return _delay("across.attributes", "grown", others, "the size of a file that has grown")


def _reread(others: Sequence[NodeFacts]) -> Line:
    """Opened anew, a file is as it was left by whoever has closed it; nothing torn in between."""
    name = "across.reread"
    strange = sorted({f"{one.node}: {word}" for one in others for word in _torn(one)})
    if strange:
        stale = any("Stale" in word for word in strange)
        todo = "readers try ESTALE again; " if stale else ""
        return warn(name, f"while a file was replaced: {names(strange, '; ')}", todo + _CACHES)
    late = {one.node: max(_seconds(one, "read"), _seconds(one, "replaced")) for one in others}
    slowest = max(late, key=lambda node: late[node])
    told = "what another node has written, or renamed over the old file, is read anew after"
    if late[slowest] == float("inf"):
        told = f"{slowest} still reads the old bytes after {_looked_s(others):.0f} s"
        return fail(name, told, f"pointers and journals are read so; {_ANOTHER}")
    told = f"{told} {late[slowest]:.2f} s at most ({slowest})"
    return warn(name, told, _CACHES) if late[slowest] > LATE_S else ok(name, told)


def _torn(one: NodeFacts) -> list[str]:
    return [word for word in one.seen.get("strange", []) if word.startswith(("read", "replaced"))]


def _delay(name: str, key: str, others: Sequence[NodeFacts], what: str) -> Line:
    seconds = {one.node: _seconds(one, key) for one in others}
    slowest = max(seconds, key=lambda node: seconds[node])
    if seconds[slowest] == float("inf"):
        told = f"{what} is not in sight after {_looked_s(others):.0f} s on {slowest}"
        return warn(name, told, f"readers wait {VIEW_LAG_S:g} s; {_CACHES}")
    told = f"{what} comes into sight after {seconds[slowest]:.2f} s at most ({slowest})"
    if seconds[slowest] > LATE_S:
        return warn(name, told, _CACHES)
    return ok(name, told)


def _seconds(one: NodeFacts, key: str) -> float:
    found = one.seen.get("seen_s", {}).get(key)
    return float("inf") if found is None else float(found)


def _looked_s(others: Sequence[NodeFacts]) -> float:
    return max((one.looked_s for one in others), default=0.0)


def check_claims(trialled: Trialled) -> Line:
    """Attempts are claimed by mkdir, files of their own by exclusive create."""
    name = "across.claims"
    told = [one for one in trialled.nodes if one.claims]
    if len(told) < 2:
        return skipped(name, "it takes two nodes that write to tell")
    refused = [f"{one.node}: {one.claims['error']}" for one in told if "error" in one.claims]
    if refused:
        errors = {one.claims.get("errno") for one in told}
        full = errors & {errno.ENOSPC, errno.EDQUOT}
        return fail(name, names(refused, "; "), "make room, or ask for quota" if full else _ANOTHER)
    all_told = all(one.claims for one in trialled.nodes if one.sees_folder)
    wrong = []
    for kind, what in (("files", "exclusive create"), ("folders", "mkdir")):
        wins = Counter(number for one in told for number in one.claims[kind])
        tried = max(wins, default=-1) + 1
        twice = sorted(number for number, count in wins.items() if count > 1)
        never = [number for number in range(tried) if number not in wins]
        wrong += [f"{what}: {len(twice)} of {tried} names were won by several"] if twice else []
        # One that does not answer may have won those.
        wrong += [f"{what}: {len(never)} of {tried} names by nobody"] if never and all_told else []
    if wrong:
        return fail(name, "; ".join(wrong), f"two jobs may take the same attempt; {_ANOTHER}")
    shares = names([f"{one.node} {len(one.claims['files'])}" for one in told])
    count = sum(len(one.claims["files"]) for one in told)
    return ok(
        name, f"of {len(told)} nodes that made {count} names at once, one won each ({shares})"
    )
