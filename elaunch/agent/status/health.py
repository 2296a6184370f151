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
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from elaunch.errors import UsageError

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
REQUEST_S = 2.0

_log = logging.getLogger(__name__)


class HealthCheck:
    """The port and its thread, between :meth:`start` and :meth:`close`.

    Args:
        port: 0 for any free one.
        alive: asks the loop for its state and returns a small JSON-able dict; raises TimeoutError
            if the loop does not answer, within two seconds or so. Called in the thread.
        request_s: how long a client may take to send its request.
    """

    def __init__(
        self, port: int, alive: Callable[[], dict[str, Any]], request_s: float = REQUEST_S
    ) -> None:
        self._port = port
        self._request_s = request_s
        self._alive = alive
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self) -> int:
        """Open the port and return its number.

        Raises:
            UsageError: the port is in use, or this user may not open it.
        """
        listener = _listen(self._port)
        self._listener = listener
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="health-check", daemon=True
        )
        self._thread.start()
        return int(listener.getsockname()[1])

    def close(self, timeout: float = REQUEST_S) -> None:
        """Close the port; wait at most ``timeout`` seconds for a request that is being answered."""
        self._closed.set()
        if self._listener is None or self._thread is None:
            return
        try:
            # Wakes the thread from accept(), which close() alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("health check: %s", error)
        self._thread.join(timeout)
        self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = listener.accept()
            except OSError as error:
                # Too many open files, or a client that is gone already. The wait returns at once
                # when close() has caused the error, and keeps a lasting error from spinning.
                if not self._closed.wait(0.0 if error.errno == errno.ECONNABORTED else 1.0):
                    _log.debug("health check: %s", error)
                continue
            with connection:
                self._answer(connection, peer)

    def _answer(self, connection: socket.socket, peer: Any) -> None:
        # http.server takes 6 MB and 15 ms, which agents without this port do not pay.
        from elaunch.agent.status.healthrequest import HealthRequest

        try:
            HealthRequest(connection, peer, self._alive, self._request_s)
        except (OSError, ValueError) as error:  # ValueError: the client sent no HTTP
            _log.debug("health check: client %s: %s", peer, error)


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except (OSError, OverflowError) as error:
        raise UsageError(f"{VARIABLE}={port}: {_reason(error)}") from error


def _reason(error: OSError | OverflowError) -> str:
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    if number == errno.EADDRINUSE:
        return "the port is in use by another process; choose another or unset the variable"
    if number == errno.EACCES:
        return "this user may not open ports below 1024; choose a higher one"
    if isinstance(error, OverflowError):
        return "a port is a number from 0 to 65535"
    return f"the port cannot be opened: {os.strerror(number or 0)}"
