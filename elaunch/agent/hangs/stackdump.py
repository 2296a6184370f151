"""Stacks as faulthandler and py-spy write them, taken apart; equal ones are put together. Pure.

::

    Thread 0x00007f3a5d7fa6c0 (most recent call first):
      File "/usr/lib/python3.11/threading.py", line 324 in wait
    …
    Current thread 0x00007f3a7a0c1740 (most recent call first):
      File "train.py", line 12 in step
      File "train.py", line 40 in <module>

faulthandler writes the oldest thread last, which is the main thread; py-spy names it. elaunch's own
frames below a script and its own threads are left out: they show nothing of the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct, structs

MOST_FRAMES: Final = 100
MOST_THREADS: Final = 8
"""Stacks of other threads that a group shows."""

Stack = tuple[str, ...]

_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_BOTTOM: Final = re.compile(r'  File "(.*)", line \d+ in <module>$')
_SPIED_THREAD: Final = re.compile(r"Thread (?:0x)?[0-9A-Fa-f]+ \(.*\)(?:: \"(?P<name>.*)\")?$")
_SPIED_FRAME: Final = re.compile(r"    (?P<name>\S.*) \((?P<file>.+?)(?::(?P<line>\d+))?\)$")
_SPIED_VALUE: Final = re.compile(r"            (?P<value>\S.*)$")
_OWN_THREADS: Final = tuple(
    f"/elaunch/{place}"
    for place in (
        "atonce.py",
        *("checkpoint/", "rendezvous/", "server/", "store/", "training/", "wire/"),
    )
)
_NATIVE: Final = "<no Python frame>"
_WAITS: Final = ("/selectors.py", "/threading.py", "/socket.py")
_SCRIPT_API: Final = "/elaunch/training/"
_SERVER: Final = "/elaunch/server/"
_TORCHS: Final = "/torch/distributed/distributed_c10d.py"
_CONNECTING: Final = (
    *("isend", "irecv", "barrier", "all_reduce", "broadcast", "reduce", "gather", "scatter"),
    *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single"),
)
_UNRECORDED: Final = {
    **{name: name for name in ("send", "recv", "recv_object_list", "monitored_barrier")},
    **{name: name for name in _CONNECTING},
    "_new_process_group_helper": "new_group",
    "_store_based_barrier": "new_group",
}
"""Functions of torch in which a rank waits for another and is not recorded, with what a script
calls. A collective is not before NCCL has connected the ranks for it."""
_WAIT: Final = ".wait("
"""At such a line a newest frame is in the ``wait`` of a Work, a store or a Future of torch's: other
waits have a frame of their own."""


class Dump(Struct, frozen=True):
    """The stacks of one process, most recent call first; ``threads`` are the other threads'.

    ``values`` are the main thread's variables, by frame, where they were asked for.
    """

    main: Stack
    threads: tuple[Stack, ...] = ()
    values: tuple[tuple[str, Stack], ...] = ()


class StackGroup(Struct, frozen=True):
    """Ranks whose main threads are at the same place; other threads, with whose they are.

    ``values`` are the variables of the lowest rank, by frame, where they were asked for.
    """

    ranks: tuple[int, ...]
    main: Stack
    threads: tuple[tuple[tuple[int, ...], Stack], ...] = ()
    values: tuple[tuple[str, Stack], ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON-able data, without the variables."""
        threads = [{"ranks": list(own), "stack": list(stack)} for own, stack in self.threads]
        return {"ranks": list(self.ranks), "main": list(self.main), "threads": threads}


