"""A script as people write them for torchrun, without torch: it meets its peers by RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT and exchanges a number with all of them in each step.

    script.py STEPS STEP_S [look]

A step takes STEP_S until the script has been started three times, and no time from then on: nothing
is over before somebody has acted on it. Rank 0 saves every fifth step into FTSLURM_RESUME_DIR, and
says so: then all ranks have taken steps. With `look` it uses ftslurm's three lines: it
also asks whether to stop, agrees on the answer in the exchange, and then saves that very step.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
STATE = Path(os.environ["FTSLURM_RESUME_DIR"]) / "state.json"


def meet():
    """Rank 0: a stream to each peer; another rank: its stream to rank 0."""
    if RANK == 0:
        with socket.create_server(("", ADDRESS[1]), backlog=WORLD_SIZE) as server:
            server.settimeout(60)
            return [server.accept()[0].makefile("rw") for _ in range(WORLD_SIZE - 1)]
    deadline = time.monotonic() + 60
    while True:
        try:
            return [socket.create_connection(ADDRESS, timeout=60).makefile("rw")]
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def exchange(peers, value, wants_to_stop):
    """(sum of all ranks' values, whether any of them wants to stop)."""
    if RANK:
        say(peers[0], [value, wants_to_stop])
        return hear(peers[0])
    words = [[value, wants_to_stop], *(hear(peer) for peer in peers)]
    answer = [sum(word[0] for word in words), any(word[1] for word in words)]
    for peer in peers:
        say(peer, answer)
    return answer


def say(peer, word):
    peer.write(json.dumps(word) + "\n")
    peer.flush()


def hear(peer):
    line = peer.readline()
    if not line:
        raise ConnectionError(f"rank {RANK} has lost a peer")
    return json.loads(line)


def save(step, total):
    if RANK == 0:
        new = STATE.with_suffix(".new")
        new.write_text(json.dumps([step, total]))
        new.replace(STATE)
        print(f"saved {step}", flush=True)


def main(steps, step_s, should_stop):
    step, total = json.loads(STATE.read_text()) if STATE.exists() else (0, 0)
    print(f"rank {RANK} of {WORLD_SIZE} begins at {step}", flush=True)
    peers = meet()
    while step < steps:
        time.sleep(step_s if RESTARTS < 2 else 0)
        added, stops = exchange(peers, (RANK + 1) * step, should_stop())
        step, total = step + 1, total + added
        if step % 5 == 0 or stops:
            save(step, total)
        if stops:
            print(f"rank {RANK} leaves at {step}", flush=True)
            return
    save(step, total)


if __name__ == "__main__":
    looks = len(sys.argv) > 3
    if looks:
        import ftslurm
    main(int(sys.argv[1]), float(sys.argv[2]), ftslurm.should_stop if looks else lambda: False)
