"""The server's own books; what it does with processes is in tests/agent/test_workerserver.py."""

from __future__ import annotations

import _ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elaunch.server import loop, processes
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
    assert processes.call_in_fork(_exits_of_two_with_one_pid) == [True, False]


def _left_open() -> list[bool]:
    """Return whether a library, a file without code and the kept one are open afterwards."""
    library = os.open(_ctypes.__file__, os.O_RDONLY)
    paper, kept = os.open(__file__, os.O_RDONLY), os.open(__file__, os.O_RDONLY)
    loop._close_all_but(kept)
    return [os.path.exists(f"/proc/self/fd/{fd}") for fd in (library, paper, kept)]


def test_an_open_library_stays_open() -> None:
    """Of libffi, which maps the code of further callbacks from it; all else is closed."""
    asked = [sys.executable, "-c", f"from {__name__} import _left_open; print(_left_open())"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.stdout == "[True, False, True]\n", done.stderr


SLOW = """import contextlib, importlib, os
with contextlib.suppress(ProcessLookupError):
    os.kill({worker}, 9)
for number in range(40):
    importlib.import_module(f"part_{{number}}_of_slow")
"""


def _while_it_imports(directory: Path) -> list[str]:
    """Return what a server sends that imports for a while: a worker dies, another is to start."""
    ours, theirs = socket.socketpair()
    server, agent = Server(theirs), LocalChannel(ours)
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    (directory / "slow_module.py").write_text(SLOW.format(worker=pid))
    for number in range(40):
        (directory / f"part_{number}_of_slow.py").write_text("import time\ntime.sleep(0.01)\n")
    server._workers[pid] = _job(0)
    server._later.plan(["slow_module"], str(directory), 0.0)
    server._later.note_start(pid, {})
    fields = _job(1)._asdict() | {"mode": "command", "entrypoint": "true"}
    job = {name: value for name, value in fields.items() if not name.startswith("std")}
    agent.send({"op": "start", **job}, [os.open(os.devnull, os.O_WRONLY) for _ in range(2)])
    agent.send({"op": "fence", "until": time.monotonic() + 600})
    server._import_later()
    found = [agent.receive() for _ in range(3)]
    return [*(message[0]["op"] for message in found if message), str(server._fence < math.inf)]


@pytest.mark.slow
def test_an_exit_is_reported_while_modules_are_imported(tmp_path: Path) -> None:
    """What starts a worker waits for the end of the import."""
    found = processes.call_in_fork(lambda: _while_it_imports(tmp_path))
    assert found == ["exited", "warmed", "started", "True"]


def _swept_while_it_imports(directory: Path) -> list[object]:
    """Return what a server sends whose import is swept, and what is due after that."""
    ours, theirs = socket.socketpair()
    server, agent = Server(theirs), LocalChannel(ours)
    (directory / "endless_module.py").write_text("import time\ntime.sleep(600)\n")
    server._later.plan(["endless_module"], str(directory), 0.0)
    server._later.note_start(os.getpid(), {})
    agent.send({"op": "sweep", "round": 0, "signum": 0, "grace": 0.0, "deadline": 60.0})
    server._import_later()
    while server._sweep is not None:
        server._collect()
    server._send({"op": "end of the test"})
    found = [agent.receive() for _ in range(2)]
    between = math.isinf(server._later.due)
    server._later.note_start(os.getpid(), {})
    return [*(message[0]["op"] for message in found if message), between, server._later.due]


def _reformed_while_it_imports(directory: Path) -> list[object]:
    """Return what a server sends, in an import, of a round that ends before it has begun here."""
    ours, theirs = socket.socketpair()
    server, agent = Server(theirs), LocalChannel(ours)
    stays = os.fork()
    if stays == 0:
        os.closerange(3, 256)  # the answer ends with its last writer
        time.sleep(600)
    dead = subprocess.Popen(["sleep", "600"]).pid
    server._workers[stays] = _job(0)
    (directory / "busy_module.py").write_text("import time\ntime.sleep(0.5)\n")
    server._later.plan(["busy_module"], str(directory), 0.0)
    server._later.note_start(stays, {})
    store = {"op": "store", "round": 1, "host": "127.0.0.1", "fixed": False, "identity": ""}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        agent.send(store, [listening.fileno()])
    fields = _job(1)._asdict() | {"mode": "command", "entrypoint": "true"}
    job = {name: value for name, value in fields.items() if not name.startswith("std")}
    agent.send({"op": "start", **job}, [os.open(os.devnull, os.O_WRONLY) for _ in range(2)])
    sweep = {"op": "sweep", "round": 1, "signum": 0, "grace": 0.0, "deadline": 60.0}
    agent.send({**sweep, "keeps": [0]})
    server._unswept.add(dead)  # before it has a session of its own
    server._import_later()
    while server._sweep is not None:
        server._collect()
    server._send({"op": "end of the test"})
    found = [message[0] for _ in range(3) if (message := agent.receive())]
    lives = [os.path.exists(f"/proc/{pid}") for pid in (stays, dead)]
    os.kill(stays, signal.SIGKILL)
    return [
        *(each["op"] for each in found),
        found[0].get("kept"),
        *lives,
        len(server._stores.files),
    ]


@pytest.mark.slow
def test_a_round_with_workers_that_stay_does_not_wait_for_an_import(tmp_path: Path) -> None:
    """Its store is opened, and it can end again; a worker that had not begun never does."""
    found = processes.call_in_fork(lambda: _reformed_while_it_imports(tmp_path))
    assert found == ["swept", "warmed", "end of the test", [0], True, False, 1]


def test_an_import_that_is_swept_with_its_round_is_done_in_the_next(tmp_path: Path) -> None:
    """It has not died of what it imported, and the workers of later rounds gain by it."""
    *sent, between, due = processes.call_in_fork(lambda: _swept_while_it_imports(tmp_path))
    assert sent == ["swept", "end of the test"]
    assert between and due < time.monotonic() + 60
