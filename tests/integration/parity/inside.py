"""Inside of parity: what scripts do with processes, pickles and their own source, as one JSON file.

Each item is a function that returns what it saw; an exception is an answer, too. multiprocessing
imports this file again in children that it spawns: nothing heavy is imported at the top.
"""

import asyncio
import concurrent.futures
import copy
import dataclasses
import enum
import importlib
import inspect
import io
import json
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import typing
import warnings
from multiprocessing import shared_memory


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    colour: "Colour" = Colour.RED
    others: "list[Point]" = dataclasses.field(default_factory=list)


class Pair(typing.NamedTuple):
    left: int
    right: Point


class Squares:
    """A data set of plain numbers."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index * index


def described(point):
    """Run in a child: say how this file looks from there."""
    main = sys.modules["__main__"]
    process = multiprocessing.current_process()
    return {
        "point": repr(point),
        "class is main's": type(point) is Point,
        "name": __name__,
        "main's file": getattr(main, "__file__", None),
        "main's spec": repr(getattr(main, "__spec__", None)),
        "module of class": Point.__module__,
        "argv": sys.argv,
        "path": sys.path,
        "cwd": os.getcwd(),
        "umask": oct(os.umask(0o22)),
        "rank": os.environ["RANK"],
        "process": process.name.rstrip("0123456789"),
        "parent": multiprocessing.parent_process().name,
        "start method": multiprocessing.get_start_method(),
        "handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "main thread": threading.current_thread() is threading.main_thread(),
    }


def pool(method):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as workers:
        return workers.apply(described, (Point(3),))


def pool_of_forks():
    return pool("fork")


def pool_of_spawned():
    return pool("spawn")


def pool_of_forkserver():
    return pool("forkserver")


def process_exit_codes():
    context = multiprocessing.get_context("fork")
    codes = []
    for target, args in ((sys.exit, (3,)), (os.abort, ()), (print, ()), (os._exit, (4,))):
        child = context.Process(target=target, args=args)
        child.start()
        child.join()
        codes.append([child.exitcode, child.name])
    return codes


def left_child():
    """Start a child that nobody joins: the interpreter does, at the exit."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.1,)).start()
    return len(multiprocessing.active_children())


def shared_state():
    context = multiprocessing.get_context("fork")
    queue, number = context.Queue(), context.Value("i", 1)
    memory = shared_memory.SharedMemory(create=True, size=8)

    def write():
        memory.buf[0] = 7
        number.value += 1
        queue.put("sent")

    child = context.Process(target=write)
    child.start()
    answer = [queue.get(timeout=60), child.join(60), number.value, memory.buf[0]]
    memory.close()
    memory.unlink()
    return answer


def managed():
    with multiprocessing.get_context("fork").Manager() as manager:
        return sorted(manager.dict(a=1).items())


def executor():
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as workers:
        return repr(workers.submit(copy.copy, Point(1)).result())


def authkeys():
    key = multiprocessing.current_process().authkey
    with multiprocessing.get_context("fork").Pool(1) as workers:
        return [len(key), workers.apply(_authkey) == bytes(key)]


def _authkey():
    return bytes(multiprocessing.current_process().authkey)


def loader_of_forks():
    import torch

    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=2, num_workers=2, persistent_workers=True
    )
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def loader_of_spawned():
    import torch

    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=3, num_workers=1, multiprocessing_context="spawn"
    )
    return [batch.tolist() for batch in loader]


def pickled():
    values = [Point(1), Colour.RED, Pair(1, Point(2)), described, Point, Squares]
    data = pickle.dumps(values)
    return [data.hex(), repr(pickle.loads(data)[:3]), pickle.loads(data)[3] is described]


