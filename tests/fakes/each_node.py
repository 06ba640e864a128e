"""srun as far as looks at nodes need it: the command on each node of --nodelist, all at once.

$FTSLURM_TEST_NODES/NODE.json is what a node says without looking; with NODE.hang it never says a
thing; else it looks at the fake GPUs of NODE.gpus. What srun was asked for is added to srun.jsonl.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

nodes = Path(os.environ["FTSLURM_TEST_NODES"])
words = sys.argv[1:]
command = words[[word.startswith("-") for word in words].index(False) :]
options = dict(word.partition("=")[::2] for word in words[: -len(command)])
with (nodes / "srun.jsonl").open("a") as asked:
    attempt = os.environ.get("FTSLURM_ATTEMPT")
    asked.write(json.dumps({"argv": words, "attempt": attempt, "pid": os.getpid()}) + "\n")
run, number = Path(command[-2]), int(command[-1])
running = []
for node in options["--nodelist"].split(","):
    told = nodes / f"{node}.json"
    if told.exists():
        shutil.copy(told, run / "attempts" / f"{number:04d}" / "evidence" / "health" / told.name)
    elif (nodes / f"{node}.hang").exists():
        time.sleep(60)
    else:
        gpus = str(nodes / f"{node}.gpus")
        environ = {**os.environ, "SLURMD_NODENAME": node, "FTSLURM_FAKE_NVML": gpus}
        running.append(subprocess.Popen(command, env=environ))
sys.exit(max([process.wait() for process in running], default=0))
