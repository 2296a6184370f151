"""Every form in which a script can be given runs as the interpreter itself would run it.

torchrun starts ``python -u FORM``, so that is the reference here: what the script says on stdout
and stderr, byte by byte, and the exit code. Workers are forked, without a preload; by the start
method spawn they are what the reference is.
"""

from __future__ import annotations

import json
import py_compile
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import Launcher

pytestmark = pytest.mark.slow

SHOW = """
def answer(x: int) -> int:
    return x
def show():
    import json, os, sys
    main = sys.modules["__main__"]
    print(json.dumps([
        __name__, __file__, repr(__spec__), repr(__package__), __doc__, answer.__code__.co_filename,
        type(__loader__).__name__, sorted(n for n in globals()), sys.argv, sys.orig_argv[1:],
        sys.path, main.__dict__ is globals(), str(answer.__annotations__), sys.flags.safe_path
        if sys.version_info >= (3, 11) else None,
    ]))
show()
"""
FAIL = SHOW + "\ndef fail():\n    raise ValueError(answer('no'))\nfail()\n"


def file(path: str, text: str | bytes = SHOW) -> Callable[[Path], None]:
    """Return what writes one file."""

    def write(root: Path) -> None:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    return write


def package(main: str = SHOW, init: str = "") -> Callable[[Path], None]:
    """Return what writes a package with a module that imports its neighbours."""

    def write(root: Path) -> None:
        file("pkg/__init__.py", init)(root)
        file("pkg/near.py", "value = __name__\n")(root)
        file("pkg/__main__.py", main)(root)
        file("pkg/sub/__init__.py")(root)
        relative = "from . import mod as myself\nfrom ..near import value\nprint(value)\n"
        file("pkg/sub/mod.py", f"if __name__ == '__main__':\n    pass\n{relative}" + FAIL)(root)
        file("pkg/mod.py", "from .near import value\nprint(value)\n" + main)(root)

    return write


def compiled(path: str) -> Callable[[Path], None]:
    """Return what writes the byte code of a script."""

    def write(root: Path) -> None:
        file("source.py", FAIL)(root)
        py_compile.compile(str(root / "source.py"), cfile=str(root / path), doraise=True)

    return write


def archive(path: str, text: str, prefix: bytes = b"") -> Callable[[Path], None]:
    """Return what writes a zip file with ``__main__.py`` and a module."""

    def write(root: Path) -> None:
        with (root / path).open("wb") as target:
            target.write(prefix)
            with zipfile.ZipFile(target, "w") as zipped:
                zipped.writestr("__main__.py", "import inner\n" + text)
                zipped.writestr("inner.py", "print(__file__)\n")

    return write


def linked(root: Path) -> None:
    """Write a script and a symbolic link to it elsewhere."""
    file("real/place/script.py", "import beside\n" + SHOW)(root)
    file("real/place/beside.py", "print(__file__)\n")(root)
    (root / "links").mkdir()
    (root / "links" / "other.py").symlink_to("../real/place/script.py")


Form = tuple[Callable[[Path], None], list[str], dict[str, str]]
FORMS: dict[str, Form] = {
    "below": (file("a/b/s.py"), ["a/b/s.py", "x", "--", "-m"], {}),
    "not normalised": (file("a/s.py"), ["./a/../a/./s.py"], {}),
    "link": (linked, ["links/other.py"], {}),
    "no suffix": (file("tool"), ["tool"], {}),
    "odd name": (file("with space ä'.py", FAIL), ["with space ä'.py"], {}),
    "not UTF-8 name": (file("n\udcff.py", FAIL), ["n\udcff.py"], {}),
    "byte code": (compiled("s.pyc"), ["s.pyc"], {}),
    "byte code without suffix": (compiled("s"), ["s"], {}),
    "module": (package(), ["-m", "pkg.mod", "x"], {}),
    "module fails": (package(), ["-m", "pkg.sub.mod", "x"], {}),
    "module imported before": (package(init="from . import mod\n"), ["-m", "pkg.mod"], {}),
    "package": (package(FAIL), ["-m", "pkg", "--flag"], {}),
    "directory": (file("d/__main__.py", FAIL), ["d", "x"], {}),
    "this directory": (file("__main__.py", FAIL), [".", "x"], {}),
    "module with a hyphen": (file("my-pkg/a-b.py", FAIL), ["-m", "my-pkg.a-b"], {}),
    "zip": (archive("app.zip", FAIL), ["app.zip"], {}),
    "zip app": (archive("app", FAIL, b"#!/usr/bin/env python3\n"), ["app", "x"], {}),
    "latin-1": (
        file("s.py", "# coding: latin-1\nprint(ascii('\xe9'))\n".encode("latin-1")),
        ["s.py"],
        {},
    ),
    "byte order mark": (file("s.py", b"\xef\xbb\xbfprint('a')\n1/0\n"), ["s.py"], {}),
    "no encoding given": (file("s.py", b"x = 1\ny = '\xe9'\n"), ["s.py"], {}),
    "unknown encoding": (file("s.py", b"# coding: no-such\nx = 1\n"), ["s.py"], {}),
    "null byte": (file("s.py", b"x = 1\ny = \x00 2\n"), ["s.py"], {}),
    "line ends": (file("s.py", b"print(1)\r\nif 1:\r\n    print('''a\r\nb''')\r1/0"), ["s.py"], {}),
    "not closed": (file("s.py", "print('never')\nx = (1,\n"), ["s.py"], {}),
    "indentation": (file("s.py", "if 1:\n    x = 1\n  y = 2\n"), ["s.py"], {}),
    "wrong word": (file("s.py", "x = 1\nimprot os\n"), ["s.py"], {}),
    "return outside": (file("s.py", "x = 1\nreturn 3\n"), ["s.py"], {}),
    "empty": (file("s.py", ""), ["s.py"], {}),
    "future": (file("s.py", "from __future__ import annotations\n" + SHOW), ["s.py"], {}),
    "not of the future": (file("s.py", SHOW), ["s.py"], {}),
    "exits": (file("s.py", "import sys\nsys.exit('the end')\n"), ["s.py"], {}),
    "safe path": (file("a/s.py", "import json\n" + SHOW), ["a/s.py"], {"PYTHONSAFEPATH": "1"}),
    "optimised": (file("s.py", "assert 0\n" + SHOW), ["s.py"], {"PYTHONOPTIMIZE": "1"}),
    "doc": (file("s.py", '"""The doc."""\n' + SHOW), ["s.py"], {}),
    "import fails": (file("s.py", "import json\nimport no_such_module\n"), ["s.py"], {}),
    "warns": (file("s.py", "x = 1\nassert (x, 'always true')\n"), ["s.py"], {}),
    "checked memory": (file("s.py", "x = (\n"), ["s.py"], {"PYTHONMALLOC": "debug"}),
    "checked memory at the end": (file("s.py", SHOW), ["s.py"], {"PYTHONMALLOC": "debug"}),
}
# The interpreter has other words for these where it reads a file (docs/start-methods.md).
OTHER_WORDS = ("no encoding given", "unknown encoding", "null byte")


