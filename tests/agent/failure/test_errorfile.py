"""torch's error file, from the worker's side and from the launcher's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.agent.failure import errorfile
from tests import programs, warm

NAME = "TORCHELASTIC_ERROR_FILE"
NESTED = {
    "message": {
        "message": "ValueError: boom",
        "extraInfo": {"py_callstack": "Traceback …\nValueError: boom\n", "timestamp": "1700000000"},
    }
}


def write(path: Path, content: object) -> str:
    """Write bytes, text or JSON and return the path."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def read(path: Path, content: object) -> errorfile.ErrorFile:
    """Read back what was written; it must be there."""
    found = errorfile.read(write(path, content))
    assert found is not None
    return found


def test_both_shapes(tmp_path: Path) -> None:
    """torch accepts two."""
    nested = read(tmp_path / "a", NESTED)
    assert (nested.message, nested.problem) == ("ValueError: boom", "")
    assert nested.callstack == "Traceback …\nValueError: boom\n"
    flat = read(tmp_path / "b", {"message": "boom", "timestamp": 1700000000})
    assert (flat.message, flat.callstack) == ("boom", "")


@pytest.mark.parametrize("path", [None, "", "/nonexistent/error.json", "/dev/null/error.json"])
def test_no_file_is_no_problem(path: str | None) -> None:
    """Most scripts have no @record."""
    assert errorfile.read(path) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"message": {"mess', "it is not JSON (Unterminated string starting at at byte 13)"),
        (b"\xff\xfe{}", "it is not UTF-8"),
        (b"\x00" * 100, "it is not JSON (Expecting value at byte 0)"),
        (b"[1]", "it holds a list, not an object"),
        (b"null", "it holds a NoneType, not an object"),
        (b"{}", 'it has no "message" that is a string or an object'),
        (b'{"message": 7}', 'it has no "message" that is a string or an object'),
        (b'{"message": {}}', 'its "message" has neither "message" nor "py_callstack"'),
        (b'{"message": {"message": []}}', 'its "message" has neither'),
        (b"[" * 200_000, "while decoding a JSON array"),
        (b'{"message": "' + b"x" * (4 << 20) + b'"}', "it is larger than 4 MiB"),
    ],
)
def test_a_corrupt_file_gives_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    """Never an exception: torchrun ends with one here, restarts left or not."""
    problem = read(tmp_path / "error.json", content).problem
    assert problem.startswith("error file is corrupt: ")
    assert reason in problem


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    """A directory, a pipe without writer (which must not block), an unreadable file."""
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path, "a directory"), (tmp_path / "pipe", "not a regular file")):
        found = errorfile.read(str(path))
        assert found is not None and found.problem == f"error file is corrupt: it is {reason}"


def test_wrong_types_around_a_good_message(tmp_path: Path) -> None:
    """What can be used is used."""
    found = read(tmp_path / "a", {"message": {"message": "m", "extraInfo": "none"}})
    assert (found.message, found.callstack, found.problem) == ("m", "", "")
    found = read(tmp_path / "b", {"message": {"extraInfo": {"py_callstack": "T\x1b[1m\ud800"}}})
    assert (found.message, found.callstack) == ("", "T?")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["message", "extraInfo", "py_callstack", "timestamp", "x"]), inner
        )
    ),
)


@pytest.mark.slow
@given(record=JSON)
def test_any_json(tmp_path_factory: pytest.TempPathFactory, record: object) -> None:
    """Any JSON is a record or corrupt, and what comes out can be encoded."""
    found = read(tmp_path_factory.getbasetemp() / f"any-{os.getpid()}.json", record)
    assert found.problem or found.message or found.callstack or found.record
    f"{found.message}{found.callstack}{found.problem}".encode()


