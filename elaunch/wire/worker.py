"""The messages between a worker and its agent: one connection, for all that they send each other.

The worker connects to ``ELAUNCH_AGENT_SOCKET`` and stays (elaunch.wire.local).

From the worker:

==========================================================  =====================================
``{"op": "worker", "wire": 5, "round": r,                   first message, with the descriptor of
"local_rank": k}``                                          its progress page
                                                            (elaunch.wire.progress); with
                                                            ``"name"`` the run gets that name
``{"op": "listens", "shielded": b}``                        the script asks should_preempt();
                                                            whether SIGTERM does nothing there
``{"op": "knows", "reason": …, "kind": …}``                 it knows of another node's notice, with
                                                            ``"grace"`` where one is stated
``{"op": "ack", "reason": …, "kind": …}``                   the script knows that it is to end, and
                                                            will: exit code 0 now means "preempted"
``{"op": "stands", "stands": b}``                           the script is in a loop that can go on
                                                            when a rank is lost, or has left it
``{"op": "enters", "round": r}``                            it knows of ``enter``
``{"op": "entered", "round": r}``                           it takes part in that round
``{"op": "detach"}``                                        the context is closed
``{"op": …, "n": n, …}``                                    a request about checkpoints
                                                            (below), answered in order
==========================================================  =====================================

From the agent:

==========================================================  =====================================
``{"op": "attached"}``                                      answer to ``worker``
``{"op": "preempt", "reason": …, "kind": …}``               a notice: save, and end with 0; with
                                                            ``"grace"`` within so many seconds,
                                                            with ``"stated"`` those that the
                                                            platform leaves, not the agent's own
``{"op": "enter", "environ": {…},                           a rank was lost, and another round
"present": [g, …], "slots": [s, …]}``                       begins, with this process: ``environ``
                                                            has all its variables of that round,
                                                            ``present`` the ranks that go on,
                                                            ``slots`` how many ranks each node has.
                                                            A new worker follows each other one. If
                                                            another ``enter`` comes, that alone
                                                            counts
``{"n": n, "ok": …, …}``                                    the answer to request ``n``
``{"error": …}``                                            it refuses, and closes
==========================================================  =====================================

``kind`` is ``stop`` (the job is to end, resumable) or ``resize`` (a node joins or leaves; the job
goes on without delay). ``wire`` is the version of these messages and of those about checkpoints: an
agent refuses a worker of another one.

A worker that ``stands`` stays when another one of its job fails, if all others stand. If it does
not answer ``enter`` within 10 s by ``enters``, it is killed. A new worker finds the ranks that go
on in ELAUNCH_PRESENT, and stands once it has what they have. While some ranks have yet to come, the
others may number themselves from 0 for their checkpoints, where all are of one node.

The requests about checkpoints, which the agent writes, are numbered: one answer for each, in order,
but for those with the number 0; ``n``, the number, is left out here. From the worker:

=============================================  ====================================================
``{"op": "checkpoint", "round": r, "rank": g,  first request; ``d``: the directory or URL of the
"local_rank": k, "place": d}``                 checkpoints. May come again, when the worker has
                                               another rank or has entered another round; until
                                               then its requests are refused there
``{"op": "resumed", "uuid": u}``               may come before that: which shards of the save that
                                               the round resumes from are in this agent's memory
``{"op": "begin", "wait": b, "timeout": t}``   waits for the save in flight
``{"op": "memory", "size": s, "begun": b}``    wants at least ``s`` bytes; the answer brings the
                                               memory's descriptor. It belongs to the agent: it
                                               outlives the worker, however that ends. ``begun``:
                                               all ranks have begun, and it is about to be
                                               overwritten, so what is there is recalled no more;
                                               not answered where it is mapped already
``{"op": "staged", "shard": {…},               the memory (an inode) holds this rank's shard, a
"memory": i}``                                 :class:`StagedShard`. From here it is the agent's,
                                               also where the worker is killed at once. Not
                                               answered: a shard that is refused is as one that
                                               cannot be written
``{"op": "abandon", "stage": {…} | null}``     nothing is staged after the last ``begin``; with a
                                               stage: no shard of that checkpoint counts
``{"op": "wait", "timeout": t}``               answered when nothing is in flight any more
``{"op": "fence", "round": r, "timeout": t}``  is ``r`` still the round? The agent asks the store
                                               (several nodes) or its loop (one), not its memory
``{"op": "committed", "committed": {…},        rank 0 has committed what the ranks have written
"took": t}``                                   themselves; for the run's record
``{"op": "recall", "step": s, "round": r,      which shards of this checkpoint are in the memory of
"uuid": u, "ranks": […], "timeout": t}``       living agents
=============================================  ====================================================

From the agent:

=============================================  ====================================================
``{"ok": true, …}``                            done
``… "size": s``                                to ``memory``: how large the descriptor beside it is
``… "shards": [{…}]``                          to ``resumed``: a :class:`StagedShard` each
``… "begun": b``                               to ``begin``: false if a save is in flight
``… "committed": {…} | null``                  to ``wait`` and ``begin``: the last checkpoint that
                                               this connection's saves have become
``… "replicated": u``                          to the same, and to a ``wait`` that was too long: the
                                               uuid of the last save whose shard of this rank
                                               another node has in its memory, too, or ""
``… "shards": [{"rank": g, "files": […]}]``    to ``recall``: one descriptor per shard beside it
``… "error": "…", "kind": "save"``             not done: that save, or one before it, came to
                                               nothing; sent once. ``kind`` "timeout": the wait was
                                               too long; "request": the agent cannot make sense of
                                               it; "refused": it does not serve this worker
``{"op": "over", "uuid": u,                    unasked: the save that was staged last, ``u``, is
"committed": …, "replicated": …}``             over, and well, so nothing need be waited for. Not
                                               sent where something came to nothing
=============================================  ====================================================

A shard is written in the background, with the file names and the manifest of
elaunch.checkpoint.storage.storage; the agent of rank 0's node commits when all manifests are
written. The end of the connection ends nothing that was staged. A shard that was begun and not
staged is forgotten with the worker, and the save it belongs to is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from elaunch.errors import CheckpointError

if TYPE_CHECKING:
    from elaunch.checkpoint.records import Committed, ShardHeader, Stage

Kind = Literal["stop", "resize"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
WIRE: Final = 5
MOST_SECONDS: Final = 1e9


class Notice(NamedTuple):
    """Why the workers are asked to save and to end, and whether the job goes on at once.

    ``grace`` is the seconds that they have, from when this was sent, where the platform's deadline
    is known; None: those of ``--shutdown-timeout``.
    """

    reason: str
    kind: Kind = "stop"
    grace: float | None = None


def notice_to_json(notice: Notice) -> dict[str, str | float]:
    """Return the fields of a notice, as messages and the round's store have them."""
    fields: dict[str, str | float] = {"reason": notice.reason, "kind": notice.kind}
    return fields if notice.grace is None else {**fields, "grace": notice.grace}


