"""A process that a command debugs goes on, however the command ends or whatever it asks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch import env
from elaunch.wire.control import debug_socket
from elaunch.wire.debugger import GOES_ON
from elaunch.wire.local import listen

SCRIPT = """
import json, os, sys, time; seen = 1
from elaunch.server.worker import _debug_when_asked
_debug_when_asked()
def files(): return len(os.listdir("/proc/self/fd"))
before = files()
print("up", flush=True)
while not os.access(sys.argv[1], os.F_OK):
    sys.stdout.flush()
    time.sleep(0.01)
print("whole", sys.gettrace(), files() - before, flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that handles the signal, and ends well when the file "stop" is there."""
    script = tmp_path / "s.py"  # a file: pdb finds the lines of no other source before Python 3.13
    script.write_text(SCRIPT)
    argv = [sys.executable, str(script), str(tmp_path / "stop")]
    environ = os.environ | {env.AGENT_SOCKET: str(tmp_path / "agent.sock")}
    with subprocess.Popen(argv, env=environ, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
        (tmp_path / "stop").touch()
        assert process.stdout.readline() == "whole None 0\n"
        assert process.wait(30) == 0


def debug(worker: subprocess.Popen[str], directory: Path) -> socket.socket:
    """Return the connection of a debugger that prompts."""
    path = debug_socket(directory, worker.pid)
    with listen(path, 1) as listener:
        listener.settimeout(100)
        worker.send_signal(env.DEBUG_SIGNAL)
        connection, _ = listener.accept()
    path.unlink()
    connection.settimeout(100)
    shown_until(connection, b"(Pdb) ")
    return connection


def shown_until(connection: socket.socket, end: bytes) -> bytes:
    """Return what is shown up to ``end``; b"": to the end of the stream."""
    shown = b""
    while not (end and shown.endswith(end)):
        more = connection.recv(4096)
        assert more or not end, shown
        shown += more
        if not more:
            break
    return shown


@pytest.mark.parametrize(
    "words", [b"q\n", b"exit\n", b"b 9\nc\nq\n", b"run\nn\nn\nc\n", b"1 / 0\n"]
)
def test_it_goes_on(worker: subprocess.Popen[str], tmp_path: Path, words: bytes) -> None:
    """After commands that end other programs, and at the end of the terminal."""
    with debug(worker, tmp_path) as connection:
        connection.sendall(words)
        connection.shutdown(socket.SHUT_WR)
        shown = shown_until(connection, b"")
        assert b"(Pdb)" in shown or words in (b"q\n", b"exit\n")
        assert shown.endswith(GOES_ON)


@pytest.mark.parametrize("words", [b"", b"b 9\nc\n", b"p 'x' * 10 ** 7\n"])
def test_the_command_is_killed(worker: subprocess.Popen[str], tmp_path: Path, words: bytes) -> None:
    """At the prompt, with a breakpoint, and while it is shown something; then another comes."""
    connection = debug(worker, tmp_path)
    connection.sendall(words)
    connection.close()
    with debug(worker, tmp_path) as again:
        again.sendall(b"p seen\nc\n")
        assert shown_until(again, b"").startswith(b"1\n")


def test_a_breakpoint_that_never_comes(worker: subprocess.Popen[str], tmp_path: Path) -> None:
    """Nothing traces the script any more when the command was killed."""
    with debug(worker, tmp_path) as connection:
        connection.sendall(b"b json.dumps\n")
        assert b"Breakpoint 1" in shown_until(connection, b"(Pdb) ")
        connection.sendall(b"c\n")


def test_a_late_signal_and_one_at_the_prompt_do_nothing(
    worker: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Nobody listens; and one debugger is there."""
    worker.send_signal(env.DEBUG_SIGNAL)
    with debug(worker, tmp_path) as connection:
        worker.send_signal(env.DEBUG_SIGNAL)
        connection.sendall(b"p seen\n")
        assert shown_until(connection, b"(Pdb) ") == b"1\n(Pdb) "


BREAKS = """
import os
from elaunch.server.worker import _break_at_terminal
_break_at_terminal()
files = []
for turn in range(3):
    breakpoint(header=f"turn {turn}")
    files.append(len(os.listdir("/proc/self/fd")))
os.environ["PYTHONBREAKPOINT"] = "0"
breakpoint()
print("whole", files[0] == files[2], flush=True)
"""


def test_breakpoint_prompts_at_the_terminal(tmp_path: Path) -> None:
    """Of a rank whose output is elsewhere, each time; what the script prints is not there."""
    ours, theirs = os.openpty()
    script = tmp_path / "breaks.py"
    script.write_text(BREAKS)
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | {"RANK": "3"},
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(theirs)
        for turn in range(3):
            shown = b""
            while not shown.endswith(b"(rank 3, Pdb) "):
                shown += os.read(ours, 4096)
            assert f"turn {turn}\r\n".encode() in shown
            os.write(ours, b"c\n")
        assert process.communicate(timeout=100)[0] == "whole True\n"
    os.close(ours)
    assert process.returncode == 0
