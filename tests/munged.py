"""A real munged with a key of its own, and the programs that reach it: one node's MUNGE.

The programs look for munged at a path of the system's; ``Munged.path`` is a PATH on which they are
told of this one's socket. A second munged with the key of the first is another node of its cluster.
Other users reach it too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests import programs
from tests.launching import freeze, wait_until

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
"""What srun sets, as far as it says that it was srun."""
NOBODY = 65534
PROGRAM = """\
#!/bin/sh
exec "{program}" -S "{socket}" "$@"
"""


def needed() -> None:
    """End the test where there is no MUNGE."""
    programs.needed("munge", "munged", "unmunge")


def other_users_needed() -> None:
    """End the test where nothing can be run as another user."""
    programs.needed("setpriv")
    programs.allowed("" if os.geteuid() == 0 else "only root runs programs as another user")


class Munged:
    """Runs munged until it is closed; ``key`` is another one's whose credentials it reads."""

    def __init__(self, key: Path | None = None) -> None:
        needed()
        self.directory = programs.make_directory("munged")
        self.directory.chmod(0o755)  # for other users
        self.key = self.directory / "key"
        self.key.touch(0o600)
        self.key.write_bytes(os.urandom(64) if key is None else key.read_bytes())
        self._process = self._start()
        self.programs = self.directory / "bin"
        self.programs.mkdir()
        for name in ("munge", "unmunge"):
            program = os.path.realpath(shutil.which(name) or name)  # the link is this user's
            (self.programs / name).write_text(PROGRAM.format(program=program, socket=self._socket))
            (self.programs / name).chmod(0o755)

    @property
    def path(self) -> str:
        """The PATH of a process on the node that this munged is of."""
        return f"{self.programs}{os.pathsep}{os.environ['PATH']}"

    @property
    def srun(self) -> dict[str, str]:
        """The variables of a process that srun has started on that node."""
        return SRUN | {"PATH": self.path}

    @property
    def _socket(self) -> Path:
        return self.directory / "socket"

    def _start(self) -> subprocess.Popen[bytes]:
        files = {name: self.directory / name for name in ("pid-file", "log-file", "seed-file")}
        words = [f"--{name}={path}" for name, path in files.items()]
        argv = ["munged", "--foreground", "--force", f"--socket={self._socket}", *words]
        log = (self.directory / "said").open("wb")
        with log:
            process = subprocess.Popen(
                [*argv, f"--key-file={self.key}"], stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self._socket.exists, 30.0, "munged listens")
        return process

    def credential(self, payload: bytes, *, uid: int | None = None, ttl: int = -1) -> bytes:
        """Return a credential that a process of the user ``uid`` has made, for this process."""
        argv = [str(self.programs / "munge"), "-u", str(os.geteuid()), "-t", str(ttl)]
        if uid is not None:
            argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *argv]
        done = subprocess.run(argv, input=payload, capture_output=True, timeout=60, check=True)
        return done.stdout.strip()

    def freeze(self) -> None:
        """Have munged answer nobody from now on."""
        freeze(self._process.pid)

    def stop(self) -> None:
        """End munged, also a frozen one; it removes its socket.

        It misses a signal that comes between its look for one and its wait for a client.
        """

        def ended() -> bool:
            for number in (signal.SIGTERM, signal.SIGCONT):
                self._process.send_signal(number)
            return self._process.poll() is not None

        wait_until(ended, 60.0, "munged has ended")

    def close(self) -> None:
        """End munged and remove its files."""
        self.stop()
        shutil.rmtree(self.directory)
