"""``elaunch debug``: pdb in one rank of a running job (elaunch.wire.debugger).

docs/stacks.md.
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
    from elaunch.runs.identity import WorkerRecord

ENDED: Final = 69
"""Exit code where the rank ends before it comes to the debugger, or in it."""
ANSWER_S: Final = 15.0
SOON_MS: Final = 1000
"""Until the rank counts as one that is in C, in milliseconds."""
GONE_S: Final = 1.0
"""Seconds for the process of a rank to end whose files are closed."""
CHUNK: Final = 1 << 16


@click.command("debug")
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--rank", type=click.IntRange(min=0), required=True, metavar="R", help="Rank to debug."
)
def debug(run: str | None, rank: int) -> int:
    """Run pdb in one rank of RUN, where its main thread is now.

    The rank stops, and so do the ranks that wait for it; none of them counts as hanging. `c`, `q`,
    Ctrl-D and the end of this command let it go on. The rank must run on this node. RUN is a run id
    of this machine, the beginning of one, or a run directory; without it, the newest run.
    """
    from elaunch.runs import directory
    from elaunch.runs.identity import condition
    from elaunch.views.agents import answer_of

    if sys.stdin is None:
        raise UsageError("stdin is closed, and pdb's commands come from it; </dev/null gives none")
    found = directory.named(run, os.environ)
    name = directory.run_id_of(found)
    for same in directory.runs_of(name, os.environ):  # two agents of a job on one machine
        if _worker(same, rank) and condition(same.read_state()["agent"]) in ("alive", "stopped"):
            found = same
    agent = found.read_state()["agent"]
    if condition(agent) == "elsewhere":
        raise UsageError(
            f"RUN {name} runs on {agent['host']}: type `elaunch debug {name} --rank {rank}` there"
        )
    request = {"op": "view", "of": "debug", "rank": rank, "run": name}
    with contextlib.ExitStack() as stack:
        answer = answer_of(found, request, ANSWER_S, stack=stack)
        if "refused" in answer:
            raise UsageError(f"RUN {name}: {answer['refused']}")
        try:
            return _debugged(found, rank, int(answer["pid"]), stack)
        except KeyboardInterrupt:
            click.echo(f"\nelaunch: rank {rank} goes on", err=True)
            return INTERRUPTED


def _worker(run: RunDir, rank: int) -> WorkerRecord | None:
    workers = run.read_state()["workers"]
    return next((worker for worker in workers if worker["rank"] == rank), None)


def _debugged(run: RunDir, rank: int, pid: int, stack: contextlib.ExitStack) -> int:
    from elaunch.wire.control import debug_socket
    from elaunch.wire.local import is_readable, listen

    path = debug_socket(run.path, pid)
    listener = stack.enter_context(listen(path, 1))
    try:
        worker = os.pidfd_open(pid)
        stack.callback(os.close, worker)
        from elaunch import env, proc

        signal.pidfd_send_signal(worker, env.DEBUG_SIGNAL)
    except ProcessLookupError:
        return _ended(run, rank, pid)
    except PermissionError:
        whose = proc.user_name(proc.user(pid))
        raise UsageError(
            f"rank {rank} (pid {pid}) belongs to {whose}, and you may not signal it: run `elaunch "
            "debug` as that user or as root"
        ) from None
    if not _wait(listener, worker, SOON_MS):
        _show_wait(run, rank, pid)
        _wait(listener, worker, None)
    listener.setblocking(False)
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return _ended(run, rank, pid)
    listener.close()
    path.unlink(missing_ok=True)
    with connection:
        click.echo(
            f"elaunch: pdb in rank {rank}, pid {pid}: `c`, `q` and Ctrl-D let it go on; torch's "
            "collective timeout keeps running",
            err=True,
        )
        goes_on = _relay(connection, worker)
    return 0 if goes_on or not is_readable(worker, GONE_S) else _ended(run, rank, pid)


def _wait(listener: socket.socket, worker: int, milliseconds: int | None) -> bool:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(worker, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _ended(run: RunDir, rank: int, pid: int) -> int:
    from elaunch.runs.directory import run_id_of

    click.echo(
        f"elaunch: rank {rank}, pid {pid}, has ended; `elaunch status {run_id_of(run)}` tells more",
        err=True,
    )
    return ENDED


def _show_wait(run: RunDir, rank: int, pid: int) -> None:
    from elaunch import proc, text
    from elaunch.views.agents import stacks_of

    process = proc.read_process(pid)
    stopped = process is not None and process.state in "Tt"
    click.echo(
        f"elaunch: rank {rank} is "
        + (
            f"stopped by a signal or a tracer: pdb begins after `kill -CONT {pid}`"
            if stopped
            else "in a call of C, as a collective is: pdb begins when it comes back to Python"
        )
        + "; Ctrl-C gives up",
        err=True,
    )
    if stopped:
        return  # it would not answer where it is
    for group in stacks_of(run, []).groups:
        if rank in group.ranks:
            click.echo("\n".join(f"  {text.block(frame)}" for frame in group.main), err=True)


def _relay(connection: socket.socket, worker: int) -> bool:
    """Send what is typed, and show what comes; return whether the rank says that it goes on."""
    from elaunch.wire.debugger import GOES_ON

    poll = select.poll()
    typed = sys.stdin.fileno()
    for one in (connection.fileno(), worker, typed):
        poll.register(one, select.POLLIN)
    shown = more = b"\n"
    with contextlib.suppress(OSError):  # the rank or the terminal is gone
        while more and not shown.endswith(GOES_ON):
            ready = [fd for fd, _ in poll.poll()]
            if ready != [typed]:
                # A child of the rank that has ended may hold its end of the stream open.
                more = connection.recv(CHUNK, socket.MSG_DONTWAIT)
                shown = more or shown
                sys.stdout.buffer.write(more.removesuffix(GOES_ON))
                sys.stdout.buffer.flush()
            if typed in ready and not _typed(connection, typed):
                poll.unregister(typed)
    if not shown.endswith((GOES_ON, b"\n")):
        click.echo(err=True)  # behind a prompt
    return shown.endswith(GOES_ON)


def _typed(connection: socket.socket, typed: int) -> bool:
    """Send what has been typed; whether more may come."""
    line = os.read(typed, CHUNK)
    connection.sendall(line)
    if not line:
        connection.shutdown(socket.SHUT_WR)
    return bool(line)
