"""The words for what ended an attempt, one line of meaning each.

Facts for people and for the policy's budgets; what follows from a cause is decided in policy.py.
"""

from __future__ import annotations

PREEMPTED = "preempted"
TIME_LIMIT = "time_limit"
CANCELLED_USER = "cancelled_user"
CANCELLED_ADMIN = "cancelled_admin"
NODE = "node"
GPU = "gpu"
NETWORK_TRANSIENT = "network_transient"
STORAGE = "storage"
CAPACITY = "capacity"
OOM_HOST = "oom_host"
OOM_GPU = "oom_gpu"
HANG = "hang"
STRAGGLER = "straggler"
CHECKPOINT = "checkpoint"
DATA = "data"
NUMERIC = "numeric"
CODE = "code"
UNKNOWN = "unknown"

MEANING = {
    PREEMPTED: "the nodes were given to another job",
    TIME_LIMIT: "the job's time was up",
    CANCELLED_USER: "the job's owner cancelled it",
    CANCELLED_ADMIN: "somebody other than the owner cancelled the job",
    NODE: "a node failed or was cut off",
    GPU: "a GPU or its links failed",
    NETWORK_TRANSIENT: "ranks lost each other though all of them lived; it may pass",
    STORAGE: "the file system failed a read or a write; it may pass",
    CAPACITY: "a disk, a quota, shared memory or a right is missing; it does not pass by itself",
    OOM_HOST: "a node's memory, or the job's share of it, was used up",
    OOM_GPU: "a GPU's memory was used up",
    HANG: "no rank went on, and none had ended",
    STRAGGLER: "one rank was much slower than the others",
    CHECKPOINT: "a checkpoint cannot be read, or no save succeeded",
    DATA: "the training data cannot be read",
    NUMERIC: "the loss or a gradient was NaN or Inf, or the loss made a jump",
    CODE: "the program itself failed, and would fail again",
    UNKNOWN: "nothing tells why",
}

NODE_FAULTS = frozenset({NODE, GPU})
"""Causes that count against the node that is blamed."""
