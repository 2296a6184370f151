"""State of parity: what a script can observe of itself and of its process, as one JSON file.

With the argument ``--light`` nothing that needs torch.
"""

import sys

FIRST_GLOBALS = [name for name in globals() if name != "sys"]
FIRST_MODULES = set(sys.modules)
FIRST_PATH = list(sys.path)
NO_LISTS = [  # coverage looks through all that is imported before it
    name
    for name, module in sys.modules.items()
    if not hasattr(type(getattr(module, "__path__", ())), "__len__")
]

import _thread  # noqa: E402
import builtins  # noqa: E402
import ctypes  # noqa: E402
import errno  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import locale  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402

FIRST_THREADS = len(os.listdir("/proc/self/task"))


def identity():
    main = sys.modules["__main__"]
    here = globals()
    return {
        "name": __name__,
        "file": __file__,
        "spec": repr(__spec__),
        "package": repr(__package__),
        "doc": __doc__,
        "cached": repr(here.get("__cached__", "absent")),
        "builtins": __builtins__ is builtins,
        "loader": f"{type(__loader__).__module__}.{type(__loader__).__name__}",
        "loader path": getattr(__loader__, "path", None),
        "globals": sorted(FIRST_GLOBALS),
        "co_filename": identity.__code__.co_filename,
        "is sys.modules' __main__": main.__dict__ is here,
        "loaded twice": [
            n for n, m in sys.modules.items() if getattr(m, "__file__", 0) == __file__
        ],
        "type": type(main).__name__,
    }


def interpreter():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": FIRST_PATH,
        "paths that are no lists": NO_LISTS,
        "flags": {n: getattr(sys.flags, n) for n in dir(sys.flags) if _is_flag(n)},
        "executable": sys.executable,
        "prefix": sys.prefix,
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "dont_write_bytecode": sys.dont_write_bytecode,
        "path_hooks": [str(getattr(hook, "__qualname__", hook)) for hook in sys.path_hooks],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.unraisablehook is sys.__unraisablehook__,
            sys.breakpointhook is sys.__breakpointhook__,
            threading.excepthook is threading.__excepthook__,
        ],
        "trace and profile": [sys.gettrace(), sys.getprofile(), threading.gettrace()],
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "frozen objects": gc.get_freeze_count() > 1000,  # Python 3.12 begins with 375
        "gc": [gc.isenabled(), list(gc.get_threshold()), gc.get_debug(), gc.garbage],
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)],
        "fs encoding": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
        "timezone": time.tzname,
        "last error": [hasattr(sys, n) for n in ("last_type", "last_value", "ps1")],
        "exception in flight": sys.exc_info()[0],
        "hash randomised": sys.flags.hash_randomization,
        "stack depth": _depth(),
    }


def _is_flag(name):
    return not name.startswith(("_", "n_")) and name not in ("count", "index")


def _depth():
    frame, depth = sys._getframe(), 0
    while frame.f_code.co_filename == __file__:
        frame, depth = frame.f_back, depth + 1
        if frame is None:
            return 0
    return 1


def streams():
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        found[name] = stream and {
            "encoding": stream.encoding,
            "errors": stream.errors,
            "line_buffering": stream.line_buffering,
            "write_through": stream.write_through,
            "mode": stream.mode,
            "name": stream.name,
            "fileno": stream.fileno(),
            "isatty": stream.isatty(),
            "newlines": stream.newlines,
            "types": [type(stream).__name__, type(stream.buffer).__name__],
            "original": stream is getattr(sys, f"__{name}__"),
        }
    if sys.stdin is not None and not sys.stdin.isatty() and os.environ["WORLD_SIZE"] == "1":
        found["read"] = [sys.stdin.readline(), sys.stdin.read()]
    return found


