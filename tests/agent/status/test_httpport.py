"""The agent's HTTP ports over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elaunch.agent.status.httpport import MOST_WAITING, HttpPort
from elaunch.errors import UsageError
from tests.integration.jobs import SPAWN
from tests.integration.watching import act, wait_for_workers
from tests.launching import Launcher, free_port, wait_until


def running() -> dict[str, Any]:
    """Answer as a living loop."""
    return {"state": "RUNNING", "round": 2}


def silent() -> dict[str, Any]:
    """Answer as a stuck loop."""
    raise TimeoutError


@contextmanager
def opened(alive: Callable[[], dict[str, Any]], request_s: float = 60.0) -> Iterator[int]:
    """Open a port, any free one; nothing of it stays."""
    check = HttpPort(None, 0, alive, request_s=request_s)
    port = check.start()
    try:
        yield port
    finally:
        check.close()
    wait_until(lambda: "http-port" not in [thread.name for thread in threading.enumerate()])


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


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/health?verbose=1"])
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
        assert request(port, "/metrics")[0] == 404, (
            "who reaches all addresses learns the state only"
        )
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
        HttpPort(None, port, running).start()


def test_close_without_start_and_twice() -> None:
    """Ending needs no care."""
    check = HttpPort(None, 0, running)
    check.close()
    check = HttpPort(None, 0, running)
    port = check.start()
    check.close()
    check.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_the_port_is_free_again_at_once() -> None:
    """A restarted agent gets the same one."""
    with opened(running) as port:
        assert request(port, "/")[0] == 200
    check = HttpPort(None, port, running)
    assert check.start() == port
    check.close()


@pytest.mark.slow
def test_an_agent_without_this_port_does_not_pay_for_http() -> None:
    """6 MB and 15 ms."""
    code = "import sys, elaunch.agent.main; print('http.server' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_metrics() -> None:
    """The page, beside the state; what cannot be made hangs up, and the next is answered."""
    pages = iter(["elaunch_run_live 1\n"])
    port = HttpPort("127.0.0.1", 0, running, metrics=lambda: next(pages))
    number = port.start()
    try:
        assert request(number, "/metrics?x=1") == (200, b"elaunch_run_live 1\n")
        with pytest.raises(http.client.RemoteDisconnected):
            request(number, "/metrics")
        assert request(number, "/healthz")[0] == 200
    finally:
        port.close()


@pytest.mark.slow
def test_a_job_is_scraped(elaunch: Launcher) -> None:
    """How it stands, from its agent; another agent needs another port."""
    port = free_port()
    flags = ["--run-id", "scraped", "--max-restarts", "1", "--metrics-port", str(port)]
    job = elaunch.start(act(SPAWN, "say=up", "wait", flags=flags))
    pids = wait_for_workers(job)
    second = elaunch.run(act(SPAWN, "say=never", flags=["--metrics-port", str(port)]))
    assert (second.returncode, second.stdout) == (2, "")
    assert f"--metrics-port: '{port}' cannot be used: port {port} is in use by" in second.stderr
    os.kill(pids[1], signal.SIGKILL)
    wait_for_workers(job, round=1)

    def samples() -> list[str]:
        return request(port, "/metrics")[1].decode().splitlines()

    wait_until(lambda: 'elaunch_run_workers{run="scraped",state="RUNNING"} 2' in samples())
    found = samples()
    for name in ("round", "restarts", "failures"):
        assert f'elaunch_run_{name}{{run="scraped"}} 1' in found
    seconds = [line for line in found if line.startswith("elaunch_run_slot_seconds{")]
    spent = sum(float(line.rpartition(" ")[2]) for line in seconds)
    (lasted,) = (line for line in found if line.startswith("elaunch_run_duration_seconds{"))
    assert spent == pytest.approx(float(lasted.rpartition(" ")[2]), abs=0.2)
    assert json.loads(request(port, "/healthz")[1])["state"] == "RUNNING"
    job.send_signal(signal.SIGTERM)
    job.wait()


@pytest.mark.parametrize("sent", [b"", b"GET / HT"], ids=["silent", "half a request"])
def test_many_silent_clients_hold_up_no_probe(sent: bytes) -> None:
    """Each may take a minute; a probe is answered at once, and the oldest of too many ends."""
    with opened(running) as port, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(MOST_WAITING + 6)
        ]
        for client in clients:
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
        for _ in range(3):
            assert request(port, "/health")[0] == 200
        with contextlib.suppress(ConnectionError):
            assert clients[0].recv(1) == b""
        clients[-1].sendall((b"GET / HTTP/1.0\r\n\r\n")[len(sent) :])
        assert clients[-1].recv(12) == b"HTTP/1.0 200"
