"""The TCPStore that the hosting agent serves: clients that do harm, and too many of them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import pytest

from elaunch.store.tcp import server, wire
from elaunch.store.tcp.server import TcpServer
from elaunch.store.tcp.wire import Connection
from tests.launching import wait_until
from tests.store.test_contract import LONG


def connected(port: int) -> Connection:
    """Return a client's connection."""
    made = Connection(socket.socket())
    made.open(("127.0.0.1", port), time.monotonic() + LONG)
    return made


def test_a_client_that_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers would fill the agent's memory; the others go on."""
    monkeypatch.setattr(server, "_MOST_UNSENT", 1 << 20)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    by = time.monotonic() + LONG
    with (
        closing(TcpServer(listening)),
        closing(connected(port)) as line,
        socket.socket() as greedy,
    ):
        line.send([wire.put("large", bytes(1 << 18))], by)
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.settimeout(LONG)
        greedy.connect(("127.0.0.1", port))
        greedy.sendall(wire.VALIDATE)
        with pytest.raises(ConnectionError):
            while True:  # the server takes no more of it once it has ended the connection
                greedy.sendall(wire.multi_get(["large"] * 64))
        assert len(*line.values(["large"], by)) == 1 << 18


OUT_OF_FILES = """
import os, resource, socket, sys, time
from elaunch.store.tcp.server import TcpServer
listening = socket.create_server(("127.0.0.1", 0), backlog=64)
server = TcpServer(listening)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20,) * 2)
print(listening.getsockname()[1], flush=True)
sys.stdin.readline()
print(time.process_time(), flush=True)
sys.stdin.readline()
print(time.process_time(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_who_connects_waits_while_no_descriptor_is_left() -> None:
    """The thread does not spin, and takes the next one when another has gone."""
    argv, pipe = [sys.executable, "-c", OUT_OF_FILES], subprocess.PIPE
    with (
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None and process.stdin is not None

        def used() -> float:
            assert process.stdout is not None and process.stdin is not None
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        port = int(process.stdout.readline())
        lines = [stack.enter_context(closing(connected(port))) for _ in range(10)]
        more = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)
        ]
        files = f"/proc/{process.pid}/fd"
        wait_until(lambda: _is_full(files, 20), LONG, "no descriptor is left")
        before = used()
        time.sleep(1.0)
        assert used() - before < 0.5
        for sock in more:
            sock.close()
        with closing(connected(port)) as late:
            by = time.monotonic() + LONG
            assert late.values(["none"], by) == [b""]
            assert lines[0].values(["none"], by) == [b""]


class OutOfFiles(socket.socket):
    """A listening socket that accepts nothing, as the process has no descriptor left."""

    def accept(self) -> tuple[socket.socket, object]:
        """Fail."""
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_server_that_has_no_descriptor_left_leaves_its_port() -> None:
    """It does not wait for connections at that time."""
    listening = OutOfFiles()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    made = TcpServer(listening)
    with socket.create_connection(listening.getsockname()):
        wait_until(lambda: made._accepts_at is not None, LONG, "it is out of descriptors")
        made.close()
    assert listening.fileno() == -1


def _is_full(files: str, most: int) -> bool:
    sockets = [os.readlink(f"{files}/{name}") for name in os.listdir(files)]
    return sum(link.startswith("socket:") for link in sockets) >= most


FLOODED = """
import logging, os, resource, socket, sys
from elaunch.store.tcp.server import TcpServer
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
listening = socket.create_server(("127.0.0.1", 0), backlog=64)
server = TcpServer(listening)
print(listening.getsockname()[1], flush=True)
sys.stdin.readline()
os.pipe()
"""


def test_the_most_silent_of_too_many_clients_goes() -> None:
    """The process keeps descriptors for itself, those that talk stay, and one line says so."""
    argv, pipe = [sys.executable, "-c", FLOODED], subprocess.PIPE
    with (
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        line = stack.enter_context(closing(connected(port)))
        more = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(150)
        ]
        more[0].settimeout(LONG)
        assert more[0].recv(1) == b""
        by = time.monotonic() + LONG
        assert line.values(["none"], by) == [b""]
        with closing(connected(port)) as late:
            assert late.values(["none"], by) == [b""]
        _, told = process.communicate("\n", LONG)
        assert told.startswith("the agents' store has 50 connections")
        assert told.count("\n") == 1
