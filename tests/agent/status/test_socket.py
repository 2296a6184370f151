"""elaunch.agent.status.socket with elaunch.wire.control: a real server, good and bad clients."""

from __future__ import annotations

import inspect
import json
import logging
import os
import queue
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent import frontends
from elaunch.agent.policy import events
from elaunch.agent.status import socket as control
from elaunch.agent.status.socket import (
    CLIENT_DEADLINE_S,
    REQUEST_DEADLINE_S,
    ControlSocket,
    may_ask,
)
from elaunch.errors import RunDirError
from elaunch.views.agents import ANSWER_S
from elaunch.wire.control import ask as ask_agent
from elaunch.wire.local import peer_uid, short_address
from tests.launching import wait_until

STATUS = {"op": "status"}
LONG = 60.0
BEFORE: set[threading.Thread] = set()
"""Seconds that an answer may take on a busy machine."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give clients on a busy machine the time for a request; what drops them sets its own."""
    monkeypatch.setattr(control, "REQUEST_DEADLINE_S", LONG)
    monkeypatch.setattr(control, "CLIENT_DEADLINE_S", 2 * LONG)


def ask(path: Path, request: Mapping[str, object], timeout: float = LONG) -> dict[str, object]:
    """Ask, and be patient."""
    return ask_agent(path, request, timeout)


