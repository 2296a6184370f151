"""``elaunch otlp`` and a collector that decodes what it gets."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from elaunch.cli import execute
from elaunch.runs.prometheus import FAMILIES
from tests.integration.jobs import SPAWN
from tests.integration.watching import act, wait_for_workers
from tests.launching import Launcher, wait_until

pytestmark = pytest.mark.slow


class Received(ThreadingHTTPServer):
    """A collector; ``points`` has the newest value of each metric, ``spans`` each span by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taken)
        self.points: dict[str, float] = {}
        self.spans: dict[str, Any] = {}
        self.sent = 0
        self.service = ""
        self.answer, self.refused = 200, 0

    @property
    def env(self) -> dict[str, str]:
        """What leads an exporter here."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "OTEL_SERVICE_NAME": "training",
        }

    def take(self, path: str, body: bytes) -> None:
        """Keep what a request has."""
        if path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                self.service = names["service.name"]
                for metric in resource.scope_metrics[0].metrics:
                    self.points[metric.name] = metric.gauge.data_points[0].as_double
            return
        assert path == "/v1/traces"
        for traced in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in traced.scope_spans[0].spans:
                self.sent += 1
                self.spans[span.name] = span


class _Taken(BaseHTTPRequestHandler):
    server: Received

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.answer == 200:
            self.server.take(self.path, body)
        else:
            self.server.refused += 1
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def collector() -> Iterator[Received]:
    """Run a collector."""
    with Received() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes of a span."""
    values = ((each.key, each.value) for each in span.attributes)
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values}


def test_a_job_in_a_collector(elaunch: Launcher, collector: Received) -> None:
    """Metrics while it runs, a span for each round that has ended, one for all at the end."""
    flags = ["--run-id", "traced", "--max-restarts", "1"]
    job = elaunch.start(act(SPAWN, "say=up", "wait", flags=flags))
    pids = wait_for_workers(job)
    sender = elaunch.start(["otlp", "traced"], env=collector.env)
    wait_until(lambda: collector.points.get("elaunch_run_workers") == 2)
    assert collector.service == "training", "the variable wins over the name that is its default"
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: "round 0" in collector.spans and collector.points["elaunch_run_round"] == 1)
    wait_for_workers(job, round=1)
    assert "run" not in collector.spans
    job.send_signal(signal.SIGTERM)
    job.wait()
    assert sender.wait().returncode == 0
    assert set(collector.points) <= set(FAMILIES) and collector.points["elaunch_run_live"] == 0
    whole, first, last = (collector.spans[name] for name in ("run", "round 0", "round 1"))
    assert first.parent_span_id == last.parent_span_id == whole.span_id
    assert whole.start_time_unix_nano <= first.start_time_unix_nano < first.end_time_unix_nano
    assert first.status.code == 2 and "rank 1 was killed by SIGKILL" in first.status.message
    assert (last.status.code, whole.status.code) == (0, 0)
    assert attributes(whole)["elaunch.restarts"] == 1
    assert attributes(last)["elaunch.began"].startswith("rank 1 was killed by SIGKILL")
    assert collector.sent == 3, "each once"


def test_what_is_not_taken(elaunch: Launcher) -> None:
    """It is said in one line, and the exit code is 1."""
    elaunch.run(act(SPAWN, "exit=0", nproc=1, flags=["--run-id", "ended"]))
    place = "http://user:secret@127.0.0.1:1/x"
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": place, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    done = elaunch.run(["otlp", "ended"], env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "elaunch: the collector at http://127.0.0.1:1 takes nothing: Connection refused; start one "
        "there, or have OTEL_EXPORTER_OTLP_ENDPOINT name another\n"
    )


@pytest.mark.parametrize(
    "setting",
    [
        "OTEL_METRIC_EXPORT_INTERVAL=often",
        "OTEL_METRIC_EXPORT_INTERVAL=nan",
        "OTEL_METRIC_EXPORT_INTERVAL=-5",
        "OTEL_EXPORTER_OTLP_ENDPOINT=collector:4318",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=http://",
    ],
)
def test_what_is_no_setting(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named, with the reason, before anything is sent."""
    monkeypatch.setenv(*setting.split("=", 1))
    assert execute(["otlp"]) == 2
    assert f"{setting}: is n" in capsys.readouterr().err


def test_a_collector_that_comes_later(elaunch: Launcher, collector: Received) -> None:
    """That there is none is said once; what was not taken is sent when it is there."""
    elaunch.run(act(SPAWN, "exit=0", nproc=1, flags=["--run-id", "ended"]))
    collector.answer = 503
    sender = elaunch.start(["otlp"], env={**collector.env, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"})
    said = "takes nothing: it answers 503 Service Unavailable; .* again every 0.20 s$"
    sender.wait_for_line(said, stream="stderr")
    wait_until(lambda: collector.refused > 2)
    collector.answer = 200
    sender.wait_for_line("takes what is sent$", stream="stderr")
    wait_until(lambda: "elaunch_run_exit_code" in collector.points)
    sender.send_signal(signal.SIGINT)
    assert sender.wait().returncode == 130
    assert sender.output("stderr").count("\n") == 2


def test_without_the_extra(elaunch: Launcher) -> None:
    """It says what to install."""
    code = "import sys; sys.modules['opentelemetry'] = None; from elaunch.cli import execute; "
    code += "sys.exit(execute(['otlp']))"
    done = elaunch.start_command([sys.executable, "-c", code]).wait()
    assert done.returncode == 2
    assert "pip install 'elaunch[otlp]'" in done.stderr
