"""Files that may hold secrets: by name, by their first bytes, or as copies of such files.

They enter neither a run's copy of the code nor its diff. Source is never taken for one by its name,
or the run would miss its secrets.py; what is written into ordinary source nobody here can tell.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

_NAMES = re.compile(
    r"\.env(rc)?([^a-z0-9].*)?|.*\.(env|pem|key|p12|pfx|jks|kdbx|keytab|ppk)|"
    r"id_(rsa|dsa|ecdsa|ed25519)([._-].*)?|"
    r"[._]netrc|\.(git-credentials|pypirc|npmrc|htpasswd|pgpass|my\.cnf|s3cfg|boto|dockercfg)|"
    r"(.*[._-])?(secrets?|credentials?|passwords?|passwd|passphrase|api[_-]?keys?)(\.\w+)?|"
    r"(.*[._-])?(token|service[_-]account)(\.(txt|json))?|kubeconfig",
    re.IGNORECASE,
)
_FOLDERS = re.compile(
    r"\.(env|ssh|aws|gnupg|docker|kube|azure|secrets?)|secrets?|credentials?", re.IGNORECASE
)
# `server.key.bak`, `.env~`, `#.env#`, `id_rsa.old`
_BACKUP = re.compile(
    r"^#|#$|(~|\.(bak|backup|old|orig|save|copy|tmp|sw[a-p]|\d+))+$", re.IGNORECASE
)
_SOURCE = (".py", ".pyi")

_PRIVATE_KEY = re.compile(
    rb"\s*(-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-)"
)
_KEY_IN_DIFF = re.compile(
    rb"^[-+ ].*(-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-)", re.MULTILINE
)
# No line of a file begins so in a diff: text has a sign before it, binary data has no blanks.
_FILE_IN_DIFF = re.compile(rb"^(?=diff --git )", re.MULTILINE)
_HEAD_BYTES = 512
_LEAST_BYTES = 8
"""Two empty files are no copies of each other."""


def has_secret_name(name: str) -> bool:
    """Of a path with `/`, relative to the code's root."""
    *folders, last = PurePosixPath(name).parts
    if PurePosixPath(last).suffix in _SOURCE:
        return False
    return any(_NAMES.fullmatch(form) for form in (last, _BACKUP.sub("", last))) or any(
        _FOLDERS.fullmatch(folder) for folder in folders
    )


def holds_private_key(path: Path) -> bool:
    """By its first bytes; whatever the file is called."""
    with path.open("rb") as stream:
        return _PRIVATE_KEY.match(stream.read(_HEAD_BYTES)) is not None


def copies(files: Mapping[str, Path], secrets: Iterable[bytes]) -> set[str]:
    """Names of those `files` that have the contents of one of `secrets`."""
    wanted: dict[int, set[bytes]] = {}
    for content in secrets:
        if len(content.strip()) >= _LEAST_BYTES:
            wanted.setdefault(len(content), set()).add(hashlib.sha256(content).digest())
    return {
        name
        for name, path in files.items()
        if (digests := wanted.get(path.stat().st_size)) is not None
        and hashlib.sha256(path.read_bytes()).digest() in digests
    }


def without_keys(diff: bytes) -> bytes:
    """git's diff without the files in whose lines a private key begins, or began."""
    files = _FILE_IN_DIFF.split(diff)
    return b"".join(file for file in files if not _KEY_IN_DIFF.search(file))
