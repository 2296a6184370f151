"""Every store does what elaunch.store.protocol says: one suite, each backend in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from elaunch.errors import LeaseLost, StoreClosed
from elaunch.store.protocol import Change, Post, Store
from tests.store.backends import Cluster

LONG = 60.0
"""Seconds that something may take on a busy machine before the test gives it up."""

PATIENT = 4.0
"""Seconds: the ttl of who must not expire between two calls of a test, but soon afterwards."""


def leader(cluster: Cluster, name: str = "first") -> Store:
    """Return the store of an agent that holds the leadership."""
    store = cluster.open()
    store.enrol(name, b"leader", LONG)
    assert store.await_leadership(name, LONG)
    return store


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, what
        threading.Event().wait(0.01)


def collect(store: Store, number: int, name: str = "first") -> list[Change]:
    """Read changes until there are ``number`` of them; ``name`` leads."""
    changes: list[Change] = []
    end = time.monotonic() + LONG
    while len(changes) < number:
        assert time.monotonic() < end, changes
        changes += store.changes(name, 1.0)
    return changes


def read_until(store: Store, last: Change, name: str = "first") -> list[Change]:
    """Read changes until ``last``; ``name`` leads."""
    changes: list[Change] = []
    end = time.monotonic() + LONG
    while last not in changes:
        assert time.monotonic() < end, changes
        changes += store.changes(name, 1.0)
    return changes


def beside(call: Callable[[], object]) -> Callable[[], object]:
    """Run a call in a thread; calling what is returned gives its result or raises."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return lambda: future.result(LONG)


# ── the plan ────────────────────────────────────────────────────────────────────────────────────


def test_versions_count_from_one(cluster: Cluster) -> None:
    """Each publish is the version that comes next; the newest is what readers see."""
    first, second = leader(cluster), cluster.open()
    assert second.latest() is None
    assert first.publish(1, b"one")
    assert first.publish(2, b"two")
    assert first.latest() == second.latest() == Post(2, b"two")


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, 1, 3, 7])
def test_another_version_is_refused(cluster: Cluster, version: int) -> None:
    """Neither one that is there nor one that leaves a gap is written."""
    first = leader(cluster)
    assert first.publish(1, b"one")
    assert not first.publish(version, b"wrong")
    assert first.latest() == Post(1, b"one")
    assert first.publish(2, b"two")


def test_only_who_leads_publishes(cluster: Cluster) -> None:
    """Neither another agent, nor one that is no member, nor one that has left."""
    first, second, third = leader(cluster), cluster.open(), cluster.open()
    second.enrol("second", b"", LONG)
    assert not second.publish(1, b"no")
    assert not third.publish(1, b"no")
    first.withdraw()
    assert not first.publish(1, b"no")
    assert third.latest() is None


def test_who_follows_is_woken(cluster: Cluster) -> None:
    """A post ends the wait of every follower, long before its time is over."""
    first = leader(cluster)
    others = [cluster.open() for _ in range(4)]
    waits = [beside(lambda other=other: other.follow(0, 3 * LONG)) for other in others]  # type: ignore[misc]
    assert first.publish(1, b"go")
    assert [wait() for wait in waits] == [Post(1, b"go")] * 4


def test_follow_returns_none_at_its_timeout(cluster: Cluster) -> None:
    """Also when there is an older post, and at once with a timeout of 0."""
    first, second = leader(cluster), cluster.open()
    assert second.follow(0, 0.0) is None
    assert first.publish(1, b"one")
    began = time.monotonic()
    assert second.follow(1, 0.3) is None
    assert time.monotonic() - began >= 0.3
    assert second.follow(0, 0.0) == Post(1, b"one")


def test_a_post_comes_with_its_nodes(cluster: Cluster) -> None:
    """With those that it was published with, whether a reader has seen them before or not."""
    first, second = leader(cluster), cluster.open()
    some, others = bytes(range(256)) * 800, b"others"
    nodes = [some, some, others, b"", others, some]
    for version, listed in enumerate(nodes, 1):
        assert first.publish(version, b"%d" % version, listed)
        post = Post(version, b"%d" % version, listed)
        assert second.follow(version - 1, LONG) == first.latest() == post
        if version in (2, 4, 5):
            assert cluster.open().latest() == post


@pytest.mark.slow
def test_follow_returns_the_newest(cluster: Cluster) -> None:
    """However far behind the reader is; a reader that is ahead of the plan waits."""
    first, second = leader(cluster), cluster.open()
    for version in range(1, 101):
        assert first.publish(version, b"%d" % version)
    assert second.follow(0, LONG) == second.follow(3, LONG) == Post(100, b"100")
    assert second.follow(99, LONG) == Post(100, b"100")
    assert second.follow(100, 0.1) is None


