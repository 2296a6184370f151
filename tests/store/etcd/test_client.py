"""What the etcd store does when etcd is hurt, locked, or not there; with real etcd."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from elaunch.errors import LeaseLost, StoreDenied, StoreError, StoreUnreachable
from elaunch.store.etcd import client, imports
from elaunch.store.etcd.client import EtcdStore
from elaunch.store.etcd.cluster import EtcdCluster, keys_of, run_id_of
from elaunch.store.etcd.errors import Outcome, Refusal, refusal
from elaunch.store.protocol import Change, Post
from tests.etcdserver import Cluster, Member, make_identity, own_address
from tests.etcdserver import etcd as serve
from tests.launching import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent.parent
LONG = 30.0
"""Seconds that something may take on a busy machine before the test gives it up."""


class Agent:
    """A store with a heart: renews every half second, and remembers how that went."""

    def __init__(self, store: EtcdStore, name: str, ttl: float = LONG) -> None:
        self.store, self.name = store, name
        self.renewed = 0
        self.lost: StoreError | None = None
        self.unreachable: list[StoreUnreachable] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        store.enrol(name, b"here", ttl)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing, and close the store."""
        self._stop.set()
        self._thread.join(LONG)
        self.store.close()

    def _beat(self) -> None:
        while not self._stop.wait(0.5):
            try:
                self.store.renew()
            except StoreUnreachable as error:
                self.unreachable.append(error)
            except StoreError as error:
                self.lost = error
                return
            else:
                self.renewed += 1


@pytest.fixture
def opened() -> Iterator[Callable[..., EtcdStore]]:
    """Open stores that are closed at the end: ``opened(place, run_id="job")``."""
    with ExitStack() as stack:

        def connect(place: EtcdCluster, run_id: str = "job") -> EtcdStore:
            store = client.connect(place, run_id, deadline=LONG)
            assert isinstance(store, EtcdStore)
            stack.callback(store.close)
            return store

        yield connect


@pytest.fixture
def agents() -> Iterator[Callable[..., Agent]]:
    """Start agents that are ended at the end: ``agents(place, name)``."""
    with ExitStack() as stack:

        def start(place: EtcdCluster, name: str, ttl: float = LONG) -> Agent:
            store = client.connect(place, "job", deadline=LONG)
            assert isinstance(store, EtcdStore)
            agent = Agent(store, name, ttl)
            stack.callback(agent.close)
            return agent

        yield start


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of three members with production's timings."""
    with serve(tmp_path / "etcd", 3) as cluster:
        yield cluster


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Cluster]:
    """One member."""
    with serve(tmp_path / "etcd") as cluster:
        yield cluster


def retry(call: Callable[[], object], denied: type[StoreError] = StoreUnreachable) -> object:
    """Return what ``call`` returns as soon as etcd can be reached, and it is something."""
    until = time.monotonic() + LONG
    while True:
        try:
            found = call()
        except (StoreUnreachable, denied):
            found = None
        if found:
            return found
        assert time.monotonic() < until
        threading.Event().wait(0.05)


def took(cluster: Cluster, put: object, member: Member) -> bool:
    """Tell whether a member has taken a put; while it elects a leader it takes none."""
    grpc = imports.load().grpc
    try:
        cluster.call("KV", "Put", put, member)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        return False
    return True


def connected(
    cluster: Cluster, agents: Callable[..., Agent], member: Member, ttl: float = LONG
) -> Agent:
    """Return an agent that talks to ``connection``, and knows the others."""
    for number in range(100):
        agent = agents(cluster.place(), f"at{number}", ttl)
        if cluster.member_at(agent.store.member) is member:
            return agent
        agent.close()
        agent.store.close()
    raise AssertionError("an agent begins at any member")