@contextmanager
def served(
    path: Path, snapshot: Callable[[], Mapping[str, object]] = lambda: {"state": "RUNNING"}
) -> Iterator[ControlSocket]:
    server = ControlSocket(path, snapshot)
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    """Leave out of ``threads`` those that tests of other modules have left in this process."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in BEFORE]


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(LONG)
    with short_address(path) as address:
        client.connect(address)
    return client


def test_clients_are_answered_one_after_the_other(tmp_path: Path) -> None:
    count = iter(range(100))
    with served(tmp_path / "agent.sock", lambda: {"number": next(count)}):
        answers = [ask(tmp_path / "agent.sock", STATUS) for _ in range(20)]
    assert answers == [{"number": number} for number in range(20)]


def test_many_clients_at_once(tmp_path: Path) -> None:
    answers: list[object] = []
    with served(tmp_path / "agent.sock"):
        threads = [
            threading.Thread(target=lambda: answers.append(ask(tmp_path / "agent.sock", STATUS)))
            for _ in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert answers == [{"state": "RUNNING"}] * 40


def test_a_large_record_arrives_whole(tmp_path: Path) -> None:
    record = {"workers": ["x" * 1000] * 4000}
    with served(tmp_path / "agent.sock", lambda: record):
        assert ask(tmp_path / "agent.sock", STATUS) == record


def test_the_socket_is_private_and_removed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with served(tmp_path / "agent.sock") as server:
            assert stat.S_IMODE((tmp_path / "agent.sock").stat().st_mode) == 0o600
        assert not (tmp_path / "agent.sock").exists()
        server.close()
    finally:
        os.umask(before)


def test_paths_longer_than_an_address(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    before = set(os.listdir("/proc/self/fd"))
    with served(directory / "agent.sock"):
        assert ask(directory / "agent.sock", STATUS) == {"state": "RUNNING"}
    assert not (directory / "agent.sock").exists()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("length", [106, 107, 108])
def test_paths_about_as_long_as_an_address(length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        directory = Path(base, "d" * (length - len(base) - len("//agent.sock")))
        directory.mkdir()
        path = directory / "agent.sock"
        assert len(os.fsencode(path)) == length
        with served(path):
            assert ask(path, STATUS) == {"state": "RUNNING"}


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ask(tmp_path / "agent.sock", STATUS)
    with pytest.raises(FileNotFoundError):
        ask(tmp_path / ("d" * 120) / "agent.sock", STATUS)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "agent.sock"))
    with pytest.raises(ConnectionRefusedError):
        ask(tmp_path / "agent.sock", STATUS)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [({"op": "dance"}, "unknown op 'dance'"), ({}, "unknown op None")],
)
def test_unknown_requests_are_refused(
    tmp_path: Path, request_: dict[str, object], problem: str
) -> None:
    with (
        served(tmp_path / "agent.sock"),
        pytest.raises(ConnectionError, match=problem),
    ):
        ask(tmp_path / "agent.sock", request_)


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe{\n", b"{}\n", b"[]\n", b"\n", b"{\n", b"[" * 60_000 + b"\n", b'"status"\n'],
)
def test_garbage_is_answered_with_an_error(tmp_path: Path, line: bytes) -> None:
    with served(tmp_path / "agent.sock"), connected(tmp_path / "agent.sock") as client:
        client.sendall(line)
        assert "error" in json.loads(client.makefile().readline())
        assert ask(tmp_path / "agent.sock", STATUS) == {"state": "RUNNING"}


@pytest.mark.slow
def test_a_silent_client_is_dropped_in_time_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inspect.signature(ask_agent).parameters["timeout"].default > REQUEST_DEADLINE_S
    monkeypatch.setattr(control, "REQUEST_DEADLINE_S", REQUEST_DEADLINE_S)
    with served(tmp_path / "agent.sock"), connected(tmp_path / "agent.sock") as silent:
        silent.sendall(b'{"op": "sta')
        assert ask(tmp_path / "agent.sock", STATUS) == {"state": "RUNNING"}
        assert silent.recv(1) == b""


@pytest.mark.slow
def test_a_client_that_trickles_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_DEADLINE_S", REQUEST_DEADLINE_S)
    with served(tmp_path / "agent.sock"), connected(tmp_path / "agent.sock") as slow:
        began = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() - began < LONG:
                slow.sendall(b" ")
                threading.Event().wait(0.05)


def test_a_huge_line_is_dropped(tmp_path: Path) -> None:
    with served(tmp_path / "agent.sock"), connected(tmp_path / "agent.sock") as client:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.sendall(b"x" * (1 << 22))
        assert ask(tmp_path / "agent.sock", STATUS) == {"state": "RUNNING"}


@pytest.mark.slow
def test_a_client_that_hangs_up_or_does_not_read_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLIENT_DEADLINE_S", CLIENT_DEADLINE_S)
    large = {"x": "x" * (1 << 20)}
    with served(tmp_path / "agent.sock", lambda: large):
        connected(tmp_path / "agent.sock").close()
        with connected(tmp_path / "agent.sock") as deaf:
            deaf.sendall(b'{"op": "status"}\n')
            assert ask(tmp_path / "agent.sock", STATUS) == large


def test_a_snapshot_that_fails_is_logged_and_the_next_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records: list[Mapping[str, object]] = [{"state": "RUNNING"}, {"set": {1}}]

    def snapshot() -> Mapping[str, object]:
        return records.pop()

    with served(tmp_path / "agent.sock", snapshot), caplog.at_level(logging.ERROR):
        with pytest.raises(ConnectionError, match="hung up"):
            ask(tmp_path / "agent.sock", STATUS)
        assert ask(tmp_path / "agent.sock", STATUS) == {"state": "RUNNING"}
        with pytest.raises(ConnectionError, match="hung up"):
            ask(tmp_path / "agent.sock", STATUS)
    assert "could not answer" in caplog.text


@pytest.mark.slow
def test_an_agent_that_does_not_answer(tmp_path: Path) -> None:
    stuck = threading.Event()
    with served(tmp_path / "agent.sock", lambda: {"waited": stuck.wait(LONG)}) as server:
        with pytest.raises(TimeoutError):
            ask(tmp_path / "agent.sock", STATUS, timeout=0.3)
        server.close()
        assert "control" in threads()  # it was not waited for
        stuck.set()
    wait_until(lambda: "control" not in threads())


def test_a_full_backlog_is_a_timeout(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with connected(path):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                ask(path, STATUS, timeout=0.3)
            assert 0.2 < time.monotonic() - began < LONG


@pytest.mark.slow
def test_an_answer_that_took_long_still_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's time to read begins when there is something to read."""
    monkeypatch.setattr(control, "CLIENT_DEADLINE_S", 1.0)

    def slow(reason: str, _: float | None) -> str:
        threading.Event().wait(1.5)
        return f"{reason}: done"

    server = ControlSocket(tmp_path / "sock", dict, slow)
    server.start()
    try:
        answer = ask(tmp_path / "sock", {"op": "preempt", "reason": "drain"})
    finally:
        server.close()
    assert answer == {"done": "drain: done"}


