"""The server's own books; what it does with processes is in tests/agent/test_workerserver.py."""

from __future__ import annotations

import os
import signal
import socket
import time

from elaunch.server import processes
from elaunch.server.loop import Server
from elaunch.server.worker import Job
from elaunch.wire.local import LocalChannel


def _job(round: int) -> Job:
    return Job(round, 0, 0, "script", "", (), "", {}, -1, -1)


def _exits_of_two_with_one_pid() -> list[bool]:
    """Return ``stopped`` of a worker that was told to end, and of a later one with its pid."""
    ours, theirs = socket.socketpair()
    server, agent = Server(theirs), LocalChannel(ours)
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    server._workers[pid] = _job(0)
    server._note_stop()
    os.kill(pid, signal.SIGKILL)
    stopped = []
    for reused in (False, True):
        if reused:
            pid = _same_pid(server, pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        server._reap()
        message = agent.receive()
        assert message is not None
        stopped.append(message[0]["stopped"])
    return stopped


def _same_pid(server: Server, old: int) -> int:
    """Fork a worker that ends by itself, and have the server take its pid for the ``old`` one."""
    pid = os.fork()
    if pid == 0:
        os._exit(1)
    server._workers[pid] = _job(1)
    server._stopped = {pid if one == old else one for one in server._stopped}
    return pid


def test_a_pid_that_is_used_again_is_not_that_of_a_stopped_worker() -> None:
    """A job that restarts for weeks sees every pid again."""
    assert processes.ask_fork(_exits_of_two_with_one_pid) == [True, False]
