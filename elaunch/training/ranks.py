"""The calls that all ranks of a job make together, as one rank makes them.

They meet by a first call in which each gives its record, and the last checks that all fit. Then,
each over the round's store (elaunch.training.agreement):

===========  ==========================  =====================
call         given by                    read by
===========  ==========================  =====================
allgather    all                         all
gather       all                         rank 0
broadcast    rank 0                      all
barrier      nobody                      nobody
in_turn      all, whether they failed    all
deliver      who has something           those that take it
agree        rank 0, or all              all, and any problem
===========  ==========================  =====================

The ``_local`` forms are the same within the node, its first rank in rank 0's place. A rank that
could not pickle its object gives the reason instead, and every rank gets that: the call fails on
all of them, and the next one works again. After any other failure no call works any more: each
raises the first cause. A rank that fails or closes its context has the calls fail that it would
have come to. One that just ends does not: ranks of its machine see it, and fail them for it;
where there are none, its launcher ends the job.

``rank/<r>`` is rank r's record, for errors that name it, ``near/<n>`` are the ranks of node n,
``addrs`` the nodes' addresses, which the last to come has written; ``left`` counts the ranks that
have closed their contexts, so that the one that hosts the store ends last.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from elaunch import proc
from elaunch.errors import (
    CollectiveError,
    CollectiveTimeout,
    ContextError,
    PeerLost,
    PlacementError,
)
from elaunch.text import ranks as named_ranks
from elaunch.training import unpickling
from elaunch.training.agreement import (
    Call,
    Expired,
    Failed,
    Gathered,
    Gift,
    Signature,
    StoreCalls,
    Value,
    Verdict,
    read_call,
)
from elaunch.training.launch import Placement
from elaunch.training.members import (
    KEY,
    RankRecord,
    identities,
    in_nodes,
    key_of,
    outer_addr,
    read_record,
)
from elaunch.training.stores.roundstore import RoundStore, StoreConnection, put
from elaunch.training.values import UNSHARED, Refused, attempt, packed, unpacked
from elaunch.wire import forks
from elaunch.wire.progress import ProgressPage
from elaunch.wire.stream import session_key

CAUSE_FIRST_S: Final = 1.0
"""Seconds that a rank waits before it fails for the loss of another."""
TELL_S: Final = 5.0
"""Seconds for the store to take what the others are to know, or to say what it knows of them."""
LEAVE_S: Final = 5.0
"""Seconds that a rank which hosts the store leaves the others to close their contexts."""
MEET: Final = Call("meet", 1, "opening the context")
_ERRORS: Final[dict[str, type[CollectiveError]]] = {
    "timeout": CollectiveTimeout,
    "lost": PeerLost,
    "other": CollectiveError,
}
_GIVE_TO_ALL: Final = ("allgather", "gather", "in_turn")


class CallsDiffer(CollectiveError):
    """The ranks agree on different things; the next call works. The text is who on which."""


class RankCalls:
    """One rank's calls; all ranks call :meth:`open` together, and every call.

    ``machine`` is what distinguishes this machine; it is looked up where it is not given.
    """

    def __init__(
        self, placement: Placement, store: RoundStore, page: ProgressPage, machine: str = ""
    ) -> None:
        self._placement = placement
        self._store = store
        self._page = page
        self._machine = machine
        self._agreement: StoreCalls | None = None
        self._me: RankRecord | None = None
        self._near: tuple[int, ...] = ()
        self._key = -1
        self._signature = Signature(None, required=False)
        self._known: dict[int, RankRecord] = {}
        self._calls = {"all": 0, f"node{placement.cross_rank}": 0}
        self._now: Call | None = None
        self._last = MEET
        self._turn = threading.Lock()
        self._stopped = False
        self._unusable: tuple[type[Exception], str, tuple[int, ...]] | None = None

    def open(self, until: float) -> None:
        """Meet the others.

        Raises CollectiveTimeout at ``until`` (monotonic clock), PeerLost, and PlacementError where
        the ranks contradict each other.
        """
        forks.leave_behind(self)
        self._now = MEET
        try:
            connection = self._store.connect(until)
            me = self._me = self._record(connection)
            secret = self._placement.secret
            key = None if secret is None else session_key(secret, self._store.prefix)
            self._signature = Signature(key, required=key is not None)
            agreement = StoreCalls(connection, self._signature, me.rank, str(me))
            self._agreement = agreement
            connection.put(f"rank/{me.rank}", me.packed(), until)
            gift = Gift(given=me.packed())
            try:
                size = self._placement.size
                found = agreement.take_part(MEET, size, gift, (), until, compose=self._place)
            except Expired:
                late = Verdict("timeout", *self._absent())
                late = agreement.fail(MEET, late) or late
                raise CollectiveTimeout(late.text, late.missing) from None
            except Failed as failed:
                error = _ERRORS.get(failed.verdict.error, CollectiveError)
                raise error(failed.verdict.text, failed.verdict.missing) from None
            if problem := found.composed.get("problem"):
                raise PlacementError(str(problem))
            self._settle(found.composed, agreement)
        except BaseException:
            self.close()
            raise
        finally:
            self._now = None

    def call(
        self, scope: str, name: str, obj: Any, timeout: float, purpose: str = ""
    ) -> list[Any] | None:
        """Do one call with all ranks of ``scope``; return the objects in order, None if none come.

        Calls for different purposes are different calls. Raises CollectiveError, ContextError.
        """
        plain = name.removesuffix("_local")
        ranks = range(self._placement.size) if scope == "all" else self._near
        is_root = self._placement.rank == ranks[0]
        gives, takes = plain == "broadcast" and is_root, plain == "broadcast" and not is_root
        if plain == "deliver":
            obj, takes = obj
            gives = obj is not None

        def made() -> Gift:
            if gives:
                return Gift(first=packed(obj, purpose))
            return Gift(given=packed(obj, purpose)) if plain in _GIVE_TO_ALL else Gift()

        wants = ("first",) if takes else ()
        if plain in ("allgather", "in_turn") or (plain == "gather" and is_root):
            wants = ("given",)
        name = f"{name} of {purpose}" if purpose else name
        call, found = self._do(scope, name, made, ranks, wants, timeout)
        self._raise_problems(call, found)
        if "given" in wants:
            return self._objects(call, found, ranks, obj)
        if plain == "broadcast":
            return [obj if is_root else self._unpacked(call, ranks[0], found.first, obj)]
        return None if found.first is None else [self._unpacked(call, 0, found.first, obj)]

    def agree(
        self,
        payload: Any,
        problem: Mapping[str, Any] | None,
        remark: str,
        timeout: float,
        *,
        everyone: bool,
        purpose: str,
    ) -> tuple[list[Any], dict[int, dict[str, Any]]]:
        """Return rank 0's payload, or ``everyone``'s, and by rank the problems of those with one.

        ``problem`` is what JSON takes. Payloads are not read where there are problems. Raises
        CallsDiffer if ``remark`` is not the same on all ranks.
        """
        size, rank = self._placement.size, self._placement.rank

        def made() -> Gift:
            if problem is not None:
                return Gift(problem=json.dumps(problem).encode(), remark=remark)
            content = packed(payload, purpose) if everyone or rank == 0 else None
            gift = Gift(given=content) if everyone else Gift(first=content)
            return Gift(gift.given, gift.first, None, remark)

        wants = ("given",) if everyone else ("first",) if rank else ()
        name = f"allgather of {purpose}"
        call, found = self._do("all", name, made, range(size), wants, timeout, remark)
        if found.problems:
            fields = {at: self._fields(call, at, value) for at, value in found.problems.items()}
            if all("refused" not in one for one in fields.values()):
                return [], fields
            self._raise_problems(call, found)
        if everyone:
            return self._objects(call, found, range(size), payload), {}
        return [payload if rank == 0 else self._unpacked(call, 0, found.first, payload)], {}

    def node_addrs(self) -> tuple[str, ...]:
        """Return the nodes' addresses by node; raises as RoundStore.connect."""
        with contextlib.closing(self._store.connect(_soon())) as connection:
            addrs = self._signature.opened("addrs", connection.get("addrs", _soon()))
        return tuple(map(str, json.loads(addrs.content)))

    def over(self, connection: StoreConnection, seconds: float) -> StoreCalls:
        """Return what takes part in other calls than these, for another thread of this rank.

        ``seconds`` are those that the store may take for an answer.
        """
        return StoreCalls(connection, self._signature, self._placement.rank, "", seconds)

    def describe(self, ranks: Sequence[int], until: float) -> list[str]:
        """Return what each rank has called last, in words; blocks until ``until`` at most."""
        try:
            with contextlib.closing(self._store.connect(until)) as connection:
                return self._described(connection, ranks, until)
        except (CollectiveError, ContextError, PlacementError) as error:
            return [f"rank {rank}: {error}" for rank in ranks]

    def close(self, why: str = "has closed its context") -> None:
        """Have the others know, and free everything; may be called twice, and from anywhere.

        A call that another thread is in ends with ContextError.
        """
        self._stopped = True
        if self._turn.acquire(blocking=False):
            try:
                self._free(why)
            finally:
                self._turn.release()
        elif (agreement := self._agreement) is not None:
            # First the others: the thread in the call frees everything as soon as it wakes.
            self._tell(Verdict("other", f"{self._me} {why} meanwhile", self._own), anew=True)
            agreement.connection.cut()

    @property
    def made(self) -> int:
        """How many calls this rank has made."""
        return sum(self._calls.values())

    def abandon(self) -> None:
        """Free everything, and have the others know nothing: they are in another round."""
        self._stopped = True
        self._unusable = PeerLost, "this rank stands among other ranks now", ()
        if self._agreement is not None:
            self._agreement.connection.close()
            self._agreement = None
        self._close_key()

    def forked(self) -> None:
        """Let go of everything in a process that was forked from this rank."""
        rank = self._placement.rank
        text = f"this process was forked from rank {rank}, which alone may make calls of all ranks"
        self._unusable = ContextError, text, ()
        self._turn = threading.Lock()
        self._agreement = None
        self._close_key()

    # ── meeting ──────────────────────────────────────────────────────────────────────────────────

    def _record(self, connection: StoreConnection) -> RankRecord:
        place = self._placement
        machine, space = identities()
        if place.rank == 0 and place.secret is None:
            self._key = os.memfd_create(KEY)
            os.write(self._key, secrets.token_bytes(32))
        return RankRecord(
            rank=place.rank,
            node=place.cross_rank,
            local=place.local_rank,
            local_size=place.local_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=self._machine or machine,
            space=space,
            process=proc.process_name(os.getpid()),
            addr=place.addr or connection.local_addr,
            store=connection.store_addr,
            key=self._key,
        )

    def _place(self, given: dict[int, Value]) -> dict[str, Any]:
        """Write which ranks each node has, and its address, as the last rank; return the rest."""
        assert self._agreement is not None
        connection, signature = self._agreement.connection, self._agreement.signature
        try:
            records = [read_record(value.content, rank) for rank, value in sorted(given.items())]
            nodes = in_nodes(records)
        except PlacementError as error:
            return {"problem": str(error)}
        chiefs = sorted((node[0] for node in nodes), key=lambda chief: chief.node)
        written: dict[str, Any] = {f"near/{n[0].node}": [one.rank for one in n] for n in nodes}
        written["addrs"] = [outer_addr(chief, records) for chief in chiefs]
        signed = {key: signature.of(key, json.dumps(one).encode()) for key, one in written.items()}
        connection.exchange([put(key, value) for key, value in signed.items()], _soon())
        return {"lead": records[0].packed().decode()}

    def _settle(self, fields: dict[str, Any], agreement: StoreCalls) -> None:
        """Take what the last rank has made of all records; PlacementError for what is none."""
        try:
            key = f"near/{self._placement.cross_rank}"
            near = agreement.signature.opened(key, agreement.connection.get(key, _soon()))
            self._near = tuple(map(int, json.loads(near.content)))
            lead = read_record(fields["lead"].encode(), 0)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PlacementError(f"the ranks' places cannot be read: {fields!r:.200}") from None
        assert self._me is not None
        self._known[0] = lead
        if self._placement.secret is None:
            shared = key_of(lead, self._me)
            session = None if shared is None else session_key(shared, self._store.prefix)
            agreement.signature = self._signature = Signature(session, required=False)

    def _absent(self) -> tuple[str, tuple[int, ...]]:
        """Return the text about the ranks that have opened no context, and which they are."""
        assert self._agreement is not None
        size, rank, number = self._placement.size, self._placement.rank, self._store.context_number
        missing = tuple(self._agreement.away(MEET, range(size)))
        if not missing:
            return "all ranks have come, but the last one has not placed them", ()
        came = [one for one in range(size) if one not in missing]
        self._look_up(came)
        here = ", ".join(map(self._name, came))
        text = f"{named_ranks(missing)} of {size} did not open a context in time"
        if number > 1:
            text += f" (number {number} of rank {rank} in this round)"
        return f"{text}; here: {here}", missing

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def _do(
        self,
        scope: str,
        name: str,
        made: Callable[[], Gift],
        ranks: Sequence[int],
        wants: Collection[str],
        timeout: float,
        remark: str = "",
    ) -> tuple[Call, Gathered]:
        """Take part in a call, as one thread at a time may, and give what ``made`` returns."""
        if not self._turn.acquire(blocking=False):
            self._refuse_unusable(name)
            raise ContextError(
                f"{name}: another thread of this rank is in {self._now}; calls of all "
                "ranks need one order, so one thread has to make them"
            )
        before = self._page.spend("wait")
        try:
            self._refuse_unusable(name)
            scope = scope if scope == "all" else f"node{self._placement.cross_rank}"
            self._calls[scope] += 1
            call = self._now = self._last = Call(scope, self._calls[scope], name)
            self._page.note(str(call))
            return call, self._take_part(call, ranks, made, wants, timeout, remark)
        finally:
            self._page.spent_on(before)
            self._now = None
            self._turn.release()
            if self._stopped:
                self.close()

    def _take_part(
        self,
        call: Call,
        ranks: Sequence[int],
        made: Callable[[], Gift],
        wants: Collection[str],
        timeout: float,
        remark: str,
    ) -> Gathered:
        agreement, refused = self._agreement, None
        assert agreement is not None
        until = time.monotonic() + timeout
        try:
            try:
                gift = attempt("its object cannot be pickled", made)
            except Refused as error:
                refused, wants = error, ()
                fields = {"refused": str(error), "how": error.how}
                gift = Gift(problem=json.dumps(fields).encode(), remark=remark)
            look = partial(self._look, call, ranks)
            found = agreement.take_part(call, len(ranks), gift, wants, until, look=look)
            found.own_problem = refused
            return found
        except Failed as failed:
            if failed.verdict.error == "calls":
                raise CallsDiffer(failed.verdict.text) from None
            if self._stopped:
                self._closed_in(call)
            self._fail(call, failed.verdict)
        except Expired:
            self._expired(call, ranks, timeout)
        except CollectiveError as error:
            if self._stopped:
                self._closed_in(call)
            how = "timeout" if isinstance(error, CollectiveTimeout) else "lost"
            host = (0,) if self._placement.hosts_store else ()
            text = f"{call}: {self._name(0)}: {error}" if host else f"{call}: {error}"
            self._fail(call, Verdict(how, text, host), tells=False)
        except MemoryError as error:
            verdict = Verdict("other", f"{call}: {self._me} has no memory {error}".rstrip(), ())
            self._fail(call, verdict, anew=True)
        except BaseException as error:
            text = f"{call}: {self._me} was interrupted by {error!r}"
            self._unusable = CollectiveError, text, ()
            self._tell(Verdict("other", text), anew=True)
            raise

    def _closed_in(self, call: Call) -> NoReturn:
        text = f"{call}: {self._me} closed its context meanwhile"
        self._unusable = CollectiveError, text, ()
        raise ContextError(text) from None

    def _look(self, call: Call, ranks: Sequence[int]) -> None:
        """Have the call fail for a rank of this machine that cannot come to it any more."""
        assert self._agreement is not None and self._me is not None
        away = self._agreement.away(call, (rank for rank in self._near if rank in ranks))
        self._look_up(list(away))
        for rank, last in away.items():
            record = self._known.get(rank)
            if record is not None and record.state(self._me) == "gone":
                text = f"{call}: {record} has ended"
                text += f"; it was last heard of in {_called(last)}" if last else ""
                self._fail_here(call, Verdict("lost", text, (rank,)))
        for rank, last in away.items():
            if last is not None and last.number > self._calls.get(last.scope, sys.maxsize):
                text = (
                    f"{call}: the ranks call different things: {self._me} calls {call}, "
                    f"{self._name(rank)} calls {last}"
                )
                self._fail_here(call, Verdict("other", text))

    def _fail_here(self, call: Call, verdict: Verdict) -> None:
        """Have a call fail that this rank waits for, unless it is complete by now."""
        assert self._agreement is not None
        stands = self._agreement.fail(call, verdict)
        if stands is not None:
            raise Failed(stands)

    def _expired(self, call: Call, ranks: Sequence[int], timeout: float) -> NoReturn:
        """Raise for a deadline, with the ranks that the first rank whose deadline passed misses."""
        assert self._agreement is not None
        connection = self._agreement.connection
        try:
            missing = list(self._agreement.away(call, ranks))
            lacks = "; ".join(self._described(connection, missing, _soon()))
            text = f"{call}: not all ranks came within {timeout:g} s: {lacks}"
            if not missing:
                text = f"{call}: all ranks have come, but it was not done within {timeout:g} s"
            verdict = Verdict("timeout", text, tuple(missing))
            verdict = self._agreement.fail(call, verdict) or verdict
        except CollectiveError as error:
            verdict = Verdict("timeout", f"{call}: not done within {timeout:g} s, and {error}")
        self._fail(call, verdict)

    def _fail(
        self, call: Call, verdict: Verdict, *, tells: bool = True, anew: bool = False
    ) -> NoReturn:
        """Refuse every later call with the reason, have the others know it, and raise it."""
        text = verdict.text if verdict.text.startswith(str(call)) else f"{call}: {verdict.text}"
        error = _ERRORS.get(verdict.error, CollectiveError)
        self._unusable = error, verdict.text, verdict.missing
        if tells:
            self._tell(verdict, anew=anew)
        if error is PeerLost and not self._store.is_closed:
            # The launcher sees the end of the lost rank and ends this one, too. The rank that
            # fails first is taken for the cause: let that be the lost one.
            time.sleep(CAUSE_FIRST_S)
        raise error(text, verdict.missing) from None

    def _tell(self, verdict: Verdict, *, anew: bool = False) -> None:
        """Have the calls fail that this rank is in or would come to next, as far as that works.

        ``anew``: by a new connection, since an answer may be on its way on the other one.
        """
        agreement, calls = self._agreement, [self._now] if self._now else []
        if agreement is None:
            return
        calls += [Call(scope, number + 1, "") for scope, number in self._calls.items()]
        with contextlib.suppress(CollectiveError, ContextError), contextlib.ExitStack() as stack:
            connection = agreement.connection
            if anew:
                connection = stack.enter_context(contextlib.closing(self._store.connect(_soon())))
            line = self.over(connection, TELL_S)
            for call in calls:
                line.fail(call, verdict)

    def _free(self, why: str) -> None:
        agreement = self._agreement
        if agreement is not None:
            with contextlib.suppress(CollectiveError):
                if self._unusable is None:
                    self._unusable = ContextError, "the context is closed", ()
                    closed = json.dumps(Call("", 0, "")).encode()
                    agreement.connection.put(f"doing/{self._placement.rank}", closed, _soon())
                    text = f"{self._me} {why}; it was last heard of in {_called(self._last)}"
                    self._tell(Verdict("lost", text, self._own))
                self._leave(agreement.connection)
            agreement.connection.close()
            self._agreement = None
        self._close_key()

    def _leave(self, connection: StoreConnection) -> None:
        """Count as one that has closed its context; if it hosts the store, wait for the others.

        They may still read from it how the last call has ended.
        """
        if self._placement.hosts_store and self._placement.rank == 0:
            connection.wait("left/all", time.monotonic() + LEAVE_S)
        elif connection.add("left", 1, _soon()) == self._placement.size - 1:
            connection.put("left/all", b"1", _soon())

    def _close_key(self) -> None:
        key, self._key = self._key, -1
        if key >= 0:
            os.close(key)

    def _refuse_unusable(self, name: str) -> None:
        if self._unusable is None:
            return
        kind, text, missing = self._unusable
        if issubclass(kind, CollectiveError):
            raise kind(f"{name}: the ranks are not connected any more since {text}", missing)
        raise kind(f"{name}: {text}")

    # ── who the others are ───────────────────────────────────────────────────────────────────────

    @property
    def _own(self) -> tuple[int, ...]:
        return (self._placement.rank,)

    def _look_up(self, ranks: Sequence[int]) -> None:
        """Read the records of ranks that are not known yet."""
        wanted = [rank for rank in ranks if rank not in self._known]
        if wanted and self._agreement is not None:
            until = _soon()
            keys = [f"rank/{rank}" for rank in wanted]
            found = self._agreement.connection.multi_get(keys, until)
            for rank, raw in zip(wanted, found, strict=True):
                with contextlib.suppress(PlacementError):
                    self._known[rank] = read_record(raw, rank)

    def _name(self, rank: int) -> str:
        return str(self._known.get(rank) or f"rank {rank}")

    def _described(
        self, connection: StoreConnection, ranks: Sequence[int], until: float
    ) -> list[str]:
        """Return what ranks have called last, as the store and this machine know it."""
        keys = [*(f"rank/{rank}" for rank in ranks), *(f"doing/{rank}" for rank in ranks)]
        found = connection.multi_get(keys, until)
        texts = []
        for rank, raw, doing in zip(ranks, found, found[len(ranks) :], strict=False):
            try:
                record = read_record(raw, rank)
            except PlacementError:
                texts.append(f"rank {rank} does not answer")
                continue
            call, state = read_call(doing), record.state(self._me) if self._me else ""
            if state == "gone" or (call is not None and not call.number):
                texts.append(f"{record} has ended, or has closed its context")
            elif state in ("T", "t"):
                texts.append(f"{record} is stopped")
            else:
                texts.append(f"{record}: its last call was {_called(call)}")
        return texts

    # ── objects ──────────────────────────────────────────────────────────────────────────────────

    def _objects(self, call: Call, found: Gathered, ranks: Sequence[int], own: Any) -> list[Any]:
        """Return the objects of ``ranks``; this one's is ``own`` itself."""
        given = {rank: found.given.get(rank) for rank in ranks}
        return [
            own if rank == self._placement.rank else self._unpacked(call, rank, value, own)
            for rank, value in given.items()
        ]

    def _unpacked(self, call: Call, rank: int, value: Value | None, own: Any) -> Any:
        """Return a rank's object; ``own``: this rank's, of whose classes it may be anyway."""
        if value is None:
            raise PeerLost(f"{call}: what rank {rank} gave is not in the round's store any more")
        try:
            return attempt("cannot be unpickled here", lambda: unpacked(value, own))
        except CollectiveError as error:
            self._look_up([rank])
            text = f"{call}: the object of {self._name(rank)} {error}"
            if isinstance(error.__cause__, unpickling.PickleRefused):
                text += f"; {UNSHARED}"
            raise CollectiveError(text) from error.__cause__

    def _fields(self, call: Call, rank: int, value: Value) -> dict[str, Any]:
        try:
            fields = json.loads(value.content)
            if isinstance(fields, dict):
                return fields
        except (ValueError, RecursionError):
            pass
        raise PeerLost(f"{call}: what rank {rank} reports cannot be read: {value.content[:40]!r}")

    def _raise_problems(self, call: Call, found: Gathered) -> None:
        """Raise what the ranks report that could not give their object."""
        if not found.problems:
            return
        self._look_up(sorted(found.problems))
        texts, sizes = [], True
        for rank, value in sorted(found.problems.items()):
            fields = self._fields(call, rank, value)
            texts.append(f"{self._name(rank)}: {fields.get('refused')}")
            sizes = sizes and fields.get("how") == "size"
        raise (ContextError if sizes else CollectiveError)(f"{call}: {'; '.join(texts)}") from (
            found.own_problem
        )


def _soon() -> float:
    return time.monotonic() + TELL_S


def _called(call: Call | None) -> str:
    """Return what a rank called last; what it alone has called has no scope and no number."""
    if call is None or call.scope == MEET.scope:
        return MEET.name
    return str(call) if call.scope else call.name
