"""Endings of parity: each way a script can end, played to the very end by a fork of the worker.

The fork leaves this file where a script ends, so the whole way out is the worker's own. What it
said and its wait status go into one JSON file. With an argument, torch is imported first, as its
exit handlers are part of the way out, and the cases named in it (by commas) are played alone.
"""

import asyncio
import atexit
import builtins
import ctypes
import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings

SKIPPED = object()


class Odd(BaseException):
    def __str__(self):
        raise ValueError("no text")


class Loud:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print("end of", self.name)


class Broken:
    def __del__(self):
        raise ValueError("in a destructor")


def inner(value):
    return 1 / value


def return_():
    return


def exit_3():
    sys.exit(3)


def exit_text():
    sys.exit("a text, and not a number: ä")


def exit_none():
    sys.exit(None)


def exit_true():
    sys.exit(True)


def exit_256():
    sys.exit(256)


def exit_minus_1():
    sys.exit(-1)


def exit_huge():
    sys.exit(1 << 80)


def exit_tuple():
    raise SystemExit(1, "two")


def exit_builtin():
    exit(5)


def exit_with_cause():
    try:
        inner(0)
    except ZeroDivisionError as error:
        raise SystemExit(6) from error


def exit_at_once():
    print("not flushed by hand", end="")
    os._exit(4)


def exception():
    inner(0)


def chained():
    try:
        inner(0)
    except ZeroDivisionError as error:
        raise RuntimeError("the second\nwith a line") from error


def in_a_handler():
    try:
        inner(0)
    except ZeroDivisionError:
        {}["absent"]


def without_context():
    try:
        inner(0)
    except ZeroDivisionError:
        raise KeyError("alone") from None


def notes():
    error = ValueError("noted")
    if hasattr(error, "add_note"):
        error.add_note("a note")
    raise error


def group():
    if sys.version_info >= (3, 11):
        groups = vars(builtins)["ExceptionGroup"]
        raise groups("group", [ValueError(1), groups("in", [TypeError(2)])])


def recursion():
    def down(n):
        down(n + 1)

    try:
        down(0)
    except RecursionError as error:
        raise RuntimeError(str(error)) from None


def odd():
    raise Odd


def stop_iteration():
    next(iter(()))


def syntax_error():
    compile("x = (1,\ny = 2\n", "made_up.py", "exec")


def assertion():
    assert inner(1) == 2, "not equal"


def in_library():
    json.loads("{")


def in_async():
    async def go():
        await asyncio.sleep(0)
        inner(0)

    asyncio.run(go())


def raised_again():
    try:
        inner(0)
    except ZeroDivisionError as error:
        kept = error
    raise kept


def with_foreign_traceback():
    raise RuntimeError("bare").with_traceback(None)


def hook_replaced():
    def hook(kind, value, tb):
        print("hook", kind.__name__, value, [f.name for f in traceback.extract_tb(tb)])
        print("same traceback", tb is value.__traceback__)

    sys.excepthook = hook
    inner(0)


def hook_broken():
    def hook(kind, value, tb):
        raise TypeError("in the hook")

    sys.excepthook = hook
    inner(0)


def hook_exits():
    def hook(kind, value, tb):
        sys.exit(9)

    sys.excepthook = hook
    inner(0)


def hook_deleted():
    del sys.excepthook
    inner(0)


def last_traceback():
    def look():
        print("last", sys.last_type, [f.name for f in traceback.extract_tb(sys.last_traceback)])
        print("hook", sys.excepthook is sys.__excepthook__)

    atexit.register(look)
    inner(0)


def keyboard_interrupt():
    raise KeyboardInterrupt


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def interrupted_and_handled():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        print("handled")


def terminated_and_handled():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(12))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def exit_handlers():
    kept = Loud("a local")
    globals()["GLOBAL"] = Loud("a global")
    sys.kept = Loud("a module's")
    atexit.register(print, "first registered")
    atexit.register(print, "last registered")
    print("no newline", end="")
    del kept


def exit_handler_fails():
    atexit.register(inner, 0)
    sys.exit(3)


def exit_handler_exits():
    atexit.register(sys.exit, 7)


def exception_with_handlers():
    atexit.register(print, "handler")
    globals()["GLOBAL"] = Loud("a global")
    kept = Loud("in the frame")
    inner(kept and 0)


def destructor_fails():
    Broken()


def unraisable_at_exit():
    globals()["GLOBAL"] = Broken()


def thread_is_waited_for():
    def late():
        main.join()
        print("after the main thread")

    main = threading.main_thread()
    threading.Thread(target=late).start()


def daemon_thread_is_not():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def thread_fails():
    thread = threading.Thread(target=inner, args=(0,), name="a-thread")
    thread.start()
    thread.join()


def thread_exits():
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()


def warned():
    for _ in range(2):
        warnings.warn("look at the line", stacklevel=1)
    warnings.warn("deprecated in main", DeprecationWarning, stacklevel=2)


def logged():
    logging.getLogger("some").warning("last resort")
    logging.info("not shown")  # noqa: LOG015
    logging.error("basic format")  # noqa: LOG015


def printed_traceback():
    try:
        inner(0)
    except ZeroDivisionError:
        traceback.print_exc()
    print(traceback.format_exception_only(ValueError, ValueError("x")))


def stderr_closed():
    sys.stderr.close()
    inner(0)


def stderr_is_none():
    sys.stderr = None
    inner(0)


def stdout_closed():
    os.close(1)
    print("to nobody")


def main_is_gone():
    del sys.modules["__main__"]
    inner(0)


def executed():
    os.execv("/bin/sh", ["sh", "-c", "echo replaced; exit 21"])


def fault_shown():
    faulthandler.enable()
    os.kill(os.getpid(), signal.SIGSEGV)


def null_read():
    ctypes.string_at(0)


def aborted():
    os.abort()


def by(signum):
    def kill():
        print("before", end="")
        os.kill(os.getpid(), signum)

    return kill


CASES = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == "__main__"
    and callable(value)
    and not isinstance(value, type)
    and name not in ("inner", "by")
}
CASES |= {
    f"by {name}": by(getattr(signal, name))
    for name in "SIGTERM SIGKILL SIGSEGV SIGABRT SIGBUS SIGFPE SIGILL SIGPIPE SIGXFSZ".split()
    + "SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGXCPU SIGALRM SIGCHLD SIGWINCH SIGTTOU".split()
}


def choose():
    """Return, in each fork, what it is to do; in the worker, when all have ended, nothing."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = {}
    chosen = sys.argv[1].split(",") if len(sys.argv) > 1 else CASES
    for name in chosen:
        files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        pid = os.fork()
        if pid == 0:
            for number, file in enumerate(files, 1):
                os.dup2(file.fileno(), number)
            return CASES[name]
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = [read(file).replace(str(pid), "PID") for file in files]
        found[name] = [status, *said]
    with open(os.path.join(os.environ["PARITY_OUT"], "endings.json"), "w") as file:
        json.dump(found, file)
    return return_


def read(file):
    file.seek(0)
    return file.read().decode(errors="backslashreplace")


choose()()
