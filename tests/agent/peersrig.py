"""Agents of one job as their peers see them: threads of this process, real sockets."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from elaunch.agent.peers.directory import LocalCopies
from elaunch.agent.peers.peers import Peers
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.rendezvous.plan import Node, NodeStatus, Plan

HERE = "127.0.0.1"


@contextmanager
def agents(count: int, secret: bytes | None = b"s") -> Iterator[list[Peers]]:
    """Yield agents that know each other as the nodes of one plan."""
    with ExitStack() as stack:
        made = [Peers(HERE, "digits", secret) for _ in range(count)]
        for peers in made:
            peers.start()
            stack.callback(peers.close)
        tell(made)
        yield made


def tell(made: list[Peers], job: str | None = None) -> Plan:
    """Have all of them hear of a plan of which they are the nodes."""
    nodes = tuple(
        Node(f"a{number}", f"node{number}", HERE, 1, "default", peers.port)
        for number, peers in enumerate(made)
    )
    plan = Plan(job or secrets.token_hex(16), round=0, phase="running", nodes=nodes)
    for number, peers in enumerate(made):
        peers.on_plan(plan, f"a{number}")
    return plan


@contextmanager
def local_nodes(
    tmp_path: Path, count: int, glob: str | None = None
) -> Iterator[tuple[list[Peers], list[LocalCopies], list[Path]]]:
    """Yield agents of nodes that each serve a checkpoint directory of their own."""
    with agents(count) as made:
        roots = [tmp_path / f"disk{number}" for number in range(count)]
        for root in roots:
            root.mkdir()
        copies = [
            LocalCopies(one, root, glob, run_id="digits", finish=finish)
            for one, root in zip(made, roots, strict=True)
        ]
        yield made, copies, roots


def finish(root: Path | str, run_id: str | None) -> None:
    """Bring stages of dead rounds to an end."""
    open_storage(root, local=True).finish_stages(run_id)


def members(made: list[Peers]) -> dict[str, NodeStatus]:
    """Return what the agents say of themselves between two rounds."""
    return {
        f"a{number}": NodeStatus(f"node{number}", HERE, 0, 1, state="ready", peer_port=peers.port)
        for number, peers in enumerate(made)
    }


def content(root: Path) -> dict[str, bytes]:
    """Return every visible file below a directory, by its relative path."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.relative_to(root).parts[0].startswith(".")
    }
