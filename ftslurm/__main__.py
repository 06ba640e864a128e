"""`python -m ftslurm` is the `ftslurm` command."""

import sys

from ftslurm.cli import main

sys.exit(main())
