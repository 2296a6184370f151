"""The traceback in a dead worker's last lines, and its message, made fit to print.

A block of text is looked for in this order, depending on how the worker ended:

=====================  =======================================================================
it ended by            taken from the tail of its stderr
=====================  =======================================================================
an exit code           the last Python traceback with all exceptions chained to it; one that
                       Python ignored, as in an atexit callback, only where it has no other
a crash signal         from the last traceback or crash dump ("Fatal Python error", "terminate
                       called") to the end, whichever of the two begins first
anything else          the last 20 lines
=====================  =======================================================================

torch puts ``[rank1]:`` before each line of an exception once a process group exists; that is
removed. Nothing is cut silently: :func:`cap` says how many lines it left out and where they are.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

import elaunch
from elaunch.text import block

LAST_LINES = 20
MAX_LINES = 200
KEPT_FIRST = 40
MAX_WIDTH = 2000
CRASHES = frozenset(
    -number
    for number in (
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGSYS,
        signal.SIGTRAP,
    )
)

HEADER = "Traceback (most recent call last):"
HANDLING = "During handling of the above exception, another exception occurred:"
_HEADER = re.compile(r"(?:  \+ Exception Group )?" + re.escape(HEADER))
_IGNORED = re.compile(r"Exception ignored |Error in atexit\.")
"""The line before an exception that does not end the process."""
_CRASH = re.compile(r"Fatal Python error: |terminate called ")
_WHAT = re.compile(r"\s*what\(\):\s*(?:\[PG [^\]]*\] )?(?P<text>.*\S)")
"""The text of C++'s exception, in the line after "terminate called"; before NCCL's its group."""
_RANK = re.compile(r"\[rank\d+\]: ?")
_LOG_LINE = re.compile(r"\[(?:rank\d+\]:\[)?[WIEF]\d{0,4} |[WIEF]\d{4} \d\d:\d\d:\d\d")
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    HANDLING,
)
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SOURCE = re.compile(r"    |  \|     ")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")
_FRAME = re.compile(
    r'\s*(?:\| +)?File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?$'
)
_INSTALLED = re.compile(
    r"<|.*/(?:site-packages|dist-packages|lib/python\d\.\d+)/"
    rf"|{re.escape(os.path.dirname(elaunch.__file__))}/(?!examples/)"
)
"""Files that are not the user's: of packages, of Python, and code without a file."""


def printable(text: str) -> str:
    """Return ``text`` without terminal escapes, control characters and lone surrogates.

    What else does not print (C1 controls, marks of direction) is written out (elaunch.text).
    Of a progress bar, drawn over itself with carriage returns, the last state is kept.
    """
    text = _ESCAPE.sub("", text).encode("utf-8", "replace").decode()
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return block("\n".join(_CONTROL.sub("", line) for line in lines))


def pick(tail: Sequence[str], exitcode: int) -> tuple[str, ...]:
    """Return the lines of ``tail`` that show why a worker ended.

    Args:
        tail: the last lines of its stderr, oldest first.
        exitcode: as subprocess gives it, negative for a signal.
    """
    lines = [printable(line.rstrip("\n")) for line in tail]
    bare = [_RANK.sub("", line, count=1) if _RANK.match(line) else line for line in lines]
    if exitcode > 0:
        block = _last_traceback(lines, bare)
    elif exitcode in CRASHES:
        found = ([n for n, line in enumerate(bare) if it.match(line)] for it in (_HEADER, _CRASH))
        starts = [numbers[-1] for numbers in found if numbers]
        block = bare[min(starts) :] if starts else []
    else:
        block = []
    block = block or bare[-LAST_LINES:]
    kept = [number for number, line in enumerate(block) if line.strip()]
    return tuple(block[kept[0] : kept[-1] + 1] if kept else ())


def message_of(block: Sequence[str]) -> str:
    """Return the line of a traceback that names its exception, or ``""`` if there is none.

    Of a crash it is the text of C++'s exception, or the line that begins the dump.
    """
    headers = [number for number, line in enumerate(block) if _HEADER.match(line)]
    if not headers:
        crash = next((number for number, line in enumerate(block) if _CRASH.match(line)), None)
        if crash is None:
            return ""
        what = _WHAT.match(block[crash + 1]) if crash + 1 < len(block) else None
        return what["text"] if what else block[crash]
    found = ""
    in_frames = True
    margin = "" if block[headers[-1]].startswith(HEADER) else "  | "
    for line in (each.removeprefix(margin) for each in block[headers[-1] + 1 :]):
        if line.startswith("  "):
            in_frames = in_frames or line.startswith('  File "')
        elif in_frames and _EXCEPTION.match(line):
            found, in_frames = line, False
    return found


def place_of(block: Sequence[str]) -> str:
    """Return "train.py:31 in step", where a traceback's last exception left the user's own code.

    That is the innermost frame outside installed packages; "" where there is none.
    """
    last = max((n for n, line in enumerate(block) if HEADER in line), default=0)
    frames = (frame for line in block[last:] if (frame := _FRAME.match(line)))
    own = [frame for frame in frames if not _INSTALLED.match(frame["path"])]
    if not own:
        return ""
    name = own[-1]["name"]
    inside = f" in {name}" if name and name != "<module>" else ""
    return f"{own[-1]['path'].rpartition('/')[2]}:{own[-1]['line']}{inside}"


def without_source(block: Sequence[str]) -> Sequence[str]:
    """Return a traceback without its lines of source, which may say anything."""
    if not any(HEADER in line for line in block):
        return block
    return [line for line in block if not _SOURCE.match(line)]


def cap(lines: Sequence[str], source: str) -> tuple[str, ...]:
    """Return at most 200 of ``lines``, none over 2,000 characters, saying what is left out.

    Args:
        lines: a traceback; its beginning and its end are kept.
        source: the file that has all of it, for the notice.
    """
    rest = f" … the rest is left out, see {source}"
    fit = [line if len(line) <= MAX_WIDTH else line[:MAX_WIDTH] + rest for line in lines]
    if len(fit) <= MAX_LINES:
        return tuple(fit)
    kept_last = MAX_LINES - KEPT_FIRST - 1
    left_out = len(fit) - KEPT_FIRST - kept_last
    notice = f"… {left_out} lines left out, see {source}"
    return (*fit[:KEPT_FIRST], notice, *fit[-kept_last:])


def _last_traceback(lines: Sequence[str], bare: Sequence[str]) -> Sequence[str]:
    """Return the last traceback that is not ignored, with the ones chained before it."""
    headers = [number for number, line in enumerate(bare) if _HEADER.match(line)]
    found: Sequence[str] = []
    limit = len(bare)
    while headers:
        start = headers.pop()
        end = min(_end(lines, bare, start), limit)
        while headers and _before(bare, start) in _CHAINED:
            start = headers.pop()
        if not (start and _IGNORED.match(bare[start - 1])):
            return bare[start:end]
        found, limit = found or bare[start:end], start - 1
    return found


def _end(lines: Sequence[str], bare: Sequence[str], start: int) -> int:
    """Return the number of the first line after the traceback that begins at ``start``."""
    prefix = _RANK.match(lines[start])
    for number in range(start + 1, len(lines)):
        if prefix and not lines[number].startswith(prefix.group().rstrip()):
            return number
        if _LOG_LINE.match(lines[number]):
            return number
    return len(bare)


def _before(bare: Sequence[str], start: int) -> str:
    """Return the line before, of those with text."""
    return next((line.strip() for line in reversed(bare[:start]) if line.strip()), "")
