"""What a rank imports up to the end of its first step, in that order: a list and nothing else, so
that whoever forks ranks can read it without loading this package."""

LATE = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data",
    "numpy.random",
    "h5py",
    "xxhash",
)
"""Among these, what torch itself imports in the middle of a first step: a second for each rank."""
