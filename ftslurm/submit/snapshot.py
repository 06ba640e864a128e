"""The source the ranks import, copied at submit: what is taken and where it is imported from.

Of a git repository all tracked files and the untracked that git does not ignore; elsewhere the .py
files beside the entry and its package; and ftslurm itself. Never a file that looks like it holds
secrets, nor what a link names outside of these. Planning only reads; `copy` writes.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Optional

from ftslurm.errors import RunError, SpecError
from ftslurm.files import write_atomic
from ftslurm.submit.rank import OWN_RANK

LIMIT_BYTES = 64 << 20

PACKAGE = Path(__file__).resolve().parents[1]

_SECRET_NAMES = re.compile(
    r"\.env(\..*)?|.*\.(env|pem|key|p12|pfx|jks|kdbx|keytab)|id_(rsa|dsa|ecdsa|ed25519)(_.*)?|"
    r"\.(netrc|git-credentials|pypirc|npmrc|htpasswd)|(.*[._-])?(secrets?|credentials?)(\.\w+)?",
    re.IGNORECASE,
)
# A module named secrets.py is source, and the run would miss it.
_ALWAYS_SOURCE = (".py", ".pyi")

_GIT_TIMEOUT_S = 120.0


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

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)


def plan_snapshot(folder: Path, *, entry: str, exclude: Sequence[Path] = ()) -> Snapshot:
    """Decide what a run submitted in `folder` takes along. `exclude`: folders that are not code."""
    folder = folder.resolve()
    root = _repository(folder)
    if root is None:
        beside = list(_beside_entry(folder, entry))
        sources = [source for source in beside if not _leads_out(source)]
        left_out = [source.name for source in beside if _leads_out(source)]
        snapshot = Snapshot(folder, sources, [""], left_out)
    else:
        snapshot = _of_repository(root, folder, [path.resolve() for path in exclude])
    if not any(source.name == "ftslurm/__init__.py" for source in snapshot.sources):
        snapshot.sources.extend(_own_package())
    _check_size(snapshot)
    return snapshot


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


def copy(snapshot: Snapshot, target: Path) -> str:
    """Copy into the new folder `target`; the content's sha256. Not yet durable."""
    target.mkdir()
    total = hashlib.sha256()
    for source in sorted(snapshot.sources, key=lambda source: source.name):
        place = target / source.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.path.is_symlink() and _stays_inside(source):
            data = os.fsencode(source.path.readlink())
            place.symlink_to(source.path.readlink())
            kind = b"link"
        else:
            data = source.path.read_bytes()
            write_atomic(place, data, durable=False)
            runs = bool(source.path.stat().st_mode & 0o100)
            kind = b"run" if runs else b"file"
            if runs:
                place.chmod(0o755)
        digest = hashlib.sha256(data).hexdigest()
        total.update(b"%s %s %s\n" % (kind, digest.encode(), os.fsencode(source.name)))
    return f"sha256:{total.hexdigest()}"


def _of_repository(root: Path, folder: Path, exclude: list[Path]) -> Snapshot:
    sources, left_out = [], []
    for name in sorted(set(_listed(root))):
        path = root / name
        if any(path.is_relative_to(place) for place in exclude):
            continue
        source = Source(name, path)
        if _may_be_secret(path) or _leads_out(source):
            left_out.append(name)
        elif path.exists():  # tracked, but deleted in the working tree
            sources.append(source)
    here = folder.relative_to(root).as_posix()
    # A package may live in src/; a submitter in a subfolder imports from there.
    places = [here if here != "." else "", "", "src"]
    names = [source.name for source in sources]
    import_paths = [
        place
        for place in dict.fromkeys(places)
        if place == "" or any(name.startswith(f"{place}/") for name in names)
    ]
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD", fail=False)
    outside = [f":(exclude,literal){name}" for name in left_out]
    return Snapshot(
        root,
        sources,
        import_paths,
        left_out,
        commit=os.fsdecode(commit).strip() or None,
        diff=_git(root, "diff", "HEAD", "--binary", "--", ".", *outside) if commit else b"",
        dirty=bool(_git(root, "status", "--porcelain", "--untracked-files=normal")),
    )


def _listed(root: Path, prefix: str = "") -> Iterator[str]:
    """Names of files that git knows or would take, in submodules too."""
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for raw in listing.split(b"\0"):
        name = os.fsdecode(raw).rstrip("/")
        path = root / name
        if not name:
            continue
        if path.is_dir() and not path.is_symlink():
            if (path / ".git").exists():
                yield from _listed(path, f"{prefix}{name}/")
        else:
            yield prefix + name


def _repository(folder: Path) -> Optional[Path]:
    """Root of the git repository that `folder` lies in."""
    if not any((place / ".git").exists() for place in (folder, *folder.parents)):
        return None
    return Path(os.fsdecode(_git(folder, "rev-parse", "--show-toplevel")).rstrip("\n")).resolve()


def _git(folder: Path, *arguments: str, fail: bool = True) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise RunError(
            f"`{folder}` lies in a git repository but there is no git on PATH; ftslurm asks it "
            "which files are source"
        ) from None
    if done.returncode and fail:
        said = os.fsdecode(done.stderr).strip().splitlines()
        raise RunError(
            f"git {arguments[0]} failed in `{folder}`: {said[-1] if said else 'silently'}"
        )
    return done.stdout


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
        if not _may_be_secret(path):
            yield Source(path.relative_to(folder).as_posix(), path)


def _own_package() -> Iterator[Source]:
    for path in _regular_files(PACKAGE):
        yield Source(f"ftslurm/{path.relative_to(PACKAGE).as_posix()}", path)


def _regular_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]


def _top_module(entry: str) -> str:
    path = entry[len(OWN_RANK) :] if entry.startswith(OWN_RANK) else entry
    return path.partition(":")[0].partition(".")[0]


def _may_be_secret(path: Path) -> bool:
    return path.suffix not in _ALWAYS_SOURCE and bool(_SECRET_NAMES.fullmatch(path.name))


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


def _check_size(snapshot: Snapshot) -> None:
    size = snapshot.size_bytes
    if size <= LIMIT_BYTES:
        return
    biggest = sorted(snapshot.sources, key=lambda source: -source.size_bytes)[:3]
    raise RunError(
        f"the code to take along has {_mib(size)}, more than {_mib(LIMIT_BYTES)}; the biggest are "
        f"{_list(biggest)}: put what is not source into .gitignore, or elsewhere"
    )


def _list(sources: Iterable[Source]) -> str:
    return ", ".join(f"`{item.name}` ({_mib(item.size_bytes)})" for item in sources)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"
