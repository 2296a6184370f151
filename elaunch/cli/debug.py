"""``elaunch debug``: pdb in one rank of a running job (elaunch.wire.debugger).

docs/status.md.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, Final

import click

from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError

if TYPE_CHECKING:
    from elaunch.runs.directory import RunDir

ENDED: Final = 69
"""Exit code where the rank ends before it comes to the debugger, or in it."""
ANSWER_S: Final = 15.0
SOON_MS: Final = 1000
"""Until the rank counts as one that is in C, in milliseconds."""
CHUNK: Final = 1 << 16


@click.command("debug")
@click.argument("run", metavar="RUN")
@click.option(
    "--rank", type=click.IntRange(min=0), required=True, metavar="R", help="In this rank."
)
def debug(run: str, rank: int) -> int:
    """Run pdb in one rank of RUN, where its main thread is now.

    The rank stops, and with it those that wait for it; none counts as hanging meanwhile. `c`, `q`,
    Ctrl-D and the end of this command let it go on. RUN is a run id of this machine, or the
    beginning of one; the rank must be one of this node.
    """
    from elaunch.monitor.nodeviews import answer_of
    from elaunch.runs import directory
    from elaunch.runs.record import condition

    found = directory.find(run, os.environ)
    name, agent = directory.run_id_of(found), found.read_state()["agent"]
    if condition(agent) == "elsewhere":
        raise UsageError(f"RUN {name} runs on {agent['host']}: debug it there")
    request = {"op": "view", "of": "debug", "rank": rank}
    with contextlib.ExitStack() as stack:
        answer = answer_of(found, request, ANSWER_S, stack=stack)
        if "refused" in answer:
            raise UsageError(f"RUN {name}: {answer['refused']}")
        try:
            return _debugged(found, rank, int(answer["pid"]), stack)
        except KeyboardInterrupt:
            return INTERRUPTED


def _debugged(run: RunDir, rank: int, pid: int, stack: contextlib.ExitStack) -> int:
    from elaunch.wire.debugger import socket_path
    from elaunch.wire.local import listen

    path = socket_path(run.path, pid)
    path.unlink(missing_ok=True)  # of a command that was killed: the agent lets in one at a time
    listener = stack.enter_context(listen(path, 1))
    stack.callback(path.unlink, missing_ok=True)
    try:
        worker = os.pidfd_open(pid)
        stack.callback(os.close, worker)
        from elaunch import env

        signal.pidfd_send_signal(worker, env.DEBUG_SIGNAL)
    except ProcessLookupError:
        return _ended(rank)
    if not _wait(listener, worker, SOON_MS):
        _show_wait(run, rank)
        _wait(listener, worker, None)
    listener.setblocking(False)
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return _ended(rank)
    with connection:
        click.echo(
            f"elaunch: pdb in rank {rank}, pid {pid}: `c`, `q` and Ctrl-D let it go on; a timeout "
            "of torch's for collectives runs meanwhile",
            err=True,
        )
        _relay(connection)
    return _ended(rank) if select.select([worker], [], [], 0)[0] else 0


def _wait(listener: socket.socket, worker: int, milliseconds: int | None) -> bool:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(worker, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _ended(rank: int) -> int:
    click.echo(f"elaunch: rank {rank} has ended", err=True)
    return ENDED


def _show_wait(run: RunDir, rank: int) -> None:
    from elaunch import text
    from elaunch.monitor.nodeviews import stacks_of

    click.echo(
        f"elaunch: rank {rank} is in a call of C, as a collective is: pdb begins when it comes "
        "back to Python; Ctrl-C gives up",
        err=True,
    )
    for group in stacks_of(run, []).groups:
        if rank in group.ranks:
            click.echo("\n".join(f"  {text.block(frame)}" for frame in group.main), err=True)


def _relay(connection: socket.socket) -> None:
    """Send what is typed, and show what comes, until the rank goes on."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    typed = sys.stdin.fileno()
    poll.register(typed, select.POLLIN)
    with contextlib.suppress(OSError):  # the rank or the terminal is gone
        while connection.fileno() not in (ready := [fd for fd, _ in poll.poll()]) or _shown(
            connection
        ):
            if typed not in ready:
                continue
            line = os.read(typed, CHUNK)
            connection.sendall(line)
            if not line:
                poll.unregister(typed)
                connection.shutdown(socket.SHUT_WR)


def _shown(connection: socket.socket) -> bool:
    """Show what has come; whether more may come."""
    shown = connection.recv(CHUNK)
    sys.stdout.buffer.write(shown)
    sys.stdout.buffer.flush()
    return bool(shown)
