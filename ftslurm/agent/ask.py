"""Ask the agents' leader of a job one question and wait for its answer, from the batch script.

A job without agents, or whose leader does not answer in time, gives None: whoever asks then does
as if there were none. Never raises for a leader that is away or for a file that is not there.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.agent.wire import Channel, Message, WireError
from ftslurm.errors import FormatError
from ftslurm.files import read_json
from ftslurm.run.layout import RunLayout

KEY_BYTES = 32


@dataclass(frozen=True)
class Address:
    """Where the leader of a job is reached."""

    node: str
    host: str
    port: int
    key: bytes
    restart_count: int = 0
    """Of the job when this leader began: a requeued job has another leader."""
    step_id: str = ""
    """Of the agents' job step: one that is started again has another leader."""


def address_file(layout: RunLayout, job_id: str) -> Path:
    return layout.submit / f"agents-{job_id}.json"


def key_file(layout: RunLayout, job_id: str) -> Path:
    return layout.submit / f"agents-{job_id}.key"


def read_address(layout: RunLayout, job_id: str) -> Optional[Address]:
    """None: no leader has begun in this job."""
    try:
        record = read_json(address_file(layout, job_id))
        key = bytes.fromhex(key_file(layout, job_id).read_text())
        return Address(
            node=str(record["leader"]),
            host=str(record["host"]),
            port=int(record["port"]),
            key=key,
            restart_count=int(record["restart_count"]),
            step_id=str(record.get("step_id", "")),
        )
    except (OSError, FormatError, ValueError, KeyError):
        return None


def restart_count(environ: Mapping[str, str]) -> int:
    """How often the job that we run in was started before."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def ask(
    layout: RunLayout, job_id: str, question: dict[str, Any], timeout_s: float
) -> Optional[dict[str, Any]]:
    """The leader's answer; None: there is no leader to ask, or it has not answered."""
    address = read_address(layout, job_id)
    if address is None or address.restart_count != restart_count(os.environ):
        return None
    try:
        return exchange(
            address.host, address.port, address.key, {"t": "ask", **question}, timeout_s
        )
    except (OSError, WireError):
        return None


def exchange(host: str, port: int, key: bytes, message: Message, timeout_s: float) -> Message:
    """Connect, say `message`, and return the first message that comes back. OSError when nobody is
    there, TimeoutError (a kind of it) when nothing comes, WireError for a stranger."""
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout=timeout_s) as sock:
        channel = Channel(key, is_server=False)
        sock.sendall(channel.greeting)
        is_sent = False
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no answer from {host} within {timeout_s:g} s")
            sock.settimeout(left_s)
            data = sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError(f"{host} has closed the connection")
            messages = channel.feed(data)
            if channel.is_open and not is_sent:
                sock.sendall(channel.seal(message))
                is_sent = True
            if messages:
                return messages[0]
