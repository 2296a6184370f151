"""Measure the package's size, and hold it to ``scripts/size.toml``: ``make size``.

Ends with 1 where a number is above its limit there. A limit rises only with a line in that file
that names what it buys, and it is lowered when code goes.

=======================  =========================================================================
number                   how it is counted
=======================  =========================================================================
raw lines                all lines of ``elaunch/**/*.py`` but the examples
code lines               those on which a token stands that is no comment and no docstring
files                    modules, ``__init__`` included
largest folder           modules directly in one folder
with one importer        modules that one other module imports, and no more
repeated class names     names of classes that two modules or more define
threads                  calls that start a thread, each a kind of its own
tunable constants        names in capitals that a module sets to a number
=======================  =========================================================================
"""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).with_name("size.toml")
NO_CODE = frozenset(
    {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        *(tokenize.ENCODING, tokenize.ENDMARKER),
    }
)


def name_of(path: Path) -> str:
    """Return the full name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def docstrings(tree: ast.Module) -> set[int]:
    """Return the lines on which strings stand that are statements: docstrings."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_lines(source: str, tree: ast.Module) -> int:
    """Return how many lines of a module hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings(tree))


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    """Return which of the package's modules a module imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names & known


def starts_thread(node: ast.AST) -> bool:
    """Whether a node is a call that makes or starts a thread."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name.endswith("Thread") or name == "atonce.start"


def is_constant(node: ast.stmt) -> bool:
    """Whether a statement of a module sets a name in capitals to a number."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, value = node.target, node.value
    else:
        return False
    if not isinstance(target, ast.Name) or not target.id.isupper():
        return False
    parts = [part for part in ast.walk(value) if isinstance(part, ast.expr)]
    numbers = (ast.BinOp, ast.UnaryOp)
    return all(
        isinstance(part, numbers)
        or (isinstance(part, ast.Constant) and isinstance(part.value, int | float))
        for part in parts
    )


def complaints(rows: dict[str, int | str]) -> list[str]:
    """Return what is above its limit."""
    if importlib.util.find_spec("tomllib") is None:
        return []  # Python 3.10 reads no TOML
    limits = importlib.import_module("tomllib").loads(LIMITS.read_text())["limits"]
    return [
        f"{name}: {rows[name]}, and scripts/size.toml allows {most}: take something away, or raise "
        "it there with a line that names what it buys"
        for name, most in limits.items()
        if int(rows[name]) > most
    ]


def main() -> int:
    """Print the numbers, one a line; return 1 where one is above its limit."""
    paths = [p for p in sorted((ROOT / "elaunch").rglob("*.py")) if "examples" not in p.parts]
    sources = {name_of(path): path.read_text() for path in paths}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    folders = Counter(path.parent for path in paths if path.name != "__init__.py")
    importers = Counter(
        target
        for name, tree in trees.items()
        for target in imported(tree, set(trees)) - {name}
        if not name.startswith(f"{target}.")
    )
    classes = Counter(
        node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    largest, count = folders.most_common(1)[0]
    rows: dict[str, int | str] = {
        "raw lines": sum(len(source.splitlines()) for source in sources.values()),
        "code lines": sum(code_lines(sources[name], tree) for name, tree in trees.items()),
        "files": len(paths),
        "largest folder": f"{count} ({largest.relative_to(ROOT)})",
        "with one importer": sum(count == 1 for count in importers.values()),
        "repeated class names": sum(count > 1 for count in classes.values()),
        "threads": sum(starts_thread(node) for tree in trees.values() for node in ast.walk(tree)),
        "tunable constants": sum(is_constant(node) for t in trees.values() for node in t.body),
    }
    for row, value in rows.items():
        print(f"{row:<26}{value}")
    above = complaints(rows)
    print("\n".join(above), file=sys.stderr, end="\n" if above else "")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
