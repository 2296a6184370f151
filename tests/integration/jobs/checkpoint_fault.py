"""Kill processes at a chosen moment of saving: at a call of ``os`` that concerns the checkpoints.

What is patched are the functions of ``os`` (and of Unix sockets) in one process, from the outside:
a worker script or ``checkpoint_agent.py`` calls ``arm``. The product has no hooks.

``CHECKPOINT_FAULT`` holds a JSON object:

===========  ===================================================================================
key          means
===========  ===================================================================================
where        ``worker`` or ``agent``: which process looks for the moment
rank         (worker) of which rank
directory    the checkpoint directory; only calls for what is in it count
step         a row of STEPS
nth          which call of that row, counted from 1 (in this process)
within       only calls whose paths contain this text; ``""``: all
since        a row of STEPS: only calls after the first call of that row that has ``within``, too
after        whether the call is made before the kill
victims      list of ``rank N``, ``agent N``, ``node N`` (that agent and all below it); by SIGKILL
notes        where the workers' ``pid.ROUND.RANK`` and the agents' ``agent.N`` are
signal       another signal than SIGKILL, by its name
struck       a file that is made at the kill: it is done once, whoever gets there first
trace        a file into which every call is written; then nobody is killed
slow         seconds by which each fsync below the directory takes longer
===========  ===================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FAULT = "CHECKPOINT_FAULT"
BY_PATH = ("open", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "remove")
BY_FILE = ("write", "writev", "pwrite", "pwritev", "fsync", "fdatasync")

STEPS = {
    # A part: by each rank, or by the agent for it.
    "begin": ("mkdir", r"^/\.stage/step-[^/]*$"),
    "create": ("open", r"^/\.stage/.*\.tmp-elaunch"),
    "write": ("writev", r"^/\.stage/.*\.tmp-elaunch"),
    "sync": ("fsync", r"^/\.stage/.*(\.tmp-elaunch-[^/]*|\.pt)$"),
    "place": ("replace", r"(\.pt|\.distcp|/\.metadata)$"),
    "manifest": ("replace", r"/manifest\.rank-\d+\.json$"),
    "sync stage": ("fsync", r"^/\.stage/step-[^/.]*\.r\d+\.[^/.]*$"),
    # The commit: by rank 0, or by its agent.
    "claim": ("rename", r"\.commit-[^/]*$"),
    "fence": ("send_fds send sendall sendmsg", r"^saver fence$"),
    "metadata": ("replace", r"\.commit-[^/]*/metadata\.json$"),
    "COMMIT": ("replace", r"\.commit-[^/]*/COMMIT$"),
    "sync claimed": ("fsync", r"\.commit-[^/]*$"),
    "publish": ("rename", r" /step-[^/]*$"),
    "sync root": ("fsync", r"^/$"),
    # Retention.
    "retire": ("rename", r" /\.trash/[^/]*$"),
    "delete": ("unlink", r"^/\.trash/"),
    "deleted": ("rmdir", r"^/\.trash/[^/]*$"),
    # What a worker says to its agent.
    "ask": ("send_fds send sendall sendmsg", r"^saver begin$"),
    "hand over": ("send_fds send sendall sendmsg", r"^saver staged$"),
}
"""Name → functions, and what their paths below the directory look like, separated by a space."""


def arm(where: str) -> None:
    """Patch this process if the fault is for it."""
    fault = json.loads(os.environ.get(FAULT, "{}"))
    if fault.get("where") != where:
        return
    if where == "worker" and fault["rank"] != int(os.environ["RANK"]):
        return
    if not Path(fault["struck"]).exists():
        Patched(fault).install()


class Patched:
    """The patched functions of this process."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self.fault = fault
        self.real_open = os.open
        self.seen = 0
        self.begun = False
        self.lock = threading.Lock()
        self.busy = threading.local()

    def install(self) -> None:
        """Put them in place."""
        for name in BY_PATH:
            self._wrap(os, name, _paths_of)
        for name in BY_FILE:
            self._wrap(os, name, _file_of)
        self._wrap(socket, "send_fds", _peer_of)
        for name in ("send", "sendall", "sendmsg"):
            self._wrap(socket.socket, name, _peer_of)

    def _wrap(self, owner: Any, name: str, told: Callable[..., str]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.busy, "on", False):
                return real(*args, **kwargs)
            self.busy.on = True
            try:
                what = f"{name} {told(self.fault['directory'], args, kwargs)}"
                hit = self._is_it(what)
                if hit and not self.fault["after"]:
                    strike(self.fault)
                if name == "fsync" and " /" in what:
                    time.sleep(self.fault.get("slow", 0))
            finally:
                self.busy.on = False
            try:
                return real(*args, **kwargs)
            finally:
                if hit and self.fault["after"]:
                    strike(self.fault)

        setattr(owner, name, patched)

    def _is_it(self, what: str) -> bool:
        if what.endswith(" "):
            return False
        if trace := self.fault.get("trace"):
            file = self.real_open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, f"{what}\n".encode())
            os.close(file)
            return False
        with self.lock:
            since = self.fault.get("since")
            if since and not self.begun:
                self.begun = _matches(since, what) and self.fault["within"] in what
                return False
            if not _matches(self.fault["step"], what):
                return False
            if not since and self.fault.get("within", "") not in what:
                return False
            self.seen += 1
            return bool(self.seen == self.fault["nth"])


