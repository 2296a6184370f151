"""The agent's HTTP ports: whether its loop answers, and metrics for Prometheus.

=============================  ======  ===========================================================
request                        status  body
=============================  ======  ===========================================================
/, /health or /healthz         200     the loop's answer as JSON, such as ``{"state": "RUNNING"}``
/, /health or /healthz         503     the loop did not answer: ``{"state": "NOT_ANSWERING"}``
/metrics                       200     of ``--metrics-port`` only: elaunch.runs.prometheus
another path                   404
another method than GET, HEAD  501
=============================  ======  ===========================================================

``--metrics-port`` opens one on loopback or at the address that it has, and the variable
``TORCHELASTIC_HEALTH_CHECK_PORT`` (torchrun reads it too but opens nothing) one on all addresses,
since Kubernetes' probes come from the node, not from inside the pod: its clients learn the state
and nothing more. Nothing can be changed through either.

One thread for each port answers one request after another. A client has two seconds to send its
request; meanwhile others are answered, and of more than MOST_WAITING the first ones are dropped.
Only the state needs the
loop: metrics are read from the run's record beside it.

http.server takes 6 MB and 15 ms: an agent without these ports does not import this module.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

from elaunch.errors import UsageError
from elaunch.hosts import listen_everywhere
from elaunch.runs.prometheus import CONTENT_TYPE
from elaunch.text import host_port

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
REQUEST_S = 2.0
MAX_REQUEST = 16 << 10
MOST_WAITING = 64

_log = logging.getLogger(__name__)

Alive = Callable[[], dict[str, Any]]
Page = Callable[[], str]


class HttpPort:
    """A port and its thread, between :meth:`start` and :meth:`close`.

    Args:
        host: where it listens; None for all addresses.
        port: 0 for any free one.
        alive: asks the loop for its state and returns a small JSON-able dict; raises TimeoutError
            if the loop does not answer, within two seconds or so. Called in the thread.
        metrics: returns the page for Prometheus, in the thread; None: there is none.
        request_s: how long a client may take to send its request.
    """

    def __init__(
        self,
        host: str | None,
        port: int,
        alive: Alive,
        *,
        metrics: Page | None = None,
        request_s: float = REQUEST_S,
    ) -> None:
        self._host = host
        self._port = port
        self._answers = _Answers(alive, metrics, request_s)
        self._server: _Server | None = None
        self._thread = threading.Thread(target=self._serve, name="http-port", daemon=True)

    def start(self) -> int:
        """Open the port and return its number.

        Raises:
            UsageError: the port is in use, or this user may not open it.
        """
        self._server = _Server(_listen(self._host, self._port), self._answers)
        self._thread.start()
        return int(self._server.socket.getsockname()[1])

    def close(self, timeout: float = REQUEST_S) -> None:
        """Close the port; wait at most ``timeout`` seconds for a request that is being answered."""
        if self._server is None:
            return
        self._server.closed.set()
        try:
            # Wakes the thread from its wait, which close() alone does not.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("http port: %s", error)
        self._thread.join(timeout)
        self._server.server_close()

    def _serve(self) -> None:
        assert self._server is not None  # start() makes it
        self._server.serve()


class _Answers(NamedTuple):
    """The sources of a port's answers; see :class:`HttpPort`."""

    alive: Alive
    metrics: Page | None
    request_s: float


@dataclass
class _Prober:
    """A connection whose request is not complete."""

    sock: socket.socket
    address: Any
    until: float
    head: bytes = b""

    def has_sent(self) -> bool:
        """Read what there is; return whether there will be no more."""
        try:
            received = self.sock.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.head += received
        return not received or b"\r\n\r\n" in self.head or len(self.head) >= MAX_REQUEST


