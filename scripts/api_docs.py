"""Write docs/api.md from the docstrings of what a script imports.

    python scripts/api_docs.py            write it
    python scripts/api_docs.py --check    fail where it is out of date

What is exported stands in ``elaunch/__init__.pyi``; each name of it needs its place in ORDER here.
The source is read, not imported, so neither torch nor elaunch need be installed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
TRAINING = "elaunch.training"

# Heading → objects below it, "module:name"; those of a context's parts are no exports of their own.
ORDER: dict[str, tuple[str, ...]] = {
    "The context": (f"{TRAINING}.context:init", f"{TRAINING}.context:Context"),
    "What the launcher told": (
        f"{TRAINING}.launch:info",
        f"{TRAINING}.launch:latest_checkpoint",
        f"{TRAINING}.launch:Info",
    ),
    "Calls of all ranks: `ctx.distributed`": (
        f"{TRAINING}.distributed:DistributedContext",
        f"{TRAINING}.stores.keystore:KeyStore",
    ),
    "Ending in time: `ctx.preempt`": (f"{TRAINING}.preempt.preempt:PreemptContext",),
    "Metrics, progress, status, steps: `ctx.train`": (
        f"{TRAINING}.train:TrainContext",
        f"{TRAINING}.steps.loop:Steps",
        f"{TRAINING}.steps.step:Step",
        f"{TRAINING}.metrics.reading:read_metrics",
    ),
    "Checkpoints: `ctx.checkpoint`": (
        f"{TRAINING}.checkpoint.context:CheckpointContext",
        f"{TRAINING}.checkpoint.handle:SaveHandle",
        "elaunch.checkpoint.records:Committed",
        "elaunch.checkpoint.records:Keep",
        f"{TRAINING}.checkpoint.state.perrank:PerRank",
        f"{TRAINING}.checkpoint.state.perrank:rng_state",
    ),
    "The order of the data": (f"{TRAINING}.sampler:ElasticDistributedSampler",),
    "Telling of an error": ("elaunch.errorrecord:record",),
    "Starting a job from a program": ("elaunch.torchrun.calls:run",),
}

# Public for other parts of elaunch, not for scripts.
INNER: dict[str, tuple[str, ...]] = {
    "DistributedContext": (
        *("of", "open", "close", "describe", "seconds", "note"),
        *("over", "stand_by", "move", "made"),
    ),
    "KeyStore": ("close",),
    "PreemptContext": ("start", "move", "on_notice", "on_signal", "close"),
    "TrainContext": ("attach", "move", "note_step", "metrics_at", "close"),
    "Step": ("under_way",),
    "CheckpointContext": ("move", "pack", "unpack", "schedule", "follow", "close"),
    "Committed": ("age",),
    "Keep": ("to_json", "from_json", "describe"),
}

# Made by init(): how it is constructed is no business of a script.
MADE = (
    "Context",
    "KeyStore",
    "PreemptContext",
    "TrainContext",
    "Steps",
    "Step",
    "CheckpointContext",
    "SaveHandle",
    "Committed",
    "Info",
)

# Calls that are described as one.
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "DistributedContext": (
        ("allgather", "gather", "broadcast", "barrier"),
        ("allgather_local", "gather_local", "broadcast_local", "barrier_local"),
    ),
    "TrainContext": (("report_training_metrics", "report_validation_metrics", "report_metrics"),),
    "CheckpointContext": (("pin", "unpin"),),
    "ElasticDistributedSampler": (("state_dict", "load_state_dict"),),
}

BEGINNING = """# What a script imports

Written by `scripts/api_docs.py` from the docstrings; do not edit it here.

```python
import elaunch

with elaunch.init() as ctx:
    ...
```

A script that imports `elaunch` runs unchanged under `elaunch run`, torchrun, `mpirun`/`srun` and
alone. Nothing is loaded before it is asked for.

What most scripts need, in the block of `with elaunch.init()`:

```python
state = {"model": model, "optimizer": optimizer}  # save, and resume from the newest that is whole
found = ctx.checkpoint.load(state)
for step in range(found.next_step, steps):
    train(step)
    ctx.checkpoint.save(state, step, block=False, keep=elaunch.Keep(last=3))
```

