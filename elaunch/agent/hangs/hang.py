"""Whether a round hangs, who hangs, and for whom: from what was seen of its workers. Pure.

A *look* is what one source of progress (elaunch.agent.hangs.progress) shows of every living worker
at one moment; :func:`advance` adds it to the history, and :func:`judge` decides from that. Time
counts as it was observed: between two looks at most a few ticks pass, however long the agent was
frozen, and none while a debugger holds the workers.

==================================  ==============================================================
a worker                            may show no progress for
==================================  ==============================================================
outside of a section                the limit (``--hang-timeout``)
in a section with a timeout         until the section's deadline
in a section without one            LENIENT times the limit
before its first progress           LENIENT times the limit: imports, compilation, first batches;
                                    any time where this run has not shown progress before
while another is in a section       as long as that may last: it may be waiting for it
of which nothing was ever seen      as long as others make progress: it does not take part
==================================  ==============================================================

A rank is behind if others go on meanwhile. Where all stand still, it is the one with the lowest
step; else nobody is named.

``auto`` is FACTOR times the longest pause that was ever seen in this run outside of sections, and
not less than LEAST. Until each worker has made LEARNED pauses, only a rank is judged that others
wait for in a collective, after UNLEARNED_S, and from its start on.

:class:`HangWatch` goes through the looks of a run and has for each what it shows of a hang; what is
suspected is explained by the collectives of all nodes (:meth:`HangWatch.explain`).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from elaunch import text
from elaunch.agent.hangs import collectives
from elaunch.agent.hangs.collectives import OUTSIDE, UNKNOWN, Culprit, RankPlace

Source = Literal["script", "log lines", "collectives"]

LEARNED: Final = 10
FACTOR: Final = 5.0
LEAST: Final = 30.0
UNLEARNED_S: Final = 300.0
LENIENT: Final = 10.0
LATEST: Final = 1.5
"""So many times its limit late, a worker is judged also if it is not clear whether others go on."""
SHARE: Final = 20
SHORTEST_S: Final = 0.1
LONGEST_S: Final = 5.0
AUTO_S: Final = 1.0
LATE_TICKS: Final = 3
"""Of a longer time between two looks no more than so many ticks count: nobody was looking."""
YIELD_TICKS: Final = 3
"""So many looks later a hang is told in which nobody is named: another node may name the rank."""
AGAIN_S: Final = 10.0
"""Seconds until a hang is explained again, if the workers here wait for one of another node."""
SILENT_ASKS: Final = 3
"""So often the other nodes are asked again since nothing is known of some rank."""
BLIND_S: Final = 60.0
"""Seconds until it is said that nothing is watched, where the workers show no collectives."""
FIXES: Final[Mapping[Source, str]] = {
    "script": "call ctx.heartbeat() of elaunch.init() in each step, or have the script print its "
    "steps and give --progress-regex",
    "log lines": "no line here matches --progress-regex: have each node's ranks print their steps, "
    "or call ctx.heartbeat() of elaunch.init() in each",
}
"""The ways to have a script's progress seen."""
_BLIND: Final = "the collectives of workers that are no forks of elaunch's are not seen, so "
_MADE: Final = ("made no progress", "made progress")
_LEFT: Final = ("not left", "left")
"""A text for ranks that have not done it, and for the case that no rank has."""

log = logging.getLogger("elaunch")


class Mark(Struct, frozen=True):
    """One worker, as a source shows it; its progress is that ``value`` changes.

    ``begun`` says that there was progress before this one was seen. ``until`` is the deadline of
    its section, ``said_at`` when it last reported anything; both on the monotonic clock. ``waits``:
    it is in a collective. ``early``: its progress so far may be before the first step.
    """

    value: Hashable
    begun: bool = False
    step: int | None = None
    section: str = ""
    until: float | None = None
    doing: str = ""
    said_at: float | None = None
    waits: bool = False
    early: bool = False


class Look(Struct, frozen=True):
    """All living workers at one moment; ``marks`` by rank, None: nothing is seen of it.

    ``expected`` says that the source is known to show this script's progress: then a round in which
    it shows none hangs at its start.
    """

    at: float
    source: Source
    marks: Mapping[int, Mark | None]
    held: bool = False
    expected: bool = True


class Watched(Struct, frozen=True):
    """One worker as it was watched; seconds as observed."""

    mark: Mark
    begun: bool
    idle: float = 0.0
    inside: float = 0.0
    allowed: float | None = None

    @property
    def overdue(self) -> bool:
        """Whether it has been in its section for longer than the script has said."""
        return self.allowed is not None and self.inside > self.allowed


