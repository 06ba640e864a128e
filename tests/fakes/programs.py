"""Programs that know nothing of ftslurm, or three lines of it. Run as scripts, one a rank.

Each counts to 40, slowly the first time, so that it can be told to leave, and writes down in
`RESUME/seen-RANK` where every start of it began.
"""

UNAWARE = """
import os, sys, time
from pathlib import Path

place = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["FTSLURM_RESUME_DIR"])
rank = os.environ["RANK"]
state = place / f"state-{rank}"
step = int(state.read_text()) if state.exists() else 0
with (place / f"seen-{rank}").open("a") as seen:
    seen.write(f"{step}\\n")
pause_s = 0.05 if step else 0.5
while step < 40:
    time.sleep(pause_s)
    step += 1
    new = place / f"new-{rank}"
    new.write_text(str(step))
    new.replace(state)
"""

# Saves nowhere but where it is asked to leave: it has to be given the time.
AWARE = """
import os, sys, time
import ftslurm

place = ftslurm.resume_dir()
rank = os.environ["RANK"]
state = place / f"state-{rank}"
step = int(state.read_text()) if state.exists() else 0
with (place / f"seen-{rank}").open("a") as seen:
    seen.write(f"{step}\\n")
pause_s = 0.05 if step else 0.5
while step < 40:
    time.sleep(pause_s)
    step += 1
    if ftslurm.should_stop():
        time.sleep(1)
        state.write_text(str(step))
        sys.exit()
"""


def steps_seen(layout, rank=0):
    """Where each start of the program began."""
    path = layout.resume / f"seen-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []
