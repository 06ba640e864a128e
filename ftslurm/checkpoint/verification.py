"""Is a step folder what was saved? Reads and judges; never repairs, moves or removes.

A problem is a finding with a name, not an exception: all that can be found is found in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from ftslurm.checkpoint.commit import COMMITTED, Commit
from ftslurm.checkpoint.coverage import coverage_problems
from ftslurm.checkpoint.digest import Hasher, digest, new
from ftslurm.checkpoint.fields import NewerFormat
from ftslurm.checkpoint.published import read_commit
from ftslurm.checkpoint.reading import StepFile, read_small, reading, size_of
from ftslurm.checkpoint.record_json import decode_manifest, manifest_digest
from ftslurm.checkpoint.records import (
    MANIFEST,
    Chunk,
    Manifest,
    ShardFile,
    ShardIndex,
    TensorRecord,
)
from ftslurm.checkpoint.shard import read_index
from ftslurm.errors import CheckpointError, FormatError, FtslurmError
from ftslurm.files import Patience, list_folder
from ftslurm.run.layout import parse_step_name


class VerificationStopped(CheckpointError):
    """The caller asked for an end before all was read."""


@dataclass(frozen=True)
class Verification:
    """What is known of a step folder."""

    ok: bool
    problems: list[str]
    step: Optional[int]
    """By the manifest; by the folder's name when there is no trustworthy manifest."""
    manifest: Optional[Manifest]
    """Only when it is the one that COMMITTED names."""
    bytes_read: int
    committed_digest: Optional[str] = None
    """The step's identity, as in COMMITTED; None when that cannot be read."""
    misplaced: bool = False
    """The manifest is a good one, but of another step or run than this place is for."""
    unreadable: Optional[OSError] = None
    """Set when nothing is wrong but that parts could not be read just now (the first such error):
    the step is not `ok` and not known to be damaged either."""
    is_newer: bool = False
    """Written by an ftslurm whose records this one cannot read, and not known to be damaged."""
    strangers: list[str] = field(default_factory=list)
    """With `full`: what lies in the folder and was not saved. It takes nothing from what was."""


@dataclass(frozen=True)
class Expectation:
    """What is known beforehand; None: anything goes."""

    step: Optional[int] = None
    run_id: Optional[str] = None


@dataclass
class _Progress:
    """Bytes read so far; `on_bytes` hears of each portion, `should_stop` ends the reading."""

    on_bytes: Callable[[int], None]
    should_stop: Callable[[], bool]
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)
    unreadable: list[OSError] = field(default_factory=list)
    """Causes of those problems that are no damage."""
    newer: int = 0
    """Problems of records that are no damage but not understood here."""
    patience: Patience = field(default_factory=Patience)
    """Left for the files that have not been looked at yet."""

    def failed(self, error: FtslurmError) -> None:
        """A problem found by an exception."""
        self.problems.append(str(error))
        if isinstance(error.__cause__, OSError):
            self.unreadable.append(error.__cause__)
        # A record whose digest was checked before is what was written.
        self.newer += isinstance(error, NewerFormat)

    @property
    def is_damage_known(self) -> bool:
        return len(self.problems) > len(self.unreadable) + self.newer

    @property
    def is_gone(self) -> bool:
        """Damage for which there was a wait: the other files may be as slow to say so."""
        return self.patience.is_past_lag and self.is_damage_known

    def add(self, count: int) -> None:
        self.bytes_read += count
        self.on_bytes(count)
        if self.should_stop():
            raise VerificationStopped("verification was stopped before all was read")

    def judge(self, heads: Verification, strangers: Sequence[str] = ()) -> Verification:
        """`heads` with all that is known by now."""
        only_unreadable = self.unreadable and not self.is_damage_known
        return replace(
            heads,
            ok=not self.problems,
            problems=self.problems,
            bytes_read=self.bytes_read,
            unreadable=self.unreadable[0] if only_unreadable else None,
            is_newer=self.newer > 0 and not self.is_damage_known,
            strangers=list(strangers),
        )


def verify_step(
    path: Path,
    *,
    full: bool,
    files: Optional[Container[str]] = None,
    expect: Expectation = Expectation(),
    on_bytes: Callable[[int], None] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
    patience: Optional[Patience] = None,
) -> Verification:
    """Check a published step. `full` reads every byte of it, or of those `files`; otherwise records
    and sizes only, and only up to the first file that was waited for and is gone.

    The folder's name is held against the manifest if it is that of a step. All files of the step
    together are waited for as one would be, with what `patience` has left.
    """
    progress = _Progress(on_bytes, should_stop, patience=patience or Patience())
    heads = _verify_heads(path, expect, progress)
    if heads.manifest is None:
        return heads
    names = _check_contents(path, heads.manifest, full=full, files=files, progress=progress)
    strangers = []
    if full and names is not None:
        strangers = _strangers(path, {COMMITTED, *names}, progress)
    return progress.judge(heads, strangers)


