"""What tests/test_data_loader.py looks at, each in a fork of one process that has torch loaded.

Run as a program: reads the path of a token store and of a folder for the answers, runs every
scenario, writes NAME.json for each, with its result, exit code and duration.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ftslurm.train.cursor import Cursor
from ftslurm.train.loader import GlobalBatches, MicroBatch
from ftslurm.train.token_store import TokenStore

LENGTH = 8
BATCH = 7
DEADLINE_S = 60.0
STORE = Path(sys.argv[1])
ANSWERS = Path(sys.argv[2])


def open_batches(
    *, rank: int = 0, world_size: int = 1, micro: int = 3, workers: int = 0
) -> tuple[Cursor, GlobalBatches]:
    store = TokenStore(STORE, LENGTH)
    cursor = Cursor(len(store), BATCH, 5, snapshot=store.snapshot)
    return cursor, GlobalBatches(store, cursor, rank, world_size, micro, num_workers=workers)


def plain(step: list[MicroBatch]) -> list[list[Any]]:
    return [[m.inputs.tolist(), m.targets.tolist(), m.weights.tolist()] for m in step]


def take(batches: GlobalBatches, count: int) -> list[Any]:
    return [plain(next(batches)) for _ in range(count)]


def worker_pids() -> list[int]:
    return [process.pid or 0 for process in multiprocessing.active_children()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_ranks(workers: int) -> dict[str, Any]:
    """Three ranks over more than an epoch, and the state of torch's generator around it."""
    before = torch.get_rng_state()
    steps = []
    for rank in range(3):
        _, batches = open_batches(rank=rank, world_size=3, micro=2, workers=workers)
        steps.append(take(batches, 12))
        batches.close()
    same = torch.equal(before, torch.get_rng_state())
    return {"steps": steps, "generator_untouched": same, "left": worker_pids()}


def without_workers() -> dict[str, Any]:
    return all_ranks(0)


def with_workers() -> dict[str, Any]:
    return all_ranks(2)


def restore() -> dict[str, Any]:
    """Batches are drawn before the restore (a warm-up), ahead of the cursor, and after it."""
    cursor, batches = open_batches(workers=2)
    straight = take(batches, 5)
    for _ in range(3):
        cursor.advance()
    saved = cursor.state_dict()
    batches.close()
    again, other = open_batches(workers=2)
    take(other, 1)
    position = again.position()
    again.load_state_dict(saved)
    resumed = take(other, 2)
    other.close()
    return {"straight": straight[3:], "resumed": resumed, "before_load": position}


def signals() -> dict[str, Any]:
    """Every stop signal, to every worker, early and in the middle."""
    _, plain_batches = open_batches()
    _, batches = open_batches(workers=2)
    handled: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda got, frame: handled.append(got))
    first = take(batches, 1)
    pids = worker_pids()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        for pid in pids:
            os.kill(pid, number)
    rest = take(batches, 10)
    unblocked = not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    still = worker_pids()
    batches.close()
    return {
        "same": first + rest == take(plain_batches, 11),
        "workers": [len(pids), sorted(pids) == sorted(still)],
        "handlers_kept": unblocked and not handled,
        "left": worker_pids(),
    }


def stuck_worker() -> dict[str, Any]:
    """A worker that does not answer (stopped) is killed at the deadline, and nothing is raised."""
    _, batches = open_batches(workers=2)
    take(batches, 1)
    pids = worker_pids()
    os.kill(pids[0], signal.SIGSTOP)
    started_at = time.monotonic()
    batches.close(timeout_s=0.5)
    return {
        "seconds": time.monotonic() - started_at,
        "alive": [pid for pid in pids if is_alive(pid)],
    }


def exit_without_close() -> dict[str, Any]:
    _, batches = open_batches(workers=2)
    take(batches, 1)
    KEPT.append(batches)
    return {"pids": worker_pids()}


def killed_parent() -> dict[str, Any]:
    """One worker is stopped: it cannot see for itself that its rank is gone."""
    _, batches = open_batches(workers=2)
    take(batches, 2)  # one of each worker: both have set themselves up
    answer("killed_parent", {"pids": worker_pids()})
    os.kill(worker_pids()[0], signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def data_error() -> dict[str, Any]:
    """The store is replaced before the workers open it: the loop gets our error, not a hang."""
    from ftslurm.errors import DataError

    _, batches = open_batches(workers=2)
    STORE.with_suffix(".other").replace(STORE)
    try:
        next(batches)
    except DataError as error:
        batches.close()
        return {"said": "was replaced" in str(error), "left": worker_pids()}
    return {"said": False}


KEPT: list[GlobalBatches] = []
SCENARIOS: list[Callable[[], dict[str, Any]]] = [
    without_workers,
    with_workers,
    restore,
    signals,
    stuck_worker,
    exit_without_close,
    killed_parent,
    data_error,
]


def answer(name: str, result: dict[str, Any]) -> None:
    (ANSWERS / f"{name}.json").write_text(json.dumps(result))


def wait_for(pid: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 124


def main() -> None:
    for scenario in SCENARIOS:
        pid = os.fork()
        if not pid:
            answer(scenario.__name__, scenario())
            return  # to the interpreter's own end, with its exit handlers
        code = wait_for(pid)
        path = ANSWERS / f"{scenario.__name__}.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        gone_by = time.monotonic() + 60
        while any(map(is_alive, result.get("pids", []))) and time.monotonic() < gone_by:
            time.sleep(0.02)
        result["alive_after"] = [pid for pid in result.get("pids", []) if is_alive(pid)]
        for left in result["alive_after"]:
            os.kill(left, signal.SIGKILL)
        answer(scenario.__name__, {**result, "exit_code": code})


if __name__ == "__main__":
    main()
