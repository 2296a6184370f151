"""Kubeflow's status server, played by an HTTPS server on loopback; the KEP says what it takes."""

from __future__ import annotations

import json
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from elaunch.agent.status import kubeflow
from elaunch.agent.status.kubeflow import TrainJobStatus, status_of
from elaunch.runs.pace import StepRate
from tests.launching import Launcher, wait_until

LONG = 60.0
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/j/status"
WORKS = Path(__file__).parents[2] / "integration" / "jobs" / "progress.py"


class StatusServer(ThreadingHTTPServer):
    """Takes posts with the right token; ``answers`` are the codes for the next ones, then 200."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(context)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.token = directory / "token"
        self.token.write_text("first\n")
        authority.cert_pem.write_to_path(str(directory / "ca.crt"))
        self.environ = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self.server_port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(directory / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
        }
        self.posts: queue.SimpleQueue[tuple[str, str, dict[str, Any]]] = queue.SimpleQueue()
        self.answers: list[int] = []


class _Post(BaseHTTPRequestHandler):
    server: StatusServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        code = self.server.answers.pop(0) if self.server.answers else 200
        token = self.headers["Authorization"]
        self.server.posts.put((self.path, token, json.loads(body)["trainerStatus"]))
        self.send_response(code)
        self.send_header("Location", "https://localhost:1/elsewhere")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    """Return a server that serves in a thread."""
    made = StatusServer(tmp_path)
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def record(progress: float | None, step: int | None = 7, **changes: Any) -> dict[str, Any]:
    """Return what matters of a run's record."""
    workers = [{"rank": 0, "step": step, "progress": progress}]
    plain = {
        "state": "RUNNING",
        "round": 1,
        "restarts": {"used": 1},
        "progress": {"workers": workers},
    }
    return plain | changes


def test_what_is_posted() -> None:
    """Whole percents and seconds, values of metrics as text; nothing that is not known."""
    metrics = [{"name": "step", "value": "7"}, {"name": "restarts", "value": "1"}]
    pace = StepRate()
    first = status_of(record(0.25), pace, 100.0)
    assert first == {"progressPercentage": 25, "metrics": metrics}
    later = status_of(record(0.5), pace, 160.0)
    assert later == {
        "progressPercentage": 50,
        "estimatedRemainingSeconds": 120,
        "metrics": metrics,
    }
    assert "estimatedRemainingSeconds" not in (status_of(record(0.4), pace, 170.0) or {})
    done = status_of(record(0.9, None, state="COMPLETED"), pace, 180.0)
    assert done == {
        "progressPercentage": 100,
        "estimatedRemainingSeconds": 0,
        "metrics": metrics[1:],
    }


