"""Health: what a node's hardware says, what that means, and what is done about it.

Facts (signals, tables) below judgement (verdicts) below actors (probe, drain, resume). The room is
copied to a root-owned folder (slurm/install_node.py) and run there with nothing but the standard
library and what that script names in ALONE.
"""