class Rhythm(Struct, frozen=True):
    """The pauses of a run by one source: how many of each rank, and the longest, in seconds."""

    pauses: Mapping[int, int] = {}
    longest: float = 0.0

    def heard(self, rank: int, pause: float) -> Rhythm:
        """Return it with one more pause."""
        pauses = {**self.pauses, rank: self.pauses.get(rank, 0) + 1}
        return Rhythm(pauses, max(self.longest, pause))


class RoundHistory(Struct, frozen=True):
    """The observations of a round; ``rhythms`` of all rounds. ``waited``: without any progress.

    ``everyone`` are the living ranks, ``ranks`` those of which the source shows anything.
    """

    source: Source = "script"
    at: float | None = None
    waited: float = 0.0
    expected: bool = True
    everyone: tuple[int, ...] = ()
    ranks: Mapping[int, Watched] = {}
    rhythms: Mapping[Source, Rhythm] = {}

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
    awaited = any(not mark.waits for mark in marks.values())
    rhythm = history.rhythms.get(look.source, Rhythm())
    ranks = {}
    for rank, mark in marks.items():
        before = history.ranks.get(rank)
        behind = mark.waits and awaited
        excused = behind or (not mark.section and bool(inside - {rank}))
        ranks[rank] = _watched(before, mark, look.at, passed, excused)
        outside = before is not None and not (before.mark.section or mark.section)
        if before is not None and outside and before.begun and mark.value != before.mark.value:
            # A pause of the script's own is over.
            rhythm = rhythm.heard(rank, before.idle + (0.0 if excused else passed))
    made = replace(
        history,
        at=look.at,
        expected=look.expected,
        everyone=tuple(sorted(look.marks)),
        ranks=ranks,
        rhythms={**history.rhythms, look.source: rhythm},
    )
    if made.begun:
        return made
    moved = any(r in history.ranks and history.ranks[r].mark.value != marks[r].value for r in marks)
    return replace(made, waited=0.0 if moved else history.waited + passed)


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
    begun = before.begun or mark.begun or (moved and not mark.early)
    return Watched(mark, begun, idle, inside, allowed)


def limit(history: RoundHistory, asked: float | Literal["auto"]) -> float | None:
    """Return the seconds that ``--hang-timeout`` comes to at present; None: not learned yet."""
    if asked != "auto":
        return asked
    rhythm = history.rhythms.get(history.source, Rhythm())
    if min((rhythm.pauses.get(rank, 0) for rank in history.ranks), default=0) < LEARNED:
        return None
    return max(LEAST, FACTOR * rhythm.longest)


class HangVerdict(Struct, frozen=True):
    """A hang: ``ranks`` are behind, for ``reason``; ``source`` is what showed it.

    ``named``: they are accused; else they are all ranks, and those that are ``leaving`` may be
    guilty. ``culprit`` is what their collectives show of that, with which the reason begins, or "".
    ``patience``: so many seconds somebody has to wait for it, where it is known by the collectives.
    ``idle``: for so many seconds nothing of them was seen.
    """

    ranks: tuple[int, ...]
    reason: str
    source: Source
    named: bool = True
    culprit: str = ""
    patience: float = 0.0
    idle: float = 0.0
    leaving: tuple[int, ...] = ()


def judge(history: RoundHistory, limit: float | None, start: float = LENIENT) -> HangVerdict | None:
    """Return the hang that the history shows, if it does.

    Args:
        history: of the round.
        limit: seconds; None: only the deadlines of sections are judged.
        start: so many times the limit a worker has before its first progress.
    """
    overdue = [rank for rank, watched in history.ranks.items() if watched.overdue]
    if overdue:
        return _verdict(history, overdue, _LEFT, f"{_sections(history, overdue)} in time")
    if limit is None:
        return None
    if not history.begun:
        inside = any(watched.mark.section for watched in history.ranks.values())
        patience = limit * (LENIENT if inside else start)
        if not history.expected or history.waited <= patience:
            return None
        rest = f"in the first {_seconds(history.waited)} of the round"
        return replace(_verdict(history, [], _MADE, rest), patience=patience)
    patiences = {rank: _patience(one, limit, start) for rank, one in history.ranks.items()}
    lateness = {rank: one.idle / patiences[rank] for rank, one in history.ranks.items()}
    late = [rank for rank in lateness if lateness[rank] > 1]
    # The others go on, or stand still as well: who stops with them is not late yet.
    is_unclear = any(0.5 <= times <= 1 for times in lateness.values())
    if not late or (is_unclear and max(lateness.values()) <= LATEST):
        return None
    idle = min(history.ranks[rank].idle for rank in late)
    behind = _lowest_steps(history) if len(late) == len(history.ranks) else late
    found = _verdict(history, behind, _MADE, f"for {_seconds(idle)}")
    return replace(found, patience=min(patiences[rank] for rank in late))


