"""COMMITTED: the few bytes that make a folder a step of the run. Pure.

Whoever lists steps needs this module and no other record, so it loads none. Reading raises
FormatError and nothing else, whatever the bytes are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftslurm.checkpoint.digest import ALGORITHMS
from ftslurm.checkpoint.fields import parse
from ftslurm.errors import FormatError
from ftslurm.files import encode_json

SCHEMA_VERSION = 1
"""Of all of a checkpoint's records."""
COMMITTED = "COMMITTED"

MANIFEST_ALGORITHM = "sha256"
"""Always: the manifest's digest is a step's identity in lineage and fence, so it has to be strong,
and those who list steps need no xxhash."""


@dataclass(frozen=True)
class Commit:
    """Which manifest this folder's is."""

    step: int
    run_id: str
    algorithm: str
    digest: str


def encode_commit(commit: Commit) -> bytes:
    return encode_json({"schema_version": SCHEMA_VERSION, **vars(commit)})


def decode_commit(data: bytes, *, where: str = COMMITTED) -> Commit:
    """Refuses any form but the one `encode_commit` writes: nothing else guards these bytes."""
    fields = parse(data, where=where)
    commit = Commit(
        step=fields.count("step"),
        run_id=fields.text("run_id"),
        algorithm=fields.text("algorithm"),
        digest=fields.digest("digest", length=ALGORITHMS[MANIFEST_ALGORITHM]),
    )
    if commit.algorithm != MANIFEST_ALGORITHM:
        raise FormatError(f"{where} names `{commit.algorithm}`, expected `{MANIFEST_ALGORITHM}`")
    if encode_json(fields.values) != data:
        raise FormatError(f"{where} is not in the form it was written in; it is damaged")
    return commit
