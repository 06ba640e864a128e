"""The source the ranks import, copied at submit: what is taken and where it is imported from.

Of a git repository all tracked files and the untracked that git does not ignore; elsewhere the .py
files beside the entry and its package; and ftslurm itself. Never a file that looks like it holds
secrets, nor what a link names outside of these. Planning only reads; `copy` writes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Optional

from ftslurm.errors import RunError, SpecError
from ftslurm.files import write_atomic
from ftslurm.submit import git
from ftslurm.submit.rank import OWN_RANK
from ftslurm.submit.secret_files import copies, has_secret_name, holds_private_key, without_keys

LIMIT_BYTES = 64 << 20
_SECRET_BYTES = 1 << 20
"""What is bigger is not looked for copies of."""

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Source:
    """One file of the snapshot."""

    name: str
    """Path inside the snapshot."""
    path: Path

    @property
    def size_bytes(self) -> int:
        """Of what is copied: the link itself, or the file that it names."""
        is_link = self.path.is_symlink() and _stays_inside(self)
        return (self.path.lstat() if is_link else self.path.stat()).st_size


@dataclass(frozen=True)
class Snapshot:
    """What would be copied."""

    root: Path
    """Folder that the names of the submitter's own files are relative to."""
    sources: list[Source]
    import_paths: list[str]
    """Folders inside the snapshot from which modules are imported, first ones first."""
    left_out: list[str]
    """Files that were not taken because they may hold secrets or lead out of the repository."""
    commit: Optional[str] = None
    diff: bytes = b""
    """Difference of the tracked files from `commit`."""
    dirty: bool = False
    """The working tree differs from `commit`, untracked files included."""
    place: str = ""
    """Folder inside the snapshot that the run is submitted from."""

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)


def plan_snapshot(
    folder: Path,
    *,
    entry: str,
    program: Sequence[str] = (),
    further: Iterable[tuple[str, Sequence[str]]] = (),
    exclude: Sequence[Path] = (),
) -> Snapshot:
    """Decide what a run submitted in `folder` takes along. `further`: (entry, program) of other
    runs that share it; `exclude`: folders that are not code."""
    folder = folder.resolve()
    root = git.find_repository(folder)
    if root is None:
        beside: dict[str, Source] = {}
        for one_entry, words in ((entry, program), *further):
            found = _beside_program(folder, words) if words else _beside_entry(folder, one_entry)
            beside.update({source.name: source for source in found})
        sources, left_out = _sort_out(beside.values(), [])
        snapshot = Snapshot(folder, sources, [""], left_out)
    else:
        snapshot = _of_repository(root, folder, [path.resolve() for path in exclude])
    if not any(source.name == "ftslurm/__init__.py" for source in snapshot.sources):
        snapshot.sources.extend(_own_package())
    _check_size(snapshot.sources)
    return snapshot


def is_installed() -> bool:
    """Whether this ftslurm lies where its interpreter finds it without PYTHONPATH."""
    installed = sysconfig.get_paths()
    return PACKAGE.parent in (Path(installed["purelib"]), Path(installed["platlib"]))


def unseen_folders(snapshot: Snapshot, environ: Mapping[str, str]) -> list[str]:
    """Entries of PYTHONPATH that the ranks will not have: theirs is the snapshot's."""
    seen = [snapshot.root / place for place in snapshot.import_paths]
    installed = sysconfig.get_paths()
    seen += [PACKAGE.parent, Path(installed["purelib"]), Path(installed["platlib"])]
    known = {path.resolve() for path in seen}
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [
        entry
        for entry in dict.fromkeys(entries)
        if Path(entry).exists() and Path(entry).resolve() not in known
    ]


