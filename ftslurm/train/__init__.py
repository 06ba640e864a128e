"""The training half: the only code that imports torch, numpy and h5py.

Nothing outside imports it; it meets the rest in the run directory.
"""
