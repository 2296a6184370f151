"""The key that agents started by srun share, where no --rdzv-secret-file gives one: ``MungeKey``.

It is settled each time that the store was opened, before anything is read or written there:

=================  ===============================================================================
agent              key
=================  ===============================================================================
hosts a TCPStore   makes it; its credential (elaunch.rendezvous.munge) is in the store before
                   anybody else can be. Without MUNGE the store is open, and the agent says so
client of it       that of the credential in the store. Where there is none and MUNGE works here,
                   the agent ends: else any process that removes the key could give it any plan
of etcd            that of the credential in etcd; the first agent writes it. It stays as long as
                   the plan, which is signed with it
=================  ===============================================================================

A host that was started anew makes a new key, and its clients take it when they open the new store.
A key of this job that an agent cannot read ends the agent with the reason.
"""

from __future__ import annotations

import logging
import os

from elaunch.errors import StoreDenied
from elaunch.rendezvous import munge
from elaunch.rendezvous.munge import MungeError
from elaunch.store.protocol import Store

REMEDY = "give --rdzv-secret-file FILE, the same on all nodes"

log = logging.getLogger("elaunch")


class MungeKey:
    """Owns what one agent knows of its job's key; ``secret`` is None as long as there is none."""

    def __init__(self, run_id: str) -> None:
        self.secret: bytes | None = None
        self.credential = b""
        """What holds ``secret``, for others; empty without one."""
        self._run_id = run_id
        self._told = False

    def host(self) -> str:
        """Make a key for the clients of this agent; return why there is none, "" otherwise."""
        try:
            self._make()
        except MungeError as error:
            return str(error)
        return ""

    def read(self, store: Store) -> None:
        """Take the key that the host of a TCPStore has made.

        Raises:
            StoreDenied: it is not to be read or trusted; or there is none, and MUNGE works here.
        """
        if found := store.shared():
            self._take(found, store.place)
            return
        if self.secret is None:
            try:
                self._new()
            except MungeError as error:
                log.debug("%s has no key, and MUNGE does not work here: %s", store.place, error)
                return
        raise StoreDenied(
            f"the agent that hosts {store.place} shares no key by MUNGE, which works on this "
            f"node: have srun start that agent too, where munged runs, or {REMEDY}"
        )

    def agree(self, store: Store) -> None:
        """Take the key that is in etcd, or put one there.

        Raises:
            StoreDenied: it is not to be read or trusted.
        """
        try:
            self._make()
        except MungeError as error:
            if found := store.shared():
                self._take(found, store.place)
            elif munge.is_there() and not self._told:
                self._told = True
                log.warning("this job's agents share no key by MUNGE: %s; %s", error, REMEDY)
            return
        self._take(store.shared(self.credential), store.place)

    def _make(self) -> None:
        """Make a key, unless there is one; raises MungeError."""
        if self.secret is None:
            self.secret, self.credential = self._new()

    def _new(self) -> tuple[bytes, bytes]:
        """Return a new key and its credential; raises MungeError where MUNGE does not work here."""
        key = os.urandom(munge.KEY_BYTES)
        credential = munge.make(key, self._run_id)
        munge.read(credential, self._run_id)  # fails where a user namespace maps the uid
        return key, credential

    def _take(self, credential: bytes, place: str) -> None:
        if credential == self.credential:
            return
        try:
            self.secret = munge.read(credential, self._run_id)
        except MungeError as error:
            raise StoreDenied(
                f"the key that this job's agents share by MUNGE, in {place}, is refused: {error}; "
                f"or {REMEDY}"
            ) from None
        self.credential = credential
