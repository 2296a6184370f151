"""One member of an etcd: the connection to it, calls and streams on that.

All of gRPC's work in this process is done by one thread that runs an event loop, however many
stores there are: gRPC's blocking interface would have a thread for each stream look ten times a
second whether something has come. Here a waiting thread sleeps until it has.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any

from elaunch.errors import StoreClosed
from elaunch.store.etcd.errors import Refusal

Metadata = tuple[tuple[str, str], ...]

# One connection per store and member, reconnected soon, never through a proxy, no size limits of
# gRPC's (etcd has its own), no traffic for bandwidth estimates; a ping finds a dead connection on
# which only a watch waits (etcd allows one every five seconds).
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
_CLOSE_SECONDS = 1.0
_COLLECT_AFTER = 1.0
"""Seconds until the caller that closed a connection refers to it no more."""
_ENDED = object()


class _Loop:
    """The thread that runs the event loop, until this process ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._collecting = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="etcd", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Have a coroutine run, and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, call: Any, argument: Any) -> None:
        """Have ``call(argument)`` done in the loop."""
        self._loop.call_soon_threadsafe(call, argument)

    def collect(self) -> None:
        """Have closed connections collected in a moment; in the loop's thread only.

        gRPC keeps a connection for as long as something refers to its channel. Its calls do, and
        errors refer to calls and to each other: only the garbage collector ends that, which comes
        to an agent that does little once in hours.
        """
        if not self._collecting:
            self._collecting = True
            self._loop.call_later(_COLLECT_AFTER, self._collect)

    def _collect(self) -> None:
        self._collecting = False
        gc.collect()

    def _stop(self) -> None:
        self.begin(self._finish())
        self._thread.join(_CLOSE_SECONDS)

    async def _finish(self) -> None:
        """End what was not closed: asyncio would write about it when this process ends."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_CLOSE_SECONDS / 2)
        self._loop.stop()


_one_at_a_time = threading.Lock()


def _the_loop() -> _Loop:
    """Return the one loop of this process; gRPC's objects cannot go from one to another."""
    with _one_at_a_time:
        return _first_loop()


@cache
def _first_loop() -> _Loop:
    return _Loop()


class Member:
    """One member; the connection is opened by the first call.

    Args:
        loaded: what elaunch.store.etcd.imports.load returned.
        address: ``host:port``.
        credentials: gRPC's, for TLS; None: without.
    """

    def __init__(self, loaded: Any, address: str, credentials: Any) -> None:
        self.address = address
        self.loaded = loaded
        self._credentials = credentials
        self._channel: Any = None  # this and the rest belong to the loop's thread
        self._methods: dict[tuple[str, str], Any] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    def call(
        self, service: str, method: str, request: Any, seconds: float, metadata: Metadata
    ) -> Any:
        """Call an RPC such as ``("KV", "Range")`` and wait for its answer.

        Raises:
            grpc.RpcError: it failed.
            StoreClosed: the connection was closed.
        """
        return self.begin(service, method, request, seconds, metadata).result()

    def begin(
        self, service: str, method: str, request: Any, seconds: float, metadata: Metadata
    ) -> Future[Any]:
        """Call an RPC and return the future of its answer, which raises as ``call``."""

        async def work() -> Any:
            task = asyncio.current_task()
            assert task is not None  # a coroutine of the loop's
            self._calls.add(task)
            try:
                rpc = self.method(service, method)
                return await rpc(request, timeout=seconds, metadata=metadata)
            except (asyncio.CancelledError, self.loaded.grpc.aio.UsageError) as error:
                raise StoreClosed(f"the connection to {self.address} was closed") from error
            finally:
                self._calls.discard(task)

        return _the_loop().begin(work())

    def method(self, service: str, name: str) -> Any:
        """Return gRPC's callable; in the loop's thread only."""
        if self._closed:
            raise StoreClosed(f"the connection to {self.address} was closed")
        if self._channel is None:
            self._channel = self._open()
        if (service, name) not in self._methods:
            self._methods[service, name] = self.loaded.method(self._channel, service, name)
        return self._methods[service, name]

    def close(self) -> Future[None]:
        """Begin to close the connection; calls that wait on it get StoreClosed.

        The future that is returned is done when no call can be made any more.
        """

        async def work() -> None:
            self._closed = True
            for task in self._calls:
                task.cancel()
            channel, self._channel, self._methods = self._channel, None, {}
            if channel is not None:
                await channel.close()
            _the_loop().collect()

        return _the_loop().begin(work())

    def _open(self) -> Any:
        aio = self.loaded.grpc.aio
        if self._credentials is None:
            return aio.insecure_channel(self.address, _OPTIONS)
        return aio.secure_channel(self.address, self._credentials, _OPTIONS)


class EtcdStream:
    """A call with many requests and many answers."""

    def __init__(self, member: Member, service: str, method: str, metadata: Metadata) -> None:
        self.member = member
        self.ended = False
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._work = _the_loop().begin(self._run(service, method, metadata))

    def send(self, request: Any) -> None:
        """Have a request sent."""
        _the_loop().soon(self._requests.put_nowait, request)

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next answer, None when the stream was ended from our side.

        Raises:
            queue.Empty: nothing came for ``timeout`` seconds.
            grpc.RpcError, Refusal: the stream broke.
        """
        answer = self._answers.get(timeout=timeout)
        if isinstance(answer, Exception):
            raise answer
        return None if answer is _ENDED else answer

    @property
    def idle(self) -> bool:
        """Whether nothing has come that was not received; a broken stream is not idle."""
        return self._answers.empty()

    def __iter__(self) -> Iterator[Any]:
        """Return the answers as they come, until we end the stream; raises as ``receive``."""
        return iter(self.receive, None)

    def end(self) -> None:
        """End it from our side."""
        self.ended = True
        self._work.cancel()
        self._answers.put(_ENDED)

    async def _run(self, service: str, method: str, metadata: Metadata) -> None:
        try:
            call = self.member.method(service, method)(self._feed(), metadata=metadata)
            async for answer in call:
                self._answers.put(answer)
            self._answers.put(Refusal("failing", "it ended the stream"))
        except (self.member.loaded.grpc.RpcError, StoreClosed) as error:
            self._answers.put(error)
        except self.member.loaded.grpc.aio.UsageError:
            self._answers.put(_ENDED)
        except asyncio.CancelledError:
            self._answers.put(_ENDED)
            raise
        finally:
            self._requests.put_nowait(_ENDED)

    async def _feed(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not _ENDED:
            yield request
