"""Makes an image (see image.py) of a Slurm version from Debian's packages: by the machine's own
apt, from its own mirror, with its own keys; nothing is installed.

An image is made under another name and renamed when it is complete and its version is right. It
is kept until somebody removes its folder.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import config
import image
from errors import ClusterError
from processes import attempt, run

SUITES = {"24.11": "trixie", "26.05": "sid"}
"""Which of Debian's suites has a version. sid moves on: what it brought is looked at."""

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurm-wlm-mysql-plugin",
)
PLUGINS = "slurm-wlm"  # the folder's name below usr/lib/TRIPLET
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
DOWNLOAD_TIMEOUT_S = 900


def fetch(version: str) -> Path:
    """The image of a version; made on the first call (10 s and 30 MB on a fast network)."""
    place = image.folder_of(version)
    if place.is_dir():
        return place
    if version not in SUITES:
        raise ClusterError(
            f"no suite of Debian is known to have Slurm {version}; choose one of "
            f"{', '.join(SUITES)}, or leave --slurm-version out for the installed one"
        )
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _locked(place.parent):
        if not place.is_dir():  # the one we waited for has not made it
            _make(version, place)
    return place


def _make(version: str, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f"{version}.new-") as folder:
        work = Path(folder)
        packages = _download(work, SUITES[version])
        new = work / "image"
        new.mkdir(mode=0o755)
        for package in packages:
            _unpack(package, new)
        _hide_installed_plugins(new)
        _refuse_other_version(new, version)
        image.mark(new, version)
        new.rename(place)


def _download(work: Path, suite: str) -> list[Path]:
    """The packages and all they depend on, as on a machine with nothing installed."""
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    source = f"deb {signed}{_mirror()} {suite} main\n"
    (work / "sources.list").write_text(source, encoding="utf-8")
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State": work,
        "Dir::State::Lists": work / "lists",
        "Dir::State::Status": work / "status",
        "Dir::Cache": work / "cache",
        # apt's own download user cannot enter a folder of root's; the packages are root's anyway.
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
    }
    lines = [f'{name} "{value}";\n' for name, value in options.items()]
    (work / "apt.conf").write_text("".join(lines), encoding="utf-8")
    # Read after the machine's own configuration, whose proxy and keys so stay in force.
    environment = {**os.environ, "LC_ALL": "C", "APT_CONFIG": str(work / "apt.conf")}
    for words in (["update", "--error-on=any"], ["install", "--download-only", *PACKAGES]):
        done = attempt(
            ["apt-get", "--yes", "--quiet", *words], env=environment, timeout_s=DOWNLOAD_TIMEOUT_S
        )
        if done.returncode != 0:
            raise ClusterError(
                f"`apt-get {' '.join(words)}` could not have Debian {suite} from this machine's "
                f"mirror, which may no longer carry it: {done.stderr.strip()}"
            )
    return sorted((work / "cache" / "archives").glob("*.deb"))


def _mirror() -> str:
    """The repository this machine's own Debian comes from."""
    release = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    own = dict(line.split("=", 1) for line in release if "=" in line).get("VERSION_CODENAME", "")
    chosen = ["Created-By: Packages", f"Codename: {own}"]
    found = run(["apt-get", "indextargets", "--format=$(REPO_URI)", *chosen]).split()
    if not found:
        raise ClusterError(
            "apt knows no repository of this machine's Debian; run `apt-get update` first"
        )
    return found[0]


def _unpack(package: Path, new: Path) -> None:
    """Unpack Slurm, and of what it depends on the shared libraries: programs and data files of
    the machine itself (perl, passwd, systemd) stay the machine's."""
    fields = run(["dpkg-deb", "--field", str(package), "Package", "Multi-Arch"])
    found = dict(line.split(": ", 1) for line in fields.splitlines())
    # Debian marks by `same` what may be installed for two architectures at once: libraries.
    if found["Package"].startswith("slurm") or found.get("Multi-Arch") == "same":
        run(["dpkg-deb", "--extract", str(package), str(new)], timeout_s=120)


def _hide_installed_plugins(new: Path) -> None:
    """Slurm loads what it finds in its plugin folder: nothing of another version may show there."""
    for folder in new.glob(f"usr/lib/*/{PLUGINS}"):
        os.setxattr(folder, "trusted.overlay.opaque", b"y")


def _refuse_other_version(new: Path, version: str) -> None:
    said = run(image.inside(new, ["slurmctld", "-V"]))
    found = config.format_version(config.parse_version(said))
    if found != version:
        raise ClusterError(
            f"Debian {SUITES[version]} on this machine's mirror has Slurm {found}, not {version}; "
            f"use a mirror that still has {version}, or another --slurm-version"
        )
    python = [path.name for path in (new / "usr" / "bin").glob("python3*")]
    if python:
        raise ClusterError(
            f"Slurm {version} brings {python[0]}, which would hide this machine's interpreter "
            "inside an image; nodes could not run its venv"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