def check_entry(
    snapshot: Snapshot, entry: str, *, installed: bool, unseen: Sequence[str] = ()
) -> None:
    """SpecError when the entry's module is nowhere. `installed`: look at this interpreter too, but
    not in the folders `unseen`, which the ranks will not have."""
    top = _top_module(entry)
    names = {source.name for source in snapshot.sources}
    for place in snapshot.import_paths:
        prefix = f"{place}/{top}" if place else top
        if f"{prefix}.py" in names or any(name.startswith(f"{prefix}/") for name in names):
            return
        if f"{prefix}.py" in snapshot.left_out:
            raise SpecError(
                f"entry is `{entry}`, but `{prefix}.py` is a link that leads out of this folder's "
                "code and is not taken along; put the file itself here"
            )
    if not installed or _is_found(top, without=unseen):
        return
    if _is_found(top):
        raise SpecError(
            f"entry is `{entry}`, but `{top}` is found through PYTHONPATH only "
            f"({os.pathsep.join(unseen)}), which the ranks do not see; submit from the folder that "
            "holds it, or install it"
        )
    raise SpecError(
        f"entry is `{entry}`, but there is no module `{top}` in this folder's code and none is "
        "installed; submit from the folder that holds it"
    )


def _is_found(module: str, *, without: Sequence[str] = ()) -> bool:
    """Whether this interpreter finds the module, with the folders `without` off its path."""
    hidden = {Path(entry).resolve() for entry in without}
    path = [entry for entry in sys.path if Path(entry).resolve() not in hidden]
    for finder in sys.meta_path:
        # An editable install has a finder of its own, and a built-in module one without a path.
        if finder.find_spec(module, path if finder is PathFinder else None) is not None:
            return True
    return False


@dataclass(frozen=True)
class Copied:
    """What is in the folder now."""

    digest: str
    """Of names, kinds and contents."""
    files: dict[str, str]
    """Name -> sha256 of each file; links are left out."""


def copy(snapshot: Snapshot, target: Path) -> Copied:
    """Copy into the new folder `target`. Not yet durable."""
    target.mkdir()
    total = hashlib.sha256()
    files: dict[str, str] = {}
    for source in sorted(snapshot.sources, key=lambda source: source.name):
        place = target / source.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.path.is_symlink() and _stays_inside(source):
            data = os.fsencode(source.path.readlink())
            place.symlink_to(source.path.readlink())
            kind, digest = b"link", hashlib.sha256(data).hexdigest()
        else:
            data = source.path.read_bytes()
            write_atomic(place, data, durable=False)
            runs = bool(source.path.stat().st_mode & 0o100)
            if runs:
                place.chmod(0o755)
            kind, digest = b"run" if runs else b"file", hashlib.sha256(data).hexdigest()
            files[source.name] = digest
        total.update(b"%s %s %s\n" % (kind, digest.encode(), os.fsencode(source.name)))
    return Copied(f"sha256:{total.hexdigest()}", files)


def _of_repository(root: Path, folder: Path, exclude: list[Path]) -> Snapshot:
    candidates = [
        Source(name, root / name)
        for name in sorted(set(git.listed(root)))
        if not any((root / name).is_relative_to(place) for place in exclude)
    ]
    commit = git.head(root)
    changed = git.changed(root) if commit else {}
    # A secret that was renamed or removed is still in the commit.
    gone = {
        now: old for now, old in changed.items() if has_secret_name(now) or has_secret_name(old)
    }
    secrets = [git.committed(root, old) for old in gone.values() if has_secret_name(old)]
    sources, left_out = _sort_out(candidates, secrets, renamed=gone)
    here = folder.relative_to(root).as_posix()
    # A package may live in src/; a submitter in a subfolder imports from there.
    places = [here if here != "." else "", "", "src"]
    names = [source.name for source in sources]
    import_paths = [
        place
        for place in dict.fromkeys(places)
        if place == "" or any(name.startswith(f"{place}/") for name in names)
    ]
    unsaid = {*gone, *gone.values(), *(changed.keys() & set(left_out))}
    return Snapshot(
        root,
        sources,
        import_paths,
        left_out,
        commit=commit,
        diff=without_keys(git.difference(root, without=sorted(unsaid))) if commit else b"",
        dirty=git.is_dirty(root),
        place=places[0],
    )


