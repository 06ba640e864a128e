"""The table's rows for what Slurm, the kernel and the node agents say.

Data only. Texts as Slurm 22.05, 24.11 and 26.05 were seen to print them. Sources: the program or
document that the text is from.
"""

from __future__ import annotations

from dataclasses import replace

from ftslurm.diagnosis.causes import (
    CANCELLED_ADMIN,
    CANCELLED_USER,
    CAPACITY,
    CODE,
    GPU,
    HANG,
    NETWORK_TRANSIENT,
    NODE,
    OOM_HOST,
    PREEMPTED,
    STORAGE,
    STRAGGLER,
    TIME_LIMIT,
    UNKNOWN,
)
from ftslurm.diagnosis.signatures import (
    HARDWARE,
    KILLED_FIRST,
    LAST,
    RANK,
    SOMEBODYS,
    STEPD,
    WEAK,
    Signature,
)

_STEPD = "Slurm slurmstepd req.c"
_SRUN = "Slurm srun launch.c"
_SACCT = "Slurm sacct.1"
_SMI = "nvidia-smi -q, NVML GPU recovery action"

SLURM_LINES = [
    Signature("node failure", r"DUE TO NODE FAILURE", NODE, _STEPD, 0.95, trust=STEPD),
    Signature(
        "srun lost a node", r"Node failure on (?P<node>[^\s,]+)", NODE, _SRUN, 0.97, trust=STEPD
    ),
    Signature("preemption", r"DUE TO PREEMPTION", PREEMPTED, _STEPD, 0.97, trust=STEPD),
    Signature("time limit", r"DUE TO TIME ?LIMIT", TIME_LIMIT, _STEPD, 0.97, trust=STEPD),
    Signature(
        "out of memory",
        r"(?i:Detected \d+ oom[-_]kill event|oom-kill event\(s\)|killed by the cgroup "
        r"out-of-memory handler|: Out Of Memory\s*$|exceeded (job |step )?memory limit)",
        OOM_HOST,
        "Slurm task_cgroup_memory.c, srun launch.c",
        0.95,
        trust=STEPD,
    ),
    Signature(
        "launch refused by a node",
        r"[Tt]ask launch .*failed on node (?P<node>[^\s:,]+): .*(Communication connection failure|"
        r"User not found|could not connect IO|Header lengths)",
        NODE,
        "Slurm api/step_launch.c",
        0.6,
        trust=STEPD,
    ),
    # A time-out of munge is the load of the node that srun runs on (seen): the named node is well.
    Signature(
        "launch failed",
        r"[Tt]ask launch .*failed on node|Munge (de|en)code failed|Protocol authentication error|"
        r"Application launch failed",
        NETWORK_TRANSIENT,
        "Slurm api/step_launch.c, auth/munge",
        0.5,
        trust=STEPD,
    ),
    Signature("requeue", r"DUE TO JOB REQUEUE", None, _STEPD),
    Signature(
        "torn down",
        r"DUE TO TASK FAILURE|Force Terminated|DUE to SIGNAL|CANCELLED AT|Terminating "
        r"(StepId|job step)|Job step aborted|forcing job termination|got SIG(CONT|TERM|USR)|"
        r": Terminated\b|exit code (143|75)\b|left with (143|75)\b",
        None,
        _STEPD,
    ),
    Signature(
        "no such program",
        r"execve\(\): .*(No such file|Permission denied)|couldn't chdir",
        CODE,
        "Slurm slurmstepd task.c",
        0.7,
        trust=RANK,
    ),
    Signature(
        "controller away",
        r"Unable to contact slurm controller|Unable to confirm allocation|"
        r"Socket timed out on send/recv|"
        # Of a step with --cpus-per-task, until the nodes have registered with a slurmctld that has
        # just come back (22.05: 6 s).
        r"Unable to create step for job \S+: Memory required by task is not available",
        NETWORK_TRANSIENT,
        "Slurm api",
        0.5,
        trust=WEAK,
    ),
    Signature(
        "no step",
        r"Unable to create step for job",
        CAPACITY,
        "Slurm srun allocate.c",
        0.4,
        trust=WEAK,
    ),
]

# slurmstepd writes into the log of its node's first rank, behind what stands there without an end
# of line (a progress bar); what the program has printed of a job's end is no word of Slurm's.
_BY_STEPD = r"(\bslurmstepd[\w.-]*: |\[\d{4}-\d\d-\d\dT[\d:.]+\] error: )"
STEPD_LINES = [
    replace(row, pattern=f"{_BY_STEPD}[^\n]{{0,200}}?(?:{row.pattern})") for row in SLURM_LINES
]

