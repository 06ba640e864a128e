"""`python -m fakes.beating [WORD...]`: a rank that beats and does nothing else, without torch.

Words: `deaf` ignores TERM; `still` stops beating after its first steps; `slow` computes four times
as long as the others.
"""

import signal
import sys
import time

from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment

STEP_S = 0.1
STILL_AFTER = 8


def main(words):
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pulse = Pulse.open(RankEnvironment.read())
    pulse.restored(0)
    step = 0
    own_s = STEP_S * 0.8 * (4 if "slow" in words else 1)
    while True:
        pulse.step_begins()
        time.sleep(max(STEP_S, own_s))
        step += 1
        pulse.step_ended(step, own_s=own_s)
        if "still" in words and step >= STILL_AFTER:
            pulse.enter("all_reduce [4]")
            time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1:])
