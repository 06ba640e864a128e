"""`slow_save.py SECONDS`: a program that saves when it is asked to leave, which takes so long.

It looks for the request, so that its rank waits for it up to the deadline and ends it then.
"""

import sys
import time

import ftslurm

SAVE_S = float(sys.argv[1])
state = ftslurm.resume_dir() / "state"
step = int(state.read_text()) if state.exists() else 0
print(f"begins at {step}", flush=True)
while step < 3000:
    time.sleep(0.1)
    step += 1
    if ftslurm.should_stop():
        print(f"saves step {step}", flush=True)
        time.sleep(SAVE_S)
        state.write_text(str(step))
        print("has saved", flush=True)
        sys.exit()
