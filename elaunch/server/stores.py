"""The process that hosts the TCPStore of each round for the workers, and the server's end of it.

One process per agent, forked from the server so that the server stays single-threaded. It gets a
listening socket per round, bound by the agent, and drops the last round's store when the next one
comes: a store that is reused over restarts still holds the dead group's keys, which makes the next
group fail or hang (docs/torchrun.md). Workers may connect before the store exists; the kernel holds
their connections.

Where the server has imported torch, the host is forked at once and takes a round's store in a
millisecond. Where it has not, the host must import torch itself, so it is started when the first
worker connects, or a moment into the round: in parallel with the workers' own imports, and never
for a script that ends at once.

One Unix socket joins it to the server (elaunch.wire.local): ``store`` with the listening socket in,
perhaps ``store_failed`` out; ``drop`` in, ``dropped`` out: with ``--master-port`` the next round's
store is on the same port, and no worker may meet the old one there. It ends when that socket
closes.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from elaunch.server import processes
from elaunch.store.tcp import wire
from elaunch.store.tcp.connection import IDENTITY
from elaunch.wire.local import LocalChannel, Message, is_readable

START_DELAY = 0.25
"""Seconds into a round after which a store host that must import torch itself is started."""
DROP_DEADLINE = 2.0
"""Seconds for the host to drop a store; a new host is there sooner than one that hangs."""


class _Waiting(NamedTuple):
    """A round's store that no host has yet."""

    message: Message
    listening: int
    start_at: float


class Stores:
    """Owns the store host, the socket to it, and a listening socket that waits for it.

    Args:
        send: sends a message to the agent.
        forget: closes, in a fork, what belongs to the server alone.
    """

    def __init__(self, send: Callable[[Message], None], forget: Callable[[], None]) -> None:
        self._send = send
        self._forget = forget
        self._host: LocalChannel | None = None
        self._dropping = self._is_open = False
        self._waiting: _Waiting | None = None
        self.pid = 0

    @property
    def files(self) -> list[int]:
        """The descriptors to wait for: the host's, and that of a worker's early connection."""
        host = [] if self._host is None else [self._host.fileno()]
        return host if self._waiting is None else [*host, self._waiting.listening]

    @property
    def due(self) -> float:
        """When :meth:`start_waiting` has something to do, on the monotonic clock."""
        return math.inf if self._waiting is None else self._waiting.start_at

    def start(self) -> None:
        """Fork the host."""
        server_pid = os.getpid()
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            problem = f"its host cannot be started: {error.strerror}"
            self._send({"op": "store_failed", "round": -1, "problem": problem})
            return
        if pid == 0:
            ours.close()
            self._forget()
            _run_forked(theirs, server_pid)
        theirs.close()
        self._host, self.pid, self._dropping = LocalChannel(ours), pid, False

    def open(self, message: Message, listening: int) -> None:
        """Have a round's store opened on ``listening``, which this object owns from now on."""
        if message["fixed"]:
            if self._is_open:  # a round whose workers stay has left it
                self.drop()
            self._await_drop()
            self._is_open = message["round"] >= 0
        if self._send_to_host(message, [listening]):
            os.close(listening)
        else:
            self._waiting = _Waiting(message, listening, time.monotonic() + START_DELAY)

    def start_waiting(self) -> None:
        """Start a host for a store that waits, if a worker has connected or the time has come."""
        waiting = self._waiting
        if waiting is None:
            return
        connected = is_readable(waiting.listening, 0.0)
        if connected or time.monotonic() >= waiting.start_at:
            self._waiting = None
            self.start()
            if self._host is None:
                os.close(waiting.listening)
            else:
                self.open(waiting.message, waiting.listening)

    def drop(self) -> None:
        """Have the round's store dropped; on a fixed port the next one waits for the answer."""
        if self._waiting is not None:
            os.close(self._waiting.listening)
            self._waiting = None
        self._is_open = False
        self._dropping = self._send_to_host({"op": "drop"}, [])

    def receive(self, fd: int) -> None:
        """Receive what the host has sent, if ``fd`` is its socket."""
        if self._host is None or fd != self._host.fileno():
            return
        try:
            for message, _ in self._host.drain():
                if message["op"] == "dropped":
                    self._dropping = False
                else:
                    self._send(message)
        except EOFError:
            self._cut()

    def on_host_end(self, exitcode: int) -> None:
        """Report that the host has ended; the next round's message starts another."""
        self._cut()
        self.pid = 0
        problem = f"the process that hosts the store ended with {exitcode}"
        self._send({"op": "store_failed", "round": -1, "problem": problem})

    def close_in_fork(self) -> None:
        """Close the server's files in a process that was forked from it."""
        if self._host is not None:
            self._host.close_here()
        if self._waiting is not None:
            os.close(self._waiting.listening)

    def _await_drop(self) -> None:
        """Wait until no worker can meet the last round's store; a host that hangs is killed."""
        until = time.monotonic() + DROP_DEADLINE
        while self._host is not None and self._dropping:
            left = max(0.0, until - time.monotonic())
            if not is_readable(self._host.fileno(), left):
                os.kill(self.pid, signal.SIGKILL)
                self._cut()
                self.pid = 0
                return
            self.receive(self._host.fileno())

    def _send_to_host(self, message: Message, files: list[int]) -> bool:
        if self._host is None:
            return False
        try:
            self._host.send(message, files)
        except (BrokenPipeError, ConnectionResetError):  # its end is reported when it is reaped
            self._cut()
        return self._host is not None

    def _cut(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None


def host_stores(server: LocalChannel) -> None:
    """Be the store host until the server closes ``server``; imports torch."""
    stores: list[object] = []
    while (received := server.receive()) is not None:
        message, files = received
        stores.clear()  # nothing of the dead round answers any more
        if message["op"] == "drop":
            server.send({"op": "dropped"})
            continue
        try:
            stores.append(_open_store(message, files[0]))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            failed = {"op": "store_failed", "round": message["round"], "problem": problem}
            server.send(failed)


def _open_store(message: Message, listening: int) -> object:
    from torch import __version__
    from torch.distributed import TCPStore

    with socket.socket(fileno=os.dup(listening)) as copy:
        port = copy.getsockname()[1]
    store = TCPStore(
        message["host"],
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening,
        use_libuv=wire.is_served_by(__version__),
    )
    if message["identity"]:
        store.set(IDENTITY, message["identity"])
    return store


def _run_forked(sock: socket.socket, server_pid: int) -> NoReturn:
    processes.die_with_parent(server_pid)
    processes.set_title("elaunch: store host")
    os.setsid()
    try:
        host_stores(LocalChannel(sock, most_files=1))
    finally:
        sys.stderr.flush()
        os._exit(0)
