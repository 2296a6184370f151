"""The agents of the next round in their order: node ranks are places in it. Pure.

1. nodes of the round before, in their old order: a survivor's rank changes as little as it can;
2. spares, in the order in which they arrived: the one that has waited longest replaces first;
3. newcomers, by the order that user or scheduler gave (``hint``), then by host as people count
   (node2 before node10), then by name.

With ``static`` the hint is the rank, and nothing else counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from elaunch.rendezvous.decide.view import Present


class Applicant(Struct, frozen=True):
    """One agent that could be in the next round; ``arrival`` counts arrivals, ``spare`` waits."""

    name: str
    host: str
    hint: int | None = None
    arrival: int = 0
    spare: bool = False


def waiting(known: Sequence[str], there: Mapping[str, Present]) -> list[Applicant]:
    """Return the agents that are ``there`` as candidates.

    Those whom the plan has named already are spares in its order: a coordinator that has taken over
    since does not know who came first.
    """
    places = {name: place for place, name in enumerate(known)}
    return [
        Applicant(
            name,
            one.record.host,
            one.record.hint,
            places.get(name, one.number),
            spare=name in places,
        )
        for name, one in there.items()
    ]


def order(previous: Sequence[str], candidates: Iterable[Applicant]) -> tuple[str, ...]:
    """Return the names of all ``candidates`` in their order; ``previous`` are the old nodes."""
    places = {name: place for place, name in enumerate(previous)}
    survivors, spares, newcomers = [], [], []
    for one in candidates:
        if one.name in places:
            survivors.append(one)
        elif one.spare:
            spares.append(one)
        else:
            newcomers.append(one)
    survivors.sort(key=lambda one: places[one.name])
    spares.sort(key=lambda one: (one.arrival, one.name))
    newcomers.sort(key=by_hint)
    return tuple(one.name for one in (*survivors, *spares, *newcomers))


def static_order(previous: Sequence[str], candidates: Iterable[Applicant]) -> dict[int, list[str]]:
    """Return for each given node rank who claims it, a node of the round before first."""
    old = set(previous)
    claims: dict[int, list[str]] = {}
    for one in sorted(candidates, key=lambda one: (one.name not in old, one.arrival, one.name)):
        if one.hint is not None:
            claims.setdefault(one.hint, []).append(one.name)
    return claims


def by_hint(one: Applicant) -> tuple[bool, int, list[tuple[int, str]], str]:
    """Return a newcomer's sort key; those without a hint come after those with one."""
    return (one.hint is None, one.hint or 0, natural(one.host), one.name)


def natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key under which ``node2`` comes before ``node10``."""
    parts = re.split("([0-9]+)", text)
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]
