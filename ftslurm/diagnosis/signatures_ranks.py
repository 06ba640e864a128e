"""The table's rows for what ranks say: exceptions, and the lines of CUDA, NCCL, gloo and torch.

Data only; the order is that of meaning: what names a cause comes before what is an echo of another
rank's end, and that before the types of exceptions that any code may raise.
"""

from __future__ import annotations

from ftslurm.diagnosis.causes import (
    CAPACITY,
    CHECKPOINT,
    CODE,
    DATA,
    GPU,
    HANG,
    NETWORK_TRANSIENT,
    NODE,
    NUMERIC,
    OOM_GPU,
    OOM_HOST,
    STORAGE,
    UNKNOWN,
)
from ftslurm.diagnosis.signatures import RANK, TEXT, UNCLEAR, WEAK, Signature

_NVRX = "NVRx PATTERN_REGISTRY.md"
_TORCH = "pytorch ProcessGroupNCCL.cpp"
_STORE = "pytorch TCPStore.cpp, elastic rendezvous"

_CHECKPOINT_PLACE = (
    r"checkpoints?/|step-\d{6,}|\.distcp|\.ckpt\b|distributed/checkpoint|"
    r"ftslurm/(checkpoint/|train/(restore|checkpointer))|load_checkpoint|safetensors"
)
_DATA_PLACE = (
    r"(?i)data_?set|data_?loader|/data/|token_store|ftslurm/train/(loader|feed)|webdataset|"
    r"\.(tar|h5|hdf5|arrow|jsonl|npy|mds)\b|\bparquet\b|h5py|_utils/(worker|fetch)\.py|\bsample\b"
)
_DAMAGE = (
    r"UnicodeDecodeError|BadZipFile|EOFError|Unexpected end of|zlib\.error|\bCRC|[Cc]orrupt|"
    r"truncated|invalid load key|UnpicklingError|not a (zip|tar|gzip|HDF5) file|"
    r"file signature not found|PytorchStreamReader|HeaderTooLarge|SafetensorError|"
    r"[Cc]hecksum|[Dd]igest (mismatch|differs)|\bReadError|inflate\(\) failed|"
    r"magic bytes not found|cannot identify image file"
)

_NOT_FINITE = r"\b(nan|inf|infinite|non-?finite|not finite)\b(?! iterations)"

# Our own name for what the other ranks say of an end; first, because most ranks say it.
OURS = [
    Signature("peer lost", r"\APeerLost\b", None, "ftslurm train/entry.py"),
    Signature("misread", r"\AMisreadError\b", NODE, "ftslurm train/restore.py", 0.9),
    Signature("misread elsewhere", r"\AMisreadElsewhereError\b", None, "ftslurm train/restore.py"),
    Signature("loss watch", r"\ANumericError\b", NUMERIC, "ftslurm train/numeric.py", 0.99),
]