@pytest.mark.slow
def test_a_loop_that_is_busy_has_accepted(tmp_path: Path) -> None:
    """The request is done later, so nobody is told that it failed."""
    inbox: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    status_record: Any = SimpleNamespace(snapshot=lambda: {"exit_code": code[0]})
    code: list[int | None] = [None]
    assert control.CLIENT_DEADLINE_S != frontends.LOOP_PATIENCE < ANSWER_S
    server = ControlSocket(
        tmp_path / "sock", dict, partial(frontends.preempt, inbox.put, status_record)
    )
    server.start()
    try:
        answer = ask(tmp_path / "sock", {"op": "preempt", "reason": "drain"}, ANSWER_S)
        code[0] = 3
        within = {"op": "preempt", "reason": "drain", "left": 120}
        late = ask(tmp_path / "sock", within, ANSWER_S)
    finally:
        server.close()
    assert str(answer["done"]).startswith("drain: accepted; the agent is busy")
    assert late == {"done": "drain: the job has ended already, with 3"}
    asked = [inbox.get(timeout=LONG) for _ in range(2)]
    assert [(one.reason, one.left) for one in asked] == [("drain", None), ("drain", 120.0)]


def test_a_client_that_gave_up_gets_nothing_done(tmp_path: Path) -> None:
    """It has said that the request is withdrawn; one that only ended its sending has not."""
    asked: list[str] = []
    going_on = threading.Event()

    def preempt(reason: str, _: float | None) -> str:
        asked.append(reason)
        if reason == "first":
            going_on.wait(LONG)
        return "done"

    server = ControlSocket(tmp_path / "sock", dict, preempt)
    server.start()
    try:
        clients = {name: connected(tmp_path / "sock") for name in ("first", "gone", "half", "last")}
        for name, client in clients.items():
            client.sendall(json.dumps({"op": "preempt", "reason": name}).encode() + b"\n")
        clients["gone"].close()
        clients["half"].shutdown(socket.SHUT_WR)
        going_on.set()
        answers = {name: clients[name].recv(100) for name in ("half", "last")}
    finally:
        going_on.set()
        server.close()
    assert asked == ["first", "half", "last"]
    assert set(answers.values()) == {b'{"done":"done"}\n'}


def test_close_ends_the_thread_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "JOIN_S", LONG / 2)  # less than the clients may take
    for clients in (0, 1, 3) * 5:
        with served(tmp_path / "agent.sock") as server:
            held = [connected(tmp_path / "agent.sock") for _ in range(clients)]
            server.close()
            assert "control" not in threads()
            for client in held:
                client.close()


def test_close_before_start(tmp_path: Path) -> None:
    ControlSocket(tmp_path / "agent.sock", dict).close()


def test_a_directory_that_can_hold_no_socket(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="cannot listen at"):
        ControlSocket(tmp_path / "missing" / "agent.sock", dict).start()


def test_only_the_own_user_and_root_may_ask() -> None:
    assert may_ask(1000, 1000)
    assert may_ask(0, 1000)
    assert not may_ask(1001, 1000)
    assert not may_ask(1000, 0)


def test_the_kernel_tells_who_connected() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_uid(one) == os.getuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_gets_no_answer() -> None:
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
    code += 's.sendall(b\'{"op": "status"}\\n\'); print(s.recv(100))'
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory, "agent.sock")
        os.chmod(directory, 0o711)
        with served(path):
            path.chmod(0o666)
            python = os.path.realpath("/usr/bin/python3")
            done = subprocess.run(
                [python if os.path.exists(python) else sys.executable, "-c", code, str(path)],
                user=65534,
                capture_output=True,
                text=True,
                timeout=60,
                cwd="/",
            )
            assert "RUNNING" not in done.stdout
            refused = done.stdout == "b''\n" or "ConnectionReset" in done.stderr
            assert refused or "BrokenPipe" in done.stderr, done
            assert ask(path, STATUS) == {"state": "RUNNING"}


@pytest.mark.slow
def test_no_descriptor_left_for_a_client(tmp_path: Path) -> None:
    """accept() fails at once then: the thread must neither end nor spin."""
    code = """
import resource, sys, time
from pathlib import Path
from elaunch.agent.status.socket import ControlSocket
server = ControlSocket(Path(sys.argv[1]), lambda: {"state": "RUNNING"})
server.start()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 64))
print("full", flush=True)
sys.stdin.readline()
print(time.process_time() < 5, flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.stdin.readline()
server.close()
"""
    path = tmp_path / "agent.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "full\n"
        # The one that was being waited for has its descriptor already, the next has none.
        with connected(path) as one, connected(path):
            one.close()
            assert "cannot accept" in process.stderr.readline()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "True\n"
        assert ask(path, STATUS) == {"state": "RUNNING"}
        process.stdin.close()
        assert process.wait(60) == 0