def saved_by_torch():
    import torch

    file = io.BytesIO()
    torch.save({"point": Point(5), "tensor": torch.arange(3)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    file.seek(0)
    with torch.serialization.safe_globals([Point, Colour]):
        safely = torch.load(file, weights_only=True)
    return [repr(loaded), type(loaded["point"]) is Point, repr(safely)]


def scripted_by_torch():
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_added).code


def _added(a: int, b: int) -> int:
    return a + b


def source():
    module = inspect.getmodule(source)
    return {
        "function": inspect.getsource(_authkey),
        "class": inspect.getsource(Colour),
        "file": [inspect.getfile(Point), inspect.getsourcefile(pickled)],
        "module": [module.__name__, module is sys.modules["__main__"]],
        "module of frame": inspect.getmodule(inspect.currentframe()).__name__,
        "line": linecache.getline(__file__, 1),
        "from loader": __loader__.get_source("__main__").count("\n"),
        "is package": __loader__.is_package("__main__"),
        "imported": importlib.import_module("__main__") is module,
        "doc": inspect.getdoc(module),
    }


def type_hints():
    hints = [
        typing.get_type_hints(Point),
        typing.get_type_hints(Pair),
        typing.get_type_hints(_added),
    ]
    return repr(hints)


def warnings_of_main():
    with warnings.catch_warnings(record=True) as records:
        for _ in range(3):
            warnings.warn("in main", stacklevel=1)
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        return [(str(w.message), w.filename, w.lineno, w.category.__name__) for w in records]


def stack():
    """The frames from here down; a forked worker has the server's one below ``__main__``."""
    names = [
        f"{frame.name} {os.path.basename(frame.filename)}" for frame in traceback.extract_stack()
    ]
    return [name for name in names if name != "<module> __main__.py"]


def subprocesses():
    run = subprocess.run(
        ["sh", "-c", "read line; echo got $line $RANK; echo bad >&2; exit 3"],
        input=b"data\n",
        capture_output=True,
    )
    killed = subprocess.run(["sh", "-c", "kill -9 $$"])
    absent = None
    try:
        subprocess.run(["/does/not/exist"])
    except FileNotFoundError as error:
        absent = str(error)
    return [run.returncode, run.stdout.decode(), run.stderr.decode(), killed.returncode, absent]


def state_of_subprocess():
    before = children_at_start()
    command = (
        "grep -E '^(Sig[^Q]|Shd|NoNew|Seccomp)' /proc/self/status; ls /proc/self/fd; umask; nice"
    )
    shown = subprocess.run(["sh", "-c", command], stdin=0, capture_output=True, text=True).stdout
    # glibc ignores its two internal signals in what it starts by posix_spawn; see the test.
    lines = [_without_internal(line) for line in shown.splitlines()]
    return [before, lines]


def _without_internal(line):
    name, _, value = line.partition(":\t")
    return f"{name}: {int(value, 16) & ~(3 << 31):x}" if name == "SigIgn" else line


def python_below():
    code = "import sys, os, json; print(json.dumps([sys.path[1:], sys.flags[:], sys.argv]))"
    done = subprocess.run([sys.executable, "-c", code, "x"], capture_output=True, text=True)
    return json.loads(done.stdout)


def async_subprocess():
    async def go():
        process = await asyncio.create_subprocess_exec("sh", "-c", "exit 7")
        return await process.wait()

    return asyncio.run(go())


def children_at_start():
    try:
        return list(os.waitpid(-1, os.WNOHANG))
    except ChildProcessError as error:
        return error.errno


def child_signal():
    seen = []
    before = signal.signal(signal.SIGCHLD, lambda number, _: seen.append(number))
    pid = os.fork()
    if pid == 0:
        os._exit(9)
    status = os.waitpid(pid, 0)[1]
    until = time.monotonic() + 60
    while not seen and time.monotonic() < until:
        time.sleep(0.01)
    signal.signal(signal.SIGCHLD, before)
    return [status, seen[:1], str(before)]


def wakeup_descriptor():
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    data = os.read(read, 1)
    signal.signal(signal.SIGUSR1, handler)
    signal.set_wakeup_fd(before)
    return [before, data.hex(), str(handler)]


def alarm():
    fired = []
    signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    until = time.monotonic() + 60
    while not fired and time.monotonic() < until:
        time.sleep(0.01)
    return fired


def forked():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(
            write, f"{os.getppid() == PID} {os.environ['RANK']} {os.getpgid(0) == PID}".encode()
        )
        os._exit(5)
    os.close(write)
    with open(read) as file:
        return [file.read(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


PID = os.getpid()


def daemonised():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            until = time.monotonic() + 60
            while os.getppid() == PID and time.monotonic() < until:
                time.sleep(0.01)
            os.write(write, f"{os.getsid(0) != os.getpid()} {os.environ['RANK']}".encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        said = file.read()
    return [said, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def process_title():
    import psutil

    shown = [["ps", "-ww", "-o", f"{name}=", "-p", str(PID)] for name in ("args", "comm")]
    return [
        [_said(ps) for ps in shown if shutil.which("ps")],
        psutil.Process().cmdline(),
        psutil.Process().name(),
        psutil.Process().exe(),
    ]


def _said(command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def other_threads():
    before = len(os.listdir("/proc/self/task"))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        native = list(threads.map(lambda _: threading.get_native_id() != PID, range(2)))
    return [before, native, threading.main_thread().native_id == PID]


def local_module():
    import parity_neighbour

    return [parity_neighbour.__name__, os.path.relpath(parity_neighbour.__file__, os.getcwd())]


ITEMS = (
    *(children_at_start, stack, pickled, source, type_hints, warnings_of_main, local_module),
    *(subprocesses, state_of_subprocess, python_below, async_subprocess, child_signal),
    *(wakeup_descriptor, alarm, forked, daemonised, process_title, other_threads),
    *(pool_of_forks, pool_of_spawned, pool_of_forkserver, process_exit_codes, shared_state),
    *(managed, executor, authkeys, left_child),
    *(saved_by_torch, scripted_by_torch, loader_of_forks, loader_of_spawned),
)


def main():
    found = {}
    for item in ITEMS:
        try:
            found[item.__name__] = item()
        except Exception:
            found[item.__name__] = ["raised", traceback.format_exc()]
    with open(os.path.join(os.environ["PARITY_OUT"], "inside.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