NAMED = [
    Signature(
        "GPU memory",
        r"(CUDA|HIP|Cuda failure).{0,12}out of memory|OutOfMemoryError|"
        r"CU\w+_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|RESOURCE_EXHAUSTED: Out of memory|"
        r"(?<! on host: )CUDA_ERROR_OUT_OF_MEMORY",
        OOM_GPU,
        _NVRX,
        0.9,
    ),
    # What may be locked (ulimit -l) is used up, not the memory.
    Signature(
        "locked memory",
        r"Call to ibv_\w+ failed with error Cannot allocate memory",
        CAPACITY,
        "nccl ibvwrap.cc, nccl-tests#206",
        0.7,
    ),
    Signature(
        "host memory",
        r"^MemoryError|Cannot allocate memory|\[Errno 12\]|DefaultCPUAllocator|std::bad_alloc|"
        r"ArrayMemoryError\b|bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
        OOM_HOST,
        "errno ENOMEM; torch alloc_cpu.cpp; numpy _exceptions.py",
        0.75,
    ),
    Signature(
        "GPU broken",
        r"uncorrectable (NVLink|ECC)|NVLink.{0,40}uncorrectable|GPU is lost|GPU requires reset|"
        r"fallen off the bus|cudaErrorECCUncorrectable|"
        r"Unable to determine the device handle for GPU",
        GPU,
        "CUDA driver API errors; NVRx",
        0.9,
    ),
    Signature("GPU hang", r"HW Exception by GPU", GPU, "ROCm ROCR-Runtime runtime.cpp", 0.6),
    # As often a job without a GPU as a node with a broken one: too little to exclude a node for.
    Signature(
        "no GPU",
        r"no CUDA-capable device|CUDA-capable device\S* (is/)?are busy|system not yet initialized|"
        r"CUDA driver initialization failed|No (CUDA|HIP) GPUs are available|"
        r"Found no NVIDIA driver",
        GPU,
        "CUDA driver API errors",
        0.4,
    ),
    Signature(
        "kernel fault",
        r"device-side assert|illegal memory access|misaligned address|illegal instruction was|"
        r"Memory access fault by GPU",
        CODE,
        f"{_NVRX}; without an Xid of the hardware",
        0.7,
    ),
    Signature(
        "launch failure",
        r"unspecified launch failure|HSA_STATUS_ERROR_EXCEPTION",
        CODE,
        "CUDA driver API errors; the hardware's when an Xid says so",
        0.4,
    ),
    # Not of what loss scaling lives with: an overflow here and there, and the norm printed as nan.
    Signature(
        "not finite",
        r"(?i)\b(loss|activation\w*)\b[^\s|,]{0,3}([ \t]+(?!grad)[^\s|,]+){0,8}?[ \t=]*"
        rf"{_NOT_FINITE}|\bgrad\w*\b[^\n|,:=]{{0,60}}{_NOT_FINITE}|"
        r"\bnorm (is|was|became) (nan|inf)|\bnon-?finite\b|\bnan or inf\b|"
        r"\bfound nan in (local )?(grad|forward|loss|output)|"
        r"loss scale already at minimum|returned nan values|loss spike|^FloatingPointError\b",
        NUMERIC,
        "NVRx nan_or_inf",
        0.85,
    ),
    # Before storage: what MPI says of a link ends in `Input/output error`.
    Signature(
        "fabric",
        r"NET/IB ?: ?(\S+ )*Got (completion|async event : (port error|local catastrophic))|"
        r"RETRY_EXC|vendor err 129|IBV_WC_\w+_ERR|NET/OFI Request \S+ completed with error|"
        r"Transport retry count exceeded|OFI poll failed|Endpoint could not be reached|"
        r"socket(Poll|Start)Connect: Connect to [^\n]{0,60}(No route to host|unreachable)",
        NETWORK_TRANSIENT,
        "nccl p2p.cc, nccl#902; aws-ofi-nccl, UCX ib_mlx5_log.c, MPICH, PSM",
        0.7,
        trust=TEXT,
    ),
    Signature(
        "storage",
        r"Stale file handle|Input/output error|Remote I/O error|[Tt]ransport endpoint|"
        r"\[Errno (5|70|107|108|116|121)\]|Lustre\w*.{0,40}evict|\bE(STALE|IO)\b|"
        r"EndpointConnectionError|(Read|Connect)TimeoutError|503 Service Unavailable|"
        r"HTTP Error 503|AWS Error (NETWORK_CONNECTION|SLOW_DOWN)|\bSlowDown\b|"
        r"botocore\S*ConnectionClosedError",
        STORAGE,
        "judgement; errno(3)",
        0.75,
    ),
    Signature(
        "no room",
        r"No space left|Disk quota exceeded|\[Errno (28|122)\]|\bE(NOSPC|DQUOT)\b|"
        r"out of shared memory|killed by signal: Bus error|Fatal Python error: Bus error|"
        r"^\s*Bus error|\d+ Bus error|ended with code 135\b|"
        r"unable to (open|mmap|write|allocate)[^\n]{0,30} shared memory|"
        r"killed by signal 7\b|[Uu]nexpected bus error|failed to extend /dev/shm/|"
        r"Error while creating shared memory segment|"
        r"with signal SIGBUS|\(SIGBUS\) received",
        CAPACITY,
        "judgement; errno(3), torch DataLoader",
        0.8,
    ),
    # It keeps the errno to itself; nearly always the disk or the quota is full.
    Signature(
        "write failed",
        r"PytorchStreamWriter failed writing",
        CAPACITY,
        "pytorch inline_container.cc",
        0.5,
    ),
    Signature(
        "no right",
        r"Permission denied|^PermissionError|\[Errno (1|13|30)\]|Read-only file system|\bEACCES\b|"
        r"Too many open files|received 0 items of ancdata|can't start new thread|"
        r"\[Errno 11\] Resource|pthread_create failed|Thread creation failed",
        CAPACITY,
        "judgement; errno(3)",
        0.75,
    ),
    # What a save or a read failed of counts more than that it failed.
    Signature("checkpoint", r"^CheckpointError\b", CHECKPOINT, "ftslurm errors.py", 0.9),
    Signature("data", r"^DataError\b", DATA, "ftslurm errors.py", 0.9),
    Signature("damaged checkpoint", _DAMAGE, CHECKPOINT, "NVRx", 0.75, context=_CHECKPOINT_PLACE),
    Signature("damaged data", _DAMAGE, DATA, "NVRx confirmation_retry", 0.75, context=_DATA_PLACE),
    Signature(
        "NCCL usage",
        r"ncclInvalid(Usage|Argument)",
        CODE,
        "pytorch NCCLUtils.cpp",
        0.8,
    ),
    Signature(
        "collective timed out",
        r"Watchdog caught collective operation timeout|"
        r"[Rr]ank (?P<rank>\d+) failed to pass monitoredBarrier|"
        r"Timed out waiting \d+ ?ms for (recv|send) operation",
        HANG,
        f"{_TORCH}; gloo unbound_buffer.cc",
        0.5,
        trust=TEXT,
    ),
    Signature(
        "watchdog stuck",
        r"watchdog got stuck for|HeartbeatMonitor.{0,80}(stuck|hang|timed out)",
        HANG,
        f"{_TORCH}: the process itself stands, by its interpreter lock or in CUDA",
        0.5,
        trust=TEXT,
    ),
]

