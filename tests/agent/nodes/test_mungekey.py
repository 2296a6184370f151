"""How agents settle a key by MUNGE: real munged, real TCPStores, a real etcd."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.nodes import connect
from elaunch.agent.nodes.store import StoreOpener
from elaunch.config.rendezvous import RendezvousSettings
from elaunch.errors import StoreDenied
from elaunch.rendezvous import munge
from elaunch.rendezvous.munge import MungeKey
from elaunch.store.etcd.cluster import EtcdCluster
from elaunch.store.protocol import Store
from elaunch.store.tcp.connection import IDENTITY
from tests import launching, munged
from tests.attacks.stranger import stranger, stranger_in_etcd
from tests.etcdserver import Cluster, etcd
from tests.munged import NOBODY, SRUN, Munged

NO_KEY = "shares no key by MUNGE, which works on this node"
REMEDY = "give --rdzv-secret-file FILE, the same on all nodes"


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Munged]:
    """Run a munged, and have this process find it."""
    made = Munged()
    monkeypatch.setenv("PATH", made.path)
    yield made
    made.close()


class Agents:
    """Agents that open the store of one job; the first one hosts it, where one has to."""

    def __init__(self, settings: RendezvousSettings, stack: ExitStack) -> None:
        self._settings = settings
        self._stack = stack

    def one_more(self, run_id: str = "job") -> tuple[StoreOpener, Store]:
        """Return an agent and its store."""
        made = StoreOpener(self._settings, run_id, lambda _: None, MungeKey(run_id))
        self._stack.callback(made.close)
        made.prepare()
        store = made.open()
        self._stack.callback(store.close)
        return made, store


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test opened."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def port() -> int:
    """Return a port that was free a moment ago."""
    return launching.free_port()


@pytest.fixture
def around_tcp(port: int, stack: ExitStack) -> Agents:
    """Return agents that meet in a TCPStore."""
    return Agents(RendezvousSettings("c10d", (("127.0.0.1", port),), connect_timeout=60.0), stack)


@pytest.fixture
def server(tmp_path: Path, stack: ExitStack) -> Cluster:
    """Run an etcd."""
    return stack.enter_context(etcd(tmp_path / "etcd"))


@pytest.fixture
def around_etcd(server: Cluster, stack: ExitStack) -> Agents:
    """Return agents that meet in an etcd."""
    endpoints = server.place().endpoints
    return Agents(RendezvousSettings("etcd", endpoints, connect_timeout=60.0), stack)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["around_tcp", "around_etcd"])
def test_the_agents_of_a_job_have_one_key(
    place: str, request: pytest.FixtureRequest, daemon: Munged, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is told that the store is open."""
    agents: Agents = request.getfixturevalue(place)
    found = {agents.one_more()[0].secret for _ in range(3)}
    assert len(found) == 1 and len(found.pop() or b"") == munge.KEY_BYTES
    assert caplog.messages == []


def test_a_host_that_is_started_anew_gives_a_new_key(around_tcp: Agents, daemon: Munged) -> None:
    """Its clients take it with the new store."""
    host, hosted = around_tcp.one_more()
    client, store = around_tcp.one_more()
    before = client.secret
    hosted.close()
    host.close()
    again, _ = around_tcp.one_more()
    assert again.hosts
    store.close()
    client.open().close()
    assert client.secret == again.secret != before == host.secret


def test_a_static_job_has_a_key(stack: ExitStack, port: int, daemon: Munged) -> None:
    """Although its store is elsewhere than at the master's port."""
    from torch.distributed import TCPStore

    masters = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    publish = partial(masters.set, IDENTITY)
    found = []
    for rank in range(2):
        settings = RendezvousSettings(
            "static", (("127.0.0.1", port),), is_host=rank == 0, node_hint=rank
        )
        made = StoreOpener(settings, "job", publish, MungeKey("job"))
        stack.callback(made.close)
        made.prepare()
        stack.callback(made.open().close)
        found.append(made.secret)
    assert found[0] is not None and found[0] == found[1]


