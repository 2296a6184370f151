"""Have a worker answer which collectives it has entered, also while C code keeps Python's lock.

torch records the newest collectives of a process (its flight recorders, one for NCCL), and
``torch._C._distributed_c10d._WorkerServer`` answers with them over a Unix socket, from threads of
C++. A worker that the fork server started, or that calls ``elaunch.init()``, starts it
when it makes its first process group; a script without one has neither thread nor socket of it.
In the run directory, by round and local rank:

===========================  =====================================================================
recorder-R-L.sock            HTTP; ``POST /handler/fr_trace_json`` is answered with the record of
                             gloo and others, ``POST /handler/dump_nccl_trace_json`` with NCCL's
recorder-R-L.groups          a line of JSON for each process group that is made: its name, its size,
                             this process's rank in it, its ranks in the default group (none: it is
                             the default group), when that began (seconds since 1970). While the
                             group is in the making, which waits for its other ranks, the line has
                             no end
===========================  =====================================================================

All of that is internal to torch. Where it has other names nothing is started, and hangs are
reported without saying which rank has not entered a collective.

The record has RECORDED entries, unless the script sets another number: 2,000, which is torch's own,
are 0.9 MB at each question. A process that the worker forks closes the socket: whoever asks there
after the worker's end is refused at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from elaunch import env
from elaunch.wire.local import short_address

RECORDED: Final = 64
LIMIT: Final = ("TORCH_FR_BUFFER_SIZE", str(RECORDED))
"""The variable that sets the number of entries, and what it is set to."""
_SIZES: Final = (LIMIT[0], "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ERRORS_ONLY: Final = 2
_OTHER_TORCH: Final = (LookupError, TypeError, ValueError)
"""The errors that a function of torch's raises which takes other arguments."""
_LAST_ANSWERS_S: Final = 0.5
"""Seconds that the interpreter's end waits for questions that are being answered."""
_C10D: Final = "torch.distributed.distributed_c10d"
_GROUPS: Final = ".groups"
_APPENDED: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_BINDING: Final = "torch._C._distributed_c10d"
_KEEP: Final = ctypes.pythonapi.Py_IncRef  # looked up once, and not by each worker anew


def socket_path(run_dir: Path, round_number: int, local_rank: int) -> Path:
    """Return where a worker answers; it may be longer than an address can be."""
    return run_dir / _socket_name(round_number, local_rank)


def _socket_name(round_number: int, local_rank: int) -> str:
    return f"recorder-{round_number}-{local_rank}.sock"


def groups_path(answers_at: Path) -> Path:
    """Return where the worker that answers there notes its process groups."""
    return answers_at.with_suffix(_GROUPS)


def prepare() -> None:
    """Look up, in the server, what each worker would look up anew with its first process group."""
    if _BINDING in sys.modules:
        with _reported():
            _log_level()


def watch(environ: Mapping[str, str]) -> None:
    """Start the server when this process makes its first process group.

    Needs a worker's variables, and does nothing without. Where torch.distributed is not imported
    yet, as with ``--preload none``, it waits for that.
    """
    place, number = environ.get(env.AGENT_SOCKET), environ.get("ELAUNCH_ROUND", "")
    local_rank = environ.get("LOCAL_RANK", "")
    if not place or not (number.isdigit() and local_rank.isdigit()):
        return
    distributed: Any = sys.modules.get(_C10D)
    if distributed is None:
        if not any(isinstance(finder, _Awaiting) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Awaiting(dict(environ)))
        return
    original = getattr(distributed, "_new_process_group_helper", None)
    if original is None:
        return
    if isinstance(getattr(original, "__self__", None), _Recorder):
        return
    name = _socket_name(int(number), int(local_rank))
    recorder = _Recorder(os.path.join(os.path.dirname(place), name), original)
    distributed._new_process_group_helper = recorder.make_group
    if hasattr(distributed, "_register_pg_in_world"):
        recorder.register = distributed._register_pg_in_world
        distributed._register_pg_in_world = recorder.register_group
    if distributed.is_initialized():
        recorder.note_made(distributed)


