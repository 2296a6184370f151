"""Whether the nodes of a round run the same thing, in one sentence of bounded length. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elaunch.rendezvous import text as words

MOST_CHARACTERS = 1000
MOST_VALUES = 4


def differences(nodes: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Return which facts differ between which hosts, or ""; ``nodes`` are (host, facts)."""
    if not nodes or all(facts == nodes[0][1] for _, facts in nodes):
        return ""
    names = sorted({name for _, facts in nodes for name in facts})
    told = []
    for name in names:
        hosts: dict[str, list[str]] = {}
        for host, facts in nodes:
            hosts.setdefault(facts.get(name, "(nothing)"), []).append(host)
        if len(hosts) > 1:
            told.append(f"{name} is {_spread(hosts)}")
    text = f"the nodes differ: {'; '.join(told)}"
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def _spread(hosts: Mapping[str, Sequence[str]]) -> str:
    """Return "a on node1, node2 and b on node3", what most have first."""
    ranked = sorted(hosts.items(), key=lambda one: (-len(one[1]), one[0]))
    shown = [
        f"{value} on {words.listed(where) if len(where) <= 3 else words.count(len(where))}"
        for value, where in ranked[:MOST_VALUES]
    ]
    more = len(ranked) - MOST_VALUES
    return " and ".join(shown) + (f" and {more} other values" if more > 0 else "")
