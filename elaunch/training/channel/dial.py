"""How one rank reaches the listener of another."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Final

from elaunch.store.tcp import connection
from elaunch.training.channel.listener import peer_uid
from elaunch.training.channel.members import RankRecord
from elaunch.wire.handshake import Caller, Unauthenticated, call_up

PAUSE_S: Final = 0.05
"""Seconds before the next attempt where the other side was too busy to accept."""


class Unreached(Exception):
    """A rank could not be reached; ``ended``: nobody listens there any more."""

    def __init__(self, text: str, ended: bool) -> None:
        super().__init__(text)
        self.ended = ended


class Dialer:
    """What a rank needs to dial others: its record, and the key of the context."""

    def __init__(self, me: RankRecord, key: bytes) -> None:
        self.me = me
        self._key = key

    def dial(self, member: RankRecord, purpose: bytes, until: float) -> socket.socket:
        """Return a connection to ``member`` after the handshake; raises Unreached.

        Blocks until ``until`` (monotonic clock) at the longest.
        """
        while True:
            try:
                return self._dial_once(member, purpose, until)
            except ConnectionRefusedError:
                raise Unreached(f"{member} has ended, or has closed its context", True) from None
            except Unauthenticated as error:
                raise Unreached(f"{member} has ended: {error}", True) from None
            except (ConnectionResetError, BrokenPipeError, BlockingIOError) as error:
                why = error.strerror or str(error)
            except OSError as error:
                why = error.strerror or str(error) or "no answer"
                raise Unreached(
                    f"{member} does not answer at {self.where(member)}: {why}", False
                ) from None
            if time.monotonic() + PAUSE_S >= until:
                raise Unreached(f"{member} does not take us at {self.where(member)}: {why}", False)
            threading.Event().wait(PAUSE_S)

    def where(self, member: RankRecord) -> str:
        """Return where ``member`` is reached, for people."""
        if member.machine == self.me.machine:
            return "its Unix socket"
        return (
            f"[{member.addr}]:{member.port}"
            if ":" in member.addr
            else f"{member.addr}:{member.port}"
        )

    def _dial_once(self, member: RankRecord, purpose: bytes, until: float) -> socket.socket:
        if member.machine == self.me.machine:
            sock = _connect_unix(member.unix, until)
        else:
            sock = _connect_tcp(member.addr, member.port, until)
        try:
            call_up(sock, self._key, member.rank, Caller(purpose, self.me.rank), until)
        except OSError:
            sock.close()
            raise
        return sock


def _connect_unix(name: str, until: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, until - time.monotonic()))
        sock.connect(f"\0{name}")
        if peer_uid(sock) not in (0, os.getuid()):
            raise Unauthenticated("another user's process listens there")
    except OSError:
        sock.close()
        raise
    return sock


def _connect_tcp(addr: str, port: int, until: float) -> socket.socket:
    why = OSError(f"{addr} has no address")
    addresses = connection.resolve(addr, port, until)
    for place, (family, address) in enumerate(addresses):
        now = time.monotonic()
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, (until - now) / (len(addresses) - place)))
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            why = error
    raise why
