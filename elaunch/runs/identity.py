"""The processes of a record: the run's agent, and its workers.

A process is identified by more than its pid, which the system may give to another one: by the tick
at which it started; an agent by host, boot and pid namespace, too.
"""

from __future__ import annotations

import os
import pwd
from typing import Final, Literal, TypedDict

from elaunch import proc
from elaunch.errors import RunDirError
from elaunch.proc import Process

# Without a recorded tick a process is recognised by its time of creation, and that moves with every
# correction of the wall clock.
CREATE_TIME_TOLERANCE_S: Final = 5.0

Condition = Literal["alive", "stopped", "gone", "rebooted", "elsewhere"]
SUSPENDED: Final = (
    "agent is suspended, by a signal or a debugger (`kill -CONT {pid}` resumes it) or by its "
    "cgroup's freezer"
)


class _AgentRequired(TypedDict):
    pid: int
    create_time: float
    host: str
    user: str


class AgentRecord(_AgentRequired, total=False):
    """The agent of the run; the optional fields make the identity exact (:func:`this_agent`)."""

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
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return {
        "pid": pid,
        "create_time": proc.create_time(process),
        "host": os.uname().nodename,
        "user": user,
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
    if agent.get("boot_id", proc.boot_id()) != proc.boot_id():
        return "rebooted"
    if agent.get("pid_ns", proc.pid_namespace()) != proc.pid_namespace():
        return "elsewhere"
    process = proc.read_process(agent["pid"])
    if process is None or not process.living or not _same_start(agent, process):
        return "gone"
    rests = process.state in "Tt" or proc.is_frozen(process.pid)
    return "stopped" if rests else "alive"


def _same_start(agent: AgentRecord, process: Process) -> bool:
    if "start_ticks" in agent:
        return agent["start_ticks"] == process.start
    return abs(proc.create_time(process) - agent["create_time"]) <= CREATE_TIME_TOLERANCE_S


def note_start(worker: WorkerRecord, pid: int, at: float) -> None:
    """Note which process a worker is, and when it has started."""
    worker["pid"], worker["started_at"] = pid, at
    if (process := proc.read_process(pid)) is not None:
        worker["start_ticks"] = process.start


def worker_is_alive(worker: WorkerRecord) -> bool:
    """Tell whether the recorded worker's process still runs on this machine."""
    process = proc.read_process(worker["pid"]) if worker["pid"] else None
    if process is None or not process.living:
        return False
    if "start_ticks" in worker:
        return worker["start_ticks"] == process.start
    # Another process that was given the pid later began later.
    started_at = worker["started_at"]
    return started_at is None or proc.create_time(process) <= started_at + CREATE_TIME_TOLERANCE_S


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
