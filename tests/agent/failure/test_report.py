"""The report's text: what a person reads first, second and last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from elaunch.agent.failure.evidence import Evidence, Failure, Hang
from elaunch.agent.failure.report import render, write_launcher_file
from elaunch.agent.failure.verdict import FailureReport, build
from elaunch.agent.hangs.collectives import Culprit
from elaunch.agent.hangs.scene import NOT_ASKED, Scene
from elaunch.agent.hangs.stackdump import StackGroup
from elaunch.agent.policy.events import HangSeen, StacksTaken
from tests.agent.histories import changed, left

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "t.py", line 1, in f',
    "    g()",
    "ValueError: boom",
)
KNOWN = Evidence(started_at=17e8)
FIRST = left(
    1,
    1,
    17e8 + 12.3,
    stdout_path="/logs/1/stdout.log",
    stderr_path="/logs/1/stderr.log",
    tail=("step 1", *TRACEBACK),
)


def make(*exits: Failure) -> FailureReport:
    """Build a report in which the first exit is the cause."""
    return build("t.py", "node0", 0, exits, exits[0].exit.local_rank, KNOWN)


def lines(*exits: Failure) -> list[str]:
    """Return the rendered lines without torchrun's table."""
    return render(make(*exits)).rstrip().split("\n")


def test_the_cause_comes_first() -> None:
    """Who, where, how, when; then the script's own traceback; then where to read on."""
    assert lines(FIRST) == [
        "rank 1 failed at t.py:1 in f: ValueError: boom",
        "rank 1 (local_rank 1, pid 4001) on host node0 exited with code 1, 12.3 s into round 0",
        "Traceback from its stderr:",
        *(f"  {line}" for line in TRACEBACK),
        "Its log: /logs/1/stderr.log and /logs/1/stdout.log",
    ]


def test_the_last_thing_is_the_root_cause_for_parsers() -> None:
    """torchrun's table ends the report."""
    text = render(make(FIRST), table=True)
    assert text.count("Root Cause (first observed failure):") == 1
    assert "  <NO_OTHER_FAILURES>\n" in text
    assert text.rstrip().endswith("\n" + "=" * 55)


def test_a_signal_with_its_explanation() -> None:
    """The last lines stand in for a traceback; lines fit a terminal."""
    out = lines(replace(changed(FIRST, exitcode=-9), tail=("step 1", "step 2"), oom_kill=True))
    assert out[0].endswith("on host node0 was killed by SIGKILL, 12.3 s into round 0")
    assert out[1].startswith("Out of memory: the kernel killed it.")
    assert out[-4:-1] == ["Last lines of its stderr:", "  step 1", "  step 2"]
    assert max(map(len, out)) <= 100


def test_silence() -> None:
    """os._exit(3) leaves nothing."""
    out = lines(replace(changed(FIRST, exitcode=3), tail=(), stdout_path=None, stderr_path=None))
    assert out[1:] == ["It left no traceback and wrote nothing to stderr."]


def test_victims_and_stopped() -> None:
    """In order, each with what it said, but for what only tells that another has gone."""
    tail = (*TRACEBACK[:3], "RuntimeError: Connection closed by peer")
    victim = left(0, 1, FIRST.at + 0.035, tail=tail)
    stopped = [
        left(2, -15, FIRST.at + 1, stopped=True),
        left(3, 0, FIRST.at + 1, stopped=True),
        left(4, 1, FIRST.at + 1, stopped=True),
        left(5, 143, FIRST.at + 1, stopped=True),
    ]
    out = lines(FIRST, victim, *stopped)
    assert out[-3:] == [
        "",
        "Failed afterwards: ranks 0, 4 (exit code 1)",
        "Stopped by elaunch: rank 2 (SIGTERM), rank 3 (exit code 0), rank 5 (exit code 143)",
    ]
    table = render(make(FIRST, victim, *stopped), table=True).partition("Failures:")[2]
    assert "rank      : 2" in table and "rank      : 3" not in table


