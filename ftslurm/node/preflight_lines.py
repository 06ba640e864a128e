"""The lines in which the ranks of a preflight tell the batch node how it goes. Pure.

A line is JSON behind a mark, so that what libraries print beside it does no harm. It is short: what
slurmstepd sends in several pieces may come with other tasks' words in between. Kinds: `here`,
`doing` (a part begins), `trial` and `took` (rank 0, of all), `absent` (rank 0, who has not spoken),
`end`, `unanswered` (by rank 0), `stopped` (by a signal), `broken` (the preflight itself went wrong
there).
"""

from __future__ import annotations

import json
from typing import Any, Optional

_MARK = "ftslurm-preflight: "


def line(kind: str, *, rank: int, node: str, **facts: Any) -> str:
    return _MARK + json.dumps({"kind": kind, "rank": rank, "node": node, **facts})


def parse(text: str) -> Optional[dict[str, Any]]:
    """None for anything else, a torn line too; of one that was torn by another, that other."""
    _, mark, rest = text.rpartition(_MARK)
    if not mark:
        return None
    try:
        told = json.loads(rest)
    except ValueError:
        return None
    is_whole = isinstance(told, dict) and {"kind", "rank", "node"} <= set(told)
    return told if is_whole else None