def verify_heads(
    path: Path, *, expect: Expectation = Expectation(), patience: Optional[Patience] = None
) -> Verification:
    """Check COMMITTED and the manifest alone: who published the step, and is it of this place?"""
    progress = _Progress(lambda count: None, lambda: False, patience=patience or Patience())
    return _verify_heads(path, expect, progress)


def _verify_heads(path: Path, expect: Expectation, progress: _Progress) -> Verification:
    problems = progress.problems
    named_step = parse_step_name(path.name)
    commit, manifest = _read_heads(path, progress)
    if manifest is not None:
        problems += _contradictions(manifest, named_step, expect)
    heads = Verification(
        ok=not problems,
        problems=problems,
        step=named_step if manifest is None else manifest.step,
        manifest=manifest,
        bytes_read=progress.bytes_read,
        committed_digest=None if commit is None else commit.digest,
        misplaced=manifest is not None and bool(problems),
    )
    return progress.judge(heads)


def loadability_problems(path: Path, identity: str) -> list[str]:
    """The check before COMMITTED, from disk: is all that the manifest names there, and whole?"""
    progress = _Progress(lambda count: None, lambda: False)
    manifest = _read_manifest(path, identity, progress)
    if manifest is not None:
        names = _check_contents(path, manifest, full=False, progress=progress)
        if names is not None:
            progress.problems += _strangers(path, names, progress)
    return progress.problems


def _read_heads(path: Path, progress: _Progress) -> tuple[Optional[Commit], Optional[Manifest]]:
    try:
        commit = read_commit(path, patience=progress.patience)
    except NewerFormat as error:
        progress.failed(_newer_or_damaged(path, error, progress))
        return None, None
    except (CheckpointError, FormatError) as error:
        progress.failed(error)
        return None, None
    manifest = _read_manifest(path, commit.digest, progress)
    if manifest is not None and (manifest.step, manifest.run_id) != (commit.step, commit.run_id):
        progress.problems.append(f"`{path / COMMITTED}` names another step or run")
        return commit, None
    return commit, manifest


def _newer_or_damaged(path: Path, error: NewerFormat, progress: _Progress) -> FtslurmError:
    """What a COMMITTED of a newer schema is: nothing guards its bytes, and one wrong bit makes
    another version of it, so the manifest has to be of a newer one as well."""
    try:
        data = read_small(path / MANIFEST, patience=progress.patience)
        decode_manifest(data, where=MANIFEST)
    except NewerFormat:
        return error
    except CheckpointError as unread:
        if isinstance(unread.__cause__, OSError):
            return unread
    except FormatError:
        pass
    return FormatError(str(error))


def _read_manifest(path: Path, identity: str, progress: _Progress) -> Optional[Manifest]:
    try:
        data = read_small(path / MANIFEST, patience=progress.patience)
        if manifest_digest(data) != identity:
            raise CheckpointError(f"`{path / MANIFEST}` does not have the digest in {COMMITTED}")
        manifest = decode_manifest(data, where=f"`{path / MANIFEST}`")
    except (CheckpointError, FormatError) as error:
        progress.failed(error)
        return None
    progress.add(len(data))
    return manifest


def _contradictions(
    manifest: Manifest, named_step: Optional[int], expect: Expectation
) -> Iterator[str]:
    if named_step is not None and manifest.step != named_step:
        yield f"the manifest is of step {manifest.step}, the folder's name says {named_step}"
    if expect.step is not None and manifest.step != expect.step:
        yield f"the manifest is of step {manifest.step}, expected {expect.step}"
    if expect.run_id is not None and manifest.run_id != expect.run_id:
        yield f"the manifest is of run {ascii(manifest.run_id)}, expected `{expect.run_id}`"