def test_nothing_is_posted_where_nothing_is_known() -> None:
    """Another node has rank 0, or the script reports no progress: it may post by itself."""
    elsewhere = {"workers": [{"rank": 8, "step": 7, "progress": 0.5}]}
    unknown = [record(0.5) | {"progress": progress} for progress in (None, elsewhere)]
    for one in (record(None), *unknown):
        assert status_of(one, StepRate(), 0.0) is None


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Post without a pause."""
    monkeypatch.setattr(kubeflow, "INTERVAL_S", 0.01)
    monkeypatch.setattr(kubeflow, "LONGEST_S", 0.02)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what users were shown."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.usefixtures("fast")
def test_refusals_are_reported_once(server: StatusServer, caplog: pytest.LogCaptureFixture) -> None:
    """What it has not taken is posted again, with the token of that moment; none is led away."""
    caplog.set_level(logging.DEBUG)
    server.answers = [403, 307]
    status = TrainJobStatus(server.environ, lambda: record(0.5))
    status.start()
    assert server.posts.get(timeout=LONG)[:2] == (PATH, "Bearer first")
    server.posts.get(timeout=LONG)
    server.token.write_text("second")
    while server.posts.get(timeout=LONG)[1] != "Bearer second":
        server.answers = [403]
    status.close()
    (report,) = reports(caplog)
    shown = f"KUBEFLOW_TRAINER_SERVER_URL={server.environ['KUBEFLOW_TRAINER_SERVER_URL']!r}"
    assert f"({shown}): it answers 403 Forbidden: {{}}" in report


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "fault",
    ["stranger", "no token", "no url", pytest.param("silent", marks=pytest.mark.slow)],
)
def test_faults_hold_nothing_up(
    server: StatusServer, fault: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Another authority, files that are not there, a server that never answers."""
    caplog.set_level(logging.DEBUG)
    silent = socket.create_server(("127.0.0.1", 0))
    environ = dict(server.environ)
    if fault == "stranger":
        trustme.CA().cert_pem.write_to_path(environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"])
    elif fault == "no token":
        environ["KUBEFLOW_TRAINER_SERVER_TOKEN"] = str(tmp_path / "none")
    elif fault == "no url":
        environ["KUBEFLOW_TRAINER_SERVER_URL"] = "https://localhost:port/"
    else:
        port = silent.getsockname()[1]
        environ["KUBEFLOW_TRAINER_SERVER_URL"] = f"https://localhost:{port}/"
    status = TrainJobStatus(environ, lambda: record(0.5))
    status.start()
    if fault == "silent":
        connection, _ = silent.accept()
    else:
        wait_until(lambda: reports(caplog), LONG)
    began = time.monotonic()
    status.close()
    assert time.monotonic() - began < 20.0
    assert len(reports(caplog)) == (fault != "silent") and server.posts.empty()
    if fault == "silent":
        connection.close()
    silent.close()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("trainer.svc/status", "trainer.svc/status"),
        ("ftp://user:secret@trainer/x?token=secret", "ftp://trainer/x"),
        ("http:///x", "http:///x"),
    ],
)
def test_what_is_no_address_is_shown(
    given: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without what may be secret in it; nothing is asked of a host that nobody named."""
    caplog.set_level(logging.DEBUG)
    status = TrainJobStatus({"KUBEFLOW_TRAINER_SERVER_URL": given}, lambda: record(0.5))
    status.start()
    wait_until(lambda: reports(caplog), LONG)
    status.close()
    assert f"SERVER_URL={shown!r}): it is no address that begins with https" in reports(caplog)[0]
    assert "secret" not in caplog.text


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("token", ["secret\nmore", "secret more", "secret\x07", "secreté"])
def test_a_torn_token_is_not_logged(
    server: StatusServer, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The report names its file alone."""
    caplog.set_level(logging.DEBUG)
    server.token.write_text(token)
    status = TrainJobStatus(server.environ, lambda: record(0.5))
    status.start()
    wait_until(lambda: reports(caplog), LONG)
    status.close()
    assert str(server.token) in reports(caplog)[0] and "secret" not in caplog.text
    assert server.posts.empty()


def test_a_token_is_sent_by_https_alone(server: StatusServer) -> None:
    """Nothing is sent where anybody on the way can read it."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        url = f"http://localhost:{stranger.getsockname()[1]}/"
        with pytest.raises(ValueError, match="'http', not https"):
            kubeflow.post(server.environ | {"KUBEFLOW_TRAINER_SERVER_URL": url}, {})
        with pytest.raises(BlockingIOError):
            stranger.accept()


@pytest.mark.slow
def test_a_job_posts_its_end(elaunch: Launcher, server: StatusServer) -> None:
    """The last post is the whole."""
    words = ["--rdzv-id=job", "--preload=none", "--nproc-per-node=2", WORKS]
    done = elaunch.run(["run", *words, "progress=0.5", "steps=3"], env=server.environ)
    assert (done.returncode, done.stderr) == (0, done.stderr)
    path, token, status = server.posts.get(timeout=LONG)
    assert (path, token, status["progressPercentage"]) == (PATH, "Bearer first", 100)
    time.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