def process():
    status = _status()
    return {
        "cwd": os.getcwd(),
        "umask": _umask(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "leads its session": os.getsid(0) == os.getpid(),
        "controlling terminal": _open_error("/dev/tty"),
        "parent lives": os.path.exists(f"/proc/{os.getppid()}") and os.getppid() > 1,
        "nice": os.nice(0),
        "scheduler": os.sched_getscheduler(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "rlimits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
        "signal handlers": {n.name: _shown(signal.getsignal(n)) for n in _known()},
        "signal masks": {k: _public(status[k]) for k in status if k.startswith(("Sig", "ShdPnd"))},
        "privileges": {
            k: status[k] for k in ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "CapAmb")
        },
        "oom_score_adj": _read("/proc/self/oom_score_adj"),
        "cgroup": _read("/proc/self/cgroup"),
        "wakeup fd": signal.set_wakeup_fd(-1),
        "timers": [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "descriptors": _descriptors(),
        "cmdline": _read("/proc/self/cmdline"),
        "environ in /proc": sorted(_names(_read("/proc/self/environ"))),
        "comm": _read("/proc/self/comm"),
        "exe": os.readlink("/proc/self/exe"),
        "subreaper": _prctl_get(37),
        "dumpable": _prctl_get_value(3),
        "death signal": _prctl_get(2),
        "main thread": [
            threading.main_thread() is threading.current_thread(),
            threading.main_thread().ident == _thread.get_ident(),
            threading.main_thread().native_id == os.getpid(),
            threading.active_count(),
            threading.main_thread().name,
            threading.stack_size(),
        ],
    }


def _shown(handler):
    """Return SIG_DFL and SIG_IGN as numbers: Python 3.10 shows their names."""
    if isinstance(handler, signal.Handlers):
        return str(int(handler))
    return str(handler).partition(" at ")[0]


def _known():
    return [n for n in signal.Signals if n not in (signal.SIGKILL, signal.SIGSTOP)]


def _status():
    with open("/proc/self/status") as file:
        return {k: v.strip() for k, _, v in (line.partition(":") for line in file)}


def _public(mask):
    """Leave out glibc's two internal signals: a child that it starts by posix_spawn ignores them
    (the server is one), and they are caught from the first thread on."""
    return f"{int(mask, 16) & ~(3 << 31):x}" if "/" not in mask else "queue"


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return oct(mask)


def _open_error(path):
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        return errno.errorcode[error.errno]
    return "opened"


def _read(path):
    with open(path, "rb") as file:
        return file.read().decode(errors="surrogateescape")


def _names(environ):
    return [line.partition("=")[0] for line in environ.split("\0") if line]


def _descriptors():
    found = {}
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        kind = target.partition(":[")[0].rstrip("0123456789")
        found[name] = [kind, os.get_inheritable(int(name))]
    return found


def _prctl_get(option):
    value = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value


def _prctl_get_value(option):
    return ctypes.CDLL(None).prctl(option, 0, 0, 0, 0)


def libraries():
    """Import torch and numpy: what differs where they had been imported before."""
    filters = len(__import__("warnings").filters)
    import multiprocessing

    import numpy
    import torch
    import torch.distributed

    root = logging.getLogger()
    return {
        "threads first": FIRST_THREADS,
        "threads now": len(os.listdir("/proc/self/task")),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "launched": torch.distributed.is_torchelastic_launched(),
        "default dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "numpy errors": numpy.geterr(),
        "root logger": [root.level, [str(h) for h in root.handlers], logging.root.disabled],
        "loggers": sorted(n for n in root.manager.loggerDict if not n.startswith("torch")),
        "torch log level": logging.getLogger("torch._dynamo").getEffectiveLevel(),
        "warning filters": [filters, len(__import__("warnings").filters)],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "process name": multiprocessing.current_process().name,
        "parent process": multiprocessing.parent_process(),
        "authkey": len(multiprocessing.current_process().authkey),
        "children": multiprocessing.active_children(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "modules of elaunch": [n for n in sys.modules if n.partition(".")[0] == "elaunch"],
    }


def random_states():
    """Draw from everything that a fresh process seeds by itself: no two processes are alike."""
    import multiprocessing
    import random
    import secrets
    import tempfile
    import uuid

    import numpy
    import torch

    return {
        "random": random.random(),
        "random.Random": random.Random().random(),
        "numpy": float(numpy.random.rand()),
        "numpy state": numpy.random.get_state()[1].tolist()[:4],
        "numpy generator": float(numpy.random.default_rng().random()),
        "torch": float(torch.rand(1, dtype=torch.float64)),
        "torch.initial_seed": torch.initial_seed(),
        "torch generator": torch.Generator().seed(),
        "uuid1": str(uuid.uuid1()),
        "uuid4": str(uuid.uuid4()),
        "secrets": secrets.token_hex(8),
        "urandom": os.urandom(8).hex(),
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
        "temporary name": tempfile.mktemp(),
        "hash": hash("a text"),
    }


def main():
    found = {
        "identity": identity(),
        "interpreter": interpreter(),
        "streams": streams(),
        "process": process(),
        "environment": dict(os.environ),
        "modules": sorted(FIRST_MODULES),
    }
    if "--light" not in sys.argv:
        found["libraries"] = libraries()
        found["random"] = random_states()
    with open(os.path.join(os.environ["PARITY_OUT"], os.environ["RANK"] + ".json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
