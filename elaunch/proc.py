"""Processes and threads as ``/proc`` shows them, and what tells one from a later one.

A pid is given again: a process is known by its pid with the tick since boot at which it began, a
machine by its boot, and where pids mean the same, by the namespace.

Of the machine's memory it tells the OOM kills of this process's cgroup, and how much is free.
The kernel counts, for each memory cgroup, the processes that it has killed for memory: cgroup v1 in
``memory.oom_control``, v2 in ``memory.events``, both as ``oom_kill``. The agent and its workers are
in one cgroup, so a count that grew during a round says that one of its processes was a victim.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from elaunch import env

TICKS: Final = os.sysconf("SC_CLK_TCK")
"""Of processor time and of the time since boot, in a second."""


_LOCAL_KINDS: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"})
"""Kinds of file systems that answer at once."""
_NO_ROOM: Final = 1 << 20
_FEW_INODES: Final = 64


class Process(NamedTuple):
    """One process; ``start`` is the tick since boot, which tells it from a later one."""

    pid: int
    ppid: int
    name: str
    state: str
    start: int
    threads: int

    @property
    def living(self) -> bool:
        """Whether it runs; a process lives on after its first thread, which looks like a zombie."""
        return self.state not in "ZX" or self.threads > 1


def read_process(pid: int) -> Process | None:
    """Return the process ``pid``; None when it is gone, or this user may not see it."""
    found = stat(f"/proc/{pid}")
    if found is None:
        return None
    name, fields = found
    return Process(pid, int(fields[1]), name, fields[0], int(fields[19]), int(fields[17]))


def stat(directory: str) -> tuple[str, list[str]] | None:
    """Return the name of a process or of a thread, and the fields behind it: first its state.

    Args:
        directory: ``/proc/PID``, or ``/proc/PID/task/TID``; None is returned when it is gone.
    """
    try:
        with open(f"{directory}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name, in parentheses, may itself hold blanks and parentheses.
    return text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()


def exit_code(pid: int) -> int | None:
    """Return how a process has ended that its parent has not waited for; None of any other."""
    found = stat(f"/proc/{pid}")
    if found is None or found[1][0] != "Z" or int(found[1][17]) > 1:
        return None
    return os.waitstatus_to_exitcode(int(found[1][49]))


def ticks(fields: list[str]) -> int:
    """Return the processor time, the user's and the kernel's, in what :func:`stat` has returned."""
    return int(fields[11]) + int(fields[12])


def user(pid: int) -> int:
    """Return the user whose process it is; -1 where that is not seen."""
    return int(status(pid).get("Uid", "-1").split()[0])


def user_name(uid: int) -> str:
    """Return the name of a user, or its number where it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):  # -1 is no user
        return "another user" if uid < 0 else str(uid)


def status(pid: int | str) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``, also of ``self``; none when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def mapped_code() -> set[str]:
    """Return the paths of the files that this process has mapped as code."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    parts = [line.split(maxsplit=5) for line in lines]
    return {part[5] for part in parts if len(part) == 6 and "x" in part[1] and part[5][0] == "/"}


def catches(pid: int | str, signum: int) -> bool:
    """Return whether a process handles ``signum``; ``signal.getsignal`` knows Python's only."""
    return _in_mask(pid, "SigCgt", signum)


def ignores(pid: int | str, signum: int) -> bool:
    """Return whether a process ignores ``signum``."""
    return _in_mask(pid, "SigIgn", signum)


def _in_mask(pid: int | str, name: str, signum: int) -> bool:
    return bool(int(status(pid).get(name, "0"), 16) >> (signum - 1) & 1)


def children(pid: int) -> list[int]:
    """Return the pids of the children of all threads of ``pid``."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    for thread in threads:
        try:
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            if os.path.exists(f"/proc/{pid}/task/{thread}"):
                return _children_by_scan(pid)
    return found


def _read(path: str) -> bytes:
    """Return what a file has, sooner than ``open`` does: a worker has a dozen threads and more."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = chunk = os.read(descriptor, 4096)
        while chunk:
            chunk = os.read(descriptor, 4096)
            text += chunk
        return text
    finally:
        os.close(descriptor)


