"""The log pump with real processes at one end and pipes, terminals and full disks at the other."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.logs import pump as logs
from elaunch.agent.logs import streams
from elaunch.agent.logs.files import KEPT_LINE, LogFile
from elaunch.agent.logs.pump import CONSOLE_PATIENCE, LogPlan, LogPump
from elaunch.runs.logtree import parse_arrivals
from tests import programs
from tests.agent.logrig import SECONDS, Reader, Rig, both, eventually, worker, written

WRITE_ALL = """
def put(fd, data):
    while data:
        data = data[os.write(fd, data):]
"""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs that log under the test's directory, and close them."""
    rigs: list[Rig] = []

    def make(*, merged: bool = False, begin: bool = True, **plan: object) -> Rig:
        plan.setdefault("log_root", tmp_path)
        rigs.append(Rig(LogPlan(**plan), merged=merged, begin=begin))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for made in rigs:
        if made.pump._thread.is_alive():
            made.close()


def open_fds() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def close_all(fds: tuple[int, ...]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def test_bytes_arrive_as_they_were_written(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Invalid UTF-8, NUL, and a character cut at the end of a read stop nothing."""
    data = b"\xff\xfe stray\n" + b"a" * 65535 + "é".encode() + b"\n\x00\r\nlast \xc3"
    code = f"{WRITE_ALL}\ndata = {data!r}\nput(1, data); put(2, data)"
    one = rig()
    one.run({0: code, 1: code})
    one.close()
    assert written(tmp_path, 0) == written(tmp_path, 1) == data
    assert written(tmp_path, 1, "stderr") == data
    for console in (one.out, one.err):
        assert sorted(console.data.split(b"\n")) == sorted(data.split(b"\n") * 2)
    assert one.pump.tail(0, 20) == [
        "\ufffd\ufffd stray",
        "a" * KEPT_LINE,
        "\0",
        "last \ufffd",
    ]


def test_a_worker_that_goes_on_writes_into_the_next_round(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    """The end of the others is waited for; what was quoted of it stays known.

    One that was to go on, and ends as the round begins, is none of its streams.
    """
    made = rig()
    go = tmp_path / "go"
    late = f"""
import sys, time
sys.stdout.write('one '); sys.stdout.flush(); sys.stderr.write('old\\n'); sys.stderr.flush()
while not os.path.exists({str(go)!r}): time.sleep(0.01)
print('two'); sys.stderr.write('new\\n')
"""
    made.start({0: late, 1: "print('gone')", 2: "sys.stderr.write('last\\n')"})
    first, gone, dies = made.workers
    assert gone.wait(SECONDS) == dies.wait(SECONDS) == 0
    eventually(lambda: made.pump.tail(0, 5) == ["old"])
    assert made.pump.finish_round(SECONDS, {0, 2})
    assert written(tmp_path, 1) == b"gone\n"
    ends = made.pump.open_round(1, {0: 10, 1: 11, 2: 12}, {0, 2})
    eventually(lambda: made.pump.tail(2, 5) == ["last"])
    assert ends.keys() == {1}
    again = worker("print('again')", ends[1])
    eventually(lambda: (tmp_path / "attempt_1" / "1" / "stdout.log").exists())
    eventually(lambda: written(tmp_path, 1, round=1) == b"again\n")
    go.touch()
    assert first.wait(SECONDS) == again.wait(SECONDS) == 0
    assert made.pump.finish_round(SECONDS)
    assert made.pump.tail(0, 5) == ["old", "new"]
    made.close()
    assert (written(tmp_path, 0), written(tmp_path, 0, round=1)) == (b"one ", b"two\n")
    assert b"two\n" in made.out.data and b"one " in made.out.data
    assert written(tmp_path, 0, "stderr", 1) == b"new\n"


@pytest.mark.slow
def test_arrivals_are_noted_of_each_file_now_and_then(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    """With the size before it; not of each write, and on from where a round goes on."""
    code = "import os, time\nfor i in range(40): os.write(1, b'abc\\n'); time.sleep(0.02)"
    made, before = rig(), time.time()
    made.run({0: code, 1: "print('once')"})
    lasted = time.time() - before
    made.run({1: "print('again')"})
    found, _ = parse_arrivals((tmp_path / "attempt_0" / "arrivals").read_bytes())
    by_rank = {rank: [one for one in found if one.local_rank == rank] for rank in (0, 1)}
    assert [one.size for one in by_rank[1]] == [0, 5] and by_rank[1][0].stream == "stdout"
    sizes = [one.size for one in by_rank[0]]
    assert sizes[0] == 0 and sizes == sorted(sizes) and 2 <= len(sizes) <= 2 + lasted / 0.1
    assert all(before - 1 <= one.at <= time.time() for one in found)


@pytest.mark.slow
def test_lines_of_a_megabyte_stay_whole(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Four workers write them at once to one console, in odd pieces and on both streams."""
    code = f"""{WRITE_ALL}
for line in range(6):
    data = (b"%d" % RANK) * 1_000_000 + b"\\n"
    fd = 1 + line % 2
    for start in range(0, len(data), 77_777):
        put(fd, data[start:start + 77_777])
"""
    one = rig(merged=True)
    one.run({rank: code.replace("RANK", str(rank)) for rank in range(4)})
    one.close()
    lines = one.out.data.split(b"\n")
    assert lines.pop() == b""
    assert sorted(lines) == sorted(b"%d" % rank * 1_000_000 for rank in range(4) for _ in range(6))
    for rank in range(4):
        assert written(tmp_path, rank) == (b"%d" % rank * 1_000_000 + b"\n") * 3


def test_progress_bars_of_several_ranks_share_no_line(rig: Callable[..., Rig]) -> None:
    """Each line of the console, up to its newline, has the bytes of one rank only."""
    code = """
for step in range(300):
    os.write(2, b"\\rRANK: step %d" % step)
    if step % 50 == 0:
        os.write(2, b"\\rRANK is at %d\\n" % step)
os.write(2, b"\\n")
"""
    one = rig()
    one.run({rank: code.replace("RANK", "abcd"[rank] * 3) for rank in range(4)})
    one.close()
    for line in one.err.data.split(b"\n"):
        assert len({rank for rank in (b"aaa", b"bbb", b"ccc", b"ddd") if rank in line}) <= 1
    assert one.err.data.count(b"step") == 1200
    assert one.pump.tail(0, 20) == [*(f"aaa is at {n}" for n in range(0, 300, 50)), "aaa: step 299"]


def test_crlf_is_one_line_end(rig: Callable[..., Rig]) -> None:
    """Also when it is written in two pieces."""
    one = rig(tee=both(3))
    one.run({0: "os.write(1, b'a\\r'); os.write(1, b'\\nb\\r\\nc')", 1: ""})
    one.close()
    assert one.out.data == b"[default0]:a\r\n[default0]:b\r\n[default0]:c"


def test_a_prompt_is_shown_and_what_follows_is_whole(rig: Callable[..., Rig]) -> None:
    """An unfinished line appears after a moment; another rank's line starts a new one."""
    one = rig()
    ends = one.pump.open_round(0, {0: 0, 1: 1})
    os.write(ends[0][0], b"ready? ")
    one.out.wait_for(b"ready? ")
    assert worker("print('other')", ends[1]).wait(SECONDS) == 0
    one.out.wait_for(b"other\n")
    os.write(ends[0][0], b"\nyes\n")
    one.pump.show("elaunch: all is well")
    close_all(ends[0])
    assert one.pump.finish_round(SECONDS)
    one.close()
    assert one.out.data == b"ready? \nother\nyes\n"
    assert one.err.data == b"elaunch: all is well\n"


def test_the_agent_cuts_no_line_in_two(rig: Callable[..., Rig]) -> None:
    """Its own lines begin after a newline, and what the worker goes on with does too."""
    one = rig(merged=True)
    ends = one.pump.open_round(0, {0: 0})
    os.write(ends[0][0], b"epoch 1 ...")
    one.out.wait_for(b"...")
    one.pump.show("elaunch: stopping")
    one.out.wait_for(b"stopping\n")
    os.write(ends[0][0], b" done\n")
    close_all(ends[0])
    assert one.pump.finish_round(SECONDS)
    one.close()
    one.pump.show("elaunch: too late for the pump")
    assert one.out.data == b"epoch 1 ...\nelaunch: stopping\n done\n"


@pytest.mark.slow
def test_a_writer_that_never_ends_a_line(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """More than is held goes to the console in pieces; the others are not mixed into it."""
    code = f"{WRITE_ALL}\nfor _ in range(20): put(1, b'x' * 1_000_000)"
    one = rig()
    one.run({0: code, 1: "for n in range(50): print('line', n, flush=True)"})
    one.close()
    assert len(written(tmp_path, 0)) == 20_000_000
    assert one.out.data.count(b"x") == 20_000_000
    assert set(bytes(one.out.data).replace(b"x", b"").split(b"\n")) == {
        b"",
        *(b"line %d" % n for n in range(50)),
    }


def test_one_worker_is_shown_at_once(rig: Callable[..., Rig]) -> None:
    """The only worker on the console has it to itself: nothing is held."""
    one = rig(console_ranks=frozenset({1}))
    ends = one.pump.open_round(0, {0: 0, 1: 1})
    os.write(ends[1][0], b"10%")
    one.out.wait_for(b"10%")
    assert one.pump._timeout() is None
    os.write(ends[1][1], b"warning\n")
    one.err.wait_for(b"warning\n")
    close_all(ends[0] + ends[1])
    assert one.pump.finish_round(SECONDS)


def test_where_each_mode_sends_a_stream(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """-r is the file only, -t adds the prefix and wins over -r, a filtered rank is in its files."""
    one = rig(
        redirects=lambda rank: {0: 1, 1: 3}.get(rank, 0),
        tee=lambda rank: 3 if rank == 1 else 0,
        console_ranks=frozenset({0, 1, 2}),
        role="trainer",
    )
    one.run({rank: f"print('o{rank}'); print('e{rank}', file=sys.stderr)" for rank in range(4)})
    one.close()
    assert sorted(one.out.data.split()) == [b"[trainer1]:o1", b"o2"]
    assert sorted(one.err.data.split()) == [b"[trainer1]:e1", b"e0", b"e2"]
    for rank in range(4):
        assert written(tmp_path, rank) == b"o%d\n" % rank
        assert written(tmp_path, rank, "stderr") == b"e%d\n" % rank
        assert (tmp_path / "attempt_0" / str(rank)).stat().st_mode & 0o777 == 0o700
    assert one.pump.paths(3)[1] == tmp_path / "attempt_0" / "3" / "stderr.log"
    assert one.pump.paths(4) == (None, None)


def test_the_prefix_of_an_empty_role(rig: Callable[..., Rig]) -> None:
    """TorchX gives one; the prefix is torchrun's."""
    one = rig(tee=both(1), role="")
    one.run({0: "print('line')", 1: ""})
    one.close()
    assert one.out.data == b"[0]:line\n"


def test_the_prefix_stands_before_each_line_and_bar(rig: Callable[..., Rig]) -> None:
    """The template knows role, local and global rank, and leaves what it does not know."""
    template = "[${role_name} ${local_rank}/${rank} ${host}] "
    one = rig(tee=both(1), prefix_template=template, role="r")
    one.run({0: "os.write(1, b'\\r 1%\\r 2%\\n\\nend')", 1: ""})
    one.close()
    at = b"[r 0/10 ${host}] "
    assert one.out.data == b"\r%b 1%%\r%b 2%%\n%b\n%bend" % (at, at, at, at)


def test_filtered_files(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Lines of the tee'd ranks that match; of all ranks where none is tee'd."""
    code = "os.write(1, b'loss 1\\nno\\r\\xffacc 2\\rloss 3'); os.write(2, b'error: 7\\n')"
    one = rig(
        tee=lambda rank: 1 if rank == 0 else 0,
        stdout_filters=("loss", "acc"),
        stderr_filters=("error",),
        redirects=both(3),
    )
    one.run({0: code, 1: code})
    base = tmp_path / "attempt_0"
    assert (base / "filtered_stdout.log").read_bytes() == (
        b"[default0]:loss 1\n[default0]:\xffacc 2\n[default0]:loss 3\n"
    )
    lines = (base / "filtered_stderr.log").read_bytes().splitlines()
    assert sorted(lines) == [b"[default0]:error: 7", b"[default1]:error: 7"]


def test_without_files_the_rest_is_dropped_and_that_is_said(rig: Callable[..., Rig]) -> None:
    """Workers of ranks that are not shown do not hang; each notice comes once."""
    one = rig(log_root=None, console_ranks=frozenset({0}), redirects=both(1), stdout_filters=("x",))
    code = f"{WRITE_ALL}\nput(1, b'RANK' * 500_000)"
    for round in range(2):
        one.run({rank: code.replace("RANK", str(rank)) for rank in range(2)}, round)
    assert one.pump.paths(0) == (None, None)
    one.close()
    assert one.out.data == b"0" * 500_000 + b"\n" + b"0" * 500_000
    assert one.err.data.count(b"elaunch: without log files") == 3
    assert one.err.data.count(b"\n") == 3


@pytest.mark.slow
def test_earlier_rounds_are_kept_and_descriptors_are_not(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    """200 rounds; the tail is that of the newest round."""
    one = rig(stdout_filters=("round",))
    before = open_fds()
    for round in range(200):
        ends = one.pump.open_round(round, {0: 0, 1: 1})
        assert not any(os.get_inheritable(fd) for fd in ends[0] + ends[1])
        os.write(ends[1][0], b"round %d\n" % round)
        os.write(ends[1][1], b"round %d\n" % round)
        close_all(ends[0] + ends[1])
        assert one.pump.finish_round(SECONDS)
        assert one.pump.tail(1, 20) == [f"round {round}"]
    assert open_fds() == before
    assert [written(tmp_path, 1, round=n) for n in range(200)] == [
        b"round %d\n" % n for n in range(200)
    ]


def test_a_process_that_keeps_the_pipe(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """The deadline passes, the stream is named, what it wrote until then is there."""
    one = rig()
    code = "if os.fork(): os._exit(0)\nos.write(2, b'still here'); os.read(GATE, 1)"
    gate, release = os.pipe()
    os.set_inheritable(gate, True)
    ends = one.pump.open_round(3, {0: 4, 1: 5})
    close_all(ends[0])
    process = subprocess.Popen(
        ["python3", "-S", "-c", f"import os\n{code.replace('GATE', str(gate))}"],
        stdout=subprocess.DEVNULL,
        stderr=ends[1][1],
        pass_fds=[gate],
    )
    close_all((gate, *ends[1]))
    assert process.wait(SECONDS) == 0
    eventually(lambda: one.pump.tail(1, 20) == ["still here"])
    started = time.monotonic()
    assert not one.pump.finish_round(0.3)
    assert time.monotonic() - started >= 0.3
    assert written(tmp_path, 1, "stderr", round=3) == b"still here"
    one.err.wait_for(b"elaunch: a process still holds open: rank 5 stderr; it is no longer read\n")
    os.close(release)
    one.run({0: "print('next')"}, round=4)
    one.close()
    assert one.out.data == b"next\n"


@pytest.fixture
def slow_close(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make storage that closes no file before the event is set, as an NFS server that is busy."""
    goes_on = threading.Event()
    close = LogFile.close

    def slow(file: LogFile) -> None:
        goes_on.wait(SECONDS)
        close(file)

    monkeypatch.setattr(LogFile, "close", slow)
    yield goes_on
    goes_on.set()


def test_a_round_begins_while_the_files_of_the_last_are_closed(
    rig: Callable[..., Rig], tmp_path: Path, slow_close: threading.Event
) -> None:
    """Each has its own, and at the end all are closed."""
    one = rig(redirects=both(3))
    one.run({0: "print('first')"}, round=0)
    one.run({0: "print('second')"}, round=1)
    slow_close.set()
    one.close()
    assert written(tmp_path, 0, round=0) == b"first\n"
    assert written(tmp_path, 0, round=1) == b"second\n"


def test_files_that_cannot_be_closed_are_named(
    rig: Callable[..., Rig], tmp_path: Path, slow_close: threading.Event
) -> None:
    """The end of the agent does not wait for them for ever."""
    one = rig(redirects=both(3))
    one.run({0: "print('first')"})
    one.pump.close(0.2)
    one.close()
    assert f"{tmp_path}, round 0: the log files are not closed yet".encode() in one.err.data


def test_files_that_are_slow_to_open(
    rig: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on after OPEN_PATIENCE; what the workers print meanwhile is on file."""
    goes_on = threading.Event()
    make = streams.make_directories

    def slow(*args: Any) -> None:
        goes_on.wait(SECONDS)
        make(*args)

    monkeypatch.setattr(streams, "make_directories", slow)
    monkeypatch.setattr(logs, "OPEN_PATIENCE", 0.1)
    one = rig(redirects=both(3))
    one.start({0: "print('early')"})
    one.wait()
    goes_on.set()
    assert one.pump.finish_round(SECONDS)
    one.close()
    assert written(tmp_path, 0) == b"early\n"
    assert f"{tmp_path} is slow to open the log files".encode() in one.err.data


@pytest.mark.slow
def test_a_console_that_is_not_read(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Its workers wait for it, the others go on, and nothing is lost once it is read again."""
    size = 6_000_000
    code = f"{WRITE_ALL}\nput(1, b''.join(b'%d:RANK\\n' % n for n in range({size // 10})))"
    one = rig(begin=False, redirects=lambda rank: 3 if rank == 2 else 0)
    one.start({rank: code.replace("RANK", f"r{rank}") for rank in range(3)})
    assert one.workers[2].wait(SECONDS) == 0
    expected = b"".join(b"%d:r2\n" % n for n in range(size // 10))
    eventually(lambda: written(tmp_path, 2) == expected)
    assert one.workers[0].poll() is None
    assert len(written(tmp_path, 0)) < 4_000_000
    one.out.thread.start()
    one.wait()
    assert one.pump.finish_round(SECONDS)
    one.close()
    for rank in (0, 1):
        mine = expected.replace(b"r2", b"r%d" % rank)
        assert written(tmp_path, rank) == mine
        assert b"".join(re.findall(rb"\d+:r%d\n" % rank, one.out.data)) == mine
    assert len(one.out.data) == 2 * len(expected)


def test_a_console_that_is_never_read_again(tmp_path: Path) -> None:
    """The deadlines of finish_round and close hold, and the files are complete."""
    console_read, console = os.pipe()
    pump = LogPump(LogPlan(tmp_path), console, console)
    pump.start()
    ends = pump.open_round(0, {0: 0})
    process = worker(f"{WRITE_ALL}\nput(1, b'0123456789' * 200_000)", ends[0])
    assert process.wait(SECONDS) == 0
    started = time.monotonic()
    assert pump.finish_round(0.2)
    pump.close(0.2)
    assert time.monotonic() - started < CONSOLE_PATIENCE / 2
    assert written(tmp_path, 0) == b"0123456789" * 200_000
    close_all((console_read, console))


def test_a_console_that_is_closed(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """As under ``| head``: the rest goes to the files, and the other console still works."""
    code = f"{WRITE_ALL}\nfor _ in range(30): put(1, b'x' * 99_999 + b'\\n')\nput(2, b'fine\\n')"
    one = rig(begin=False)
    os.close(one.out.fd)
    one.out.fd = os.open(os.devnull, os.O_RDONLY)
    one.run({0: code, 1: code})
    one.close()
    assert len(written(tmp_path, 0)) == len(written(tmp_path, 1)) == 3_000_000


def test_no_console_at_all(tmp_path: Path) -> None:
    """A daemon may have closed both descriptors."""
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    pump = LogPump(LogPlan(tmp_path), fd + 900, fd + 901)
    pump.start()
    ends = pump.open_round(0, {0: 0})
    assert worker("print('kept')", ends[0]).wait(SECONDS) == 0
    assert pump.finish_round(SECONDS)
    pump.close()
    pump.show("nobody hears this")
    assert written(tmp_path, 0) == b"kept\n"


def test_a_full_disk_is_said_once_and_stops_nothing(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    """Each write fails with ENOSPC; the console has everything."""
    for rank in range(2):
        directory = tmp_path / "attempt_0" / str(rank)
        directory.mkdir(parents=True)
        (directory / "stdout.log").symlink_to("/dev/full")
    code = f"{WRITE_ALL}\nfor n in range(2000): put(1, b'x' * 999 + b'\\n')"
    one = rig()
    one.run({0: code, 1: code})
    one.close()
    assert len(one.out.data) == 4_000_000
    assert one.err.data.count(b"\n") == 1
    assert re.match(rb"elaunch: cannot write .*/stdout.log: No space left", one.err.data)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_disk_with_room_again_marks_the_gap(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """The file goes on after the missing bytes, and says how many there are."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True
    )
    programs.allowed(mount.stderr.decode() if mount.returncode else None)
    try:
        one = rig(log_root=disk, redirects=both(3))
        ballast = disk / "ballast"
        # Its room holds all that may still be in the pipe when it goes.
        ballast.write_bytes(b"b" * 384 * 1024)
        ends = one.pump.open_round(0, {0: 0})
        os.write(ends[0][1], b"x" * 300_000)
        one.err.wait_for(b"No space left on device; log files are incomplete\n")
        eventually(lambda: len(one.pump.tail(0, 1)[0]) == KEPT_LINE)
        ballast.unlink()
        os.write(ends[0][1], b"after\n")
        close_all(ends[0])
        assert one.pump.finish_round(SECONDS)
        kept, mark, rest = written(disk, 0, "stderr").partition(b"\n[elaunch: ")
        missing, reason = rest.split(b" bytes are missing here: ")
        assert mark and reason.startswith(b"No space left on device]\n")
        # What was still in the pipe when there was room again is behind the mark.
        after = reason.partition(b"\n")[2]
        assert kept + after == b"x" * (300_000 - int(missing)) + b"after\n"
        one.close()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_log_directory_that_cannot_be_made(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """The round runs without files."""
    (tmp_path / "attempt_0").write_text("in the way")
    one = rig()
    one.run({0: "print('shown')"})
    assert one.pump.paths(0) == (None, None)
    one.close()
    assert one.out.data == b"shown\n"
    assert b"File exists" in one.err.data


def test_no_descriptors_left(rig: Callable[..., Rig]) -> None:
    """Nothing stays open, and the next round works."""
    one = rig()
    one.run({0: ""})
    before = open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open(os.devnull, os.O_RDONLY)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 5, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            one.pump.open_round(1, {0: 0, 1: 1})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_fds() == before
    one.run({0: "print('fine')"}, round=2)
    one.close()
    assert one.out.data == b"fine\n"


def test_a_failed_pump_lets_nobody_hang(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """Workers get an error instead of waiting for ever, and the round counts as not finished."""
    one = rig()
    ends = one.pump.open_round(0, {0: 0})
    one.pump._post(lambda: [][0])
    assert not one.pump.finish_round(SECONDS)
    with pytest.raises(BrokenPipeError):
        os.write(ends[0][0], b"x")
    close_all(ends[0])
    assert "the log pump failed" in caplog.text
    one.close()


def switches() -> int:
    """Return how often the pump's thread has waited."""
    (pump,) = (thread for thread in threading.enumerate() if thread.name == "log-pump")
    status = Path(f"/proc/self/task/{pump.native_id}/status").read_text()
    return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)[0])


@pytest.mark.slow
def test_lines_that_come_without_a_pause_are_taken_together(tmp_path: Path) -> None:
    """The pump does not wake for each of them, none is lost, and the end is not waited for."""
    rig = Rig(LogPlan(tmp_path))
    code = """
for n in range(4000):
    os.write(1, b"line %d\\n" % n)
    time.sleep(0.0004)
"""
    began, before = time.monotonic(), switches()
    rig.run({0: code})
    lasted, waits = time.monotonic() - began, switches() - before
    rig.close()
    assert written(tmp_path, 0) == rig.out.data == b"".join(b"line %d\n" % n for n in range(4000))
    assert waits < 300 * (lasted + 1), "100 in each second at once, and 100 rests of 10 ms"


class Terminal:
    """A terminal as the console, 40 columns wide."""

    def __init__(self, plan: LogPlan) -> None:
        self.master, self.slave = os.openpty()
        self.resize(40)
        self.screen = Reader(self.master)
        self.pump = LogPump(plan, self.slave, self.slave)
        self.pump.start()

    def resize(self, columns: int) -> None:
        """Set the number of columns."""
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """Close the pump and the terminal."""
        self.pump.close()
        os.close(self.slave)
        self.screen.close()


PROBE = r"""
columns = os.get_terminal_size(1).columns if os.isatty(1) else 0
os.write(1, b"%d%d %d\n" % (os.isatty(1), os.isatty(2), columns))
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as exc:
    os.write(2, b"no controlling terminal\n")
"""


def test_a_terminal_as_the_console(tmp_path: Path) -> None:
    """Workers see a terminal where they would without a launcher; the files have plain bytes."""
    plan = LogPlan(
        tmp_path, tee=lambda rank: 3 if rank == 1 else 0, console_ranks=frozenset({0, 1})
    )
    terminal = Terminal(plan)
    ends = terminal.pump.open_round(0, dict.fromkeys(range(3), 0))
    workers = [worker(f"os.setsid()\n{PROBE}", ends[rank]) for rank in range(3)]
    assert [process.wait(SECONDS) for process in workers] == [0, 0, 0]
    assert terminal.pump.finish_round(SECONDS)
    terminal.close()
    assert [written(tmp_path, rank) for rank in range(3)] == [b"11 40\n", b"00 0\n", b"00 0\n"]
    assert written(tmp_path, 0, "stderr") == b"no controlling terminal\n"
    assert b"11 40\r\n" in terminal.screen.data
    assert b"[default1]:00 0\r\n" in terminal.screen.data


def test_a_terminal_that_changes_its_size(tmp_path: Path) -> None:
    """The worker's terminal follows with the next output."""
    terminal = Terminal(LogPlan(tmp_path))
    ends = terminal.pump.open_round(0, {0: 0})
    terminal.resize(100)
    os.write(ends[0][0], b"redraw\n")
    eventually(lambda: os.get_terminal_size(ends[0][0]).columns == 100)
    close_all(ends[0])
    assert terminal.pump.finish_round(SECONDS)
    terminal.close()


def test_a_terminal_takes_megabytes(tmp_path: Path) -> None:
    """Two workers' lines through pseudo-terminals arrive whole and in order."""
    terminal = Terminal(LogPlan(tmp_path))
    ends = terminal.pump.open_round(0, {0: 0, 1: 1})
    line = f"{WRITE_ALL}\nfor n in range(20): put(1, b'RANK' * 20_000 + b'\\n')"
    workers = [worker(line.replace("RANK", "ab"[rank]), ends[rank]) for rank in (0, 1)]
    assert [process.wait(SECONDS) for process in workers] == [0, 0]
    assert terminal.pump.finish_round(SECONDS)
    terminal.close()
    assert written(tmp_path, 0) == (b"a" * 20_000 + b"\n") * 20
    lines = terminal.screen.data.split(b"\r\n")
    assert sorted(lines) == [b""] + [b"a" * 20_000] * 20 + [b"b" * 20_000] * 20


def test_the_rest_of_a_traceback_that_was_dropped_is_not_shown(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    """A worker may end in the middle of it; the file has all."""
    code = f"""
sys.stderr.write("Traceback (most recent call last):\\n  RuntimeError: [pair.c")
sys.stderr.flush()
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.01)
sys.stderr.write("c:553] Connection closed by peer\\n")
"""
    one = rig(withholds=True)
    one.start({0: code})
    file = tmp_path / "attempt_0" / "0" / "stderr.log"
    eventually(lambda: file.exists() and file.read_bytes().endswith(b"pair.c"))
    one.pump.withhold()
    one.pump.settle(0, drops=True, run="job")
    one.err.wait_for(b"Tracebacks of rank 10: elaunch logs job --round 0")
    (tmp_path / "go").touch()
    one.wait()
    assert one.pump.finish_round(SECONDS)
    one.close()
    assert b"553" not in one.err.data
    assert written(tmp_path, 0, "stderr").endswith(b"Connection closed by peer\n")