MPIRUN = {"OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "changes", "takes_part"),
    [
        (SRUN, {}, True),
        (SRUN, {"secret": b"given"}, False),
        (SRUN, {"backend": "etcd"}, True),
        (SRUN, {"backend": "etcd", "etcd": EtcdCluster(user="u", password="p")}, False),
        ({name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID")}, {}, False),
        (SRUN | MPIRUN, {}, False),
        (MPIRUN, {}, False),
        ({}, {}, False),
    ],
    ids="srun secret etcd password batch-script mpirun-in-slurm mpirun none".split(),
)
def test_agents_of_srun_without_a_secret_ask_munge(
    environ: dict[str, str], changes: dict[str, Any], takes_part: bool
) -> None:
    """A batch script has no step, and mpirun's processes are not srun's."""
    given = {"backend": "c10d", "endpoints": (("h", 1),)} | changes
    settings = RendezvousSettings(**given)
    assert (connect._key_by_munge("job", settings, environ) is not None) == takes_part


@pytest.mark.slow
def test_other_agents_do_not_load_what_asks_munge() -> None:
    """They start as before."""
    code = (
        "import sys, elaunch.agent.nodes.connect; print([m for m in sys.modules if 'munge' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.slow
def test_an_etcd_that_was_wiped_gets_the_key_of_who_comes_first(
    tmp_path: Path, stack: ExitStack, daemon: Munged
) -> None:
    """The others of the job take it, whatever they had."""
    found = []
    keys = [MungeKey("job") for _ in range(2)]
    for name in ("before", "after"):
        server = stack.enter_context(etcd(tmp_path / name))
        settings = RendezvousSettings("etcd", server.place().endpoints, connect_timeout=60.0)
        for key in keys:
            opening = StoreOpener(settings, "job", lambda _: None, key)
            stack.callback(opening.open().close)
            found.append(key.secret)
        if name == "before":
            keys.append(MungeKey("job"))
    assert found[0] is not None and found == [found[0]] * 5


@pytest.mark.slow
def test_without_munge_the_store_is_open_as_before(
    around_tcp: Agents, daemon: Munged, caplog: pytest.LogCaptureFixture
) -> None:
    """The host says so in its line, and why; its clients on such nodes agree."""
    daemon.stop()
    opening = around_tcp.one_more()[0]
    assert opening.hosts and opening.secret is None
    (line,) = caplog.messages
    assert "the store of this job's agents is open: any local user can" in line
    assert "--rdzv-secret-file" in line and "Slurm's MUNGE would, but munge: Error" in line
    assert around_tcp.one_more()[0].secret is None
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_a_frozen_munged_costs_seconds(
    around_tcp: Agents,
    daemon: Munged,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the store is open."""
    monkeypatch.setattr(munge, "DEADLINE", 0.5)
    daemon.freeze()
    began = time.monotonic()
    assert around_tcp.one_more()[0].secret is None
    assert time.monotonic() - began < 30.0
    assert "munge has not answered for 0.5 s" in caplog.messages[0]


@pytest.mark.slow
def test_a_client_without_munge_is_told(
    around_tcp: Agents, daemon: Munged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not read a plan of the others."""
    around_tcp.one_more()
    monkeypatch.setenv("PATH", str(daemon.key.parent))
    with pytest.raises(StoreDenied, match="is refused: unmunge is not on the PATH; or give --rdzv"):
        around_tcp.one_more()


@pytest.mark.slow
def test_a_host_without_munge_is_told_of(
    around_tcp: Agents, daemon: Munged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its clients that have it: a stranger may have removed the key."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(daemon.key.parent))
        around_tcp.one_more()
    with pytest.raises(StoreDenied, match=NO_KEY) as caught:
        around_tcp.one_more()
    assert REMEDY in str(caught.value)


def test_in_etcd_an_agent_without_munge_is_told(
    around_etcd: Agents, daemon: Munged, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it comes first, with a key to be, or later."""
    daemon.stop()
    assert around_etcd.one_more("one")[0].secret is None
    assert ["share no key by MUNGE: munge: Error" in line for line in caplog.messages] == [True]
    other = Munged()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", other.path)
            assert around_etcd.one_more("two")[0].secret is not None
        with pytest.raises(StoreDenied, match="unmunge: Error: Failed to access"):
            around_etcd.one_more("two")
    finally:
        other.close()


# ── strangers ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (b"garbage", "is refused: it is no credential of MUNGE"),
        (None, "the user with uid 65534 has made it, and not 0"),
    ],
    ids=["garbage", "anothers"],
)
def test_what_a_stranger_puts_in_place_of_the_key_is_refused(
    around_etcd: Agents, server: Cluster, daemon: Munged, found: bytes | None, problem: str
) -> None:
    """By agents that come; those that have the key go on with it."""
    munged.other_users_needed()
    first, _ = around_etcd.one_more()
    key = first.secret
    assert key is not None
    if found is None:
        payload = b'{"elaunch": 1, "run_id": "job", "key": "%b"}' % (b"73" * munge.KEY_BYTES)
        found = daemon.credential(payload, uid=NOBODY)
    with stranger_in_etcd(server, "job") as other:
        other.put("shared", found)
        assert other.store.shared() == found
    with pytest.raises(StoreDenied, match=problem):
        around_etcd.one_more()
    assert first.secret == key


@pytest.mark.slow
def test_a_stranger_does_not_choose_the_key_of_a_hosted_store(
    around_tcp: Agents, port: int, daemon: Munged
) -> None:
    """Neither with a credential of an earlier job, nor with none: the host's is there before."""
    old = munge.make(b"o" * munge.KEY_BYTES, "job")
    host, _ = around_tcp.one_more()
    with stranger(port, "job") as other:
        assert [other.store.shared(one) == old for one in (old, b"x", b"")] == [False] * 3
    assert around_tcp.one_more()[0].secret == host.secret != b"o" * munge.KEY_BYTES