def _children_by_scan(pid: int) -> list[int]:
    """Find children where the kernel has no ``children`` file (CONFIG_PROC_CHILDREN)."""
    everyone = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process.pid for process in everyone if process is not None and process.ppid == pid]


def descendants(root: int, exclude: Iterable[int] = ()) -> list[Process]:
    """Return every living process below ``root``, parents first, without ``exclude``'s trees."""
    left_out = set(exclude)
    found: list[Process] = []
    pending = [root]
    while pending:
        for pid in children(pending.pop(0)):
            process = None if pid in left_out else read_process(pid) or _hidden(pid)
            if process is None:
                continue
            pending.append(pid)
            if process.living:
                found.append(process)
    return found


def _hidden(pid: int) -> Process | None:
    """Return another user's process that ``/proc`` does not show (its mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return Process(pid, 0, "hidden", "?", 0, 1)
    except ProcessLookupError:
        pass
    return None


def process_name(pid: int) -> str:
    """Return what distinguishes a process from all others here; empty where it is not seen."""
    process = read_process(pid)
    return "" if process is None else f"{pid}.{process.start}"


def own_prefix(kind: str = "") -> str:
    """Return how the name of a temporary directory of this process begins; see env.SCRATCH.

    The next run of this user clears those whose processes are gone
    (elaunch.agent.workers.tempdir.remove_abandoned).
    """
    return f"{env.TEMP_PREFIX}{mark(os.getpid())}-{kind}"


def mark(pid: int) -> str:
    """Return what tells a process from all others of this machine, also of other containers."""
    return f"{namespace_number()}.{process_name(pid)}"


def namespace_number() -> str:
    """Return the number of the namespace in which the pids of this process are pids."""
    return re.sub(r"\D", "", pid_namespace())


def create_time(process: Process) -> float:
    """Return when a process was created, in seconds since the epoch (psutil's create_time)."""
    with open("/proc/stat", "rb") as file:
        boot_time = next(int(line.split()[1]) for line in file if line.startswith(b"btime"))
    return boot_time + process.start / TICKS


def boot_id() -> str:
    """Return the id of this machine's boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def pid_namespace() -> str:
    """Return the namespace in which the pids of this process are pids."""
    return os.readlink("/proc/self/ns/pid")


def cgroup_file(
    controller: str, name: str, unified: str, proc_dir: Path = Path("/proc/self")
) -> Path | None:
    """Return a process's file ``name`` of cgroup v1's controller, or ``unified`` of v2.

    It is found by the process's cgroup and mountinfo; None where neither is mounted. May raise
    OSError.
    """
    groups = (proc_dir / "cgroup").read_text(errors="replace")
    mounts = (proc_dir / "mountinfo").read_text(errors="replace")
    paths = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    if controller in paths:
        return _in_mount(paths[controller], mounts, "cgroup", controller, name)
    if "" in paths:
        return _in_mount(paths[""], mounts, "cgroup2", "", unified)
    return None


def is_frozen(pid: int, proc_dir: Path = Path("/proc")) -> bool:
    """Return whether a process is frozen by its cgroup, of v1 or v2, or by one above that."""
    try:
        file = cgroup_file("freezer", "freezer.state", "cgroup.events", proc_dir / str(pid))
        text = "" if file is None else file.read_text(errors="replace")
    except OSError:
        return False
    return text.strip() in ("FROZEN", "FREEZING") or "frozen 1" in text.splitlines()


def cpus(proc_dir: Path = Path("/proc/self")) -> int:
    """Return how many CPUs a process may use: this one's affinity, within its cgroups' quotas.

    A container may see all CPUs of its machine and get the time of a few: Kubernetes' limits. The
    quota of a cgroup is for all below it, so those above this process's own are looked at, too.
    """
    allowed = len(os.sched_getaffinity(0))
    with suppress(OSError):
        file = cgroup_file("cpu", "cpu.cfs_quota_us", "cpu.max", proc_dir)
        while file is not None and file.with_name("cgroup.procs").exists():
            allowed = min(allowed, _quota(file) or allowed)
            file = file.parent.parent / file.name
    return allowed


def _quota(file: Path) -> int:
    """Return how many whole CPUs a cgroup gets the time of, at least 1, or 0 without a quota."""
    try:
        words = file.read_text()
        if file.name == "cpu.cfs_quota_us":
            words += file.with_name("cpu.cfs_period_us").read_text()
        quota, period = (int(word) for word in words.replace("max", "-1").split())
    except (OSError, ValueError):
        return 0  # one that is the whole machine has no such file, as where the controller is off
    return max(1, quota // period) if quota > 0 and period > 0 else 0


def _in_mount(path: str, mounts: str, kind: str, option: str, file: str) -> Path | None:
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        found, _, options = after.split(" ", 2)
        if found != kind or (option and option not in options.split(" ")[-1].split(",")):
            continue
        # Without a cgroup namespace the path counts from the host's root, of which the container
        # sees only the part that is mounted.
        inside = path.removeprefix(root) if root != "/" else path
        return Path(point.replace("\\040", " ")) / inside.strip("/") / file
    return None


def oom_kill_count(proc_dir: Path = Path("/proc/self")) -> int | None:
    """Return how many processes of this process's memory cgroup the kernel has killed for memory.

    Knows cgroup v1 and v2. None where there is no such count. Compare two readings: a count that
    grew during a round says that one of its processes was a victim.
    """
    try:
        events = _events_file(proc_dir)
        lines = events.read_text().splitlines() if events else []
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None


def available(proc_dir: Path = Path("/proc/self"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes this process's cgroup can still take without pushing anybody out.

    The smaller of what the machine has available and what is left of the cgroup's own limit, in
    which the file cache that can be dropped does not count. Raises OSError if neither is known.
    """
    lines = meminfo.read_text(errors="replace").splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError, IndexError):  # a limit that cannot be read is none
        events = _events_file(proc_dir)
        if events is not None:
            found.append(_left_of_limit(events.parent))
    if not found:
        raise OSError(f"{meminfo} has no MemAvailable")
    return max(0, min(found))


