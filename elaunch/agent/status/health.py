"""The health check: an HTTP port that answers 200 as long as the agent's loop answers.

``TORCHELASTIC_HEALTH_CHECK_PORT`` opens it (torchrun reads the variable too but opens nothing).

=========================  ======  ===============================================================
request                    status  body
=========================  ======  ===============================================================
GET or HEAD / or /health   200     the loop's answer as JSON, such as ``{"state": "RUNNING"}``
GET or HEAD / or /health   503     the loop did not answer in time: ``{"state": "NOT_ANSWERING"}``
another path               404
another method             501
=========================  ======  ===============================================================

It listens on all addresses, since Kubernetes' probes come from the node, not from inside the pod.
A client of the port learns the state and nothing more; nothing can be changed through it.

One thread takes one request after another. A client has two seconds to send its request, so a
silent or slow one delays a probe but does not block it.

http.server takes 6 MB and 15 ms: an agent without this port does not import this module.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from elaunch.errors import UsageError

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
REQUEST_S = 2.0
MAX_REQUEST = 16 << 10

_log = logging.getLogger(__name__)

Alive = Callable[[], dict[str, Any]]


class HealthCheck:
    """The port and its thread, between :meth:`start` and :meth:`close`.

    Args:
        port: 0 for any free one.
        alive: asks the loop for its state and returns a small JSON-able dict; raises TimeoutError
            if the loop does not answer, within two seconds or so. Called in the thread.
        request_s: how long a client may take to send its request.
    """

    def __init__(self, port: int, alive: Alive, request_s: float = REQUEST_S) -> None:
        self._port = port
        self._request_s = request_s
        self._alive = alive
        self._server: _Server | None = None
        self._thread = threading.Thread(target=self._serve, name="health-check", daemon=True)

    def start(self) -> int:
        """Open the port and return its number.

        Raises:
            UsageError: the port is in use, or this user may not open it.
        """
        self._server = _Server(_listen(self._port), self._alive, self._request_s)
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
            _log.debug("health check: %s", error)
        self._thread.join(timeout)
        self._server.server_close()

    def _serve(self) -> None:
        assert self._server is not None  # start() makes it
        while not self._server.closed.is_set():
            self._server.handle_request()


class _Server(HTTPServer):
    """Takes connections from ``listener``, one after the other."""

    def __init__(self, listener: socket.socket, alive: Alive, request_s: float) -> None:
        super().__init__(listener.getsockname()[:2], _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.alive, self.request_s = alive, request_s
        self.closed = threading.Event()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection; a lasting error (too many open files) does not spin."""
        try:
            return super().get_request()
        except OSError as error:
            if not self.closed.wait(0.0 if error.errno == errno.ECONNABORTED else 1.0):
                _log.debug("health check: %s", error)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: the client is gone, too slow, or sent no HTTP."""
        _log.debug("health check: client %s", client_address, exc_info=True)


class _Request(BaseHTTPRequestHandler):
    """One request, read and answered by the constructor, as is http.server's way."""

    server: _Server
    server_version = "elaunch"
    sys_version = ""

    def setup(self) -> None:
        """Read the request before it is parsed, with one deadline for all of it."""
        super().setup()
        self.rfile = io.BytesIO(_head(self.connection, self.server.request_s))

    def do_GET(self) -> None:
        """Answer with the state."""
        if self.path.partition("?")[0] not in ("/", "/health"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            status, answer = HTTPStatus.OK, self.server.alive()
        except TimeoutError:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, {"state": "NOT_ANSWERING"}
        body = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log at debug level: probes come every few seconds."""
        _log.debug("health check: " + format, *args)


def _head(connection: socket.socket, seconds: float) -> bytes:
    deadline = time.monotonic() + seconds
    head = b""
    while b"\r\n\r\n" not in head and len(head) < MAX_REQUEST:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(4096)
        if not received:
            break
        head += received
    connection.settimeout(seconds)
    return head


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except (OSError, OverflowError) as error:
        raise UsageError(f"{VARIABLE}={port}: {_reason(error)}", code="E-PORT-IN-USE") from error


def _reason(error: OSError | OverflowError) -> str:
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    if number == errno.EADDRINUSE:
        return "the port is in use by another process; choose another or unset the variable"
    if number == errno.EACCES:
        return "this user may not open ports below 1024; choose a higher one"
    if isinstance(error, OverflowError):
        return "a port is a number from 0 to 65535"
    return f"the port cannot be opened: {os.strerror(number or 0)}"
