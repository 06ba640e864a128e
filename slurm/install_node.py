"""Put the nodes' own copy of `ftslurm health` where root alone can change it.

    python3 slurm/install_node.py --prefix /opt/ftslurm [--settings health.json]

makes PREFIX/lib (modules, standard library only), PREFIX/bin/ftslurm-health, PREFIX/site/*.sh for
slurm.conf and PREFIX/etc/health.json. All belongs to root, and so does every folder above. Modules
are staged and take effect by one rename: a look that runs meanwhile ends with the modules it began
with, and an installation that is cut off has changed nothing. Settings that are there stay, unless
others are given.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

_HERE = Path(__file__).resolve().parent
_BESIDE = _HERE.parent / "ftslurm"
PACKAGE = _BESIDE if _BESIDE.is_dir() else _HERE.parent
"""In a checkout it stands beside slurm/, a wheel has slurm/ inside it."""
sys.path.insert(0, str(PACKAGE.parent))

from ftslurm.errors import FtslurmError, RunError, UsageError, warn  # noqa: E402
from ftslurm.files import encode_json  # noqa: E402
from ftslurm.health.root_only import check_root_only, check_way_to, others_may_write  # noqa: E402
from ftslurm.health.settings import HealthSettings  # noqa: E402
from ftslurm.health.settings_file import read_settings, to_record  # noqa: E402

SITE = _HERE / "site"
ALONE = ("__init__.py", "errors.py", "faults.py", "files.py")
"""What the health room imports from outside of itself."""
PYTHONS = ("/usr/bin/python3", "/usr/libexec/platform-python")
RELEASES, LIB, COMMAND = "releases", "lib", "ftslurm-health"
FOLDERS = ("bin", "etc", "site", RELEASES)
KEPT = 2
"""Releases: the new one, and the one before for looks that still run."""

_EPILOG = """examples:
  make install-node PREFIX=/opt/ftslurm ARGS='health=shadow health.gpus_per_node=8'
  python3 slurm/install_node.py --prefix /opt/ftslurm        an upgrade; the settings stay"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Install the nodes' own copy of `ftslurm health`, as root.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prefix", type=Path, required=True, help="a folder of its own")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="for those that are there")
    parser.add_argument("--python", type=Path, help=f"3.9 or newer; default {' or '.join(PYTHONS)}")
    options = parser.parse_args()
    try:
        print(install(options.prefix, options.settings, options.python))  # noqa: T201
    except FtslurmError as error:
        print(f"install-node: error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


def install(prefix: Path, settings: Optional[Path], python: Optional[Path]) -> str:
    """Install or upgrade; what was done, as a sentence."""
    if os.geteuid() != 0:
        raise UsageError("only root can install what root is to run; use sudo")
    os.umask(0o022)
    _check_sources()
    interpreter = _interpreter(python)
    facts = {"python": str(interpreter), **_slurm()}
    _check_prefix(prefix)
    record = _settings(prefix, settings)
    with _one_at_a_time(prefix):
        release = _stage(prefix, interpreter)
        _write(prefix / "etc" / "health.json", record, 0o644)
        _point(prefix / LIB, release)
        for script in sorted(SITE.glob("*.sh")):
            text = script.read_text()
            if script.stem == COMMAND:
                _write(prefix / "bin" / COMMAND, _with_facts(text, facts), 0o755)
            else:
                _write(prefix / "site" / script.name, text.encode(), 0o755)
        _remove_old(prefix)
    mode = json.loads(record)["mode"]
    return f"{prefix / 'bin' / COMMAND} is installed ({release.name}), mode {mode}"


def _sources() -> list[Path]:
    """The modules that are copied."""
    return [*(PACKAGE / alone for alone in ALONE), *(PACKAGE / "health").glob("*.py")]


def _check_sources() -> None:
    """UsageError unless they, the scripts and the way to them are root's or of who called sudo, and
    nobody else may write there: what they say will run as root on every node."""
    sudo = os.environ.get("SUDO_UID", "")
    trusted = {0, int(sudo)} if sudo.isdecimal() else {0}
    files = [Path(__file__), *_sources(), *SITE.glob("*.sh")]
    for place in sorted({*files, *(parent for file in files for parent in file.parents)}):
        found = place.lstat()
        is_folder = place not in files
        is_open = others_may_write(found.st_mode, sticky_is_safe=is_folder)
        if found.st_uid not in trusted or is_open:
            raise UsageError(
                f"root must not install from `{place}`: user {found.st_uid} or others may write "
                f"there (mode {stat.S_IMODE(found.st_mode):04o}); use a checkout of root's, or "
                "chmod -R go-w it and call sudo as its owner"
            )


def _check_prefix(prefix: Path) -> None:
    """UsageError unless it is, or can become, root's alone; makes it."""
    if not prefix.is_absolute() or ".." in prefix.parts or prefix == Path("/"):
        raise UsageError(f"--prefix `{prefix}` has to be an absolute path, such as /opt/ftslurm")
    missing = [place for place in (prefix, *prefix.parents) if not os.path.lexists(place)]
    try:
        check_way_to(missing[-1] if missing else prefix)
        for place in (prefix, *(prefix / name for name in FOLDERS)):
            if place.exists():
                check_root_only(place)
    except FtslurmError as error:
        raise UsageError(f"--prefix `{prefix}` is not safe: {error}") from None
    if not missing and any(prefix.iterdir()) and not (prefix / RELEASES).is_dir():
        raise UsageError(f"--prefix `{prefix}` holds something else; name a folder of its own")
    for name in FOLDERS:
        (prefix / name).mkdir(parents=True, exist_ok=True)


def _interpreter(given: Optional[Path]) -> Path:
    """The Python that root will run: 3.9 or newer, and it and its library root's alone."""
    found = [given] if given else [path for path in map(Path, PYTHONS) if path.exists()]
    if not found:
        raise UsageError(f"there is no {' and no '.join(PYTHONS)}; name one with --python")
    python = found[0]
    code = "import sys, os; print(*sys.version_info[:2], os.path.dirname(os.__file__))"
    try:
        asked = [str(python), "-I", "-S", "-c", code]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
        major, minor, library = said.strip().split(" ", 2)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UsageError(f"`{python}` is no Python that runs ({error}); see --python") from None
    if (int(major), int(minor)) < (3, 9):
        raise UsageError(f"`{python}` is Python {major}.{minor}; 3.9 or newer, by --python")
    for place in (python, Path(library)):
        _check("run", place, "see --python")
    return python


def _slurm() -> dict[str, str]:
    """Where Slurm is, for this site: a HealthCheckProgram is told nothing but SLURMD_NODENAME."""
    facts = {}
    scontrol, conf = shutil.which("scontrol"), os.environ.get("SLURM_CONF")
    if scontrol is None:
        warn(
            "scontrol is not on PATH, so nodes look for it in /usr/bin; else install again with it"
        )
    elif Path(scontrol).parent not in map(Path, ("/usr/sbin", "/usr/bin", "/sbin", "/bin")):
        _check("use", Path(scontrol))
        facts["slurm_bin"] = str(Path(scontrol).parent)
    if conf:
        _check("use", Path(conf))
        facts["slurm_conf"] = conf
    return facts


def _check(verb: str, path: Path, hint: str = "give it to root, or name another") -> None:
    try:
        check_root_only(path)
    except (FtslurmError, OSError) as error:
        raise UsageError(f"root must not {verb} `{path}`: {error}; {hint}") from None


def _with_facts(text: str, facts: dict[str, str]) -> bytes:
    """A script whose lines `NAME=...` say what is so at this site."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        name, equals, _ = line.partition("=")
        if equals and name in facts:
            lines[at] = f"{name}={shlex.quote(facts[name])}"
    return ("\n".join(lines) + "\n").encode()


def _settings(prefix: Path, given: Optional[Path]) -> bytes:
    """What etc/health.json is to hold: what is given, else what is there, else the defaults."""
    there = prefix / "etc" / "health.json"
    path = given or (there if there.exists() else None)
    if path is None:
        return encode_json(to_record(HealthSettings()))
    settings, complaint = read_settings(path)
    if complaint:
        raise UsageError(f"{complaint}; make it by `ftslurm health settings --out FILE`")
    return encode_json(to_record(settings))


@contextlib.contextmanager
def _one_at_a_time(prefix: Path) -> Iterator[None]:
    fd = os.open(prefix / RELEASES, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(f"another installation into `{prefix}` is under way; wait for it") from None
    else:
        yield
    finally:
        os.close(fd)


def _stage(prefix: Path, interpreter: Path) -> Path:
    """A release as a folder of its own, whole and on the device."""
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(2).hex()}"
    release, staged = prefix / RELEASES / name, prefix / RELEASES / f".{name}"
    try:
        (staged / PACKAGE.name / "health").mkdir(parents=True)
        for source in _sources():
            target = staged / source.relative_to(PACKAGE.parent)
            shutil.copyfile(source, target)
            target.chmod(0o644)
        _compile(staged, release, interpreter)
        os.sync()
        staged.rename(release)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return release


def _compile(staged: Path, release: Path, interpreter: Path) -> None:
    """By the interpreter that will run it: a probe must never write beside its modules."""
    options = ["-q", "-s", str(staged), "-p", str(release), str(staged)]
    argv = [str(interpreter), "-I", "-S", "-m", "compileall", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-300:]
        raise RunError(f"`{interpreter}` cannot compile the modules ({said}); nothing was changed")


def _point(link: Path, release: Path) -> None:
    """Exchange what `link` leads to in one step."""
    new = link.with_name(f".{link.name}.{os.urandom(4).hex()}")
    new.symlink_to(release.relative_to(link.parent))
    new.replace(link)


def _write(path: Path, data: bytes, mode: int) -> None:
    """In one step, with its mode: Slurm drains a node whose prolog it cannot execute."""
    new = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with new.open("xb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _remove_old(prefix: Path) -> None:
    """All but the newest releases, and what installations that were cut off have left."""
    names = sorted(place.name for place in (prefix / RELEASES).iterdir())
    # By its link, as names say nothing of the order within one second.
    current = (prefix / LIB).resolve().name
    others = [name for name in names if not name.startswith(".") and name != current]
    for name in set(names) - {current, *others[1 - KEPT :]}:
        shutil.rmtree(prefix / RELEASES / name)


if __name__ == "__main__":
    sys.exit(main())