# ── members lost ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "hurt"),
    [
        ("leader", "kill"),
        ("follower", "freeze"),
        pytest.param("leader", "freeze", marks=pytest.mark.trial),
        pytest.param("follower", "kill", marks=pytest.mark.trial),
    ],
)
def test_a_member_is_lost(
    three: Cluster, agents: Callable[..., Agent], which: str, hurt: str
) -> None:
    """No lease is lost, and everything goes on, for who was connected to it and who was not.

    A leader that was frozen for longer than a lease still revokes what ran out by its own clock, in
    etcd before 3.4.29 and 3.5.11 (etcd-io/etcd#15247). So the leases are longer then, and that they
    are renewed is seen while it is frozen.
    """
    leader = three.leader()
    victim = leader if which == "leader" else next(m for m in three.members if m is not leader)
    ttl = 4 * LONG if (which, hurt) == ("leader", "freeze") else LONG
    first = connected(three, agents, victim, ttl)
    others = [agents(three.place(), f"n{number}", ttl) for number in range(4)]
    everyone = [first, *others]
    assert first.store.await_leadership(first.name, LONG)
    assert first.store.publish(1, b"before")
    assert [a.store.follow(0, LONG) for a in everyone] == [Post(1, b"before")] * 5
    names = {change.name for change in first.store.changes(first.name, LONG)}
    assert {a.name for a in everyone} <= names

    victim.kill() if hurt == "kill" else victim.freeze()
    retry(lambda: first.store.publish(2, b"after"))
    assert [retry(lambda a=a: a.store.follow(1, 5.0)) for a in everyone] == [Post(2, b"after")] * 5  # type: ignore[misc]
    retry(lambda: others[0].store.update(b"changed") is None)
    seen: list[Change] = []
    while Change("n0", b"changed", "put") not in seen:
        seen += retry(lambda: first.store.changes(first.name, 5.0))  # type: ignore[arg-type]
    all_renew(everyone)
    victim.start() if hurt == "kill" else victim.thaw()
    all_renew(everyone)
    assert not [
        change
        for change in seen
        if change.name in {a.name for a in everyone[1:]} and change.value is None
    ]


@pytest.mark.slow
def test_most_members_are_lost(three: Cluster, agents: Callable[..., Agent]) -> None:
    """Killed: nobody can decide. Frozen: they may, for all we know. Both end when they are back."""
    agent = agents(three.place(), "n0")
    gone = three.members[:2]
    for member in gone:
        member.freeze()
    with pytest.raises(StoreUnreachable) as frozen:
        while True:
            agent.store.latest()
    assert "no answer" in str(frozen.value)
    for member in gone:
        member.kill()
    retry(lambda: any(error.nobody_decides for error in agent.unreachable))
    for member in gone:
        member.start()
    retry(lambda: agent.store.latest() is None)
    assert three.leader() in three.members


@pytest.mark.slow
def test_etcd_is_down_and_comes_back(one: Cluster, agents: Callable[..., Agent]) -> None:
    """All refuse: nobody decides. On the same port again, the same lease and watches go on."""
    first, second = agents(one.place(), "first"), agents(one.place(), "second")
    assert first.store.await_leadership("first", LONG)
    assert first.store.publish(1, b"one")
    assert second.store.follow(0, LONG) == Post(1, b"one")
    assert len(first.store.changes("first", LONG)) >= 1
    one.members[0].kill()
    address = "{}:{}".format(*one.members[0].endpoint)
    with pytest.raises(StoreUnreachable) as caught:
        retry_refused(second.store)
    assert caught.value.nobody_decides
    assert f"{address}: connection refused" in str(caught.value)
    with pytest.raises(StoreUnreachable) as waiting:
        second.store.follow(1, LONG)
    assert waiting.value.nobody_decides
    one.members[0].start()
    retry(lambda: first.store.publish(2, b"two"))
    assert retry(lambda: second.store.follow(1, 5.0)) == Post(2, b"two")
    assert first.lost is None and second.lost is None


def all_renew(agents: Sequence[Agent]) -> None:
    """Wait until each agent has renewed its lease once more; none may have lost it."""
    renewed = [a.renewed for a in agents]
    retry(lambda: all(a.lost or a.renewed > n for a, n in zip(agents, renewed, strict=True)))
    assert [a.lost for a in agents] == [None] * len(agents)