def _matches(step: str, what: str) -> bool:
    names, pattern = STEPS[step]
    name, _, rest = what.partition(" ")
    return name in names.split() and re.search(pattern, rest) is not None


def _paths_of(directory: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the paths of a call, absolute, if the last of them is below the directory."""
    found = []
    for key, at in (("dir_fd", args[:1]), ("dst_dir_fd", args[1:2])):
        path = os.fspath(at[0]) if at and isinstance(at[0], str | os.PathLike) else None
        if isinstance(path, str):
            base = kwargs.get(key)
            found.append(os.path.join(_name_of(base) if base is not None else os.getcwd(), path))
    inside = [path for path in found if _below(directory, path)]
    return " ".join(path[len(directory) :] or "/" for path in inside) if inside else ""


def _file_of(directory: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    path = _name_of(args[0])
    return (path[len(directory) :] or "/") if _below(directory, path) else ""


def _peer_of(directory: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the beginning of what is said to the saver, that is over a Unix socket."""
    if args[0].family != socket.AF_UNIX:
        return ""
    data = args[1]
    data = data[0] if isinstance(data, list | tuple) else data
    text = bytes(data[:200]).decode(errors="replace")
    found = re.match(r'\{"op": ?"(checkpoint|memory|begin|staged|wait|fence|recall|close)"', text)
    found = found or re.search(r'"op": ?"(memory|begin|staged|wait|fence|recall|close)"', text)
    return f"saver {found[1]}" if found else ""


def _name_of(descriptor: Any) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _below(directory: str, path: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def strike(fault: dict[str, Any]) -> None:
    """Kill the victims, once."""
    try:
        os.close(os.open(fault["struck"], os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    number = signal.Signals[fault.get("signal", "SIGKILL")]
    kill(fault["victims"], Path(fault["notes"]), number)


def kill(victims: Sequence[str], notes: Path, number: int = signal.SIGKILL) -> None:
    """Send a signal to the victims, and to this process last."""
    for pid in sorted(pids_of(victims, notes), key=lambda pid: pid == os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def pids_of(victims: Sequence[str], notes: Path) -> list[int]:
    """Return who they are, an agent before those below it."""
    pids: list[int] = []
    for victim in victims:
        kind, _, number = victim.partition(" ")
        if kind == "rank":
            pids.append(worker(notes, int(number)))
            continue
        agent = int((notes / f"agent.{number}").read_text())
        pids += [agent, *(below(agent) if kind == "node" else [])]
    return pids


def worker(notes: Path, rank: int) -> int:
    """Return the pid of a rank in the newest round."""
    newest = max(notes.glob(f"pid.*.{rank}"), key=lambda path: int(path.name.split(".")[1]))
    return int(newest.read_text())


def below(pid: int) -> list[int]:
    """Return all that descends from a process, parents first."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *below(child)]
    return found