def import_of(root: Path, text: str) -> None:
    """Write a script and a module ``other`` that it imports."""
    file("s.py", "def go():\n    import other\ngo()\n")(root)
    file("other.py", text)(root)


FORMS["imported module fails"] = (
    lambda root: import_of(root, "def f():\n    1/0\nf()\n"),
    ["s.py"],
    {},
)
FORMS["imported module is wrong"] = (lambda root: import_of(root, "x = (1,\n"), ["s.py"], {})


# What `make check` has time for.
QUICK = ("below", "module fails", "directory", "not closed", "imported module fails")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in FORMS]
)
def test_a_form_runs_as_under_python(elaunch: Launcher, tmp_path: Path, name: str) -> None:
    """stdout, stderr and the exit code of the script."""
    write, words, env = FORMS[name]
    root = tmp_path / "work"
    root.mkdir()
    write(root)
    python = subprocess.run(
        [sys.executable, "-u", *words], cwd=root, env=elaunch.env | env, capture_output=True
    )
    logs = ["--log-dir", str(tmp_path / "logs")]
    done = elaunch.run(["run", "--preload", "none", *logs, *words], cwd=root, env=env)
    (place,) = (tmp_path / "logs").glob("*/attempt_0/0")
    said = [(place / f"{stream}.log").read_bytes() for stream in ("stdout", "stderr")]
    assert done.returncode == python.returncode
    if name in OTHER_WORDS:
        kinds = (b"SyntaxError: ", b"ValueError: source code string")  # the latter Python 3.10
        assert any(kind in said[1] for kind in kinds) and b"elaunch" not in said[1]
        return
    assert [_decoded(text) for text in said] == [_decoded(python.stdout), _decoded(python.stderr)]


POSITIONS = """
import os, sys
seen = [sys.stdout.seekable(), sys.stderr.seekable(), sys.stderr.buffer.seekable()]
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding="latin-1", line_buffering=False)
print(*seen, sys.stdout.name, sys.stdout.mode, sys.stdout.write_through, "\xe4".isalpha(), "\xe4")
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_the_output_goes_to_a_file(elaunch: Launcher, tmp_path: Path, method: str) -> None:
    """What the launcher's file has, a position, the worker's pipe has not."""
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(POSITIONS)
    words = [sys.executable, "-m", "elaunch", "run", f"--start-method={method}", "--preload=none"]
    shell = f'exec "$@" >{output} 2>&1'
    done = elaunch.start_command(["sh", "-c", shell, "sh", *words, script]).wait()
    assert done.returncode == 0, output.read_bytes()
    assert output.read_bytes() == b"False False False <stdout> w True True \xe4\n"


def test_the_script_by_stdin(elaunch: Launcher, tmp_path: Path) -> None:
    """As ``python -``, by a plain process."""
    piped = ["bash", "-c", 'exec "$@" < s.py', "bash", sys.executable]
    file("s.py", SHOW)(tmp_path)
    python = subprocess.run(
        [*piped, "-u", "-", "x"], cwd=tmp_path, env=elaunch.env, capture_output=True, text=True
    )
    words = ["-m", "elaunch", "run", "-", "x"]
    done = elaunch.start_command([*piped, *words], cwd=tmp_path).wait()
    assert (done.returncode, python.returncode) == (0, 0), done.stderr
    assert _decoded(done.stdout.encode()) == _decoded(python.stdout.encode())


def test_the_record_of_a_path_that_is_run(elaunch: Launcher, tmp_path: Path) -> None:
    """It begins where runpy does."""
    file("s.py", FAIL)(tmp_path)
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    done = elaunch.run(["run", "--preload", "none", "--run-path", "s.py"], cwd=tmp_path, env=env)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    stack = message["extraInfo"]["py_callstack"].splitlines()
    assert (done.returncode, message["message"]) == (1, "ValueError: no")
    assert "runpy" in stack[1] and "elaunch" not in "".join(stack)


def _decoded(text: bytes) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x…", text.decode(errors="backslashreplace"))
