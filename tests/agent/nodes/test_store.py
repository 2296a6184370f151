"""How an agent gets to the agents' store, with real sockets and a real TCPStore."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from elaunch.agent.nodes.store import StoreOpener
from elaunch.config.rendezvous import RendezvousSettings
from elaunch.errors import (
    StoreClosed,
    StoreDenied,
    StoreReplaced,
    StoreUnreachable,
    UsageError,
)
from elaunch.store.protocol import Store
from elaunch.store.tcp import client as tcp
from elaunch.store.tcp.connection import IDENTITY
from tests import launching
from tests.launching import wait_until

OTHER_JOB = """
import signal, socket, sys
from elaunch.store.tcp import client as tcp
store = tcp.host(socket.create_server(("127.0.0.1", int(sys.argv[1]))), "first")
signal.pause()
"""


def hello(port: int) -> dict[str, Any] | None:
    """Return what the store on a port says of itself; None if there is none yet."""
    try:
        return tcp.identify("127.0.0.1", port, 1.0)
    except StoreUnreachable:
        return None


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test opened."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def free_port() -> int:
    """Return a port that was free a moment ago."""
    return launching.free_port()


def meeting(port: int, **changes: Any) -> RendezvousSettings:
    """Return settings for an endpoint on this machine."""
    given = {"backend": "c10d", "endpoints": (("127.0.0.1", port),), "connect_timeout": 60.0}
    return RendezvousSettings(**{**given, **changes})


def opening(settings: RendezvousSettings, stack: ExitStack, run_id: str = "job") -> StoreOpener:
    """Return the opening of one agent."""
    made = StoreOpener(settings, run_id, lambda _: None)
    stack.callback(made.close)
    return made


@pytest.mark.slow
def test_the_first_on_a_machine_hosts_and_the_second_is_its_client(
    stack: ExitStack, free_port: int
) -> None:
    """Although the endpoint is this machine's for both."""
    one, two = (opening(meeting(free_port), stack) for _ in range(2))
    one.prepare()
    stores = [one.open()]
    stack.callback(stores[0].close)
    two.prepare()
    stores.append(two.open())
    stack.callback(stores[1].close)
    assert (one.hosts, two.hosts) == (True, False)
    stores[1].enrol("aa", b"a record", 60.0)
    wait_until(lambda: set(stores[0].members()) == {"aa"})


@pytest.mark.slow
def test_an_open_store_is_said_to_be_open(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, free_port: int
) -> None:
    """Once, by the agent that hosts; not by its clients, and not where records are signed."""
    said = "the store of this job's agents is open: any local user can stop or hijack this job"
    one, two = (opening(meeting(free_port), stack) for _ in range(2))
    one.prepare()
    assert [said in line and "--rdzv-secret-file" in line for line in caplog.messages] == [True]
    stack.callback(one.open().close)
    two.prepare()
    one.close()
    signed = opening(meeting(0, secret=b"s"), stack)
    signed.prepare()
    assert len(caplog.messages) == 1
    wide = opening(meeting(0, endpoints=(("0.0.0.0", 0),)), stack)
    wide.prepare()
    assert re.search("open: whoever reaches port [0-9]+ of this machine", caplog.messages[-1])


@pytest.mark.slow
def test_a_stranger_on_the_port_is_named(stack: ExitStack) -> None:
    """Before anything starts, and within seconds."""
    stranger = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def answer() -> None:
        while True:
            try:
                connection, _ = stranger.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    port = stranger.getsockname()[1]
    with pytest.raises(UsageError) as caught:
        opening(meeting(port), stack).prepare()
    assert f"port {port} of 127.0.0.1 is in use by process {os.getpid()} " in str(caught.value)
    assert "give another port" in str(caught.value)


@pytest.mark.slow
def test_the_store_of_another_job_is_named(stack: ExitStack, free_port: int) -> None:
    """Two jobs with one endpoint do not mix."""
    other = subprocess.Popen([sys.executable, "-c", OTHER_JOB, str(free_port), "elaunch"])
    stack.callback(other.wait)
    stack.callback(other.kill)
    wait_until(lambda: hello(free_port), 120.0, what="the other job's store")
    second = opening(meeting(free_port), stack, "second")
    second.prepare()
    with pytest.raises(StoreDenied, match="it belongs to the job 'first', not to 'second'"):
        second.open()


@pytest.mark.slow
def test_a_static_node_says_whom_it_waits_for(stack: ExitStack, free_port: int) -> None:
    """Nobody is at the master's port."""
    settings = meeting(free_port, backend="static", is_host=False, node_hint=1, connect_timeout=0.5)
    with pytest.raises(StoreUnreachable, match="is it started with --node-rank 0"):
        opening(settings, stack).open()


def test_a_static_node_reads_where_the_store_is(stack: ExitStack, free_port: int) -> None:
    """Node 0 has a word hosted at the master's port; the store itself is elsewhere."""
    words: list[str] = []
    host = StoreOpener(
        meeting(free_port, backend="static", is_host=True, node_hint=0),
        "job",
        words.append,
    )
    stack.callback(host.close)
    host.prepare()
    stack.callback(host.open().close)
    said = json.loads(words[0])
    assert said["run_id"] == "job"
    assert said["store"] not in (0, free_port)


def test_who_looks_for_the_store_stops_when_the_agent_ends(
    stack: ExitStack, free_port: int
) -> None:
    """A signal ends an agent at once, whatever it waits for."""
    client = opening(meeting(free_port, is_host=False, connect_timeout=600.0), stack)
    threading.Timer(0.3, client.close).start()
    with pytest.raises(StoreClosed):
        client.open()


def masters_port(port: int) -> Callable[[str], None]:
    """Host a store at the master's port; return what publishes a text there."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    return lambda text: store.set(IDENTITY, text)


def test_a_static_host_that_is_started_again_is_found_at_its_new_port(
    stack: ExitStack, free_port: int
) -> None:
    """The others ask at the master's port, the one that all know, when nothing listens any more."""
    publish = masters_port(free_port)

    def host() -> tuple[StoreOpener, Store]:
        settings = meeting(free_port, backend="static", is_host=True)
        made = StoreOpener(settings, "job", publish)
        made.prepare()
        return made, made.open()

    first, store = host()
    client = opening(meeting(free_port, backend="static", is_host=False), stack)
    entry = client.open()
    stack.callback(entry.close)
    entry.enrol("aa", b"a record", 60.0)
    store.close()
    first.close()
    with pytest.raises(StoreUnreachable) as caught:
        entry.renew()
    assert caught.value.nobody_decides
    second, store = host()
    stack.callback(second.close)
    stack.callback(store.close)
    with pytest.raises(StoreReplaced, match="started anew at another port"):
        entry.renew()
    again = client.open()
    stack.callback(again.close)
    again.enrol("ab", b"a record", 60.0)
    wait_until(lambda: "ab" in store.members())
