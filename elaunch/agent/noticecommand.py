"""``--notice-command``: a program that prints a line when this machine will be taken.

``sh -c`` runs it, as long as it likes, and again when it has ended. Its output, stderr included:

==============================  ==================================================================
line                            means
==============================  ==================================================================
``preempt [WHEN] [TEXT]``       the machine will be taken, for the reason TEXT; WHEN as
                                --preempt-at has it: ``+120s`` from now, or a time with its offset
an empty one                    nothing
anything else                   it is no notice: an error page that asks nobody to end
==============================  ==================================================================

One that fails, or prints what is no notice, is reported once, and run again, more and more seldom;
one that prints ``MOST`` bytes and no notice is killed and counts as failed. After a notice it is
ended, and it ends when the agent does (elaunch.agent.children).
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final

from elaunch.agent.background import BackgroundWork
from elaunch.agent.children import Reaper, ShellCommand
from elaunch.agent.policy import events
from elaunch.config.values import Moment, moment
from elaunch.endings import how_it_ended
from elaunch.text import one_line
from elaunch.wire.worker import Notice

PAUSE_S: Final = 5.0
"""Seconds from its end to its next start; twice as long after each failure, up to LONGEST_S."""
LONGEST_S: Final = 60.0
MOST: Final = 1 << 16
"""Bytes that it may print in one go."""
LINE: Final = 4096
LATEST_S: Final = 86_400.0
SHOWN: Final = 300
JOIN_S: Final = 2.0
WORD: Final = "preempt"

log = logging.getLogger("elaunch")

ParsedNotice = tuple[str, float | None]
TakeNotice = Callable[[str, float | None], None]


class NoticeCommand:
    """Owns the command, from :meth:`start` to :meth:`close`.

    Args:
        command: text for the shell.
        environ: its variables.
        reaper: starts it.
        take: is called once, in a thread, with the notice's reason and the seconds until the
            machine is taken, if those are known.
    """

    def __init__(
        self, command: str, environ: Mapping[str, str], reaper: Reaper, take: TakeNotice
    ) -> None:
        self._command = command
        self._environ = environ
        self._reaper = reaper
        self._take = take
        self._running: ShellCommand | None = None
        self._background = BackgroundWork("notice-command", "--notice-command", PAUSE_S, LONGEST_S)

    def start(self) -> None:
        """Start it; returns at once."""
        self._background.start(self._run)

    def close(self) -> None:
        """End it; takes JOIN_S at the most."""
        self._background.closing.set()
        if self._running is not None:
            self._running.cut()
        self._background.close(JOIN_S)

    def _run(self) -> None:
        closing = self._background.closing
        while not closing.is_set():
            try:
                notice, problem = self._once()
            except OSError as error:
                notice, problem = None, f"cannot be started: {error.strerror}"
            if closing.is_set():
                return
            if notice is not None:
                self._take(*notice)
                return
            pause = self._background.back_off(bool(problem))
            if problem:
                self._background.report(f"{problem}; it is run again in {pause:g} s")
            closing.wait(pause)

    def _once(self) -> tuple[ParsedNotice | None, str]:
        """Run it to its end; return the notice, if it gives one, and how it failed, if it did."""
        running = self._running = ShellCommand(self._command, self._environ, self._reaper)
        try:
            if self._background.closing.is_set():  # it may not have known of this run
                return None, ""
            notice, problem = self._read(running)
        finally:
            running.close()
        if notice is not None or problem:
            return notice, problem
        exitcode = running.wait(JOIN_S)
        if exitcode is None:
            return None, "cannot be killed"
        return None, how_it_ended(exitcode) if exitcode else ""

    def _read(self, running: ShellCommand) -> tuple[ParsedNotice | None, str]:
        """Read what the command prints until a notice, its end, or too much of it."""
        held, seen = b"", 0
        while seen <= MOST:
            data = running.read() or b""
            *lines, held = (held + data + b"\n" * (not data)).split(b"\n")
            for line in lines:
                text = line[:LINE].decode("utf-8", "replace").strip()
                notice = parse(text, time.time())
                if notice is not None:
                    return notice, ""
                if text:
                    shown = one_line(text[:SHOWN])
                    self._background.report(f"prints what is no notice: {shown}")
            if not data:
                return None, ""
            seen, held = seen + len(data), held[:LINE]
        return None, f"has printed {seen} bytes and no notice"


def post_notice(
    post: Callable[[events.Event], None], alone: bool, reason: str, left: float | None
) -> None:
    """Post what a notice means: the job ends; where others go on (not ``alone``), its node leaves.

    To leave is what SIGTERM to this agent asks for.
    """
    if alone:
        post(events.PreemptAsked(reason, lambda _: None, left))
    else:
        post(events.SignalReceived(signal.SIGTERM, Notice(reason, "resize", left)))


def parse(line: str, now: float) -> ParsedNotice | None:
    """Return the notice in a line, at the time ``now``; None if it is no notice."""
    word, rest = [*line.split(None, 1), "", ""][:2]
    if word != WORD:
        return None
    first, text = [*rest.split(None, 1), "", ""][:2]
    try:
        when = moment(first)
    except (ValueError, OverflowError) as error:
        when = Moment()
        if first[:1].isdigit() or first[:1] == "+":  # it has been meant as one
            log.warning("--notice-command says no time that is known: %r %s", first[:SHOWN], error)
    left = when.after if when.at is None else when.at - now
    text = rest if left is None else text
    reason = one_line(" ".join(text.split())[:SHOWN]) or "this machine will be taken"
    # What is over, or far off, is a clock that is wrong: the platform leaves no such time.
    return reason, left if left is not None and 0 < left <= LATEST_S else None
