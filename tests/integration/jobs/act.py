"""A worker that does what its arguments say, in their order; ends with 0 after the last.

Each argument is ``[WHO:]ACTION[=VALUE]``; WHO is a rank (``1``), a round (``r0``) or both
(``1r0``), and without it everybody acts in every round.

=================  =============================================================================
action             what it does
=================  =============================================================================
say=TEXT           print a line ``TEXT rank=… round=… pid=…``
err=TEXT           print TEXT on stderr
show=NAME,…        print a line ``RANK.ROUND NAME=VALUE`` for each variable
argv               print a line ``RANK.ROUND argv=…`` with the arguments that follow this one; stop
meet=DIR           wait until all ranks of this round have come here
touch=PATH         create a file
until=PATH         wait until a file exists
family=DIR         start descendants of every kind that is hard to kill; DIR gets their pids
kin=DIR            print ``alive KIND`` for each of those of earlier rounds that still lives
stubborn           ignore SIGTERM, SIGINT and SIGHUP
bomb               leave a process that forks one every 5 ms for a minute
tell=SIGNAL        print ``got SIGNAL`` when that comes, and go on
leave=SIGNAL         print ``got SIGNAL`` when that comes, and exit with 0
save=PATH,DELAY    at SIGTERM: write PATH after DELAY seconds, then exit with 0
ckpt=DIR           rank 0: write DIR/step_N.pt, whole, N ten more than what this round began from
later=DIR          leave a daemon that writes DIR/step_999.pt half a second after this one's end
error=TEXT         write TEXT into the error file
sleep=SECONDS      sleep
wait               wait for ever (two minutes)
exit=CODE          sys.exit(CODE)
text=TEXT          sys.exit(TEXT)
raise=TEXT         raise RuntimeError(TEXT)
kill=SIGNAL        send a signal to this process
=================  =============================================================================
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

RANK, ROUND = int(os.environ["RANK"]), int(os.environ["ELAUNCH_ROUND"])
SIZE = int(os.environ["WORLD_SIZE"])
STUBBORN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(words):
    for position, word in enumerate(words):
        who, action, value = re.fullmatch(r"(?:(\d*(?:r\d+)?):)?(\w+)(?:=(.*))?", word).groups()
        rank, _, number = (who or "").partition("r")
        if (rank and int(rank) != RANK) or (number and int(number) != ROUND):
            continue
        if action == "argv":
            print(f"{RANK}.{ROUND} argv={words[position + 1 :]}")
            return
        ACTIONS[action](value)


def say(text):
    # One write: a line is never cut, whatever else writes to the same pipe.
    os.write(1, f"{text} rank={RANK} round={ROUND} pid={os.getpid()}\n".encode())


def show(names):
    for name in names.split(","):
        print(f"{RANK}.{ROUND} {name}={os.environ.get(name)}")


def until(path):
    give_up = time.monotonic() + 100
    while not Path(path).exists():
        assert time.monotonic() < give_up, f"{path} does not come"
        time.sleep(0.005)


def meet(directory):
    (Path(directory) / f"here.{ROUND}.{RANK}").touch()
    for rank in range(SIZE):
        until(Path(directory) / f"here.{ROUND}.{rank}")


def family(directory):
    for kind in ("child", "stubborn child", "grandchild", "daemon", "stopped child"):
        ready, at_birth = os.pipe()
        if os.fork() == 0:
            live(kind, Path(directory) / f"{ROUND}.{RANK}.{kind}", at_birth)
        os.close(at_birth)
        os.read(ready, 1)
        os.close(ready)


def live(kind, path, at_birth):
    for number in STUBBORN:
        signal.signal(number, signal.SIG_DFL if kind == "child" else signal.SIG_IGN)
    if kind == "grandchild" and os.fork():
        time.sleep(120)
    if kind == "daemon":
        os.setsid()
        if os.fork():
            os._exit(0)
    path.write_text(str(os.getpid()))
    os.write(at_birth, b"x")
    if kind == "stopped child":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(120)
    os._exit(0)


def kin(directory):
    for path in Path(directory).glob("[0-9]*.*.*"):
        number, _, kind = path.name.split(".")
        if int(number) < ROUND and Path(f"/proc/{path.read_text()}").exists():
            print("alive", kind)


def bomb(_):
    if os.fork():
        return
    until_then = time.monotonic() + 60
    while time.monotonic() < until_then:
        if os.fork() == 0:
            time.sleep(0.2)
            os._exit(0)
        time.sleep(0.005)
    os._exit(0)


def stubborn(_):
    for number in STUBBORN:
        signal.signal(number, signal.SIG_IGN)


def ckpt(directory):
    if RANK == 0:
        write_checkpoint(directory, int(os.environ["ELAUNCH_RESUME_STEP"] or 0) + 10)


def write_checkpoint(directory, step):
    import pickle  # a third of what the other actions cost
    import zipfile

    path = Path(directory) / f"step_{step}.pt"
    with zipfile.ZipFile(path.with_suffix(".tmp"), "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"step": step}))
    path.with_suffix(".tmp").rename(path)


def later(directory):
    writer = os.getpid()
    ready, at_birth = os.pipe()
    if os.fork():
        os.close(at_birth)
        os.read(ready, 1)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(at_birth, b"x")
    while Path(f"/proc/{writer}").exists():
        time.sleep(0.005)
    time.sleep(0.5)
    write_checkpoint(directory, 999)
    os._exit(0)


def tell(name):
    def handler(number, frame):
        say(f"got {name}")

    signal.signal(getattr(signal, name), handler)


def leave(name):
    def handler(number, frame):
        say(f"got {name}")
        os._exit(0)

    signal.signal(getattr(signal, name), handler)


def save(value):
    path, _, delay = value.rpartition(",")

    def handler(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(float(delay))
        Path(path).write_text("saved")
        os._exit(0)

    signal.signal(signal.SIGTERM, handler)


def fail(text):
    raise RuntimeError(text)


def wait(_):
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        time.sleep(1)


ACTIONS = {
    "say": say,
    "err": lambda text: print(text, file=sys.stderr),
    "show": show,
    "meet": meet,
    "touch": lambda path: Path(path).touch(),
    "until": until,
    "family": family,
    "kin": kin,
    "stubborn": stubborn,
    "bomb": bomb,
    "ckpt": ckpt,
    "later": later,
    "tell": tell,
    "leave": leave,
    "save": save,
    "error": lambda text: Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(text),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "wait": wait,
    "exit": lambda code: sys.exit(int(code)),
    "text": sys.exit,
    "raise": fail,
    "kill": lambda name: os.kill(os.getpid(), getattr(signal, name)),
}

if __name__ == "__main__":
    main(sys.argv[1:])
