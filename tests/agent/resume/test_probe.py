"""The look at the checkpoint directory: its one answer, and the mark that it leaves."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

import pytest

from elaunch.agent.policy import events
from elaunch.agent.resume import probe as probing
from elaunch.agent.resume.probe import DirectoryProbe
from elaunch.checkpoint import probe
from elaunch.checkpoint.probe import Probed
from elaunch.config import resolve
from elaunch.errors import UsageError

DIRECTORY = "--checkpoint-dir=ck"
TWO_NODES = ("--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1")
FINE = events.DirectoryProbed()
LONG = 30.0


class Begun(DirectoryProbe):
    """The probe of a job with these flags, which has begun to look."""

    def __init__(self, tmp_path: Path, *flags: str) -> None:
        script = tmp_path / "train.py"
        script.write_text("")
        line = dict(flag.lstrip("-").split("=") for flag in flags)
        self.posted: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        settings = resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, tmp_path)
        super().__init__(settings, self.posted.put)
        self.start()

    def answer(self) -> events.Event:
        """Return what the loop gets, which is one event."""
        answer = self.posted.get(timeout=LONG)
        assert self.posted.empty()
        return answer


def test_one_node_leaves_no_mark(tmp_path: Path) -> None:
    """The directory is made; nobody else has to see anything."""
    one = Begun(tmp_path, DIRECTORY)
    assert one.answer() == FINE
    assert (one.nonce, os.listdir(tmp_path / "ck")) == ("", [])
    one.close()


def test_one_of_two_nodes_leaves_its_mark_while_it_lives(tmp_path: Path) -> None:
    """Under the name that its record says; not where each node has its own directory."""
    one = Begun(tmp_path, DIRECTORY, *TWO_NODES)
    assert one.answer() == FINE
    assert os.listdir(tmp_path / "ck" / ".probe") == [one.nonce]
    one.close()
    assert os.listdir(tmp_path / "ck") == []
    own = Begun(tmp_path, DIRECTORY, "--checkpoint-local=yes", *TWO_NODES)
    assert (own.answer(), own.nonce) == (FINE, "")


@pytest.mark.parametrize("flags", [(), ("--checkpoint-dir=memory://x",)])
def test_nothing_to_look_at(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """No directory, or a URL: the answer is there at once, without a thread."""
    none = Begun(tmp_path, *flags, *TWO_NODES)
    assert (none.posted.get_nowait(), none.nonce) == (FINE, "")


def test_a_remark_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory can be used all the same."""
    monkeypatch.setattr(probe, "check", lambda *_: Probed("little room"))
    assert Begun(tmp_path, DIRECTORY).answer() == events.DirectoryProbed(remark="little room")


def test_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for for ever, and the error names host and directory."""
    hangs = threading.Event()
    monkeypatch.setattr(probing, "ANSWER_S", 0.05)
    monkeypatch.setattr(probe, "check", lambda *_: Probed(str(hangs.wait(LONG))))
    answer = Begun(tmp_path, DIRECTORY).answer()
    assert answer == events.DirectoryProbed(
        f"--checkpoint-dir {tmp_path}/ck: the file system has not answered on "
        f"{os.uname().nodename} within 0.05 s; is its server up?"
    )
    hangs.set()


@pytest.mark.parametrize("name", ["check", "leave_mark"])
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (UsageError("--checkpoint-dir /ck: no space"), "--checkpoint-dir /ck: no space"),
        (ValueError("odd"), "--checkpoint-dir {place}: ValueError: odd"),
    ],
)
def test_an_error_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, shown: str
) -> None:
    """Whatever it is, and also where only the mark cannot be written: the loop waits for it."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(probe, name, fails)
    one = Begun(tmp_path, DIRECTORY, *TWO_NODES)
    assert one.answer() == events.DirectoryProbed(shown.format(place=tmp_path / "ck"))
    one.close()
