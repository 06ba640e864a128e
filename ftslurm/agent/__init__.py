"""The node agent: one process a node for as long as the job lives; watches ranks, ends them, tells.

Never decides whether a run goes on, and only the leader on the batch node writes the run directory.
"""
