"""The options of cluster.py that are a cluster's settings, and how their values are written."""

from __future__ import annotations

import argparse
import re
from typing import Optional

from config import HEALTH_CHECK_INTERVAL_S
from identity import MAX_NODES
from preflight import PLAIN_PATH


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--send-user-signal",
        type=on_off,
        metavar="on|off",
        help="preemption sends a job's own --signal first instead of TERM (default off)",
    )
    parser.add_argument(
        "--grace-s",
        type=_seconds,
        metavar="N",
        help="GraceTime of partition low (default 60)",
    )
    parser.add_argument(
        "--kill-wait-s", type=_seconds, metavar="N", help="KillWait: TERM to KILL (default 5)"
    )
    parser.add_argument(
        "--slurmd-timeout-s",
        type=_seconds,
        metavar="N",
        help="SlurmdTimeout: silence after which a node is down (default 20)",
    )
    for name, text in (
        ("prolog", "what each node runs as root before a job has it; empty (default): nothing"),
        ("epilog", "the same when a job has left it"),
        ("health-check", f"the same every {HEALTH_CHECK_INTERVAL_S} s"),
    ):
        parser.add_argument(f"--{name}", type=_program, metavar="PATH", help=text)
    for name, text in (
        ("job-requeue", "JobRequeue: jobs that ask for nothing may be requeued (default on)"),
        ("strip-requeue", "the site takes --requeue away from every new job (default off)"),
        ("scontrol", "nodes have the command scontrol (default on)"),
        ("nohold-on-prolog-fail", "a job whose prolog failed is not held (default off)"),
        ("expedited-requeue", "jobs may ask for --requeue=expedite (25.11 and later; default off)"),
    ):
        parser.add_argument(f"--{name}", type=on_off, metavar="on|off", help=text)
    parser.add_argument(
        "--requeue-delay-s",
        type=_seconds,
        metavar="N",
        help="requeue_delay: how long a requeued job waits (25.11 and later; default 120)",
    )


def node_count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 1 <= int(text) <= MAX_NODES:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 1 to {MAX_NODES}")
    return int(text)


def _program(text: str) -> str:
    if text and not PLAIN_PATH.fullmatch(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not an absolute path of plain characters")
    return text


def _seconds(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds")
    return int(text)


def on_off(text: str) -> Optional[bool]:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"`{text}` is not `on` or `off`")
    return text == "on"
