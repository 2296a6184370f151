"""What was observed of a round's workers, tick by tick: the history that hangs are judged by. Pure.

A *look* is what one source of progress (elaunch.agent.hangs.progress) shows of every living worker
at one moment; :func:`advance` adds it to the history. Time counts as it was observed: between two
looks at most a few ticks pass, however long the agent was frozen, and none while the workers are
held.

``auto`` is FACTOR times the longest pause that was ever seen in this run outside of sections, and
not less than LEAST. Until each worker has made LEARNED pauses it is no limit at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

Source = Literal["script", "log lines"]

LEARNED: Final = 10
FACTOR: Final = 5.0
LEAST: Final = 30.0


@dataclass(frozen=True)
class Mark:
    """What a source shows of one worker; its progress is that ``value`` changes.

    ``begun`` says that there was progress before this one was seen. ``until`` is the deadline of
    its section, ``said_at`` when it last reported anything; both on the monotonic clock.
    """

    value: Hashable
    begun: bool = False
    step: int | None = None
    section: str = ""
    until: float | None = None
    doing: str = ""
    said_at: float | None = None


@dataclass(frozen=True)
class Look:
    """All living workers at one moment; ``marks`` by rank, None: nothing is seen of it.

    ``expected`` says that the source is known to show this script's progress: then a round in which
    it shows none hangs at its start.
    """

    at: float
    source: Source
    marks: Mapping[int, Mark | None]
    held: bool = False
    expected: bool = True


@dataclass(frozen=True)
class Watched:
    """One worker as it was watched; seconds as observed."""

    mark: Mark
    begun: bool
    idle: float = 0.0
    inside: float = 0.0
    allowed: float | None = None


@dataclass(frozen=True)
class Rhythm:
    """The pauses of a run by one source: how many of each rank, and the longest, in seconds."""

    pauses: Mapping[int, int] = field(default_factory=dict)
    longest: float = 0.0

    def heard(self, rank: int, pause: float) -> Rhythm:
        """Return it with one more pause."""
        pauses = {**self.pauses, rank: self.pauses.get(rank, 0) + 1}
        return Rhythm(pauses, max(self.longest, pause))


@dataclass(frozen=True)
class RoundHistory:
    """What was observed of a round; ``rhythms`` of all rounds. ``waited``: without any progress.

    ``everyone`` are the living ranks, ``ranks`` those of which the source shows anything.
    """

    source: Source = "script"
    at: float | None = None
    waited: float = 0.0
    expected: bool = True
    everyone: tuple[int, ...] = ()
    ranks: Mapping[int, Watched] = field(default_factory=dict)
    rhythms: Mapping[Source, Rhythm] = field(default_factory=dict)

    def next_round(self) -> RoundHistory:
        """Return what is kept when a new round begins."""
        return RoundHistory(rhythms=self.rhythms)

    @property
    def begun(self) -> bool:
        """Whether any worker has made progress."""
        return any(watched.begun for watched in self.ranks.values())


def advance(history: RoundHistory, look: Look, longest_tick: float) -> RoundHistory:
    """Return the history with one more look.

    Args:
        history: of the round so far.
        look: what is seen now.
        longest_tick: seconds; whatever more has passed was not observed, and does not count.
    """
    if history.source != look.source:
        history = RoundHistory(look.source, history.at, rhythms=history.rhythms)
    since = look.at if history.at is None else history.at
    passed = 0.0 if look.held else min(max(0.0, look.at - since), longest_tick)
    marks = {rank: mark for rank, mark in look.marks.items() if mark is not None}
    inside = {rank for rank, mark in marks.items() if mark.section}
    rhythm = history.rhythms.get(look.source, Rhythm())
    ranks = {}
    for rank, mark in marks.items():
        before = history.ranks.get(rank)
        excused = not mark.section and bool(inside - {rank})
        ranks[rank] = _watched(before, mark, look.at, passed, excused)
        if before is not None and _paused(before, mark):
            rhythm = rhythm.heard(rank, before.idle + (0.0 if excused else passed))
    made = replace(
        history,
        at=look.at,
        expected=look.expected,
        everyone=tuple(sorted(look.marks)),
        ranks=ranks,
        rhythms={**history.rhythms, look.source: rhythm},
    )
    return made if made.begun else replace(made, waited=history.waited + passed)


def _watched(
    before: Watched | None, mark: Mark, now: float, passed: float, excused: bool
) -> Watched:
    allowed = None if mark.until is None else max(0.0, mark.until - now)
    if before is None:
        return Watched(mark, mark.begun, allowed=allowed)
    moved = mark.value != before.mark.value
    inside = 0.0
    if allowed is not None and mark.until == before.mark.until:
        allowed, inside = before.allowed, before.inside + passed
    idle = 0.0 if moved else before.idle + (0.0 if excused else passed)
    return Watched(mark, before.begun or moved, idle, inside, allowed)


def _paused(before: Watched, mark: Mark) -> bool:
    """Whether ``mark`` ends a pause that shows how long the script's own pauses are."""
    outside = not before.mark.section and not mark.section
    return outside and before.begun and mark.value != before.mark.value


def limit(history: RoundHistory, asked: float | Literal["auto"]) -> float | None:
    """Return the seconds that ``--hang-timeout`` comes to at present; None: not learned yet."""
    if asked != "auto":
        return asked
    rhythm = history.rhythms.get(history.source, Rhythm())
    if min((rhythm.pauses.get(rank, 0) for rank in history.ranks), default=0) < LEARNED:
        return None
    return max(LEAST, FACTOR * rhythm.longest)
