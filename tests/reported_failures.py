"""Ends of failed runs as people have reported them in public, a few lines each, and their cause.

What the programs print is theirs, word for word; hosts, process ids, paths and numbers are changed.
Each is the end of rank 3's log behind some steps of training, or what srun has said.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    TIME_LIMIT,
    UNKNOWN,
)

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n'


@dataclass(frozen=True)
class Report:
    source: str
    """Owner, repository and number of the public thread, or the program's own source."""
    cause: str
    text: str
    by_launcher: bool = False

    @property
    def name(self) -> str:
        return f"{self.source} {self.text.strip().splitlines()[-1][:40]}"


def raised(source: str, cause: str, text: str, where: str = "") -> Report:
    return Report(source, cause, f"{TRACEBACK}{where}{text}")


def srun(source: str, cause: str, text: str) -> Report:
    return Report(source, cause, text, by_launcher=True)


_WORKER = '  File "torch/utils/data/_utils/worker.py", line 309, in _worker_loop\n'
_LOADED = '  File "train.py", line 90, in load\n    state = torch.load("checkpoints/last.pt")\n'
_UNWELL = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile "
    "with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
_REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
    "NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\n"
)
_CHILD_FAILED = (
    "E0902 15:10:49.013000 8190 torch/distributed/elastic/multiprocessing/api.py:874] failed "
    "(exitcode: {code}) local_rank: 0 (pid: 8195) of binary: /opt/bin/python\n"
    "Traceback (most recent call last):\n"
    '  File "/opt/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "============================================================\ntrain.py FAILED\n"
    "------------------------------------------------------------\nFailures:\n"
    "  <NO_OTHER_FAILURES>\n------------------------------------------------------------\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2025-09-02_15:10:48\n"
    "  host      : n2\n  rank      : 3 (local_rank: 0)\n  exitcode  : {code} (pid: 8195)\n"
    "  error_file: <N/A>\n  traceback : {said}\n"
    "============================================================\n"
)


def torchrun(code: int, said: str = "To enable traceback see: https://pytorch.org/docs") -> str:
    return _CHILD_FAILED.format(code=code, said=said)


