"""Runs for an OpenTelemetry collector, by OTLP over HTTP: metrics, and a trace of each run.

The metrics are those of Prometheus' page (elaunch.runs.prometheus), with its labels as attributes.
A trace has a span for the run and one below it for each round, sent once they have ended; an error
is a round that has a failure report, and a run that did not end as it should. Their ids come from
the run, so one that is sent again is the same. The standard variables say where to
(``OTEL_EXPORTER_OTLP_ENDPOINT`` and its like) and how often (``OTEL_METRIC_EXPORT_INTERVAL``).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from elaunch import __version__
from elaunch.errors import UsageError
from elaunch.runs.directory import RunDir
from elaunch.runs.job import JobDocument
from elaunch.runs.prometheus import FAMILIES, samples
from elaunch.runs.record import Record
from elaunch.text import duration, one_line
from elaunch.views.read import read, read_all

EVERY: Final = "OTEL_METRIC_EXPORT_INTERVAL"
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
LONGEST_MS: Final = 86_400_000
UNSENT: Final = "it was not sent"
FINE: Final = frozenset({"COMPLETED", "STOPPED", "PREEMPTED"})
_ERRNO: Final = re.compile(r"\[Errno -?\d+\] ([\w ]+)")
_SCOPE: Final = InstrumentationScope("elaunch", __version__)


def export(environ: Mapping[str, str], run: RunDir | None, warn: Callable[[str], object]) -> bool:
    """Send how ``run`` stands until it has ended; return whether the last of it was taken.

    With None all runs are sent for ever, and of their spans those that end from now on. ``warn``
    gets a line where the collector begins to take nothing, and where it takes something again.
    """
    every, place = _seconds(environ), _place(environ)
    collector = Collector(since=0.0 if run is not None else time.time())
    silent = False
    while True:
        jobs = read_all(environ) if run is None else (read(run),)
        why = collector.send(jobs)
        goes_on = run is None or jobs[0].live
        if why and not silent:
            again = f"; it is sent again every {duration(every)}" if goes_on else ""
            fix = f"start one there, or have {ENDPOINT} name another"
            warn(f"the collector at {place} takes nothing: {why}; {fix}{again}")
        elif silent and not why:
            warn(f"the collector at {place} takes what is sent")
        silent = bool(why)
        if not goes_on:
            return not why
        time.sleep(every)


def _seconds(environ: Mapping[str, str]) -> float:
    """Return the seconds from one sending to the next."""
    raw = environ.get(EVERY) or "60000"
    try:
        number = float(raw)
    except ValueError:
        number = 0.0
    if not 1 <= number <= LONGEST_MS:
        fix = f"give milliseconds from 1 to {LONGEST_MS:,}, or leave it out for 60,000"
        raise UsageError(f"{EVERY}={raw}: is not a number of milliseconds; {fix}")
    return number / 1000


def _place(environ: Mapping[str, str]) -> str:
    """Return where the collector is, without a password that may be in its address."""
    for name in (ENDPOINT.replace("OTLP_", "OTLP_METRICS_"), ENDPOINT):
        if raw := environ.get(name):
            url = urlsplit(raw.strip())
            if url.scheme not in ("http", "https") or not url.hostname:
                raise UsageError(f"{name}={raw}: is no URL; give one, as http://localhost:4318")
            return f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
    return "http://localhost:4318"


class _CollectorSession(requests.Session):
    """Keeps in ``why`` what became of the newest request: "" where it was taken."""

    why = ""

    def request(self, *args: Any, **named: Any) -> requests.Response:
        """Send a request."""
        try:
            answer = super().request(*args, **named)
        except requests.Timeout:
            self.why = "it has not answered in time"
            raise
        except requests.RequestException as error:
            found = _ERRNO.search(str(error))
            self.why = one_line((found[1] if found else str(error))[:200])
            raise
        self.why = "" if answer.ok else one_line(f"it answers {answer.status_code} {answer.reason}")
        return answer


class Collector:
    """Where it is sent; what was not taken is sent again the next time.

    Args:
        since: spans that ended before are not sent; seconds since the epoch.
    """

    def __init__(self, since: float) -> None:
        self._session = _CollectorSession()
        exporters = logging.getLogger("opentelemetry")
        exporters.addHandler(logging.NullHandler())  # export() reports it
        exporters.propagate = False
        own = {"service.name": "elaunch", "host.name": os.uname().nodename}
        self._resource = Resource(own).merge(OTELResourceDetector().detect())
        self._metrics = OTLPMetricExporter(session=self._session)
        self._spans = OTLPSpanExporter(session=self._session)
        self._since = since
        self._sent: set[int] = set()

    def send(self, jobs: Sequence[JobDocument]) -> str:
        """Send metrics and new spans; return "", or why something was not taken."""
        if self._metrics.export(self._measured(jobs)) is not MetricExportResult.SUCCESS:
            return self._session.why or UNSENT
        spans = {
            span.context.span_id: span
            for job in jobs
            for span in self._spans_of(job)
            if span.context is not None and (span.end_time or 0) >= self._since * 1e9
        }
        new = [span for span_id, span in spans.items() if span_id not in self._sent]
        if new and self._spans.export(new) is not SpanExportResult.SUCCESS:
            return self._session.why or UNSENT
        self._sent.update(spans)
        return ""

    def _measured(self, jobs: Sequence[JobDocument]) -> MetricsData:
        now = time.time_ns()
        points: dict[str, list[NumberDataPoint]] = {}
        for job in jobs:
            for name, labels, value in samples(job):
                point = NumberDataPoint(dict(labels), 0, now, float(value))
                points.setdefault(name, []).append(point)
        metrics = [Metric(name, FAMILIES[name], "", Gauge(found)) for name, found in points.items()]
        scopes = [ScopeMetrics(_SCOPE, metrics, "")]
        return MetricsData([ResourceMetrics(self._resource, scopes, "")])

    def _spans_of(self, job: JobDocument) -> Iterator[ReadableSpan]:
        """Yield the spans of what has ended: rounds, and the run."""
        record = job.record
        if record is None:
            return
        try:
            failed = set(job.run.reports())
        except OSError:
            return  # it was pruned
        after = [each["reason"] for each in record["history"][1:]]
        for each, why in zip(record["history"], [*after, job.reason], strict=False):
            if each["ended_at"] is not None:
                yield self._span(
                    record,
                    f"round {each['round']}",
                    (each["started_at"], each["ended_at"]),
                    error=(why or "failed") if each["round"] in failed else None,
                    began=each["reason"],
                    recovery_s=each["recovery_s"],
                    resumed_step=each["resumed_step"],
                )
        if not job.live and record["ended_at"] is not None:
            yield self._span(
                record,
                "run",
                (record["started_at"], record["ended_at"]),
                error=None if job.state in FINE else job.reason or job.state,
                state=job.state,
                exit_code=record["exit_code"],
                restarts=record["restarts"]["used"],
            )

    def _span(
        self,
        record: Record,
        name: str,
        lasted: tuple[float, float],
        *,
        error: str | None,
        **attributes: Any,
    ) -> ReadableSpan:
        begin, end = (round(at * 1e9) for at in lasted)
        about = {"run_id": record["run_id"], "name": record["name"], **attributes}
        return ReadableSpan(
            name,
            context=_context(record, name),
            parent=None if name == "run" else _context(record, "run"),
            resource=self._resource,
            attributes={f"elaunch.{key}": one for key, one in about.items() if one is not None},
            status=Status(StatusCode.UNSET if error is None else StatusCode.ERROR, error),
            start_time=begin,
            end_time=end,
            instrumentation_scope=_SCOPE,
        )


def _context(record: Record, name: str) -> SpanContext:
    """Return the ids of a span; two nodes' runs of one job are two traces."""
    whose = f"{record['agent']['host']} {record['dir']} {record['started_at']}"
    trace_id, span_id = (
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big")
        for text, size in ((whose, 16), (f"{whose} {name}", 8))
    )
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))
