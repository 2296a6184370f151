"""The catalogue of known causes: one row for each that a worker's output shows, as data.

The rows for signals and exit codes are in elaunch.agent.failure.explain, which says when which of
them counts; docs/errors.md is written from both. Of the texts the first row that fits wins, so what
is special comes before what is general. Codes are stable: programs and people search for them.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class Cause(Struct, frozen=True):
    """One known cause of a failure.

    Attributes:
        code: its stable name.
        cause: what happened, a sentence. ``{name}`` stands for a group of ``text``, or for what
            elaunch.agent.failure.explain adds.
        fix: what to do.
        text: a regular expression over what the worker printed, where that shows the cause.
        ends: the signals by name and the exit codes of a worker that show it.
        command: the exit code of the command that shows it, where elaunch ends the job; or 0.
        seen: how it is recognised where neither of these says so.
        victim: whether a worker shows this when another one ended or hung first.
        start: what the code means, and what to do, where elaunch's own message has it.
    """

    code: str
    cause: str
    fix: str = ""
    text: str = ""
    ends: tuple[str | int, ...] = ()
    command: int = 0
    seen: str = ""
    victim: bool = False
    start: str = ""


OOM_FIX: Final = (
    "Raise the job's memory limit, or use less: batch size, DataLoader workers, caches."
)
_CUDA_FIX: Final = "CUDA reports late: run with CUDA_LAUNCH_BLOCKING=1 to see the call that failed."

_MEMORY: Final = (
    Cause(
        "E-CUDA-OOM",
        "The GPU's memory is used up.",
        "Lower the batch size or use activation checkpointing; see with nvidia-smi whether another "
        "process holds memory on this GPU.",
        r"(?:CUDA|HIP|XPU) out of memory|torch\.(?:cuda\.)?OutOfMemoryError"
        r"|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    Cause(
        "E-HOST-MEMORY",
        "The machine refused more memory.",
        OOM_FIX,
        r"DefaultCPUAllocator: can't allocate|Cannot allocate memory|^(?:[\w.]+\.)?\w*MemoryError",
    ),
    Cause(
        "E-SHM-FULL",
        "Shared memory (/dev/shm) is full.",
        "Give it more (docker run --shm-size=8g, a Kubernetes emptyDir with medium: Memory) or use "
        "fewer DataLoader workers.",
        r"unable to (?:write to file|open|mmap|allocate shared memory)\b.*</?torch_"
        r"|killed by signal: Bus|[Ee]rror while (?:creating|attaching to) shared memory segment",
    ),
    Cause(
        "E-DATALOADER-KILLED",
        "A DataLoader worker was killed, most often for memory.",
        OOM_FIX,
        r"DataLoader worker .*killed by signal: Killed",
    ),
    Cause(
        "E-DATALOADER-DIED",
        "A process of the DataLoader ended, and what it had to say is lost: native code crashed in "
        "it, it was killed, most often for memory, or it left by itself.",
        "Run with num_workers=0 to see the error where it happens.",
        r"DataLoader worker \(pid.*(?:killed by signal|exited unexpectedly)",
    ),
    Cause(
        "E-DATALOADER-TIMEOUT",
        "A DataLoader waited longer than its timeout for a batch.",
        "Look at what the data set reads from (a slow or hanging file system, a download), use "
        "more num_workers, or raise timeout=.",
        r"DataLoader timed out after \d+",
    ),
)

_FILES: Final = (
    Cause(
        "E-CHECKPOINT-TORN",
        "A checkpoint or another saved file cannot be read: it is cut short, damaged, or not what "
        "the script takes it for.",
        "Remove it and resume from an older one; `elaunch checkpoints verify` names what is "
        "whole. Save with ctx.checkpoint.save, or write to another name and rename, so that a "
        "crash leaves no half file.",
        r"PytorchStreamReader failed|invalid load key|pickle data was truncated|Ran out of input"
        r"|unexpected EOF, expected \d+ more bytes|^(?:[\w.]+\.)?SafetensorError|BadZipFile"
        r"|Weights only load failed(?s:.*)Unsupported operand|\bDamageError:|legacy \.tar format"
        r'|/torch/\w+\.py", line \d+, in \w+\nEOFError$',
    ),
    Cause(
        "E-WEIGHTS-ONLY",
        "torch.load reads tensors and plain values only, and the file holds other objects.",
        "If the file is trusted: torch.load(…, weights_only=False), or name its classes to "
        "torch.serialization.add_safe_globals.",
        r"Weights only load failed",
    ),
    Cause(
        "E-CHECKPOINT-KEYS",
        "The checkpoint is of another model than the script builds: names or shapes differ.",
        "Build the model with the configuration that it was saved with; a `module.` in front of "
        "the names is DistributedDataParallel's: load into model.module.",
        r"Error\(s\) in loading state_dict for",
    ),
    Cause(
        "E-DISK-FULL",
        "A file system is full.",
        "See df -h (and df -i) for the directories the script writes to: checkpoints, logs, "
        "caches, /tmp, /dev/shm.",
        r"No space left on device|Errno 28\b",
    ),
    Cause(
        "E-SAVE-CUT",
        "A write failed while torch.save wrote its file: most often since the file system is full, "
        "or the quota or the limit of file sizes was reached; torch does not say which.",
        "See df -h (and df -i), quota -s and ulimit -f for the directory that it saves to.",
        r"inline_container\.cc:\d+\] \.? ?(?:unexpected pos|PytorchStreamWriter failed writing)"
        r"|basic_ios::clear: iostream error",
    ),
    Cause(
        "E-QUOTA",
        "The disk quota of this user is used up; see quota -s.",
        "Remove what is not needed, or write elsewhere.",
        r"Disk quota exceeded",
    ),
    Cause(
        "E-OPEN-FILES",
        "The process has too many open files.",
        'Raise ulimit -n, or call torch.multiprocessing.set_sharing_strategy("file_system").',
        r"Too many open files",
    ),
    Cause(
        "E-FILE-LIMIT",
        "A file outgrew the limit of file sizes; see ulimit -f.",
        "Raise it where the job is submitted.",
        r"\[Errno 27\] File too large",
        ("SIGXFSZ",),
    ),
    Cause(
        "E-READ-ONLY",
        "The script writes to a file system that is mounted read-only.",
        "Write to another directory; a disk that became read-only by itself has failed: see dmesg.",
        r"Read-only file system",
    ),
    Cause(
        "E-IO",
        "A file system failed while the script used it: the disk, or the server behind it.",
        "See dmesg and the state of the mount (df, mount); a stale NFS handle goes with a new "
        "mount.",
        r"\[Errno (?:5|112|116|121)\] |Stale file handle|Input/output error",
    ),
    Cause(
        "E-PERMISSION",
        "The user of this job may not do what the script tried{of}.",
        "See ls -l on the path and on its parents, and id in the job: a container has often "
        "another user.",
        r"^PermissionError: \[Errno (?:1|13)\] [^:\n]*(?:: '(?P<path>[^'\n]{1,300})')?",
    ),
    Cause(
        "E-FILE-MISSING",
        "A file or a directory that the script needs is not there{of}.",
        "Give it as a whole path, or relative to the directory in which elaunch was started; on "
        "several nodes every node needs it.",
        r"^FileNotFoundError: (?:\[Errno 2\] [^:\n]*(?:: '(?P<path>[^'\n]{1,300})')?)?",
    ),
)

_SCRIPT: Final = (
    Cause(
        "E-IMPORT",
        "The module {module!r} is not installed for this interpreter, or not on its path.",
        "Install it there, set PYTHONPATH, or start with -m from the project's directory.",
        r"ModuleNotFoundError: No module named '(?P<module>[^']+)'",
    ),
    Cause(
        "E-IMPORT-HIDDEN",
        "A file of the script's is imported instead of the module of that name: {hiding}.",
        "Rename the file, and remove its __pycache__.",
        r"^ImportError: cannot import name '[^'\n]+' from (?:partially initialized module )?"
        r"'(?P<name>random|logging|socket|signal|types|json|queue|select|token|copy|string|torch)' "
        r"(?:\(most likely due to a circular import\) )?"
        r"\((?P<hiding>(?!.*/(?:python3|[a-z]*-packages)[^/]*/(?P=name))[^)\n]+)\)",
    ),
    Cause(
        "E-IMPORT-BROKEN",
        "A module is there and cannot be imported: it was built for other libraries, is of another "
        "version, or imports itself in a circle.",
        "Install versions that fit each other (pip check); for a .so see ldd, and LD_LIBRARY_PATH.",
        r"^ImportError: ",
    ),
    Cause(
        "E-SYNTAX",
        "This version of Python cannot parse the script, or a module that it imports.",
        "Correct the line, or start with the interpreter that it was written for.",
        r"^(?:SyntaxError|IndentationError|TabError): ",
    ),
    Cause(
        "E-LOCAL-RANK",
        "The script has no --local-rank; its launcher gives it the number in LOCAL_RANK.",
        "Leave the argument out, and read the variable.",
        r"unrecognized arguments: .*--local[-_]rank",
    ),
    Cause(
        "E-ARGUMENTS",
        "The script refused its own arguments; those after the script's name are passed to it.",
        "",
        r"\berror: (?:unrecognized arguments|the following arguments are required|argument )",
    ),
    Cause(
        "E-MAIN-GUARD",
        "The script starts processes while it is imported by one of them.",
        'Put what it does below `if __name__ == "__main__":`.',
        r"attempt has been made to start a new process before the",
    ),
    Cause(
        "E-PICKLE",
        "An object cannot be sent to another process, such as a DataLoader worker.",
        "Lambdas, local functions, locks and open files cannot be: define them at the top of a "
        "module, or make them in the other process.",
        r"[Cc]an(?:'t|not) pickle|[Cc]an't get local object",
    ),
    Cause(
        "E-PROCESS-LIMIT",
        "The limit of processes and threads is reached.",
        "Raise ulimit -u or the container's pids limit, or use fewer threads (OMP_NUM_THREADS) and "
        "DataLoader workers.",
        r"can't start new thread|BlockingIOError: \[Errno 11\]|pthread_create failed"
        r"|Thread creation failed|what\(\):\s+Resource temporarily unavailable",
        start="the limit leaves the agent no thread: `ulimit -u` counts what the user runs on the "
        "whole machine, pids.max what runs in the container.",
    ),
    Cause(
        "E-THREAD-AT-EXIT",
        "A C++ thread was ended by an interpreter that was ending.",
        "torch 2.13 does this to a finished script when a thread of gloo lets go of its last "
        "tensor too late; forked workers (--start-method forkserver) wait for it.",
        r"terminate called without an active exception",
    ),
)

_NETWORK: Final = (
    Cause(
        "E-PORT-IN-USE",
        "The script opened a port that is in use: another job, or each rank opens the same one.",
        'Use init_method="env://", or a port that only one rank opens.',
        r"EADDRINUSE|[Aa]ddress already in use",
        start="another process has the port that elaunch was to open, or this user may not open "
        "it. The message names the port, and its holder where that can be seen: end that one, or "
        "give another port; a job of one node needs no --master-port.",
    ),
    Cause(
        "E-ADDRESS-FAMILY",
        "A host name resolved to an address of a family (IPv4, IPv6) that this machine does not "
        "offer.",
        "Give --master-addr as an address, or set GLOO_SOCKET_IFNAME/NCCL_SOCKET_IFNAME.",
        r"[Aa]ddress family (?:not supported|for hostname)",
    ),
    Cause(
        "E-DOWNLOAD",
        "A download failed: the site cannot be reached from this machine, or refused.",
        "Compute nodes often have no way out: fetch models and data before, and set "
        "HF_HUB_OFFLINE=1; or let one rank of a node fetch while the others wait.",
        r"Max retries exceeded with url|<urlopen error|HTTP Error \d|HfHubHTTPError"
        r"|LocalEntryNotFoundError|^requests\.exceptions|^urllib3\.exceptions",
    ),
    Cause(
        "E-HOST-NAME",
        "A host name is not known here.",
        "Correct it, use an address, or have it added to DNS or /etc/hosts of every node.",
        r"Name or service not known|Temporary failure in name resolution"
        r"|No address associated with hostname",
        start="the host of --master-addr, --rdzv-endpoint or --local-addr is not known to this "
        "machine.",
    ),
    Cause(
        "E-NETWORK-INTERFACE",
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that this node does not have, "
        "or none fits.",
        "See ip addr on each node; unset the variable to let torch choose.",
        r"[Uu]nable to find (?:address|interface) for|[Nn]o socket interface found",
    ),
)

_RANKS: Final = (
    Cause(
        "E-COLLECTIVE-MISMATCH",
        "The ranks do not call the same collectives in the same order with the same shapes. The "
        "rank that ends of it first may be the one in the right.",
        "Look for a branch that some ranks take alone (if rank == 0, an early end of the data); "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the calls.",
        r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives",
        victim=True,
    ),
    Cause(
        "E-DDP-UNUSED",
        "Some parameters got no gradient in a step, which DistributedDataParallel waits for.",
        "DistributedDataParallel(…, find_unused_parameters=True), or remove what is not used.",
        r"Expected to have finished reduction in the prior iteration",
    ),
    Cause(
        "E-DDP-MODEL",
        "The ranks have built different models.",
        "Look for a branch, a seed or a file that differs from rank to rank.",
        r"DDP expects same model across all ranks",
    ),
    Cause(
        "E-NO-PROCESS-GROUP",
        "torch.distributed is used before init_process_group() was called in this rank.",
        "",
        r"process group has not been initialized",
    ),
    Cause(
        "E-PROCESS-GROUP-TWICE",
        "init_process_group() was called twice in this rank.",
        "Call it once, or dist.is_initialized() before.",
        r"trying to initialize the default process group twice",
    ),
    Cause(
        "E-NCCL-TIMEOUT",
        "A collective was waited for until its timeout: another rank was slow, hung, or called "
        "collectives in another order.",
        "That rank's log tells more; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 records who waited for what.",
        r"Watchdog caught collective operation timeout",
        seen="SIGABRT after lines of ProcessGroupNCCL",
        victim=True,
    ),
    Cause(
        "E-COLLECTIVE-TIMEOUT",
        "A collective was waited for until its timeout: another rank was slow, hung, or called "
        "collectives in another order.",
        "That rank's log tells more; --hang-timeout names the rank and shows where all stand.",
        r"Timed out waiting \d+ms for|\bCollectiveTimeout:|failed to pass monitoredBarrier"
        r"|successfully reached monitoredBarrier, but received errors",
        victim=True,
    ),
    Cause(
        "E-RANKS-MISSING",
        "Not all ranks came to init_process_group(), or to a wait on the store, before its "
        "timeout.",
        "Look for a rank that failed, hung or is slow before that: downloads, imports, data.",
        r"waiting for clients\. \d+/\d+ clients joined|wait timeout after \d+ms",
        victim=True,
    ),
    Cause(
        "E-STORE-CONNECT",
        "It could not reach the round's store, at MASTER_ADDR and MASTER_PORT, so it is likely a "
        "victim: look for a rank that failed before it.",
        "If none did: the script has set MASTER_ADDR or MASTER_PORT itself, or a firewall closes "
        "the port.",
        r"client socket has (?:timed out|failed to connect)",
        victim=True,
    ),
    Cause(
        "E-GLOO-CONNECT",
        "gloo could not connect this rank with another, so it is likely a victim: look for a rank "
        "that failed or hung before it, on this node or another.",
        "If none did: gloo has picked an interface that the other nodes do not reach; set "
        "GLOO_SOCKET_IFNAME.",
        r"[Cc]onnectFullMesh failed",
        victim=True,
    ),
    Cause(
        "E-CONNECTION",
        "A connection to another process was refused or lost: to another rank that had ended, or "
        "to a service that the script uses.",
        "See whether another rank failed before; else whether the service runs and is reached.",
        r"^(?:Connection(?:Refused|Reset|Aborted)?Error|BrokenPipeError): ",
        victim=True,
    ),
    Cause(
        "E-PEER-LOST",
        "It lost the connection to another rank, so it is likely a victim: look for a rank that "
        "failed or hung before it, on this node or another.",
        "",
        r"[Cc]onnection (?:refused|reset|closed|was closed)|[Bb]roken pipe|DistNetworkError"
        r"|ncclRemoteError|remote process exited|\bPeerLost:",
        victim=True,
    ),
)

_DEVICES: Final = (
    Cause(
        "E-DEVICE-ORDINAL",
        "The script chose a GPU that this process does not see.",
        'Choose it by LOCAL_RANK: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])).{ordinal}',
        r"invalid device ordinal|Invalid device id",
    ),
    Cause(
        "E-CUDA-FORK",
        "CUDA was used before a process was forked, and cannot be used in that process.",
        'Use multiprocessing_context="spawn" for the DataLoader, and leave CUDA alone before '
        "processes are started.",
        r"Cannot re-initialize CUDA in forked subprocess",
    ),
    Cause(
        "E-GPU-FAILED",
        "The GPU failed.",
        "See dmesg for Xid lines and nvidia-smi -q; take the node out.",
        r"uncorrectable ECC|fallen off the bus|CUDA error: (?:unknown error|hardware)",
    ),
    Cause(
        "E-DEVICE-ASSERT",
        "A kernel got a value out of range, an index say.",
        _CUDA_FIX,
        r"device-side assert",
    ),
    Cause(
        "E-GPU-KIND",
        "This torch, or an extension, was not built for this kind of GPU.",
        "Install a build for it; torch.cuda.get_arch_list() names what this one has.",
        r"no kernel image is available",
    ),
    Cause(
        "E-CPU-BUILD",
        "This torch was built without CUDA.",
        "Install a build with it, or have the script use the CPU.",
        r"Torch not compiled with CUDA enabled",
    ),
    Cause(
        "E-NO-GPU",
        "This process sees no usable GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES.",
        "",
        r"(?:no NVIDIA driver|No CUDA GPUs are available|CUDA driver version is insuff)",
    ),
    Cause(
        "E-SHARED-GPU",
        "Two ranks use the same GPU, which NCCL does not allow.",
        'Choose it by LOCAL_RANK: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); start no '
        "more workers than there are GPUs (--nproc-per-node gpu).",
        r"Duplicate GPU detected",
    ),
    Cause(
        "E-NCCL",
        "NCCL failed.",
        "NCCL_DEBUG=INFO shows why; common: the wrong network interface (NCCL_SOCKET_IFNAME), a "
        "small /dev/shm, two ranks on one GPU.",
        r"NCCL error|nccl[A-Z]\w+Error|NCCL WARN",
    ),
    Cause(
        "E-CUDA",
        "A CUDA call failed.",
        _CUDA_FIX,
        r"CUDA error|CUDA_ERROR_|cudaError|CUBLAS_STATUS_|CUDNN_STATUS_",
    ),
)

TEXTS: Final = {
    "Memory and data": _MEMORY,
    "Files": _FILES,
    "The script": _SCRIPT,
    "The network": _NETWORK,
    "Between ranks": _RANKS,
    "Devices": _DEVICES,
}
"""By the headings of docs/errors.md, in the order in which they are looked for."""
