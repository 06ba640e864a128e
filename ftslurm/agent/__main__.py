"""`python -m ftslurm.agent RUN`: the agent of this node, started by srun on every node of a job."""

from ftslurm.agent.main import main

if __name__ == "__main__":
    raise SystemExit(main())
