"""One request to the health check's port; elaunch.agent.status.health says what is answered."""

from __future__ import annotations

import io
import json
import logging
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

MAX_REQUEST = 16 << 10

_log = logging.getLogger(__name__)


class HealthRequest(BaseHTTPRequestHandler):
    """One request, read and answered by the constructor, as is http.server's way.

    Args:
        connection: an accepted one; the caller closes it.
        peer: the client's address.
        alive: returns the state, or raises TimeoutError.
        request_s: seconds in which the whole request must have come.

    Raises:
        OSError: the client is gone, or too slow.
        ValueError: the client sent no HTTP.
    """

    server_version = "elaunch"
    sys_version = ""

    def __init__(
        self,
        connection: socket.socket,
        peer: Any,
        alive: Callable[[], dict[str, Any]],
        request_s: float,
    ) -> None:
        self._alive = alive
        self._request_s = request_s
        super().__init__(connection, peer, None)  # type: ignore[arg-type]  # no method uses it

    def setup(self) -> None:
        """Read the request before it is parsed, with one deadline for all of it."""
        super().setup()
        self.rfile = io.BytesIO(_head(self.connection, self._request_s))

    def do_GET(self) -> None:
        """Answer with the state."""
        if self.path.partition("?")[0] not in ("/", "/health"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            status, answer = HTTPStatus.OK, self._alive()
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
