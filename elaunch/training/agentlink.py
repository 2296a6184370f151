"""The worker's end of the link to its agent (protocol: elaunch.wire.worker).

A script never fails for the sake of its agent: where none answers, where it refuses, or when it is
gone, that is logged once and the script goes on without. A link that broke is not opened again: an
agent that is gone takes its workers with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from elaunch.training.place.placement import Placement
from elaunch.wire import worker
from elaunch.wire.control import short_address
from elaunch.wire.progress import ProgressPage

SEND_TIMEOUT_S: Final = 2.0
JOIN_S: Final = 2.0
LONGEST_LINE: Final = 64 * 1024

log = logging.getLogger("elaunch")


class AgentLink:
    """A connection to this node's agent, from :meth:`start` to :meth:`close`; ``name``: the run's.

    ``on_notice``, to be set before start, is called with (reason, kind, grace) in the link's thread
    when the agent asks for the job's end; it must return at once. All methods may be called from
    any thread and raise nothing; they block only if the agent is frozen, and then for a few
    seconds.
    """

    def __init__(
        self, socket_path: Path, page: ProgressPage, placement: Placement, name: str | None = None
    ) -> None:
        self.on_notice: Callable[[str, worker.Kind, float | None], None] | None = None
        self._path = socket_path
        self._page = page
        self._said: dict[str, object] = {
            "round": placement.round,
            "local_rank": placement.local_rank,
        }
        if name is not None:
            self._said["name"] = name
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="elaunch-agent", daemon=True)

    def start(self) -> None:
        """Connect, send the progress page, and listen in a thread of its own."""
        self._pid = os.getpid()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _limit_sends(connection)
            with short_address(self._path) as address:
                connection.connect(address)
            line = _line({"op": "attach", **self._said, "pid": self._pid})
            socket.send_fds(connection, [line], [self._page.fd])
        except OSError as error:
            connection.close()
            self._give_up(f"cannot be reached at {self._path} ({error.strerror or error})")
            return
        self._socket = connection
        self._thread.start()

    def listens(self) -> None:
        """Report to the agent that the script asks should_preempt()."""
        self._send({"op": "listens"})

    def heard(self, reason: str, kind: worker.Kind) -> None:
        """Report to the agent a notice that did not come from it."""
        self._send({"op": "heard", "reason": reason, "kind": kind})

    def ack(self, reason: str, kind: worker.Kind) -> None:
        """Report to the agent that the script ends for ``reason``: exit code 0 is "preempted" now.

        The agent reads the message even if this process ends at once.
        """
        self._send({"op": "ack", "reason": reason, "kind": kind})

    def close(self) -> None:
        """Detach and end the thread; in a forked process it does nothing."""
        if self._socket is None or os.getpid() != self._pid:
            return
        self._send({"op": "detach"})
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _send(self, fields: dict[str, object]) -> None:
        connection = self._socket
        if connection is None or self._ended or os.getpid() != self._pid:
            return
        try:
            with self._lock:
                connection.sendall(_line(fields))
        except OSError as error:
            # BlockingIOError is what SO_SNDTIMEO ends with. A line may be half sent: no more.
            frozen = isinstance(error, BlockingIOError)
            self._give_up("does not read any more" if frozen else f"has gone ({error.strerror})")
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        connection = self._socket
        if connection is None:
            return
        received = b""
        try:
            while chunk := connection.recv(4096):
                *lines, received = (received + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(received) > LONGEST_LINE:
                    break
            self._give_up("has closed the connection")
        except OSError as error:
            self._give_up(f"has gone ({error.strerror})")
        finally:
            with self._lock:
                connection.close()

    def _take(self, line: bytes) -> None:
        try:
            said: Any = json.loads(line)
        except (ValueError, RecursionError):
            log.debug("the agent sent something else than JSON: %r", line[:100])
            return
        if not isinstance(said, dict):
            return
        if "error" in said:
            self._give_up(f"refuses this worker: {said['error']}")
        elif said.get("op") == "preempt" and self.on_notice is not None:
            reason, kind, grace = said.get("reason", ""), said.get("kind"), said.get("grace")
            seconds = float(grace) if isinstance(grace, int | float) else None
            self.on_notice(str(reason), kind if kind in worker.KINDS else "stop", seconds)

    def _give_up(self, why: str) -> None:
        if self._ended:
            return
        self._ended = True
        log.warning("this node's agent %s; the script goes on without it", why)


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _limit_sends(connection: socket.socket) -> None:
    # Not settimeout: the thread that reads waits for as long as it takes. It bounds connect too.
    seconds, fraction = divmod(SEND_TIMEOUT_S, 1.0)
    limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
