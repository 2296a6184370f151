"""The processes of a record: the run's agent, and its workers.

A process is identified by more than its pid, which the system may give to another one: by the tick
at which it started; an agent by host, boot and pid namespace, too.
"""

from __future__ import annotations

import os
from typing import Final, Literal, TypedDict

from elaunch import proc
from elaunch.errors import RunDirError

Condition = Literal["alive", "stopped", "gone", "rebooted", "elsewhere"]
SUSPENDED: Final = (
    "agent is suspended, by a signal or a debugger (`kill -CONT {pid}` resumes it) or by its "
    "cgroup's freezer"
)


class AgentRecord(TypedDict):
    """The agent of the run; boot, pid namespace and tick tell it from other processes."""

    pid: int
    create_time: float
    host: str
    user: str
    start_ticks: int
    boot_id: str
    pid_ns: str


class _WorkerRequired(TypedDict):
    rank: int
    local_rank: int
    pid: int | None
    state: str
    exit: str | None
    exit_code: int | None
    started_at: float | None
    ended_at: float | None


class WorkerRecord(_WorkerRequired, total=False):
    """One worker of the current round; times in seconds since the epoch.

    Its state is STARTING, RUNNING, SUCCEEDED, FAILED, or STOPPED (by elaunch). ``start_ticks``
    makes its identity exact.
    """

    start_ticks: int


def this_agent() -> AgentRecord:
    """Return the record's ``agent`` for the calling process."""
    pid = os.getpid()
    process = proc.read_process(pid)
    if process is None:
        raise RunDirError(f"/proc does not show this process (pid {pid}): is /proc mounted?")
    return {
        "pid": pid,
        "create_time": proc.create_time(process),
        "host": os.uname().nodename,
        "user": proc.user_name(os.getuid()),
        "start_ticks": process.start,
        "boot_id": proc.boot_id(),
        "pid_ns": proc.pid_namespace(),
    }


def condition(agent: AgentRecord) -> Condition:
    """Return the condition of the process that ``agent`` describes.

    ``stopped`` is alive but suspended (SUSPENDED); ``rebooted`` is gone with the machine;
    ``elsewhere`` cannot be seen from here (another host, another container).
    """
    if agent["host"] != os.uname().nodename:
        return "elsewhere"
    if agent["boot_id"] != proc.boot_id():
        return "rebooted"
    if agent["pid_ns"] != proc.pid_namespace():
        return "elsewhere"
    process = proc.read_process(agent["pid"])
    if process is None or not process.living or process.start != agent["start_ticks"]:
        return "gone"
    rests = process.state in "Tt" or proc.is_frozen(process.pid)
    return "stopped" if rests else "alive"


def note_start(worker: WorkerRecord, pid: int, at: float) -> None:
    """Note which process a worker is, and when it has started."""
    worker["pid"], worker["started_at"] = pid, at
    if (process := proc.read_process(pid)) is not None:
        worker["start_ticks"] = process.start


def worker_is_alive(worker: WorkerRecord) -> bool:
    """Tell whether the recorded worker's process still runs on this machine."""
    process = proc.read_process(worker["pid"]) if worker["pid"] else None
    return process is not None and process.living and process.start == worker.get("start_ticks")


def agent_of(pid: int) -> AgentRecord:
    """Return the record's ``agent`` for a process of this user; RunDirError if it is gone."""
    process = proc.read_process(pid)
    if process is None:
        raise RunDirError(f"the process {pid} is gone, or /proc does not show it")
    place = this_agent()  # the same host, boot and user
    return {
        **place,
        "pid": pid,
        "create_time": proc.create_time(process),
        "start_ticks": process.start,
    }
