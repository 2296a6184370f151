"""House rules over ``elaunch/``, read from the syntax trees: layers, circles, sizes, documentation.

An exception to a rule is a row of one of the tables here, with its reason. A row that no longer
excuses anything fails too.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first. A module may import from its own layer and from those below, never from above.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"elaunch"}),
    frozenset({"errors"}),
    frozenset(
        {"atonce", "earlysignals", "endings", "env", "files", "hosts", "launchers", "proc", "text"}
    ),
    frozenset({"errorrecord", "runs"}),
    frozenset({"config", "checkpoint", "store", "wire"}),
    frozenset({"server", "rendezvous", "training"}),
    frozenset({"agent"}),
    frozenset({"views"}),
    frozenset({"dashboard", "top"}),
    frozenset({"cli", "extras"}),
    frozenset({"__main__"}),
    frozenset({"torchrun"}),
)

FILE_LINES, FUNCTION_LINES, PARAMETERS, NESTING, MODULES = 700, 60, 8, 3, 14
FORBIDDEN_NAMES = frozenset(
    "util utils helper helpers common manager managers base misc master child generation".split()
)

SLEEPS = ("time.sleep", "sleep", "threading.Event().wait", "Event().wait")

# Rule and place ("module" or "module:function") -> the reason for the exception.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("sleep", f"elaunch.{place}"): reason
    for reason, places in {
        "nothing tells when a native thread is at rest": (
            "server.torchfix:_settle",
            "server.preload:threads_after_a_fork",
        ),
        "a peer that refuses does not tell when it will not: again, until a deadline": (
            "training.stores.roundstore:RoundStore._connect",
            "agent.peers.search:_OneSearch._ask",
            "agent.hangs.elsewhere:OtherNodes._ask",
            "wire.stream:dial",
            "views.read:read",
            "views.read:_settle",
        ),
        "a file system of several machines tells nobody of a change": (
            "agent.resume.directory:DirectoryFinisher.lock",
            "checkpoint.formats.filetree:verify",
            "checkpoint.storage.commit:_outcome",
            "checkpoint.storage.durable:read_patiently",
            "views.logs:Reader.run",
            "views.logs:follow_console",
        ),
        "a measurement is of a span of time": ("runs.usage:measure_since",),
        "a person has asked for it": ("views.watch:pause", "extras.otlp:export"),
        "the exit of the lost rank is to be the first": ("training.ranks:RankCalls._fail",),
    }.items()
    for place in places
} | {
    ("parameters", "elaunch.training.train:TrainContext.steps"): "a whole training in one call",
}

# "module:function" that may catch everything -> what becomes of the exception.
BROAD_EXCEPTS: dict[str, str] = {
    "elaunch.agent.peers.peers:Peers._attend": "top of a thread: logged, others are served",
    "elaunch.agent.resume.latest:DirectoryProbe._run": "top of a thread: it is the "
    "answer to the loop",
    "elaunch.agent.resume.latest:look": "whatever a search runs into is its answer, and is told",
    "elaunch.atonce:_run": "top of a thread: raised again in the one that has asked",
    "elaunch.checkpoint.storage.objects:Objects._at": "whatever a storage's driver raises "
    "is an OSError",
    "elaunch.rendezvous.coordinator:Coordinator._find": "top of a thread: the job ends with it",
    "elaunch.rendezvous.meeting:Meeting._run": "top of a thread: ends this agent, and is told",
    "elaunch.agent.status.views:NodeViews._serve": "logged; the command gets no answer",
    "elaunch.agent.status.onevent:EventHook._run": "top of a thread: logged, the job goes on",
    "elaunch.agent.status.socket:ControlSocket._serve": "top of a thread: logged, others are "
    "served",
    "elaunch.agent.logs.pump:LogPump._run": "top of a thread: logged with what it means for "
    "the job",
    "elaunch.agent.saver.saver:AgentSaver.serve": "top of a thread: logged, the worker is "
    "hung up on",
    "elaunch.agent.saver.queue:SaveQueue._commit": "top of a thread: the save fails with it",
    "elaunch.agent.saver.queue:SaveQueue._write": "top of a thread: the save fails with it",
    "elaunch.training.context:_beside": "logged: the script ends with its own exception",
    "elaunch.training.metrics.writer:BoardWriter.write": "other people's code: logged, the rows "
    "are written",
    "elaunch.training.metrics.writer:BoardWriter.close": "other people's code: logged, the rows "
    "are written",
    "elaunch.agent.status.httpport:HttpPort._answer": "whatever a client, or what it asks for, "
    "raises: the next one is answered",
    "elaunch.top.widgets:_run": "top of a thread: raised in the one that waits for it",
    "elaunch.agent.hangs.sample:Sampler._judge": "a hang without a reason is still one",
    "elaunch.agent.hangs.sample:Sampler._run": "top of a thread: logged, the job goes on",
    "elaunch.agent.status.record:RecordWriter._run": "logged, the loop's records are still written",
    "elaunch.training.values:attempt": "what a user's object raises is the call's error",
    "elaunch.training.unpickling:named_by": "what cannot be pickled names nothing that is needed",
    "elaunch.training.checkpoint.together:together": "whatever is raised in its block is "
    "sent to all ranks and raised there",
    "elaunch.training.checkpoint.together:guarded": "what torch or a user's object raises on "
    "one rank is an error of all",
    "elaunch.server.preload:_look_through_modules": "a foreign module may raise anything",
    "elaunch.server.devices:_or_why": "whatever a driver raises is the answer to the agent",
    "elaunch.server.preload:_import": "whatever a user's module raises is the answer to the agent",
}

# Modules that run in the server or in processes that it forks, the store that is torch's own, and
# what a program imports in the place of torch's: they alone may import torch.
TORCH_ALLOWED = (
    *("elaunch.server", "elaunch.store.tcp.client", "elaunch.training"),
    *("elaunch.torchrun.api", "elaunch.torchrun.agentprocess"),
)

BLOCKS = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.If,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.Match,
    *((ast.TryStar,) if sys.version_info >= (3, 11) else ()),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[str, str]


@cache
def modules() -> dict[str, ast.Module]:
    """Return the tree of each module of the package by its full name."""
    trees = {}
    gc.disable()  # it would look for garbage among a million nodes, again and again
    for path in sorted((ROOT / "elaunch").rglob("*.py")):
        trees[name_of(path)] = ast.parse(path.read_text(), str(path))
    gc.enable()
    return trees


def name_of(path: Path) -> str:
    """Return the full name of the module in a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def inside(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a tree."""
    return list(ast.walk(tree))


def nodes(module: str) -> list[ast.AST]:
    """Return all nodes of a module."""
    return inside(modules()[module])


def file_of(module: str) -> Path:
    """Return the source file of a module."""
    path = ROOT.joinpath(*module.split("."))
    room = path / "__init__.py"
    return room if room.exists() else path.with_suffix(".py")


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function with its dotted name inside the module, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # has no statement in it
        inner = prefix
        if isinstance(node, ast.ClassDef | Function):
            inner = f"{prefix}{node.name}."
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        yield from functions(node, inner)


@cache
def all_functions() -> list[tuple[str, Function]]:
    """Return "module:function" and its node for the whole package."""
    return [
        (f"{module}:{name}", node)
        for module, tree in modules().items()
        for name, node in functions(tree)
    ]


def calls(function: Function, *names: str) -> Iterator[ast.Call]:
    """Yield the calls in a function of what has one of these names as its last."""
    for node in inside(function):
        if isinstance(node, ast.Call):
            last = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if last in names:
                yield node


def report(rule: str, findings: Iterable[Finding]) -> None:
    """Fail with one line per finding that has no row in EXCEPTIONS, and per row without use."""
    found = dict(findings)
    excused = {place for (name, place) in EXCEPTIONS if name == rule}
    lines = [f"{place}: {what}" for place, what in found.items() if place not in excused]
    lines += [f"{place}: the exception is not needed any more" for place in excused - set(found)]
    assert not lines, f"{rule}:\n" + "\n".join(lines)


@cache
def imports(module: str) -> set[str]:
    """Return the full names that a module imports anywhere in it; own submodules are resolved."""
    package = module if is_package(module) else module.rpartition(".")[0]
    names: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in modules() else base)
    return names


@cache
def own_imports() -> dict[str, set[str]]:
    """Return for each module the modules of the package that it imports."""
    return {name: imports(name) & set(modules()) for name in modules()}


def layer(module: str) -> int:
    """Return the index of a module's layer."""
    room = module.split(".")[1] if "." in module else module
    found = [index for index, rooms in enumerate(LAYERS) if room in rooms]
    assert found, f"{module}: {room} has no layer in {Path(__file__).name}"
    return found[0]


def test_imports_go_down_the_layers() -> None:
    """Lazy imports and those for type checking included."""
    report(
        "layers",
        (
            (module, f"imports {target}, which is above it")
            for module, targets in own_imports().items()
            for target in targets
            if layer(target) > layer(module)
        ),
    )


def test_there_is_no_import_circle() -> None:
    """Take away modules that import none of the rest, or that none of it imports: all must go."""
    graph = {name: targets - {name} for name, targets in own_imports().items()}
    while True:
        imported = set().union(*graph.values())
        rest = {name for name, targets in graph.items() if targets and name in imported}
        if rest == set(graph):
            break
        graph = {name: graph[name] & rest for name in rest}
    report("circles", ((name, f"imports {targets}") for name, targets in graph.items()))


def test_the_agents_side_knows_no_script() -> None:
    """What both sides need is below both; ``elaunch.cli`` may convert a script's files."""
    sides = ("elaunch.agent", "elaunch.rendezvous", "elaunch.server")
    found = (
        (module, f"imports {target}")
        for module, targets in own_imports().items()
        for target in targets
        if (module.startswith(sides) and target.startswith("elaunch.training"))
        or (module.startswith("elaunch.training") and target.startswith(sides))
    )
    report("sides", found)


def rooms() -> dict[str, set[str]]:
    """Return each package of modules, with those that it names in ``__all__``: its face."""
    found = {}
    for name, tree in modules().items():
        names = tree.body[1:]
        if is_package(name) and len(names) == 1 and isinstance(names[0], ast.Assign):
            found[name] = set(ast.literal_eval(names[0].value))
    return found


def test_imports_go_to_the_face_of_a_room() -> None:
    """A room names in ``__all__`` what is used from outside, and nothing else."""
    faces = rooms()
    named = named_in_strings()
    used = {
        name: {n.rpartition(".")[2] for n in named if n.startswith(f"{name}.")} for name in faces
    }
    found = []
    for module, targets in own_imports().items():
        for target in targets:
            room, _, name = target.rpartition(".")
            if room in faces and not module.startswith(f"{room}."):
                used[room].add(name)
                if name not in faces[room]:
                    found.append((module, f"imports {target}, which is not in __all__ there"))
    for room, names in faces.items():
        found += [(room, f"nobody outside imports {name}") for name in names - used[room]]
    report("face", found)


def named_in_strings() -> set[str]:
    """Return the modules that the code imports by a name in a string."""
    texts = (
        node.value
        for module in modules()
        for node in nodes(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {text for text in texts if text in modules()}


def test_folders_are_small() -> None:
    """A listing reads like a table of contents."""
    folders = Counter(name.rpartition(".")[0] for name in modules() if not is_package(name))
    report("folder", ((f, f"{n} > {MODULES}") for f, n in folders.items() if n > MODULES))


def is_package(module: str) -> bool:
    """Tell whether a module is a folder."""
    return file_of(module).name == "__init__.py"


def test_files_are_short() -> None:
    """One room, one job."""
    sizes = {module: len(file_of(module).read_text().splitlines()) for module in modules()}
    report("file", ((m, f"{n} lines > {FILE_LINES}") for m, n in sizes.items() if n > FILE_LINES))


def code_lines(node: Function) -> int:
    """Return a function's lines without its docstring."""
    first = node.body[0]
    doc = ast.get_docstring(node) is not None
    lines = (node.end_lineno or 0) - node.lineno + 1
    return lines - ((first.end_lineno or 0) - first.lineno + 1 if doc else 0)


def parameters(node: Function) -> int:
    """Return how many parameters a caller sees: keyword-only ones too, self and cls not."""
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [a.arg for a in (arguments.vararg, arguments.kwarg) if a]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def nesting(node: ast.AST) -> int:
    """Return how deep blocks stand in blocks; ``elif`` is no deeper, nested functions are apart."""

    def deepest(nodes: Iterable[ast.AST]) -> int:
        return max(map(nesting, nodes), default=0)

    if isinstance(node, ast.If):
        chained = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        other = deepest(node.orelse)
        return max(1 + deepest(node.body), other if chained else 1 + other)
    inner = [n for n in ast.iter_child_nodes(node) if not isinstance(n, Function | ast.expr)]
    return isinstance(node, BLOCKS) + deepest(inner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "measure", "limit"),
    [
        ("function", code_lines, FUNCTION_LINES),
        ("parameters", parameters, PARAMETERS),
        ("nesting", nesting, NESTING),
    ],
)
def test_functions_are_small(rule: str, measure: Callable[[Function], int], limit: int) -> None:
    """Mind the tail, not the median."""
    sizes = ((place, measure(node)) for place, node in all_functions())
    report(rule, ((place, f"{size} > {limit}") for place, size in sizes if size > limit))


def test_public_things_are_documented() -> None:
    """Each module, and each class, function and method without an underscore."""
    missing = []
    for module, tree in modules().items():
        if ast.get_docstring(tree) is None:
            missing.append((module, "the module has no docstring"))
        for parent in [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))]:
            if getattr(parent, "name", "").startswith("_"):
                continue
            for node in parent.body:
                named = isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_")
                if "overload" in map(ast.unparse, getattr(node, "decorator_list", ())):
                    continue
                if named and ast.get_docstring(node) is None:
                    missing.append((f"{module}:{node.name}", "no docstring"))
    report("docstrings", missing)


