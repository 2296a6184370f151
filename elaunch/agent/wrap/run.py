"""``elaunch wrap``: one rank of another launcher's job, as a command below a server of its own.

The server (elaunch.server) is the one of an agent: it is the subreaper of the command and holds a
lifeline, so that nothing of the command is left when this process is killed. The log pump is an
agent's, too.

==================  ==============================================================================
event               what is done
==================  ==============================================================================
SignalReceived      forwarded, unless the command has had it, too; the first that means the end
                    starts the grace, a later one ends it
deadline            SIGKILL to everything below
LauncherGone        as SIGTERM: the launcher was killed, and signals nobody
WorkerExited        what the command left is waited for, if that is asked, and then ended; the
                    wrapper ends with the command's code
ServerLost          what is left is ended from here
TreeGone            the end
==================  ==============================================================================
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import resource
import shlex
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from signal import Signals

from elaunch import env, proc
from elaunch.agent import signals
from elaunch.agent.children import Reaper
from elaunch.agent.logs.pump import LogPump
from elaunch.agent.policy import events
from elaunch.agent.signals import ENDING, SAME_SIGNAL
from elaunch.agent.workers.server import KILL_DEADLINE, ServerPlan, WorkerServer
from elaunch.agent.wrap.plan import WrapPlan
from elaunch.endings import exit_code, how_it_ended
from elaunch.errors import ServerError
from elaunch.server import processes
from elaunch.text import shortened
from elaunch.wire.local import is_readable

FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
LEFT_GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL for what a command that ended well has left running."""
FLUSH_TIMEOUT = 2.0
NOT_STARTED = (126, 127)
TO_ALL = 0.05
"""Seconds to see whether a signal was sent to all processes of the job, as Slurm does."""


@dataclass(frozen=True)
class LauncherGone:
    """The process that started this one has ended."""


Event = events.Event | LauncherGone
Inbox = queue.SimpleQueue[Event]


def run(plan: WrapPlan) -> int:
    """Run the command of one rank to its end; return its exit code, 128 + n for a signal.

    Must be called in the main thread, which it keeps. Raises ServerError if the command cannot be
    started or the server is lost.
    """
    inbox: Inbox = queue.SimpleQueue()
    signals.install(FORWARDED, inbox.put)
    processes.become_subreaper()
    with contextlib.ExitStack() as stack:
        pump = LogPump(plan.logs)
        pump.start()
        stack.callback(pump.close)
        server = WorkerServer(_server_plan(plan), inbox.put, Reaper())
        stack.callback(server.close)
        server.start()
        if plan.launched:
            _watch_parent(os.getppid(), inbox.put)
        code = Wrapper(plan, inbox, server, pump).run()
    signals.ignore(FORWARDED)
    return code


