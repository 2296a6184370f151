"""A worker that stays when another one of its node is lost; it speaks the protocol by hand.

It prints "rank K round R pid P" in each round that it is in, and ends once the file STOP is there.
Arguments, K being a rank and R a round:

============  ==================================================================================
``child``     each begins a process that sleeps, and prints "child K pid P"
``late=R``    who is new in round R does not stand before the file LATE is there
``fails=R``   who is new in round R exits with code 5
``leaves=K``  K leaves its loop when it is to enter a round
``ends=K``    K ends then, with 0
============  ==================================================================================
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from elaunch.wire.local import LONGEST, LocalChannel, connect, is_readable
from elaunch.wire.progress import ProgressPage
from elaunch.wire.worker import WIRE

RANK = int(os.environ["RANK"])
ASKED = dict(word.partition("=")[::2] for word in sys.argv[1:])


def where() -> str:
    """Return where this process is."""
    return f"rank {RANK} round {os.environ['ELAUNCH_ROUND']} pid {os.getpid()}"


def say(op: str, **fields: Any) -> None:
    """Send the agent a message."""
    channel.send({"op": op, **fields}, [page.fd] if op == "worker" else [], 30.0)


def enter(message: dict[str, Any]) -> None:
    """Do as the agent says."""
    if ASKED.get("leaves") == str(RANK):
        say("stands", stands=False)
        return
    if ASKED.get("ends") == str(RANK):
        os._exit(0)
    os.environ.update(message["environ"])
    number = int(os.environ["ELAUNCH_ROUND"])
    say("enters", round=number)
    print(f"{where()} with {message['present']}", flush=True)
    say("entered", round=number)


page = ProgressPage()
channel = LocalChannel(connect(Path(os.environ["ELAUNCH_AGENT_SOCKET"]), 30.0), LONGEST)
say("worker", wire=WIRE, round=int(os.environ["ELAUNCH_ROUND"]), local_rank=RANK)
if "child" in ASKED:
    child = subprocess.Popen(["sleep", "600"])
    print(f"child {RANK} pid {child.pid}", flush=True)
is_new = "ELAUNCH_PRESENT" in os.environ
if is_new and ASKED.get("fails") == os.environ["ELAUNCH_ROUND"]:
    sys.exit(5)
waits = is_new and ASKED.get("late") == os.environ["ELAUNCH_ROUND"]
print(f"{where()} beside [{os.environ.get('ELAUNCH_PRESENT', '')}]", flush=True)
stands = False
while not os.path.exists("STOP"):
    if not stands and (not waits or os.path.exists("LATE")):
        stands = True
        say("stands", stands=True)
        say("resumed", uuid="", n=1)  # answered once the agent has read what came before
    if is_readable(channel.fileno(), 0.02):
        try:
            for received, _ in channel.drain():  # two may have come at once
                if received.get("n") == 1:
                    print(f"{where()} stands", flush=True)
                if received.get("op") == "enter":
                    enter(received)
        except EOFError:
            break
if "child" in ASKED:
    child.kill()
    child.wait()
say("stands", stands=False)
say("detach")
