"""Tells a person's own command or web address of what happened to a run: recovery.on_event and
recovery.on_event_url.

Changes nothing about the run: one that fails, or hangs, costs its deadline and a warning, and all
that there is to tell is told at the same time, so that it costs one. An event of an attempt is told
once, however often the attempt is decided on. No secret that the job's
environment or the run's spec holds leaves in it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from ftslurm.errors import FtslurmError, warn
from ftslurm.files import best_effort
from ftslurm.recovery.actions import STOP
from ftslurm.recovery.case import Decision
from ftslurm.run.attempts import append_event, read_attempt, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord
from ftslurm.run.secret import is_secret, open_record, without_secrets
from ftslurm.run.spec import CheckpointSpec, RecoverySpec

STOPPED = "stop"
THIRD_FAILURE = "third_failure"
NO_COMMIT = "no_commit"
EXCLUDED = "excluded"

EVENT_VARIABLE = "FTSLURM_EVENT"
TOLD = "told"
"""Kind of the journal's line, so that an event is told once."""
DEADLINE_S = 5.0
_SHORTEST_SECRET = 8
"""A shorter value is found in a text by chance."""
_OUTPUT_CHARACTERS = 200


def events_of(
    decision: Decision,
    checkpoint: CheckpointSpec,
    *,
    uncommitted_s: Optional[float],
    uncommitted_steps: int,
) -> list[str]:
    """Pure. What was trained and not committed when the attempt ended, in seconds (None: it had not
    come to train) and in steps."""
    kinds = []
    if decision.action == STOP:
        kinds.append(STOPPED)
    if decision.failures_in_a_row == 3:
        kinds.append(THIRD_FAILURE)
    if is_late(checkpoint, uncommitted_s=uncommitted_s, uncommitted_steps=uncommitted_steps):
        kinds.append(NO_COMMIT)
    if decision.exclude:
        kinds.append(EXCLUDED)
    return kinds


def is_late(
    checkpoint: CheckpointSpec, *, uncommitted_s: Optional[float], uncommitted_steps: int
) -> bool:
    """Nothing was committed in two intervals of either kind. Pure."""
    by_clock = uncommitted_s is not None and 0 < 2 * checkpoint.interval_s < uncommitted_s
    return by_clock or 0 < 2 * checkpoint.interval_steps < uncommitted_steps


def uncommitted_s(layout: RunLayout, number: int, *, now_s: float) -> Optional[float]:
    """Since the attempt last committed, or restored: what came before was no training."""
    since: Optional[float] = None
    for event in read_events(layout.attempt(number)):
        if event["kind"] in ("restored", "first_step", "committed"):
            since = float(event["at"])
    return None if since is None else max(0.0, now_s - since)


def tell(
    layout: RunLayout,
    record: RunRecord,
    number: int,
    kinds: Sequence[str],
    facts: Mapping[str, Any],
    *,
    environ: Mapping[str, str] = os.environ,
    now: Callable[[], float] = time.time,
) -> None:
    """Tell whoever is to be told; returns within some seconds, whatever they do."""
    rules = record.spec.recovery
    if not kinds or not (rules.on_event or rules.on_event_url):
        return
    paths = layout.attempt(number)
    told = {
        (event["event"], *event.get("nodes", ()))
        for event in read_events(paths)
        if event["kind"] == TOLD
    }
    with contextlib.suppress(FtslurmError):
        open_record(layout, environ)  # so that without_secrets knows the values
    texts: dict[str, str] = {}
    for kind in kinds:
        # Between two attempts further nodes may be given up, which is another event.
        nodes = list(facts.get("excluded", ())) if kind == EXCLUDED else []
        if (kind, *nodes) in told:
            continue
        message = {
            "schema_version": 1,
            "event": kind,
            "run_id": record.run_id,
            "run_dir": str(layout.root),
            "job_id": _job_id(layout, number),
            "attempt": number,
            "at": now(),
            **facts,
        }
        # Before they are JSON, where a quotation mark in a secret would look different.
        clean = {
            key: redacted(value, environ) if isinstance(value, str) else value
            for key, value in message.items()
        }
        texts[kind] = json.dumps(clean, sort_keys=True)
        with best_effort("not in the journal"):
            append_event(paths, TOLD, now=now, event=kind, **({"nodes": nodes} if nodes else {}))
    for kind, failed in _tell_all(rules, texts, environ):
        warn(f"nobody may have been told of `{kind}`: {redacted(failed, environ)}")


def _tell_all(
    rules: RecoverySpec, texts: Mapping[str, str], environ: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Kinds that failed, each with why. Each way has a deadline of its own, and none waits for
    another."""
    failures: list[tuple[str, str]] = []

    def work(kind: str, way: Callable[[], str]) -> None:
        failed = way()
        if failed:
            failures.append((kind, failed))

    if rules.on_event_url:
        _load_site()
    threads = []
    for kind, text in texts.items():
        ways: list[Callable[[], str]] = []
        if rules.on_event:
            ways.append(functools.partial(_run, rules.on_event, kind, text, environ))
        if rules.on_event_url:
            ways.append(functools.partial(_post, rules.on_event_url, text))
        threads += [threading.Thread(target=work, args=(kind, way), daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def redacted(text: str, environ: Mapping[str, str]) -> str:
    """`text` with the names of environment variables where it held what may be their secrets."""
    text = without_secrets(text)
    for name, value in environ.items():
        if len(value) >= _SHORTEST_SECRET and is_secret(name, value):
            text = text.replace(value, "${oc.env:" + name + "}")
    return text


def _job_id(layout: RunLayout, number: int) -> Optional[str]:
    try:
        return read_attempt(layout, number).job_id
    except (OSError, FtslurmError):
        return None


def _run(argv: Sequence[str], kind: str, text: str, environ: Mapping[str, str]) -> str:
    """Why it failed; empty: it did not."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # ours is the batch script's
            stderr=subprocess.STDOUT,
            env={**environ, EVENT_VARIABLE: kind},
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        return f"recovery.on_event `{argv[0]}` cannot be started ({error.strerror})"
    try:
        said, _ = process.communicate(text, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        # It ignores TERM as we do; and its children hold its output open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return f"recovery.on_event `{argv[0]}` did not end within {DEADLINE_S:.0f} s and was killed"
    if process.returncode == 0:
        return ""
    tail = " ".join(said.split())[-_OUTPUT_CHARACTERS:]
    return f"recovery.on_event `{argv[0]}` ended with code {process.returncode} ({tail})"


@functools.cache
def _load_site() -> None:
    """A job's Python is started without (-S, submit/render.py); some sites add their certificates
    by it (a .pth file, sitecustomize)."""
    if sys.flags.no_site:
        import site

        site.main()


def _post(address: str, text: str) -> str:
    """Why it failed; empty: it did not. The limit is on the whole, not on each read."""
    import urllib.request  # late: most runs post nothing

    outcome: list[str] = []

    def work() -> None:
        request = urllib.request.Request(
            address, data=text.encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S):
                outcome.append("")
        except (OSError, ValueError) as error:
            outcome.append(f"recovery.on_event_url did not take it ({error})")

    thread = threading.Thread(target=work, name="on-event", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return outcome[0] if outcome else f"recovery.on_event_url took longer than {DEADLINE_S:.0f} s"