def retry_refused(store: EtcdStore) -> None:
    """Ask until the port is refused: the first calls may still see the connection break."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            store.latest()
        except StoreUnreachable as error:
            if error.nobody_decides:
                raise


@pytest.mark.slow
def test_a_leader_that_does_not_stay(
    three: Cluster, agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    """Entries never expire then: the agents say so once, not at a single change of the leader.

    They can then evict each other.
    """
    agent, *others = (agents(three.place(), f"n{number}") for number in range(3))
    assert agent.store.await_leadership("n0", 0.0)
    for number, other in enumerate(others, 1):
        assert not other.store.await_leadership(f"n{number}", 0.0)
    retry(lambda: agent.renewed)  # which tells it of the first leader
    for moves in range(5):
        said = [record.message for record in caplog.records if "its leader" in record.message]
        assert agent.store.unsteady_leader() == ("n0" if moves >= 1 else "")
        assert bool(said) == (moves >= 3)
        assert moves >= 3 or not others[1].store.evict("n0")
        renewed = agent.renewed
        three.move_leader()
        retry(lambda before=renewed: agent.renewed > before + 3)  # some were under way
    told = [record.message for record in caplog.records if "its leader" in record.message]
    assert len(told) == 3  # each agent once
    assert "has changed its leader 3 times in 93 s" in told[0]
    one, two = others
    assert two.store.unsteady_leader() == "n0" and two.store.evict("n0")
    retry(lambda: agent.lost)
    assert two.store.unsteady_leader() == "n1" and two.store.evict("n1")
    retry(lambda: one.lost)
    assert two.store.await_leadership("n2", LONG) and two.lost is None
    assert not one.store.evict("n2")  # it is no member any more


@pytest.mark.slow
def test_what_was_missed_is_compacted_away(
    three: Cluster, opened: Callable[..., EtcdStore], agents: Callable[..., Agent]
) -> None:
    """Whoever hung on a frozen member reads everything again, and tells what is different."""
    reader = opened(three.place())
    frozen = three.member_at(reader.member)
    rest = tuple(m.endpoint for m in three.members if m is not frozen)
    stays, leaves = (
        agents(three.place(endpoints=rest), "stays"),
        opened(three.place(endpoints=rest)),
    )
    leaves.enrol("leaves", b"", LONG)
    reader.enrol("reader", b"", 2 * LONG)
    assert reader.await_leadership("reader", LONG)
    assert reader.publish(1, b"1")
    assert reader.follow(0, LONG) == Post(1, b"1")
    found = {change.name for change in reader.changes("reader", LONG)}
    assert found == {"stays", "leaves", "reader"}
    frozen.freeze()
    other = next(m for m in three.members if m is not frozen)
    plan = keys_of("/elaunch", "job").plan
    for version in range(2, 6):
        put = imports.load().rpc.PutRequest(key=plan, value=b"%d\n%d" % (version, version))
        retry(functools.partial(took, three, put, other))
    retry(lambda: stays.store.update(b"new") is None)
    leaves.withdraw()
    three.compact(other)
    frozen.kill()
    post = reader.follow(1, LONG)
    while post is not None and post.version < 5:  # where it had left that member
        post = reader.follow(post.version, LONG)
    assert post == Post(5, b"5")
    changes: list[Change] = []
    while len(changes) < 2:
        changes += reader.changes("reader", LONG)
    assert sorted(changes, key=lambda change: change.name) == [
        Change("leaves", None, "left"),
        Change("stays", b"new", "put"),
    ]


def test_nobody_is_there() -> None:
    """The message names every endpoint and why each is of no use; the deadline holds."""
    host = own_address()
    place = EtcdCluster(((host, free_port(host)), ("no-such-host.invalid", 2379)))
    began = time.monotonic()
    with pytest.raises(StoreUnreachable) as caught:
        client.connect(place, "job", deadline=1.0)
    assert time.monotonic() - began < LONG
    text = str(caught.value)
    assert text.startswith("within 1 s no etcd answers")
    assert f"{place.addresses[0]}: connection refused" in text
    assert "no-such-host.invalid:2379: " in text
    assert not caught.value.nobody_decides


# ── what stays, and for how long ─────────────────────────────────────────────────────────────────


def test_what_a_finished_job_leaves_has_a_lease(
    one: Cluster, opened: Callable[..., EtcdStore]
) -> None:
    """The plan and what all share for a minute, the rest for as long as the agents' leases."""
    store = opened(one.place(), "run/1")
    assert store.shared(b"a key") == b"a key"
    store.enrol("n0", b"here", LONG)
    assert store.await_leadership("n0", LONG)
    assert store.publish(1, b"over")
    assert client.run_ids(one.place()) == ["run/1"]
    store.clear()
    store.clear()
    store.withdraw()
    assert store.latest() == Post(1, b"over")
    rpc = imports.load().rpc
    request = rpc.RangeRequest(key=b"\0", range_end=b"\0")
    kvs = one.call("KV", "Range", request).kvs
    assert {kv.key.rpartition(b"/")[2] for kv in kvs} == {b"board", b"n0", b"shared"}
    for kv in kvs:
        left = one.call("Lease", "LeaseTimeToLive", rpc.LeaseTimeToLiveRequest(ID=kv.lease)).TTL
        assert 0 <= left <= 60


