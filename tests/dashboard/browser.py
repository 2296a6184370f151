"""Chromium without a window, driven by its DevTools protocol, and axe-core, which judges a page.

The protocol goes over two pipes (``--remote-debugging-pipe``): JSON, ended by a zero byte each.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import select
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import programs

AXE = "4.14.1"
AXE_SHA512 = (
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
# Of the machine, not of the session: Debian's chromium is a shell script that calls others.
PATH = "/usr/local/bin:/usr/bin:/bin"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-breakpad", "--disable-background-networking"),
    *("--disable-component-update", "--remote-debugging-pipe"),
)


class Browser:
    """One Chromium; ``problems`` are the errors that its pages have written to their consoles."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process = process
        self._to, self._back = to, back
        self._buffer = b""
        self._number = 0
        self.problems: list[str] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Send a command and return its result; an error of the protocol fails the test."""
        self._number += 1
        sent = {"id": self._number, "method": method, "params": params}
        if session is not None:
            sent["sessionId"] = session
        os.write(self._to, json.dumps(sent).encode() + b"\0")
        while (found := self._receive()).get("id") != self._number:
            if found["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(found["params"]["exceptionDetails"])[:500])
            elif found["method"] == "Log.entryAdded":
                entry = found["params"]["entry"]
                if entry["level"] == "error":
                    self.problems.append(f"{entry['text']} {entry.get('url', '')}")
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    def _receive(self, seconds: float = 60.0) -> Any:
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready = select.select([self._back], [], [], max(0.0, until - time.monotonic()))[0]
            data = os.read(self._back, 1 << 20) if ready else b""
            assert data, f"chromium is silent (exit code {self._process.poll()})"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> Page:
        """Open a page in a window of its own: one that is not looked at rests."""
        new = self.call("Target.createTarget", url="about:blank", newWindow=True)
        target = new["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call("Page.navigate", url=address)
        return page


class Page:
    """A page of a browser; a test waits for what a person would see."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> Any:
        """Send a command to the page."""
        return self._browser.call(method, self._session, **params)

    def evaluate(self, script: str) -> Any:
        """Return what an expression is, or the promise of it comes to."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, f"{script[:200]}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """Return the first value of an expression that is true; no element, which has none."""
        until = time.monotonic() + seconds
        while not (found := self.evaluate(script)):
            text = "" if time.monotonic() < until else self.evaluate("document.body.innerText")
            assert time.monotonic() < until, f"never true: {script}; the page has: {text}"
            time.sleep(0.05)
        return found

    def see(self, selector: str) -> None:
        """Wait until an element is there."""
        self.wait(f"document.querySelector({selector!r}) !== null")

    def press(self, key: str, times: int = 1) -> None:
        """Press a key of KEYS."""
        more = {"text": "\r"} if key == "Enter" else {}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        for _ in range(times):
            self.call("Input.dispatchKeyEvent", type="keyDown", **named, **more)
            self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Make the page as large as a window of a desktop, or as a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def scheme(self, name: str) -> None:
        """Have the system prefer ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def faults(self) -> list[str]:
        """Return the serious and critical faults that axe-core finds."""
        if self.evaluate("typeof axe") == "undefined":
            self.call("Runtime.evaluate", expression=axe_source())
        found = self.evaluate("axe.run({resultTypes: ['violations']})")
        return [
            f"{fault['id']} ({fault['impact']}): {fault['help']}: {node['html'][:200]} "
            f"{node['failureSummary']}"
            for fault in found["violations"]
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]


@contextmanager
def chromium(directory: Path) -> Iterator[Browser]:
    """Start Chromium with a profile in ``directory``; it is gone afterwards."""
    programs.needed("chromium")
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (*os.pipe(), *os.pipe())]
    theirs, to, back, answers = ends

    def place() -> None:
        os.dup2(theirs, 3)
        os.dup2(answers, 4)

    process = subprocess.Popen(
        [os.path.realpath(shutil.which("chromium") or ""), *FLAGS, f"--user-data-dir={directory}"],
        env={"PATH": PATH, "HOME": str(directory), "XDG_CONFIG_HOME": str(directory)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=place,
        pass_fds=(3, 4),
    )
    os.close(theirs)
    os.close(answers)
    try:
        browser = Browser(process, to, back)
        yield browser
        browser.call("Browser.close")
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(back)


def axe_source() -> str:
    """Return axe-core's script, from the npm registry once and then from the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "elaunch-tests")
    archive = cache / f"axe-core-{AXE}.tgz"
    if not archive.exists():
        programs.needed("npm", "node", "env")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            command = ["npm", "pack", "--ignore-scripts", f"axe-core@{AXE}"]
            subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=200)
            os.replace(Path(place, archive.name), archive)
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert digest == AXE_SHA512, f"{archive} is not axe-core {AXE}: remove it"
    with tarfile.open(archive) as packed:
        script = packed.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()