def seconds_of(value: object) -> float | None:
    """Return a number of seconds that a message holds; None for anything else."""
    known = type(value) in (int, float) and 0.0 <= value <= MOST_SECONDS  # type: ignore[operator]
    return float(value) if known else None  # type: ignore[arg-type]


AT_ONCE: Final = 64
"""Shards that are asked for in one ``recall``: each brings a descriptor."""
ANSWER_S: Final = 30.0
"""Seconds for the agent to answer what it need not wait for."""
MARGIN_S: Final = 5.0
"""Seconds that a worker waits longer than the timeout that it sent, for the agent's answer."""
CLOSE_S: Final = 1800.0
"""Seconds that the end of a script waits for its last save."""

Extents = tuple[tuple[int, int], ...]
Files = tuple[tuple[str, Extents], ...]


@dataclass(frozen=True)
class StagedShard:
    """One rank's shard of a checkpoint, as it lies in the memory that the agent has lent.

    Attributes:
        stage: which checkpoint the shard belongs to; the same on all ranks.
        header: of which rank, of how many, and that rank's metadata.
        images: the files to be: path below the checkpoint's directory, and where its bytes lie in
            the memory: (offset, size) pairs, in the order of the file.
        extra: further fields of the checkpoint's metadata.json (rank 0's counts).
        protected: names of checkpoints that stay whatever the rule is: the one resumed from.
        local: every node has a directory of its own (--checkpoint-local).
        loads: the script loads the latest by a call of all ranks, which takes it from memory.
    """

    stage: Stage
    header: ShardHeader
    images: Files
    extra: Mapping[str, Any] = field(default_factory=dict)
    protected: tuple[str, ...] = ()
    local: bool = False
    loads: bool = False

    @property
    def size(self) -> int:
        """Return how many bytes of memory the shard takes."""
        return sum(size for _, extents in self.images for _, size in extents)

    @property
    def end(self) -> int:
        """Return the first byte of the memory behind the shard."""
        return max((at + size for _, extents in self.images for at, size in extents), default=0)


def shard_from_json(fields: Mapping[str, Any]) -> StagedShard:
    """Return the shard whose ``asdict`` was sent; raise ValueError for anything else."""
    from elaunch.checkpoint.records import ShardHeader, Stage

    try:
        return StagedShard(
            stage=Stage(**fields["stage"]),
            header=ShardHeader(**fields["header"]),
            images=files_from_json(fields["images"]),
            extra=dict(fields["extra"]),
            protected=tuple(str(name) for name in fields["protected"]),
            local=fields["local"] is True,
            loads=fields.get("loads") is True,
        )
    except (KeyError, TypeError, IndexError, CheckpointError) as error:
        raise ValueError(f"this is no shard of a checkpoint: {error!r}") from error


def files_from_json(fields: list[list[Any]]) -> Files:
    """Return where the files of a shard lie, as it was sent; else raise TypeError or ValueError."""
    return tuple(
        (str(path), tuple((int(at), int(size)) for at, size in extents)) for path, extents in fields
    )


def committed_to_json(done: Committed | None) -> dict[str, Any] | None:
    """Return the fields of a committed checkpoint as they are sent."""
    if done is None:
        return None
    return {**vars(done), "place": str(done.place)}


def committed_from_json(fields: Mapping[str, Any] | None) -> Committed | None:
    """Return what :func:`committed_to_json` made."""
    from elaunch.checkpoint.records import Committed

    if fields is None:
        return None
    place = fields["place"]
    return Committed(**{**fields, "place": place if "://" in place else Path(place)})
