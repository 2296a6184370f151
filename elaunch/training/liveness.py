"""A script's side of hang detection: heartbeats, sections, stacks when the agent asks for them.

Heartbeats and sections are written to the worker's progress page (elaunch.wire.progress); the agent
reads them there and judges. Stacks: at the signal ``env.STACKS_SIGNAL`` the worker writes those of
all its threads to the file that ``ELAUNCH_STACKS_FILE`` names, in C, so that it works also while
Python's lock is held. The agent sets the variable only where hangs are looked for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
from collections.abc import Iterator, Mapping

from elaunch import env, proc
from elaunch.errors import ContextError
from elaunch.wire.progress import ProgressPage, Spent

log = logging.getLogger("elaunch")


def heartbeat(page: ProgressPage) -> None:
    """Report that this rank makes progress.

    Any rank may call it at any time, from any thread; it blocks on nothing and costs half a
    microsecond. Every other call of the script API is a heartbeat too.
    """
    page.beat()


@contextlib.contextmanager
def section(
    page: ProgressPage, name: str, timeout: float | None = None, kind: Spent = "section"
) -> Iterator[None]:
    """Do something that takes longer than a step, as in ``with section(page, "eval", 900):``.

    Any rank may enter one, others need not; nothing blocks. Sections nest, and an outer one's
    deadline holds inside of the inner ones too. An exception leaves the section as a return does.

    Args:
        page: this worker's progress page.
        name: what is done; the first 64 bytes appear in ``elaunch status`` and in hang reports.
        timeout: seconds that it may take before this rank counts as hanging; None: ten times what
            the agent allows between two heartbeats.

    Raises:
        ContextError: ``name`` is empty, or ``timeout`` is not a positive number.
    """
    if not name.strip():
        raise ContextError('a section needs a name, as in section("eval", timeout=900)')
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise ContextError(
            f"section({name!r}, timeout={timeout!r}): the timeout is a number of seconds above 0, "
            "or None"
        )
    opened = page.enter(name, timeout, kind)
    try:
        yield
    finally:
        page.leave(opened)


def register_stacks(environ: Mapping[str, str]) -> bool:
    """Have stacks written when the agent asks for them; return whether that is so now.

    Does nothing where the agent did not ask for it, and where something handles the signal already:
    a worker that the fork server started is registered before its script runs.
    """
    path = environ.get(env.STACKS_FILE)
    if not path:
        return False
    if proc.catches("self", env.STACKS_SIGNAL):
        return True
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("hang reports will lack this worker's stacks: cannot open %s: %s", path, error)
        return False
    # faulthandler keeps the file open for as long as the process lives.
    file = os.fdopen(descriptor, "a")
    faulthandler.register(env.STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    return True
