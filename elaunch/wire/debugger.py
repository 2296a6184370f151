"""A debugger in a worker, at the terminal of ``elaunch debug``, which the command listens for.

The command listens at a socket in the run directory (``control.debug_socket``), and sends the
worker ``env.DEBUG_SIGNAL``. At the next bytecode of its main thread the worker connects and runs
pdb at the interrupted frame: what the command sends are pdb's commands, what the worker sends is
shown. The end of the stream, by either side, lets the script go on: of the command's the kernel
tells by the same signal. GOES_ON is the last that a worker sends; without it, it has ended.

And pdb for ``breakpoint()`` in a rank whose output is not at its terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pdb  # noqa: T100  it is what this is about
import select
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

from elaunch import env
from elaunch.wire.control import debug_socket
from elaunch.wire.local import connect

CONNECT_S: Final = 5.0
GOES_ON: Final = b"\0"

_sessions: list[_Session] = []
"""The one that goes on, if any."""
_prompts: list[pdb.Pdb] = []
"""The one of ``breakpoint()``, if it has been called."""


def attach(directory: Path, frame: FrameType) -> None:
    """Run pdb at ``frame`` for the command that listens, until it lets the script go on."""
    if _sessions and not _sessions[0].rests():
        return
    try:
        connection = connect(debug_socket(directory, os.getpid()), CONNECT_S)
    except OSError:
        return  # the command has given up meanwhile
    connection.settimeout(None)
    _sessions[:] = [_Session(_Terminal(connection))]
    _sessions[0].begin(frame)


def prompt_at_terminal(frame: FrameType, header: str | None) -> None:
    """Run pdb at ``frame``, as ``breakpoint()`` does, at the terminal that is this rank's stdin.

    The prompt names the rank: another's may be at the same terminal.
    """
    if not _prompts:
        try:
            place = os.open(os.ttyname(0), os.O_WRONLY | os.O_NOCTTY)
        except OSError:  # it is no terminal any more, or one of another container
            place = os.dup(1)
        _prompts.append(pdb.Pdb(stdout=open(place, "w")))  # noqa: SIM115  for all prompts
        _prompts[0].prompt = f"(rank {os.environ.get('RANK', '?')}, Pdb) "
    if header is not None:
        _prompts[0].message(header)
    _prompts[0].set_trace(frame)


class _Terminal:
    """The command's terminal, as files for pdb: it ends, and raises nothing, with the command.

    A process that is forked meanwhile sees its end at once.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._owner = os.getpid()
        self._connection = connection
        fcntl.fcntl(connection, fcntl.F_SETOWN, self._owner)
        fcntl.fcntl(connection, fcntl.F_SETSIG, env.DEBUG_SIGNAL)
        flags = fcntl.fcntl(connection, fcntl.F_GETFL)
        fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
        self._lines = connection.makefile("r", encoding="utf-8", errors="replace")
        self.ended = False

    def readline(self) -> str:
        """Return the next line, or "" at the end."""
        line = ""
        if not self.ended and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                line = self._lines.readline()
        return line

    def write(self, text: str) -> int:
        """Show a text; one that nobody sees any more is dropped."""
        if not self.ended and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._connection.sendall(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: each text is sent at once."""

    def hung_up(self) -> bool:
        """Return whether the command is gone."""
        poll = select.poll()
        if not self.ended:
            poll.register(self._connection, 0)
        return self.ended or bool(poll.poll(0))

    def end(self) -> None:
        """Hang up; another time nothing is done."""
        if self.ended:
            return
        self.ended = True
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._connection.sendall(GOES_ON)
                self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


class _Session(pdb.Pdb):
    """Pdb whose end, however it comes, lets the script go on."""

    def __init__(self, terminal: _Terminal) -> None:
        files: Any = terminal
        super().__init__(stdin=files, stdout=files, nosigint=True, readrc=False)
        self._terminal = terminal
        self._prompting = False

    def begin(self, frame: FrameType) -> None:
        """Stop here at once: the next line of ``frame`` may be far, behind a call of C."""
        self.reset()
        self.botframe = frame
        while self.botframe.f_back is not None:
            self.botframe = self.botframe.f_back
        self.interaction(frame, None)
        if self._terminal.ended:
            return
        traced: FrameType | None = frame
        while traced is not None:
            traced.f_trace = self.trace_dispatch
            traced = traced.f_back
        sys.settrace(self.trace_dispatch)  # last: what follows would be traced, too

    def interaction(self, *args: Any, **named: Any) -> None:
        """Prompt; a signal that comes meanwhile begins no other session."""
        self._prompting = True
        try:
            super().interaction(*args, **named)
        finally:
            self._prompting = False
            self.rests()  # the command may have gone before a signal would have been heeded

    def rests(self) -> bool:
        """Return whether another session may begin: the command of this one is gone."""
        if self._prompting or not self._terminal.hung_up():
            return False
        self.set_quit()
        return True

    def set_continue(self) -> None:
        """Go on; hang up where no breakpoint will stop the script again."""
        super().set_continue()
        if not self.breaks:
            self._terminal.end()

    def set_quit(self) -> None:
        """Go on without breakpoints: the end of a debugger is no end of the script."""
        self.clear_all_breaks()
        self.set_continue()

    def do_run(self, arg: str) -> None:
        """Refuse what would raise into the script."""
        self.error("a running rank cannot be begun again: `elaunch restart` does that")

    do_restart = do_run
