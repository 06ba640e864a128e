"""Where no browser is to be had, that is said once; two sessions do not fetch at the same time."""

import fcntl
import threading

import chromium
import pytest


@pytest.fixture(autouse=True)
def nothing_on_path(tmp_path, monkeypatch):
    """An apt-get of root on Debian that is asked, and has no network."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(chromium, "CACHE", tmp_path / "chromium")
    monkeypatch.setattr(chromium, "FETCH_S", 1.0)
    monkeypatch.setattr(chromium, "PROGRAMS", ())
    monkeypatch.setattr(chromium.os, "getuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    chromium.why_not_fetched.cache_clear()
    yield
    chromium.why_not_fetched.cache_clear()


def program(tmp_path, name, body):
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("body", "why"),
    [("exec sleep 600", "was not done within 1 s"), ("exit 100", "apt-get has none to fetch")],
)
def test_without_network_tests_are_skipped_and_it_is_tried_once(tmp_path, body, why):
    program(tmp_path, "dpkg-deb", "exit 1")
    program(tmp_path, "apt-get", f"echo $1 >>{tmp_path}/asked; {body}")
    for _ in range(3):
        with pytest.raises(pytest.skip.Exception, match=why):
            chromium.find_chromium()
    asked = (tmp_path / "asked").read_text().split()
    assert asked == (["install"] if "sleep" in body else ["install", "update", "install"])


def test_one_session_waits_for_another_that_fetches(tmp_path):
    program(tmp_path, "dpkg-deb", "exit 1")
    program(tmp_path, "apt-get", f"touch {tmp_path}/asked; exit 1")
    with (tmp_path / "chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetched = threading.Timer(0.3, lambda: (chromium.CACHE.mkdir(), lock.close()))
        fetched.start()
        assert chromium.why_not_fetched() == ""
        fetched.join()
    assert not (tmp_path / "asked").exists()