def test_many_ranks_fit_on_a_page() -> None:
    """Of 2,000 ranks: those that ended alike together, and of the victims the first ones."""
    victims = [left(rank, rank % 100, FIRST.at + 1.0) for rank in range(101, 200)]
    victims += [left(rank, 1, FIRST.at + 1.0 + rank / 1e3) for rank in range(200, 1000)]
    stopped = [left(rank, -15, stopped=True) for rank in range(1000, 2000)]
    text = lines(FIRST, *victims, *stopped)
    at = text.index("")
    assert text[at + 1].startswith("Failed afterwards: ranks 101, 200-999 (exit code 1), rank 102 ")
    assert text[-2].endswith(" rank 108 (exit code 8), ranks 109-199")
    assert text[-1] == "Stopped by elaunch: ranks 1000-1999 (SIGTERM)"
    assert len(text) < 25 and max(map(len, text)) <= 100


def test_another_error_of_one_that_failed_afterwards() -> None:
    """It is no victim's: it stands below the others."""
    victim = left(0, 1, FIRST.at, tail=(*TRACEBACK[:3], "RuntimeError: Connection closed by peer"))
    own = left(2, 1, FIRST.at, tail=(*TRACEBACK[:3], "KeyError: 'lr'"))
    assert lines(FIRST, victim, own)[-3:] == [
        "",
        "Failed afterwards: rank 0 (exit code 1)",
        "  rank 2 (exit code 1): KeyError: 'lr'",
    ]
    assert lines(FIRST, own)[-2:] == [
        "Failed afterwards:",
        "  rank 2 (exit code 1): KeyError: 'lr'",
    ]


def test_a_victim_that_was_noticed_first_points_at_the_other() -> None:
    """The order of exits is not always the order of causes."""
    lost = replace(FIRST, tail=(*TRACEBACK[:3], "RuntimeError: Connection reset by peer"))
    killed = left(0, -11, FIRST.at + 0.01)
    text = lines(lost, killed)
    assert text[0].startswith("rank 0 was killed by SIGSEGV: native code crashed")
    said = "First to fail, 12.3 s into round 0: rank 1 (exit code 1), a victim (E-PEER-LOST)"
    assert text[-1] == said
    assert lines(lost, changed(lost, rank=0, local_rank=0))[0].startswith("First to fail: rank 1 (")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{torn", "error file is corrupt: it is not JSON"),
        ('{"message": "boom"}', "Its error file says: boom"),
    ],
)
def test_error_files_are_told_of(tmp_path: Path, content: str, expected: str) -> None:
    """Corrupt ones, and those without a traceback; stderr's is shown with both."""
    path = tmp_path / "error.json"
    path.write_text(content)
    out = lines(replace(FIRST, error_file=str(path)))
    assert any(line.startswith(expected) for line in out)
    assert "  ValueError: boom" in out


def test_long_tracebacks_are_not_cut_silently() -> None:
    """The cut names the file, and what an exception is stays in sight."""
    tail = (*TRACEBACK[:1], *[f"  frame {n}" for n in range(400)], TRACEBACK[-1])
    out = lines(replace(FIRST, tail=tail))
    assert "  … 203 lines left out, see /logs/1/stderr.log" in out
    assert "  ValueError: boom" in out


def test_odd_output_stays_printable() -> None:
    """Escapes, progress bars and undecodable bytes do not reach the terminal."""
    tail = ("\x1b[31mred\x1b[0m", " 1%\r 2%", b"\xff".decode(errors="surrogateescape"))
    out = lines(replace(changed(FIRST, exitcode=3), tail=tail))
    assert out[2:5] == ["  red", "   2%", "  ?"]
    report = build("t\udcff.py", "node0", 0, [FIRST], 1)
    assert "t?.py FAILED" in render(report, table=True)


def test_torchruns_table_is_for_who_asks() -> None:
    text = render(make(FIRST))
    assert render(make(FIRST), table=True).startswith(text)
    assert "ChildFailedError" not in text and text.endswith("stdout.log\n")


