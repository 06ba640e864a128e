"""Determinism switches and the per-step trace by which two trajectories are compared."""