```python
ctx.train.report_training_metrics(step, {"loss": loss})  # report
ctx.train.report_validation_metrics(step, {"accuracy": accuracy})
ctx.train.report_progress(step / steps)
```

```python
if ctx.preempt.should_preempt():  # end in time; all ranks ask, and get one answer
    ctx.checkpoint.save(state, step)
    sys.exit()  # 75: the same command goes on from here
```

```python
sampler = elaunch.ElasticDistributedSampler(dataset)  # each sample once per epoch, on any ranks
for batch in DataLoader(dataset, 32, sampler=sampler):
    train(batch)
    sampler.advance(len(batch))
```

```python
losses = ctx.distributed.allgather(loss)  # one for each rank
settings = ctx.distributed.broadcast(settings)  # rank 0's
with ctx.distributed.in_turn():
    download(dataset)
```

| task | here | Accelerate | Fabric | orbax | Determined |
|---|---|---|---|---|---|
| save | `checkpoint.save(state, step)` | `save_state(dir)` | `save(path, state)` | `CheckpointManager.save(step, args=…)` | `checkpoint.store_path(metadata)` |
| resume | `checkpoint.load(state)` | `load_state(dir)` | `load(path, state)` | `restore(latest_step(), args=…)` | `checkpoint.restore_path(info.latest_checkpoint)` |
| report | `train.report_training_metrics(step, …)` | `log(…, step)` | `log_dict(…, step)` | | `train.report_training_metrics(step, …)` |
| end in time | `preempt.should_preempt()` | | | `reached_preemption(step)` | `preempt.should_preempt()` |
| values of all ranks | `distributed.allgather(x)` | `gather_for_metrics(x)` | `all_gather(x)` | | `distributed.allgather(x)` |

The next table says which ranks make a call together, whether it blocks, and what it raises; an
empty cell means that the docstring does not say.

"""  # noqa: E501 - rows of a table

# Sentences of a docstring that say who calls it, and whether that blocks.
WHO = re.compile(
    r"(?=.*\b((call|calls|called) it|may|must|itself|together)\b)"
    r".*\b((all|every|each|any|one) ranks?|each of them|all of them)\b",
    re.IGNORECASE,
)
BLOCKS = re.compile(
    r"(?i)\bblocks\b|\bdoes not block\b|\bit waits\b|^(wait until|return when|returns at once)\b"
)

SECTIONS = ("Args", "Attributes", "Raises", "Returns")


@dataclass(frozen=True)
class Entry:
    """One function, method or class of the page."""

    title: str
    signature: str
    text: str
    inherited: str = ""
    """The docstring of its class, for what holds for all of its calls."""
    heading: str = ""
    """The heading above it; that of the first one of a group."""

    @property
    def call(self) -> bool:
        """Whether it is a function or a method."""
        function = self.signature.endswith(")") or ") -> " in self.signature
        return function and (bool(self.inherited) or self.title.partition(".")[2].islower())


def exported() -> dict[str, str]:
    """Return the names of the stub and the modules where they are: name → "module:name"."""
    found: dict[str, str] = {}
    for node in ast.parse((ROOT / "elaunch" / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    return found


def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())


def documented(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring without its indentation; empty if there is none."""
    return inspect.cleandoc(ast.get_docstring(node) or "")


def signature(name: str, node: ast.FunctionDef, method: bool) -> str:
    """Return ``name(arguments) -> type``, over several lines where it is long."""
    arguments = node.args
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    if method and not static:
        first = arguments.posonlyargs or arguments.args
        del first[0]
    text = re.sub(r"(: [^,=]+)=", r"\1 = ", ast.unparse(arguments))
    end = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({text}){end}"
    if len(line) <= 90:
        return line
    tops = [part.strip() for part in re.split(r", (?![^\[(]*[\])])", text)]
    return f"{name}(\n" + "".join(f"    {part},\n" for part in tops) + f"){end}"