def _left_of_limit(group: Path) -> int:
    """Return what a cgroup may still take; raises ValueError where it has no limit."""
    names = ("memory.max", "memory.current", "inactive_file")
    if not (group / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, used = int((group / names[0]).read_text()), int((group / names[1]).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - used + int(stat.get(names[2], 0))


def shm_free(path: str = "/dev/shm") -> int | None:
    """Return the free space of shared memory in bytes, or None if there is none."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def lacks_inodes(place: Path) -> bool:
    """Return whether a file system that was full lacks inodes, not bytes; some came free since."""
    root = place.absolute()
    try:
        room = os.statvfs(next(at for at in (root, *root.parents) if at.exists()))
    except OSError:  # it does not say how full it is; the error that led here is what counts
        return False
    scarcer = room.f_favail * room.f_blocks < room.f_bavail * room.f_files
    return scarcer and room.f_favail < _FEW_INODES


def full_file_systems(places: Iterable[str]) -> dict[str, str]:
    """Return the local file systems of these paths that are full: where, and what is left there."""
    mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    kinds: dict[str, str] = {}
    for line in mounts:
        where, kind = line.split(" ")[1:3]
        kinds[where] = kind
    found = {}
    for given in places:
        with suppress(OSError):
            place = Path(os.path.realpath(given))
            where = next((str(at) for at in (place, *place.parents) if str(at) in kinds), "")
            state = os.statvfs(where) if kinds.get(where) in _LOCAL_KINDS else None
            if state is None or state.f_flag & os.ST_RDONLY or not state.f_blocks:
                continue
            free = state.f_bavail * state.f_frsize
            if free < _NO_ROOM:
                found[where] = f"{free >> 10} KiB free"
            elif lacks_inodes(Path(where)):
                found[where] = "no inodes left"
    return found


def _events_file(proc_dir: Path) -> Path | None:
    """Find the file with the count."""
    return cgroup_file("memory", "memory.oom_control", "memory.events", proc_dir)
