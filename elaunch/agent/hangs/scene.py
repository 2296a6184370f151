"""The other workers when the first of a round had failed, before any was signalled. Pure.

The ranks that fail first are often victims: they waited for another until their timeout. By then
they have left the collective, so that what was seen at the last look before counts as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, structs

from elaunch.agent.hangs import collectives, stackdump
from elaunch.agent.hangs.collectives import Culprit, RankPlace
from elaunch.agent.hangs.stackdump import Dump, StackGroup


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
        """Return it as JSON-able data (docs/failure-report.md)."""
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
    """Return the scene.

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
