"""Imports what the workers need, once, in the process that they are forked from.

Most of it is imported before the first fork. The server must have one thread when it forks, so
modules that start threads, native ones too, are found here and named.

What workers need only later (``+module`` in ``--preload``) is imported when the first round has run
for a while: the start does not wait for it, a short job never pays for it, and the workers of a
restart find it there. torch itself imports ``torch._dynamo`` when the first optimizer is made,
which costs each worker most of a second. Where that is among the later modules, the server also
imports what a worker begins to import: TorchInductor and what belongs to it (COMPILING) at once,
and what a script needs to save (SAVING) SETTLE seconds later. A worker announces that by a signal
(ANNOUNCED): a finder on its ``sys.meta_path`` sends it when the first such module is looked for,
and removes itself. During such an import the server does before each module what cannot wait; a
fork waits for the end of the import.

=========  ======================================  ===============================================
state      what is there                           what follows
=========  ======================================  ===============================================
idle       nothing to import                       a worker announces an import: waiting
waiting    modules, and when they are ``due``      no fork has to try them: importing; else trying
trying     a fork that imports them first          they may be imported: importing; they may not:
                                                   idle; it has ended with its round: waiting
importing  the server imports them                 a worker compiles: asking; else idle
asking     a fork that begins to compile           what it has found out is adopted: idle; it has
                                                   ended with its round: waiting
=========  ======================================  ===============================================

The next round must not see other settings than the first one. A script may set variables that such
a module reads when it is imported (``TORCH_COMPILE_DISABLE``); in the server it would read the
launcher's. So the server reads the variables of the running workers first. If a script has changed
any, a fork of the server imports the modules and notes which variables they read. Where a changed
one is among those, nothing is imported ahead, and each worker imports the modules by itself.
Modules that are neither torch's nor elaunch's are always tried in a fork first: the server cannot
get rid of threads that they start.

A restarted worker finds its kernels in TorchInductor's cache. Its first compiled step would still
take seconds of what is the same in all: a hash of torch's source, whether compiler and processor
agree on vector instructions, and whether the precompiled header is that of the headers as they are,
for which other processes are started. That is found out in the fork (:func:`find_out`), since the
server must not wait for a compiler, and entered into torch's own caches (:func:`enter`). The fork
also begins to compile a function, up to the compiler's start, and so learns what torch imports
then. All that is internal to torch: where it has other names nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

from elaunch import env
from elaunch.server import processes
from elaunch.wire import recorder

DYNAMO = "torch._dynamo"
COMPILER = "torch._inductor.compile_fx"
COMPILING = (COMPILER, "torch.utils.cpp_extension", "torch._dynamo.backends.inductor")
"""Modules that a worker imports to compile."""
SAVING = (
    "torch.distributed.checkpoint",
    "elaunch.training.context",
    "elaunch.training.ranks",
    "elaunch.training.checkpoint.context",
    "elaunch.training.checkpoint.load",
    "elaunch.training.checkpoint.save",
    "elaunch.training.checkpoint.saver",
    "elaunch.checkpoint.storage.posix",
)
"""Modules that a worker imports to load and to save."""
ANNOUNCED: Mapping[int, tuple[str, ...]] = {
    signal.SIGURG: COMPILING,
    signal.SIGWINCH: SAVING,
}
"""The signal by which a worker lets the server know that it imports the first that is not there.
Both are ignored by default (signal(7)): a server which does not ask for them is not ended."""

THREADS_GONE = 0.1
"""Seconds for the kernel to take a thread that has ended off its list."""
SETTLE = 10.0
"""Seconds for a worker to set the variables that it sets; they stand at the top of a script."""

DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")
"""The files that CUDA and ROCm keep open once they are used; in a process forked then they fail."""
NOT_INITIALIZED = 3
"""The answer of CUDA's driver in such a process (cuda.h, CUDA_ERROR_NOT_INITIALIZED)."""
NVML = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""Has torch answer a module that asks for GPUs at its import without using CUDA (torch/cuda)."""

_KNOWN = ("torch", "elaunch")
"""Whose modules start no threads that a fork would lack."""

_KEY = ("torch._inductor.codecache", "torch_key")
_ISA = ("torch._inductor.cpu_vec_isa", "valid_vec_isa_list")
_HEADER = ("torch._inductor.codecache", "_precompile_header")
_MAKE = ("torch._inductor.codecache", "_worker_compile_cpp")
_CONFIG = "torch._inductor.config"
_NAMES = ("torch._dynamo.funcname_cache", "get_funcname")
_NAMED = ("torch.nn.functional", "torch.nn.modules.")
"""Modules, or packages of such, that most models call: a trace names each function."""
_SHOWN = ("TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "TORCHDYNAMO_")
"""How the variables begin by which a person sees what is compiled: it would be seen there."""

Meanwhile = Callable[[int | None], None]


class Preloaded(NamedTuple):
    """The outcome of an import.

    ``problem`` is why it failed, or why nothing may be started with it; ``unforkable`` why this
    process must not be forked any more, with the module that is to blame.
    """

    problem: str | None = None
    unforkable: str = ""


class _CallBefore:
    """A finder of no module; it makes a call before each module is imported."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def find_spec(self, *_: object) -> None:
        """Find nothing."""
        self._meanwhile()


