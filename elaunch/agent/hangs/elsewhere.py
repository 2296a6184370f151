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
from elaunch.agent.hangs.trace import at_times
from elaunch.agent.peers.messages import PeerConnection, Undelivered
from elaunch.agent.peers.peers import Peers
from elaunch.agent.policy.turn import Round

ANSWER_S: Final = 3.0
AT_ONCE: Final = 32

log = logging.getLogger("elaunch")


class OtherNodes:
    """Asks the other nodes' agents, and answers them.

    ``own`` returns this node's places, ``failed`` which of its ranks have failed.
    """

    def __init__(
        self,
        peers: Peers,
        own: Callable[[int, bool], Mapping[int, RankPlace]],
        failed: Callable[[int], Collection[int]] = lambda _: (),
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

    def places(
        self, begun: Round, waited: bool, failed: set[int] | None = None
    ) -> dict[int, RankPlace]:
        """Return where the ranks of all other nodes are; it takes ANSWER_S at most.

        ``waited``: a rank is known to wait in a collective. ``failed`` gets those that have failed.
        """
        assert begun.plan is not None  # a job of several nodes
        own, found = begun.place.node_rank, dict[int, RankPlace]()
        gone = set[int]() if failed is None else failed
        until = time.monotonic() + ANSWER_S

        def ask(node_rank: int) -> None:
            try:
                asked = {"round": begun.round, "waited": waited}
                found.update(self._ask(node_rank, until, asked, gone))
            except (Undelivered, LookupError, TypeError, ValueError) as error:
                log.debug("node %d does not say where its ranks are: %s", node_rank, error)

        nodes = (number for number in range(len(begun.plan.nodes)) if number != own)
        calls = [partial(ask, each) for each in nodes]
        atonce.within(ANSWER_S, lambda: atonce.at_once(calls, AT_ONCE, "ask node"), "ask nodes")
        return {rank: found[rank] for rank in tuple(found) if rank not in begun.own_ranks}

    def _ask(
        self, node_rank: int, until: float, asked: Mapping[str, object], failed: set[int]
    ) -> dict[int, RankPlace]:
        with self._peers.call(self._peers.node(node_rank), until, ANSWER_S) as line:
            answer = line.ask({"do": "collectives", **asked})
        later = time.time() - float(answer["now"])
        places = msgspec.convert(answer["places"], dict[str, RankPlace])
        failed |= msgspec.convert(answer.get("failed", []), set[int])
        return {int(k): at_times(one, lambda call: call.at + later) for k, one in places.items()}
