"""SIGTERM from outside, to a worker that learns by should_preempt() that it is to end.

Some platforms signal every process of a job (systemd's ``KillMode=control-group``). A worker that
was asked to save must not die of that. So SIGTERM does nothing in it, unless the script handles
it; the agent, which knows of this, ends it by SIGKILL.

A DataLoader's workers, which are forks, are shielded as well, but not from their parent and the
agent's server: there SIGTERM is blocked, and a thread looks who has sent it. All other children
have the default action.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None]

TERM = {signal.SIGTERM}


def begin() -> Handler | None:
    """Have SIGTERM do nothing here; return the handler, None where the script handles it.

    Call it in the main thread; elsewhere it changes nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return None
    server, shielded, loads = os.getppid(), False, False

    def ignore(_signum: int, _frame: FrameType | None) -> None:
        """Do nothing; unlike SIG_IGN, a program that is executed does not inherit it."""

    def before_fork() -> None:  # the interpreter drops what comes to a fork in its first moment
        nonlocal shielded, loads
        shielded = signal.getsignal(signal.SIGTERM) is ignore
        if shielded:
            loads = _made_by_loader()
            signal.pthread_sigmask(signal.SIG_BLOCK, TERM)

    def in_parent() -> None:
        if shielded:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, TERM)

    def in_child() -> None:
        if not shielded:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if loads:
            threading.Thread(target=_sift, args=(server,), name="sigterm", daemon=True).start()
        else:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, TERM)

    signal.signal(signal.SIGTERM, ignore)
    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
    return ignore


def _made_by_loader() -> bool:
    """Whether a DataLoader is about to fork: its code is what has called multiprocessing's."""
    frame, name = inspect.currentframe(), __name__
    while frame is not None and name.startswith((__name__, "multiprocessing.")):
        frame = frame.f_back
        name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.startswith("torch.utils.data.")


def _sift(server: int) -> None:
    """Let SIGTERM through to this process where its parent, the server or itself has sent it."""
    while True:
        sender = signal.sigwaitinfo(TERM).si_pid
        if sender in (os.getpid(), os.getppid(), server):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, TERM)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_BLOCK, TERM)
