"""A worker that starts a process that becomes another user's.

``becoming.py DIR WHO WHAT``: of rank 0 a child, a daemon or the worker itself (``child``,
``daemon``, ``itself``) becomes ``sleep`` as nobody and has its pid as a name in DIR. Then rank 0
``fails`` with 3 in the first round, ``waits``, or ``kills`` the process that has started it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import sys
import time
from pathlib import Path


def become() -> None:
    """Become ``sleep`` as another user."""
    program = os.path.realpath(shutil.which("sleep") or "")  # the directory may be closed to others
    os.setresuid(*[pwd.getpwnam("nobody").pw_uid] * 3)
    os.execv(program, ["sleep", "300"])


def note(place: Path, pid: int) -> None:
    """Leave the pid when the process is the other user's."""
    while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
        time.sleep(0.01)
    (place / str(pid)).touch()


def main() -> None:
    """Do what the command line says."""
    place, who, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    first = os.environ["RANK"] == "0"
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if what == "fails" and again:
        return
    if first and who == "itself":
        (place / str(os.getpid())).touch()
        become()
    elif first:
        pid = os.fork()
        if pid == 0:
            if who == "daemon":
                os.setsid()
            become()
        note(place, pid)
    if first and what == "fails":
        sys.exit(3)
    if first and what == "kills":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(300)


main()