def test_a_job_with_the_same_run_id_goes_on(one: Cluster, opened: Callable[..., EtcdStore]) -> None:
    """After ``clear`` the versions count on; the new post, and what all share, have no lease."""
    store = opened(one.place())
    assert store.shared(b"a key") == b"a key"
    store.enrol("n0", b"", 5.0)
    assert store.await_leadership("n0", LONG)
    assert store.publish(1, b"over", b"nodes")
    store.clear()
    assert store.publish(2, b"new", b"nodes")
    rpc = imports.load().rpc
    assert opened(one.place()).shared(b"another") == b"a key"
    keys = keys_of("/elaunch", "job")
    for key in (keys.plan, keys.nodes, keys.shared):
        assert one.call("KV", "Range", rpc.RangeRequest(key=key)).kvs[0].lease == 0


def test_a_board_that_was_removed_begins_anew(
    one: Cluster, opened: Callable[..., EtcdStore]
) -> None:
    """Who has seen version 2 of the old plan is told of version 1 of the next."""
    store = opened(one.place())
    store.enrol("n0", b"", 5.0)
    assert store.await_leadership("n0", LONG)
    assert store.publish(1, b"") and store.publish(2, b"old")
    assert store.follow(1, LONG) == Post(2, b"old")
    rpc = imports.load().rpc
    key = keys_of("/elaunch", "job").plan
    one.call("KV", "DeleteRange", rpc.DeleteRangeRequest(key=key))
    assert store.publish(1, b"new")
    assert store.follow(2, LONG) == Post(1, b"new")
    assert store.follow(1, 0.0) is None


def test_a_lease_that_was_removed_is_lost(one: Cluster, opened: Callable[..., EtcdStore]) -> None:
    """By an operator, say; whoever waits for the leadership with it is told."""
    first, second = opened(one.place()), opened(one.place())
    first.enrol("first", b"", LONG)
    assert first.await_leadership("first", LONG)
    second.enrol("second", b"", LONG)
    rpc = imports.load().rpc
    one.call("KV", "DeleteRange", rpc.DeleteRangeRequest(key=b"/", range_end=b"0"))
    for store in (first, second):
        with pytest.raises(LeaseLost):
            store.update(b"")
    with pytest.raises(LeaseLost):
        second.await_leadership("second", LONG)
    assert not first.publish(1, b"")


def test_what_is_too_large_is_refused(one: Cluster, opened: Callable[..., EtcdStore]) -> None:
    """At once, and not as an etcd that is out of reach."""
    store = opened(one.place())
    store.enrol("n0", b"", LONG)
    assert store.await_leadership("n0", LONG)
    for size in (1 << 21, 1 << 23):
        with pytest.raises(StoreError, match="larg") as caught:
            store.publish(1, bytes(size))
        assert not isinstance(caught.value, StoreUnreachable)


