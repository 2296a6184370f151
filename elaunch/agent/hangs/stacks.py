"""Takes the Python stacks of all workers, before a hung round is ended, or a flame graph of one.

A thread of its own takes the stacks (Sampler.take_stacks).

==============================================  ==================================================
a worker                                        its stacks come from
==============================================  ==================================================
forked by the server, or with elaunch.init()    itself: it has a handler at env.STACKS_SIGNAL that
                                                writes to its file, also when C code keeps it
any that has made a process group of torch's    torch's own server in it, which writes those of its
                                                Python threads while nobody keeps Python's lock
any other                                       ``py-spy``, where that is installed and may look
==============================================  ==================================================

The signal is sent only to a process that catches it: it would end any other. Where there are no
stacks, the report says why, and what the kernel knows of the process.

The flame graph is py-spy's: for the command on its node, and for other agents.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from elaunch import env, proc
from elaunch.agent.hangs import stackdump
from elaunch.agent.hangs.stackdump import Dump
from elaunch.agent.policy import events
from elaunch.server import processes
from elaunch.text import one_line, ranks_do

WRITE_S: Final = 5.0
"""Seconds for a worker to write its stacks."""
SPY_S: Final = 15.0
"""Seconds for py-spy to look at all processes that are left."""
OVERDUE_S: Final = WRITE_S + SPY_S + 5.0
"""Seconds after which the round is ended without stacks."""
TORCH_S: Final = 0.5
"""Seconds for torch's server in each worker to answer."""
QUIET_S: Final = 0.3
"""A file that has not grown for so long is whole, whatever it ends with."""
_LOOK_S: Final = 0.02
STOPPED: Final = "the process is stopped by a signal (SIGSTOP) or by a debugger"
FROZEN: Final = "the process is frozen by its cgroup"
RESTING: Final = (STOPPED, FROZEN)
_FREEZERS: Final = frozenset({"__refrigerator", "do_freezer_trap"})
"""Functions of the kernel in which a process is that cgroup v1, or v2, has frozen."""


class Worker(Struct, frozen=True):
    """One worker whose stacks are wanted; ``file`` is where it writes them."""

    rank: int
    pid: int
    file: Path


def take(
    round_number: int,
    workers: tuple[Worker, ...],
    ask: Callable[[Mapping[int, int], float], Mapping[int, Dump]] = lambda pids, until: {},
    *,
    options: tuple[str, ...] = (),
) -> events.StacksTaken:
    """Return the stacks of ``workers``, grouped; blocks OVERDUE_S at the most.

    ``ask`` has torch's servers in the processes (rank to pid) answer until then (monotonic). With
    ``options`` all stacks are py-spy's, which is given these.
    """
    began = time.monotonic()
    asked: dict[int, int] = {}
    for worker in () if options else workers:
        size = len(_bytes(worker.file))
        if _ask(worker):
            asked[worker.rank] = size
    until = began + WRITE_S
    found = {
        one.rank: _read(one.file, asked[one.rank], until) for one in workers if one.rank in asked
    }
    dumps = {rank: dump for rank, dump in found.items() if dump is not None}
    problems: dict[int, str] = {}
    rest = {each.rank: each.pid for each in workers if each.rank not in dumps}
    if rest and not options:
        dumps |= ask(rest, time.monotonic() + TORCH_S)
    spy = py_spy()
    for worker in (each for each in workers if each.rank not in dumps):
        if rests := at_rest(worker.pid):
            problems[worker.rank] = rests
            continue
        spied = None if spy is None else _spy(spy, worker.pid, until + SPY_S, options)
        if isinstance(spied, Dump):
            dumps[worker.rank] = spied
        else:
            problems[worker.rank] = _why(worker, worker.rank in asked, spied)
    return events.StacksTaken(round_number, stackdump.group(dumps), _grouped(problems))


def _ask(worker: Worker) -> bool:
    """Have the worker write its stacks, if it can."""
    process = proc.read_process(worker.pid)
    if process is None or process.state in "TtZX":
        return False
    if not proc.catches(process.pid, env.STACKS_SIGNAL):
        # A shell around the script: the script is below it, with the same file.
        below = (p for p in proc.descendants(worker.pid) if proc.catches(p.pid, env.STACKS_SIGNAL))
        process = next(below, None)
    return process is not None and processes.send_signal(process, env.STACKS_SIGNAL)


