"""A browser without a screen: found on PATH, or taken out of Debian's packages.

They are unpacked into the environment and not installed: 118 MiB to fetch, half a minute, once, by
one of the test sessions that run at a time. Where they are not to be had, one test says why and is
skipped, and those behind it are without asking again.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import pytest

CACHE = Path(sys.prefix) / "chromium"
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/pulseaudio", "usr/lib/chromium")
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PAGE_S = 60
FETCH_S = 150
"""All commands of a fetch together."""


class NotToBeHad(Exception):
    """Why there is no browser."""


def find_chromium():
    """argv and environment; skips where it is not to be had."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found:
        return [found], dict(os.environ)
    why = why_not_fetched()
    if why:
        pytest.skip(f"no chromium on PATH, and {why}")
    libraries = ":".join(str(CACHE / folder) for folder in LIBRARIES)
    return [str(CACHE / "usr/lib/chromium/chromium")], {**os.environ, "LD_LIBRARY_PATH": libraries}


def browse(page, *options, width=1200, height=2000):
    """What it prints on stdout of the page, e.g. with --dump-dom, after its scripts have run."""
    argv, environ = find_chromium()
    with tempfile.TemporaryDirectory() as profile:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--hide-scrollbars", f"--user-data-dir={profile}",
                 f"--window-size={width},{height}", *options, f"file://{page}"]  # fmt: skip
        done = subprocess.run(
            [*argv, *words], env=environ, capture_output=True, text=True, timeout=PAGE_S, check=True
        )
    return done.stdout


@lru_cache(maxsize=1)
def why_not_fetched():
    """Empty: it lies in the cache. Asked once of a session."""
    deadline = time.monotonic() + FETCH_S
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with CACHE.with_suffix(".lock").open("w") as lock:
        try:
            _wait_for(lock, deadline)
            if not CACHE.exists():
                _fetch(deadline)
        except NotToBeHad as error:
            return str(error)
    return ""


def _wait_for(lock, deadline):
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotToBeHad(f"another session fetches it for {FETCH_S:g} s") from None
            time.sleep(0.2)


def _fetch(deadline):
    if os.getuid() != 0 or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NotToBeHad("none can be fetched without root on Debian")
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        # A list of packages that is days old names files that are gone.
        if not _download(folder, deadline):
            _run("apt-get", "update", "-qq", cwd=folder, deadline=deadline)
            if not _download(folder, deadline):
                raise NotToBeHad("apt-get has none to fetch")
        unpacked = Path(folder) / "unpacked"
        for package in Path(folder).glob("*.deb"):
            done = _run("dpkg-deb", "--extract", package, unpacked, cwd=folder, deadline=deadline)
            if done.returncode != 0:
                raise NotToBeHad(f"{package.name} cannot be unpacked: {done.stderr.strip()}")
        unpacked.rename(CACHE)


def _download(folder, deadline):
    """It and what it needs that is not installed; whether all of it came."""
    said = _run("apt-get", "install", "--simulate", "--no-install-recommends", "chromium",
                cwd=folder, deadline=deadline)  # fmt: skip
    wanted = [line.split()[1] for line in said.stdout.splitlines() if line.startswith("Inst ")]
    if not wanted:
        return False
    done = _run("apt-get", "-qq", "download", *wanted, cwd=folder, deadline=deadline)
    return done.returncode == 0


def _run(*argv, cwd, deadline):
    left_s = max(1.0, deadline - time.monotonic())
    try:
        return subprocess.run(
            argv, cwd=cwd, capture_output=True, text=True, timeout=left_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotToBeHad(f"`{argv[0]}` was not done within {FETCH_S:g} s") from None
