"""srun for a test: the tasks run on this machine, each told that it is on a node of its own.

As srun does: stdin goes to all of them, their lines come out mixed, its own words go to stderr.
SRUN_HERE_PATHS holds what a node sees in place of a folder, `n2=/other`; SRUN_HERE_RC ends at once.
"""

import os
import subprocess
import sys
import threading


def main() -> int:
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    command = sys.argv[1 + len(options) :]
    count = int(next(word for word in options if word.startswith("--ntasks=")).partition("=")[2])
    if "SRUN_HERE_RC" in os.environ:
        print("srun: error: Requested node configuration is not available", file=sys.stderr)
        return int(os.environ["SRUN_HERE_RC"])
    print("srun: job 7 queued and waiting for resources", file=sys.stderr, flush=True)
    tasks = [start(number, command) for number in range(count)]
    threading.Thread(target=hand_on, args=(tasks,), daemon=True).start()
    return max(task.wait() for task in tasks)


def start(number: int, command: list[str]) -> "subprocess.Popen[bytes]":
    node = f"n{number + 1}"
    elsewhere = dict(
        one.split("=", 1) for one in os.environ.get("SRUN_HERE_PATHS", "").split(",") if one
    )
    argv = [
        elsewhere.get(node, word) if word.startswith("/") and ".ftslurm-" in word else word
        for word in command
    ]
    environ = {**os.environ, "SLURM_PROCID": str(number), "SLURMD_NODENAME": node}
    return subprocess.Popen(argv, stdin=subprocess.PIPE, env=environ)


def hand_on(tasks: "list[subprocess.Popen[bytes]]") -> None:
    for line in sys.stdin.buffer:
        for task in tasks:
            if task.poll() is None:
                task.stdin.write(line)
                task.stdin.flush()
    for task in tasks:
        task.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
