"""`ftslurm data`: make token stores from text, and say what a store holds.

A file that is named is taken as it is. A folder gives every regular file below it, sorted by name
at each level, but hidden ones, links and binary files (a NUL in the first 8 KiB: git's rule); how
many were left out is said. Memory is bounded whatever the size. An existing store is never
replaced unasked. numpy and h5py are imported once the arguments are understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftslurm.errors import EXIT_OK, DataError, UsageError

if TYPE_CHECKING:
    from ftslurm.train.token_writer import TokenWriter

_BLOCK_BYTES = 1 << 20
_BINARY_PROBE_BYTES = 8192
_PROGRESS_S = 5.0
# Not text of the library itself, or not there on every machine (Debian packages tests apart).
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """One file to be read, and the name it is known by in the sources digest."""

    name: str
    path: Path


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.verb == "describe":
        return _describe(options)
    out = Path(options.out)
    if options.python_stdlib:
        if options.sources or options.force or options.tokenizer != "bytes":
            raise UsageError("--python-stdlib takes only OUT.h5; leave the rest out")
        report = build_python_stdlib(out)
    else:
        if not options.sources:
            raise UsageError(f"no text to build `{out}` from; write SOURCE... OUT.h5")
        report = build(
            [Path(source) for source in options.sources],
            out,
            tokenizer=options.tokenizer,
            replace=options.force,
        )
    _show(report, as_json=options.json)
    return EXIT_OK


def build(
    sources: list[Path], out: Path, *, tokenizer: str = "bytes", replace: bool = False
) -> dict[str, Any]:
    """Write the text of `sources` to `out`; returns what `describe` says of it."""
    if out.exists() and not replace:
        raise UsageError(f"`{out}` exists; --force replaces it, or name another file")
    missing = [str(source) for source in sources if not source.exists()]
    if missing:
        raise DataError(f"no such file or folder: `{'`, `'.join(missing)}`")
    return _write(out, list_documents(sources), tokenizer)


def build_python_stdlib(out: Path) -> dict[str, Any]:
    """The default data: the source text of this Python's standard library, byte tokens.

    An existing whole store is left as it is. Safe to call from many processes at once: each writes
    the same tokens under a name of its own, and the last one's file stays.
    """
    from ftslurm.train.token_store import describe

    if out.exists():
        return describe(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    return _write(out, list_stdlib(Path(sysconfig.get_paths()["stdlib"])), "bytes")


def list_documents(sources: Iterable[Path]) -> Iterator[Document]:
    """The files to read, in the order they are read."""
    left_out = 0
    for source in sources:
        if not source.is_dir():
            yield Document(source.name, source)
            continue
        for path in _files_below(source):
            if _is_binary(path):
                left_out += 1
            else:
                yield Document(f"{source.name}/{path.relative_to(source).as_posix()}", path)
    if left_out:
        _say(f"left out {left_out} binary files")


def list_stdlib(folder: Path) -> Iterator[Document]:
    """The library's own modules; no tests, no installed packages, nothing about this machine."""
    for path in _files_below(folder):
        name = path.relative_to(folder)
        generated = name.name.startswith("_sysconfigdata")
        if name.suffix == ".py" and not generated and not _STDLIB_LEFT_OUT & set(name.parts):
            yield Document(name.as_posix(), path)


def _write(out: Path, documents: Iterable[Document], tokenizer: str) -> dict[str, Any]:
    from ftslurm.train.token_store import describe
    from ftslurm.train.token_writer import writing_store
    from ftslurm.train.tokenizer import open_tokenizer

    with writing_store(out, open_tokenizer(tokenizer)) as writer:
        started_at = told_at = time.monotonic()
        for document in documents:
            _add(writer, document, tokenizer)
            if time.monotonic() - told_at > _PROGRESS_S:
                told_at = time.monotonic()
                _say(f"{_counts(writer)} after {told_at - started_at:.0f} s")
    _say(f"wrote `{out}`: {_counts(writer)} in {time.monotonic() - started_at:.1f} s")
    return describe(out)


def _add(writer: TokenWriter, document: Document, tokenizer: str) -> None:
    try:
        writer.add_document(document.name, _read_blocks(document.path))
    except UnicodeDecodeError as error:
        raise DataError(
            f"`{document.path}` is not UTF-8 ({error.reason}), which tokenizer `{tokenizer}` "
            "needs; convert it, leave it out, or use `--tokenizer bytes`"
        ) from None


def _read_blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except OSError as error:
        raise DataError(f"cannot read `{path}`: {error.strerror}; it was to go in") from None


def _files_below(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise DataError(f"cannot read folder `{folder}`: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _is_binary(path: Path) -> bool:
    return b"\0" in next(_read_blocks(path), b"")[:_BINARY_PROBE_BYTES]


def _counts(writer: TokenWriter) -> str:
    return f"{writer.num_tokens:,} tokens of {writer.num_documents:,} documents"


def _describe(options: argparse.Namespace) -> int:
    from ftslurm.train.token_store import describe

    report = describe(Path(options.file), verify=options.verify)
    if options.verify:
        _say("every token has been read and is what was written")
    _show(report, as_json=options.json)
    return EXIT_OK


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, sort_keys=True, indent=1))  # noqa: T201
        return
    for name, value in report.items():
        print(f"{name:18}{value:,}" if isinstance(value, int) else f"{name:18}{value}")  # noqa: T201


def _say(text: str) -> None:
    print(f"ftslurm data: {text}", file=sys.stderr)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftslurm data",
        description="Make token stores from text, and say what one holds.",
        epilog="example: ftslurm data build notes/ book.txt text.h5",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    make = verbs.add_parser("build", help="write a token store from text files and folders")
    make.add_argument("sources", nargs="*", metavar="SOURCE", help="text file or folder")
    make.add_argument("out", metavar="OUT.h5")
    make.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="bytes|FILE.json",
        help="byte tokens (default), or a file of the tokenizers library",
    )
    make.add_argument(
        "--python-stdlib",
        action="store_true",
        help="in place of SOURCE: the text of this Python's standard library; does nothing when "
        "OUT.h5 is there",
    )
    make.add_argument("--force", action="store_true", help="replace OUT.h5")
    make.add_argument("--json", action="store_true")
    tell = verbs.add_parser("describe", help="say what a token store holds")
    tell.add_argument("file", metavar="FILE.h5")
    tell.add_argument("--verify", action="store_true", help="read and check every token")
    tell.add_argument("--json", action="store_true")
    return parser