EXITS = [
    Signature(
        "segmentation fault",
        r": (Segmentation fault|Illegal instruction|Floating point exception)|"
        r"(exit code|left with) (139|132|136)\b",
        CODE,
        "NVRx framework_crash; strsignal(3) by srun",
        0.6,
        trust=RANK,
    ),
    Signature(
        "bus error",
        r": Bus error|(exit code|left with) 135\b",
        CAPACITY,
        "judgement: shared memory that cannot be backed ends in SIGBUS (mmap(2))",
        0.5,
        trust=RANK,
    ),
    Signature(
        "signal not handled",
        r": User defined signal [12]|(exit code|left with) (138|140)\b",
        CODE,
        "cluster_utils#87, submitit#1793",
        0.8,
        trust=RANK,
    ),
    Signature(
        "killed",
        r": Killed\b|(exit code|left with) 137\b",
        UNKNOWN,
        "NVRx TAXONOMY.md: a bare kill is unknown until confirmed",
        0.3,
        trust=KILLED_FIRST,
    ),
    # A watchdog of NCCL or an uncaught C++ exception ends in abort(3) too: no sign by itself.
    Signature("aborted", r": Aborted|(exit code|left with) 134\b", CODE, _SRUN, 0.3, trust=LAST),
    Signature(
        "never retry", r"(exit code|left with) 78\b", CODE, "ftslurm errors.py", 0.6, trust=WEAK
    ),
    Signature("exit code", r"(exit code|left with) \d+", UNKNOWN, _SRUN, 0.2, trust=LAST),
]

ACCOUNT = [
    Signature(
        "job lost a node",
        r"^job \S+ (NODE_FAIL|BOOT_FAIL)\b(.*\bFailedNode=(?P<node>[\w.-]+))?",
        NODE,
        _SACCT,
        0.97,
    ),
    Signature("job preempted", r"^job \S+ PREEMPTED\b", PREEMPTED, _SACCT, 0.97),
    Signature("job timed out", r"^job \S+ (TIMEOUT|DEADLINE)\b", TIME_LIMIT, _SACCT, 0.97),
    Signature("owner cancelled", r"^job \S+ CANCELLED by the owner", CANCELLED_USER, _SACCT, 0.97),
    Signature("other cancelled", r"^job \S+ CANCELLED by uid", CANCELLED_ADMIN, _SACCT, 0.97),
    Signature(
        "accounted out of memory",
        r"^(job|step) \S+ (OUT_OF_MEMORY\b|.*\b0:125\b)",
        OOM_HOST,
        "Slurm SIG_OOM 253 & 127",
        0.95,
    ),
    Signature("step lost a node", r"^step \S+ NODE_FAIL\b", NODE, _SACCT, 0.95, trust=STEPD),
    Signature(
        "accounted signal not handled",
        r"^step \S+ \S+.* (0:1[02]|138:0|140:0)\b",
        CODE,
        "cluster_utils#87, submitit#1793",
        0.8,
        trust=RANK,
    ),
    # sacct's Reason is that of the last wait: it tells only of a job that waits now.
    Signature(
        "waits",
        r"^job \S+ PENDING .*reason (BeginTime|Resources|Priority|ReqNodeNotAvail|JobHeld\w*|"
        r"JobHoldMaxRequeue|BadConstraints|QOS\w*|Assoc\w*)",
        CAPACITY,
        "Slurm job_reason_codes",
        0.5,
        trust=WEAK,
    ),
    Signature("requeued", r"^job \S+ REQUEUED\b", None, _SACCT),
]

_HEALTH = "health/xid_table.py, health/decision_table.py"

NODE_STATES = [
    # What root's own look at the node has written there (health/drain.py).
    Signature(
        "GPU drained for its health",
        r" reason (?P<told>ftslurm:\S+ gpu.*)",
        GPU,
        _HEALTH,
        0.95,
        trust=HARDWARE,
        is_sick=True,
    ),
    Signature(
        "drained for its health",
        r" reason (?P<told>ftslurm:\S+.*)",
        NODE,
        _HEALTH,
        0.9,
        trust=HARDWARE,
        is_sick=True,
    ),
    Signature(
        "node down",
        # A `*` behind the state: it does not respond.
        r"^\S+ (DOWN\b|FAIL\b|\w+\*|\S*NOT_RESPONDING)|Not responding|unexpectedly rebooted",
        NODE,
        "Slurm slurmctld node_mgr.c",
        0.85,
        trust=STEPD,
    ),
    # Drained afterwards, often by our own ranks that did not die in time (Lightning#15008).
    Signature(
        "node drained",
        r"Epilog error|Prolog error|Kill task failed|batch job complete failure|"
        r"gres/\w+ count (reported lower|too low)|Duplicate jobid|Low RealMemory",
        NODE,
        "Slurm slurmctld drain reasons",
        0.4,
    ),
    Signature(
        "run directory",
        r"run's file system is (full|read-only)",
        CAPACITY,
        "statvfs(3)",
        0.6,
    ),
]

