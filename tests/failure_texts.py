"""Texts that failures leave, three variants a row of the table of signatures, and their cause.

`python -m failure_texts` in this folder prints the confusion matrix. Each failure is told together
with the echoes of other ranks, whose wall time is earlier: clocks of nodes differ.
"""

from collections import Counter

from failure_clues import (
    AT,
    ECHOES,
    FACTS,
    LOADER,
    NCCL_REMOTE,
    RESTORE,
    account,
    agent,
    error,
    kernel,
    launcher,
    log,
    node_state,
)

from ftslurm.diagnosis.causes import MEANING
from ftslurm.diagnosis.classify import classify

# Row of the table -> (cause, its variants; each what the failing rank, Slurm or node left).
ROWS = {
    "node fail": ("node", [
        [account("job 118 NODE_FAIL 1:0 FailedNode=n2")],
        [launcher("slurmstepd-n1: error: *** STEP 118.2 ON n1 CANCELLED AT 2026-11-29T13:47:08 DUE "
                  "TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"),
         launcher("srun: error: Node failure on n2", 4)],
        [account("job 118 BOOT_FAIL 0:0")],
    ]),
    "preempted": ("preempted", [
        [account("job 118 PREEMPTED 0:0")],
        [launcher("slurmstepd-n1: error: *** JOB 118 ON n1 CANCELLED AT 2026-11-29T13:47:23 DUE TO "
                  "PREEMPTION ***")],
        [launcher("[2026-11-29T13:47:23.101] error: *** STEP 118.2 ON n1 CANCELLED AT "
                  "2026-11-29T13:47:23 DUE TO PREEMPTION ***")],
    ]),
    "time limit": ("time_limit", [
        [account("job 118 TIMEOUT 0:0")],
        [account("job 118 DEADLINE 0:0")],
        [launcher("slurmstepd: error: *** STEP 118.2 ON n1 CANCELLED AT 2026-11-29T13:47:08 DUE TO "
                  "TIME LIMIT ***")],
    ]),
    "requeue": ("unknown", [
        [account("job 118 REQUEUED 0:0")],
        [launcher("slurmstepd: error: *** JOB 118 ON n1 CANCELLED AT 2026-11-29T13:47:08 DUE TO "
                  "JOB "
                  "REQUEUE ***")],
        [account("job 118 REQUEUED ?"), launcher("srun: got SIGCONT")],
    ]),
    "cancelled by owner": ("cancelled_user", [
        [account("job 118 CANCELLED by the owner 5001 0:0")],
        [account("job 118 CANCELLED by the owner 0 0:15")],
        [account("job 70_1 CANCELLED by the owner 5001 ?")],
    ]),
    "cancelled by other": ("cancelled_admin", [
        [account("job 118 CANCELLED by uid 0 0:0")],
        [account("job 118 CANCELLED by uid 1007 0:15")],
        [account("job 70_1 CANCELLED by uid 0 ?")],
    ]),
    "torn down": ("unknown", [
        [launcher("slurmstepd: error: *** STEP 118.2 ON n1 CANCELLED AT 2026-11-29T13:47:08 DUE TO "
                  "TASK FAILURE ***")],
        [launcher("srun: Force Terminated StepId=118.2")],
        [launcher("[2026-11-29T14:19:25.7] error: *** STEP 118.2 ON n1 CANCELLED AT "
                  "2026-11-29T14:19:25 DUE to SIGNAL Terminated ***")],
    ]),
    "host memory": ("oom_host", [
        [launcher("slurmstepd-n2: error: Detected 1 oom_kill event in StepId=118.2. Some of the "
                  "step "
                  "tasks have been OOM Killed."),
         launcher("srun: error: n2: task 3: Out Of Memory", 4, 3)],
        [launcher("slurmstepd: error: Detected 2 oom-kill event(s) in StepId=118.2. Some of your "
                  "processes may have been killed by the cgroup out-of-memory handler."),
         launcher("srun: error: n2: task 3: Killed", 2, 3)],
        [account("step 118.2 OUT_OF_MEMORY 0:125"), launcher("srun: error: n2: task 3: Killed",
         2, 3)],
    ]),
    "kernel's memory": ("oom_host", [
        [kernel("Memory cgroup out of memory: Killed process 4711 (python) total-vm:93231kB"),
         launcher("srun: error: n2: task 3: Killed", 1, 3)],
        [kernel("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_2,mems_allowed=0,"
                "oom_memcg=/slurm/uid_5001/job_118,task_memcg=/slurm/uid_5001/job_118/step_2,"
                "task=python,pid=4711,uid=5001"), launcher("srun: error: n2: task 3: Killed", 1,
                 3)],
        [kernel("Out of memory: Killed process 4711 (python) total-vm:931kB, anon-rss:12kB")],
    ]),
    "GPU memory": ("oom_gpu", [
        [error("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
               "total "
               "capacity of 79.15 GiB of which 1.2 GiB is free. If reserved but unallocated memory "
               "is large try setting PYTORCH_CUDA_ALLOC_CONF")],
        [error("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
               "`cublasCreate(handle)`")],
        [log("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
             "Traceback (most recent call last):")],
    ]),
    "signal not handled": ("code", [
        [launcher("srun: error: n2: task 3: User defined signal 1", 2, 3)],
        [launcher("srun: error: n2: task 3: Exited with exit code 140", 2, 3)],
        [account("step 118.2 CANCELLED 0:10")],
    ]),
    "killed": ("unknown", [
        [launcher("srun: error: n2: task 3: Killed", 2, 3)],
        [launcher("srun: error: n2: task 3: Exited with exit code 137", 2, 3)],
        [error("ProgramFailed: `train.sh` was killed by signal 9 (Killed)")],
    ]),
    "crash": ("code", [
        [launcher("srun: error: n2: task 3: Segmentation fault (core dumped)", 2, 3)],
        [launcher("srun: error: n2: task 3: Exited with exit code 139", 2, 3)],
        [log("Fatal Python error: Segmentation fault"),
         launcher("srun: error: n2: task 3: Segmentation fault", 2, 3)],
    ]),
    "bus error": ("capacity", [
        [launcher("srun: error: n2: task 3: Bus error", 2, 3)],
        [error("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is "
               "possible that dataloader's workers are out of shared memory.")],
        [error("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1a2b'")],
    ]),
    "node drained": ("node", [
        [node_state("n2 IDLE+DRAIN reason Kill task failed")],
        [node_state("n2 MIXED+DRAIN reason Epilog error")],
        [node_state("n2 IDLE+DRAIN reason gres/gpu count reported lower than configured (7 < 8)")],
    ]),
    "node down": ("node", [
        [node_state("n2 DOWN* reason Not responding")],
        [node_state("n2 DOWN+DRAIN reason Node unexpectedly rebooted")],
        [node_state("n2 ALLOCATED*+CLOUD")],
    ]),
    "waits": ("capacity", [
        [account("job 118 PENDING ? reason JobHoldMaxRequeue")],
        [account("job 118 PENDING ? reason ReqNodeNotAvail")],
        [account("job 118 PENDING ? reason QOSMaxJobsPerUserLimit")],
    ]),
    "Xid 79": ("gpu", [
        [kernel("NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen "
                "off "
                "the bus."), error("RuntimeError: CUDA error: unspecified launch failure")],
        [kernel("NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus.")],
        [kernel("NVRM: Xid (0000:9b:00): 79, GPU has fallen off the bus.")],
    ]),
    "Xid of memory": ("gpu", [
        [kernel("NVRM: Xid (PCI:0000:9b:00): 48, pid=4711, name=python, An uncorrectable double "
                "bit "
                "error (DBE) has been detected on GPU in the framebuffer at physAddr 0x1")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 64, pid=4711, name=python, Row Remapper Error: "
                "(0x1) - "
                "All reserved rows for bank are remapped")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 95, pid=4711, name=python, Uncontained: LTC TAG"),
         kernel("NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to "
                "0x1 "
                "(GPU Reset Required)")],
    ]),
    "Xid that warns": ("unknown", [
        [kernel("NVRM: Xid (PCI:0000:9b:00): 121, pid=4711, name=python, Correctable C2C error")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 92, pid=4711, High single-bit ECC error rate")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 93, pid=4711, name=python, InfoROM wear")],
    ]),
    "Xid 94": ("gpu", [
        [kernel("NVRM: Xid (PCI:0000:9b:00): 94, pid=4711, name=python, Contained: SM (0x1).")],
        [kernel("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=4711, name=python, Contained: CE")],
        [kernel("[Sun Nov 29 13:47:08 2026] NVRM: Xid (PCI:0000:9b:00): 94, pid=4711"),
         error("RuntimeError: CUDA error: uncorrectable ECC error encountered")],
    ]),
    "Xid of NVLink": ("gpu", [
        [kernel("NVRM: Xid (PCI:0000:9b:00): 74, pid=4711, name=python, NVLink: fatal error "
                "detected "
                "on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x1 "
                "0x2)")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 155, pid=4711, NVLink: link 3 down")],
    ]),
    "SXid": ("gpu", [
        [kernel("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20034, Fatal, Link 28 LTSSM Fault Up")],
        [kernel("nvidia-nvswitch3: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 sourcetrack "
                "timeout error (First)")],
        [kernel("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 22003, Fatal, Link 1 ECC")],
    ]),
    "harmless SXid, injected or not fatal link": ("unknown", [
        [kernel("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 12021, Non-fatal, Link 28 AN1 "
                "timeout")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 145, RLW_CTRL  Nonfatal XC0 i0 Link 09 (0x1 0x2)")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 149, NETIR_LINK_EVT  Fatal   XC0 i1 Link 09 (0x1)")],
    ]),
    "Xid that asks for a reset": ("gpu", [
        [kernel("NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s "
                "of "
                "waiting for RPC response from GPU0 GSP!")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 62, pid=4711, name=python, 0000(0000) 00000000")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 109, pid=4711, name=python, Ch 00000003, errorString "
                "CTX SWITCH TIMEOUT")],
    ]),
    "Xid of a program": ("code", [
        [kernel("NVRM: Xid (PCI:0000:9b:00): 13, pid=4711, name=python, Graphics SM Warp Exception "
                "on (GPC 1, TPC 3, SM 0): Out Of Range Address")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault"),
         error("RuntimeError: CUDA error: an illegal memory access was encountered")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 43, pid=4711, name=python, Ch 00000010"),
         kernel("NVRM: Xid (PCI:0000:9b:00): 45, pid=4711, name=python, Ch 00000010")],
    ]),
    "Xid 154": ("unknown", [
        [kernel("NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to "
                "0x5 "
                "(Recover IMEX)")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x1 (GPU Reset "
                "Required) to 0x0 (None)")],
        [kernel("NVRM: Xid (PCI:0000:9b:00): 154, pid=4711, GPU recovery action changed")],
    ]),
    "GPU by CUDA": ("gpu", [
        [error("RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors "
               "might be asynchronously reported at some other API call")],
        [error("RuntimeError: CUDA error: uncorrectable NVLink error detected during the "
               "execution")],
        [error("RuntimeError: CUDA error: unspecified launch failure"),
         kernel("NVRM: Xid (PCI:0000:9b:00): 48, pid=4711, name=python, DBE")],
    ]),
    "kernel fault": ("code", [
        [error("RuntimeError: CUDA error: device-side assert triggered\nCompile with "
               "`TORCH_USE_CUDA_DSA` to enable device-side assertions.")],
        [error("AcceleratorError: CUDA error: an illegal memory access was encountered")],
        [log("what():  CUDA error: an illegal memory access was encountered")],
    ]),
    "collective timed out": ("hang", [
        [log("[rank3]:[E1129 13:47:08.12 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught "
             "collective operation timeout: WorkNCCL(SeqNum=118, OpType=ALLREDUCE, NumelIn=1, "
             "Timeout(ms)=600000) ran for 600020 milliseconds before timing out.")],
        [error("DistBackendError: [Rank 3] Watchdog caught collective operation timeout: "
               "WorkNCCL(SeqNum=7, OpType=_REDUCE_SCATTER_BASE) ran for 1800012 milliseconds")],
        [error("RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:84] Timed "
               "out waiting 1800000ms for recv operation to complete")],
    ]),
    "watchdog stuck": ("hang", [
        [log("[rank3]:[F1129 13:47:08.12 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0 Rank 3] "
             "[PG ID 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making "
             "progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA "
             "API call blocking the watchdog")],
        [log("ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress")],
        [log("[rank3]: HeartbeatMonitor: the watchdog is stuck, terminating")],
    ]),
    "lost peer": ("unknown", [
        [error(NCCL_REMOTE)],
        [log("n2:4711:4790 [0] NCCL WARN socketProgress: Connection closed by remote peer n1<5>")],
        [error("DistBackendError: ncclRemoteError: A call failed possibly due to a network error "
               "or "
               "a remote process exiting prematurely.")],
    ]),
    "InfiniBand": ("network_transient", [
        [log("n2:4711:4790 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.1<43> with status="
             "IBV_WC_RETRY_EXC_ERR(12) opcode=0(IBV_WC_SEND) reqSize=0 vendor_err=129")],
        [error("DistBackendError: ncclRemoteError: A call failed possibly due to a network error.\n"
               "Last error:\nNET/IB : Got completion from peer 10.0.0.1<43> with error 12, opcode "
               "32681, len 0, vendor err 129")],
        [log("NET/IB: Got completion from peer 10.0.0.1<43> with status=12 opcode=0 vendor err "
             "129")],
    ]),
    "NCCL's summary": ("unknown", [
        [error("DistBackendError: ncclSystemError: System call (e.g. socket, malloc) or external "
               "library call failed or device error.\nLast error:\nsocketStartConnect: Connect to "
               "10.0.0.1<41> failed")],
        [error("DistBackendError: ncclUnhandledCudaError: Call to CUDA function failed.")],
        [error("DistBackendError: ncclInternalError: Internal check failed.\nLast error:\nSocket "
               "recv failed, Connection reset by peer")],
    ]),
    "NCCL's last error": ("oom_gpu", [
        [error("DistBackendError: ncclUnhandledCudaError: Call to CUDA function failed.\nLast "
               "error:"
               "\nFailed to CUDA calloc async 608 bytes: Cuda failure 2 'out of memory'")],
        [error("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error\n"
               "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
               "'out of memory'")],
        [log("n2:4711:4790 [0] transport/p2p.cc:214 NCCL WARN Cuda failure 'out of memory'")],
    ]),
    "NCCL usage": ("code", [
        [error("DistBackendError: NCCL error: ncclInvalidUsage: This usually reflects invalid "
               "usage "
               "of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on "
               "CUDA device 1b000")],
        [error("DistBackendError: ncclInvalidArgument: Invalid value for an argument")],
        [log("DistBackendError: ncclInvalidUsage: Duplicate GPU detected",
             "Traceback (most recent call last):")],
    ]),
    "rendezvous": ("network_transient", [
        [error("DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients "
               "joined.",
               step=None)],
        [error("DistNetworkError: The client socket has timed out after 600000ms while trying to "
               "connect to (n1, 29500).")],
        [error("OSError: [Errno 98] Address already in use")],
    ]),
    "wrapper": ("unknown", [
        [error("ChildFailedError: \n====\ntrain.py FAILED\n----\nFailures:\n  "
               "<NO_OTHER_FAILURES>")],
        [error("SignalException: Process 4711 got signal: 15")],
        [log("torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: "
             "15", "Traceback (most recent call last):")],
    ]),
    "not finite": ("numeric", [
        [error("NumericError: the loss of step 38 is nan; expected a number: see recovery.on_nan")],
        [error("FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably "
               "exploding.")],
        [error("RuntimeError: found non-finite gradient norm in module.layers.3")],
    ]),
    "damaged data": ("data", [
        [error("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0", LOADER)],
        [error("BadZipFile: Bad CRC-32 for file 'shard-0007.npy'", LOADER)],
        [error("DataError: `tokens.h5` block 7 has another digest than its store says")],
    ]),
    "damaged checkpoint": ("checkpoint", [
        [error("UnpicklingError: invalid load key, '\\x00'.", RESTORE)],
        [error("CheckpointError: no checkpoint of this run can be restored: step 40 is torn")],
        [error("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding "
               "central "
               "directory: checkpoints/steps/step-000000000040/rank-0.pt")],
    ]),
    "program": ("code", [
        [error("ModuleNotFoundError: No module named 'flash_atn'", step=None)],
        [error("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x128 and 64x64)")],
        [log("hydra.errors.ConfigCompositionException: Could not override 'optim.lrr'",
             "Traceback (most recent call last):")],
    ]),
    "any exception": ("code", [
        [error("ValueError: the bug of step 37")],
        [error("RuntimeError: something of my own")],
        [log("mypackage.Failure_Error: no such thing", "Traceback (most recent call last):")],
    ]),
    "storage": ("storage", [
        [error("OSError: [Errno 116] Stale file handle: '/scratch/run/checkpoints'")],
        [error("OSError: [Errno 5] Input/output error")],
        [error("OSError: [Errno 107] Transport endpoint is not connected: '/mnt/data'")],
    ]),
    "no room": ("capacity", [
        [error("OSError: [Errno 122] Disk quota exceeded: '/scratch/run/attempts'")],
        [error("OSError: [Errno 28] No space left on device")],
        [error("PermissionError: [Errno 13] Permission denied: '/scratch/run'")],
    ]),
    "agents: lost node": ("node", [
        [agent("node_lost: n2 answers neither the leader nor n1", rank=None)],
        [agent("leader_lost: the batch node n2 answers nobody", rank=None)],
        [agent("node_lost: n2 is silent for 8 s", rank=None),
         error("RuntimeError: Timed out waiting 60000ms for recv operation")],
    ]),
    "agents: hang": ("hang", [
        [agent("hang: no rank has ended a step for 14 s, rank 3 is not in all_reduce 118")],
        [agent("hang: rank 3 is stopped (T)"), launcher("srun: error: n2: task 3: Killed", 2, 3)],
        [agent("hang: rank 3 holds the interpreter"),
         error("RuntimeError: interrupted", rank=3, at=AT + 9)],
    ]),
    "agents: blocked in the kernel": ("storage", [
        [agent("hang: no rank has advanced for 3601.2 s (a step usually takes 0.9 s): rank 3 on "
         "n2 is blocked in the kernel (state D on 2 nodes: storage); rank 5 on n3 is blocked in "
         "the kernel (state D on 2 nodes: storage)")],
        [agent("hang: no rank has advanced for 3605.0 s: rank 3 on n2 is blocked in the kernel "
         "(state D on 4 nodes: storage); and 28 more")],
        [agent("hang: no rank has advanced for 3602.4 s: rank 3 on n2 is blocked in the kernel "
         "(state D on 2 nodes: storage)"), launcher("srun: error: n2: task 3: Killed", 2, 3)],
    ]),
    "agents: straggler": ("straggler", [
        [agent("straggler: rank 3 needs 4.1 x the others' median")],
        [agent("straggler: rank 3 lags by 3 steps")],
        [agent("straggler: n2, rank 3"), launcher("srun: error: n2: task 3: Killed",
         2, 3)],
    ]),
}  # fmt: skip


def variants():
    """(row, number of the variant, cause, its clues)."""
    for row, (cause, texts) in ROWS.items():
        for number, clues in enumerate(texts):
            yield row, number, cause, clues


def matrix():
    """(expected, found) -> how many, each failure told together with all echoes."""
    return Counter(
        (cause, classify([*ECHOES, *clues], FACTS).cause) for _, _, cause, clues in variants()
    )


def table(counts):
    """The matrix as lines of text: expected downwards, found across."""
    names = [name for name in MEANING if any(name in pair for pair in counts)]
    width = max(map(len, names))
    yield " " * width + " " + " ".join(f"{index:>3}" for index in range(len(names)))
    for index, name in enumerate(names):
        cells = " ".join(f"{counts.get((name, other), 0) or '.':>3}" for other in names)
        yield f"{name:<{width}} {cells}   {index}"


if __name__ == "__main__":
    print("\n".join(table(matrix())))