class _Server(HTTPServer):
    """Answers who connects to ``listener``, in the order in which their requests are complete."""

    def __init__(self, listener: socket.socket, answers: _Answers) -> None:
        super().__init__(listener.getsockname()[:2], _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.answers = answers
        self.closed = threading.Event()
        self.head = b""
        """The request of the client that is being answered."""

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection; a lasting error (too many open files) does not spin."""
        try:
            return super().get_request()
        except OSError as error:
            if not self.closed.wait(0.0 if error.errno == errno.ECONNABORTED else 1.0):
                _log.debug("http port: %s", error)
            raise

    def serve(self) -> None:
        """Answer whoever has sent a request, until the port is closed; drop the silent ones."""
        waiting: dict[int, _Prober] = {}
        while not self.closed.is_set():
            for client in [*waiting.values()]:
                if client.until <= time.monotonic() or len(waiting) > MOST_WAITING:
                    self.shutdown_request(waiting.pop(client.sock.fileno()).sock)
            poller = select.poll()
            for fd in (self.socket.fileno(), *waiting):
                poller.register(fd, select.POLLIN)
            left = min((client.until for client in waiting.values()), default=math.inf)
            soon = None if left == math.inf else max(0.0, left - time.monotonic()) * 1000 + 1
            for fd, _ in poller.poll(soon):
                if fd == self.socket.fileno():
                    accepted = self._accepted()
                    waiting |= {one.sock.fileno(): one for one in accepted}
                elif waiting[fd].has_sent():
                    self._answer(waiting.pop(fd))
        for client in waiting.values():
            self.shutdown_request(client.sock)

    def _accepted(self) -> list[_Prober]:
        try:
            sock, address = self.get_request()
        except OSError:
            return []
        sock.setblocking(False)
        return [_Prober(sock, address, time.monotonic() + self.answers.request_s)]

    def _answer(self, client: _Prober) -> None:
        self.head = client.head
        client.sock.settimeout(self.answers.request_s)
        try:
            self.process_request(client.sock, client.address)
        except Exception:
            self.handle_error(client.sock, client.address)
            self.shutdown_request(client.sock)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: the client is gone, too slow, or sent no HTTP."""
        _log.debug("http port: client %s", client_address, exc_info=True)


class _Request(BaseHTTPRequestHandler):
    """One request, read and answered by the constructor, as is http.server's way."""

    server: _Server
    server_version = "elaunch"
    sys_version = ""

    def setup(self) -> None:
        """Take the request that was read; what a client does not read of a page is cut off."""
        super().setup()
        self.rfile = io.BytesIO(self.server.head)

    def do_GET(self) -> None:
        """Answer with the state, or with the metrics."""
        path, answers = self.path.partition("?")[0], self.server.answers
        if path == "/metrics" and answers.metrics is not None:
            self._send(HTTPStatus.OK, CONTENT_TYPE, answers.metrics())
        elif path not in ("/", "/health", "/healthz"):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            try:
                status, answer = HTTPStatus.OK, answers.alive()
            except TimeoutError:
                status, answer = HTTPStatus.SERVICE_UNAVAILABLE, {"state": "NOT_ANSWERING"}
            self._send(status, "application/json", json.dumps(answer) + "\n")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log at debug level: probes come every few seconds."""
        _log.debug("http port: " + format, *args)


def _listen(host: str | None, port: int) -> socket.socket:
    try:
        if host is not None:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server((str(address[0]), port), family=family)
        return listen_everywhere(port)
    except (OSError, OverflowError) as error:
        name = f"{VARIABLE}={port}" if host is None else f"--metrics-port {host_port(host, port)}"
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        code = "E-PORT-IN-USE" if in_use else ""
        raise UsageError(f"{name}: {_reason(error)}", code=code) from error


def _reason(error: OSError | OverflowError) -> str:
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    if number == errno.EADDRINUSE:
        return "the port is in use by another process; choose another, or none"
    if number == errno.EACCES:
        return "this user may not open ports below 1024; choose a higher one"
    if isinstance(error, OverflowError):
        return "a port is a number from 0 to 65535"
    return f"the port cannot be opened: {error.strerror}"
