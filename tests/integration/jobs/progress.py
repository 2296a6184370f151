"""A worker that speaks of its progress as a script with ``elaunch.init()`` does, without torch.

``progress.py WORD…``; each word is ``[WHO:]ACTION[=VALUE]`` as for act.py:

=================  =============================================================================
steps=N[,S]        N steps of S seconds (0.05), each told to the agent
hang               sleep for ever (two minutes), in a function of that name
gil                the same in C code that keeps Python's lock
enter=NAME[,S]     enter a section, with a timeout of S seconds
leave              leave it
sleep=SECONDS      sleep
busy=SECONDS       use the CPU
note=TEXT          say what is done
status=TEXT        say how it goes
progress=X         say how much is done
stop               stop this process by SIGSTOP
meet=DIR           wait until all ranks of this round have come here
detach             close the link, as the end of the context does
silent             (first) never attach
say=TEXT           print a line
=================  =============================================================================
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from elaunch.wire.local import LocalChannel, connect
from elaunch.wire.progress import ProgressPage
from elaunch.wire.worker import WIRE

RANK, ROUND = int(os.environ["RANK"]), int(os.environ["ELAUNCH_ROUND"])
SIZE = int(os.environ["WORLD_SIZE"])


class Worker:
    def __init__(self):
        self.page = ProgressPage()
        self.link = None
        self.section = None
        self.done = 0

    def attach(self):
        self.link = LocalChannel(connect(Path(os.environ["ELAUNCH_AGENT_SOCKET"]), 60.0))
        first = {"op": "worker", "wire": WIRE, "round": ROUND}
        first["local_rank"] = int(os.environ["LOCAL_RANK"])
        self.link.send(first, [self.page.fd])
        assert self.link.receive() == ({"op": "attached"}, [])

    def steps(self, value):
        number, _, seconds = value.partition(",")
        for _ in range(int(number)):
            self.done += 1
            self.page.step(self.done)
            time.sleep(float(seconds or 0.05))

    def hang(self, _):
        time.sleep(120)

    def gil(self, _):
        ctypes.PyDLL(None).sleep(120)

    def enter(self, value):
        name, _, seconds = value.partition(",")
        self.section = self.page.enter(name, float(seconds) if seconds else None)

    def leave(self, _):
        self.page.leave(self.section)

    def sleep(self, value):
        time.sleep(float(value))

    def busy(self, value):
        until = time.monotonic() + float(value)
        while time.monotonic() < until:
            sum(range(1000))

    def note(self, value):
        self.page.note(value)

    def status(self, value):
        self.page.status(value)

    def progress(self, value):
        self.page.progress(float(value))

    def stop(self, _):
        os.kill(os.getpid(), signal.SIGSTOP)

    def meet(self, directory):
        (Path(directory) / f"here.{ROUND}.{RANK}").touch()
        give_up = time.monotonic() + 100
        while len(list(Path(directory).glob(f"here.{ROUND}.*"))) < SIZE:
            assert time.monotonic() < give_up, "not all come"
            time.sleep(0.01)

    def detach(self, _):
        self.link.sendall(b'{"op": "detach"}\n')
        self.link.close()

    def say(self, text):
        os.write(1, f"{text} rank={RANK} round={ROUND}\n".encode())

    def threads(self, _):
        threading.Thread(target=self.hang, args=("",), daemon=True).start()


def main(words):
    worker = Worker()
    if "silent" not in words:
        worker.attach()
    for word in words:
        who, action, value = re.fullmatch(r"(?:(\d*(?:r\d+)?):)?(\w+)(?:=(.*))?", word).groups()
        rank, _, number = (who or "").partition("r")
        if (rank and int(rank) != RANK) or (number and int(number) != ROUND):
            continue
        if action != "silent":
            getattr(worker, action)(value or "")


if __name__ == "__main__":
    main(sys.argv[1:])
