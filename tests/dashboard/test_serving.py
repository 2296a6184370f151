"""``elaunch dashboard`` as a command: its address, its token, a real job that is followed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from elaunch.dashboard import serving
from elaunch.dashboard.guard import KEY_HEADER
from elaunch.errors import RunDirError
from tests.integration.jobs import SPAWN
from tests.integration.watching import act, wait_for_workers
from tests.launching import Launcher, free_port, wait_until


def events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the documents of an event stream."""
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


@pytest.mark.slow
def test_a_killed_worker_shows_up_without_a_reload(elaunch: Launcher) -> None:
    """The page's feed of a real job: running, then in its next round with the cause of that."""
    flags = ["--run-id", "job", "--max-restarts", "1"]
    job = elaunch.start(act(SPAWN, "say=up", "wait", flags=flags))
    pids = wait_for_workers(job)
    server = elaunch.start(["dashboard", "job", "--port", "0"])
    address = urlsplit(server.wait_for_line(r"^http://")[0] and server.output().strip())
    assert (address.hostname, address.fragment) == ("127.0.0.1", "/run/job")
    connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=60)
    connection.request("GET", "/api/run?run=job", headers={"Accept": "text/event-stream"})
    found = events(connection.getresponse())
    first = next(found)
    assert (first["state"], first["round"], first["attention"]) == ("RUNNING", 0, [])
    os.kill(pids[1], signal.SIGKILL)
    later = next(one for one in found if one["round"] == 1 and one["state"] == "RUNNING")
    (item,) = later["attention"]
    assert item["title"] == (
        "Round 0 failed: rank 1 was killed by SIGKILL: it was killed from outside elaunch"
    )
    assert [round["round"] for round in later["history"]] == [0, 1]
    logs = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=60)
    logs.request("GET", "/api/logs?run=job", headers={"Accept": "text/event-stream"})
    lines = events(logs.getresponse())
    next(lines)
    server.send_signal(signal.SIGTERM)  # open pages are let go of, without a word
    assert server.wait().returncode == -signal.SIGTERM or server.process.returncode == 143
    assert not server.output("stderr")
    assert not [*lines, *(one for one in found if one["state"] != "RUNNING")]
    job.send_signal(signal.SIGTERM)
    job.wait()


@pytest.mark.slow
def test_a_job_is_restarted_and_stopped(elaunch: Launcher) -> None:
    """By what the page sends; a request without the page's key does nothing."""
    flags = ["--run-id", "job", "--max-restarts", "0"]
    job = elaunch.start(act(SPAWN, "say=up", "wait", flags=flags))
    wait_for_workers(job)
    server = elaunch.start(["dashboard", "job", "--port", "0", "--allow-control"])
    address = urlsplit(server.wait_for_line(r"^http://")[0] and server.output().strip())
    connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=60)

    def asked(method: str, query: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection.request(method, f"/api/control{query}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    key = {KEY_HEADER: json.loads(asked("GET", "", {})[1])["key"]}
    assert asked("POST", "?run=job&op=stop", {})[0] == 403
    assert asked("POST", "?run=other&op=stop", key) == (404, b"there is no run 'other'\n")
    assert asked("POST", "?run=job&op=kill", key)[0] == 400
    status, body = asked("POST", "?run=job&op=restart", key)
    assert status == 200 and "round 0 is to end" in json.loads(body)["done"]
    wait_until(lambda: job.output().count("up") == 4, what="both workers of the next round")
    assert asked("POST", "?run=job&op=stop", key)[0] == 200
    assert job.wait().returncode == 143
    assert asked("POST", "?run=job&op=stop", key)[0] == 400
    connection.close()


@pytest.mark.slow
def test_another_address_asks_for_the_token(elaunch: Launcher) -> None:
    """It is in the printed address, and kept for the next start."""
    port = free_port()
    server = elaunch.start(["dashboard", "--host", "0.0.0.0", "--port", str(port)])
    token = server.wait_for_line(r"\?token=(\S+)$")[1]
    kept = elaunch.state / "elaunch" / serving.TOKEN_FILE
    assert (kept.read_text(), stat.S_IMODE(kept.stat().st_mode)) == (token, 0o600)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {token}"}, 200)):
        connection.request("GET", "/api/runs", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, len(answer.read()) > 0) == (status, True)
    connection.close()


def test_the_token_is_kept_to_the_user(environ: dict[str, str]) -> None:
    """Drawn once; one that others could have read, or have put there, is refused."""
    token = serving.kept_token(environ)
    assert len(token) >= 32 and serving.kept_token(environ) == token
    path = Path(environ["XDG_STATE_HOME"], "elaunch", serving.TOKEN_FILE)
    path.chmod(0o644)
    with pytest.raises(RunDirError, match="can be read by others"):
        serving.kept_token(environ)
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(RunDirError):
        serving.kept_token(environ)
    path.unlink()
    path.write_text("")
    path.chmod(0o600)
    with pytest.raises(RunDirError, match="has no token"):
        serving.kept_token(environ)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "no.such.name.invalid"], "--host no.such.name.invalid: does not resolve"),
        (["--host", "no..name"], "--host no..name: does not resolve"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1: is not an address of this machine; "),
        (["--port", "{taken}"], "--port {taken}: cannot be used: port {taken} is in use by"),
        (["--port", "99999"], "99999 is not in the range 0<=x<=65535"),
        (["nosuchrun"], "there is no run 'nosuchrun'"),
    ],
)
def test_what_cannot_be_served(elaunch: Launcher, flags: list[str], message: str) -> None:
    """One line, and exit code 2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = elaunch.run(["dashboard", *(flag.format(taken=port) for flag in flags)])
    assert (done.returncode, done.stdout) == (2, "")
    assert message.format(taken=port) in done.stderr


def test_without_the_extra_it_says_what_to_install(elaunch: Launcher) -> None:
    """The package alone has no web server."""
    code = "import sys; sys.modules['uvicorn'] = None; from elaunch.cli import execute; "
    code += "sys.exit(execute(['dashboard']))"
    done = elaunch.start_command([sys.executable, "-c", code]).wait()
    assert done.returncode == 2
    assert "needs uvicorn: pip install 'elaunch[dashboard]'" in done.stderr