def _read(path: Path, begins: int, until: float) -> Dump | None:
    """Wait until a worker's file is whole, or the time is over; return what it has written."""
    text, changed = "", time.monotonic()
    pause = threading.Event()
    while not stackdump.is_whole(text):
        now = time.monotonic()
        newer = _bytes(path)[begins:].decode("utf-8", "replace")
        if newer != text:
            text, changed = newer, now
            continue
        if now > until or (text and now > changed + QUIET_S):
            break
        pause.wait(_LOOK_S)
    return stackdump.parse(text)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _spy(program: str, pid: int, until: float, options: tuple[str, ...]) -> Dump | str:
    """Return what py-spy sees of a process, or why it sees nothing."""
    argv = [program, "dump", "--full-filenames", *options, "--pid", str(pid)]
    # Its exit code goes to the agent's reaper, which waits for all children.
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, until - time.monotonic()),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy: {error}"
    found = stackdump.parse_spied(done.stdout)
    if found is not None:
        return found
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"py-spy: {said[0] if said else 'it says nothing'}"


def py_spy() -> str | None:
    """Return the program: from the PATH, or from this environment, which may not be activated."""
    own = os.path.dirname(sys.executable)
    return shutil.which("py-spy") or shutil.which("py-spy", path=own)


def at_rest(pid: int) -> str:
    """Return why a process has no stacks to see, or "".

    It is asked before py-spy looks: that traces the process, which changes the state and fails on
    one that is stopped.
    """
    state = proc.status(pid).get("State", "")
    if not state or state[:1] in "ZX":
        return "the process has ended meanwhile"
    if state[:1] in "Tt":
        return STOPPED
    frozen = state[:1] in "DS" and (_in_kernel(pid) in _FREEZERS or proc.is_frozen(pid))
    return FROZEN if frozen else ""


def stopped(pids: Mapping[int, int]) -> str:
    """Return which of the workers (pids by rank) are stopped, in a sentence, or ""."""
    rests = {rank: at_rest(pid) for rank, pid in pids.items() if pid}
    found = [rank for rank, why in rests.items() if why in RESTING]
    if not found:
        return ""
    return f"{ranks_do(found, 'do')} not follow it: {rests[found[0]]}"


def _why(worker: Worker, asked: bool, spied: str | Dump | None) -> str:
    """Return why there are no stacks of a worker, for the report."""
    if rests := at_rest(worker.pid):
        return rests
    if proc.status(worker.pid).get("State", "")[:1] == "D":
        where = _in_kernel(worker.pid)
        return f"the process hangs in the kernel{where and f' ({where})'}"
    if isinstance(spied, str):
        return spied
    if asked:
        return f"not written within {WRITE_S:g} s"
    return (
        "nothing in the process writes them (with --hang-timeout, elaunch.init() and "
        "--start-method forkserver see to that), and py-spy is not installed (pip install "
        "'elaunch[stacks]')"
    )


def _in_kernel(pid: int) -> str:
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if where == "0" else where


def _grouped(problems: Mapping[int, str]) -> tuple[tuple[tuple[int, ...], str], ...]:
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(problems.items()):
        by_text.setdefault(text, []).append(rank)
    return tuple((tuple(ranks), text) for text, ranks in by_text.items())


NO_PY_SPY: Final = "py-spy is not installed: pip install 'elaunch[stacks]'"
RECORD_OVERDUE_S: Final = 30.0
"""Seconds that py-spy has beyond those that it is to look."""


def record(pid: int, seconds: int, path: Path, native: bool) -> str:
    """Have py-spy write an SVG of the next ``seconds``; return why there is none, or "".

    An interrupt ends py-spy, too, and is raised again.
    """
    program = py_spy()
    if program is None:
        return NO_PY_SPY
    # Without frames of C the process need not be stopped for each sample.
    how = "--native" if native else "--nonblocking"
    argv = [program, "record", how, "--pid", str(pid), "--duration", str(seconds)]
    argv += ["--output", os.fspath(path)]
    # In an agent its exit code goes to the reaper, which waits for all children.
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=seconds + RECORD_OVERDUE_S)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    lines = [line.strip() for line in (err + out).decode("utf-8", "replace").splitlines()]
    if not process.returncode and path.exists() and path.stat().st_size:
        return ""
    why = next((line for line in lines if line.startswith("Error")), " ".join(lines[:1]))
    if "No stack counts found" in why:
        return (
            "its threads have only waited, and the graph is of those that compute: `elaunch "
            "stacks` shows where they are"
        )
    return f"py-spy has written nothing: {one_line(why)}"
