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
request; meanwhile others are answered, and of more than MOST_WAITING clients the first are dropped.
Only the state needs the loop: metrics are read from the run's record.

http.server would take 6 MB and 15 ms for these four answers.
"""

from __future__ import annotations

import contextlib
import errno
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
from typing import Any

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
        self._alive = alive
        self._metrics = metrics
        self._request_s = request_s
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="http-port", daemon=True)

    def start(self) -> int:
        """Open the port and return its number.

        Raises:
            UsageError: the port is in use, or this user may not open it.
        """
        self._listener = _listen(self._host, self._port)
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def close(self, timeout: float = REQUEST_S) -> None:
        """Close the port; wait at most ``timeout`` seconds for a request that is being answered."""
        if self._listener is None:
            return
        self._closed.set()
        with contextlib.suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close() does not
        self._thread.join(timeout)
        self._listener.close()

    def _serve(self) -> None:
        """Answer in the order in which requests are complete; drop clients that are too slow."""
        assert self._listener is not None  # start() makes it
        waiting: dict[int, _Prober] = {}
        while not self._closed.is_set():
            for client in [*waiting.values()]:
                if client.until <= time.monotonic() or len(waiting) > MOST_WAITING:
                    waiting.pop(client.sock.fileno()).sock.close()
            poller = select.poll()
            for fd in (self._listener.fileno(), *waiting):
                poller.register(fd, select.POLLIN)
            left = min((client.until for client in waiting.values()), default=math.inf)
            soon = None if left == math.inf else max(0.0, left - time.monotonic()) * 1000 + 1
            for fd, _ in poller.poll(soon):
                if fd == self._listener.fileno():
                    waiting |= self._accepted(self._listener)
                elif waiting[fd].has_sent():
                    self._answer(waiting.pop(fd))
        for client in waiting.values():
            client.sock.close()

    def _accepted(self, listener: socket.socket) -> dict[int, _Prober]:
        """Return the next client; a lasting error (too many open files) does not spin."""
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if not self._closed.wait(0.0 if error.errno == errno.ECONNABORTED else 1.0):
                _log.debug("http port: %s", error)
            return {}
        sock.setblocking(False)
        return {sock.fileno(): _Prober(sock, time.monotonic() + self._request_s)}

    def _answer(self, client: _Prober) -> None:
        with client.sock as sock:
            try:
                sock.settimeout(self._request_s)
                sock.sendall(self._answered(client.head))
                sock.shutdown(socket.SHUT_WR)
            except Exception:  # probes come every few seconds, and may hang up at any moment
                _log.debug("http port: a request was not answered", exc_info=True)

    def _answered(self, head: bytes) -> bytes:
        """Return the answer to a request, of which a HEAD gets no body."""
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        address, _, version = rest.partition(" ")
        path, kind = address.partition("?")[0], "text/plain"
        status, body = HTTPStatus.OK, ""
        if not version.startswith("HTTP/1."):
            status = HTTPStatus.BAD_REQUEST
        elif method not in ("GET", "HEAD"):
            status = HTTPStatus.NOT_IMPLEMENTED
        elif path == "/metrics" and self._metrics is not None:
            kind, body = CONTENT_TYPE, self._metrics()
        elif path in ("/", "/health", "/healthz"):
            kind = "application/json"
            try:
                body = json.dumps(self._alive()) + "\n"
            except TimeoutError:
                status, body = HTTPStatus.SERVICE_UNAVAILABLE, '{"state": "NOT_ANSWERING"}\n'
        else:
            status = HTTPStatus.NOT_FOUND
        sent = (body or f"{status.phrase}\n").encode()
        top = f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        top += f"Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
        return top.encode() + (b"" if method == "HEAD" else sent)


@dataclass
class _Prober:
    """A connection whose request is not complete."""

    sock: socket.socket
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


def _listen(host: str | None, port: int) -> socket.socket:
    try:
        if host is not None:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server((str(address[0]), port), family=family)
        return listen_everywhere(port)
    except OSError as error:
        name = f"{VARIABLE}={port}" if host is None else f"--metrics-port {host_port(host, port)}"
        why, code = f"the port cannot be opened: {error.strerror}", ""
        if error.errno == errno.EADDRINUSE:
            why = "the port is in use by another process; choose another, or none"
            code = "E-PORT-IN-USE"
        elif error.errno == errno.EACCES:
            why = "this user may not open ports below 1024; choose a higher one"
        raise UsageError(f"{name}: {why}", code=code) from error
