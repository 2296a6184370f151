"""Asking an agent: the client's half of the agent's Unix socket.

A client sends one line of JSON and reads one line of JSON; then the agent closes the connection.

=====================  =====================================================================
request                answer
=====================  =====================================================================
``{"op": "status"}``   the run's record (``elaunch.run.record``)
``{"op": "preempt",``  ``{"done": "what is done about it"}``; the job is asked to save and to end
``"reason": …}``
``{"op": "attach",``   a worker stays connected (``elaunch.wire.worker``)
``…}``
``{"op": "checkpoint"  a worker stays connected for its checkpoints (``elaunch.wire.saver``)
``, …}``
anything else          ``{"error": "what is wrong with it"}``
=====================  =====================================================================

The address of a Unix socket holds at most 107 bytes. A longer path is reached through a descriptor
of its directory, by ``/proc/self/fd``.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

MAX_ADDRESS: Final = 107
MAX_ANSWER: Final = 64 << 20
_CHUNK: Final = 1 << 16


def ask(path: Path, request: Mapping[str, object], timeout: float = 2.0) -> dict[str, Any]:
    """Send ``request`` to the agent that listens at ``path`` and return its answer.

    ``timeout`` bounds the whole exchange, in seconds. Raises FileNotFoundError or
    ConnectionRefusedError when no agent listens there, TimeoutError when it does not answer, and
    ConnectionError when it refuses the request or closes the connection.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _connect(connection, path, timeout)
        connection.settimeout(_left(deadline, path))
        connection.sendall(json.dumps(request).encode() + b"\n")
        line = _read_line(connection, deadline, path)
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ConnectionError(f"the agent at {path} answered something else than JSON") from exc
    if not isinstance(answer, dict) or "error" in answer:
        raise ConnectionError(f"the agent at {path} refused: {answer!r}")
    return answer


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Give an address of the socket ``path`` that is short enough while the block runs."""
    if len(os.fsencode(path)) <= MAX_ADDRESS:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _connect(connection: socket.socket, path: Path, timeout: float) -> None:
    # With a full backlog a non-blocking connect fails at once; the send timeout waits.
    seconds, fraction = divmod(timeout, 1.0)
    limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        with short_address(path) as address:
            connection.connect(address)
    except BlockingIOError:
        raise TimeoutError(f"the agent at {path} does not answer") from None


def _read_line(connection: socket.socket, deadline: float, path: Path) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(_left(deadline, path))
        try:
            chunk = connection.recv(_CHUNK)
        except TimeoutError:
            raise TimeoutError(f"the agent at {path} does not answer") from None
        if not chunk or len(line) > MAX_ANSWER:
            raise ConnectionError(f"the agent at {path} hung up without an answer")
        line += chunk
    return bytes(line)


def _left(deadline: float, path: Path) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the agent at {path} does not answer")
    return left
