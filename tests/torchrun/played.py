"""Use torch's launcher from Python, or elaunch's in its place, and write down what is seen.

    python played.py torch|elaunch FILE [CASE ...]

The same program with one changed import. Each case is a function below that returns what can be
seen of a launch; FILE gets all of it as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if sys.argv[1] == "torch":
    from torch.distributed.elastic.multiprocessing import SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from torch.distributed.run import main
else:
    from elaunch.torchrun import (
        ChildFailedError,
        LaunchConfig,
        SignalException,
        Std,
        elastic_launch,
        main,
    )

ONE_NODE: dict[str, Any] = {
    "min_nodes": 1,
    "max_nodes": 1,
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:0",
    "max_restarts": 0,
}


def launched(entrypoint: Any, *args: Any, nproc: int = 2, **config: Any) -> Any:
    """Return the results, or what the exception says."""
    made = LaunchConfig(**{"start_method": "fork", **ONE_NODE, **config}, nproc_per_node=nproc)
    return outcome(partial(elastic_launch(made, entrypoint), *args))


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or what its exception says."""
    try:
        found = call()
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        message = first.message
        callstack = ""
        if isinstance(message, dict):
            callstack = message["extraInfo"]["py_callstack"].strip().splitlines()[-1]
            message = message["message"]
        return {
            "raised": "ChildFailedError",
            "title": str(error).strip().splitlines()[1],
            "name": error.name,
            "first": rank,
            "local_rank": first.local_rank,
            "exitcode": first.exitcode,
            "signal": first.signal_name(),
            "message": message.replace(str(first.pid), "PID"),
            "callstack": callstack,
            "file": os.path.basename(first.error_file),
        }
    except SignalException as error:
        return {"raised": "SignalException", "signal": error.sigval.name}
    except SystemExit as error:
        return {"raised": "SystemExit", "code": error.code}
    return {str(rank): result for rank, result in found.items()} if found is not None else None


# ── what the workers call ────────────────────────────────────────────────────────────────────────


def place(*args: Any, **extra: Any) -> Any:
    """Return what is given, and the variables of the place."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_NAME".split()
    return [os.environ[name] for name in names] + list(args)


def fails(rank: int, how: str) -> str:
    """End badly on one rank."""
    if int(os.environ["RANK"]) == rank:
        if how == "raise":
            raise ValueError("boom")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    return "fine"


def fails_first(file: str) -> list[str]:
    """Raise in the first round on rank 1."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if count == "0" and os.environ["RANK"] == "1":
        raise RuntimeError("not yet")
    with open(file, "a") as log:
        log.write(f"{count}\n")
    return [count, os.environ["TORCHELASTIC_MAX_RESTARTS"]]


def exits_well() -> None:
    """End by an exit that is none."""
    sys.exit(0)


def no_pickle() -> Any:
    """Return what cannot be pickled."""
    return (number for number in range(3))


def tensor() -> Any:
    """Return a tensor."""
    import torch

    return torch.arange(3) + int(os.environ["RANK"])


def into(shared: Any, queue: Any) -> int:
    """Write into a tensor and a queue that came as arguments."""
    rank = int(os.environ["RANK"])
    shared[rank] = rank + 10
    queue.put(rank)
    return len(shared)


def waits(file: str) -> None:
    """Say that this worker is there, and wait to be ended."""
    Path(f"{file}.{os.environ['RANK']}").touch()
    time.sleep(60)


def main_module(name: str) -> list[Any]:
    """Return what a script sees of itself."""
    return [name, __name__, len(sys.argv), os.path.basename(sys.modules["__main__"].__file__ or "")]


# ── the cases ────────────────────────────────────────────────────────────────────────────────────


def results() -> Any:
    """A function by fork: a closure, its results by rank."""
    closed_over = {"deep": [1, 2]}
    return launched(lambda more: place(closed_over, more), 5, nproc=3, role="trainer")


def by_spawn() -> Any:
    """A function by its name, in fresh processes, with the main module imported again."""
    return [
        launched(place, "$local_rank", "a$$b", start_method="spawn"),
        launched(main_module, "x", start_method="spawn", nproc=1),
    ]


