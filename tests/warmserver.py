"""A process that has imported torch and elaunch, and forks commands for tests (tests/warm.py).

It is run as a program: ``python warmserver.py FD``. Each request on the socket FD is a JSON object
with descriptors; it answers with the pid of the command. Three processes come of a request:

=======  ===========================================================================================
process  what it is
=======  ===========================================================================================
command  what ``python -m elaunch ARGS``, or ``python PROGRAM ARGS``, would be, in a session of its
         own. It is an orphan, so it is a child of the test process, which is a subreaper. torch,
         and what a script uses of elaunch, is hidden from it until it imports it
seed     waits to become the agent's server, with what that process has in memory once it has
         imported torch; what a script uses of elaunch is hidden, the rest of elaunch is not there
server   the seed, when the agent executes the server's program; its child, where the agent is not
         the command: as the seed ends, the agent is its parent. The agent's next one, and any with
         other settings, is a real one
=======  ===========================================================================================

With a socket LISTENER, ``python warmserver.py FD LISTENER``, it forks pytest's own processes, too,
one for each connection (tests/forkedworker.py); each has a fork of this one for its commands.

A command and a server have the arguments, variables, streams, directory and signals that they would
have if they were executed; what remains of this process is memory.
"""

from __future__ import annotations

import array
import atexit
import builtins
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from elaunch.server import loop

_LARGEST: Final = 1 << 20
_SUBREAPER, _GET_SUBREAPER = 36, 37
_DROP, _CAP_KILL, _CAPABILITIES = 24, 5, 0x20080522
_ARGUMENTS, _VARIABLES = 48, 50
_HUGE, _COLLAPSE = 2 << 20, 25
_LIBC = ctypes.CDLL(None, use_errno=True)
IMPORT_TIME: Final = tuple("PYTHON LD_ MALLOC_ TORCH_ KMP_ MKL_ OMP_ GRPC_ FAKETIME".split())
"""Beginnings of variables that are read when a program starts, or imports torch or gRPC."""
_GROUP_TIME: Final = "TORCH_NCCL_"
"""Beginning of those that are read when a process group is made."""
THREADS: Final = "OMP_NUM_THREADS"
PATH: Final = "PYTHONPATH"
_SIGNALS: Final = ("setsigmask", "setsigdef")
"""What os.posix_spawnp is told of the signals of a server."""
OF_WORKER: Final = "WARM_SERVER"
"""Has, in a forked process of pytest, the socket, pid and settings of its own one of these."""

_LAUNCHER: Final = ("torch.distributed.argparse_util", "torch.distributed.launcher.api")
"""What torchrun imports. It looks at its stack, for that at all modules: so without those below."""

_LATER: Final = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""What torch imports where it is first used, a second and more in each rank that trains."""

_OF_TESTS: Final = ("pytest",)
"""What the modules of tests import whose functions are run by ranks."""

_OF_SCRIPTS: Final = (
    "elaunch.training.context",
    "elaunch.training.ranks",
    "elaunch.training.checkpoint.context",
    "elaunch.checkpoint.storage.posix",
    "google_crc32c",
)
"""What ``elaunch.init()`` imports, and the first save: 60 ms in each rank. None imports torch."""

_OF_COMMANDS: Final = (
    "elaunch.agent.main",
    "elaunch.agent.nodes.connect",
    "elaunch.cli.run",
    "elaunch.cli.views.status",
    "elaunch.views.agents",
    "elaunch.views.watch",
    "elaunch.store.etcd.client",
    "elaunch.store.tcp.client",
    "encodings.idna",
    "psutil",
)
"""What an agent of several nodes imports, and the commands that look at a run."""

_GROUPS: Final = "torch.distributed.distributed_c10d"
"""Has the process groups, which end with the process."""

ROOM: Final = 32_768
"""Bytes that this process is started with as an argument, and as a variable: room for others."""


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that a fork could not take over any more."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(IMPORT_TIME)
        and not (name in (THREADS, PATH) or name.startswith(_GROUP_TIME))
    }


def _await_end(pid: int) -> None:
    """Wait until a process has ended."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        select.select([process], [], [])
        os.close(process)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    if _LIBC.prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _drop_kill() -> None:
    """Take CAP_KILL from this process, and so from all that it starts."""
    _prctl(_DROP, _CAP_KILL)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    failed = _LIBC.capget(header, sets)
    for place in range(3):  # effective, permitted, inheritable
        sets[place] &= ~(1 << _CAP_KILL)
    if failed or _LIBC.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _show(first: int, texts: Iterable[str]) -> None:
    """Have /proc show these texts, whose start is that field of proc_pid_stat(5); see ROOM."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[first - 3 : first - 1])
    content = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(content.ljust(end - start, b"\0"))


def send(sock: socket.socket, message: object, files: Sequence[int] = ()) -> None:
    """Send an object as JSON, with descriptors."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    sock.sendmsg([json.dumps(message).encode()], rights)