def test_the_launchers_own_error_file(tmp_path: Path) -> None:
    """With the worker's record, or one made from the report."""
    target = tmp_path / "mine.json"
    environ = {"TORCHELASTIC_ERROR_FILE": str(target)}
    assert write_launcher_file(make(FIRST), environ)
    message = json.loads(target.read_text())["message"]
    assert message["message"] == "rank 1 exited with code 1: ValueError: boom"
    assert message["extraInfo"]["py_callstack"] == "\n".join(TRACEBACK)
    assert message["errorCode"] == 1

    record = tmp_path / "worker.json"
    record.write_text(json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": "1"}}}))
    assert write_launcher_file(make(replace(FIRST, error_file=str(record))), environ)
    assert json.loads(target.read_text())["message"] == {
        "message": "m",
        "extraInfo": {"timestamp": "1"},
        "errorCode": 1,
    }
    assert not write_launcher_file(make(FIRST), {})


SEEN = HangSeen(
    (1,),
    "rank 1 has made no progress for 60 s (step 41; the others are at step 42)",
    "script",
    round=0,
    last=("rank 0: step 42, silent for 60 s", "rank 1: step 41, silent for 61 s"),
)
STACKS = StacksTaken(
    0,
    groups=(
        StackGroup((1,), ('File "d.py", line 8 in read', 'File "t.py", line 3 in step')),
        StackGroup(
            (0, 2, 3), ('File "t.py", line 9 in sync',), (((0, 2), ('File "l.py", line 1 in x',)),)
        ),
    ),
    problems=(((4,), "the process is stopped by a signal"),),
)
HANG = Hang(SEEN, 17e8 + 75.2, STACKS)


def hung(hang: Hang = HANG) -> FailureReport:
    """Return the report of a round that hung, in which elaunch has ended all workers."""
    ends = [left(rank, -15, 17e8 + 80, stopped=True) for rank in (1, 0, 2)]
    return build("t.py", "node0", 0, ends, 1, replace(KNOWN, hang=hang))


LOST = (*TRACEBACK[:3], "RuntimeError: Connection closed by peer [127.0.0.1]:40312")


def accusing(other: Failure, sentence: str, scene: Scene = NOT_ASKED) -> list[str]:
    """Return the lines of a report in which rank 1 fails of what the other rank has done."""
    first = replace(FIRST, tail=LOST)
    known = replace(KNOWN, scene=scene)
    found = build("t.py", "node0", 0, [first, other], 1, known)
    found = replace(found, culprit=Culprit((other.exit.rank,), sentence))
    return render(found).rstrip().split("\n")


def test_the_culprit_comes_first_with_what_is_known_of_it() -> None:
    """Its traceback, what to do, and its log; then those that it took along, in a line."""
    logs = {"stderr_path": "/logs/2/stderr.log", "stdout_path": "/logs/2/stdout.log"}
    oom = (*TRACEBACK[:3], "torch.OutOfMemoryError: CUDA out of memory.")
    other = left(2, 1, 17e8 + 13, tail=oom, **logs)
    out = accusing(other, "rank 2 exited with code 1: torch.OutOfMemoryError: CUDA out of memory.")
    assert out[0].startswith("rank 2 exited with code 1: torch.OutOfMemoryError")
    assert out[1].endswith("node0 exited with code 1, 700 ms after rank 1")
    assert out[2].startswith("The GPU's memory is used up.")
    at = out.index("Traceback from its stderr:")
    assert out[at + 1 : at + 7] == [
        *(f"  {line}" for line in oom),
        "Its log: /logs/2/stderr.log and /logs/2/stdout.log",
        "",
    ]
    assert out[at + 7 :] == [
        "First to fail, 12.3 s into round 0: rank 1 (exit code 1), a victim (E-PEER-LOST)"
    ]


def test_a_culprit_that_stands_still() -> None:
    """Where it was when the first failed."""
    stacks = (StackGroup((0,), ("File x",)), StackGroup((2, 3), ('File "d.py", line 8 in read',)))
    sentence = "rank 2 has not entered all_reduce #61; rank 0 has been waiting there for 30m 00s"
    other = left(2, -15, 17e8 + 13, stopped=True, stderr_path="/logs/2/stderr.log")
    assert accusing(other, sentence, Scene(0, stacks))[:6] == [
        sentence,
        "Rank 2 was here, most recent call first:",
        '  File "d.py", line 8 in read',
        "Its log: /logs/2/stderr.log",
        "",
        "First to fail, 12.3 s into round 0: rank 1 (exit code 1), a victim (E-PEER-LOST)",
    ]


def test_a_hang_of_a_rank_that_has_raised() -> None:
    """A thread keeps it from its end, say: its exception is shown."""
    ends = [left(rank, -15, 17e8 + 80, stopped=True) for rank in (1, 0, 2)]
    ends[0] = replace(ends[0], tail=TRACEBACK)
    out = render(build("t.py", "node0", 0, ends, 1, replace(KNOWN, hang=HANG))).split("\n")
    at = out.index("The last exception in its stderr:")
    assert out[at + 1 : at + 5] == [f"  {line}" for line in TRACEBACK]
    assert at < out.index("Python stacks at that time, most recent call first:")


def test_a_hang() -> None:
    """Who stands still comes first, then what all were doing; the signals are of no interest."""
    out = render(hung()).rstrip().split("\n")
    assert out == [
        "rank 1 has made no progress for 60 s (step 41; the others are at step 42)",
        "(local_rank 1, pid 4001, on host node0, 75.2 s into round 0; known by the script)",
        "(elaunch explain E-HANG)",
        "What each rank said last:",
        "  rank 0: step 42, silent for 60 s",
        "  rank 1: step 41, silent for 61 s",
        "Python stacks at that time, most recent call first:",
        "  rank 1:",
        '    File "d.py", line 8 in read',
        '    File "t.py", line 3 in step',
        "  ranks 0, 2, 3:",
        '    File "t.py", line 9 in sync',
        "  another thread of ranks 0, 2:",
        '    File "l.py", line 1 in x',
        "No stacks of rank 4: the process is stopped by a signal",
        "",
        "Stopped by elaunch: ranks 0, 2 (SIGTERM)",
    ]


def test_a_hang_in_the_table_and_in_json() -> None:
    """The code of a hang, and its reason in place of a traceback."""
    made = hung()
    assert made.exit_code == 77
    root = render(made, table=True).partition("Root Cause")[2]
    assert f"traceback : {SEEN.reason} (stopped by elaunch)" in root
    found = json.loads(json.dumps(made.to_dict()))
    assert (found["exit_code"], found["summary"]) == (77, SEEN.reason)
    assert found["seconds_into_round"] == pytest.approx(75.2)
    assert found["hang"]["stacks"][0]["main"][0] == 'File "d.py", line 8 in read'
    assert found["hang"]["no_stacks"] == [
        {"ranks": [4], "problem": "the process is stopped by a signal"}
    ]


def test_a_hang_of_all_without_stacks() -> None:
    """Nobody is accused; what is missing is said."""
    everyone = replace(SEEN, ranks=(0, 1, 2), last=())
    text = render(hung(Hang(everyone, HANG.at, StacksTaken(0))))
    assert "(seen on host node0, 75.2 s into round 0; known by the script)" in text
    assert "The stacks of the workers could not be taken in time." in text


def test_the_launchers_file_of_a_hang(tmp_path: Path) -> None:
    """With the reason, the stacks and the code of the command."""
    path = tmp_path / "error.json"
    assert write_launcher_file(hung(), {"TORCHELASTIC_ERROR_FILE": str(path)})
    told = json.loads(path.read_text())["message"]
    assert (told["message"], told["errorCode"]) == (SEEN.reason, 77)
    assert "line 8 in read" in told["extraInfo"]["py_callstack"]
