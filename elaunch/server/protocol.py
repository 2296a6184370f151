"""Messages between the agent and its server: JSON with a length before it, files beside it.

Both ends of one Unix stream socket pair use it; a message is a dict with ``op``:

==========  ==================  ==================================================================
from        op                  fields
==========  ==================  ==================================================================
agent       configure           run_id, start ("fork" | "exec"), preload, later, later_delay (s),
                                import_path, open_files (soft and hard limit of the workers),
                                timer_file (the pipe of elaunch.server.timers, or null), temp (the
                                run's own directory for temporary files, or null)
agent       start               round, local_rank, mode, entrypoint, args, interpreter, env;
                                files: its stdout and stderr
agent       store               round (-1: before the first), host, fixed (whether all rounds have
                                this port), hello (what other agents may read in it, or "");
                                file: the listening socket of the store
agent       signal              signum, group (also the workers' process groups), once (not where
                                its sender has signalled all processes), stops (whether the
                                workers are meant to end by it)
agent       sweep               round, signum (0: none), grace (s), deadline (s)
agent       fence               until: kill all workers when it has passed, unless a later comes;
                                hold (s): stop them then, and kill them that much later
agent       count_devices       kind, interpreter
server      ready               pid, problem (text or null), preload_s, unforkable (why it must not
                                be forked any more, or "")
server      warmed              problem (text or null), seconds, settings (variables that the script
                                sets, so that the later modules are left to the workers)
server      started             round, local_rank, pid, at
server      not_started         round, local_rank, problem
server      exited              round, local_rank, pid, exitcode (negative: signal), at, stopped
                                (whether it had a signal to end before), timer (its timer that
                                had expired, or "")
server      swept               round, killed (pids and names), survivors (same)
server      store_failed        round, problem
server      fenced              late (s): the fence has passed so long ago; all workers are killed
server      held                on (whether all workers have been stopped, or go on)
server      devices             count (int or null), problem
==========  ==================  ==================================================================

``at`` is ``time.monotonic()``, which all processes of one machine share. The socket is also the
lifeline: when the agent's end closes, the server kills everything below it and ends.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
MAX_FILES = 8


def send(sock: socket.socket, message: Message, files: Sequence[int] = ()) -> None:
    """Send one message with the open files ``files``; the caller still owns (closes) them."""
    payload = json.dumps(message).encode("utf-8", "surrogateescape")
    data = _LENGTH.pack(len(payload)) + payload
    sent = 0
    if files:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        sent = sock.sendmsg([data], rights)
    sock.sendall(data[sent:])


class Receiver:
    """Cuts the byte stream of one socket into messages; owns files until they are returned."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._files: list[int] = []

    def receive(self) -> tuple[Message, list[int]] | None:
        """Block for the next message and its files; None when the other end closed.

        Files travel with the first byte of their message, and one message at a time carries any,
        so all files at hand belong to the message that is completed next.
        """
        while True:
            message = self._next_message()
            if message is not None:
                files, self._files = self._files, []
                return message, files
            try:
                data, files, _, _ = socket.recv_fds(self._sock, self._wanted(), MAX_FILES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._buffer += data
            self._files += files

    def _wanted(self) -> int:
        # Never read past the current message: the next one's files must not come with it.
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        (length,) = _LENGTH.unpack_from(self._buffer)
        return int(length) + _LENGTH.size - len(self._buffer)

    def _next_message(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        message: Message = json.loads(payload.decode("utf-8", "surrogateescape"))
        return message