class Wrapper:
    """The loop of one wrapped command; what it works with is started and closed by :func:`run`."""

    def __init__(self, plan: WrapPlan, inbox: Inbox, server: WorkerServer, pump: LogPump) -> None:
        self._plan = plan
        self._inbox = inbox
        self._server = server
        self._pump = pump
        self._exited: events.Exit | None = None
        self._asked_at = math.inf
        self._deadline = math.inf
        self._held: deque[tuple[float, Signals]] = deque()
        self._sweeping = False
        self._waits = False
        self._gone: events.TreeGone | None = None

    def run(self) -> int:
        """Start the command, and do what comes until nothing of it is left."""
        self._start()
        while self._gone is None:
            self._handle(self._next())
        self._pump.finish_round(FLUSH_TIMEOUT)
        return self._outcome(self._gone)

    def _start(self) -> None:
        plan = self._plan
        rank = plan.rank
        [(stdout, stderr)] = self._pump.open_round(plan.round, {rank: rank}).values()
        job = {
            "round": plan.round,
            "rank": rank,
            "local_rank": rank,
            "mode": "command",
            "entrypoint": plan.command[0],
            "args": list(plan.command[1:]),
            "interpreter": sys.executable,
            "env": dict(plan.environ),
        }
        self._server.start_worker(job, stdout, stderr)

    def _next(self) -> Event | None:
        """Return the next event; None when a deadline comes before it."""
        due = min(self._deadline, self._held[0][0] if self._held else math.inf)
        left = due - time.monotonic()
        with contextlib.suppress(queue.Empty):
            if left > 0:  # however many signals come meanwhile
                return self._inbox.get(timeout=None if left == math.inf else left)
        return None

    def _handle(self, event: Event | None) -> None:
        if event is None and self._held and self._held[0][0] <= self._deadline:
            self._forward(self._held.popleft()[1])
        elif event is None:
            self._on_deadline()
        elif isinstance(event, events.SignalReceived):
            self._on_signal(event.signum)
        elif isinstance(event, LauncherGone):
            self._show("the launcher has ended; SIGTERM to the command")
            self._on_signal(signal.SIGTERM)
        elif isinstance(event, events.WorkerNotStarted):
            raise ServerError(f"{self._who()} cannot be started: {event.problem}")
        elif isinstance(event, events.Exit):
            self._exited = event
            asked, wait = self._asked_at < math.inf, self._plan.wait_for_children
            well = event.exitcode == 0 or asked
            self._waits = event.exitcode == 0 and not asked and wait > 0.0
            if self._waits:
                self._sweep(None, wait + KILL_DEADLINE)
                self._deadline = time.monotonic() + wait
                return
            self._sweep(signal.SIGTERM if well else None, LEFT_GRACE if well else 0.0)
        elif isinstance(event, events.ServerLost):
            self._server.sweep_orphans(self._plan.round)
            self._deadline = math.inf
        elif isinstance(event, events.TreeGone):
            self._gone = event

    def _on_signal(self, signum: Signals) -> None:
        ends = signum in ENDING
        now = time.monotonic()
        again = ends and now - self._asked_at >= SAME_SIGNAL
        if again and not self._sweeping:
            self._show(f"{signum.name} again: killing the command at once")
            self._sweep(None, 0.0)
            return
        if ends and self._asked_at == math.inf:
            self._asked_at = now
            if self._waits:
                self._deadline = now
            elif not self._sweeping:
                self._deadline = now + self._plan.shutdown_timeout
        self._held.append((now + TO_ALL, signum))

    def _forward(self, signum: Signals) -> None:
        # A command that is not Python is often a shell around the program that has to save.
        whole = not self._plan.is_python
        order = {"op": "signal", "signum": int(signum), "group": whole, "once": True}
        self._server.send({**order, "stops": signum in ENDING})

    def _on_deadline(self) -> None:
        if self._waits:
            self._waits = False
            self._sweep(signal.SIGTERM, LEFT_GRACE)
            return
        if self._sweeping:
            self._server.kill()  # then ServerLost, and its orphans come to this process
            self._deadline = math.inf
            return
        self._show(f"it has not ended in {self._plan.shutdown_timeout:g} s; killing it")
        self._sweep(None, 0.0)

    def _sweep(self, signum: Signals | None, grace: float) -> None:
        self._sweeping = True
        overdue = self._server.end_tree(self._plan.round, signum, grace)
        self._deadline = time.monotonic() + overdue

    def _outcome(self, gone: events.TreeGone) -> int:
        if gone.survivors:
            left = ", ".join(
                f"{pid} ({name}{'' if user is None else f', of {proc.user_name(user)}'})"
                for pid, name, user in gone.survivors
            )
            self._show(f"processes that cannot be killed are left: {left}")
        if self._exited is None:
            raise ServerError(
                f"{self._who()}: the server that started the command was lost, and the command "
                "with it"
            )
        code = self._exited.exitcode
        if code == 0:
            if gone.killed:
                names = ", ".join(f"{name} ({pid})" for pid, name in gone.killed)
                self._show(f"ended what it had left: {names}")
            return 0
        self._show(f"{how_it_ended(code)}{self._hint(code)}")
        return exit_code(code)

    def _hint(self, code: int) -> str:
        word = self._plan.command[0]
        if code in NOT_STARTED and word.endswith(".py"):
            return f"; did you mean `elaunch wrap -- python {word}`?"
        error_file = self._plan.environ.get(env.ERROR_FILE, "")
        if self._plan.logs.log_root is not None and os.path.exists(error_file):
            return f"; its traceback is in {error_file}"
        return ""

    def _who(self) -> str:
        pid = f", pid {self._exited.pid}" if self._exited is not None else ""
        command = " ".join(shlex.join(self._plan.command).split())
        return f"rank {self._plan.rank} on {os.uname().nodename}{pid} ({shortened(command, 60)})"

    def _show(self, text: str) -> None:
        self._pump.show(f"elaunch: {self._who()}: {text}")


def _server_plan(plan: WrapPlan) -> ServerPlan:
    return ServerPlan(
        run_id=f"{plan.job or 'wrap'}, rank {plan.rank}",
        interpreter=sys.executable,
        start="exec",
        preload=(),
        later=(),
        import_path=None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        title_room=0,
        environ=plan.environ,
    )


def _watch_parent(pid: int, post: Callable[[Event], None]) -> None:
    """Post LauncherGone when the launcher's process on this node ends."""
    if pid <= 1:
        return
    try:
        parent = os.pidfd_open(pid)
    except OSError:  # an old kernel; or it has just ended, and its own end closes the pipes
        return

    def wait() -> None:
        is_readable(parent, None)
        os.close(parent)
        post(LauncherGone())

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()
