"""The error file of torch's ``@record``: read a worker's, write the launcher's own.

A script whose main function is decorated with ``torch.distributed.elastic…errors.record`` writes
its exception to the file named in ``TORCHELASTIC_ERROR_FILE``. Two shapes are in use::

    {"message": {"message": "ValueError: boom",
                 "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1700000000"}}}
    {"message": "boom", "timestamp": 1700000000}

The file is the worker's, so it may hold anything: :func:`read` never raises, it says what is wrong.

If the launcher itself has the variable in its environment, then what started it (TorchX, or another
launcher) reads that file. It gets the first failed worker's record, as torchrun would write it:
with ``"errorCode"`` added inside ``message`` of the first shape, and the second shape as it is. If
that worker wrote no record, then one of the first shape is made from what the agent knows.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elaunch import env, errorrecord
from elaunch.agent.failure.tracebacks import printable
from elaunch.files import open_regular

MAX_BYTES = 4 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ErrorFile:
    """The content of one worker's error file; ``problem`` is set instead if it cannot be used."""

    path: str
    message: str = ""
    callstack: str = ""
    problem: str = ""
    record: dict[str, Any] = field(default_factory=dict, repr=False)


def read(path: str | None) -> ErrorFile | None:
    """Return what the error file at ``path`` says, or None if the worker wrote none.

    Never raises: for a file that is torn, foreign or no file at all, ``problem`` says so.
    """
    if not path:
        return None
    try:
        content = _content(path)
        record = json.loads(content.decode())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        return _corrupt(path, "it is not UTF-8")
    except json.JSONDecodeError as error:
        return _corrupt(path, f"it is not JSON ({error.msg} at byte {error.pos})")
    except (OSError, ValueError, RecursionError) as error:
        return _corrupt(path, getattr(error, "strerror", None) or str(error))
    return _interpret(path, record)


def write_launcher_file(
    environ: Mapping[str, str],
    exitcode: int,
    source: ErrorFile | None,
    message: str,
    callstack: str,
) -> bool:
    """Write the launcher's own error file from the first failed worker's; True if it was written.

    Does nothing if ``environ`` names no file. A file that cannot be written is a line in the log.

    Args:
        environ: the launcher's environment.
        exitcode: the worker's, negative for a signal.
        source: what the worker wrote; None or a corrupt one if it wrote nothing of use.
        message: one line that says what happened, used without ``source``.
        callstack: the traceback from elsewhere or the report's text, used without ``source``.
    """
    if source is None or source.problem:
        record = errorrecord.contents(message, callstack)
    else:
        record = dict(source.record)
    if isinstance(record["message"], dict):
        record["message"] = {**record["message"], "errorCode": exitcode}
    return _write(environ, record)


def write_launcher_error(environ: Mapping[str, str], error: BaseException) -> bool:
    """Write what ends the launcher itself to its own error file; True if it was written.

    Without the variable in its environment nothing is done.
    """
    return _write(environ, errorrecord.of_error(error))


def _content(path: str) -> bytes:
    """Read a regular file of at most 4 MiB. Raises OSError, or ValueError for anything else."""
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if not content.strip():
        raise ValueError("it is empty")
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return content


def _interpret(path: str, record: Any) -> ErrorFile:
    if not isinstance(record, dict):
        return _corrupt(path, f"it holds a {type(record).__name__}, not an object")
    message = record.get("message")
    if isinstance(message, str):
        return ErrorFile(path, printable(message), record=record)
    if not isinstance(message, dict):
        return _corrupt(path, 'it has no "message" that is a string or an object')
    text, extra = message.get("message"), message.get("extraInfo")
    callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
    if not isinstance(text, str) and not isinstance(callstack, str):
        return _corrupt(path, 'its "message" has neither "message" nor "py_callstack"')
    return ErrorFile(
        path,
        printable(text) if isinstance(text, str) else "",
        printable(callstack) if isinstance(callstack, str) else "",
        record=record,
    )


def _corrupt(path: str, reason: str) -> ErrorFile:
    return ErrorFile(path, problem=f"error file is corrupt: {reason}")


def _write(environ: Mapping[str, str], record: dict[str, Any]) -> bool:
    path = environ.get(env.ERROR_FILE)
    if not path:
        return False
    content = json.dumps(record).encode()
    target = os.path.realpath(path)
    try:
        is_file, exists = os.path.isfile(target), os.path.exists(target)
        if is_file and os.path.getsize(target):
            _log.warning("%s=%s exists and is overwritten", env.ERROR_FILE, path)
        try:
            if is_file or not exists:
                _replace(target, content)
        except OSError:
            # A file that is mounted by itself (Kubernetes' /dev/termination-log) or that lies in a
            # directory of somebody else can be written but not replaced.
            is_file = False
            if not exists:
                raise
        if exists and not is_file:
            # Devices and pipes are written to; O_NONBLOCK since nobody may be reading a pipe.
            flags = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(target, flags), "wb", buffering=0) as file:
                file.write(content)
    except OSError as error:
        _log.warning("%s=%s cannot be written: %s", env.ERROR_FILE, path, error.strerror)
        return False
    return True


def _replace(target: str, content: bytes) -> None:
    """Put ``content`` at ``target`` at once, so that nobody ever reads a part of it."""
    temporary = f"{target}.{os.getpid()}.{time.monotonic_ns()}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, target)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
