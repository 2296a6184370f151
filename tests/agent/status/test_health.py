"""The health-check port over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elaunch.agent.status.health import HealthCheck
from elaunch.errors import UsageError
from tests.launching import wait_until


def running() -> dict[str, Any]:
    """Answer as a living loop."""
    return {"state": "RUNNING", "round": 2}


def silent() -> dict[str, Any]:
    """Answer as a stuck loop."""
    raise TimeoutError


@contextmanager
def opened(alive: Callable[[], dict[str, Any]], request_s: float = 60.0) -> Iterator[int]:
    """Run a health check on a free port; nothing of it stays."""
    check = HealthCheck(0, alive, request_s)
    port = check.start()
    try:
        yield port
    finally:
        check.close()
    wait_until(lambda: "health-check" not in [thread.name for thread in threading.enumerate()])


def request(
    port: int, path: str, method: str = "GET", host: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """Return status and body."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/health", "/health?verbose=1"])
def test_alive(path: str) -> None:
    """200 and the state, one request after another."""
    with opened(running) as port:
        for _ in range(3):
            status, body = request(port, path)
            assert (status, json.loads(body)) == (200, running())
        assert request(port, path, "HEAD") == (200, b"")


def test_not_answering() -> None:
    """503 when the loop is stuck."""
    with opened(silent) as port:
        status, body = request(port, "/health")
        assert (status, json.loads(body)) == (503, {"state": "NOT_ANSWERING"})


def test_other_requests() -> None:
    """No other path, nothing to change."""
    with opened(running) as port:
        assert request(port, "/etc/passwd")[0] == 404
        assert request(port, "/", "POST")[0] == 501
        assert request(port, "/")[0] == 200


def test_both_address_families() -> None:
    """Pods may have either."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with opened(running) as port:
        assert request(port, "/", host="::1")[0] == 200
        assert request(port, "/", host="127.0.0.1")[0] == 200


@pytest.mark.parametrize(
    "garbage", [b"", b"\r\n\r\n", b"\xff\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 70_000]
)
def test_garbage_does_not_end_it(garbage: bytes) -> None:
    """Port scanners come by."""
    with opened(running) as port:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as client,
            contextlib.suppress(OSError),  # it may hang up on what is too long at any moment
        ):
            client.sendall(garbage)
            client.shutdown(socket.SHUT_WR)
            while client.recv(4096):
                continue
        assert request(port, "/")[0] == 200


@pytest.mark.slow
def test_a_slow_client_is_dropped() -> None:
    """It delays the next one by no more than its deadline."""
    with (
        opened(running, request_s=1.0) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(b"GET")
        assert request(port, "/")[0] == 200
        client.settimeout(60)
        assert client.recv(1) == b""


@pytest.mark.slow
def test_a_client_that_sends_byte_after_byte_is_dropped_as_well() -> None:
    """The deadline is for the whole request."""
    with (
        opened(running, request_s=1.0) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.settimeout(60)
        gone = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not gone.wait(0.1):
                    client.sendall(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert request(port, "/")[0] == 200
        finally:
            gone.set()
            thread.join()


def test_port_in_use() -> None:
    """The message names variable and port."""
    in_use = r"TORCHELASTIC_HEALTH_CHECK_PORT=\d+: the port is in use"
    with opened(running) as port, pytest.raises(UsageError, match=in_use):
        HealthCheck(port, running).start()


@pytest.mark.parametrize("port", [70_000, -1])
def test_impossible_port(port: int) -> None:
    """Not an OverflowError."""
    with pytest.raises(UsageError, match=f"={port}: a port is a number from 0 to 65535"):
        HealthCheck(port, running).start()


def test_close_without_start_and_twice() -> None:
    """Ending needs no care."""
    check = HealthCheck(0, running)
    check.close()
    check = HealthCheck(0, running)
    port = check.start()
    check.close()
    check.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_the_port_is_free_again_at_once() -> None:
    """A restarted agent gets the same one."""
    with opened(running) as port:
        assert request(port, "/")[0] == 200
    check = HealthCheck(port, running)
    assert check.start() == port
    check.close()


def test_an_agent_without_this_port_does_not_pay_for_http() -> None:
    """6 MB and 15 ms."""
    code = "import sys, elaunch.agent.main; print('http.server' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
