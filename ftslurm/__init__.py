"""ftslurm: a Slurm training run that, once submitted, finishes as if nothing had failed."""

# A literal: importlib.metadata would cost more than argparse and pathlib together at each start.
__version__ = "0.1.0"
