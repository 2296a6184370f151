"""should_preempt() on ranks that are threads, around a real TCPStore in a process of its own."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

from elaunch.errors import CollectiveTimeout, ContextError, PeerLost
from elaunch.training.agentlink import AgentLink
from elaunch.training.distributed import DistributedContext
from elaunch.training.preempt import agreement
from elaunch.training.preempt.preempt import PreemptContext
from elaunch.training.stores import roundstore
from elaunch.wire.progress import PageReader, ProgressPage
from elaunch.wire.worker import Kind
from tests.launching import wait_until
from tests.training.agentend import Agent
from tests.training.preemptrig import LONG, Rank, StoreHost, open_rank, place, ranks, together
from tests.training.relay import Relay


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """The port of a store that all tests of this module share, as restarts share torchrun's."""
    host = StoreHost()
    yield host.port
    host.close()


@pytest.fixture
def scope(request: pytest.FixtureRequest) -> str:
    """A job's name in the shared store, its test's own."""
    return request.node.name


def first_true(rank: Rank, pause: float = 0.0, at_most: int = 10**9) -> int:
    """Call should_preempt() until it is True and return the number of that call; 0: it never is."""
    for call in range(1, at_most + 1):
        if rank.preempt.should_preempt():
            return call
        time.sleep(pause)
    return 0


# Nothing is pending.


@pytest.mark.slow
def test_while_nothing_is_pending_a_call_is_a_read_of_memory(store: int, scope: str) -> None:
    """A million calls, by this thread's own clock: 0.2 µs each when this was written."""
    with ranks(2, store, scope) as (rank, _):
        assert rank.preempt.should_preempt() is False
        calls, ask = 20_000, rank.preempt.should_preempt
        took = min(timeit.repeat(ask, timer=time.thread_time, number=calls, repeat=50)) / calls
    assert took < 2e-6


@pytest.mark.slow
def test_while_nothing_is_pending_no_network_is_needed(scope: str) -> None:
    """With the store's host frozen."""
    host = StoreHost()
    with ranks(2, host.port, scope) as both:
        for rank in both:
            assert rank.preempt.should_preempt() is False
        host.process.send_signal(signal.SIGSTOP)
        for _ in range(10_000):
            assert both[0].preempt.should_preempt() is False
        host.process.send_signal(signal.SIGCONT)
    host.close()


def test_every_call_is_a_heartbeat(store: int, scope: str) -> None:
    """A script that asks in every step needs no other."""
    with ranks(2, store, scope) as (rank, _):
        reader = PageReader(os.dup(rank.page.fd))
        for _ in range(3):
            before = reader.read().beats
            rank.preempt.should_preempt()
            assert reader.read().beats > before
        reader.close()


def test_nobody_wants_anything(store: int, scope: str) -> None:
    """No reason; a job that ends would be resumed."""
    with ranks(2, store, scope) as (rank, _):
        assert (rank.preempt.reason, rank.preempt.kind) == ("", "stop")


# All ranks return True at the same call.


def test_one_rank_alone_needs_no_store() -> None:
    """The next call is it."""
    rank = open_rank(place(0, 1, 0, "alone"))
    for _ in range(5):
        assert rank.preempt.should_preempt() is False
    rank.preempt.request("enough")
    assert rank.preempt.should_preempt() is True
    assert rank.preempt.reason == "enough"
    assert rank.preempt.should_preempt() is True
    rank.close()


@pytest.mark.slow
def test_skewed_ranks_return_true_at_the_same_call(store: int, scope: str) -> None:
    """The reason is the same on all of them, and every later call is True as well."""
    with ranks(4, store, scope) as opened:

        def script(number: int) -> tuple[int, str, str]:
            rank = opened[number]
            if number == 2:
                threading.Timer(0.2, rank.preempt.request, ("the queue's turn",)).start()
            call = first_true(rank, pause=0.005 + 0.01 * number)
            assert all(rank.preempt.should_preempt() for _ in range(5))
            return call, rank.preempt.reason, rank.preempt.kind

        results = together(4, script)
    assert len(set(results)) == 1
    assert results[0][0] > 0
    assert results[0][1:] == ("the queue's turn", "stop")