def accuse(
    found: HangVerdict, culprit: Culprit | None, everyone: tuple[int, ...], waits: bool
) -> HangVerdict:
    """Return the verdict with what the collectives show of it.

    Args:
        found: what the history shows.
        culprit: what the collectives show.
        everyone: the living ranks.
        waits: one of the verdict's ranks waits for another, so that it is not to be accused.
    """
    by_collectives = found.source == "collectives"
    if culprit is None:
        unnamed = replace(found, ranks=everyone, named=False)
        return unnamed if by_collectives and waits else found
    told, leaving = culprit.sentence, culprit.kind == "leaving"
    ranks = () if leaving else culprit.ranks
    reason = f"{told} ({found.reason})" if ranks or not by_collectives else told
    found = replace(found, reason=reason, culprit=told, leaving=culprit.ranks if leaving else ())
    if ranks:
        return replace(found, ranks=ranks, named=True)
    return replace(found, ranks=everyone, named=False) if by_collectives else found


def _patience(watched: Watched, limit: float, start: float) -> float:
    if watched.allowed is not None:
        return float("inf")
    if watched.mark.section:
        return limit * LENIENT
    return limit if watched.begun else limit * start


def _lowest_steps(history: RoundHistory) -> list[int]:
    """Return the ranks with the fewest steps, if all stand still; [] where that is not known."""
    steps = {r: w.mark.step for r, w in history.ranks.items() if w.mark.step is not None}
    lowest = min(steps.values(), default=0)
    behind = [rank for rank, step in steps.items() if step == lowest]
    return behind if len(behind) < len(steps) else []


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def _verdict(
    history: RoundHistory, behind: Sequence[int], verbs: tuple[str, str], rest: str
) -> HangVerdict:
    everyone = history.everyone
    named = tuple(sorted(behind)) or (everyone if len(everyone) == 1 else ())
    if len(named) == len(everyone) > 1:
        named = ()
    if named:
        told = f"{text.ranks_do(named, 'have')} {verbs[0]} {rest}"
    else:
        told = f"no rank has {verbs[1]} {rest}"
    where = _where(history, named)
    reason = f"{told} ({where})" if where else told
    watched = [history.ranks[rank] for rank in named or everyone if rank in history.ranks]
    idle = min((one.idle for one in watched), default=0.0)
    return HangVerdict(named or everyone, reason, history.source, bool(named), idle=idle)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _sections(history: RoundHistory, ranks: Sequence[int]) -> str:
    names = dict.fromkeys(history.ranks[rank].mark.section for rank in sorted(ranks))
    return f"section {', '.join(names)}"


def _where(history: RoundHistory, named: Sequence[int]) -> str:
    """Return what is known besides: "step 41, in section eval; the others are at step 42"."""
    watched = history.ranks
    told = []
    named = [rank for rank in named if rank in watched]
    if own := _steps(history, named or list(watched)):
        told.append(f"all at {own}" if not named and len(watched) > 1 else own)
    inside = [r for r in named or watched if watched[r].mark.section and not watched[r].overdue]
    if inside:
        told.append(f"in {_sections(history, inside)}")
    if history.source == "log lines":
        told.append("no line matches --progress-regex")
    others = _steps(history, [rank for rank in watched if rank not in named]) if named else ""
    text = ", ".join(told)
    return f"{text}; the others are at {others}" if others else text


def _steps(history: RoundHistory, ranks: Sequence[int]) -> str:
    found = sorted({s for r in ranks if (s := history.ranks[r].mark.step) is not None})
    if not found:
        return ""
    return f"step {found[0]}" if len(found) == 1 else f"steps {found[0]} to {found[-1]}"


def last_words(history: RoundHistory) -> tuple[str, ...]:
    """Return lines about what each rank reported last; none where the script reports nothing."""
    if history.source != "script":
        return ()
    lines = []
    for rank, watched in sorted(history.ranks.items()):
        mark = watched.mark
        said = [] if mark.step is None else [f"step {mark.step}"]
        said += [f"in section {mark.section}"] if mark.section else []
        if mark.said_at is not None and history.at is not None:
            said.append(f"silent for {_seconds(max(0.0, history.at - mark.said_at))}")
        said += [f"last call {mark.doing}"] if mark.doing else []
        lines.append(f"rank {rank}: {', '.join(said)}")
    return tuple(lines)


# ── a run ────────────────────────────────────────────────────────────────────────────────────────