# ── who is let in ────────────────────────────────────────────────────────────────────────────────


def test_tls_with_certificates_on_both_sides(
    tmp_path: Path, opened: Callable[..., EtcdStore]
) -> None:
    """Without the right ones the message says which to look at."""
    foreign = make_identity(tmp_path / "foreign", "127.0.0.1")
    with serve(tmp_path / "etcd", client_certs=True) as cluster:
        store = opened(cluster.place())
        store.enrol("n0", b"", LONG)
        store.renew()
        assert store.follow(0, 0.1) is None
        refused = {
            "does it want TLS": {"cacert": None, "cert": None, "key": None},
            "is it signed by an authority in": {"cacert": foreign.cacert},
            "does it ask for a certificate of ours": {"cert": None, "key": None},
            "does it trust": {"cert": foreign.cert, "key": foreign.key},
            "cannot be read: No such file": {"cert": tmp_path / "nothing"},
        }
        for text, changes in refused.items():
            with pytest.raises(StoreDenied, match=text):
                client.connect(cluster.place(**changes), "job", deadline=LONG)


def test_tls_to_an_etcd_without(tmp_path: Path, one: Cluster) -> None:
    """That is denied too: nothing is sent in clear that was to be encrypted."""
    foreign = make_identity(tmp_path / "foreign", "127.0.0.1")
    with pytest.raises(StoreDenied):
        client.connect(one.place(cacert=foreign.cacert), "job", deadline=LONG)


def test_users_and_passwords(tmp_path: Path, opened: Callable[..., EtcdStore]) -> None:
    """A user works below its prefix; what does not fit is said, the password never."""
    with serve(tmp_path / "etcd", options=["--auth-token-ttl", "1"]) as cluster:
        cluster.add_user("jobs", "s3cret", "/jobs")
        mine = cluster.place(prefix="/jobs", user="jobs", password="s3cret")
        assert "s3cret" not in repr(mine)
        refused = {
            "give a user": {"user": None, "password": None},
            "does not know the user 'jobs' with this password": {"password": "wr0ng"},
            "below /other/": {"prefix": "/other"},
        }
        for text, changes in refused.items():
            with pytest.raises(StoreDenied, match=text) as caught:
                client.connect(cluster.place(**vars(mine) | changes), "job", deadline=LONG)
            assert "s3cret" not in str(caught.value) and "wr0ng" not in str(caught.value)
        store, other = opened(mine), opened(mine)
        store.enrol("n0", b"", LONG)
        assert store.await_leadership("n0", LONG)
        assert store.follow(0, 0.1) is None
        threading.Event().wait(2.5)  # tokens that nobody uses expire meanwhile
        assert store.publish(1, b"after the token")
        for each in (store, other):
            assert retry(functools.partial(each.follow, 0, LONG)) == Post(1, b"after the token")
        assert client.run_ids(mine) == ["job"]

        member = cluster.members[0]
        member.kill()
        member.start()  # knows no token any more
        retry(lambda: store.publish(2, b"after the restart"))
        assert retry(lambda: other.follow(1, 5.0)) == Post(2, b"after the restart")
        retry(lambda: store.renew() is None)


def test_a_password_that_takes_long_to_compare(
    tmp_path: Path, opened: Callable[..., EtcdStore]
) -> None:
    """Longer than one call may: as on a busy machine, on which etcd gets little of the time."""
    with serve(tmp_path / "etcd", options=["--bcrypt-cost", "12"]) as cluster:
        cluster.add_user("jobs", "s3cret", "/jobs")
        mine = cluster.place(prefix="/jobs", user="jobs", password="s3cret", call_timeout=0.1)
        opened(mine)  # reads something, or raises StoreUnreachable


