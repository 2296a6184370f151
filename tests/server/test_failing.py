"""A script that has failed: what it will end with, and a round that waits for that end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import pytest

from elaunch.server import failing, processes
from elaunch.server.loop import Server
from elaunch.server.worker import Job
from elaunch.wire.local import LocalChannel


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("boom"), [1]),
        (SystemExit(0), []),
        (SystemExit(None), []),
        (SystemExit(256), []),
        (SystemExit(259), [3]),
        (SystemExit("no data"), [1]),
        (KeyboardInterrupt(), []),
    ],
    ids=repr,
)
def test_what_a_worker_will_end_with(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: list[int]
) -> None:
    """Empty: with 0, or nobody knows yet."""
    monkeypatch.setattr(failing, "_expected", [])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    failing.note(error)
    assert failing._expected == code


def test_a_hook_of_the_script_may_choose_another_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a worker is known by the end of its process."""
    monkeypatch.setattr(failing, "_expected", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: sys.exit(7))
    failing.note(ValueError("boom"))
    assert failing._expected == []


def _swept_while_it_ends(ends: bool) -> list[object]:
    """Return what a server sends of a worker that has failed, and when it says that all is over."""
    ours, theirs = socket.socketpair()
    server, agent = Server(theirs), LocalChannel(ours)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        failing._expected[:] = [3]
        server._failures.become(0)
        server._failures._tell()
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    server._workers[pid] = Job(0, 0, 0, "script", "", (), "", {}, -1, -1)
    server._poll([server._wake_read], time.monotonic() + 30)
    server._reap()
    order = {"op": "sweep", "round": 0, "signum": int(signal.SIGTERM), "grace": 0.0}
    server._handle(order | {"deadline": 60.0}, [])
    server._collect()
    waited = server._sweep is not None
    if ends:
        os.close(write_end)
    else:
        server._ending[pid] = 0.0
    while server._sweep is not None:
        server._collect()
    exited, swept = (received[0] for _ in range(2) if (received := agent.receive()))
    code, stopped = exited["exitcode"], exited["stopped"]
    return [code, stopped, waited, [found == pid for found, _ in swept["killed"]]]


@pytest.mark.parametrize("ends", [True, False])
def test_the_end_of_a_failed_interpreter_is_waited_for(ends: bool) -> None:
    """Not for ever; and it is no second exit."""
    killed = [] if ends else [True]
    assert processes.ask_fork(lambda: _swept_while_it_ends(ends)) == [3, False, True, killed]
