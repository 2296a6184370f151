"""Values that nobody should give: each is taken, or refused in one sentence, and nothing else.

Every flag, variable, key of a job file and argument of a command, in this process; nothing is
started, since the job is a dry run. A traceback here is one that a user would see.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

import pytest

from elaunch.cli import COMMANDS, execute
from elaunch.config import files
from elaunch.config.flags.flag import Flag
from elaunch.config.flags.table import FLAGS, VARIABLES
from tests import programs

CPU_SECONDS = 10.0
"""What one command line may cost; not by the clock, since the machine may be busy."""

LONGEST = 6000
"""Characters of a message, whatever the value."""

NUMBERS = [
    *("0", "1", "-1", "-0", "+1", "1.5", "1e9", "1e308", "1e309", "0x10", "1_000", "007"),
    *("9" * 30, "9" * 5000, "-" + "9" * 30, "nan", "NaN", "inf", "-inf", "Infinity"),
    *("null", "None", "true", "false", "١٢", "½", "²"),
]
TEXTS = [
    *("", " ", "\t", "\n", "a\nb", "\0", "a\0b", "-", "--", "---", ":", ",", ",,", "=", "a=b=c"),
    *("é", "\ud800", "\udcff", "a\udcffb", "\u202etxt", "\x1b[31mred", "\x7f", "\x85", "%s%n"),
    *("a" * 300, "a" * 100_000, "é" * 200, "a " * 50_000, "${X}", "$(id)", "*", "[", "{}"),
    *("[" * 100_000, "(?:", "(a", "\\", "'", '"', "~", "~nobody-like-this", "node:99999", "[::1"),
]
PATHS = ["/", "/dev/null", "/dev/zero", "/nonexistent/x", "../" * 2000, "/" * 5000, "a/" * 3000]
VALUES = [*NUMBERS, *TEXTS, *PATHS]
SOME = VALUES[::4]
"""For what the same code reads as the command line."""
SHORT = [value for value in SOME if len(value) < 100_000]
"""For each key of a job file; sections of it have long ones, too, over which YAML takes long."""

ALL = pytest.mark.parametrize("turns", [8, pytest.param(1, marks=pytest.mark.trial)])
"""Each flag has so many values by turns, each value so many flags; in a trial, each has all."""

# Beside which the value of a flag is looked at, and not only found to be without effect.
BESIDE = {
    "checkpoint-glob": ["--checkpoint-dir=saves"],
    "checkpoint-local": ["--checkpoint-dir=saves"],
    "rdzv-conf": [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--rdzv-id=x",
    ],
    "rdzv-endpoint": ["--nnodes=2", "--rdzv-backend=c10d"],
    "node-rank": ["--nnodes=2", "--master-addr=127.0.0.1"],
    "master-port": ["--nnodes=2", "--master-addr=127.0.0.1", "--node-rank=1"],
}


ENDS = (0, 1, 2, 4, 69)
"""Exit codes of commands that look at something."""


def possible(value: str) -> bool:
    """Return whether the system hands such a word to a process."""
    return "\0" not in value and "\ud800" not in value


class Spent(BaseException):
    """The processor time of one command line is used up."""


@contextmanager
def bounded() -> Iterator[None]:
    """End what takes more than CPU_SECONDS of this process's time."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Spent

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(argv: Sequence[str]) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of one command line, with the real encodings."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(
        io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    with redirect_stdout(out), redirect_stderr(err), bounded():
        try:
            code = execute(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    shown = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return code, shown[0], shown[1]


def check(argv: Sequence[str], codes: Sequence[int] = (0, 2)) -> None:
    """Run a command line; it ends well or with one bounded sentence, never with an exception."""
    tried = " ".join(repr(word[:60]) for word in argv)
    try:
        code, _, err = run(argv)
    except BaseException as problem:
        raise AssertionError(
            f"{tried}: {type(problem).__name__}: {str(problem)[:300]}"
        ) from problem
    assert code in codes, f"{tried}: {code}: {err[:500]}"
    assert len(err) < LONGEST, f"{tried}: {len(err)} characters: {err[:300]}"
    if code:
        assert err.count("rror") >= 1 and not err.startswith("Traceback"), f"{tried}: {err[:500]}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a directory with a script, with a state directory of its own."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in list(os.environ):
        if name.startswith(("ELAUNCH_", "PET_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    return tmp_path


def beside(flag: Flag) -> list[str]:
    """Return the flags that make this one count."""
    return BESIDE.get(flag.name, [])


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_flags(place: Path, flag: Flag, turns: int) -> None:
    """On the command line, joined to the flag."""
    for value in VALUES[FLAGS.index(flag) % turns :: turns]:
        if flag.name == "dry-run":
            continue
        check(["run", "--dry-run", *beside(flag), f"--{flag.name}={value}", "train.py"])


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("flag", [*FLAGS, *VARIABLES], ids=lambda flag: flag.name)
def test_variables(place: Path, monkeypatch: pytest.MonkeyPatch, flag: Flag, turns: int) -> None:
    """As the environment can hold them: without NUL, bytes that are no text as surrogates."""
    if flag.name in ("dry-run", "file"):
        return
    for name in {*flag.environment[:1], *flag.variables}:
        for value in filter(possible, SOME[len(name) % turns :: turns]):
            monkeypatch.setenv(name, value)
            check(["run", "--dry-run", *beside(flag), "train.py"])
        monkeypatch.delenv(name)


@pytest.mark.slow
@ALL
@pytest.mark.parametrize(
    "key", [flag.name for flag in FLAGS if flag.name not in ("file", "dry-run")]
)
def test_keys_of_a_job_file(place: Path, key: str, turns: int) -> None:
    """As a quoted string, and as YAML reads it."""
    for value in SHORT[len(key) % turns :: turns]:
        text = json.dumps(value)
        (place / "j.yaml").write_text(f"entrypoint: train.py\n{key}: {text}\n")
        check(["run", "--dry-run", "-f", "j.yaml"])
        raw = f"entrypoint: train.py\n{key}: {value}\n".encode("utf-8", "surrogatepass")
        (place / "j.yaml").write_bytes(raw)
        check(["run", "--dry-run", "-f", "j.yaml"])


@pytest.mark.slow
@ALL
@pytest.mark.parametrize(
    "key", ["entrypoint", "environment", "checkpoint", "resources", "searcher"]
)
def test_sections_of_a_job_file(place: Path, key: str, turns: int) -> None:
    """Of any type, and with any name and value inside."""
    rest = "" if key == "entrypoint" else "entrypoint: train.py\n"
    for value in SOME[len(key) % turns :: turns]:
        text = json.dumps(value)
        for form in (text, f"[{text}]", f"{{A: {text}}}", f"{{{text}: x}}", f"[[{text}]]"):
            (place / "j.yaml").write_text(f"{rest}{key}: {form}\n")
            check(["run", "--dry-run", "-f", "j.yaml"])


SWITCHES = ["", "--module", "--no-python", "--run-path"]


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("switch", SWITCHES)
def test_scripts(place: Path, switch: str, turns: int) -> None:
    """The script, the module and the program; then arguments of a script, which may be anything."""
    values = VALUES[SWITCHES.index(switch) % turns :: turns]
    for value in values:
        check(["run", "--dry-run", *filter(None, [switch]), "--", value])
        check(["run", "--dry-run", *filter(None, [switch]), value])
    for value in filter(possible, values):
        check(["run", "--dry-run", "train.py", value])


@pytest.mark.slow
@ALL
def test_commands(place: Path, turns: int) -> None:
    """Unknown ones, and each with an argument and with an unknown flag."""
    for number, value in enumerate(filter(possible, VALUES)):
        check([value])
        for name in list(COMMANDS)[number % turns :: turns]:
            words = [f"--{value}"] if name in ("run", "wrap") else [value, f"--{value}"]
            for word in words:
                if (name, word) not in (("dashboard", "--"), ("otlp", "--")):  # these go on
                    check([name, word], ENDS)


@pytest.mark.slow
def test_checkpoints(place: Path) -> None:
    """A directory, a URL, a run, a name in it, and a file to write."""
    (place / "saves").mkdir()
    for value in filter(possible, SOME):
        for words in (["ls"], ["verify"], ["show"], ["rm"], ["pin"]):
            check(["checkpoints", *words, value], ENDS)
            check(["checkpoints", *words, "saves", value], ENDS)
        check(["checkpoints", "export", "saves", "latest", value], ENDS)
        check(["checkpoints", "import", value, "saves"], ENDS)


WRAP = "rank-env master-addr master-port role shutdown-timeout log-dir redirects tee".split()


@pytest.mark.parametrize("flag", WRAP)
def test_flags_of_wrap(place: Path, flag: str) -> None:
    """Without a command, so that nothing starts."""
    for value in filter(possible, SOME):
        check(["wrap", f"--{flag}={value}"], (2,))


STORE = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1"]


@pytest.mark.parametrize(
    "flag",
    ["rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "rdzv-secret-file", "interval"],
)
def test_flags_of_status(place: Path, flag: str) -> None:
    """Where the store is; nobody listens there."""
    for value in SOME:
        if flag == "rdzv-endpoint" and value in NUMBERS:
            continue  # a host of this network, perhaps
        line = [word for word in STORE if not word.startswith(f"--{flag}=")]
        check(["status", *line, "--rdzv-conf=timeout=0.01", f"--{flag}={value}"], (0, 2, 69))


CLOSED = [
    ["run", "closed/train.py"],
    ["run", "--no-python", "closed/train.py"],
    ["run", "--log-dir=closed/x", "train.py"],
    ["run", "-C", "closed/x", "train.py"],
    ["run", "--checkpoint-dir=closed/x", "train.py"],
    ["run", "-f", "closed/j.yaml"],
    ["status", "closed/x"],
    ["metrics", "closed/x"],
    ["preempt", "closed/x"],
    ["checkpoints", "ls", "closed/x"],
    ["wrap", "--rank-env=0", "--log-dir=closed/x", "--", "true"],
]


@pytest.mark.slow
def test_a_directory_that_may_not_be_entered(place: Path) -> None:
    """Root enters every directory, so it gives up that right for this."""
    programs.needed("setpriv")
    (place / "closed").mkdir()
    (place / "closed" / "train.py").touch()
    (place / "closed").chmod(0)
    code = f"import sys; from elaunch.cli import execute; print([execute(w) for w in {CLOSED}])"
    rights = "-dac_override,-dac_read_search"
    as_others = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    if os.geteuid() == 0:
        os.chown(place / "closed", 65534, 65534)
    argv = [*(as_others if os.geteuid() == 0 else []), sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    (place / "closed").chmod(0o700)
    assert done.stdout == f"{[2] * len(CLOSED)}\n", done.stderr
    assert done.stderr.count("elaunch: error: ") == len(CLOSED), done.stderr
    for words in CLOSED:
        named = next(word for word in words if "closed" in word).rpartition("=")[2]
        assert f"'{named}'" in done.stderr or f"/{named}" in done.stderr, (words, done.stderr)


DEEP = {"lists": "[", "mappings": "{a: ", "blocks": "- ", "keys": "? ", "anchors": "&a "}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "endless", "directory", "large", "binary", *DEEP])
def test_files_that_are_no_job_file(
    place: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nobody writes into the FIFO, and nobody reads to the end of /dev/zero."""
    monkeypatch.setattr(files, "PIPE_S", 0.5)
    path = place / "j.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind in DEEP:
        path.write_text("entrypoint: " + DEEP[kind] * 100_000)
    elif kind == "directory":
        path.mkdir()
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.write_bytes(bytes(range(256)))
    code, _, err = run(["run", "--dry-run", "-f", "j.yaml"])
    assert (code, "j.yaml" in err) == (2, True), err
