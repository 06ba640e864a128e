"""The only code that runs Slurm commands and parses their output; one protocol, two schedulers.

Never decides whether a run goes on.
"""
