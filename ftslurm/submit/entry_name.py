"""Whether the function that ranks are to begin with is named in its module's text.

A doubt is told before a run waits for its nodes; it is no reason to refuse one. Nothing of the
submitter's is imported. Silent where more than one file could be the module, and of a text that may
make names as it runs: there the ranks find out.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Optional

from ftslurm.submit.rank import OWN_RANK
from ftslurm.submit.snapshot import Snapshot, Source

_MAKES_NAMES = re.compile(
    r"import\s*\*|setattr|__getattr__|__dict__|__path__|\bmodules\b"
    r"|(?<![\w.])(globals|locals|vars|exec|eval)\b"
)


def missing_function(snapshot: Snapshot, entry: str) -> Optional[str]:
    """A sentence for the submitter; None: nothing is amiss, or it cannot be told."""
    module, _, function = entry.removeprefix(OWN_RANK).partition(":")
    names = module.split(".")
    text, source = "", None
    for count in range(1, len(names) + 1):
        source = _only_file(snapshot, "/".join(names[:count]))
        if source is None:
            return None
        try:
            text = source.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        if _MAKES_NAMES.search(text):
            return None
    if source is None or re.search(rf"\b{re.escape(function)}\b", text):
        return None
    return (
        f"entry is `{entry}`, but `{source.name}` has no `{function}` in its text; unless another "
        "module puts it there, the ranks find nothing to begin with"
    )


def _only_file(snapshot: Snapshot, stem: str) -> Optional[Source]:
    """What Python would import for it; None where it has a choice, or there is no such file."""
    stems = [stem, f"{stem}/__init__"]
    wanted = {f"{place}/{one}".lstrip("/") for place in snapshot.import_paths for one in stems}
    found = [source for source in snapshot.sources if _module_stem(source.name) in wanted]
    return found[0] if len(found) == 1 and found[0].name.endswith(".py") else None


def _module_stem(name: str) -> Optional[str]:
    """Of `pack/mine.py` and of `pack/mine.cpython-311-x86_64-linux-gnu.so`: `pack/mine`."""
    path = PurePosixPath(name)
    if path.suffix not in (".py", ".so"):
        return None
    return str(path.parent / path.name.partition(".")[0])