@pytest.mark.slow
def test_every_post_reaches_who_follows_in_order(cluster: Cluster) -> None:
    """Versions may be skipped, never repeated nor turned back; the last one comes."""
    first, second = leader(cluster), cluster.open()

    def read() -> Sequence[int]:
        seen = [0]
        while seen[-1] < 200:
            post = second.follow(seen[-1], LONG)
            assert post is not None and post.value == b"v%d" % post.version
            seen.append(post.version)
        return seen

    wait = beside(read)
    for version in range(1, 201):
        assert first.publish(version, b"v%d" % version)
    seen = wait()
    assert isinstance(seen, list) and seen == sorted(set(seen))


def test_values_are_bytes_of_any_kind_and_size(cluster: Cluster) -> None:
    """200 KB on the plan, every byte in an entry."""
    every = bytes(range(256))
    first, second = leader(cluster), cluster.open()
    big = every * 800
    assert first.publish(1, big)
    assert second.follow(0, LONG) == Post(1, big)
    collect(first, 1)
    second.enrol("second", every, LONG)
    assert collect(first, 1) == [Change("second", every, "put")]
    second.update(b"\n\0" + every)
    assert collect(first, 1) == [Change("second", b"\n\0" + every, "put")]


# ── the members ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_first_changes_are_all_who_are_there(cluster: Cluster) -> None:
    """Then only what is new; nothing new: an empty list at the timeout."""
    others = [cluster.open() for _ in range(3)]
    first = others[0]
    for number, other in enumerate(others):
        other.enrol(f"a{number}", b"%d" % number, LONG)
    assert first.await_leadership("a0", LONG)
    found = {change.name: change.value for change in collect(first, 3, "a0")}
    assert found == {"a0": b"0", "a1": b"1", "a2": b"2"}
    assert list(first.changes("a0", 0.2)) == []


def test_changes_come_in_order(cluster: Cluster) -> None:
    """Of one agent: the last state is the last change; one that came and left is gone."""
    first, second = leader(cluster), cluster.open()
    collect(first, 1)
    second.enrol("second", b"0", LONG)
    for number in range(1, 21):
        second.update(b"%d" % number)
    second.withdraw()
    changes = read_until(first, Change("second", None, "left"))
    values = [int(change.value) for change in changes if change.value is not None]
    assert values == sorted(values)
    assert changes[-1].cause == "left"


def test_a_change_ends_the_wait(cluster: Cluster) -> None:
    """The coordinator is woken, long before its time is over."""
    first, second = leader(cluster), cluster.open()
    collect(first, 1)
    wait = beside(lambda: first.changes("first", 3 * LONG))
    second.enrol("second", b"here", LONG)
    assert wait() == [Change("second", b"here", "put")]


def test_the_members_shows_who_is_there(cluster: Cluster) -> None:
    """To an agent, to the leader, and to a reader that is no member itself."""
    first, second, reader = leader(cluster), cluster.open(), cluster.open()
    second.enrol("second", b"one", LONG)
    second.update(b"two")
    for store in (first, second, reader):
        until(lambda store=store: len(store.members()) == 2, "both are there")  # type: ignore[misc]
        until(lambda store=store: store.members()["second"].value == b"two", "the newest value")  # type: ignore[misc]
    second.withdraw()
    for store in (first, second, reader):
        until(lambda store=store: list(store.members()) == ["first"], "it has left")  # type: ignore[misc]


def test_ages_are_of_the_last_renewal(cluster: Cluster) -> None:
    """Where they are known, they are small for who renews and never beyond the ttl."""
    first = leader(cluster)
    until(lambda: "first" in first.members(), "it is there")
    first.renew()
    age = first.members()["first"].age
    assert age is None or 0 <= age <= LONG