# A finding is a cause where the agents ended the ranks for it: what they only saw may have passed.
AGENTS = [
    Signature(
        "preflight",
        r"^preflight: (?P<told>.*)",
        NODE,
        "health/pairwise.py",
        0.9,
        trust=STEPD,
        is_sick=True,
    ),
    Signature("lost node", r"^(node_lost|leader_lost): ", NODE, "node agents", 0.9, trust=STEPD),
    Signature(
        "node seen lost",
        r"^(node_lost|leader_lost) \(not acted on\): ",
        NODE,
        "node agents",
        0.4,
        trust=WEAK,
    ),
    Signature(
        "ranks of several nodes blocked in the kernel",
        r"^hang: .*\bis blocked in the kernel \(state D on \d+ nodes: ",
        STORAGE,
        "node agents; proc(5)",
        0.8,
    ),
    Signature("hang", r"^hang: ", HANG, "node agents", 0.9),
    Signature("straggler", r"^straggler: ", STRAGGLER, "node agents", 0.85),
]

# What it says of GPUs is judged by health/verdicts.py.
KERNEL_LINES = [
    Signature(
        "kernel out of memory in a job",
        r"oom-kill:constraint.*\bjob_\d+",
        OOM_HOST,
        "Linux mm/oom_kill.c; Slurm's cgroups bear the job's id",
        0.95,
    ),
    Signature(
        "kernel out of memory",
        r"[Mm]emory cgroup out of memory: Kill|Out of memory: Kill|oom-kill:constraint",
        OOM_HOST,
        "Linux mm/oom_kill.c",
        0.85,
        trust=SOMEBODYS,
    ),
    Signature(
        "NVML",
        r"GPU Recovery Action\s*: (Reset|Reboot|Drain|GPU Reset|Node Reboot)|GPU is lost|"
        r"GPU requires reset|Unable to determine the device handle for GPU",
        GPU,
        _SMI,
        0.9,
    ),
    Signature(
        "file server",
        r"nfs: server \S+ (not responding|timed out)|LustreError.*(evict|timed out)|"
        r"EXT4-fs error|XFS.*(metadata I/O error|Corruption)|blk_update_request: I/O error|"
        r"task \S+ blocked for more than",
        STORAGE,
        "Linux fs drivers, kernel/hung_task.c",
        0.5,
        trust=WEAK,
    ),
    Signature(
        "host memory broken",
        r"EDAC .*\bUE\b|Uncorrected hardware memory error|Memory failure: 0x|"
        r"Machine [Cc]heck.*([Ff]atal|[Uu]ncorrected)",
        NODE,
        "Linux mm/memory-failure.c, EDAC",
        0.8,
    ),
    Signature(
        "link of a port",
        r"mlx\d\S*.*([Ll]ink (down|DOWN)|health compromised)",
        NETWORK_TRANSIENT,
        "Linux mlx5_core",
        0.5,
        trust=WEAK,
    ),
]

_GRAVE = r"^(drain|reset(?=: S?XID\d)): "
_OF_GPU = r"(?P<told>\S+ of gpu\d*( at \S+)?|SXID\d+ of the node): "
_OF_NODE = r"(?P<told>\S+ of the node): "

# As health_clues.py puts it. What waits for a reset and is no Xid of this attempt may have been so
# all the time: it is a cause where nothing else is.
HEALTH_WORDS = [
    Signature("sick GPU", _GRAVE + _OF_GPU, GPU, _HEALTH, 0.95, is_sick=True),
    Signature("sick node", _GRAVE + _OF_NODE, NODE, _HEALTH, 0.9, is_sick=True),
    Signature("GPU to mend", f"^(reset|after): {_OF_GPU}", GPU, _HEALTH, 0.6, WEAK, is_sick=True),
    Signature(
        "node to mend", f"^(reset|after): {_OF_NODE}", NODE, _HEALTH, 0.6, WEAK, is_sick=True
    ),
    # 43 and 45 are seen at any hard end of a process.
    Signature("GPU on an end", r"^(some )?program: XID4[35]\b", CODE, _HEALTH, 0.3, WEAK),
    Signature("GPU on some program", r"^some program: ", CODE, _HEALTH, 0.6, WEAK),
    Signature("GPU on the program", r"^program: XID(?P<xid>\d+)", CODE, _HEALTH, 0.8, SOMEBODYS),
]
