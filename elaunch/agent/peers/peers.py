"""Requests between the agents of a job's nodes: about checkpoints, shards and files.

Every agent of a job of several nodes has one :class:`Peers`: a port, which its record among the
members has (``peer_port`` there and in the plan's nodes), and calls to the others' ports. The
messages are in elaunch.agent.peers.messages. Their sender has proved that it belongs to this job:
its key is made of the secret of --rdzv-secret-file and of the job's incarnation id, which is read
from the store.

Calls block for ``timeout`` seconds at most and raise Undelivered, which distinguishes an agent that
is gone from one that is slow. Requests of others go to the handlers that :meth:`Peers.handle` was
given, in threads of :class:`Peers`: to the saver's for shards (elaunch.agent.saver.saver).

A shard is known by (step, round, rank), and by the stage's uuid where two saves could be meant. A
node is known by its node rank in the round that runs.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from elaunch.agent.peers.messages import CHUNK, PeerConnection, Undelivered
from elaunch.agent.workers.network import listen_for_nodes
from elaunch.checkpoint.records import ShardReport
from elaunch.errors import CheckpointError
from elaunch.hosts import LOOPBACK, is_loopback
from elaunch.rendezvous.plan import Plan
from elaunch.wire import stream
from elaunch.wire.stream import PEER, Caller, Endpoint, StreamListener, session_key
from elaunch.wire.worker import StagedShard, shard_from_json

PATIENCE: Final = 30.0
"""Seconds without a byte or progress after which another agent counts as hung."""
IDLE: Final = 120.0
"""Seconds that a connection may rest between two requests."""
MOST_SERVED: Final = 256

Fields = Mapping[str, Any]
"""A request, or an answer."""
Handler = Callable[[PeerConnection, Fields], Fields | None]
"""Serves one request; returns the answer, or None if it has answered."""

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class Peer:
    """Where the agent of another node is reached."""

    host: str
    addr: str
    port: int

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens."""
        return Endpoint(self.addr, self.port)

    def __str__(self) -> str:
        """Return its name for messages."""
        return f"the agent of node {self.host} ({self.endpoint})"