@pytest.mark.parametrize("kind", ["stop", "resize"])
def test_a_notice_before_the_first_call(store: int, scope: str, kind: Kind) -> None:
    """The first call is it, on all ranks; its kind reaches them, too."""
    with ranks(3, store, scope) as opened:
        opened[1].preempt.on_notice("early", kind)
        for rank in opened:
            wait_until(lambda rank=rank: rank.preempt.reason == "early", LONG)
        calls = together(3, lambda number: first_true(opened[number]))
        assert [rank.preempt.kind for rank in opened] == [kind] * 3
    assert calls == [1, 1, 1]


def test_notices_to_all_ranks_at_once_are_one(store: int, scope: str) -> None:
    """Whichever is first, all ranks give its reason."""
    with ranks(4, store, scope) as opened:
        gate = threading.Barrier(4)

        def script(number: int) -> tuple[int, str]:
            gate.wait(LONG)
            opened[number].preempt.on_notice(f"by {number}", "stop")
            opened[number].preempt.request(f"again by {number}")
            return first_true(opened[number]), opened[number].preempt.reason

        assert len(set(together(4, script))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_delays_all_ranks_agree(store: int, scope: str, seed: int) -> None:
    """Random delays on every message, notices from random ranks at random calls, ends by chance."""
    chance = random.Random(seed)
    size, total = chance.randrange(2, 6), chance.choice([3, 40, 20_000])
    notices = [(chance.randrange(size), chance.randrange(total)) for _ in range(3)]
    paces = [chance.choice([0.0, 0.001, 0.004]) if total < 1000 else 0.0 for _ in range(size)]
    relay = Relay(store, delay=0.01, seed=seed)

    def script(number: int) -> tuple[int, str]:
        with_rank = open_rank(place(number, size, relay.port, scope))
        asked = with_rank.preempt
        own = random.Random(f"{seed} {number}")
        try:
            for call in range(1, total + 1):
                if (number, call) in notices:
                    asked.request(f"by {number} at {call}")
                if asked.should_preempt():
                    assert all(asked.should_preempt() for _ in range(3))
                    return call, asked.reason
                time.sleep(own.random() * paces[number])
            return 0, ""
        finally:
            with_rank.close()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        results = together(size, script)
    finally:
        sys.setswitchinterval(before)
        relay.close()
    assert len(set(results)) == 1, results


@pytest.mark.slow
def test_a_signal_in_the_middle_of_a_call(store: int, scope: str) -> None:
    """A handler that runs between any two steps of should_preempt() neither blocks nor is lost."""
    for trial in range(40):
        with ranks(2, store, f"{scope}/{trial}") as (main, other):
            before = signal.getsignal(signal.SIGALRM)
            main.preempt.on_signal(signal.SIGALRM)
            calls: list[int] = []
            thread = threading.Thread(target=lambda o=other, c=calls: c.append(first_true(o, 1e-6)))
            thread.start()
            # Several: one comes while the call waits for the others.
            signal.setitimer(signal.ITIMER_REAL, random.random() * 0.01 + 1e-6, 2e-4)
            try:
                calls.append(first_true(main))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                main.preempt.close()
                assert signal.getsignal(signal.SIGALRM) is before
            thread.join(LONG)
            assert len(set(calls)) == 1
            assert len(calls) == 2
            assert main.preempt.reason == "SIGALRM to rank 0"


def at_each_opcode(code: CodeType, act: Callable[[int], None]) -> Callable[..., object]:
    """Return a trace function: ``act(n)`` is called before the nth opcode of ``code``."""
    count = itertools.count()
    # Some releases of Python 3.12 trace opcodes only if a frame asked for it before settrace().
    sys._getframe().f_trace_opcodes = True

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            act(next(count))
        return trace

    return trace


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (False, PreemptContext.should_preempt.__code__),
        (False, PreemptContext._ask.__code__),
        (False, PreemptContext._is_pending_at_first.__code__),
        (True, PreemptContext.should_preempt.__code__),
    ],
)
def test_a_handler_runs_at_any_point_of_a_call(asked: bool, code: CodeType) -> None:
    """Every opcode once: the call counts itself before it looks whether a notice is there."""
    points = 0
    for point in itertools.count():
        rank = open_rank(place(0, 1, 0, "alone"))
        if asked:
            assert rank.preempt.should_preempt() is False
        done: list[int] = []

        def act(n: int, rank: Rank = rank, point: int = point, done: list[int] = done) -> None:
            if n == point:
                sys.settrace(None)
                done.append(n)
                rank.preempt.request("from a handler")

        sys.settrace(at_each_opcode(code, act))
        try:
            told = rank.preempt.should_preempt()
        finally:
            sys.settrace(None)
        if done:
            points += 1
            wait_until(lambda rank=rank: rank.preempt._agreement.agreed, LONG)
            assert told == (rank.preempt._agreement.agreed.call == 1 + asked)
            assert told or rank.preempt.should_preempt()
        rank.close()
        if not done:
            break
    assert points > 10


