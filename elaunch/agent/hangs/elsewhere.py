"""Where the ranks of the job's other nodes are in their collectives: their agents are asked.

They are asked at a suspicion, AT_ONCE at the same time; of a node whose agent does not answer in
time nothing is known. Two machines' clocks are not compared: an answer has the time at which it was
made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from elaunch import atonce
from elaunch.agent.hangs.collectives import RankPlace
from elaunch.agent.hangs.living import RanksElsewhere
from elaunch.agent.hangs.trace import at_times
from elaunch.agent.peers.messages import PeerConnection, Undelivered
from elaunch.agent.peers.peers import Peers
from elaunch.agent.policy.turn import Round

ANSWER_S: Final = 3.0
AT_ONCE: Final = 32
SETTLE_S: Final = 0.5
"""Seconds in which ranks that come to their ends are asked for again."""
AGAIN_S: Final = 0.05
MOST_ASKED: Final = 32
"""Nodes of a job in which a node whose rank has lost another asks all: many may ask at once."""

log = logging.getLogger("elaunch")


class OtherNodes:
    """Asks the other nodes' agents, and answers them.

    ``own`` returns this node's places, ``failed`` which of its ranks have failed.
    """

    def __init__(
        self,
        peers: Peers,
        own: Callable[[int, bool], Mapping[int, RankPlace]],
        failed: Callable[[int], Collection[int]],
    ) -> None:
        self._peers = peers
        self._own = own
        self._failed = failed
        peers.handle("collectives", self._on_asked)

    def _on_asked(self, _: PeerConnection, request: Mapping[str, Any]) -> Mapping[str, Any]:
        number = int(request["round"])
        places = self._own(number, bool(request.get("waited")))
        found = {str(rank): msgspec.to_builtins(place) for rank, place in places.items()}
        return {"ok": True, "now": time.time(), "places": found, "failed": [*self._failed(number)]}

    def ask(
        self, begun: Round, waited: bool, then: Callable[[], object] = lambda: None
    ) -> RanksElsewhere:
        """Ask in a thread where the ranks are; ``then`` is called when all is settled.

        ``waited``: a rank waits here. Else one has failed: they are asked again while a rank comes
        to its end, SETTLE_S at most, and not at all in a job of more than MOST_ASKED nodes.
        """
        found = RanksElsewhere()
        atonce.start("ask nodes", self._ask, begun, waited, found, then)
        return found

    def _ask(
        self, begun: Round, waited: bool, found: RanksElsewhere, then: Callable[[], object]
    ) -> None:
        until = time.monotonic() + SETTLE_S
        try:
            while waited or begun.place.nodes <= MOST_ASKED:
                places = self._ask_all(begun, waited, found)
                found.answered.set()
                ends = any(one.leaving for one in places.values())
                if waited or not ends or time.monotonic() > until:
                    break
                time.sleep(AGAIN_S)
        finally:
            found.answered.set()
            found.settled.set()
            then()

    def _ask_all(self, begun: Round, waited: bool, into: RanksElsewhere) -> dict[int, RankPlace]:
        """Return where the ranks of all other nodes are now; it takes ANSWER_S at most."""
        assert begun.plan is not None  # a job of several nodes
        own, found = begun.place.node_rank, dict[int, RankPlace]()
        until = time.monotonic() + ANSWER_S

        def ask(node_rank: int) -> None:
            try:
                with self._peers.call(self._peers.node(node_rank), until, ANSWER_S) as line:
                    answer = line.ask({"do": "collectives", "round": begun.round, "waited": waited})
                later = time.time() - float(answer["now"])
                places = msgspec.convert(answer["places"], dict[str, RankPlace])
                into.failed |= msgspec.convert(answer.get("failed", []), set[int])
            except (Undelivered, LookupError, TypeError, ValueError) as error:
                log.debug("node %d does not say where its ranks are: %s", node_rank, error)
                return
            for rank, one in places.items():
                found[int(rank)] = at_times(one, lambda call: call.at + later)

        nodes = (number for number in range(len(begun.plan.nodes)) if number != own)
        calls = [partial(ask, each) for each in nodes]
        atonce.within(ANSWER_S, lambda: atonce.at_once(calls, AT_ONCE, "ask node"), "ask nodes")
        known = {rank: found[rank] for rank in tuple(found) if rank not in begun.own_ranks}
        into.places.update(known)
        return known
