"""The watchdog's thread: it looks at the workers at fixed times, and posts a hang.

It waits for a fraction of the limit between two looks, so that a hang is posted at most a twentieth
late; what is a hang is decided purely (elaunch.agent.hangs.judge).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

from msgspec.structs import asdict

from elaunch.agent.hangs.judge import (
    LEAST,
    LENIENT,
    UNLEARNED_S,
    HangVerdict,
    Look,
    RoundHistory,
    Source,
    advance,
    judge,
    last_words,
    limit,
)
from elaunch.agent.policy import events

SHARE: Final = 20
SHORTEST_S: Final = 0.1
LONGEST_S: Final = 5.0
AUTO_S: Final = 1.0
LATE_TICKS: Final = 3
"""Of a longer time between two looks no more than so many ticks count: nobody was looking."""
YIELD_TICKS: Final = 3
BLIND_S: Final = 60.0
"""Seconds until it is said that nothing is watched, where the workers show no collectives."""
JOIN_S: Final = 2.0
FIXES: Final[Mapping[Source, str]] = {
    "script": "call ctx.heartbeat() of elaunch.init() in each step, or have the script print its "
    "steps and give --progress-regex",
    "log lines": "no line here matches --progress-regex: have each node's ranks print their steps, "
    "or call ctx.heartbeat() of elaunch.init() in each",
}
"""The ways to have a script's progress seen."""
_BLIND: Final = "the collectives of workers that are no forks of elaunch's are not seen, so "

log = logging.getLogger("elaunch")


class Watchdog:
    """Watches one round after the other, from :meth:`start` to :meth:`close`.

    Args:
        asked: ``--hang-timeout``.
        look: returns how the workers are now; None while there is none.
        post: takes the hang, once in a round.
        several: whether other nodes take part. A hang in which nobody is named is posted
            YIELD_TICKS later then: the node of the rank that all wait for can name it.
        waits: returns how the workers are by their collectives, which is asked while ``auto`` has
            not learned a limit; None while those are not known.
        explain: returns a verdict with what more is known of the culprit, or None if it is no hang
            by that; it may take a while.
        blind: returns whether the workers' collectives cannot be seen, whatever the script does.
    """

    def __init__(
        self,
        asked: float | Literal["auto"],
        look: Callable[[], Look | None],
        post: Callable[[events.HangSeen], None],
        several: bool = False,
        waits: Callable[[], Look | None] = lambda: None,
        explain: Callable[[HangVerdict], HangVerdict | None] = lambda found: found,
        blind: Callable[[], bool] = lambda: False,
    ) -> None:
        self._blind = blind
        self._asked: float | Literal["auto"] = asked
        self._look = look
        self._post = post
        self._waits = waits
        self._explain = explain
        self._lock = threading.Lock()
        self._history = RoundHistory()
        self._unlearned = RoundHistory()
        self._round = -1
        self._told = False
        self._shown = False
        self._several = several
        self._yielded = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.tick = AUTO_S if asked == "auto" else min(max(asked / SHARE, SHORTEST_S), LONGEST_S)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def begin(self, round_number: int) -> None:
        """Forget the round before, but for how long its pauses were."""
        with self._lock:
            self._history, self._unlearned = self._history.next_round(), RoundHistory()
            self._round, self._told, self._yielded = round_number, False, 0

    def limit(self) -> tuple[float | None, bool]:
        """Return what ``--hang-timeout`` comes to, in seconds, and whether that is being learned.

        None: not known yet.
        """
        with self._lock:
            seconds = limit(self._history, self._asked)
        return seconds, self._asked == "auto" and seconds is None

    def _run(self) -> None:
        try:
            while not self._closing.wait(self.tick):
                self._watch()
        except Exception:
            log.exception("hangs are not detected any more (--hang-timeout)")

    def _watch(self) -> None:
        with self._lock:
            round_number = self._round
        seen = self._look()
        if seen is None:
            return
        with self._lock:
            if round_number != self._round or self._told:
                return
            self._history = advance(self._history, seen, LATE_TICKS * self.tick)
            seconds = limit(self._history, self._asked)
            found = judge(self._history, seconds)
        if found is None and seconds is None:
            waits = seen if seen.source == "collectives" else self._waits()
            found = None if waits is None else self._judge_unlearned(waits, round_number)
        found = self._ripe(None if found is None else self._explained(found, seen))
        if found is not None:
            with self._lock:
                if round_number != self._round:
                    return
                self._told = True
            now, last = time.monotonic(), self.last_words()
            self._post(events.HangSeen(**asdict(found), round=round_number, at=now, last=last))
        self._note_silence()

    def _judge_unlearned(self, seen: Look, round_number: int) -> HangVerdict | None:
        """Judge by the collectives: whatever a script's rhythm is, nobody waits there for long."""
        with self._lock:
            if round_number != self._round:
                return None
            self._unlearned = advance(self._unlearned, seen, LATE_TICKS * self.tick)
            return judge(self._unlearned, UNLEARNED_S, start=1.0)

    def _note_silence(self) -> None:
        """Log once in a run that nothing is watched, since the script shows no progress."""
        blind = self._blind()
        least = LEAST if self._asked == "auto" else self._asked
        with self._lock:
            patience = min(least, BLIND_S) if blind else LENIENT * least
            waited, source = self._history.waited, self._history.source
            self._shown = self._shown or self._history.begun
            if self._shown or self._history.expected or waited <= patience:
                return
            self._shown = True
        log.warning(
            "--hang-timeout %s watches nothing so far: in the first %.0f s of the round no worker "
            "of this node has shown any progress; %s%s (docs/hangs.md)",
            self._asked if self._asked == "auto" else f"{self._asked:g}",
            waited,
            _BLIND if blind and source == "script" else "",
            FIXES.get(source, FIXES["script"]),
        )

    def _explained(self, found: HangVerdict, seen: Look) -> HangVerdict | None:
        try:
            return self._explain(found)
        except Exception:
            log.exception("which rank the others wait for cannot be found out")
        waits = any(mark is not None and mark.waits for mark in seen.marks.values())
        return found if waits or found.source != "collectives" else None

    def _ripe(self, found: HangVerdict | None) -> HangVerdict | None:
        """Return the verdict if it is to be posted now."""
        if found is None or found.named or not self._several:
            self._yielded = 0
            return found
        self._yielded += 1
        return found if self._yielded > YIELD_TICKS else None

    def last_words(self) -> tuple[str, ...]:
        """Return lines about what each rank reported last, if the script reports anything."""
        with self._lock:
            return last_words(self._history)