@pytest.mark.slow
def test_a_call_runs_at_any_point_of_a_notice() -> None:
    """Every opcode of taking it once: no call that returned False is the one, or after it."""
    code = PreemptContext._take.__code__
    points = 0
    for point in itertools.count():
        rank = open_rank(place(0, 1, 0, "alone"))
        assert rank.preempt.should_preempt() is False
        said: list[bool] = []
        call = threading.Thread(
            target=lambda rank=rank, said=said: said.append(rank.preempt.should_preempt())
        )

        def act(n: int, call: threading.Thread = call, point: int = point) -> None:
            if n == point:
                call.start()
                call.join(0.05)  # it waits for the rest of the notice, or has seen nothing of it

        sys.settrace(at_each_opcode(code, act))
        try:
            rank.preempt.request("in pieces")
        finally:
            sys.settrace(None)
        done = call.ident is not None
        if done:
            points += 1
            call.join(LONG)
            wait_until(lambda rank=rank: rank.preempt._agreement.agreed, LONG)
            assert said == [rank.preempt._agreement.agreed.call <= 2]
            assert rank.preempt.should_preempt() is True
        rank.close()
        if not done:
            break
    assert points > 10


# The ranks do not make the same calls.


@pytest.mark.slow
def test_ranks_that_do_not_call_are_named(store: int, scope: str) -> None:
    """With what they did last: nobody hangs in silence."""
    with ranks(3, store, scope) as opened:
        opened[1].preempt.request("enough")
        with pytest.raises(CollectiveTimeout) as caught:
            while True:
                opened[0].preempt.should_preempt(timeout=1.5)
    text = str(caught.value)
    assert caught.value.missing == (1, 2)
    assert "ranks 1, 2 have not called should_preempt(#" in text
    assert "for 1.5 s; last call by them: rank 1 (host " in text
    assert "its last call was opening the context" in text
    assert "rank 2 was at #0" in text
    assert "outside of any `if rank == 0`" in text


@pytest.mark.slow
def test_a_rank_whose_threads_do_not_answer_is_named(store: int, scope: str) -> None:
    """As one that was killed, or holds Python's lock."""

    def script(number: int) -> Rank:
        return open_rank(place(number, 2, store, scope))

    opened = together(2, script)
    # Its threads end and say nothing, as if its process had died.
    opened[1].preempt._agreement._watching.cut()
    opened[0].preempt.request("enough")
    with pytest.raises(CollectiveTimeout, match=r"rank 1 has not answered the notice"):
        opened[0].preempt.should_preempt(timeout=1.0)
    for rank in opened:
        rank.close()


def test_ranks_that_are_done_hold_nobody(store: int, scope: str) -> None:
    """They have come to every call; and no call that they made can be the one."""
    with ranks(3, store, scope) as opened:
        for _ in range(10):
            assert opened[2].preempt.should_preempt() is False
        opened[2].preempt.close()
        opened[0].preempt.request("enough")
        calls = together(2, lambda number: first_true(opened[number], pause=0.001))
    assert len(set(calls)) == 1
    assert calls[0] > 10


def test_a_rank_that_ends_lets_those_go_that_wait_for_it(store: int, scope: str) -> None:
    """They wait in call K already when it closes."""
    with ranks(2, store, scope) as (waits, ends):
        waits.preempt.request("enough")
        wait_until(lambda: ends.preempt.reason, LONG)
        closing = threading.Timer(0.3, ends.preempt.close)
        closing.start()
        assert first_true(waits) == 1
        closing.join(LONG)