class Peers:
    """Owns this agent's port for other agents; thread-safe.

    Args:
        host: the address that the other nodes reach this one at.
        run_id: of the job.
        secret: of --rdzv-secret-file, or None; the attribute may be set until the first plan of a
            store is read.
    """

    def __init__(self, host: str, run_id: str, secret: bytes | None) -> None:
        self.host = host
        self._run_id = run_id
        self.secret = secret
        self.port = 0
        """The port that is published to others; 0 before :meth:`start`."""
        self._listener = StreamListener(
            "elaunch-peers", self._admit, has_room=lambda: len(self._served) < MOST_SERVED
        )
        self._served: set[socket.socket] = set()
        self._serving = threading.Lock()
        self._plan: Plan | None = None
        self._name = ""
        self._plan_seen = threading.Condition()
        self._handlers: dict[str, Handler] = {}

    def start(self) -> int:
        """Listen, and return the port; raises CheckpointError."""
        try:
            listening = listen_for_nodes(self.host, 0)
        except OSError as error:
            raise CheckpointError(
                f"cannot listen for the other nodes' agents: {error.strerror or error}"
            ) from error
        self.port = int(listening.getsockname()[1])
        self._listener.start([listening], self.port)
        return self.port

    def close(self) -> None:
        """Stop listening and hang up on everybody; may be called twice."""
        self._listener.close()
        with self._serving:
            for sock in self._served:
                _cut(sock)

    def handle(self, op: str, handler: Handler) -> None:
        """Have requests ``op`` served by ``handler``, from now on."""
        self._handlers[op] = handler

    def on_plan(self, plan: Plan, name: str) -> None:
        """Take the newest plan, with the job and its nodes; ``name`` is this agent's."""
        key = session_key(self.secret or b"elaunch", f"peers {self._run_id} {plan.job}")
        with self._plan_seen:
            self._plan, self._name = plan, name
            self._listener.key = key
            self._plan_seen.notify_all()

    def node(self, node_rank: int) -> Peer:
        """Return where the node of that rank in the newest plan is; raises Undelivered."""
        plan = self._plan
        if plan is None or not 0 <= node_rank < len(plan.nodes):
            raise Undelivered(f"the round has no node {node_rank}", True)
        node = plan.nodes[node_rank]
        if not node.peer_port:
            problem = f"node {node.host} has no port for other agents"
            raise Undelivered(f"{problem}: is its elaunch as new as this?")
        return Peer(node.host, node.addr, node.peer_port)

    def here(self) -> Peer:
        """Return where this agent itself is reached from this machine."""
        addr = self.host if is_loopback(self.host) else LOOPBACK
        return Peer(os.uname().nodename, addr, self.port)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def call(self, peer: Peer, until: float, patience: float = PATIENCE) -> PeerConnection:
        """Return a connection to an agent, after the handshake; tries until ``until`` (monotonic).

        Raises Undelivered; ``gone`` if nobody listens there any more.
        """
        with self._plan_seen:
            self._plan_seen.wait_for(self.key, max(0.0, until - time.monotonic()))
        if not self.key():
            raise Undelivered("this agent has not heard of a plan yet")
        caller = Caller(PEER, self.port)
        try:
            sock = stream.dial(
                peer.endpoint, self.key, peer.port, caller, until, key_may_change=True
            )
        except stream.Unreached as error:
            texts = {
                "refused": f"{peer} has ended: {error}",
                "silent": f"{peer} cannot be reached: {error}; is its port closed by a firewall?",
            }
            text = texts.get(error.how, f"{peer} does not take us: {error}")
            raise Undelivered(text, error.how == "refused") from None
        return PeerConnection(sock, str(peer), patience)

    def key(self) -> bytes:
        """Return what proves that an agent is of this job; empty before the first plan."""
        return self._listener.key

    def _to_node(self, node_rank: int, timeout: float) -> PeerConnection:
        seconds = min(timeout, PATIENCE)
        return self.call(self.node(node_rank), time.monotonic() + seconds, seconds)

    def report(self, node_rank: int, report: ShardReport, timeout: float) -> None:
        """Send the agent of ``node_rank`` a report on a shard that is not its own."""
        with self._to_node(node_rank, timeout) as connection:
            connection.ask(asdict(report))

    def ask_held(self, node_rank: int, wanted: tuple[int, int, str], timeout: float) -> list[int]:
        """Return the ranks whose shards of (step, round, uuid) are in that node's memory."""
        step, round_number, uuid = wanted
        with self._to_node(node_rank, timeout) as connection:
            answer = connection.ask(
                {"do": "held", "step": step, "round": round_number, "uuid": uuid}
            )
        ranks = answer.get("ranks")
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise Undelivered(f"{connection.who} sends what are no ranks")
        return ranks

    def fetch_shard(
        self,
        node_rank: int,
        wanted: tuple[int, int, int],
        into: Callable[[int], memoryview],
        timeout: float,
    ) -> StagedShard | None:
        """Copy a shard (step, round, rank) out of that node's memory; None if it is not there.

        ``into`` makes room for so many bytes, in which the shard's files lie then.
        """
        step, round_number, rank = wanted
        until = time.monotonic() + timeout
        with self._to_node(node_rank, timeout) as connection:
            found = connection.ask(
                {"do": "shard", "step": step, "round": round_number, "rank": rank}
            )
            if "shard" not in found:
                return None
            shard = _shard_in(connection, found)
            connection.receive_into(into(shard.end)[: shard.end], _in_time(connection, until))
            if not connection.answer().get("whole"):
                return None
        return shard

    def push_replica(
        self, node_rank: int, shard: StagedShard, memory: memoryview, timeout: float
    ) -> None:
        """Send a shard, the first ``shard.end`` bytes of ``memory``, to be kept for this node."""
        until = time.monotonic() + timeout
        with self._to_node(node_rank, timeout) as connection:
            connection.ask({"do": "replica", "shard": asdict(shard)})
            in_time = _in_time(connection, until)
            whole = memory[: shard.end]  # what lies behind it is not of the shard
            pieces = (whole[at : at + CHUNK] for at in range(0, shard.end, CHUNK))
            connection.send_bytes(piece for piece in pieces if in_time(len(piece)))
            connection.answer()

    def view(self, node_rank: int, request: Fields, until: float, dial_s: float) -> dict[str, Any]:
        """Return what a node's agent answers to a view (elaunch.agent.status.views), or ``error``.

        It has until ``until`` (monotonic) for it, and to be reached ``dial_s`` seconds of that.
        """
        try:
            left = until - time.monotonic()
            dial_until = time.monotonic() + min(left, dial_s)
            with self.call(self.node(node_rank), dial_until, left) as line:
                return line.ask({**request, "do": "view"})
        except Undelivered as error:
            return {"error": str(error)}

    # ── requests of others ───────────────────────────────────────────────────────────────────────

    def _admit(self, sock: socket.socket, caller: Caller) -> None:
        """Serve an agent that has passed the handshake, in a thread of its own."""
        if caller.purpose != PEER:
            sock.close()
            return
        sock.setblocking(True)
        with self._serving:
            self._served.add(sock)
        thread = threading.Thread(
            target=self._attend, args=(sock,), name="elaunch-peer", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("another node's agent cannot be served for now: %s", error)
            with self._serving:
                self._served.discard(sock)
            sock.close()

    def _attend(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        except Exception:
            log.exception("another node's agent could not be served")
        finally:
            with self._serving:
                self._served.discard(sock)
            sock.close()
            self._listener.poke()  # there is room for another one

    def _serve(self, sock: socket.socket) -> None:
        connection = PeerConnection(sock, "another node's agent", IDLE)
        try:
            while (request := connection.receive()) is not None:
                connection.patience = PATIENCE
                self._answer(connection, request)
                connection.patience = IDLE
        except Undelivered as error:
            log.debug("a request of another node's agent came to nothing: %s", error)

    def _answer(self, connection: PeerConnection, request: Fields) -> None:
        handler = self._handlers.get(str(request.get("do")))
        if handler is None:
            connection.send({"error": f"this agent does not serve {request.get('do')!r}"})
            return
        try:
            answer = handler(connection, request)
        except Undelivered:
            raise
        except CheckpointError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": _text_of(error)}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            answer = {"error": f"the request makes no sense: {error!r}"}
        if answer is not None:
            connection.send(answer)


def _cut(sock: socket.socket) -> None:
    """Wake the thread that serves this connection."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection had ended before it was cut: %s", error)


def _shard_in(connection: PeerConnection, found: Fields) -> StagedShard:
    try:
        return shard_from_json(found["shard"])
    except ValueError as error:
        raise Undelivered(f"{connection.who}: {error}") from error


def _text_of(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _in_time(connection: PeerConnection, until: float) -> Callable[[int], bool]:
    """Return what lets a transfer go on until ``until`` and then raises Undelivered."""

    def check(_: int) -> bool:
        if time.monotonic() >= until:
            raise Undelivered(f"{connection.who} is too slow: the transfer is not done in time")
        return True

    return check