@pytest.mark.slow
def test_who_does_not_renew_expires(cluster: Cluster) -> None:
    """It is gone after its ttl and not before; who renews stays for longer than its ttl."""
    first, second, third = leader(cluster), cluster.open(), cluster.open()
    began = time.monotonic()
    second.enrol("second", b"", cluster.ttl)
    third.enrol("third", b"", PATIENT)
    renewed, longest = time.monotonic(), 0.0
    expired = Change("second", None, "expired")
    changes: list[Change] = []

    def renew_and_read() -> None:
        nonlocal renewed, longest
        assert time.monotonic() < began + LONG
        longest = max(longest, time.monotonic() - renewed)
        if longest < 0.9 * PATIENT:  # else this machine stood still, and it may have expired
            third.renew()
        renewed = time.monotonic()
        changes.extend(first.changes("first", cluster.ttl / 10))

    while expired not in changes:
        renew_and_read()
    assert time.monotonic() - began >= cluster.ttl * 0.95
    while time.monotonic() < began + 1.3 * PATIENT:
        renew_and_read()
    if max(longest, time.monotonic() - renewed) < 0.9 * PATIENT:
        assert [change for change in changes if change.cause != "put"] == [expired]
        assert sorted(first.members()) == ["first", "third"]


@pytest.mark.slow
def test_an_agent_that_has_expired_has_lost_its_lease(cluster: Cluster) -> None:
    """It cannot come back by renewing or updating; withdrawing is no error; a new name works."""
    first, second = leader(cluster), cluster.open()
    second.enrol("second", b"", cluster.ttl)
    read_until(first, Change("second", None, "expired"))
    with pytest.raises(LeaseLost):
        second.renew()
    with pytest.raises(LeaseLost):
        second.update(b"back")
    second.withdraw()
    second.enrol("again", b"new", LONG)
    changes = read_until(first, Change("again", b"new", "put"))
    assert [change.name for change in changes] == ["again"]
    second.renew()


def test_an_agent_without_a_lease_is_no_member(cluster: Cluster) -> None:
    """Nothing can be renewed, updated or led; withdrawing is no error."""
    store = cluster.open()
    store.withdraw()
    for call in (store.renew, lambda: store.update(b""), lambda: store.await_leadership("x", 0.1)):
        with pytest.raises(LeaseLost):
            call()


def test_a_name_is_given_once(cluster: Cluster) -> None:
    """A name that is a member is refused, and its entry stays as it is."""
    first, second, third = leader(cluster), cluster.open(), cluster.open()
    second.enrol("same", b"mine", LONG)
    with pytest.raises(LeaseLost):
        third.enrol("same", b"theirs", LONG)
    until(lambda: len(first.members()) == 2, "both are there")
    assert first.members()["same"].value == b"mine"
    second.renew()


# ── leadership ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_one_agent_leads(cluster: Cluster) -> None:
    """It may ask again; another one waits for its whole timeout."""
    first, second = leader(cluster), cluster.open()
    assert first.await_leadership("first", 0.0)
    second.enrol("second", b"", LONG)
    began = time.monotonic()
    assert not second.await_leadership("second", 0.3)
    assert time.monotonic() - began >= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["withdraws", "expires"])
def test_the_leadership_goes_on(cluster: Cluster, way: str) -> None:
    """Another agent takes it when the leader is gone; it sees everything; the old one is out."""
    if not cluster.hand_over:
        pytest.skip("only the agent that hosts this store can lead")
    first, second = cluster.open(), cluster.open()
    first.enrol("first", b"1", LONG if way == "withdraws" else PATIENT)
    assert first.await_leadership("first", LONG)
    assert first.publish(1, b"old")
    second.enrol("second", b"2", LONG)
    wait = beside(lambda: second.await_leadership("second", LONG))
    if way == "withdraws":
        first.withdraw()
    assert wait() is True
    assert not first.publish(2, b"late")
    assert list(second.changes("second", LONG)) == [Change("second", b"2", "put")]
    assert second.publish(2, b"new")
    assert first.latest() == Post(2, b"new")


@pytest.mark.slow
def test_who_leads_again_reads_everything_again(cluster: Cluster) -> None:
    """Whoever still waits for what its leadership before has missed takes nothing of it away."""
    first, second = cluster.open(), cluster.open()
    first.enrol("first", b"1", PATIENT)
    assert first.await_leadership("first", LONG)
    second.enrol("second", b"2", LONG)
    collect(first, 2)

    def read() -> None:
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            first.changes("first", 0.05)

    before = beside(read)
    until(lambda: "first" in second.members(), "it is there")
    until(lambda: "first" not in second.members(), "it has expired")
    with pytest.raises(LeaseLost):
        first.renew()
    first.withdraw()
    first.enrol("again", b"3", LONG)
    threading.Event().wait(0.3)  # it calls again meanwhile, unless it has ended
    assert first.await_leadership("again", LONG)
    changes = collect(first, 2, "again")
    assert {change.name for change in changes if change.value is not None} == {"again", "second"}
    with pytest.raises(LeaseLost):
        before()