def leave(error: BaseException) -> None:
    """Show that ``error`` ends the script: the interpreter waits for its threads before atexit."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return  # its threads may go on training
    make_group = getattr(sys.modules.get(_C10D), "_new_process_group_helper", None)
    recorder = getattr(make_group, "__self__", None)
    if isinstance(recorder, _Recorder):
        recorder.leave()


class _Awaiting:
    """Stands before the finders of modules until torch.distributed is imported, and is gone."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Have the module watched as soon as it is there; of others nothing is known here."""
        if name != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                watch(self._environ)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Recorder:
    """Stands before the functions of torch that make process groups, in the worker alone.

    ``register`` is torch's function that takes every group into its tables.
    """

    def __init__(self, path: str, original: Any) -> None:
        self.register: Any = None
        self._path = path
        self._groups = os.path.splitext(path)[0] + _GROUPS
        self._original = original
        self._pid = os.getpid()
        self._server: object = None
        self._address = ""
        self._listening: tuple[int, int] | None = None
        self._tried = False
        self._making: int | None = None

    def make_group(self, size: int, rank: int, ranks: Any, *rest: Any, **named: Any) -> Any:
        """Note the group, and make it as torch does."""
        if os.getpid() == self._pid:  # not in a process that the worker has forked
            with _reported():
                name = named["group_name"] if "group_name" in named else rest[2]
                self._note(str(name), size, rank, list(ranks))
        try:
            return self._original(size, rank, ranks, *rest, **named)
        finally:
            if os.getpid() == self._pid:
                with _reported():
                    self._note_end()

    def register_group(self, group: Any, *rest: Any, **named: Any) -> None:
        """Note a group that torch has made otherwise (``split_group``), and register it.

        Those are registered with their ranks, others without.
        """
        places = named.get("rank_mapping")
        if places and os.getpid() == self._pid:
            with _reported():
                name = str(named["group_name"])
                self._note(name, len(places), group.rank(), list(places))
                self._note_end()
        self.register(group, *rest, **named)

    def note_made(self, distributed: Any) -> None:
        """Note the groups that there are already."""
        with _reported():
            for group, ranks in distributed._world.pg_group_ranks.items():
                members = [] if group is distributed._world.default_pg else list(ranks)
                rank = ranks[distributed.get_rank()]
                self._note(distributed._world.pg_names[group], len(ranks), rank, members)
                self._note_end()

    def _note(self, name: str, size: int, rank: int, ranks: list[int]) -> None:
        if not self._tried:
            self._tried = True
            self._start()
        self._note_end()  # of one that another thread makes
        if self._server is not None:
            self._making = os.open(self._groups, _APPENDED, 0o666)
            os.write(self._making, json.dumps([name, size, rank, ranks, time.time()]).encode())

    def _note_end(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            try:
                os.write(making, b"\n")
            finally:
                os.close(making)

    def _start(self) -> None:
        binding: Any = sys.modules[_BINDING]
        if not any(name in os.environ for name in _SIZES):
            os.environ[LIMIT[0]] = LIMIT[1]
        with short_address(self._path) as address, _silent():
            server = binding._WorkerServer(address)
            # It is not ended with the interpreter, nor by an error here: that would wait for its
            # threads, which wait for Python's lock, and which a fork of this process does not have.
            _KEEP(ctypes.py_object(server))
            self._address, self._listening = address, _descriptor(address)
        self._server = server
        os.chmod(self._path, 0o600)
        os.register_at_fork(after_in_child=self._close_in_fork)
        atexit.register(self.leave)

    def leave(self) -> None:
        """Be asked nothing more, and have answered: torch's threads take Python's lock for that.

        One that gets the lock of an interpreter that is being taken apart ends the process.
        """
        if os.getpid() != self._pid or self._listening is None:
            return
        until = time.monotonic() + _LAST_ANSWERS_S
        with contextlib.suppress(OSError):
            os.unlink(self._path)
            while time.monotonic() < until:
                comes = _is_ready(self._listening[0], select.POLLIN, 0.0)
                answers = [each for each in _at(self._address) if each != self._listening[0]]
                if not comes and not answers:
                    return
                for number in answers:
                    _is_ready(number, select.POLLRDHUP, until - time.monotonic())

    def _close_in_fork(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None and _inode(listening[0]) == listening[1]:
            os.close(listening[0])


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Log what torch has otherwise, or the machine refuses; the script goes on without it."""
    try:
        yield
    except (OSError, RuntimeError, AttributeError, ImportError, *_OTHER_TORCH) as error:
        import logging  # a script that runs by itself finds no logger of elaunch's, either

        log = logging.getLogger("elaunch")
        log.debug("which collectives this worker enters cannot be asked: %s", error)


@functools.cache
def _log_level() -> ctypes.c_int:
    torch: Any = sys.modules["torch"]
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep torch from logging on the worker's stderr that it listens."""
    level = _log_level()
    before = level.value
    level.value = max(before, _ERRORS_ONLY)
    try:
        yield
    finally:
        level.value = before


def _descriptor(address: str) -> tuple[int, int]:
    """Return the descriptor of this process that listens there, and its inode."""
    for number in _at(address):
        return number, _inode(number)
    raise OSError(f"nothing here listens at {address}")


def _is_ready(number: int, events: int, seconds: float) -> bool:
    """Wait for one of the events on a descriptor, without Python's lock; whether it came."""
    poller = select.poll()
    poller.register(number, events)
    return bool(poller.poll(max(0.0, 1000 * seconds)))


def _at(address: str) -> list[int]:
    """Return the descriptors of this process that have that address: the listener's and others."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return [each for each in numbers if _inode(each) and _address(each) == address]


def _address(number: int) -> object:
    """Return a socket's address; None if it has been closed since it was listed."""
    with contextlib.suppress(OSError):
        sock = socket.SocketType(fileno=os.dup(number))  # without what Python's class adds
        try:
            return sock.getsockname()
        finally:
            sock.close()
    return None


def _inode(number: int) -> int:
    """Return the inode of a descriptor that is a socket; 0 of any other, and of a closed one."""
    try:
        found = os.fstat(number)
    except OSError:
        return 0
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0
