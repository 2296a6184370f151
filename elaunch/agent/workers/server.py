"""The agent's end of the server: starts the process, sends it messages, posts what it reports.

Two threads, each in one blocking call: the reader in ``recv`` on the server's socket, the reaper
in ``waitpid``. The messages are those of elaunch.server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from elaunch import atonce, env, proc
from elaunch.agent.children import Reaper, start_server
from elaunch.agent.policy import events
from elaunch.errors import ServerError
from elaunch.server.processes import LOOK_AGAIN, Sweep
from elaunch.wire.local import LocalChannel, Message

KILL_DEADLINE = 10.0
"""Seconds after SIGKILL after which a process is called a survivor and left alone."""
SWEEP_OVERDUE = KILL_DEADLINE + 2.0
"""Seconds after SIGKILL after which the survivors should have been reported."""
IMPORTS_DEADLINE = 0.2
"""Seconds for a server that has no worker yet to end by itself; it may be deep in an import."""

LATER_DELAY = 60.0
"""Seconds after the first worker was started at which the later modules are imported."""

SEND_DEADLINE = 120.0
"""Seconds for the server to take a message; it does not while it imports, which may be slow."""

STOPPED_S = 20
"""Seconds for which the server may be stopped: with all others, the agent among them, or alone."""

PostEvent = Callable[[events.Event], None]

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class ServerPlan:
    """How to start the server: what it is sent (``configure`` in elaunch.server), and two more.

    ``title_room`` is the length of the longest worker command; ``environ`` are its variables.
    """

    run_id: str
    interpreter: str
    start: Literal["fork", "exec"]
    preload: tuple[str, ...]
    later: tuple[str, ...]
    import_path: str | None
    open_files: tuple[int, int]
    title_room: int
    environ: Mapping[str, str] = field(repr=False)
    timer_file: str | None = None
    temp: str | None = None
    numa_binding: str | None = None
    nproc: int = 0


class WorkerServer:
    """Owns the server process and the socket that is its lifeline."""

    def __init__(self, plan: ServerPlan, post: PostEvent, reaper: Reaper) -> None:
        self._plan = plan
        self._post = post
        self._reaper = reaper
        self._channel: LocalChannel | None = None
        self._pid = 0
        self._inherited: list[int] = []
        self._closing = False
        self._started_any = False
        self._ended = threading.Event()

    @property
    def pid(self) -> int:
        """The server's pid; 0 when there is none."""
        return 0 if self._ended.is_set() else self._pid

    def start(self) -> None:
        """Start the process, its reader and the reaper; ServerReady is posted in time."""
        # A program that executed elaunch in its place may have had children: not elaunch's.
        self._inherited = proc.children(os.getpid())
        given = env.take_server()
        ours = self._spawn() if given is None else self._adopt(*given)
        self._channel = channel = LocalChannel(ours)
        reader = threading.Thread(
            target=self._read, args=(channel,), name="server-reader", daemon=True
        )
        reader.start()
        configure: Message = vars(self._plan) | {
            "op": "configure",
            "later_delay": LATER_DELAY,
            "environ": None if given is None else dict(self._plan.environ),
        }
        del configure["title_room"]
        self.send(configure)

    def _spawn(self) -> socket.socket:
        """Execute the server; return the socket that leads to it."""
        plan = self._plan
        start = partial(
            self._reaper.spawn,
            environ=plan.environ,
            ended=self._note_end,
            stopped=self._note_stop,
        )
        try:
            self._pid, ours = start_server(plan.interpreter, plan.title_room, start)
        except OSError as error:
            raise ServerError(f"cannot execute {plan.interpreter}: {error}") from error
        return ours

    def _adopt(self, pid: int, fd: int) -> socket.socket:
        """Take a child as the server: one that was started before, or a fork of the program that
        has started this agent."""
        os.set_inheritable(fd, False)
        self._inherited.remove(pid)
        self._pid = pid
        self._reaper.adopt(pid, self._note_end, self._note_stop)
        return socket.socket(fileno=fd)

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send one message; a server that has just died is reported by the reaper, not here.

        One that takes nothing is killed, so that the agent's loop does not hang on it.
        """
        self._started_any = self._started_any or message["op"] == "start"
        try:
            if self._channel is not None:
                self._channel.send(message, files, SEND_DEADLINE)
        except (BrokenPipeError, ConnectionResetError):
            return
        except TimeoutError:
            self.kill()

    def start_worker(self, fields: Message, stdout: int, stderr: int) -> None:
        """Have a worker started (``start`` in elaunch.server); its output is closed here then."""
        self.send({"op": "start", **fields}, [stdout, stderr])
        os.close(stdout)
        os.close(stderr)

    def kill(self) -> None:
        """SIGKILL the server; its workers die with it, what they leave comes to the agent.

        A server that cgroup v1 has frozen dies only when it is thawed: then they are killed here.
        """
        if not self.pid:
            return
        workers = proc.children(self.pid) if proc.is_frozen(self.pid) else []
        for pid in (self.pid, *workers):
            # It may end in this moment, or have become another user's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Cut the lifeline, wait for the server to end what is left and itself, and make sure."""
        self._closing = True
        timeout = KILL_DEADLINE if self._started_any else IMPORTS_DEADLINE
        if self._channel is not None:
            self._channel.close()
        if self.pid and not self._ended.wait(timeout):
            self.kill()
            self._ended.wait(KILL_DEADLINE)
        self._sweep_own(-1)

    def end_tree(
        self,
        round_number: int,
        signum: signal.Signals | None,
        grace: float,
        keeps: frozenset[int] | None = None,
    ) -> float:
        """Have everything of the round ended; return seconds until TreeGone is overdue.

        The workers with the local ranks ``keeps`` stay; None: all that end are ended by this.
        """
        if not self.pid:
            self.sweep_orphans(round_number)
            return SWEEP_OVERDUE
        order = {"op": "sweep", "round": round_number, "signum": int(signum or 0)}
        stay = None if keeps is None else sorted(keeps)
        self.send({**order, "grace": grace, "deadline": KILL_DEADLINE, "keeps": stay})
        return grace + SWEEP_OVERDUE

    def sweep_orphans(self, round_number: int) -> None:
        """End what a dead server left to the agent, in a thread of its own; posts TreeGone."""
        atonce.start("sweeper", self._sweep_orphans, round_number)

    def _sweep_orphans(self, round_number: int) -> None:
        gone = events.TreeGone(round_number)
        try:
            gone = _tree_gone(self._sweep_own(round_number))
        finally:  # whatever happens: the loop waits for this event, and has no deadline beside it
            self._post(gone)

    def _sweep_own(self, round_number: int) -> Message:
        order = {"round": round_number, "signum": 0, "grace": 0.0, "deadline": KILL_DEADLINE}
        sweep = Sweep(order, os.getpid(), lambda: self._inherited)
        pause = threading.Event()
        while not sweep.step():
            pause.wait(LOOK_AGAIN)
        return sweep.outcome()

    def _read(self, channel: LocalChannel) -> None:
        try:
            while (received := channel.receive()) is not None:
                self._post(_event(received[0]))
        except OSError:  # closed under the read; the reaper reports the server's end
            return

    def _note_stop(self) -> None:
        atonce.start("server stopped", self._go_on)

    def _go_on(self) -> None:
        """Have the server go on if it stays stopped: no worker's end is seen meanwhile.

        The looks are counted: time in which the agent is suspended, too, does not count.
        """
        for _ in range(STOPPED_S):
            if self._ended.wait(1.0) or proc.status(self._pid).get("State", "")[:1] != "T":
                return
        log.warning(
            "the server that starts the workers (pid %d) has been stopped by a signal (SIGSTOP) "
            "for %d s, so that no end of a worker is seen; having it go on (SIGCONT)",
            self._pid,
            STOPPED_S,
        )
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, signal.SIGCONT)

    def _note_end(self, exitcode: int) -> None:
        self._ended.set()
        if not self._closing:
            self._post(events.ServerLost(exitcode))


_EVENTS: Final[Mapping[str, Callable[..., events.Event]]] = {
    "exited": events.Exit,
    "started": events.WorkerStarted,
    "not_started": events.WorkerNotStarted,
    "warmed": events.ServerWarmed,
    "ready": events.ServerReady,
    "fenced": events.Fenced,
    "devices": events.DevicesCounted,
}
"""The messages of the server that have the fields of their event."""


def _event(message: Message) -> events.Event:
    op = message["op"]
    if op == "swept":
        return _tree_gone(message)
    if op == "store_failed":
        return events.StoreLost(message["problem"])
    fields = {name: value for name, value in message.items() if name != "op"}
    if op == "warmed":
        fields["settings"] = tuple(fields["settings"])
    return _EVENTS[op](**fields)


def _tree_gone(message: Message) -> events.TreeGone:
    killed = tuple((pid, name) for pid, name in message["killed"])
    survivors = tuple((pid, name, user) for pid, name, user in message["survivors"])
    return events.TreeGone(message["round"], killed, survivors, frozenset(message["kept"]))