# ── all of it ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_many_agents_at_once(cluster: Cluster) -> None:
    """64 enrol, the leader sees each once, all follow its post, all answer it."""
    first = leader(cluster)
    collect(first, 1)
    others = [cluster.open() for _ in range(64)]

    def live(number: int) -> Post | None:
        store = others[number]
        store.enrol(f"n{number}", b"here", LONG)
        post = store.follow(0, LONG)
        store.update(b"seen")
        return post

    with ThreadPoolExecutor(64) as pool:
        lives = [pool.submit(live, number) for number in range(64)]
        names = sorted(change.name for change in collect(first, 64))
        assert names == sorted(f"n{number}" for number in range(64))
        assert first.publish(1, b"all")
        assert {one.result(LONG) for one in lives} == {Post(1, b"all")}
        assert {change.value for change in collect(first, 64)} == {b"seen"}


@pytest.mark.slow
def test_several_threads_share_a_store(cluster: Cluster) -> None:
    """A wait does not hold up what is answered at once; calls side by side do not mix."""
    first, second = leader(cluster), cluster.open()
    second.enrol("second", b"", LONG)
    wait = beside(lambda: second.follow(0, LONG))
    calls = [beside(lambda: [second.renew() for _ in range(50)]) for _ in range(4)]
    calls += [beside(lambda: [second.latest() for _ in range(50)])]
    for call in calls:
        call()
    assert first.publish(1, b"end")
    assert wait() == Post(1, b"end")


BLOCKING: dict[str, Callable[[Store, Store], object]] = {
    "follow": lambda first, second: second.follow(0, 3 * LONG),
    "await_leadership": lambda first, second: second.await_leadership("second", 3 * LONG),
    "changes": lambda first, second: [first.changes("first", 3 * LONG) for _ in range(9)],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(BLOCKING))
def test_close_wakes_who_waits(cluster: Cluster, method: str) -> None:
    """Whatever blocks ends with StoreClosed, and so does every later call."""
    first, second = leader(cluster), cluster.open()
    second.enrol("second", b"", LONG)
    collect(first, 2)
    closed = first if method == "changes" else second
    started = threading.Event()

    def block() -> object:
        started.set()
        return BLOCKING[method](first, second)

    wait = beside(block)
    assert started.wait(LONG)
    threading.Event().wait(0.2)  # it may wait by now; if not, closing must end it all the same
    closed.close()
    with pytest.raises(StoreClosed):
        wait()
    for call in (closed.latest, closed.members, lambda: closed.follow(0, 0.0)):
        with pytest.raises(StoreClosed):
            call()
    closed.close()


def test_jobs_do_not_mix(cluster: Cluster) -> None:
    """Two run ids at one place: neither plan nor members nor leadership are shared."""
    if not cluster.several_jobs:
        pytest.skip("this store holds one job")
    one, two = cluster.open("one"), cluster.open("two")
    for store in (one, two):
        store.enrol("same", b"", LONG)
        assert store.await_leadership("same", LONG)
    assert one.publish(1, b"one")
    assert two.latest() is None
    assert [change.name for change in two.changes("same", LONG)] == ["same"]
    one.withdraw()
    assert list(two.members()) == ["same"]


def test_what_is_cleared_may_still_be_read(cluster: Cluster) -> None:
    """``clear`` leaves those who are late time to read the end."""
    first, second = leader(cluster), cluster.open()
    assert first.publish(1, b"over")
    first.clear()
    assert second.follow(0, LONG) == Post(1, b"over")


def test_the_first_offer_is_what_all_share(cluster: Cluster) -> None:
    """Until the job is over and a while after it, in which the next one may begin."""
    first, second = cluster.open(), cluster.open()
    assert (first.shared(), second.shared()) == (b"", b"")
    assert [first.shared(b"one"), second.shared(b"two"), second.shared()] == [b"one"] * 3
    first.clear()
    assert [second.shared(), second.shared(b"two")] == [b"one"] * 2


def test_agents_that_come_together_share_one_value(cluster: Cluster) -> None:
    """Each offers its own."""
    stores = [cluster.open() for _ in range(5)]
    offers = [f"{number}".encode() for number in range(len(stores))]
    with ThreadPoolExecutor() as pool:
        found = set(pool.map(lambda store, offer: store.shared(offer), stores, offers))
    assert len(found) == 1 and found < set(offers)


def test_the_place_has_a_name(cluster: Cluster) -> None:
    """For messages."""
    assert len(cluster.open().name) > 5