def test_who_came_too_late_is_told_nothing_wrong(store: int, scope: str) -> None:
    """After its error a rank can ask again, and gets True with the others."""
    with ranks(2, store, scope) as (early, late):
        early.preempt.request("enough")
        with pytest.raises(CollectiveTimeout):
            early.preempt.should_preempt(timeout=0.3)
        assert late.preempt.should_preempt() is True
        assert early.preempt.should_preempt() is True


# The end.


def test_after_close_it_is_refused(store: int, scope: str) -> None:
    """And so is every way to ask for an end; closing twice is fine."""
    with ranks(2, store, scope) as (rank, other):
        rank.preempt.close()
        rank.preempt.close()
        rank.preempt.request("nobody listens")
        with pytest.raises(ContextError, match="context is closed"):
            rank.preempt.should_preempt()
        assert other.preempt.should_preempt() is False


def test_closing_leaves_no_thread(store: int, scope: str) -> None:
    """Whether a notice was there or not."""
    for notice in (False, True):
        with ranks(2, store, f"{scope}{notice}") as opened:
            if notice:
                opened[0].preempt.request("x")
                together(2, lambda number, opened=opened: first_true(opened[number]))
        wait_until(
            lambda: not [t for t in threading.enumerate() if t.name.startswith("elaunch-pre")], LONG
        )


@pytest.mark.slow
def test_close_races_with_notices(store: int, scope: str) -> None:
    """Whatever comes first, every rank ends, and none is told alone."""
    for trial in range(30):
        chance = random.Random(trial)
        with ranks(3, store, f"{scope}/{trial}") as opened:

            def script(number: int, opened: list[Rank] = opened, trial: int = trial) -> bool:
                rank, own = opened[number], random.Random(f"{trial} {number}")
                told = bool(first_true(rank, pause=own.random() * 1e-3, at_most=10))
                rank.preempt.close()
                return told

            delay = chance.random() * 0.02
            by = opened[chance.randrange(3)].preempt
            threading.Timer(delay, by.request, ("x",)).start()
            assert len(set(together(3, script))) == 1


def test_a_fork_hears_of_nothing_and_ends_nothing(store: int, scope: str) -> None:
    """A DataLoader's process may ask; its parent goes on."""
    with ranks(2, store, scope) as (rank, other):
        rank.preempt.request("enough")
        wait_until(lambda: other.preempt.reason, LONG)
        pid = os.fork()
        if pid == 0:
            told = rank.preempt.should_preempt(timeout=30)
            rank.preempt.close()
            os._exit(1 if told else 0)
        assert os.waitpid(pid, 0)[1] == 0
        calls = together(2, lambda number: first_true((rank, other)[number]))
    assert len(set(calls)) == 1


# Rounds, contexts, the store.


def test_a_notice_stays_in_its_round(store: int, scope: str) -> None:
    """The store that torchrun's agent hosts outlives restarts."""
    with ranks(2, store, f"{scope}/0") as opened:
        opened[0].preempt.request("in round 0")
        together(2, lambda number: first_true(opened[number]))
    with ranks(2, store, f"{scope}/1") as opened:
        for rank in opened:
            rank.preempt.should_preempt()
            assert rank.preempt.should_preempt() is False


def test_a_notice_stays_in_its_context(store: int, scope: str) -> None:
    """A script may open one after the other."""
    for context in range(3):
        with ranks(2, store, scope) as opened:
            for rank in opened:
                assert rank.preempt.should_preempt() is False
            opened[context % 2].preempt.request(f"in context {context}")
            calls = together(2, lambda number, opened=opened: first_true(opened[number]))
            assert len(set(calls)) == 1
            assert opened[0].preempt.reason == f"in context {context}"


@pytest.mark.slow
def test_the_rank_that_hosts_the_store_may_leave_at_once(scope: str) -> None:
    """Under mpirun the store ends with rank 0; the others have read by then that all came."""
    for trial in range(5):
        relay = Relay(0)  # for a port that nobody else takes meanwhile
        port = relay.port
        relay.close()

        def script(number: int, port: int = port, trial: int = trial) -> int:
            rank = open_rank(place(number, 3, port, f"{scope}/{trial}", hosts=True))
            if number == 1:
                rank.preempt.request("enough")
            call = first_true(rank, pause=0.005 * number)
            rank.close()
            return call

        assert len(set(together(3, script))) == 1