def entries(place: str) -> list[Entry]:
    """Return an object and, of a class, its public members, in the order of the source."""
    module, _, name = place.partition(":")
    node = next(n for n in tree_of(module).body if getattr(n, "name", "") == name)
    shown = f"elaunch.{name}" if place in exported().values() else name
    if isinstance(node, ast.FunctionDef):
        return [Entry(shown, signature(shown, node, False), documented(node))]
    assert isinstance(node, ast.ClassDef), place
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    made = next((m for m in methods if m.name == "__init__"), None)
    head = f"class {shown}"
    if made is not None and name not in MADE:
        head = signature(head, made, True)
    public = [m for m in methods if m.name[0] != "_" and m.name not in INNER.get(name, ())]
    text = documented(node)
    properties = [m for m in public if is_property(m) and f"    {m.name}: " not in text]
    attributes = attribute_texts(node) + "".join(map(property_text, properties))
    found = [Entry(shown, head, with_attributes(text, attributes))]
    for method in public:
        marks = [ast.unparse(d) for d in method.decorator_list]
        if not is_property(method) and not any(mark.endswith(".setter") for mark in marks):
            found.append(member(name, method, documented(node)))
    return found


def is_property(node: ast.FunctionDef) -> bool:
    """Tell whether a method is read as an attribute."""
    return any(ast.unparse(d) == "property" for d in node.decorator_list)


def property_text(node: ast.FunctionDef) -> str:
    """Return a property as lines of a section."""
    first, *more = filter(None, documented(node).splitlines())
    return f"    {node.name}: {first[0].lower()}{first[1:]}\n" + "".join(
        f"        {line}\n" for line in more
    )


def with_attributes(text: str, attributes: str) -> str:
    """Return a class's docstring with these lines at the end of its section of attributes."""
    if not attributes:
        return text
    if "Attributes:\n" not in text:
        return f"{text}\n\nAttributes:\n{attributes}"
    before, _, after = text.partition("Attributes:\n")
    own, blank, rest = after.partition("\n\n")
    return f"{before}Attributes:\n{own}\n{attributes}{blank}{rest}"


def member(owner: str, node: ast.FunctionDef, class_text: str) -> Entry:
    """Return a method's entry."""
    title = f"{owner}.{node.name}"
    heading = f"`{title}`"
    for names in GROUPS.get(owner, ()):
        if node.name in names:
            heading = ", ".join([f"`{owner}.{names[0]}`", *(f"`{name}`" for name in names[1:])])
    return Entry(title, signature(title, node, True), documented(node), class_text, heading)


def attribute_texts(node: ast.ClassDef) -> str:
    """Return the attributes that have a string of their own below them, as lines of a section."""
    lines = []
    for one, after in zip(node.body, node.body[1:], strict=False):
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Constant):
            lines.append(f"    {ast.unparse(one.target)}: {inspect.cleandoc(str(text.value))}\n")
    return "".join(lines)


