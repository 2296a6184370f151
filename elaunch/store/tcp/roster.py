"""The members of a hosted store by name, and for each reader the changes that it has not seen."""

from __future__ import annotations

from typing import Literal

from elaunch.store.protocol import Change


class Roster:
    """Entries by name and the changes that readers have not seen; its owner holds a lock."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._gone: set[str] = set()
        self._unseen: dict[object, list[Change]] = {}

    def knows(self, name: str) -> bool:
        """Return whether ``name`` is or was on the roster."""
        return name in self.values or name in self._gone

    def put(self, name: str, value: bytes) -> None:
        """Write an entry."""
        self.values[name] = value
        self._tell(Change(name, value, "put"))

    def drop(self, name: str, cause: Literal["left", "expired"]) -> None:
        """Take an entry off for good."""
        del self.values[name]
        self._gone.add(name)
        self._tell(Change(name, None, cause))

    def read(self, reader: object) -> list[Change]:
        """Return what ``reader`` has not seen: at its first call, every entry that is there."""
        everything = [Change(name, value, "put") for name, value in self.values.items()]
        unseen = self._unseen.get(reader, everything)
        self._unseen[reader] = []
        return unseen

    def forget(self, reader: object) -> None:
        """Keep no more changes for ``reader``; its next call is a first one."""
        self._unseen.pop(reader, None)

    def _tell(self, change: Change) -> None:
        for unseen in self._unseen.values():
            unseen.append(change)