@pytest.mark.slow
def test_a_lost_store_is_told_when_it_matters(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is pending the script goes on; then the error names the store."""
    monkeypatch.setattr(agreement, "PATIENCE_S", 1.0)
    monkeypatch.setattr(roundstore, "OPEN_S", 1.0)
    host = StoreHost()
    with ranks(2, host.port, scope) as (rank, _):
        assert rank.preempt.should_preempt() is False
        host.close()
        wait_until(lambda: not rank.preempt._agreement._watching.connected, LONG)
        assert rank.preempt.should_preempt() is False
        rank.preempt.request("enough")
        for _ in range(2):
            with pytest.raises(PeerLost, match=f"enough.*TCPStore at 127.0.0.1:{host.port}"):
                rank.preempt.should_preempt()


@pytest.mark.slow
def test_connections_that_a_firewall_forgot_are_opened_again(
    store: int, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word: neither an end nor a reset arrives, only silence."""
    monkeypatch.setattr(roundstore, "SLICE_S", 0.2)
    monkeypatch.setattr(roundstore, "ANSWER_S", 0.5)
    monkeypatch.setattr(roundstore, "GRACE_S", 0.5)
    relay = Relay(store)
    with ranks(2, relay.port, scope) as opened:
        for rank in opened:
            rank.preempt.should_preempt()
            wait_until(lambda rank=rank: rank.preempt._agreement._watching.connected, LONG)
        relay.forget()
        opened[0].preempt.request("enough")
        calls = together(2, lambda number: first_true(opened[number], pause=0.01))
    relay.close()
    assert len(set(calls)) == 1


# Signals and the agent.


def test_a_signal_is_a_notice_until_close(store: int, scope: str) -> None:
    """What handled it before handles it again."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: got.append(signum))
    try:
        with ranks(2, store, scope) as opened:
            opened[1].preempt.on_signal(signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            calls = together(2, lambda number: first_true(opened[number], pause=0.001))
            assert len(set(calls)) == 1
            assert opened[0].preempt.reason == "SIGUSR1 to rank 1"
            assert got == []
            opened[1].preempt.close()
            os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("signum", [signal.SIGKILL, 0, 4711])
def test_a_signal_that_cannot_be_handled_is_refused(signum: int) -> None:
    """With its name."""
    rank = open_rank(place(0, 1, 0, "signals"))
    with pytest.raises(ContextError, match="cannot take"):
        rank.preempt.on_signal(signum)
    rank.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent that listens."""
    listening = Agent(tmp_path / "agent.sock")
    yield listening
    listening.end()


def linked(agent: Agent, number: int, size: int, store: int, scope: str) -> Rank:
    """Open a rank with a link to ``agent``."""
    placement = place(number, size, store, scope)
    links: list[AgentLink] = []

    def link(page) -> AgentLink:
        links.append(AgentLink(agent.path, page, placement))
        return links[0]

    rank = open_rank(placement, link)
    links[0].on_notice = rank.preempt.on_notice
    links[0].start()
    return rank


def linked_pair(agent: Agent, store: int, scope: str) -> list[Rank]:
    """Open two ranks, the first with a link to ``agent``."""

    def script(number: int) -> Rank:
        if number == 0:
            return linked(agent, 0, 2, store, scope)
        return open_rank(place(1, 2, store, scope))

    opened = together(2, script)
    agent.accept()
    return opened


def test_the_agents_notice_is_taken_and_acknowledged(agent: Agent) -> None:
    """It hears that the script listens, and that it will end; not its own notice back."""
    rank = linked(agent, 0, 1, 0, "job")
    agent.accept()
    assert rank.preempt.should_preempt() is False
    assert agent.hear()["op"] == "listens"
    assert rank.preempt.should_preempt() is False
    agent.say({"op": "attached"}, {"op": "preempt", "reason": "a node joins", "kind": "resize"})
    wait_until(lambda: rank.preempt.reason, LONG)
    assert rank.preempt.should_preempt() is True
    assert agent.hear() == {"op": "ack", "reason": "a node joins", "kind": "resize"}
    assert rank.preempt.should_preempt() is True
    rank.close()
    assert agent.hear() == {"op": "detach"}


def test_the_agent_hears_what_the_script_asks_for(agent: Agent) -> None:
    """What another rank or the script itself asks for is news to the agent."""
    rank = linked(agent, 0, 1, 0, "job")
    agent.accept()
    rank.preempt.request("enough")
    assert rank.preempt.should_preempt() is True
    heard = [agent.hear() for _ in range(3)]
    assert sorted(line["op"] for line in heard) == ["ack", "knows", "listens"]
    assert {line.get("reason") for line in heard} == {None, "enough"}
    rank.close()
    assert agent.hear() == {"op": "detach"}


def test_the_seconds_that_are_left(agent: Agent) -> None:
    """None before a notice, and with one that has no limit; the agent's newest word counts."""
    rank = linked(agent, 0, 1, 0, "job")
    agent.accept()
    assert rank.preempt.should_preempt() is False
    assert rank.preempt.deadline is None
    notice = {"op": "preempt", "reason": "spot", "kind": "stop"}
    agent.say(notice)
    wait_until(lambda: rank.preempt.reason, LONG)
    assert rank.preempt.deadline is None
    agent.say({**notice, "grace": 1000.0})
    wait_until(lambda: rank.preempt.deadline, LONG)
    assert 900.0 < (rank.preempt.deadline or 0.0) <= 1000.0
    agent.say({**notice, "grace": 0.0})
    wait_until(lambda: rank.preempt.deadline == 0.0, LONG)
    rank.close()


def test_the_platforms_deadline_reaches_the_other_nodes_agent(
    agent: Agent, store: int, scope: str
) -> None:
    """It ends its workers by then, and not after its own --shutdown-timeout."""
    opened = linked_pair(agent, store, scope)
    opened[1].preempt.on_notice("spot", "stop", 115.0, stated=True)
    agent.say({"op": "preempt", "reason": "spot", "kind": "stop", "grace": 30.0})
    assert len(set(together(2, lambda number: first_true(opened[number])))) == 1
    heard = []
    while not heard or heard[-1]["op"] != "knows":
        heard.append(agent.hear())
    grace = heard[-1].pop("grace")
    assert 115.0 - LONG < grace <= 115.0  # what is left when it is sent
    assert heard[-1] == {"op": "knows", "reason": "spot", "kind": "stop"}
    for rank in opened:
        rank.close()


@pytest.mark.slow
def test_the_platforms_deadline_waits_for_no_rank(agent: Agent, store: int, scope: str) -> None:
    """An agent that was asked by way of the plan has what is left of it before the ranks agree."""

    def script(number: int) -> tuple[DistributedContext, ProgressPage]:
        distributed, page = DistributedContext.of(place(number, 3, store, scope)), ProgressPage()
        distributed.open(page, LONG)
        return distributed, page

    opened = together(3, script)  # the third one asks nothing
    link = AgentLink(agent.path, opened[0][1], place(0, 3, store, scope))
    asked, stated = (PreemptContext(*opened[n], made) for n, made in ((0, link), (1, None)))
    link.start()
    agent.accept()
    stated.on_notice("spot", "stop", 115.0, stated=True)
    time.sleep(1.0)
    stated.start()
    wait_until(lambda: stated._agreement._count, LONG)  # its notice is in the store
    asked.on_notice("spot", "stop", 30.0)
    asked.start()
    heard = agent.hear()
    assert heard["op"] == "knows" and 100.0 < heard["grace"] <= 114.0
    for context in (asked, stated):
        context.close()
    link.close()
    for distributed, page in opened:
        distributed.close()
        page.close()


@pytest.mark.slow
def test_another_nodes_notice_is_told_to_this_nodes_agent(
    agent: Agent, store: int, scope: str
) -> None:
    """It must know why its workers end."""
    opened = linked_pair(agent, store, scope)
    opened[1].preempt.request("the other node's turn")
    assert agent.hear() == {"op": "knows", "reason": "the other node's turn", "kind": "stop"}
    for rank in opened:
        rank.close()