@pytest.fixture(params=["simple", "jwt"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """An etcd with the user ``jobs``, by each kind of token."""
    options = []
    if request.param == "jwt":
        key = tmp_path / "jwt.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        options = [f"--auth-token=jwt,priv-key={key},sign-method=RS256,ttl=1s"]
    with serve(tmp_path / "etcd", options=options) as cluster:
        cluster.add_user("jobs", "s3cret", "/jobs")
        yield cluster


def test_a_password_that_was_changed(
    guarded: Cluster, agents: Callable[..., Agent], opened: Callable[..., EtcdStore]
) -> None:
    """An agent learns of it while it waits, and keeps its entry; nothing need be opened anew."""
    mine = guarded.place(prefix="/jobs", user="jobs", password="s3cret")
    agent = agents(mine, "n0", ttl=5.0)
    guarded.set_password("jobs", "another")
    with pytest.raises(StoreDenied, match="does not know the user 'jobs' with this password"):
        agent.store.follow(0, LONG)
    with pytest.raises(StoreDenied):
        agent.store.update(b"unheard")
    guarded.members[0].kill()
    guarded.members[0].start()  # the next renewal goes over a new stream, without a token
    guarded.await_ready()
    threading.Event().wait(8.0)  # longer than the entry lives without renewal
    other = opened(guarded.place(prefix="/jobs", user="jobs", password="another"))
    assert [lease.value for lease in other.members().values()] == [b"here"]
    assert agent.lost is None

    guarded.set_password("jobs", "s3cret")
    retry(lambda: agent.store.update(b"heard") is None, StoreDenied)
    assert agent.store.follow(0, 0.1) is None


def test_users_come_and_go(guarded: Cluster, agents: Callable[..., Agent]) -> None:
    """An agent with a user works on; one without is denied while there are users."""
    guarded.set_auth(False)
    known = agents(guarded.place(prefix="/jobs", user="jobs", password="s3cret"), "n0", ttl=2.0)
    stranger = agents(guarded.place(prefix="/jobs"), "n1", ttl=2.0)
    assert known.store.follow(0, 0.1) is None
    assert stranger.store.follow(0, 0.1) is None
    for _ in range(2):
        guarded.set_auth(True)
        known.store.update(b"with users")
        assert known.store.follow(0, 0.1) is None
        with pytest.raises(StoreDenied, match="give a user"):
            stranger.store.follow(0, LONG)
        guarded.set_auth(False)
        known.store.update(b"without")
        assert stranger.store.follow(0, 0.1) is None
    assert known.lost is stranger.lost is None


def test_a_password_where_there_are_no_users(
    one: Cluster, opened: Callable[..., EtcdStore]
) -> None:
    """It is not needed, and does no harm."""
    assert opened(one.place(user="jobs", password="any")).latest() is None


# ── this process ─────────────────────────────────────────────────────────────────────────────────

PROCESS = """
import os, subprocess, sys
from elaunch.store.etcd import client as etcd
from elaunch.store.etcd.cluster import EtcdCluster
assert "grpc" not in sys.modules and "etcd3" not in sys.modules
before = dict(os.environ)
good = EtcdCluster((({host!r}, {port}),))
bad = EtcdCluster((({host!r}, 1),), cacert={cacert!r} and __import__("pathlib").Path({cacert!r}))
store = etcd.connect(good, "job", deadline=30.0)
store.enrol("n0", b"", 30.0)
store.renew()
store.follow(0, 0.0)
for place in (bad, EtcdCluster(good.endpoints, cacert=bad.cacert)):
    try:
        etcd.connect(place, "job", deadline=0.1)
    except Exception as error:
        print(type(error).__name__)
assert dict(os.environ) == before
pid = os.posix_spawnp("true", ["true"], os.environ, setsid=True)
assert os.waitpid(pid, 0)[1] == 0
subprocess.run(["true"], check=True, start_new_session=True, preexec_fn=os.getpid)
store.renew()
print("end")
"""


def test_nothing_is_written_and_nothing_is_left_in_the_environment(
    tmp_path: Path, one: Cluster
) -> None:
    """Neither by gRPC nor by etcd3, when calls fail, processes start, or nobody closes."""
    foreign = make_identity(tmp_path / "foreign", "127.0.0.1")
    host, port = one.members[0].endpoint
    code = PROCESS.format(host=host, port=port, cacert=str(foreign.cacert))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("StoreUnreachable\nStoreDenied\nend\n", "")


def test_a_protobuf_that_is_there_already_stays_as_it_is(one: Cluster) -> None:
    """Its fast runtime too, and whatever else in this process is called rpc.proto."""
    host, port = one.members[0].endpoint
    code = (
        "import os\n"
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "from elaunch.store.etcd import client\n"
        "from elaunch.store.etcd.cluster import EtcdCluster\n"
        "other = descriptor_pb2.FileDescriptorProto(name='rpc.proto', package='other')\n"
        "descriptor_pool.Default().Add(other)\n"
        "before = dict(os.environ)\n"
        f"store = client.connect(EtcdCluster((({host!r}, {port}),)), 'job', deadline=30.0)\n"
        "store.enrol('a', b'A', 60.0)\n"
        "print(store.members()['a'].value, dict(os.environ) == before)\n"
        "store.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("b'A' True\n", "")


# ── pure parts ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Failed to "
            "connect to remote host: Connection refused",
            "refused",
            "connection refused",
        ),
        ("UNAVAILABLE", "etcdserver: no leader", "leaderless", "it has no leader"),
        (
            "RESOURCE_EXHAUSTED",
            "etcdserver: mvcc: database space exceeded",
            "full",
            "mvcc: database space exceeded",
        ),
        ("UNAVAILABLE", "etcdserver: leader changed", "failing", "leader changed"),
        ("UNAVAILABLE", "Socket closed", "failing", "Socket closed"),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: tcp "
            "handshaker shutdown",
            "silent",
            "the connection did not come about in time",
        ),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "silent", "no answer within 0.5 s"),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", "token", "invalid auth token"),
        ("NOT_FOUND", "etcdserver: requested lease not found", "gone", "requested lease not found"),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", "wrong", "request is too large"),
        ("PERMISSION_DENIED", "etcdserver: permission denied", "denied", "permission denied"),
        ("UNKNOWN", "x" * 300, "failing", "x" * 199 + "…"),
    ],
)
def test_what_grpc_says_is_understood(code: str, details: str, kind: str, text: str) -> None:
    """One row per kind of answer."""
    found = refusal(code, details, 0.5)
    assert (found.kind, found.text) == (kind, text)