# Under a program's rank: how the program ended, when its own last words have told nothing.
DEATHS = [
    Signature(
        "bare kill",
        r"killed by signal(: | 9 \()Killed|^Killed$|\d+ Killed\b|ended with code 137\b|"
        r"terminated with signal SIGKILL|Signal 9 \(SIGKILL\) received",
        UNKNOWN,
        "NVRx TAXONOMY.md",
        0.3,
        trust=WEAK,
    ),
    Signature(
        "crash",
        r"Fatal Python error: (Segmentation|Illegal|Floating)|"
        r"(killed by signal[^\n]{0,6}|^\s*|\d+ )Segmentation fault|"
        r"killed by signal (4|8|11)\b|ended with code (132|136|139)\b|"
        r"terminated with signal SIG(SEGV|ILL|FPE)|Signal (4|8|11) \(\w+\) received by PID|"
        r"double free or corruption|(free|malloc|realloc|munmap_chunk)\(\): |corrupted size vs",
        CODE,
        "NVRx framework_crash",
        0.6,
        trust=RANK,
    ),
    Signature(
        "told to end",
        r"killed by signal (2|15)\b|killed by signal: Terminated",
        None,
        "torch elastic",
    ),
    Signature(
        "worker gone",
        r"DataLoader worker.{0,40}exited unexpectedly",
        UNKNOWN,
        "torch DataLoader",
        0.3,
        trust=WEAK,
    ),
]

