"""--on-event: real commands of the shell and a real server get what happens."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.policy import events
from elaunch.agent.policy.state import Limits
from elaunch.agent.status import onevent
from elaunch.agent.status.onevent import EventHook
from elaunch.config import values
from elaunch.runs.record import first_record
from tests.agent.histories import READY, Played, exited, gone, started
from tests.agent.test_noticecommand import OneByOne
from tests.launching import wait_until

HANG = events.HangSeen((1,), "rank 1 has not entered all_reduce #3", "collectives", round=0)
ENDS = [exited(0, 0), exited(1, 0), gone()]


@contextmanager
def hooked(target: str, record: dict[str, Any] | None = None) -> Iterator[EventHook]:
    """Yield a hook with the environment of a shell."""
    known: Any = first_record("run7", "n", Path("/r")) | (record or {})
    hook = EventHook(target, {"PATH": "/usr/bin:/bin"}, OneByOne(), lambda: known)
    hook.start()
    try:
        yield hook
    finally:
        hook.close()


def show(hook: EventHook, *history: events.Event, limits: Limits | None = None) -> None:
    """Show it the turns of a history."""
    played = Played(limits or Limits(nproc=2))
    for event in history:
        for taken in played.take(event):
            hook.see(taken)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what the command has written down."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged as a warning."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_command_gets_each_event_as_json(tmp_path: Path) -> None:
    """In order, the last one too; a hang with its reason; what was saved before the end."""
    log, saves = tmp_path / "log", {"step": 40, "seconds": 0.5, "commits": 3}
    with hooked(f"cat >> {log}", {"saves": saves}) as hook:
        show(hook, READY, started(0), started(1), HANG)
        show(hook, READY, started(0), started(1), *ENDS)
    found = lines(log)
    names = [one["event"] for one in found]
    assert [name for name in names if name != "saved"] == ["started", "hang", "restarted", "ended"]
    assert names.count("saved") == 1
    assert (found[0]["run_id"], found[0]["schema"], found[0]["resumed_step"]) == ("run7", 1, None)
    hang = next(one for one in found if one["event"] == "hang")
    assert hang["ranks"] == [1] and "all_reduce #3" in hang["reason"]
    saved = next(one for one in found if one["event"] == "saved")
    assert (saved["step"], saved["commits"]) == (40, 3)


def test_a_url_gets_a_post() -> None:
    """With what the command would read, and the user, password and letters of the address."""
    got: list[dict[str, Any]] = []
    heads: set[tuple[str, str | None]] = set()

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heads.add((self.path, self.headers["Authorization"]))
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Taker)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    target = values.hook(f"HTTP://me:p%40ss@127.0.0.1:{server.server_port}/é%2F?y=1")
    with hooked(target) as hook:
        show(hook, READY, started(0), started(1), *ENDS)
    server.shutdown()
    server.server_close()
    assert [one["event"] for one in got] == ["started", "ended"]
    assert heads == {("/%C3%A9%2F?y=1", f"Basic {base64.b64encode(b'me:p@ss').decode()}")}


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("echo no >&2; exit 3", "--on-event: the command exited with code 3: no"),
        ("http://me:secret@127.0.0.1:9/token", "--on-event: 127.0.0.1:9: Connection refused"),
    ],
)
def test_failures_are_logged_once(
    target: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And change nothing."""
    with hooked(target) as hook:
        show(hook, READY, started(0), started(1), *ENDS)
    assert warnings(caplog) == [problem]


@pytest.mark.slow
def test_the_end_waits_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """For a command that hangs, which is killed with what it has started; the loop never waits."""
    monkeypatch.setattr(onevent, "CLOSE_S", 0.5)
    reaper, file = OneByOne(), tmp_path / "pid"
    record: Any = first_record("run7", "n", Path("/r"))
    hook = EventHook(f"sleep 600 & echo $! > {file}; wait", {}, reaper, lambda: record)
    hook.start()
    began = time.monotonic()
    show(hook, READY, started(0), started(1), *ENDS)
    assert time.monotonic() - began < 60  # of the 600 that the command takes
    wait_until(lambda: file.exists() and file.read_text().strip(), 60, "the command")
    hook.close()
    pid = int(file.read_text())

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        except OSError:
            return True

    wait_until(is_gone, 60, "its child's end")
    assert any("took too long" in text or "within 0.5 s" in text for text in warnings(caplog))


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("http://", "is no URL of a host"),
        ("https://h:x/", "is no URL: "),
        ("ftp://host/", "has a scheme that is neither http nor https"),
        ("", "is empty"),
    ],
)
def test_what_is_no_url_is_refused(raw: str, problem: str) -> None:
    """With the reason."""
    with pytest.raises(ValueError, match=problem):
        values.hook(raw)
    assert values.hook("https://h:8/p?q") and values.hook("notify-send x")