class HangWatch:
    """Follows one round after the other by looks ``tick`` seconds apart; one thread's.

    Args:
        asked: ``--hang-timeout``.
        several: whether other nodes take part.
    """

    def __init__(self, asked: float | Literal["auto"], several: bool) -> None:
        self.history = RoundHistory()
        self.tick = AUTO_S if asked == "auto" else min(max(asked / SHARE, SHORTEST_S), LONGEST_S)
        self._asked: float | Literal["auto"] = asked
        self._several = several
        self._shown = False
        self.begin()

    def begin(self) -> None:
        """Forget the round before, but for how long its pauses were."""
        self.history, self._unlearned = self.history.next_round(), RoundHistory()
        self._yielded, self._silent, self._ask_again = 0, 0, 0.0

    @property
    def limit(self) -> float | None:
        """The seconds that ``--hang-timeout`` comes to; None: not learned yet."""
        return limit(self.history, self._asked)

    def see(self, look: Look, waits: Look | None) -> HangVerdict | None:
        """Return what is suspected after one more look.

        ``waits`` is how the workers are by their collectives, which counts while ``auto`` has not
        learned a limit; None while those are not known.
        """
        longest = LATE_TICKS * self.tick
        self.history = advance(self.history, look, longest)
        seconds = self.limit
        found = judge(self.history, seconds)
        if found is None and seconds is None and waits is not None:
            # Whatever a script's rhythm is, nobody waits in a collective for long.
            self._unlearned = advance(self._unlearned, waits, longest)
            found = judge(self._unlearned, UNLEARNED_S, start=1.0)
        if found is None:
            self._yielded = 0
        return found if look.at >= self._ask_again else None

    def explain(
        self,
        found: HangVerdict,
        places: Mapping[int, RankPlace],
        everyone: tuple[int, ...],
        world_size: int,
        *,
        now: float,
        at: float,
    ) -> HangVerdict | None:
        """Name the rank that the others wait for; None: it is no hang, or another look is due.

        By the collectives it is no hang before a rank of some node has waited for as long as the
        one that is late may be: nobody is held up. Nor is it one, where all of this node's workers
        wait, while a rank of another node is in no collective: that is its own node's to judge.

        Args:
            found: what is suspected.
            places: of the ranks of all nodes.
            everyone: the living ranks of this node.
            world_size: of the job.
            now: seconds since 1970.
            at: now, by the clock of the looks.
        """
        own = [place for rank, place in places.items() if rank in found.ranks]
        waits, pause = any(place.waits for place in own), 0.0
        if found.source == "collectives":
            pause = min(AGAIN_S, found.patience - collectives.waited(places, now))
        asks = self._several or found.source == "collectives"
        if asks and own and all(place.waits for place in own):
            pause = max(pause, self._pause(places, world_size, found.patience))
        if pause > 0:
            self._ask_again, self._yielded = at + pause, 0
            return None
        culprit = collectives.find(places, now, least=found.patience / 2, late=found.ranks)
        made = accuse(found, culprit, everyone, waits)
        self._yielded = 0 if made.named or not self._several else self._yielded + 1
        return None if 0 < self._yielded <= YIELD_TICKS else made

    def _pause(self, places: Mapping[int, RankPlace], world_size: int, patience: float) -> float:
        """Return in how many seconds to ask again, since a rank is in no collective, or silent."""
        ranks = [places.get(rank, UNKNOWN) for rank in range(world_size)]
        loose = [place for place in ranks if not place.is_held]
        if not self._several or self._asked != "auto":  # else one that computes may be late
            loose = [place for place in loose if place != OUTSIDE]
        if not self._several:  # its turn comes when it is late itself
            return min(AGAIN_S, patience) if any(not one.problem for one in loose) else 0.0
        if all(place.problem for place in loose):
            self._silent += bool(loose)
            return AGAIN_S if loose and self._silent <= SILENT_ASKS else 0.0
        self._silent = 0
        return AGAIN_S

    def note_silence(self, blind: bool) -> None:
        """Log once in a run that nothing is watched, since the script shows no progress.

        ``blind``: the workers' collectives cannot be seen, whatever the script does.
        """
        history, least = self.history, LEAST if self._asked == "auto" else self._asked
        patience = min(least, BLIND_S) if blind else LENIENT * least
        self._shown = self._shown or history.begun
        if self._shown or history.expected or history.waited <= patience:
            return
        self._shown = True
        log.warning(
            "--hang-timeout %s watches nothing so far: in the first %.0f s of the round no worker "
            "of this node has shown any progress; %s%s (docs/hangs.md)",
            self._asked if self._asked == "auto" else f"{self._asked:g}",
            history.waited,
            _BLIND if blind and history.source == "script" else "",
            FIXES.get(history.source, FIXES["script"]),
        )