RECORD = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("boom of %s" % sys.argv[1])
main()
"""

DUMP = """
import sys
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
ErrorHandler().dump_error_file(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.slow
def test_round_trip_with_torch(tmp_path: Path) -> None:
    """Read what @record writes, and write for the launcher what torch would."""
    source, ours, theirs = (str(tmp_path / name) for name in ("worker", "ours", "theirs"))
    script = [sys.executable, "-c", RECORD, "rank 1"]
    done = warm.run(script, os.environ | {NAME: source})
    assert done.returncode == 1

    found = errorfile.read(source)
    assert found is not None and found.problem == ""
    assert found.message == "ValueError: boom of rank 1"
    assert found.callstack.startswith("Traceback (most recent call last):\n")
    assert found.callstack.endswith("ValueError: boom of rank 1\n")

    dump = [sys.executable, "-c", DUMP, source, "-9"]
    assert warm.run(dump, os.environ | {NAME: theirs}).returncode == 0
    assert errorfile.write_launcher_file({NAME: ours}, -9, found, "", "")
    assert json.loads(Path(ours).read_text()) == json.loads(Path(theirs).read_text())
    assert json.loads(Path(ours).read_text())["message"]["errorCode"] == -9


def test_flat_record_is_copied_as_it_is(tmp_path: Path) -> None:
    """torch adds no code to the second shape."""
    record = {"message": "boom", "timestamp": 5, "more": [1]}
    target = tmp_path / "mine"
    found = read(tmp_path / "worker", record)
    assert errorfile.write_launcher_file({NAME: str(target)}, 3, found, "", "")
    assert json.loads(target.read_text()) == record


@pytest.mark.parametrize("content", [None, b"{torn"])
def test_a_record_is_made_where_there_is_none(tmp_path: Path, content: bytes | None) -> None:
    """So that what reads it learns something also of SIGKILL."""
    source = None if content is None else read(tmp_path / "worker", content)
    target = tmp_path / "mine"
    environ = {NAME: str(target)}
    assert errorfile.write_launcher_file(environ, -9, source, "rank 0 was killed", "the text")
    message = json.loads(target.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("rank 0 was killed", -9)
    assert message["extraInfo"]["py_callstack"] == "the text"
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60


def test_errors_of_the_launcher(tmp_path: Path) -> None:
    """In the shape that @record gives to its function's own exception."""
    target = tmp_path / "mine"
    try:
        raise ValueError("no port")
    except ValueError as error:
        assert errorfile.write_launcher_error({NAME: str(target)}, error)
    message = json.loads(target.read_text())["message"]
    assert message["message"] == "ValueError: no port" and "errorCode" not in message
    assert "test_errors_of_the_launcher" in message["extraInfo"]["py_callstack"]


def test_without_the_variable_nothing_is_written() -> None:
    """Neither unset nor empty."""
    assert not errorfile.write_launcher_file({}, 1, None, "m", "")
    assert not errorfile.write_launcher_error({NAME: ""}, ValueError())


def test_existing_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Replaced whole, also behind a link; nothing is left beside; devices stay devices."""
    target, link = tmp_path / "mine", tmp_path / "link"
    target.write_text("x" * 10_000)
    link.symlink_to(target)
    assert errorfile.write_launcher_file({NAME: str(link)}, 1, None, "m", "")
    assert json.loads(target.read_text())["message"]["message"] == "m"
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "mine"]
    assert "exists and is overwritten" in caplog.text
    assert errorfile.write_launcher_file({NAME: "/dev/null"}, 1, None, "m", "")
    assert Path("/dev/null").is_char_device()


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log; the failure's exit code must not be lost over it."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "no" / "such" / "file", tmp_path, tmp_path / "pipe"):
        assert not errorfile.write_launcher_file({NAME: str(path)}, 1, None, "m", "")
        assert f"{path} cannot be written" in caplog.text


def test_a_file_that_is_mounted_by_itself(tmp_path: Path) -> None:
    """Kubernetes' /dev/termination-log: it cannot be replaced, only written."""
    (tmp_path / "mounted").touch()
    target = tmp_path / "termination-log"
    target.touch()
    code = (
        "import os, sys\nfrom elaunch.agent.failure import errorfile\n"
        "assert errorfile.write_launcher_file(os.environ, 1, None, 'm', '')\n"
    )
    mounted = [
        *("unshare", "--mount", "--map-root-user", "sh", "-c"),
        'mount --bind "$1" "$2" && exec "$3" -c "$4"',
        *("sh", str(tmp_path / "mounted"), str(target), sys.executable, code),
    ]
    tried = subprocess.run([*mounted[:-1], "pass"], capture_output=True)
    programs.allowed("no mount namespaces here" if tried.returncode else None)
    done = subprocess.run(mounted, env=os.environ | {NAME: str(target)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "mounted").read_text())["message"]["message"] == "m"
    assert sorted(os.listdir(tmp_path)) == ["mounted", "termination-log"]