def receive(sock: socket.socket) -> tuple[Any, list[int]] | None:
    """Return what :func:`send` has sent, None once the other side is gone."""
    try:
        data, rights, _, _ = sock.recvmsg(_LARGEST, socket.CMSG_SPACE(16 * 4))
    except ConnectionResetError:  # it is gone, and has not read all
        return None
    files = array.array("i")
    for _, _, held in rights:
        files.frombytes(held)
    return (json.loads(data), list(files)) if data else None


def _open_streams(unbuffered: bool) -> None:
    """Make Python's own streams anew, as the interpreter does at its start."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - open to the end
    for name, fd in (("stdout", 1), ("stderr", 2)):
        file: Any = io.FileIO(fd, "w", closefd=False)
        stream = io.TextIOWrapper(
            file if unbuffered else io.BufferedWriter(file),
            errors="backslashreplace" if fd == 2 else None,
            line_buffering=fd == 2 or file.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _take_over(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.path[1:1] = [os.path.abspath(at) for at in environ.get(PATH, "").split(os.pathsep) if at]
    _show(_ARGUMENTS, argv)
    _show(_VARIABLES, (f"{name}={value}" for name, value in environ.items()))
    sys.orig_argv[:] = argv
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # looked for again, with these variables


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hides modules that are imported already until one of them is imported.

    ``path`` is what they have appended to ``sys.path``, as torch did up to 2.8.
    """

    def __init__(self, names: set[str], path: Sequence[str] = ()) -> None:
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._path = path
        self._own: Any = None
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Bring all of them back where one is asked for."""
        if name not in self._modules:
            return None
        self._own = self._modules[name].__spec__
        self.end()
        del sys.modules[name]
        return importlib.machinery.ModuleSpec(name, self)

    def end(self) -> None:
        """Bring all of them back."""
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        sys.path.extend(self._path)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module as it is."""
        return self._modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module its own description back; it was executed long ago."""
        module.__spec__ = self._own


def _run(argv: Sequence[str]) -> None:
    """Run what the interpreter would with these arguments, as its ``__main__``."""
    program, *args = argv
    if program == "-m":
        sys.argv[:] = args
        sys.path[0] = os.getcwd()
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.argv[:] = ["-c", *args[1:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(args[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        sys.argv[:] = [program, *args]
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")


def _not_of_python(modules: set[str]) -> set[str]:
    others = (*sys.stdlib_module_names, "elaunch")
    return {name for name in modules if name.partition(".")[0] not in others}


def _imported(names: Iterable[str]) -> set[str]:
    """Import modules; return all that were imported for them."""
    before = set(sys.modules)
    for name in names:
        importlib.import_module(name)
    return set(sys.modules) - before


class _ShortEnd:
    """Ends a process before the interpreter takes apart what all programs have.

    That would touch, so copy, most of the memory that a fork shares with its parent: it costs more
    than all else that a short command or script does. The program's own modules are taken apart.

    Attributes:
        modules: those that are left as they are.
        code: the exit code, where it is known; else the interpreter goes its whole way.
    """

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}
        self.code: int | None = None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.modules))
        atexit.register(self._begin)

    def run(self, program: Callable[[], object]) -> None:
        """Run what is at the bottom of the stack, and learn the exit code."""
        try:
            program()
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                self.code = error.code or 0
            raise
        self.code = 0

    def _begin(self) -> None:
        for name in [*sys.modules]:
            if name in self.modules and self.modules[name] is sys.modules[name]:
                del sys.modules[name]
        with suppress(Exception):  # the interpreter says what is wrong, and ends with another code
            sys.stdout.flush()
            sys.stderr.flush()
            if self.code is not None:
                vars(builtins)["_end"] = _End(self.code)


class _End:
    """Ends the process as it is deleted; among the built-in names it is the last object to be."""

    def __init__(self, code: int) -> None:
        self._exit = partial(ctypes.PyDLL(None).exit, code)

    def __del__(self) -> None:
        self._exit()


def _take_huge_pages() -> None:
    """Move this memory to huge pages, where the kernel can: a fork takes a fifth of the time."""
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for place, rights, *_, name in mappings:
        if rights == "rw-p" and name in ("0", "[heap]"):
            start, end = (int(at, 16) for at in place.split("-"))
            first, last = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if first < last:
                _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE)


class WarmServer:
    """Serves the requests of one test process; ``run`` returns in the servers that it forks.

    ``listener`` is where the processes of pytest are asked for.
    """

    def __init__(self, requests: socket.socket, listener: socket.socket | None = None) -> None:
        self._requests = requests
        self._listener = listener
        first = set(sys.modules)
        from elaunch.server import script  # noqa: F401 - as the server's program does

        self.program = os.path.join(os.path.dirname(loop.__file__), "__main__.py")
        gc.disable()
        self.end = _ShortEnd()  # the first that is registered at exit, so the last that is called
        import torch

        self._torch = torch
        server = set(sys.modules)
        path = list(sys.path)
        launcher = _not_of_python(_imported(_LAUNCHER))
        later = _not_of_python(_imported(_LATER))
        self.end.modules.update(
            (name, module)
            for name, module in sys.modules.items()
            if name.partition(".")[0] not in ("__main__", "builtins", "elaunch", "sys")
            and name != _GROUPS
        )
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # torch's would take its operators apart, one by one
        _LIBC.on_exit(_LIBC._exit, None)  # after what is below, before the destructors of C++
        _LIBC.on_exit(_LIBC.fcloseall, None)
        scripts = _imported(_OF_SCRIPTS)
        hidden = {name for name in scripts if name.startswith("elaunch.training")}
        hidden |= _not_of_python(scripts)
        self._of_both = scripts - hidden
        rest = set(sys.modules)
        _imported(_OF_COMMANDS)
        importlib.import_module("elaunch.store.etcd.imports").load()
        tests = _not_of_python(_imported(_OF_TESTS))
        self._of_commands = set(sys.modules) - rest - tests
        sys.excepthook = sys.__excepthook__  # with Python 3.10, pytest imports one that sets it
        _Hidden(tests)
        _Hidden(hidden)
        _Hidden(launcher)
        _Hidden(later, sys.path[len(path) :])
        sys.path[:] = path
        self._hidden = _Hidden(_not_of_python(server - first))
        gc.freeze()
        _take_huge_pages()
        gc.enable()
        self._settings = settings(os.environ)

    def run(self) -> None:
        """Serve until the test process ends (then never returns); returns in a server."""
        with suppress(BrokenPipeError):  # the tests may have ended before this process was ready
            if self._listener is None:
                send(self._requests, {"ready": os.getpid()})
        while True:
            if self._listener is not None:
                ready, _, _ = select.select([self._requests, self._listener], [], [])
                if self._requests not in ready:
                    if self._fork_worker(self._listener.accept()[0]):
                        return self.run()
                    continue
            received = receive(self._requests)
            if received is None:
                os._exit(0)
            between = os.fork()
            if between == 0:
                parent = os.getpid()
                command = os.fork()
                if command == 0:
                    _await_end(parent)  # `elaunch wrap` ends with the process that started it
                    return self._become_command(*received)
                send(self._requests, {"pid": command})
                os._exit(0)
            for fd in received[1]:
                os.close(fd)
            os.waitpid(between, 0)
            send(self._requests, {"orphan": True})

    def _fork_worker(self, connection: socket.socket) -> bool:
        """Fork a process of pytest, which keeps ``connection`` to its end; return False.

        It has a fork of this process in turn, where this returns True.
        """
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended
                pass
        if os.fork():
            connection.close()
            return False
        received = receive(connection)
        assert received is not None, "pytest ended meanwhile"
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ours, self._requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener = None
        server = os.fork()
        if server == 0:
            os.setsid()
            for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
                if signal.getsignal(number) is signal.SIG_IGN:  # as pytest was started, by nohup
                    signal.signal(number, signal.SIG_DFL)
            loop._close_all_but(self._requests.fileno())
            return True
        request, files = received
        self._requests.close()
        for number, fd in enumerate(files):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(request["cwd"])
        own = json.dumps([ours.detach(), server, self._settings])
        _take_over(request["argv"], request["env"] | {OF_WORKER: own})
        _open_streams(unbuffered=True)
        self._set_threads()
        self.end.run(partial(_run, request["argv"][1:]))
        sys.exit()

    def _become_command(self, request: Any, files: list[int]) -> None:
        os.setsid()
        for number, fd in enumerate(files[:3]):
            os.dup2(fd, number)
        for space in files[3:]:
            if _LIBC.setns(space, 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        os.chdir(request["cwd"])
        argv = request["argv"][request["argv"].index(sys.executable) :]
        if argv != request["argv"]:  # after the words of setpriv (NO_KILL in launching.py)
            _drop_kill()
        if argv[1] == "-c":  # a program that starts no elaunch
            loop._close_all_but(-1)
        elif (seed := self._seed()) is None:
            return
        else:
            os.posix_spawnp = self._spawning(seed, os.posix_spawnp)
        _take_over(argv, request["env"])
        _open_streams(unbuffered=False)
        self._set_threads()
        self.end.run(partial(_run, argv[1:]))
        sys.exit()

    def _seed(self) -> socket.socket | None:
        """Return the seed's socket; in the seed's child, once it is the server, None."""
        ours, seeds = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(ours.fileno(), False)
        # An interrupt in a fork would be swallowed there; an executed command has none of it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        is_seed = os.fork() == 0
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_seed:
            ours.close()
            loop._close_all_but(seeds.fileno())
            self._wait_as_seed(seeds)
            return None
        loop._close_all_but(ours.fileno())
        return ours

    def _spawning(self, seed: socket.socket, really: Any) -> Any:
        """Return what starts the server of the seed, and all else really."""
        waiting = [seed]

        def spawn(path: str, argv: list[str], environ: Mapping[str, str], **how: Any) -> int:
            is_server = path == sys.executable and argv[2:3] == [self.program]
            if not (waiting and is_server and settings(environ) == self._settings):
                return int(really(path, argv, environ, **how))
            with waiting.pop() as sock:
                before = ctypes.c_int()
                _prctl(_GET_SUBREAPER, ctypes.addressof(before))
                _prctl(_SUBREAPER, 1)
                try:
                    sock.send(str(os.getpid()).encode())
                    found = receive(sock)
                    assert found is not None, "the seed is gone"
                    pid, seed_pid = found[0]
                    if pid != seed_pid:
                        with suppress(ChildProcessError):  # a thread that waits for any was first
                            os.waitpid(seed_pid, 0)
                finally:
                    _prctl(_SUBREAPER, before.value)
                signals = {key: [int(one) for one in how[key]] for key in _SIGNALS}
                files = resource.getrlimit(resource.RLIMIT_NOFILE)
                start = {"argv": argv, "env": dict(environ), "files": files, **signals}
                send(sock, start, [int(argv[3])])
                return int(pid)

        return spawn

    def _set_threads(self) -> None:
        """Have torch read again what it has read when it was imported."""
        if THREADS in os.environ:
            self._torch.set_num_threads(int(os.environ[THREADS]))

    def _wait_as_seed(self, sock: socket.socket) -> None:
        agent = sock.recv(16)
        if not agent:
            os._exit(0)
        seed = os.getpid()
        server = os.fork() if os.getppid() != int(agent) else seed
        if server != 0:
            send(sock, [server, seed])
        if server not in (0, seed):
            os._exit(0)
        received = receive(sock)
        if received is None:
            os._exit(0)
        start, files = received
        sock.close()
        os.setsid()
        for number in {*start["setsigdef"]} - {signal.SIGPIPE, signal.SIGXFSZ}:
            signal.signal(number, signal.SIG_DFL)  # those two an interpreter ignores at its start
        signal.pthread_sigmask(signal.SIG_SETMASK, start["setsigmask"])
        resource.setrlimit(resource.RLIMIT_NOFILE, start["files"])
        _take_over(start["argv"], start["env"])
        _open_streams(unbuffered=True)
        self._set_threads()
        for name in self._of_commands:
            del sys.modules[name]
        _Hidden(self._of_both)
        self._hidden.end()
        sys.argv[:] = [start["argv"][2], str(files[0]), *start["argv"][4:]]
        sys.path[0] = os.path.dirname(self.program)  # its program takes this away again


if __name__ == "__main__":
    _sockets = [socket.socket(fileno=int(word)) for word in sys.argv[1:] if word.isdecimal()]
    if len(_sockets) > 1:  # the terminal's Ctrl-C is for the processes of pytest
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _server = WarmServer(*_sockets)
    _server.run()
    # Only a server comes here: a command has left by sys.exit.
    _main = types.ModuleType("__main__")
    _main.__dict__.update(__file__=_server.program)
    sys.modules["__main__"] = _main
    with open(_server.program, "rb") as _file:
        _code = compile(_file.read(), _server.program, "exec")
    try:
        _server.end.run(partial(exec, _code, _main.__dict__))
    except BaseException as _error:
        assert _error.__traceback__ is not None  # its first frames are this file's
        _error.__traceback__ = _error.__traceback__.tb_next.tb_next
        raise
