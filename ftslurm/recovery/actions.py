"""What follows an attempt, in the words that `ftslurm recover` prints, decision.json keeps and the
batch script acts on."""

DONE = "done"
RESTART = "restart"
REQUEUED = "requeued"
"""Asked for: the run's next job is queued, under the same id or as a successor."""
PAUSED = "paused"
"""By an operator's order: queued, and held until somebody resumes the run."""
ENDED = "ended"
"""By an operator's order: not queued again, nothing has failed."""
STOP = "stop"