def inline(text: str) -> str:
    """Turn the marks of docstrings into those of Markdown."""
    text = re.sub(r":(?:meth|class|func|mod|data):`~?\.?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def fenced(lines: list[str]) -> list[str]:
    """Return an indented block as code."""
    block = inspect.cleandoc("\n" + "\n".join(lines)).splitlines()
    language = "" if any("──" in line or line.startswith("===") for line in block) else "python"
    return [f"```{language}", *block, "```", ""]


def indented(lines: list[str], at: int) -> int:
    """Return where the indented block that begins at ``at`` ends."""
    end = at
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
        end += 1
    return end


def markdown(text: str) -> list[str]:
    """Return a docstring as lines of Markdown."""
    lines, found, at = text.splitlines(), list[str](), 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            end = indented(lines, at)
            found += [f"**{line}**", "", *items(lines[at:end]), ""]
            at = end
        elif line.endswith("::"):
            end = indented(lines, at)
            found += [inline(line[:-1]) if len(line) > 2 else "", ""]
            found += fenced(lines[at:end])
            at = end
        else:
            found.append(inline(line))
    return found


def items(lines: list[str]) -> list[str]:
    """Return the items of a section, ``name: text``, as a list."""
    found: list[str] = []
    for line in inspect.cleandoc("\n" + "\n".join(lines)).splitlines():
        match = re.match(r"([\w*][\w*, ]*): (.*)", line)
        if match:
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            found.append(f"* {names}: {inline(match[2])}")
        else:
            found.append(f"  {inline(line.strip())}".rstrip())
    return found


def sentences(text: str) -> list[str]:
    """Return the sentences of a docstring, without its code."""
    prose = re.sub(r"::\n(\n| +.*\n?)+", ".\n", text + "\n")
    return [" ".join(s.split()) for s in re.split(r"(?<=[.;])\s", prose) if s.strip()]


def said(entry: Entry, pattern: re.Pattern[str]) -> str:
    """Return the first sentence about something, as it stands; one of the class if none of its own.

    What a class says of "every call" holds for those that several ranks make.
    """
    found = sentences(entry.text)
    general = "Every call" in entry.inherited or "Nothing here" in entry.inherited
    who = next(filter(WHO.search, found), "")
    if general and who:
        together = re.search(r"(?i)\b(all|every) ranks?\b", who)
        of_class = sentences(entry.inherited)
        found += [s for s in of_class if ("alone" in s.split()) != bool(together)]
        found += of_class
    for sentence in found:
        if pattern.search(sentence):
            shown = inline(sentence).rstrip(".;").replace("|", "\\|")
            return shown[0].upper() + shown[1:]
    return ""


def raises(entry: Entry, errors: set[str]) -> str:
    """Return the names of elaunch's exceptions that the docstring names, or its class's calls."""
    text = entry.text
    starts: tuple[str, ...] = ("Every call raises",)
    if re.search(r"\bALL ranks\b", text):
        starts += ("Calls raise", "Calls of all ranks raise")
    text += "".join(p for p in entry.inherited.split("\n\n") if p.startswith(starts))
    found = [name for name in re.findall(r"\b[A-Z]\w+\b", text) if name in errors]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(found))


def table(found: list[Entry], errors: set[str]) -> list[str]:
    """Return the table of the calls of which the docstrings say something."""
    lines = ["| call | who calls it | does it block | raises |", "|---|---|---|---|"]
    for entry in found:
        cells = [said(entry, WHO), said(entry, BLOCKS), raises(entry, errors)]
        if entry.call and any(cells):
            link = f"[`{entry.title}`](#{anchor(entry.heading or entry.title)})"
            lines.append("| " + " | ".join([link, *cells]) + " |")
    return [*lines, ""]


def anchor(title: str) -> str:
    """Return the name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def page() -> str:
    """Return the whole page."""
    exports = exported()
    errors = {name for name, place in exports.items() if place.startswith("elaunch.errors:")}
    placed = {place for places in ORDER.values() for place in places}
    if lost := {n for n, place in exports.items() if n not in errors and place not in placed}:
        raise SystemExit(f"scripts/api_docs.py: no place in ORDER for {', '.join(sorted(lost))}")
    body, calls = list[str](), list[Entry]()
    for heading, places in ORDER.items():
        body += [f"## {heading}", ""]
        for place in places:
            for entry in entries(place):
                calls.append(entry)
                heading = f"### {entry.heading or f'`{entry.title}`'}"
                body += [] if heading in body else [heading, ""]
                body += ["```python", entry.signature, "```", ""]
                body += [*markdown(entry.text), ""]
    body += ["## Errors", "", "A script can catch these; all can be imported from `elaunch`.", ""]
    body += [*error_list(errors)]
    text = BEGINNING + "\n".join([*table(calls, {*errors, "RunDirError"}), *body])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def error_list(names: set[str]) -> list[str]:
    """Return the exported exceptions as a nested list, each below the one that it is a kind of."""
    classes = [n for n in tree_of("elaunch.errors").body if isinstance(n, ast.ClassDef)]
    depth: dict[str, int] = {}
    lines = []
    for node in classes:
        bases = [ast.unparse(base) for base in node.bases]
        depth[node.name] = depth.get(bases[0], -1) + 1
        if node.name in names:
            other = f" (a `{bases[1]}`, too)" if len(bases) > 1 else ""
            first = inline(documented(node).split("\n\n")[0].replace("\n", " "))
            lines.append(f"{'  ' * depth[node.name]}* `{node.name}`{other}: {first}")
    return lines


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("docs/api.md is out of date: run python scripts/api_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