def _sort_out(
    candidates: Iterable[Source], secrets: Iterable[bytes], *, renamed: Container[str] = ()
) -> tuple[list[Source], list[str]]:
    """(what is taken, names of what is not). `secrets`: contents that are known to be such,
    `renamed`: names that files with such a name have taken."""
    sources: list[Source] = []
    left_out: list[str] = []
    contents = list(secrets)
    for source in candidates:
        if has_secret_name(source.name) or source.name in renamed:
            left_out.append(source.name)
            if source.path.is_file() and source.size_bytes <= _SECRET_BYTES:
                contents.append(source.path.read_bytes())
        elif _leads_out(source):
            left_out.append(source.name)
        elif source.path.exists():  # tracked, but deleted in the working tree
            sources.append(source)
    _check_size(sources)  # before each is opened
    files = {source.name: source.path for source in sources if source.path.is_file()}
    keys = {name for name, path in files.items() if holds_private_key(path)}
    secret = keys | copies(files, contents)
    left_out += secret
    return [source for source in sources if source.name not in secret], sorted(left_out)


def _beside_entry(folder: Path, entry: str) -> Iterator[Source]:
    """Without git: the entry's package, and the .py files of the folder it lies in."""
    top = _top_module(entry)
    package = folder / top
    if not package.is_dir() and not (folder / f"{top}.py").is_file():
        return
    files = sorted(folder.glob("*.py"))
    if package.is_dir():
        files += _regular_files(package)
    for path in files:
        yield Source(path.relative_to(folder).as_posix(), path)


def _beside_program(folder: Path, program: Sequence[str]) -> Iterator[Source]:
    """Without git: the folder's .py files and packages, and the files that the command names."""
    files = sorted(folder.glob("*.py"))
    for package in sorted(folder.glob("*/__init__.py")):
        files += _regular_files(package.parent)
    for word in program:
        # `conf/run.yaml`, or `--config=conf/run.yaml`.
        path = Path(os.path.normpath(folder / word.rpartition("=")[2]))
        if not PurePosixPath(word).is_absolute() and path.is_relative_to(folder):
            files += [path] if path.is_file() else []
    for path in dict.fromkeys(files):
        yield Source(path.relative_to(folder).as_posix(), path)


def _own_package() -> Iterator[Source]:
    for path in _regular_files(PACKAGE):
        name = f"ftslurm/{path.relative_to(PACKAGE).as_posix()}"
        if not has_secret_name(name):
            yield Source(name, path)


def _regular_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]


def _top_module(entry: str) -> str:
    path = entry[len(OWN_RANK) :] if entry.startswith(OWN_RANK) else entry
    return path.partition(":")[0].partition(".")[0]


def _leads_out(source: Source) -> bool:
    """A link to something that is not in the snapshot. To follow it would copy what nobody took
    for source: a data set, a key."""
    return source.path.is_symlink() and not _stays_inside(source)


def _stays_inside(source: Source) -> bool:
    """Whether a link still means the same inside the snapshot."""
    target = os.fspath(source.path.readlink())
    if PurePosixPath(target).is_absolute():
        return False
    place = os.path.normpath(PurePosixPath(source.name).parent / target)
    return not place.startswith("..")


def _check_size(sources: Sequence[Source]) -> None:
    size = sum(source.size_bytes for source in sources)
    if size <= LIMIT_BYTES:
        return
    biggest = sorted(sources, key=lambda source: -source.size_bytes)[:3]
    raise RunError(
        f"the code to take along has {_mib(size)}, more than {_mib(LIMIT_BYTES)}; the biggest are "
        f"{_list(biggest)}: put what is not source into .gitignore, or elsewhere"
    )


def _list(sources: Iterable[Source]) -> str:
    return ", ".join(f"`{item.name}` ({_mib(item.size_bytes)})" for item in sources)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"
