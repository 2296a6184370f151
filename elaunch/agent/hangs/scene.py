"""The other workers when the first of a round had failed, before any was signalled.

Their answers are taken at once, and taken apart when the others are signalled already: each
millisecond in which they go on is one more to the restart. The ranks that fail first are often
victims: they waited for another until their timeout. By then they have left the collective, so that
what was seen at the last look before counts as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from msgspec import Struct, structs

from elaunch.agent.hangs import collectives, recorders, stackdump
from elaunch.agent.hangs.collectives import Culprit, RankPlace
from elaunch.agent.hangs.living import RanksElsewhere
from elaunch.agent.hangs.recorders import STACKS
from elaunch.agent.hangs.sample import Sampler
from elaunch.agent.hangs.stackdump import Dump, StackGroup
from elaunch.agent.patience import bounded
from elaunch.endings import Exit

SCENE_S: Final = 0.05
"""Seconds for the others to answer, before they are signalled."""


class Scene(Struct, frozen=True):
    """Where the others were in ``round``.

    ``groups`` are those that answered, ``culprit`` is what their collectives show. ``awaited`` is
    for whom the others had waited at the last look before, if that has stood still since;
    ``waiting`` are ranks that waited in a collective, ``leaving`` those whose interpreters ended,
    ``ended`` those that had ended with 0, ``failed`` those of other nodes that have failed. Of all
    that were ``seen`` something is known.
    """

    round: int
    groups: tuple[StackGroup, ...]
    culprit: Culprit | None = None
    awaited: Culprit | None = None
    waiting: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    failed: frozenset[int] = frozenset()
    seen: frozenset[int] = frozenset()

    @property
    def sentence(self) -> str:
        """In which collective they waited, or ""."""
        return "" if self.culprit is None else self.culprit.sentence

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON-able data (docs/failure-json.md)."""
        stacks = [group.to_dict() for group in self.groups]
        return {"collectives": self.sentence or None, "stacks": stacks}


NOT_ASKED: Final = Scene(-1, ())
"""The scene of a round of which nothing is known of the others."""


def describe(
    round_number: int,
    places: Mapping[int, RankPlace],
    dumps: Mapping[int, Dump],
    *,
    before: Mapping[int, RankPlace],
    now: float,
    failed: frozenset[int] = frozenset(),
) -> Scene:
    """Return the scene. Pure.

    Args:
        round_number: of the round that has failed.
        places: where the living workers are.
        dumps: their stacks, as far as they came in time.
        before: where the workers were when last a rank was seen to wait.
        now: seconds since 1970.
        failed: ranks of other nodes that have failed.
    """
    then = dict(before)
    for rank in then.keys() & places.keys():  # its stack shows it only now
        then[rank] = structs.replace(then[rank], receives=places[rank].receives)
    awaited = collectives.find(then, now)
    if awaited is not None and not collectives.still(awaited, then, places):
        awaited = None
    # Nothing is known of one whose interpreter ends: it may be for the same failure.
    living = {
        rank: place for rank, place in places.items() if not (place.leaving or rank in failed)
    }
    return Scene(
        round_number,
        stackdump.group(dumps),
        _seen_to_be(collectives.find(living, now, failed=True), dumps),
        _seen_to_be(awaited, dumps),
        waiting=tuple(rank for rank, place in living.items() if place.waits),
        leaving=tuple(rank for rank, place in places.items() if place.leaving),
        ended=tuple(rank for rank, place in places.items() if place.ended),
        failed=failed,
        seen=failed | places.keys(),
    )


def _seen_to_be(culprit: Culprit | None, dumps: Mapping[int, Dump]) -> Culprit | None:
    """Return it without accusing anybody whose stack did not come: that rank may wait, too."""
    if culprit is None or culprit.kind in ("differ", "ended") or set(culprit.ranks) <= dumps.keys():
        return culprit
    return structs.replace(culprit, ranks=(), lasting=False)


class LastLook:
    """The others of a round, as they have been asked; :meth:`described` takes the answers apart."""

    def __init__(self, sampler: Sampler, first: Exit, lost: bool, is_victim: bool) -> None:
        until, living, recorder = time.monotonic() + SCENE_S, sampler.workers.now, sampler.recorders
        self._round, self._run_dir = first.round, recorder.run_dir
        self._others: RanksElsewhere | None = None
        if lost and sampler.others is not None and living.begun is not None:
            self._others = sampler.others.ask(living.begun, waited=False)
        self._pids = {rank: pid for rank, pid in living.pids.items() if rank != first.rank}
        handlers = (*recorder.traces, STACKS)
        self._answers = recorder.ask(living, self._pids, handlers, until, hurries=not is_victim)
        self._before, self._at = sampler.waiting, time.time()
        self._read: tuple[dict[int, RankPlace], dict[int, Dump]] | None = None
        if self._others is not None:
            self._others.answered.wait(max(0.0, until - time.monotonic()))
        # The lines of a victim's peers are looked up where they run, while they do. What is only
        # shown is read when the others are signalled.
        if is_victim:
            self.read()

    def read(self) -> None:
        """Take the answers of this node's workers apart, with lines of sources where they run."""
        places, dumps = self._answers.places(), self._answers.dumps()
        found = recorders.unrecorded(places, dumps, self._pids)
        self._read = recorders.awaiting(places, found), dumps

    def described(self, patience: float) -> Scene:
        """Return the scene; what other nodes still answer is waited for so many seconds."""
        others = self._others or RanksElsewhere()
        if self._others is not None:
            others.settled.wait(patience)
        if self._read is None:
            bounded(self.read, None, "cannot read what the other workers do", self._run_dir)
        places, dumps = self._read or ({}, {})
        found, gone = {**others.places, **places}, frozenset(others.failed)
        if not (found or gone):
            return NOT_ASKED
        before, at = self._before, self._at
        return describe(self._round, found, dumps, before=before, now=at, failed=gone)


def look(sampler: Sampler, first: Exit, lost: bool, is_victim: bool) -> LastLook | None:
    """Ask the others, before they are signalled, where they are; blocks SCENE_S at most.

    If the ``first`` is a victim, they have all of that; else what they do is only shown. Where it
    has ``lost`` a rank, that may be one of another node: these are asked, too.
    """
    take = partial(LastLook, sampler, first, lost, is_victim)
    what = "cannot see where the other workers are"
    return bounded(take, None, what, sampler.recorders.run_dir)
