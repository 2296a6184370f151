"""``--dashboard``: ``elaunch dashboard`` of this run, for as long as the run lasts.

It is a process of its own, in a session of its own, so that pages neither cost the agent memory nor
hold it up; it ends with the agent, however that ends (elaunch.agent.children). Of several nodes
the one that is node 0 in the first round that it takes part in has it, on a free port if it cannot
have the one that it was given. A server that ends is started again, RESTARTS times.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TextIO
from urllib.parse import urlsplit

import elaunch
from elaunch.agent.background import BackgroundWork
from elaunch.agent.children import Reaper, ShellCommand
from elaunch.agent.policy.turn import Turn
from elaunch.config import Settings
from elaunch.text import one_line

RESTARTS: Final = 5
PAUSE_S: Final = 1.0
"""Seconds from an end to the next start; twice as long each time."""
JOIN_S: Final = 2.0
PATIENCE_S: Final = 10.0
"""Seconds for the address, for which a detached command waits."""
SHOWN: Final = 300

log = logging.getLogger("elaunch")


class WebPages:
    """Owns the server, if there is one, to :meth:`close`; ``address`` is "" until it is known.

    Args:
        settings: whether there is one, its host, and its port: without one any that is free.
        run: the run directory.
        environ: variables of the server.
        reaper: starts it.
        say: gets the line with the address, once.
    """

    def __init__(
        self,
        settings: Settings,
        run: Path,
        environ: Mapping[str, str],
        reaper: Reaper,
        say: Callable[[str], None],
    ) -> None:
        self._host, self._port = settings.dashboard or ("", None)
        self._alone = settings.rendezvous is None
        self._run_dir = run
        self._environ = environ
        self._reaper = reaper
        self._say = say
        self.address = ""
        self._known = threading.Event()
        self._begun = False
        self._running: ShellCommand | None = None
        self._background = BackgroundWork("dashboard", "--dashboard:", PAUSE_S)

    def _start(self) -> None:
        if self._host and not self._begun:
            try:
                self._background.start(self._serve)
            except RuntimeError as error:
                log.warning("--dashboard: not in this round: %s", error)
                return
            self._begun = True

    def see(self, turn: Turn) -> None:
        """Start it where this is node 0."""
        if turn.begun is not None and turn.begun.place.node_rank == 0:
            self._start()

    def wait(self) -> str:
        """Return the address once it is known; of several nodes it may be known later."""
        if self._host and self._alone:
            self._start()
            self._known.wait(PATIENCE_S)
        return self.address

    def close(self) -> None:
        """Have it show open pages how the run ended, and end; takes 2 JOIN_S at the most."""
        self._background.closing.set()
        if self._running is not None:
            self._running.end()
            self._background.close(JOIN_S)
            self._running.cut()
        self._background.close(JOIN_S)

    def _serve(self) -> None:
        for number in range(RESTARTS + 1):
            try:
                why = self._once()
            except OSError as error:
                why = f"cannot be started: {error.strerror}"
            if self._background.closing.is_set():
                break
            again = number < (RESTARTS if self.address else 1)
            if not self.address:
                self._port = 0  # where it could not listen
            log.warning(
                "--dashboard: the server has ended: %s%s", why, "" if again else "; it stays away"
            )
            pause = self._background.back_off(failed=number > 0)
            if not again or self._background.closing.wait(pause):
                break
        self._known.set()

    def _once(self) -> str:
        """Run it to its end; return what it has printed last."""
        running = self._running = ShellCommand(self._command(), self._environ, self._reaper)
        try:
            if self._background.closing.is_set():  # it may not have known of this run
                return ""
            return self._read(os.fdopen(os.dup(running.output), errors="replace"))
        finally:
            running.close()

    def _read(self, output: TextIO) -> str:
        last = ""
        with output:
            for line in output:
                last = one_line(line.strip()[:SHOWN]) or last
                if line.startswith("http://") and not self.address:
                    self._found(line.strip())
        return last

    def _found(self, address: str) -> None:
        self.address, self._port = address, urlsplit(address).port
        self._known.set()
        self._say(f"elaunch: dashboard: {address}\n")

    def _command(self) -> str:
        # From there, so that no module of the working directory stands before the library's.
        package = Path(elaunch.__file__).parent.parent
        argv = [sys.executable, "-m", "elaunch", "dashboard", str(self._run_dir)]
        argv += ["--host", self._host]
        argv += [] if self._port is None else ["--port", str(self._port)]
        return f"cd {shlex.quote(str(package))} && exec {shlex.join(argv)}"
