"""Hosts the TCPStore of each round for the workers' ``init_process_group("env://")``.

One process per agent, forked from the server; it imports torch itself where the server has not. It
gets a listening socket per round, bound by the agent, and drops the last round's store when the
next one comes: a store that is reused over restarts still holds the dead group's keys, which makes
the next group fail or hang (docs/torchrun.md). Workers may connect before the store exists; the
kernel holds their connections.

One Unix socket joins it to the server: ``store`` with the listening socket in, perhaps
``store_failed`` out; ``drop`` in, ``dropped`` out: with ``--master-port`` the next round's store is
on the same port, and no worker may meet the old one there. It ends when that socket closes.
"""

from __future__ import annotations

import os
import socket
import sys

from elaunch.server import processes, protocol
from elaunch.store.tcp.connection import HELLO


def host_stores(sock: socket.socket) -> None:
    """Serve rounds until ``sock`` closes; imports torch."""
    receiver = protocol.Receiver(sock)
    stores: list[object] = []
    while (received := receiver.receive()) is not None:
        message, files = received
        stores.clear()  # nothing of the dead round answers any more
        if message["op"] == "drop":
            protocol.send(sock, {"op": "dropped"})
            continue
        try:
            stores.append(_open_store(message, files[0]))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            failed = {"op": "store_failed", "round": message["round"], "problem": problem}
            protocol.send(sock, failed)


def _open_store(message: protocol.Message, listening: int) -> object:
    from torch.distributed import TCPStore

    with socket.socket(fileno=os.dup(listening)) as copy:
        port = copy.getsockname()[1]
    store = TCPStore(
        message["host"],
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    if message["hello"]:
        store.set(HELLO, message["hello"])
    return store


def run_forked(sock: socket.socket, server_pid: int) -> None:
    """Be the store host in a fork of the server; never returns."""
    processes.die_with_parent(server_pid)
    os.setsid()
    try:
        host_stores(sock)
    finally:
        sys.stderr.flush()
        os._exit(0)