def _check_contents(
    path: Path,
    manifest: Manifest,
    *,
    full: bool,
    progress: _Progress,
    files: Optional[Container[str]] = None,
) -> Optional[set[str]]:
    """All that the manifest names; returns the names of its files, None when an index is bad."""
    algorithm = manifest.digest_algorithm
    names = {MANIFEST, *(entry.path for entry in manifest.indexes)}
    indexes: list[ShardIndex] = []
    for entry in manifest.indexes:
        try:
            indexes.append(read_index(path, entry, algorithm, patience=progress.patience))
        except (CheckpointError, FormatError) as error:
            progress.failed(error)
            if not full and progress.is_gone:
                return None
        else:
            progress.add(entry.bytes)
    if len(indexes) == manifest.world_size:
        progress.problems += coverage_problems(indexes)
    for index in indexes:
        for file in index.files:
            names.add(file.path)
            try:
                _check_size(path / file.path, file.bytes, progress.patience)
                if full and (files is None or file.path in files):
                    records = [record for record in index.tensors if record.file == file.path]
                    _scan(path / file.path, file, records, algorithm, progress)
            except VerificationStopped:
                raise
            except CheckpointError as error:
                progress.failed(error)
                if not full and progress.is_gone:
                    return None
    return names if len(indexes) == manifest.world_size else None


def _strangers(path: Path, names: set[str], progress: _Progress) -> list[str]:
    """A sentence for each file of another name."""
    try:
        with reading(f"`{path}`"):
            found = sorted(list_folder(path, patience=progress.patience))
    except CheckpointError as error:
        progress.failed(error)
        return []
    return [
        f"`{path / ascii(name)}` belongs to no index; something wrote into this step"
        for name in found
        if name not in names
    ]


def _check_size(path: Path, size_bytes: int, patience: Patience) -> None:
    found_bytes = size_of(path, patience=patience)
    if found_bytes != size_bytes:
        raise CheckpointError(f"`{path}` has {found_bytes} bytes, expected {size_bytes}")


def _scan(
    path: Path,
    file: ShardFile,
    records: Sequence[TensorRecord],
    algorithm: str,
    progress: _Progress,
) -> None:
    """Every byte of one file against the digests of its chunks and of its tensors, in one pass."""
    tensors = _TensorDigests(records, algorithm)
    with reading(f"`{path}`"):
        for chunk, data in _read_ahead(path, file.chunks, progress.patience):
            if len(data) != chunk.bytes or digest(algorithm, data) != chunk.digest:
                progress.problems.append(
                    f"`{path}` is damaged between bytes {chunk.offset} and "
                    f"{chunk.offset + chunk.bytes}"
                )
            tensors.update(chunk.offset, data)
            progress.add(len(data))
    progress.problems += [f"`{path}`: tensor {ascii(key)} is damaged" for key in tensors.damaged()]


def _read_ahead(
    path: Path, chunks: Sequence[Chunk], patience: Patience
) -> Iterator[tuple[Chunk, memoryview]]:
    """Chunks in order; the next one is read in a thread while the caller digests this one."""
    # Here because of what it costs a command that only lists steps (it loads logging and queue).
    from concurrent.futures import ThreadPoolExecutor

    file = StepFile(path, patience=patience)
    size = max((chunk.bytes for chunk in chunks), default=0)
    buffers = [memoryview(bytearray(size)) for _ in range(2)]

    def read(position: int) -> memoryview:
        chunk, buffer = chunks[position], buffers[position % 2]
        return buffer[: file.read_at(buffer[: chunk.bytes], chunk.offset)]

    try:
        file.forget_cached()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read") as reader:
            following = reader.submit(read, 0) if chunks else None
            for position, chunk in enumerate(chunks):
                assert following is not None
                data = following.result()
                if position + 1 < len(chunks):
                    following = reader.submit(read, position + 1)
                yield chunk, data
    finally:
        file.close()


class _TensorDigests:
    """Digests of the tensors in a file whose bytes come by in order."""

    def __init__(self, records: Sequence[TensorRecord], algorithm: str) -> None:
        self._algorithm = algorithm
        self._records = sorted(records, key=lambda record: (record.offset, record.bytes))
        self._at = 0
        self._hasher: Hasher = new(algorithm)
        self._damaged: list[str] = []

    def update(self, offset: int, data: memoryview) -> None:
        """The bytes from `offset` on; records never overlap, so at most one is left open."""
        end = offset + len(data)
        while self._at < len(self._records):
            record = self._records[self._at]
            if record.offset >= end and record.bytes:
                return
            self._hasher.update(data[max(record.offset - offset, 0) : record.end - offset])
            if record.end > end:
                return
            self._close(record)

    def damaged(self) -> list[str]:
        """Keys whose bytes do not have the recorded digest. Call at the end, once."""
        while self._at < len(self._records):
            self._close(self._records[self._at])
        return self._damaged

    def _close(self, record: TensorRecord) -> None:
        if self._hasher.hexdigest() != record.digest:
            self._damaged.append(record.key)
        self._hasher = new(self._algorithm)
        self._at += 1
