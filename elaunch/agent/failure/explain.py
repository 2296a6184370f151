"""Known causes: from how a worker ended and what it printed to a line or two with the fix.

:func:`explain` is pure. It looks first for a known text (in the traceback if there is one, else in
the last lines; only after exit codes 1 and 2, SIGABRT and SIGBUS), then at the signal, then at the
exit code; the first row that fits wins. A cause marked as a *victim's* is what a worker shows when
another rank ended first.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from elaunch.endings import Exit, signal_name


@dataclass(frozen=True)
class Explanation:
    """A cause and its fix; ``text`` is empty if none is known."""

    text: str = ""
    victim: bool = False


@dataclass(frozen=True)
class _Known:
    pattern: str
    text: str
    victim: bool = False


_SHM_FIX = (
    "Give it more (docker run --shm-size=8g, a Kubernetes emptyDir with medium: Memory) "
    "or use fewer DataLoader workers."
)
_OOM_FIX = "Raise the job's memory limit, or use less: batch size, DataLoader workers, caches."
_CUDA_FIX = "CUDA reports late: run with CUDA_LAUNCH_BLOCKING=1 to see the call that failed."

_TEXTS = (
    _Known(
        r"(?:CUDA|HIP|XPU) out of memory|torch\.(?:cuda\.)?OutOfMemoryError",
        "The GPU's memory is used up. Lower the batch size or use activation checkpointing; see "
        "with nvidia-smi whether another process holds memory on this GPU.",
    ),
    _Known(
        r"DefaultCPUAllocator: can't allocate|Cannot allocate memory|^MemoryError",
        f"The machine refused more memory. {_OOM_FIX}",
    ),
    _Known(
        r"invalid device ordinal|Invalid device id",
        "The script chose a GPU that this process does not see. Choose it by LOCAL_RANK: "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])).{ordinal}',
    ),
    _Known(
        r"unable to (?:write to file|open shared memory|mmap).*</?torch_|killed by signal: Bus",
        f"Shared memory (/dev/shm) is full. {_SHM_FIX}",
    ),
    _Known(
        r"DataLoader worker .*killed by signal: Killed",
        f"A DataLoader worker was killed, most often for memory. {_OOM_FIX}",
    ),
    _Known(
        r"No space left on device|Errno 28\b",
        "A file system is full. See df -h (and df -i) for the directories the script writes to: "
        "checkpoints, logs, caches, /tmp, /dev/shm.",
    ),
    _Known(r"Disk quota exceeded", "The disk quota of this user is used up; see quota -s."),
    _Known(
        r"Too many open files",
        "The process has too many open files. Raise ulimit -n, or call "
        'torch.multiprocessing.set_sharing_strategy("file_system").',
    ),
    _Known(
        r"EADDRINUSE|[Aa]ddress already in use",
        "The script opened a port that is in use: another job, or each rank opens the same one. "
        'Use init_method="env://", or a port that only one rank opens.',
    ),
    _Known(
        r"[Aa]ddress family (?:not supported|for hostname)",
        "A host name resolved to an address of a family (IPv4, IPv6) that this machine does not "
        "offer. Give --master-addr as an address, or set GLOO_SOCKET_IFNAME/NCCL_SOCKET_IFNAME.",
    ),
    _Known(
        r"ModuleNotFoundError: No module named '(?P<module>[^']+)'",
        "The module {module!r} is not installed for this interpreter, or not on its path. Install "
        "it there, set PYTHONPATH, or start with -m from the project's directory.",
    ),
    _Known(
        r"unrecognized arguments: .*--local[-_]rank",
        "The script has no --local-rank; its launcher gives it the number in LOCAL_RANK.",
    ),
    _Known(
        r"\berror: (?:unrecognized arguments|the following arguments are required|argument )",
        "The script refused its own arguments; those after the script's name are passed to it.",
    ),
    _Known(
        r"terminate called without an active exception",
        "A C++ thread was ended by an interpreter that was ending. torch 2.13 does this to a "
        "finished script when a thread of gloo lets go of its last tensor too late; forked workers "
        "(--start-method forkserver) wait for it.",
    ),
    _Known(
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for",
        "A collective was waited for until its timeout: another rank was slow, hung, or called "
        "collectives in another order. That rank's log tells more; TORCH_NCCL_TRACE_BUFFER_SIZE="
        "2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 records who waited for what.",
        victim=True,
    ),
    _Known(
        r"[Cc]onnection (?:refused|reset|closed|was closed)|[Bb]roken pipe|DistNetworkError"
        r"|[Cc]onnectFullMesh failed|ncclRemoteError|remote process exited|\bPeerLost:",
        "It lost the connection to another rank, so it is likely a victim: look for a rank that "
        "failed or hung before it, on this node or another.",
        victim=True,
    ),
    _Known(
        r"uncorrectable ECC|fallen off the bus|CUDA error: (?:unknown error|hardware)",
        "The GPU failed. See dmesg for Xid lines and nvidia-smi -q; take the node out.",
    ),
    _Known(r"device-side assert", f"A kernel got a value out of range, an index say. {_CUDA_FIX}"),
    _Known(
        r"(?:no NVIDIA driver|No CUDA GPUs are available|CUDA driver version is insuff)",
        "This process sees no usable GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES.",
    ),
    _Known(
        r"NCCL error|nccl[A-Z]\w+Error|NCCL WARN",
        "NCCL failed. NCCL_DEBUG=INFO shows why; common: the wrong network interface "
        "(NCCL_SOCKET_IFNAME), a small /dev/shm, two ranks on one GPU.",
    ),
    _Known(r"CUDA error|CUDA_ERROR_|cudaError", f"A CUDA call failed. {_CUDA_FIX}"),
    _Known(
        r"process group has not been initialized",
        "torch.distributed is used before init_process_group() was called in this rank.",
    ),
)

_KILL = (
    "It was killed from outside elaunch: by the OOM killer of the host's kernel (see dmesg), by "
    "the scheduler, or by an operator."
)
_NATIVE = "Rerun with PYTHONFAULTHANDLER=1 to see the Python line it was at."
_UNHANDLED = (
    "The signal came from outside elaunch and the script had no handler for it (yet). "
    "--forward-signals is for scripts that do."
)
_SIGNALS = {
    "SIGKILL": _KILL,
    "SIGTERM": "Something other than elaunch asked it to end: scheduler, operator, or the script.",
    "SIGINT": "Something other than elaunch interrupted it: an operator, or the script.",
    "SIGHUP": "Something other than elaunch hung it up: the end of a session, or the script.",
    "SIGBUS": "A page of a mapped file could not be had: most often /dev/shm is full, or the file "
    "was cut short, or its disk is full.",
    "SIGSEGV": f"Native code crashed: an extension, a driver, mismatched binaries. {_NATIVE}",
    "SIGABRT": f"Native code gave up: a C++ exception, a failed check, a broken heap. {_NATIVE}",
    "SIGILL": "The CPU lacks an instruction that the code uses: a binary built for another CPU.",
    "SIGFPE": f"Native code divided an integer by zero. {_NATIVE}",
    "SIGSYS": "It made a system call that the sandbox (seccomp) forbids.",
    "SIGXCPU": "Its limit of CPU time is used up; see ulimit -t.",
    "SIGXFSZ": "A file outgrew the limit of file sizes; see ulimit -f.",
    "SIGUSR1": _UNHANDLED,
    "SIGUSR2": _UNHANDLED,
}
_CODES = {
    120: "Python could not flush stdout or stderr at its end.",
    126: "The command was found but cannot be run: it is not executable, or no program.",
    127: "The command was not found, or a library that it needs was not.",
}
_SHM_LOW = 64 << 20
# Other codes are a script's own choice and other signals come from elsewhere: there, a known text
# among the last lines (a connection that was refused once, say) need not be the cause.
_TEXT_COUNTS = frozenset({1, 2, -signal.SIGABRT, -signal.SIGBUS})


def explain(
    end: Exit,
    text: str = "",
    *,
    oom_kill: bool = False,
    local_world_size: int | None = None,
    shm_free: int | None = None,
) -> Explanation:
    """Return the cause of a worker's end as far as it is known, with the fix.

    Args:
        end: how it ended.
        text: what it printed of that.
        oom_kill: whether the kernel's count of processes killed for memory has grown.
        local_world_size: how many workers the node has.
        shm_free: the free space of /dev/shm in bytes, if known.
    """
    number = -end.exitcode
    if end.timer:
        return Explanation(
            f"Its timer {end.timer} had expired (torch.distributed.elastic.timer), and so it was "
            "ended: the section took longer than timer.expires(after=…) allows."
        )
    if number == signal.SIGKILL and oom_kill:
        return Explanation(f"Out of memory: the kernel killed it. {_OOM_FIX}")
    found = _by_text(end, text, local_world_size) if end.exitcode in _TEXT_COUNTS else None
    if found:
        return found
    if number > 0:
        return Explanation(_by_signal(number, text, shm_free))
    return Explanation(_by_code(end.exitcode, text, oom_kill, shm_free))


def _by_text(end: Exit, text: str, local_world_size: int | None) -> Explanation | None:
    for known in _TEXTS:
        match = re.search(known.pattern, text, re.MULTILINE)
        if match:
            words = {"ordinal": _ordinal(end, local_world_size), **match.groupdict()}
            return Explanation(known.text.format(**words), known.victim)
    return None


def _ordinal(end: Exit, size: int | None) -> str:
    if size is None or end.rank < size:
        return ""
    return (
        f" RANK is {end.rank} here, but this node's workers are 0 to {size - 1}; "
        f"this one's LOCAL_RANK is {end.local_rank}."
    )


def _by_signal(number: int, printed: str, shm_free: int | None) -> str:
    name = signal_name(number)
    text = _SIGNALS.get(name, "")
    if name == "SIGBUS" and shm_free is not None:
        return f"{text} {_shm_state(shm_free)}"
    if name == "SIGABRT" and "ProcessGroupNCCL" in printed:
        return (
            "The NCCL watchdog ended it after a failed or timed-out collective; the rank that did "
            "not take part is the cause, see its log."
        )
    if "Fatal Python error" in printed:
        return text.replace(_NATIVE, "").rstrip()
    return text


def _shm_state(free: int) -> str:
    if free < _SHM_LOW:
        return f"/dev/shm has {free >> 20} MiB left. {_SHM_FIX}"
    return f"/dev/shm has {free >> 20} MiB free now, after its end."


def _by_code(code: int, text: str, oom_kill: bool, shm_free: int | None) -> str:
    if code in _CODES:
        return _CODES[code]
    try:
        name = signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""
    if not name:
        return ""
    if name == "SIGKILL" and oom_kill:
        cause = f"Out of memory: the kernel killed a process of it. {_OOM_FIX}"
    else:
        cause = _by_signal(code - 128, text, shm_free)
    return (
        f"{code} is 128 + {code - 128}: a process it had started ended by {name}. {cause}".rstrip()
    )
