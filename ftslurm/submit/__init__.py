"""From Hydra's configs to a job in the queue. The only room that imports Hydra and submitit.

After submit nothing reads conf/ again: the run directory holds all that a restart needs.
"""
