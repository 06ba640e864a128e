"""Prometheus's own judge of rules and metrics: found on PATH, or taken out of Debian's package."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CACHE = Path(sys.prefix) / "promtool"


def find_promtool():
    """Its path. Skips where it is not to be had: only root on Debian can fetch it."""
    found = shutil.which("promtool")
    if found:
        return Path(found)
    if not CACHE.exists():
        if os.getuid() != 0 or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            pytest.skip("no promtool on PATH, and none can be fetched without root on Debian")
        _fetch()
    return CACHE


def _fetch():
    """Out of the package, which is not installed: it would start a service."""
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        for argv in (["apt-get", "update", "-qq"], []):
            done = _run("apt-get", "-qq", "download", "prometheus", cwd=folder)
            if done.returncode == 0:
                break
            if argv:
                _run(*argv, cwd=folder)
        (package,) = Path(folder).glob("prometheus_*.deb")
        with (Path(folder) / "files.tar").open("wb") as tar:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", package], stdout=tar, check=True)
        _run("tar", "-xf", "files.tar", "./usr/bin/promtool", cwd=folder)
        (Path(folder) / "usr" / "bin" / "promtool").rename(CACHE)


def _run(*argv, cwd):
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=100)
