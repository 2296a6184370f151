"""Retention after a save, by the save's own rule."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from elaunch.checkpoint.records import Committed
from elaunch.checkpoint.retention import delete
from elaunch.checkpoint.retention.rule import Keep
from elaunch.checkpoint.storage.storage import Storage
from elaunch.wire.saver import Handed

log = logging.getLogger("elaunch")


class Retiring:
    """Removes checkpoints of one storage, one at a time; ``rule`` is for saves that bring none."""

    def __init__(self, storage: Storage, rule: Keep) -> None:
        self._storage = storage
        self._rule = rule
        self._lock = threading.Lock()

    def after(self, handed: Handed, done: Committed) -> None:
        """Remove what may go now that ``done`` is there; what cannot be removed is logged.

        What the round resumed from was needed until there was a newer one.
        """
        rule = self._rule_of(handed)
        if rule:
            with self._lock:
                delete.apply(self._storage, rule, {done.name})

    def for_room(self, handed: Handed, protected: Collection[str]) -> bool:
        """Remove what may go once this one is committed, for want of room; whether any went."""
        needed = handed.size * (1 if handed.local else handed.part.world_size)
        staying = {*handed.protected, *protected}
        with self._lock:
            gone = delete.make_room(self._storage, self._rule_of(handed), needed, staying)
        if gone:
            log.warning("no room for %s: removed %s", handed.stage.final, ", ".join(gone))
        return bool(gone)

    def _rule_of(self, handed: Handed) -> Keep:
        return self._rule if handed.keep is None else Keep(**handed.keep)
