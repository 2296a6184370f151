"""Draw the pictures: run what docs/tutorial.md says, and keep what the terminal shows.

``make pictures`` runs it, in some ten minutes; ``ONLY="crash hang"`` chooses scenes. The script,
the line that is put into it and the commands are the page's own blocks; ``failure``, README's
picture, has a script of four lines. Each command has a terminal of 100 columns. Chromium draws the
page of the dashboard, curve.py the curve of the loss.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.dashboard.browser import chromium

DOCS = Path(__file__).parent.parent.parent / "docs"
PICTURES = DOCS / "pictures"
COLUMNS, ROWS = 100, 40
PATIENCE = 120.0
SCENES = (
    "failure",
    "first",
    "crash",
    "fault",
    "slow",
    "hang",
    "nodes",
    "resume",
    "curve",
    "dashboard",
)
BOOM = """\
import os

if os.environ["RANK"] == "1":
    raise ValueError("bad batch")
"""
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich's own, with the reader's fonts: nothing is fetched."""


class Terminal:
    """A command in a terminal of its own, and what it has shown so far."""

    def __init__(self, command: str, place: Path) -> None:
        self.command = command
        self.shown = ""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {
            **os.environ,
            "HOME": str(place),
            "TERM": "xterm-256color",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=place,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,))
        self._reader.start()

    def _read(self, terminal: int) -> None:
        with contextlib.suppress(OSError):  # EIO: the last process that had it has ended
            while data := os.read(terminal, 65536):
                self.shown += data.decode(errors="replace")
        os.close(terminal)

    def until(self, text: str, times: int = 1) -> None:
        """Wait until a text has been shown so many times."""
        end = time.monotonic() + PATIENCE
        while self.shown.count(text) < times:
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(f"{self.command}: {text!r} was not shown\n{self.shown}")
            time.sleep(0.05)

    def end(self) -> str:
        """Wait for the end and return all that was shown."""
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return self.shown


class Tutorial:
    """The page, what a person types who follows it, and the pictures of that."""

    def __init__(self, place: Path) -> None:
        page = (DOCS / "tutorial.md").read_text()
        found = re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        self.place = place
        self.script, self.slow_line = (text for language, text in found if language == "python")
        shell = "".join(text for language, text in found if language == "sh")
        self.commands = re.sub(r" *\\\n\s*", " ", shell).splitlines()
        self.begin()

    def command(self, *parts: str) -> str:
        """Return the page's first command with all these parts."""
        return next(line for line in self.commands if all(part in line for part in parts))

    def begin(self, script: str = "") -> None:
        """Begin anew: the page's script, no checkpoints."""
        shutil.rmtree(self.place / "ckpt", ignore_errors=True)
        (self.place / "train.py").write_text(script or self.script)

    def type(self, command: str) -> Terminal:
        """Type a command into a terminal."""
        return Terminal(command, self.place)

    def pids(self, run: str) -> list[int]:
        """Return the processes of a run's workers by their ranks."""
        shown = self.type(f"elaunch status {run} --json").end()
        return [worker["pid"] for worker in json.loads(shown)["workers"]]

    def draw(self, name: str, *terminals: Terminal) -> None:
        """Write a picture of commands and what they have shown."""
        console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
        for terminal in terminals:
            console.print(Text(f"$ {terminal.command}", style="bold"))
            shown = terminal.shown.replace("\r\n", "\n").rstrip()
            for place, short in ((str(self.place), "~"), (sysconfig.get_path("purelib"), "…")):
                shown = shown.replace(place, short)
            console.print(Text.from_ansi(shown))
        drawn = console.export_svg(title="", theme=MONOKAI, code_format=FORMAT, unique_id=name)
        (PICTURES / f"{name}.svg").write_text(drawn)

    def failure(self) -> None:
        """Draw a rank that fails."""
        (self.place / "boom.py").write_text(BOOM)
        run = self.type("elaunch run --nproc-per-node 2 boom.py")
        run.end()
        self.draw("failure", run)

    def first(self) -> None:
        """Draw the first run."""
        run = self.type(self.command("--steps 100"))
        run.end()
        self.draw("first", run)

    def crash(self) -> None:
        """Draw a run of which a worker is killed, and its status before."""
        self.begin()
        run = self.type(self.command("--max-restarts", "--resume"))
        run.until("step 60")
        status = self.type("elaunch status mine")
        status.end()
        os.kill(self.pids("mine")[3], signal.SIGKILL)
        run.end()
        self.draw("status", status)
        self.draw("crash", run)

    def fault(self) -> None:
        """Draw the traceback of a script."""
        self.type(self.command("step_7.pt")).end()
        why = self.type("elaunch why")
        why.end()
        self.draw("fault", why)

    def slow(self) -> None:
        """Draw what is known of a slow rank; collectives are asked for each half minute."""
        pause = "    time.sleep(0.05)\n"
        self.begin(self.script.replace(pause, pause + self.slow_line))
        run = self.type(self.command("--steps 800"))
        run.until("step 700")
        status = self.type("elaunch status mine")
        status.end()
        run.process.terminate()
        run.end()
        self.draw("slow", status)

    def hang(self) -> None:
        """Draw a run that hangs."""
        self.begin()
        run = self.type(self.command("--hang-timeout"))
        run.until("step 60")
        os.kill(self.pids("mine")[1], signal.SIGSTOP)
        run.end()
        self.draw("hang", run)

    def nodes(self) -> None:
        """Draw a job on two nodes."""
        self.begin()
        nodes = [self.type(self.command("--nnodes 2")) for _ in range(2)]
        while not any("step 40" in node.shown for node in nodes):
            time.sleep(0.1)
        status = self.type(self.command("status", "c10d"))
        status.end()
        for node in nodes:
            node.process.terminate()
        for node in nodes:
            node.end()
        self.draw("nodes", status)

    def resume(self) -> None:
        """Draw how a run is ended, and the next one."""
        self.begin()
        line = self.command("--max-restarts", "--resume")
        today = self.type(line)
        today.until("step 60")
        today.process.send_signal(signal.SIGINT)
        today.end()
        tomorrow = self.type(line)
        tomorrow.end()
        self.draw("resume", today, tomorrow)

    def curve(self) -> None:
        """Draw the loss of a training, undisturbed and with kills."""
        subprocess.run([sys.executable, Path(__file__).with_name("curve.py")], check=True)

    def dashboard(self) -> None:
        """Draw the page of a run that goes on after a crash."""
        self.begin()
        run = self.type(self.command("--max-restarts", "--resume"))
        run.until("step 60")
        os.kill(self.pids("mine")[3], signal.SIGKILL)
        run.until("step 100")
        page = self.type(f"{self.command('dashboard')} --port 0")
        page.until("http://")
        address = re.search(r"http://\S+", page.shown)
        assert address is not None
        with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
            view = browser.open(address[0])
            view.resize(1280, 860)
            view.scheme("light")
            view.wait("document.body.innerText.includes('SIGKILL')")
            picture = base64.b64decode(view.call("Page.captureScreenshot")["data"])
        (PICTURES / "dashboard.png").write_bytes(picture)
        for terminal in (page, run):
            terminal.process.terminate()
            terminal.end()


def main() -> None:
    """Draw all pictures, or those that are named on the command line."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        tutorial = Tutorial(Path(place))
        for name in sys.argv[1:] or SCENES:
            print(name, flush=True)
            getattr(tutorial, name)()


if __name__ == "__main__":
    main()