REPORTS = [
    # Collectives: mostly what is left of another rank's end.
    raised("NVIDIA/nccl#2076", UNKNOWN,
           f"{_REMOTE}socketProgressOpt: Call to recv from 172.16.0.4<33759> failed : Connection "
           "reset by peer\n"),
    raised("NVIDIA/nccl#1514", UNKNOWN,
           "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
           "ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\nncclInternalError: "
           "Internal check failed.\nLast error:\nNet : Connection closed by remote peer n1<50260>"),
    raised("NVIDIA/nccl#1928", NETWORK_TRANSIENT,
           f"{_REMOTE}NET/OFI Request 0x7f14cc5b60c0 completed with error. RC: 113. Error: 2 "
           "(UNDELIVERABLE). Completed length: 0\n"),
    Report("NVIDIA/nccl#795", UNKNOWN,
           "n2:1830:1832 [1] misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.0.84.247"
           "<58355> failed : Broken pipe\nn2:1830:1832 [1] NCCL INFO misc/socket.cc:535 -> 6\n"
           "n2:1830:1832 [1] proxy.cc:1119 NCCL WARN [Proxy Service 9] Failed to execute operation "
           "Connect from rank 9, retcode 6\n"),
    Report("sgl-project/sglang#3820", NETWORK_TRANSIENT,
           "n2:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4"
           "<56849> returned 113(No route to host) errno 115(Operation now in progress)\n"),
    Report("NVIDIA/nccl-tests#227", NETWORK_TRANSIENT,
           "n2:577:577 [0] misc/ibvwrap.cc:160 NCCL WARN Call to ibv_modify_qp failed with error "
           "Connection timed out\n"),
    Report("NVIDIA/nccl-tests#185", NETWORK_TRANSIENT,
           "n2:2152:2299 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error "
           "Network is unreachable\n"),
    Report("NVIDIA/nccl#902", NETWORK_TRANSIENT,
           "n2:815:864 [0] transport/net_ib.cc:788 NCCL WARN NET/IB : Got completion with error "
           "12, opcode 0, len 0, vendor err 129\n"),
    Report("NVIDIA/nccl#905", NETWORK_TRANSIENT,
           "n2:815:864 [0] transport/net_ib.cc:80 NCCL WARN NET/IB : Got async event : port "
           "error\n"),
    Report("NVIDIA/nccl#230", NETWORK_TRANSIENT,
           "n2:815:864 [0] transport/net_ib.cu:80 NCCL WARN NET/IB : Got async event : local "
           "catastrophic error\n"),
    Report("XPixelGroup/BasicSR#737", HANG,
           "[rank3]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught "
           "collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, "
           "NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
           "[rank3]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0("
           "default_pg) Rank 3] Exception (either an error or timeout) detected by watchdog at "
           "work: 808, last enqueued NCCL work: 811, last completed NCCL work: 807.\n"),
    Report("sgl-project/sglang#1693", HANG,
           "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "
           "[PG 3 Rank 3] Process group watchdog thread terminated with exception: [Rank 3] "
           "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9141, OpType=_ALLGATHER_"
           "BASE, NumelIn=19008, NumelOut=152064, Timeout(ms)=600000) ran for 600020 milliseconds "
           "before timing out.\nException raised from checkTimeout at ../torch/csrc/distributed/"
           "c10d/ProcessGroupNCCL.cpp:609 (most recent call first):\nframe #0: c10::Error::Error("
           "c10::SourceLocation, std::string) + 0x96 (0x7f3b6d41df86 in libc10.so)\n"),
    raised("pytorch/gloo#511", HANG,
           "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms "
           "for recv operation to complete\n"),
    raised("facebookarchive/caffe2#360", NETWORK_TRANSIENT,
           "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:611] Connect timeout "
           "[172.17.27.13]:27023\n"),
    raised("sehoffmann/dmlcloud#47", NETWORK_TRANSIENT,
           "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/"
           "pair.h:301] Connect timeout [none]\n"),
    Report("horovod/horovod#2829", UNKNOWN,
           "terminate called after throwing an instance of 'gloo::IoException'\n  what():  "
           "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:3977:"
           " Connection reset by peer\nAborted (core dumped)\n"),
    raised("speechbrain/speechbrain#2401", CODE,
           "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running "
           "collective: CollectiveFingerPrint(SequenceNumber=485, OpType=ALLREDUCE, TensorShape=[25"
           "], TensorDtypes=Float), but Rank 0 is running collective: CollectiveFingerPrint("
           "SequenceNumber=485, OpType=BROADCAST, TensorShape=[1], TensorDtypes=Long)\n"),
    # MPI, UCX and the like
    Report("openucx/ucx#9590", NETWORK_TRANSIENT,
           "[n2:2330:0:2330] ib_mlx5_log.c:177  Transport retry count exceeded on mlx5_0:1/IB "
           "(synd 0x15 vend 0x81 hw_synd 0/0)\n[n2:2330:0:2330] ib_mlx5_log.c:177  DCI QP 0xd16 "
           "wqe[6168]: SEND s-e [rqpn 0x17de rlid 1037] [va 0x7f9f745cea80 len 5770 lkey 0x15de4] "
           "\n==== backtrace (tid:2330) ====\n 0  libucs.so.0(ucs_handle_error+0x294) "
           "[0x7fada58370a4]\n"),
    Report("ofiwg/libfabric#11307", NETWORK_TRANSIENT,
           "MPICH ERROR [Rank 11122] [job id 41595204.0] [Thu Aug 14 08:27:11 2025] [n2] - Abort("
           "2695311) (rank 11122 in comm 0): Fatal error in PMPI_Allreduce: Other MPI error, error "
           "stack:\nMPIDI_Progress_test(97)..............:\nMPIDI_OFI_handle_cq_error(1075)......: "
           "OFI poll failed (ofi_events.c:1077:MPIDI_OFI_handle_cq_error:Input/output error - "
           "CANCELED)\n"),
    Report("flux-framework/flux-core#3277", NETWORK_TRANSIENT,
           "[n2:mpi_rank_2][mv2_psm_err_handler] PSM error handler: Endpoint could not be reached "
           ": Some shared memory endpoints could not be connected\npsm_ep_connect failed with "
           "error Endpoint could not be reached\n"),
    Report("open-mpi/ompi#9785", UNKNOWN,
           "NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n[n2.24154] PMIX "
           "ERROR: UNREACHABLE in file server/pmix_server.c at line 2147\n"),
    Report("jax-ml/jax#23599", UNKNOWN,
           "2024-10-09 15:47:38.568412: E external/xla/xla/tsl/distributed_runtime/coordination/"
           "coordination_service.cc:1170] /job:jax_worker/replica:0/task:0 has been set to ERROR "
           "in coordination service: UNAVAILABLE: Task /job:jax_worker/replica:0/task:0 heartbeat "
           "timeout. This indicates that the remote task has failed, got preempted, or crashed "
           "unexpectedly.\n"),
    raised("ayaka14732/llama-2-jax#20", NETWORK_TRANSIENT,
           "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. "
           "Barrier_id: PjRT_Client_Connect. Timed out task names:\n/job:jax_worker/"
           "replica:0/task:1\n"),
    # GPUs
    raised("vllm-project/vllm#5222", GPU,
           f"RuntimeError: CUDA error: uncorrectable ECC error encountered\n{_UNWELL}"),
    raised("NVIDIA/semantic-segmentation#33", GPU,
           "RuntimeError: cuda runtime error (39) : uncorrectable ECC error encountered at "
           "/pytorch/aten/src/THC/THCCachingHostAllocator.cpp:265\nterminate called without an "
           "active exception\n"),
    Report("kohya-ss/sd-scripts#1434", GPU,
           "[E ProcessGroupNCCL.cpp:916] [Rank 3] NCCL watchdog thread terminated with exception: "
           f"CUDA error: uncorrectable ECC error encountered\n{_UNWELL}"),
    Report("nagadit/DeepFaceLab_Linux#89", GPU,
           "F tensorflow/stream_executor/lib/statusor.cc:34] Attempting to fetch value instead of "
           "handling error Internal: failed initializing StreamExecutor for CUDA device ordinal 0: "
           "Internal: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE: "
           "uncorrectable ECC error encountered\n"),
    Report("ROCm/legacy-rocm-build#5259", GPU,
           "HW Exception by GPU node-4 (Agent handle: 0x1ebc04e0) reason :GPU Hang\n"
           f"{torchrun(-6, 'Signal 6 (SIGABRT) received by PID 8195')}"),
    raised("NVIDIA/nvidia-resiliency-ext#18", GPU,
           "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
           f"{_UNWELL}"),
    raised("CUDA runtime: cudaErrorDevicesUnavailable", GPU,
           "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable\n"),
    raised("pytorch c10/cuda/CUDAFunctions.cpp", GPU, "RuntimeError: No CUDA GPUs are available\n"),
    raised("rwth-i6/returnn#1496", CODE,
           f"RuntimeError: CUDA error: unspecified launch failure\n{_UNWELL}"),
    raised("SNU-ARC/DecDEC#1", CODE,
           "torch.AcceleratorError: CUDA error: unspecified launch failure\nSearch for "
           "`cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda/cuda-runtime-api for more "
           f"information.\n{_UNWELL}"),
    raised("ROCm/legacy-rocm-build#5742", CODE,
           "torch.AcceleratorError: HIP error: an illegal memory access was encountered\nSearch "
           "for `hipErrorIllegalAddress' in https://rocm.docs.amd.com for more information.\n"),
    Report("ROCm/legacy-rocm-build#1535", CODE,
           "Memory access fault by GPU node-2 (Agent handle: 0x55fea5592860) on address "
           "0x7fc133800000. Reason: Page not present or supervisor privilege.\nAborted (core "
           "dumped)\n"),
    Report("ROCm/legacy-rocm-build#6003", CODE,
           "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  "
           "CUDA error: an illegal memory access was encountered\nSearch for `hipErrorIllegal"
           f"Address' in https://rocm.docs.amd.com for more information.\n{_UNWELL}"),
    # Memory
    raised("ROCm/TheRock#2118", OOM_GPU,
           "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a "
           "total capacity of 255.98 GiB of which 244.65 GiB is free.\n"),
    raised("pytorch/pytorch#99699", OOM_GPU,
           "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 138.00 MiB.\nGPU 0 "
           "has a total capacty of 15.90 GiB of which 8.44 MiB is free.\n"),
    raised("jax: XLA's allocator", OOM_GPU,
           "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying "
           "to allocate 4294967296 bytes.\n"),
    Report("Accenture/AIR#7", OOM_HOST,
           "2022-06-16 02:36:14.576914: E tensorflow/stream_executor/cuda/cuda_driver.cc:893] "
           "failed to alloc 966367744 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"),
    Report("numpy _core/_exceptions.py", OOM_HOST,
           f"{TRACEBACK}numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for "
           "an array with shape (1000000000,) and data type float64\n"),
    raised("pytorch c10/core/impl/alloc_cpu.cpp", OOM_HOST,
           "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't "
           "allocate memory: you tried to allocate 16777216 bytes. Error code 12 (Cannot allocate "
           "memory)\n"),
    srun("nextflow-io/nextflow#5932", OOM_HOST,
         "slurmstepd: error: Detected 1 oom_kill event in StepId=118.2. Some of the step tasks "
         "have been OOM Killed.\nsrun: error: n2: task 3: Out Of Memory\n"),
    srun("ZwwWayne/K-Net#30", OOM_HOST,
         "slurmstepd-n2: error: Detected 1 oom-kill event(s) in StepId=118.2. Some of your "
         "processes may have been killed by the cgroup out-of-memory handler.\nsrun: error: n2: "
         "task 3: Out Of Memory\nsrun: launch/slurm: _step_signal: Terminating StepId=118.2\n"),
    srun("snakemake/snakemake-executor-plugin-slurm#371", OOM_HOST,
         "slurmstepd: error: Detected 2 oom_kill events in StepId=118.2. Some of the step tasks "
         "have been OOM Killed.\nsrun: error: n2: task 3: Out Of Memory\n"),
    Report("lanl/PyBNF#118", OOM_HOST,
           "slurmstepd: error: Detected 2 oom-kill event(s) in step 118.batch cgroup.\n"),
    Report("janelia-cellmap/cellmap-segmentation-challenge#98", OOM_HOST,
           "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_"
           "alloc\nFatal Python error: Aborted\n\nThread 0x000040064441f1e0 (most recent call "
           'first):\n  File "xarray_tensorstore.py", line 135 in __array__\n'),
    # Killed, crashed
    Report("ArjunaCluster/ArjunaUsers#52", UNKNOWN,
           "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  "
           "python3 main.py --epochs 400\n"),
    raised("lyu-yx/ACUMEN#4", UNKNOWN,
           "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal "
           "SIGKILL\n"),
    raised("yxlu-0102/MP-SENet#7", CODE,
           "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal "
           "SIGSEGV\n"),
    Report("hpcaitech/ColossalAI#3514", UNKNOWN,
           torchrun(-9, "Signal 9 (SIGKILL) received by PID 8195")),
    Report("pytorch elastic/multiprocessing/errors", CODE,
           torchrun(-11, "Signal 11 (SIGSEGV) received by PID 8195")),
    # Storage, disks, rights
    raised("huggingface/transformers#9732", STORAGE, "OSError: [Errno 116] Stale file handle\n"),
    raised("LISTatSNU/FastMRI_challenge#223", STORAGE, "OSError: [Errno 5] Can't read data\n"),
    raised("whamcloud/integrated-manager-for-lustre#107", STORAGE,
           "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/run'\n"),
    raised("nfs-ganesha/nfs-ganesha#1091", STORAGE, "OSError: [Errno 121] Remote I/O error\n"),
    raised("errno(3): ECOMM", STORAGE,
           "OSError: [Errno 70] Communication error on send: '/beegfs/run'\n"),
    raised("pytorch/pytorch#10577", STORAGE,
           "RuntimeError: write(): fd 29 failed with Input/output error\n"),
    raised("tloen/alpaca-lora#280", CAPACITY, "OSError: [Errno 122] Disk quota exceeded\n"),
    raised("hiyouga/LlamaFactory#1223", CAPACITY,
           "RuntimeError: [enforce fail at inline_container.cc:445] . PytorchStreamWriter failed "
           "writing file data/176: file write failed\n", _LOADED),
    raised("hkchengrex/STCN#132", CAPACITY,
           "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is "
           "possible that dataloader's workers are out of shared memory. Please try to raise your "
           "shared memory limit.\n"),
    Report("facebookresearch/mmf#441", CAPACITY,
           "ERROR: Unexpected bus error encountered in worker. This might be caused by "
           "insufficient shared memory (shm).\n"),
    raised("zju3dv/NeuralRecon#91", CAPACITY,
           "RuntimeError: Too many open files. Communication with the workers is no longer "
           "possible. Please increase the limit using `ulimit -n` in the shell or change the "
           "sharing strategy by calling `torch.multiprocessing.set_sharing_strategy('file_system')`"
           " at the beginning of your code\n"),
    raised("pytorch/pytorch#973", CAPACITY, "RuntimeError: received 0 items of ancdata\n"),
    raised("pytorch/pytorch#25691", CAPACITY, "OSError: [Errno 24] Too many open files\n"),
    raised("Project-MONAI/MONAI#1328", CAPACITY, "RuntimeError: can't start new thread\n"),
    raised("facebookresearch/detectron2#3900", CAPACITY,
           "BlockingIOError: [Errno 11] Resource temporarily unavailable\n"),
    Report("MIC-DKFZ/nnUNet#1343", CAPACITY,
           "OpenBLAS blas_thread_init: pthread_create failed for thread 50 of 64: Resource "
           "temporarily unavailable\nOpenBLAS blas_thread_init: RLIMIT_NPROC 4096 current, 513046 "
           "max\n"),
    Report("open-mmlab/OpenPCDet#329", CAPACITY,
           "libgomp: Thread creation failed: Resource temporarily unavailable\n"),
    Report("NVIDIA/nccl-tests#206", CAPACITY,
           "n2:577:577 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with "
           "error Cannot allocate memory\n"),
    Report("NVIDIA/nccl-tests#166", CAPACITY,
           "n2:9621:9691 [6] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/"
           "nccl-fjwOOB to 5967876 bytes\nn2:9621:9691 [6] misc/shmutils.cc:112 NCCL WARN Error "
           "while creating shared memory segment /dev/shm/nccl-fjwOOB (size 5967872)\n"),
    Report("NVIDIA/nccl#290", CAPACITY,
           "n2:2143:2561 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space "
           "left on device\n"),
    Report("numpy/numpy#21964", CAPACITY, "Bus error (core dumped)\n"),
    raised("ray-project/ray#43803", STORAGE,
           "OSError: AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 28, "
           "Timeout was reached\n"),
    raised("huggingface/datatrove#256", STORAGE,
           "botocore.exceptions.ConnectTimeoutError: Connect timeout on endpoint URL: "
           "\"https://s3.example.org/segments/0007.warc.gz\"\n"),
    raised("sillsdev/silnlp#565", STORAGE,
           "botocore.exceptions.ConnectionClosedError: Connection was closed before we received a "
           "valid response from endpoint URL: \"https://s3.example.org/run/model.pt\".\n"),
    raised("cockpit-project/bots#3991", STORAGE,
           "urllib.error.HTTPError: HTTP Error 503: Slow Down\n"),
    raised("gram-ai/capsule-networks#5", UNKNOWN,
           "OSError: [Errno 16] Device or resource busy: '.nfs000000009886bd5100000235'\n"),
    raised("renqianluo/NAO_pytorch#3", UNKNOWN,
           "OSError: [Errno 39] Directory not empty: '/tmp/pymp-yffyhr_a'\n"),
    # Data and checkpoints
    raised("MrZihan/GridMM#9", DATA, "OSError: Can't read data (inflate() failed)\n",
           '  File "h5py/_hl/dataset.py", line 758, in __getitem__\n'),
    raised("Farama-Foundation/D4RL#210", DATA,
           "OSError: Unable to open file (truncated file: eof = 5365760, sblock->base_addr = 0, "
           "stored_eof = 34720209)\n", '  File "h5py/h5f.pyx", line 106, in h5py.h5f.open\n'),
    raised("huggingface/datasets#4077", DATA,
           "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer. Either the file is "
           "corrupted or this is not a parquet file.\n"),
    raised("facebookresearch/deit#76", DATA,
           "OSError: Caught OSError in DataLoader worker process 3.\nOriginal Traceback (most "
           f"recent call last):\n{_WORKER}OSError: cannot identify image file <_io.BufferedReader "
           "name='/imagenet/train/n01667778_6494.JPEG'>\n"),
    raised("modelscope/ms-swift#6141", CHECKPOINT, "EOFError: Ran out of input\n", _LOADED),
    raised("openpsi-project/ReaLHF#44", CHECKPOINT,
           "safetensors_rust.SafetensorError: Error while deserializing header: "
           "MetadataIncompleteBuffer\n", _LOADED),
    # Numbers
    raised("hiyouga/LlamaFactory#315", NUMERIC,
           "Exception: Current loss scale already at minimum - cannot decrease scale anymore. "
           "Exiting run.\n"),
    raised("alibaba/Pai-Megatron-Patch#366", NUMERIC,
           "AssertionError: Rank 11: found NaN in local grad norm in backward pass before "
           "data-parallel communication collective. Device: 3\n"),
    Report("facebookresearch/mae engine_pretrain.py", NUMERIC, "Loss is nan, stopping training\n"),
    # Slurm
    srun("nebius/soperator#854", NODE, "srun: error: Node failure on n2\n"),
    srun("ZettaAI/zetta_utils#671", TIME_LIMIT,
         "srun: Job step aborted: Waiting up to 47 seconds for job step to finish.\nslurmstepd: "
         "error: *** JOB 118 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"),
    srun("aws/aws-parallelcluster#4179", NETWORK_TRANSIENT,
         "srun: error: Task launch for StepId=20.0 failed on node n2: Socket timed out on "
         "send/recv operation\nsrun: error: Application launch failed: Socket timed out on "
         "send/recv operation\nsrun: error: Timed out waiting for job step to complete\n"),
    srun("ai-dynamo/nixl#2085", NETWORK_TRANSIENT,
         "srun: error: Unable to confirm allocation for job 118: Socket timed out on send/recv "
         "operation\n"),
    srun("vwxyzjn/cleanba#5", CODE, "srun: error: n2: task 3: Segmentation fault\n"),
]  # fmt: skip
