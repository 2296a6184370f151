"""A worker that steps, saves every other step in the background, and asks whether it is to end.

Arguments: a directory, then any of these words:

=======  ========================================================================================
flood    once there is a file ``begin``, rank 0 sends its agent the same report over and over
foreign  rank 0 starts a process of another user, which its agent may not signal
few      nothing is saved between step 2 and the save before the end
=======  ========================================================================================

It ends at the step at which it is asked to, or once there is a file ``stop``. Notes in the
directory: ``pid.ROUND.RANK``; ``began.ROUND.RANK``: the step that a round resumed from;
``step.ROUND.RANK``: the newest step; ``acked.RANK``: the newest step whose save has returned.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elaunch

OTHER_USER = 12_345
ROOM = 64 << 10
"""Bytes that the agent has not read yet, at which the flood pauses: others must get through."""


def note(directory: Path, name: str, value: int) -> None:
    path = directory / name
    path.with_name(f"{name}.new").write_text(str(value))
    path.with_name(f"{name}.new").rename(path)


def connection() -> socket.socket:
    """Return this process's connection to its agent, which the library has opened."""
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
            if found.family == socket.AF_UNIX and str(found.getpeername()).endswith(".sock"):
                return found
        except OSError:
            continue
    raise LookupError("no connection to the agent")


def flood(agent: socket.socket, begin: Path) -> None:
    while not begin.exists():
        time.sleep(0.01)
    while True:
        try:
            unread = struct.unpack("i", fcntl.ioctl(agent, termios.TIOCOUTQ, bytes(4)))[0]
            if unread < ROOM:
                agent.send(b'{"op":"listens"}\n' * 64, socket.MSG_NOSIGNAL)
            else:
                time.sleep(0.001)
        except OSError:
            return


def main(directory: Path, words: list[str]) -> None:
    dist.init_process_group("gloo")
    with elaunch.init(timeout=60) as ctx:
        rank, number = ctx.distributed.rank, ctx.info.round
        note(directory, f"pid.{number}.{rank}", os.getpid())
        if rank == 0 and "foreign" in words:
            argv = ["setpriv", f"--reuid={OTHER_USER}", "--clear-groups", "sleep", "600"]
            stranger = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            note(directory, f"foreign.{number}", stranger.pid)
        if rank == 0 and "flood" in words:
            threading.Thread(
                target=flood, args=(connection(), directory / "begin"), daemon=True
            ).start()
        state = {"step": torch.zeros(1)}
        found = ctx.checkpoint.load(state)
        step = found.step
        note(directory, f"began.{number}.{rank}", step)
        while not ctx.distributed.broadcast((directory / "stop").exists()):
            step += 1
            state["step"].fill_(step)
            time.sleep(0.02)
            asked = ctx.preempt.should_preempt()
            if asked or step == 2 or (step % 2 == 0 and "few" not in words):
                try:
                    ctx.checkpoint.save(state, step, block=asked)
                except elaunch.SaveError as error:
                    print(f"refused {step}: {error}", file=sys.stderr)
                else:
                    note(directory, f"acked.{rank}", step)
            note(directory, f"step.{number}.{rank}", step)
            if asked:
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
