"""Hydra programs of anybody's: their sweeps are submitted, and a task of theirs runs on a node."""
