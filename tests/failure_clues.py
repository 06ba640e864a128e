"""Clues as an attempt of four ranks on two nodes leaves them, for tests of the classification."""

from ftslurm.diagnosis.finding import Clue, Facts
from ftslurm.diagnosis.node_clues import kernel_clues
from ftslurm.health.settings import HealthSettings

NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
FACTS = Facts(rc=1, step=37, job_id="118", nodes=NODES)
AT = 1_000.0

LOADER = 'File "/r/code/lib/data_loader.py", line 40, in __next__\n    return self.dataset[index]'
RESTORE = (
    'File "/r/code/ftslurm/train/restore.py", line 9, in load\n    read(checkpoints/steps/...)'
)


def error(text, context="", rank=3, at=AT, step=37):
    return Clue("rank_error", text, at, rank, NODES[rank], f"rank-{rank:05d}.json", None,
                context or "Traceback (most recent call last):\n  ...", step)  # fmt: skip


def log(text, context="", rank=3):
    return Clue("log", text, AT, rank, NODES[rank], f"rank-{rank}.log", 7, context)


def launcher(text, line=3, rank=None):
    return Clue("launcher", text, None, rank, None, "launcher.log", line)


def account(text):
    return Clue("accounting", text, AT)


def node_state(text):
    return Clue("node_state", text, AT, node=text.split()[0])


def agent(text, at=AT, rank=3, node="n2"):
    return Clue("agent", text, at, rank, node, "agents.json")


def health(text):
    return Clue("health", text, AT, node="n2", file="evidence/health/n2.json")


def kernel(text):
    """As node_clues.py reads the line; one that says nothing, as it is."""
    record = {"node": "n2", "at": AT, "kernel": [{"seq": 1, "at": AT, "text": text}]}
    clues, _ = kernel_clues(record, "evidence/nodes/n2.json", since=AT, offset_s=0.0,
                            settings=HealthSettings())  # fmt: skip
    return clues[0] if clues else Clue("kernel", text, AT, node="n2")


NCCL_REMOTE = (
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there "
    "was "
    "a network error, NCCL version 2.26.2\nncclRemoteError: A call failed possibly due to a "
    "network "
    "error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection "
    "closed "
    "by remote peer n2<41234>"
)
# What the others say, earlier by the clocks of their nodes than what they are the echo of.
ECHOES = [
    error("PeerLost: rank 0 lost another rank in a collective (Connection closed by peer)",
          rank=0, at=AT - 5),
    error(NCCL_REMOTE, rank=1, at=AT - 4),
    error("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
          "peer [10.0.0.4]:41234", rank=2, at=AT - 3),
    Clue("log", "[rank1]:[E1129 13:47:08.123456789 ProcessGroupNCCL.cpp:684] Some NCCL operations "
         "have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
         "operations might run on corrupted/incomplete data.", AT - 9, 1, "n1", "rank-1.log", 2),
    Clue("log", "[rank1]:[E1129 13:47:08.123456790 ProcessGroupNCCL.cpp:689] To avoid data "
         "inconsistency, we are taking the entire process down.", AT - 9, 1, "n1", "rank-1.log", 3),
    Clue("log", "RuntimeError: NCCL communicator was aborted on rank 2.", AT - 8, 2, "n2",
         "rank-2.log", 4, "Traceback (most recent call last):\n  ..."),
    Clue("log", "CUDA kernel errors might be asynchronously reported at some other API call, so "
         "the stacktrace below might be incorrect. This may be caused by CUDA out of memory.",
         AT - 8, 2, "n2", "rank-2.log", 5),
    Clue("log", "terminate called after throwing an instance of 'c10::DistBackendError'", AT - 7,
         1, "n1", "rank-1.log", 6),
    launcher("srun: error: n1: tasks 0-1: Exited with exit code 143", 8, 0),
    launcher("srun: error: n2: task 2: Terminated", 9, 2),
    launcher("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.", 6),
    launcher("slurmstepd-n1: error: *** STEP 118.2 ON n1 CANCELLED AT 2026-11-29T13:47:08 ***", 7),
    launcher("[2026-11-29T14:19:25.707] error: *** STEP 118.2 ON n1 CANCELLED AT "
             "2026-11-29T14:19:25 DUE to SIGNAL Terminated ***", 7),
    launcher("srun: Terminating StepId=118.2", 5),
]  # fmt: skip