def test_docstrings_begin_with_their_subject() -> None:
    """One of a module, class, function or name begins with what it is, not with "What" or "Who"."""
    found = []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Expr) else None
            if isinstance(text, ast.Constant) and str(text.value).startswith(("What ", "Who ")):
                found.append((f"{module}:{node.lineno}", str(text.value)[:40]))
    report("docstrings", found)


def broad(handler: ast.AST | None) -> bool:
    """Return whether an except clause's type takes in every exception."""
    names = handler.elts if isinstance(handler, ast.Tuple) else [handler]
    return any(n is None or ast.unparse(n) in ("Exception", "BaseException") for n in names)


@pytest.mark.slow
def test_exceptions_are_caught_narrowly() -> None:
    """A broad except must raise again at its end, or be one of the table."""
    found: set[str] = set()
    for place, function in all_functions():
        for node in inside(function):
            if isinstance(node, ast.ExceptHandler) and broad(node.type):
                last = node.body[-1]
                if not (isinstance(last, ast.Raise) and last.exc is None):
                    found.add(place)
        for call in calls(function, "suppress"):
            found |= {place for argument in call.args if broad(argument)}
    assert found == set(BROAD_EXCEPTS), "each broad except needs its row and its reason"


@pytest.mark.slow
def test_nothing_sleeps() -> None:
    """Wait for a condition, with a deadline."""
    sleeping = (
        (place, f"line {call.lineno}")
        for place, function in all_functions()
        for call in calls(function, "sleep", "wait")
        if ast.unparse(call.func) in SLEEPS
    )
    report("sleep", sleeping)


def test_module_names_say_what_is_inside() -> None:
    """No drawer for everything, and the words of the field only."""
    bad = ((m, "name") for m in modules() if FORBIDDEN_NAMES & set(re.split(r"[._]", m)))
    report("names", bad)


def test_torch_is_imported_by_the_server_only() -> None:
    """The agent and the commands work without it: its import takes most of a second."""
    found = (
        (module, f"imports {name}")
        for module in modules()
        if not module.startswith(TORCH_ALLOWED)
        for name in imports(module)
        if name.partition(".")[0] == "torch"
    )
    report("torch", found)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("elaunch.agent.main", "torch rich psutil yaml numpy"),
        ("elaunch.__main__", "torch rich psutil yaml numpy"),
    ],
)
def test_heavy_modules_are_not_loaded(module: str, unwanted: str) -> None:
    """What a process imports when it starts decides its memory and how fast it answers."""
    code = f"import sys, {module}; print([m for m in {unwanted.split()} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