@pytest.mark.parametrize(
    ("kinds", "nobody"),
    [
        (["refused"], True),
        (["silent"], False),
        (["refused", "leaderless", "silent"], True),
        (["refused", "silent", "silent"], False),
        (["refused", "leaderless"], True),
        (["refused", "failing"], False),
    ],
)
def test_nobody_decides_if_most_members_say_so(kinds: list[str], nobody: bool) -> None:
    """Half is not most, and silence is not an answer."""
    refusals = {f"h{n}:1": Refusal(kind, "") for n, kind in enumerate(kinds)}  # type: ignore[arg-type]
    assert Outcome(refusals, len(kinds)).nobody_decides is nobody


@pytest.mark.parametrize("run_id", ["job", "a/b", "a%2Fb", "ü x", "..", "board"])
def test_run_ids_and_names_are_safe_in_keys(run_id: str) -> None:
    """Whatever is in them, they come back and begin no other key."""
    keys = keys_of("/elaunch", run_id)
    assert run_id_of("/elaunch", keys.plan) == run_id
    assert keys.name_of(keys.agent(run_id)) == run_id
    assert keys.plan.count(b"/") == 3 and keys.agent(run_id).count(b"/") == 4


def test_addresses_of_ipv6_have_brackets() -> None:
    """As gRPC and people expect them."""
    place = EtcdCluster((("h1", 2379), ("fd00::1", 1)))
    assert str(place) == "etcd at h1:2379,[fd00::1]:1"
