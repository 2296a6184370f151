"""The addresses of the dashboard; all but one only read.

=========================  =========================================================================
address                    answers
=========================  =========================================================================
``/``                      the page; which view is shown is behind the ``#`` of the address
``/static/NAME``           its scripts and its style
``/api/runs``              the runs; server-sent events with ``Accept: text/event-stream``
``/api/run?run=KEY``       one run, the same way
``/api/failures?run=KEY``  the failure reports of a run, whole
``/api/metrics?run=KEY``   which metrics a run has, its restarts and checkpoints
``/api/curves?run=KEY…``   one metric: ``group``, ``name``, ``x``, ``ranks``, ``from``, ``to``
``/api/csv?run=KEY``       the metrics as comma-separated values
``/api/logs?run=KEY…``     lines: ``ranks``, ``node``, ``round``, ``stream``, ``text``, ``older``;
                           the same way
``/api/stacks?run=KEY``    where all ranks of a running job are, on all nodes
``/api/checkpoints?run=…`` what is in the run's checkpoint directory
``/api/control``           ``key``: what a POST has to show, None where nothing can be changed
``POST /api/control?…``    ``run``, ``op``: ``stop`` or ``preempt`` a job, or ``restart`` its round
``/metrics``               all runs for Prometheus
``/healthz``               ``ok``
=========================  =========================================================================

KEY is the name of a run directory, which is looked up among those that there are: no part of a
request is ever a path.

Readings and lines of logs are pushed to open pages, as server-sent events. However many pages watch
the same thing, it is read once per interval, and only while somebody watches. An interval is at
least LEAST_S and so long that reading takes at most a twentieth of it. Lines of logs are those that
were found, then those that come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from elaunch.dashboard.guard import CONTROL
from elaunch.errors import ElaunchError, UsageError
from elaunch.runs import prometheus
from elaunch.runs.directory import RunDir, handle, is_live
from elaunch.runs.job import BAD
from elaunch.runs.logtree import STREAMS
from elaunch.runs.statedir import roots, subdirectories
from elaunch.training.metrics import reading
from elaunch.views import agents, checkpointtarget
from elaunch.views import json as documents
from elaunch.views.checkpoints import document
from elaunch.views.curves import Axis, MetricsReader, nodes_of
from elaunch.views.failures import read_card
from elaunch.views.logs import Choice, parse_ranks
from elaunch.views.logtail import LogFilter, RunLogs, newer, search
from elaunch.views.read import RunReader, read, read_all

STATIC: Final = Path(__file__).parent / "static"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
STREAM: Final = "text/event-stream"
KEPT_RUNS: Final = 4  # whose metrics are kept open; as many pages show different runs
STACKS_S: Final = 5.0
"""Seconds between two readings of a job's stacks, however many pages ask."""

VERBS: Final = {"preempt": "end", "restart": "restart"}
"""Requests to an agent, and their names where another machine has to be asked."""

Answer = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


def _last_used(make: Callable[[RunDir], T]) -> Callable[[RunDir], T]:
    """Return what keeps what it has made of the last few runs, since each may be large."""
    return lru_cache(KEPT_RUNS)(make)


def _screen_of(run: RunDir) -> Callable[[], dict[str, Any]]:
    reader = RunReader(run, screen=True)
    return lambda: documents.screen(reader.read())


def _read_stacks(run: RunDir) -> dict[str, Any]:
    taken = {"taken_at": time.time(), "every_s": STACKS_S}
    return {**agents.stacks_of(run, ()).to_dict(), **taken}