class _Announcer:
    """A finder that sends a signal when its module is looked for, and removes itself."""

    def __init__(self, module: str, signum: int, server_pid: int) -> None:
        self._module = module
        self._signum = signum
        self._server_pid = server_pid

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None for any other module."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        if os.getppid() == self._server_pid:  # not in a process that the worker has forked
            with contextlib.suppress(OSError):  # the script runs as another user
                os.kill(self._server_pid, self._signum)
        return PathFinder.find_spec(name, path, target)  # the list's next finder is skipped


def preload(
    modules: Sequence[str],
    path: str | None,
    meanwhile: Callable[[], None] | None = None,
    *,
    tried: bool = False,
) -> Preloaded:
    """Import ``modules`` in order.

    ``path`` is what a worker has first on ``sys.path``, if it has anything of its own there;
    ``meanwhile`` is called before each module that they import; ``tried``: a fork has imported them
    and can use the devices.
    """
    if path is not None:
        sys.path.insert(0, path)
    between = [] if meanwhile is None else [_CallBefore(meanwhile)]
    sys.meta_path[:0] = between
    gc.disable()  # an import leaves next to no garbage, and looking for it takes a tenth of torch's
    asks_nvml = NVML[0] not in os.environ
    os.environ.setdefault(*NVML)
    try:
        return _import(modules, tried)
    finally:
        if asks_nvml:
            os.environ.pop(NVML[0], None)
        gc.enable()
        for finder in between:
            sys.meta_path.remove(finder)
        if path is not None and path in sys.path:
            sys.path.remove(path)


def _hides(error: BaseException) -> str:
    """Return what hides which module, where a file beside the script was imported for another."""
    called = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    for name in (*sys.stdlib_module_names, "torch", "numpy"):
        loaded = getattr(sys.modules.get(name), "__file__", None)
        for file in (f"{sys.path[0]}/{name}.py", f"{sys.path[0]}/{name}/__init__.py"):
            if file == loaded or file in called:
                what = "Python's own module of that name"
                return f"{file} hides {what if name in sys.stdlib_module_names else name}"
    return ""


def _import(modules: Sequence[str], tried: bool) -> Preloaded:
    unforkable, threads = "", _threads()
    lost = not tried and _forks_lose_devices()
    for name in modules:
        try:
            importlib.import_module(name)
            if (torch := sys.modules.get("torch")) is not None:
                torch.cuda  # noqa: B018  a torch.py beside the script has none
        except BaseException as error:  # a module may raise anything, SystemExit included
            last = traceback.format_exception_only(type(error), error)[-1].strip()
            if hidden := _hides(error):
                return Preloaded(f"--preload {name}: {last}; {hidden}; rename it")
            return Preloaded(
                f"--preload {name}: {last} (in {sys.executable}); install it there, leave it out "
                "(--preload none imports nothing), or use --start-method spawn"
            )
        if _threads() > threads and name.partition(".")[0] != "torch":  # it starts OpenBLAS' only
            others = threads_after_a_fork() - 1
            unforkable = unforkable or (_reason(name, others) if others else "")
        threads = _threads()
    torch = sys.modules.get("torch")
    loses = not (tried or lost) and _forks_lose_devices()
    if loses or (torch is not None and torch.cuda.is_initialized()):
        return Preloaded(
            f"--preload {','.join(modules)}: a module used the GPU while it was imported; a "
            "forked worker cannot use it then. Leave it out, or use --start-method spawn"
        )
    return Preloaded(unforkable=unforkable)