def shared_arguments() -> Any:
    """Tensors and queues among the arguments are shared with the workers."""
    import torch

    shared, queue = torch.zeros(2), multiprocessing.get_context("spawn").Queue()
    found = launched(into, shared, queue, start_method="spawn")
    return [found, shared.tolist(), sorted(queue.get(timeout=20) for _ in range(2))]


def failures() -> Any:
    """An exception, an exit and a signal, each on rank 1."""
    return [launched(fails, 1, how) for how in ("raise", "exit", "SIGKILL")]


def restarts() -> Any:
    """The second round succeeds."""
    return launched(fails_first, str(OUT.with_suffix(".rounds")), max_restarts=2)


def no_restart_left() -> Any:
    """All rounds fail."""
    return launched(fails, 0, "raise", max_restarts=1)


def odd_results() -> Any:
    """No result, and one that is a tensor."""
    found = launched(tensor, nproc=1)
    return [launched(exits_well, nproc=1), {rank: each.tolist() for rank, each in found.items()}]


def not_picklable() -> Any:
    """A result that cannot be sent back is a failure."""
    found = launched(no_pickle, nproc=1)
    return {name: found[name] for name in ("raised", "exitcode", "first")}


def programs() -> Any:
    """Programs: one that is fine, and one that is not."""
    return [
        launched("sh", "-c", "exit $(( $RANK * 7 ))"),
        launched("sh", "-c", f"test ${{local_rank}} = $LOCAL_RANK && echo $$RANK > {OUT}.$$RANK"),
        sorted(Path(f"{OUT}.{rank}").read_text() for rank in range(2)),
    ]


def this_python() -> Any:
    """The interpreter with code, and with a program."""
    code = "import os, sys; sys.exit(int(os.environ['RANK']) * 4)"
    file = OUT.with_name("script.py")
    file.write_text(code)
    return [
        launched(sys.executable, "-u", "-c", code),
        launched(sys.executable, "-u", str(file), "x"),
    ]


def scripts() -> Any:
    """torchrun's own main, with a script that fails and with a wrong line."""
    script = OUT.with_name("script.py")
    script.write_text("import os, sys; sys.exit(int(sys.argv[1]) * int(os.environ['RANK']))\n")
    return [
        outcome(partial(main, ["--nproc-per-node", "2", str(script), "0"])),
        outcome(partial(main, ["--nproc-per-node", "2", str(script), "9"])),
        outcome(partial(main, ["--no-such-flag", str(script)])),
    ]


def in_a_thread() -> Any:
    """From a thread that is not the main one."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(launched(place, 1)))
    thread.start()
    thread.join()
    return found


def interrupted() -> Any:
    """A signal to the caller ends the workers with it, and is raised."""
    file = f"{OUT}.waits"

    def send() -> None:
        while not all(os.path.exists(f"{file}.{rank}") for rank in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    found = launched(waits, file)
    thread.join()
    return found


def logs() -> Any:
    """Streams of the workers in files of the directory that was asked for."""
    if sys.argv[1] == "torch":
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    else:
        from elaunch.torchrun import DefaultLogsSpecs

    root = OUT.with_suffix(".logs")
    specs = DefaultLogsSpecs(str(root), redirects=Std.OUT, tee={0: Std.ERR})
    found = launched(os.write, 1, b"seen", logs_specs=specs, run_id="job")
    files = sorted(path for path in root.glob("job_*/attempt_0/*/stdout.log"))
    return [found, [[path.parent.name, path.read_text()] for path in files]]


CASES = [
    *(results, failures, restarts, not_picklable, programs, interrupted),
    *(no_restart_left, odd_results, this_python, in_a_thread, logs),
    *(scripts, by_spawn, shared_arguments),
]

if __name__ == "__main__":
    OUT = Path(sys.argv[2])
    wanted = sys.argv[3:] or [case.__name__ for case in CASES]
    seen = {case.__name__: case() for case in CASES if case.__name__ in wanted}
    OUT.write_text(json.dumps(seen))