class Dashboard:
    """The state between requests: the files of the page, and feeds of what was watched last.

    Args:
        environ: tells where runs are.
        first: the run that the page opens with, wherever its directory is.
        key: what the page shows when it changes something; None: it cannot.
    """

    def __init__(
        self, environ: Mapping[str, str], first: RunDir | None = None, key: str | None = None
    ) -> None:
        self.closing = asyncio.Event()
        """Set by the server when it closes: nothing more is sent to open pages."""
        self._environ = environ
        self._first = first
        self._key = key
        self._files = {path.name: path for path in STATIC.iterdir() if path.suffix in TYPES}
        self._runs_feed = Feed(self._read_runs)
        self._feed_of = _last_used(lambda run: Feed(_screen_of(run)))
        self._stacks_of = _last_used(lambda run: Feed(partial(_read_stacks, run), STACKS_S))
        self._metrics_of = _last_used(lambda run: MetricsReader(run, environ))
        self._logs_of = _last_used(lambda run: RunLogs(run, environ))

    def app(self) -> Starlette:
        """Return the application."""
        answers: dict[str, Answer] = {
            "/": self._page,
            "/static/{name}": self._static,
            "/api/runs": self._runs,
            "/api/run": self._run,
            "/api/failures": self._in_thread(self._failures),
            "/api/metrics": self._in_thread(lambda run, _: self._metrics_of(run).overview()),
            "/api/curves": self._in_thread(self._curves),
            "/api/csv": self._in_thread(self._csv),
            "/api/logs": self._logs,
            "/api/stacks": self._stacks,
            "/api/checkpoints": self._in_thread(self._checkpoints),
            CONTROL: self._control,
            "/metrics": self._prometheus,
            "/healthz": self._healthz,
        }
        routes = [Route(path, self._told(answer)) for path, answer in answers.items()]
        if self._key is not None:
            change = self._told(self._in_thread(self._change))
            routes.append(Route(CONTROL, change, methods=["POST"]))
        return Starlette(routes=routes)

    def _told(self, answer: Answer) -> Answer:
        """Make an answer of what goes wrong on the way to one."""

        async def told(request: Request) -> Response:
            try:
                return await answer(request)
            except LookupError as error:
                return PlainTextResponse(f"there is no {error.args[0]}\n", 404)
            except (ElaunchError, ValueError) as error:
                return PlainTextResponse(f"{error}\n", 400)
            except OSError as error:
                return PlainTextResponse(f"{error}\n", 500)

        return told

    def _in_thread(self, read: Callable[[RunDir, Mapping[str, str]], Any]) -> Answer:
        """Answer with what ``read`` makes of a run and the query, as JSON or text."""

        async def answer(request: Request) -> Response:
            query = dict(request.query_params)
            found = await asyncio.to_thread(lambda: read(self._named(query), query))
            if isinstance(found, Response):
                return found
            return Response(encoded(found), media_type="application/json")

        return answer

    def _named(self, query: Mapping[str, str]) -> RunDir:
        key = query.get("run", "")
        if self._first is not None and key == self._first.path.name:
            return self._first
        for root in roots(self._environ):
            for path in subdirectories(root):
                if path.name == key and not key.startswith("."):
                    return RunDir(path)
        raise LookupError(f"run {key[:200]!r}")

    async def _page(self, request: Request) -> Response:
        return self._file("index.html")

    async def _static(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        path = self._files.get(name)
        if path is None:
            raise LookupError(f"file {name[:200]!r}")
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    async def _runs(self, request: Request) -> Response:
        return await self._watched(request, self._runs_feed, self._read_runs)

    def _read_runs(self) -> dict[str, Any]:
        jobs = read_all(self._environ, everything=True)
        if self._first is not None and self._first.path not in {job.run.path for job in jobs}:
            jobs = (read(self._first), *jobs)
        ids = Counter(job.run_id for job in jobs)
        runs = [
            {
                **row,
                "key": job.run.path.name,
                "name_shown": job.run_id if ids[job.run_id] == 1 else handle(job.run),
                "live": job.live,
                "bad": job.state in BAD,
                "awaited": job.record.get("awaited") if job.record and job.live else None,
            }
            for row, job in zip(documents.listed(jobs), jobs, strict=True)
        ]
        first = self._first.path.name if self._first else None
        read_at = jobs[0].read_at if jobs else None
        return {"runs": runs, "first": first, "read_at": read_at}

    async def _run(self, request: Request) -> Response:
        run = self._named(request.query_params)
        return await self._watched(request, self._feed_of(run), _screen_of(run))

    async def _stacks(self, request: Request) -> Response:
        """Ask the job at most once in STACKS_S, whoever asks here."""
        feed = self._stacks_of(self._named(request.query_params))
        return Response(await feed.newest(), media_type="application/json")

    async def _watched(
        self, request: Request, feed: Feed, read: Callable[[], dict[str, Any]]
    ) -> Response:
        """Answer once, or with each change."""
        if request.headers.get("accept") != STREAM:
            found = encoded(await asyncio.to_thread(read))
            return Response(found, media_type="application/json")
        return StreamingResponse(feed.events(self.closing), media_type=STREAM)

    def _failures(self, run: RunDir, query: Mapping[str, str]) -> Any:
        cards = (read_card(run, number) for number in run.reports())
        return [
            {"round": each.round, "text": each.text, "problem": each.problem, "card": each.document}
            for each in cards
        ]

    def _curves(self, run: RunDir, query: Mapping[str, str]) -> Any:
        name = query.get("group", ""), query.get("name", "")
        ranks = sorted(parse_ranks("ranks", query["ranks"])) if query.get("ranks") else None
        first, last = (
            float(query.get(end) or f"{sign}inf") for end, sign in (("from", "-"), ("to", ""))
        )
        axis: Axis = "time" if query.get("x") == "time" else "step"
        return {"curves": self._metrics_of(run).curves(name, axis, ranks, first, last)}

    def _csv(self, run: RunDir, query: Mapping[str, str]) -> Response:
        rows = [
            row for row in reading.read(nodes_of(run, self._environ)).rows if not row.superseded
        ]
        named = f'attachment; filename="{quote(run.path.name)}.csv"'
        return StreamingResponse(
            reading.csv_text(rows, False),
            media_type="text/csv",
            headers={"content-disposition": named},
        )

    async def _logs(self, request: Request) -> Response:
        query = request.query_params
        logs, stream = self._logs_of(self._named(query)), query.get("stream", "")
        choice = Choice(
            parse_ranks("ranks", query["ranks"]) if query.get("ranks") else None,
            parse_round(query.get("round", "")),
            (stream,) if stream in STREAMS else STREAMS,
            query.get("node") or None,
        )
        wanted = LogFilter(choice, query.get("text", ""))
        older = parse_older(query.get("older", ""))
        found, ends = await asyncio.to_thread(search, logs, wanted, older)
        if request.headers.get("accept") != STREAM:
            return Response(encoded(found), media_type="application/json")
        return StreamingResponse(follow(logs, wanted, found, ends, self.closing), media_type=STREAM)

    def _checkpoints(self, run: RunDir, query: Mapping[str, str]) -> Any:
        if run.read_state()["checkpoint_dir"] is None:
            return {"directory": None}
        target = checkpointtarget.resolve(str(run.path), self._environ)
        try:
            return document(checkpointtarget.listing(target, self._environ))
        except FileNotFoundError:
            return {"directory": str(target.place)}

    async def _control(self, request: Request) -> Response:
        return Response(encoded({"key": self._key}), media_type="application/json")

    def _change(self, run: RunDir, query: Mapping[str, str]) -> dict[str, str]:
        op = query.get("op", "")
        if op == "stop":
            agent = agents.send_stop(run)
            if agent is not None:
                os.close(agent)
            return {"done": "SIGTERM was sent to its agent"}
        if op not in VERBS:
            raise ValueError(f"op {op[:50]!r}: stop, {', '.join(VERBS)}")
        return {"done": agents.asked(run, {"op": op, "reason": "elaunch dashboard"}, VERBS[op])}

    async def _prometheus(self, request: Request) -> Response:
        page = prometheus.render(await asyncio.to_thread(read_all, self._environ))
        return Response(page, media_type=prometheus.CONTENT_TYPE)

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")


LEAST_S: Final = 1.0
SHARE: Final = 20
SILENT_S: Final = 15.0
"""Seconds after which a comment is sent, by which a client that is gone is noticed."""


def encoded(document: Any) -> str:
    """Return JSON that every browser can parse: NaN and infinities are null."""
    try:
        return msgspec.json.encode(document).decode()
    except (TypeError, UnicodeEncodeError):  # a key that is None; a file's name that is no UTF-8
        plain = json.loads(json.dumps(document), parse_constant=lambda _: None)
        return json.dumps(plain, separators=(",", ":"))


async def pause(closing: asyncio.Event, seconds: float) -> bool:
    """Wait ``seconds``, or until the server closes; return whether it goes on."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(closing.wait(), seconds)
    return not closing.is_set()


class Feed:
    """The newest reading of one thing, for all who follow it, at most one in ``least_s``.

    ``read`` is called in a thread. It returns the document, whose ``read_at`` is no change of it.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], least_s: float = LEAST_S) -> None:
        self._read = read
        self._least_s = least_s
        self._lock = asyncio.Lock()
        self._due = 0.0
        self._gist = ""
        self._newest = b""

    async def newest(self) -> bytes:
        """Return the document as JSON; the same object as before where nothing has changed."""
        async with self._lock:
            if time.monotonic() >= self._due:
                began = time.monotonic()
                document, gist = await asyncio.to_thread(self._reading)
                ended = time.monotonic()
                self._due = ended + max(self._least_s, SHARE * (ended - began))
                if gist != self._gist:
                    self._gist, self._newest = gist, document
            return self._newest

    def _reading(self) -> tuple[bytes, str]:
        document = self._read()
        gist = encoded({**document, "read_at": None})
        return encoded(document).encode(), gist

    async def events(self, closing: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield an event for each change, until the client is gone or the server closes.

        The server of one run closes when that has ended, so the last event is of then.
        """
        last, sent_at, due = b"", time.monotonic(), 0.0
        while await pause(closing, due):
            newest = await self.newest()
            if newest is not last:
                last, sent_at = newest, time.monotonic()
                yield b"data: " + newest + b"\n\n"
            elif time.monotonic() - sent_at > SILENT_S:
                sent_at = time.monotonic()
                yield b": still here\n\n"
            due = max(0.05, self._due - time.monotonic())
        self._due = 0.0
        if (newest := await self.newest()) is not last:
            yield b"data: " + newest + b"\n\n"


PAUSE_S: Final = 1.0


async def follow(
    logs: RunLogs,
    wanted: LogFilter,
    document: dict[str, Any],
    ends: dict[str, int],
    closing: asyncio.Event,
) -> AsyncIterator[bytes]:
    """Yield what :func:`search` has returned as an event, then lines, until the server closes.

    The last event has ``ended``: the run has, or had.
    """
    yield _event(document)
    held: dict[str, bytes] = {}
    sent_at, live, serves = time.monotonic(), True, True
    while live and serves:
        serves = await pause(closing, PAUSE_S)
        # Asked first: what a run that has ended wrote is there.
        live = await asyncio.to_thread(is_live, logs.run)
        lines = await asyncio.to_thread(newer, logs, wanted, ends, held)
        if lines or not live:
            sent_at = time.monotonic()
            yield _event({"lines": lines, "ended": not live})
        elif time.monotonic() - sent_at > SILENT_S:
            sent_at = time.monotonic()
            yield b": still here\n\n"


def parse_round(text: str) -> int | None:
    """Return the number of a round, None for "". Raises UsageError."""
    try:
        return int(text) if text else None
    except ValueError:
        raise UsageError(f"round {text[:50]}: is no number; give that of a round, as 0") from None


def parse_older(text: str) -> dict[str, int] | None:
    """Return how far each file was read, as ``older`` has it; None for "". Raises UsageError."""
    if not text:
        return None
    try:
        return {str(name): max(0, int(at)) for name, at in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UsageError("older is not what an answer had") from None


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + encoded(document).encode() + b"\n\n"