def is_whole(text: str) -> bool:
    """Whether a dump of faulthandler has come to its end, as far as can be seen."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and _BOTTOM.match(last) is not None


def parse(text: str) -> Dump | None:
    """Return what faulthandler wrote; None if there is no thread in it."""
    stacks: list[list[str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and line.startswith("  "):
            stacks[-1].append(line.strip())
    stacks = [stack for stack in stacks if stack != [_NATIVE]]
    if not stacks:
        return None
    *others, main = (_cut(stack) for stack in stacks)
    return _dump(main, others)


def parse_spied(text: str) -> Dump | None:
    """Return what ``py-spy dump`` wrote, in the same form; None if there is no thread in it."""
    stacks: list[tuple[str, list[str]]] = []
    values: dict[tuple[int, str], list[str]] = {}
    for line in text.splitlines():
        thread, frame = _SPIED_THREAD.match(line), _SPIED_FRAME.match(line)
        if thread:
            stacks.append((thread["name"] or "", []))
        elif frame and stacks:
            number = "" if frame["line"] is None else f", line {frame['line']}"
            stacks[-1][1].append(f'File "{frame["file"]}"{number} in {frame["name"]}')
        elif stacks and stacks[-1][1] and (found := _SPIED_VALUE.match(line)):
            values.setdefault((len(stacks), stacks[-1][1][-1]), []).append(found["value"])
    if not stacks:
        return None
    main = next((one for one in stacks if one[0] == "MainThread"), stacks[0])
    others = [_cut(stack) for one in stacks if one is not main for stack in [one[1]]]
    of_main = stacks.index(main) + 1
    shown = {frame: tuple(lines) for (at, frame), lines in values.items() if at == of_main}
    return structs.replace(_dump(_cut(main[1]), others), values=tuple(shown.items()))


def group(dumps: Mapping[int, Dump]) -> tuple[StackGroup, ...]:
    """Return the ranks by their main threads' stacks, the odd ones first.

    That is the smallest group; of some of one size, one that is in no collective.
    """
    by_main: dict[Stack, list[int]] = {}
    for rank in sorted(dumps):
        by_main.setdefault(dumps[rank].main, []).append(rank)
    groups = [
        StackGroup(tuple(ranks), main, _threads(ranks, dumps), dumps[ranks[0]].values)
        for main, ranks in by_main.items()
    ]
    return tuple(sorted(groups, key=lambda one: (len(one.ranks), _waits(one.main), one.ranks)))


def _waits(stack: Stack) -> bool:
    """Return whether a stack is in a call by which ranks wait for each other."""
    return any(f'{_TORCHS}"' in frame for frame in stack)


def joined(groups: Iterable[StackGroup]) -> tuple[StackGroup, ...]:
    """Return the groups of several nodes as one's, as :func:`group` does of its ranks."""
    dumps: dict[int, Dump] = {}
    for one in sorted(groups, key=lambda one: one.ranks):
        for rank in one.ranks:
            own = tuple(stack for ranks, stack in one.threads if rank in ranks)
            dumps[rank] = Dump(one.main, own, one.values)
    return group(dumps)


def _threads(
    ranks: Sequence[int], dumps: Mapping[int, Dump]
) -> tuple[tuple[tuple[int, ...], Stack], ...]:
    found: dict[Stack, list[int]] = {}
    for rank in ranks:
        for stack in dict.fromkeys(dumps[rank].threads):
            found.setdefault(stack, []).append(rank)
    return tuple((tuple(whose), stack) for stack, whose in list(found.items())[:MOST_THREADS])


def _dump(main: Stack, others: Sequence[Stack]) -> Dump:
    shown = (_without(stack, "/threading.py") for stack in others if stack and not _is_own(stack))
    return Dump(_without_inner(_without(main, _SERVER)), tuple(shown))


def _without_inner(stack: Stack) -> Stack:
    """Of a call of the script API leave what the script has called: how it waits is elaunch's."""
    inner = 0
    while inner < len(stack) and _file(stack[inner]).endswith(_WAITS):
        inner += 1
    if inner == len(stack) or _SCRIPT_API not in _file(stack[inner]):
        return stack  # the script's own code, perhaps called by ours
    while inner + 1 < len(stack) and _SCRIPT_API in _file(stack[inner + 1]):
        inner += 1
    return stack[inner:]


def _cut(stack: Sequence[str]) -> Stack:
    if len(stack) <= MOST_FRAMES:
        return tuple(stack)
    half = MOST_FRAMES // 2
    left_out = f"… {len(stack) - 2 * half} frames left out"
    return (*stack[:half], left_out, *stack[-half:])


def _without(stack: Stack, place: str) -> Stack:
    """Take off the frames at the bottom that are elaunch's server's, or those of a thread."""
    while len(stack) > 1 and place in _file(stack[-1]):
        stack = stack[:-1]
    return stack


def _is_own(stack: Stack) -> bool:
    """Whether a thread is one of elaunch's: what it runs, right above threading's own frames."""
    outermost = next((f for f in reversed(stack) if not _file(f).endswith("/threading.py")), "")
    return any(place in _file(outermost) for place in _OWN_THREADS)


def _file(frame: str) -> str:
    found = _FRAME.match(f"  {frame}")
    return found["file"] if found else ""


def wait_in(dump: Dump, line_of: Callable[[str, int], str]) -> str:
    """Return in which function a process waits for another rank by its stack, or "".

    ``line_of`` returns a line of a source by file and number.
    """
    frame = _FRAME.fullmatch(f"  {dump.main[0]}") if dump.main else None
    if frame is None or not frame["line"].isdigit():
        return ""
    if frame["file"].endswith(_TORCHS) and frame["name"] in _UNRECORDED:
        return _UNRECORDED[frame["name"]]
    return "wait()" if _WAIT in line_of(frame["file"], int(frame["line"])) else ""
