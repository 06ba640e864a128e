"""A rank of rank.py that stops itself (SIGSTOP) at one point of the product in the run's first
attempt, as a node does that is suspended in the very moment; LEFTOVER_STOPS names point and step,
e.g. `rename-20`. Whoever continues it (SIGCONT) lets it go on as if nothing had happened.
"""

import os
import signal
import sys

from ftslurm import faults
from ftslurm.run.layout import step_name
from tests.fakes import rank


def main():
    name, _, step = os.environ.get("LEFTOVER_STOPS", "").partition("-")
    original = faults.point

    def point(here, /, **facts):
        original(here, **facts)
        if here == name and os.environ["FTSLURM_ATTEMPT"] == "1":
            at = str(facts.get("step", facts.get("name")))
            if at == step or at.startswith(step_name(int(step))):
                os.kill(os.getpid(), signal.SIGSTOP)

    faults.point = point
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