ECHOES = [
    Signature(
        "connection closed",
        r"Connection closed by (remote )?peer|Connection reset by (remote )?peer|"
        r"ConnectionResetError|ConnectionAbortedError|BrokenPipeError|Broken pipe|"
        r"failed to recv|Failed to recv|recvValue failed|Socket closed|socketProgress|"
        r"socketStartConnect|socketPollConnect|sendBytes failed|server has shut down",
        None,
        "nccl socket.cc, gloo pair.cc, pytorch TCPStore.cpp",
    ),
    Signature(
        "NCCL summary",
        r"ncclRemoteError|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|"
        r"NCCL [Ee]rror|unhandled (system|cuda) error|remote process exit|"
        r"NCCL communicator was aborted|ncclCommAbort|DistBackendError|"
        r"Some NCCL operations have failed or timed out|taking the entire process down|"
        r"avoid data inconsistency|Exception raised from|terminate called|what\(\):|"
        r"Fatal Python error: Aborted",
        None,
        "pytorch NCCLUtils.cpp, ProcessGroupNCCL.cpp",
    ),
    Signature(
        "wrapper",
        r"ChildFailedError|SignalException|got signal: (2|15)\b|Sending process \d+ closing|"
        r"RendezvousClosedError|RendezvousGracefulExitError|^KeyboardInterrupt",
        None,
        "torch elastic",
    ),
    Signature(
        "cleaning up",
        r"Device or resource busy: '[^'\n]*\.nfs|Directory not empty: '[^'\n]*/pymp-",
        None,
        "Python multiprocessing/util.py",
    ),
]

MEETING = [
    Signature(
        "no rendezvous",
        r"RendezvousTimeoutError|RendezvousConnectionError|DistStoreError|DistNetworkError|"
        r"connectFullMesh|Connect timeout \[|DEADLINE_EXCEEDED: (Barrier|Connect)|"
        r"store->get\(|wait timeout after|client socket has (timed out|failed)|"
        r"EADDRINUSE|[Aa]ddress already in use|\[Errno 98\]|"
        r"[Cc]onnection timed out|No route to host|[Nn]etwork is unreachable|Connection refused|"
        r"^ConnectionRefusedError|Temporary failure in name resolution|^TimeoutError|"
        r"[Ss]ocket [Tt]imeout",
        NETWORK_TRANSIENT,
        _STORE,
        0.6,
        trust=TEXT,
    ),
]

_TYPES = (
    r"ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError|UnboundLocalError|"
    r"AttributeError|KeyError|IndexError|LookupError|TypeError|ValueError|AssertionError|"
    r"ZeroDivisionError|ArithmeticError|OverflowError|NotImplemented\w+|RecursionError|"
    r"FileNotFoundError|IsADirectoryError|NotADirectoryError|Config\w*(Exception|Error)|"
    r"MissingMandatoryValue|InterpolationKeyError|InstantiationException|SpecError|UsageError|"
    r"CodeError|FormatError"
)

TYPES = [
    Signature(
        "shapes",
        r"size mismatch|shapes? .{0,60}(mismatch|cannot be multiplied|invalid)|mat1 and mat2|"
        r"Sizes of tensors must match|must match the size of tensor|"
        r"Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict",
        CODE,
        _NVRX,
        0.85,
    ),
    Signature("type", rf"^(\w+\.)*({_TYPES})\b", CODE, _NVRX, 0.85),
]

ANY = [Signature("any exception", r"^\S", CODE, "judgement", 0.4, trust=UNCLEAR)]
"""What a rank wrote down as its end is one, whatever its name; much of it passes, like a download
that failed, so that a first one alone does not end a run."""

ANY_IN_LOG = [
    Signature(
        "any exception in a log",
        r"^(\w+\.)*\w+(Error|Exception)\b",
        CODE,
        "judgement",
        0.4,
        trust=UNCLEAR,
    ),
    Signature(
        "end of a traceback",
        r"\A[A-Za-z_][\w.]*(:|$)",
        CODE,
        "judgement",
        0.4,
        trust=UNCLEAR,
        context=r"Traceback \(most recent call last\)",
    ),
]