def _forks_lose_devices() -> bool:
    """Return whether a driver is used here, so that a fork of this process cannot use it any more.

    ``torch.cuda.is_available()`` is enough for that, unless it asks NVML. That keeps the same files
    open, so that only a fork can tell.
    """
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed
            if os.readlink(f"/proc/self/fd/{number}") in DEVICES:
                return processes.call_in_fork(_has_lost_devices) is not False
    return False


def _has_lost_devices() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True  # it is ROCm's, and there is nothing to ask
    return int(driver.cuInit(0)) == NOT_INITIALIZED


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_after_a_fork() -> int:
    """Return how many threads this process has once it has forked.

    A library that knows of forks ends its threads before one and starts others when it needs them,
    as OpenBLAS does. OpenMP's stay: a child waits for ever for those that it does not have.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    until = time.monotonic() + THREADS_GONE
    while (count := _threads()) > 1 and time.monotonic() < until:
        time.sleep(0.001)
    return count


def _reason(module: str, others: int) -> str:
    what = "another thread" if others == 1 else f"{others} other threads"
    return (
        f"--preload {module}: it has started {what} while it was imported (OpenMP's, if it "
        "computes then), and a forked worker would wait for ever for threads that it does not have"
    )


class Warmed(NamedTuple):
    """The outcome for the later modules: imported, or not for ``problem`` or ``settings``.

    ``settings`` are the variables that the script sets and that the modules read; ``compiles``:
    what compiling takes is imported, and no script's settings are against it.
    """

    problem: str | None = None
    settings: tuple[str, ...] = ()
    compiles: bool = False


class Later:
    """The modules to import later, and when; ``due`` is infinite while there is nothing to do."""

    def __init__(self) -> None:
        self._modules: list[str] = []
        self._path: str | None = None
        self._delay = math.inf
        self._not_before: float | None = None
        self._settled_at = math.inf
        self._workers: dict[int, Mapping[str, str]] = {}  # pid → what it was started with
        self._finding: processes.ForkedCall | None = None
        self._stopped = False
        self._awaited: dict[int, tuple[str, ...]] = {}  # those of ANNOUNCED that no worker has sent

    @property
    def files(self) -> list[int]:
        """The descriptor to wait for: the answer of the fork that finds out what workers would."""
        return [] if self._finding is None else [self._finding.file]

    @property
    def due(self) -> float:
        """When to call :meth:`carry_out`, on the monotonic clock."""
        if not self._modules or not self._workers or self._not_before is None:
            return math.inf
        return max(self._not_before, self._settled_at)

    def plan(self, modules: list[str], path: str | None, delay: float) -> None:
        """Plan to import ``modules`` ``delay`` seconds after the first worker was started."""
        self._modules, self._path, self._delay = modules, path, delay
        self._awaited = dict(ANNOUNCED) if DYNAMO in modules else {}

    def announce(self, server_pid: int) -> None:
        """Have this worker send what is awaited of it."""
        for signum, modules in self._awaited.items():
            first = next((name for name in modules if name not in sys.modules), None)
            if first is not None:
                sys.meta_path.insert(0, _Announcer(first, signum, server_pid))

    def note_start(self, pid: int, variables: Mapping[str, str]) -> None:
        """Note a worker that was forked from this process, and the variables it was given."""
        if self._modules or self._awaited:
            self._workers[pid] = variables
        if self._modules:
            now = time.monotonic()
            self._settled_at = now + min(SETTLE, self._delay)
            if self._not_before is None:
                self._not_before = now + self._delay

    def note_import(self, signum: int) -> None:
        """Import as well what a worker has begun to import, by the first such signal."""
        modules = self._awaited.pop(signum, ())
        if modules:
            self._modules += modules
            wait = 0.0 if COMPILER in modules else SETTLE
            due = time.monotonic() + wait
            self._not_before = due if self._not_before is None else min(self._not_before, due)
            self._settled_at = min(self._settled_at, due)

    def note_end(self, pid: int) -> None:
        """Forget a worker: nothing can be learnt from it any more."""
        self._workers.pop(pid, None)

    def note_stop(self) -> None:
        """Note that all below the server is ended: the fork that imports, too."""
        self._stopped = True

    def carry_out(self, meanwhile: Meanwhile | None = None) -> Warmed | None:
        """Import the modules if the workers would not notice. Nothing is due any more.

        ``meanwhile`` is called while it goes on, with a file that can be read when a fork has
        answered, or with None. Where the fork was ended with the round (:meth:`note_stop`), there
        is no answer, and the modules are left to the next round.
        """
        modules, self._modules = self._modules, []
        self._stopped = False
        self._not_before, self._settled_at = None, math.inf
        changed: dict[str, str | None] = {}
        ours = processes.environment_of_fork(os.getpid())
        for pid, variables in self._workers.items():
            found = processes.environment_of_fork(pid)
            if found is None or ours is None:
                names = ", ".join(modules)
                why = f"what variables the script has set cannot be read from process {pid}"
                return Warmed(f"--preload +{names}: {why}")
            given = {**ours, **variables}
            given.pop(env.STACKS_FILE, None)  # the worker takes it out before the script runs
            given.setdefault(*recorder.LIMIT)  # the worker sets it with its first process group
            found.setdefault(*recorder.LIMIT)
            changed |= {name: found.get(name) for name in _changed(given, found)}
        compiles = COMPILER in modules
        foreign = not all(name.partition(".")[0] in _KNOWN for name in modules)
        tried = bool(changed) or foreign or may_open_devices()
        if tried:
            trial = partial(_quietly, partial(_trial, modules, self._path))
            answer = processes.call_in_fork(trial, meanwhile)
            if answer is None and self._stopped:
                self._modules = modules + self._modules
                return None
            why_not = _objection(modules, changed, answer)
            if why_not is not None:
                return why_not
        between = None if meanwhile is None else partial(meanwhile, None)
        problem = preload(modules, self._path, between, tried=tried).problem
        compiles = compiles and problem is None
        if compiles:
            self._finding = processes.ForkedCall(partial(_quietly, find_out))
        return Warmed(problem, compiles=compiles)

    def adopt(self, meanwhile: Callable[[], None]) -> None:
        """Adopt what the fork of :attr:`files` has found out, and import what it has imported.

        ``meanwhile`` is called again and again while it goes on.
        """
        asked, self._finding = self._finding, None
        found = None if asked is None else asked.answer()
        if found is not None:
            enter(found)
            preload(found.get("modules", ()), self._path, meanwhile, tried=True)
            fill_tables(meanwhile)
        elif asked is not None and self._stopped:  # with its round; the next one has it asked again
            self._modules += COMPILING

    def close_in_fork(self) -> None:
        """Close, in a process that was forked from the server, what belongs to that alone."""
        for file in self.files:
            os.close(file)


def _objection(
    modules: Sequence[str],
    changed: Mapping[str, str | None],
    answer: tuple[list[str], dict[str, str], str] | None,
) -> Warmed | None:
    """Return why the server must not import the modules as a fork has, or None.

    What they set themselves, and the worker has by them, is no setting of the script's.
    """
    if answer is None:
        names = ",".join(f"+{name}" for name in modules)
        return Warmed(f"--preload {names}: the process that imported it first died of it")
    read, written, why_not = answer
    if why_not:
        return Warmed(why_not)
    own = {name for name, text in written.items() if changed.get(name) == text}
    settings = tuple(sorted((set(changed) & set(read)) - own))
    return Warmed(settings=settings) if settings else None


def _changed(given: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [name for name in {**given, **found} if given.get(name) != found.get(name)]


def _quietly(question: Callable[[], object]) -> object:
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return question()


def _trial(modules: list[str], path: str | None) -> tuple[list[str], dict[str, str], str]:
    """Import the modules in a fork.

    Returns the variables that they read, those that they set, and why that failed or must not be
    done in the server: it would have threads, or a CUDA context.
    """
    read: set[str] = set()
    kind: Any = type(os.environ)
    look_up = kind.__getitem__

    def note(environ: Any, name: str) -> Any:
        read.add(name)
        return look_up(environ, name)

    before = dict(os.environ)
    kind.__getitem__ = note  # every way of reading one variable ends there
    found = preload(modules, path)
    kind.__getitem__ = look_up
    written = {name: text for name, text in os.environ.items() if before.get(name) != text}
    return sorted(read), written, found.problem or found.unforkable


# ── what torch.compile does once in each process ─────────────────────────────────────────────────

Found = dict[str, Any]


class _Enough(BaseException):
    """Ends a compilation; no exception that torch handles."""


def may_open_devices() -> bool:
    """Return whether torch is built for devices, which this process must never open."""
    version = sys.modules.get("torch.version")
    return any(getattr(version, kind, None) is not None for kind in ("cuda", "hip", "xpu"))


def find_out() -> Found:
    """Return what a worker finds out at its first compilation; called in a fork of the server."""
    found: Found = {}
    key, isa = _function(*_KEY), _function(*_ISA)
    if key is not None:
        found["key"] = key().hex()
    kind = _vector_isa()
    if isa is not None and kind is not None:
        builds: dict[str, bool] = {}
        build = kind.check_build

        def note(self: Any, code: str) -> bool:
            builds[_build_name(self, code)] = result = bool(build(self, code))
            return result

        kind.check_build = note
        isa()
        found["builds"] = builds
    if not may_open_devices() and not any(name.startswith(_SHOWN) for name in os.environ):
        found |= processes.call_in_fork(_begin_to_compile) or {}  # None where there is no compiler
    return found


def _begin_to_compile() -> Found:
    """Return which header a compilation asks for, and the modules that it imports until then."""
    import torch

    headers: dict[str, str] = {}
    ask, makers = _function(*_HEADER), vars(sys.modules[_MAKE[0]])

    def note(*question: str, **options: Any) -> str:
        makers[_MAKE[1]] = lambda *_: None  # the workers make a header that is missing
        headers[_digest(*question)] = ask(*question, **options)
        raise _Enough

    def stop(*_: object) -> None:
        raise _Enough

    if ask is not None:
        makers[_HEADER[1]] = note
    makers[_MAKE[1]] = stop
    if (config := sys.modules.get(_CONFIG)) is not None:
        setattr(config, "compile_threads", 1)  # noqa: B010  no pool of processes: here, not there
    before = set(sys.modules)
    with contextlib.suppress(_Enough):
        # Of a call: the functions that are called are looked up in torch's lists of them.
        torch.compile(lambda x: torch.nn.functional.relu(x))(torch.zeros(8))
    new = {name: module for name, module in sys.modules.items() if name not in before}
    files = [name for name, module in new.items() if getattr(module, "__spec__", None) is not None]
    return {"headers": headers, "modules": [name for name in files if name.startswith("torch.")]}


def enter(found: Found) -> None:
    """Enter what :func:`find_out` has returned into the caches of torch in this process."""
    key, isa, kind = _function(*_KEY), _function(*_ISA), _vector_isa()
    if "key" in found:
        with contextlib.suppress(AttributeError, RuntimeError):  # it cannot be set, or is already
            key.set(bytes.fromhex(found["key"]))
    if headers := found.get("headers"):
        vars(sys.modules[_HEADER[0]])[_HEADER[1]] = _recall(headers, _function(*_HEADER))
    builds = found.get("builds")
    if kind is None or isa is None or not builds or not any(builds.values()):
        return  # the script may know of another compiler
    build = kind.check_build
    kind.check_build = lambda self, code: builds.get(_build_name(self, code), False)
    isa()
    kind.check_build = build


def fill_tables(meanwhile: Callable[[], None]) -> None:
    """Have torch make the tables that each process makes at its first compilation.

    ``meanwhile`` is called before each.
    """
    import torch

    tables: list[Callable[[], object]] = [
        torch.compiler.list_backends,
        torch.overrides.get_overridable_functions,
    ]
    if (name := _function(*_NAMES)) is not None:
        modules = [module for module in list(sys.modules) if module.startswith(_NAMED)]
        tables += [partial(name, sys.modules[module].__file__, 1) for module in modules]
    for make in (*tables, _look_through_modules):
        meanwhile()
        make()


def _look_through_modules() -> None:
    """Have Python remember the file of each module, by asking for the module of foreign code.

    It asks every module, and one that is made on demand may raise whatever it likes.
    """
    with contextlib.suppress(Exception):
        inspect.getmodule(compile("", "<nowhere>", "exec"))


def _recall(headers: Mapping[str, str], ask: Callable[..., str]) -> Callable[..., str]:
    """Return what answers for a header that is known, and is there, without asking a compiler.

    A header of a compiler that has been replaced meanwhile is not taken by the new one.
    """

    @wraps(ask)
    def recall(*question: str, **options: Any) -> str:
        path = headers.get(_digest(*question))
        return path if path and os.path.exists(f"{path}.gch") else ask(*question, **options)

    return recall


def _function(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _vector_isa() -> Any:
    kind = _function(_ISA[0], "VecISA")
    return kind if hasattr(kind, "check_build") else None


def _build_name(isa: Any, code: str) -> str:
    return _digest(f"{isa} {isa.build_arch_flags()} {code}")


def _digest(*texts: str) -> str:
    import hashlib  # a server that forks nothing does without

    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
