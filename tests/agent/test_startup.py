"""The wait for one answer before the loop serves, and the look at the checkpoint directory."""

from __future__ import annotations

import logging
import os
import queue
import signal
from pathlib import Path

import pytest

from elaunch.agent.policy import events
from elaunch.agent.resume import probe as probing
from elaunch.agent.resume.probe import DirectoryProbe
from elaunch.agent.startup import Inbox, await_one
from elaunch.checkpoint import probe
from elaunch.config import Settings, resolve
from elaunch.errors import UsageError

TERM, USR1 = events.SignalReceived(signal.SIGTERM), events.SignalReceived(signal.SIGUSR1)
PROBED, COUNTED, PASSED = (
    events.DirectoryProbed(),
    events.DevicesCounted(2, None),
    events.DeadlinePassed(),
)


def filled(*them: events.Event) -> Inbox:
    """Return an inbox with these events."""
    inbox: Inbox = queue.SimpleQueue()
    for event in them:
        inbox.put(event)
    return inbox


def rest(inbox: Inbox) -> list[events.Event]:
    """Return what is left in it."""
    return [inbox.get_nowait() for _ in range(inbox.qsize())]


@pytest.mark.parametrize(
    ("there", "answer", "left"),
    [
        ((PROBED,), PROBED, []),
        ((COUNTED, PASSED, PROBED), PROBED, [COUNTED, PASSED]),
        ((COUNTED, TERM, PROBED), TERM, [PROBED, COUNTED]),
        ((USR1, PROBED), PROBED, []),
        ((COUNTED, USR1), None, [COUNTED]),
        ((), None, []),
    ],
)
def test_the_others_are_put_back(
    there: tuple[events.Event, ...], answer: events.Event | None, left: list[events.Event]
) -> None:
    """Signals end the wait, but for those that would be forwarded to workers."""
    inbox = filled(*there)
    assert await_one(inbox, (events.DirectoryProbed,), (signal.SIGUSR1,), timeout=0.05) == answer
    assert rest(inbox) == left


def settings(tmp_path: Path, *flags: str) -> Settings:
    """Return settings of a job with these flags."""
    script = tmp_path / "train.py"
    script.write_text("")
    line = dict(flag.lstrip("-").split("=") for flag in flags)
    return resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, tmp_path)


TWO_NODES = ("--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1")


def test_one_node_leaves_no_mark(tmp_path: Path) -> None:
    """The directory is made; nobody else has to see anything."""
    inbox = filled()
    one = DirectoryProbe(settings(tmp_path, "--checkpoint-dir=ck"), inbox.put)
    one.start()
    assert one.await_answer(inbox) is None
    assert (one.nonce, os.listdir(tmp_path / "ck")) == ("", [])
    one.close()


def test_one_of_two_nodes_leaves_its_mark_while_it_lives(tmp_path: Path) -> None:
    """Under the name that its record says; not where each node has its own directory."""
    inbox = filled()
    one = DirectoryProbe(settings(tmp_path, "--checkpoint-dir=ck", *TWO_NODES), inbox.put)
    one.start()
    assert one.await_answer(inbox) is None
    assert os.listdir(tmp_path / "ck" / ".probe") == [one.nonce]
    one.close()
    assert os.listdir(tmp_path / "ck") == []
    own = settings(tmp_path, "--checkpoint-dir=ck", "--checkpoint-local=yes", *TWO_NODES)
    assert DirectoryProbe(own, inbox.put).nonce == ""


@pytest.mark.parametrize("flags", [(), ("--checkpoint-dir=memory://x",)])
def test_nothing_to_look_at(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """No directory, or a URL: nothing is waited for."""
    inbox = filled(TERM)
    none = DirectoryProbe(settings(tmp_path, *flags, *TWO_NODES), inbox.put)
    none.start()
    assert (none.await_answer(inbox), none.nonce, rest(inbox)) == (None, "", [TERM])


def test_what_is_wrong_or_odd_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A problem ends the command, a remark is a warning, a signal is for the caller."""
    here = DirectoryProbe(settings(tmp_path, "--checkpoint-dir=ck"), print)
    with pytest.raises(UsageError, match=r"^it is full$"):
        here.await_answer(filled(events.DirectoryProbed("it is full")))
    with caplog.at_level(logging.WARNING, "elaunch"):
        assert here.await_answer(filled(events.DirectoryProbed(remark="little room"))) is None
    assert "little room" in caplog.text
    assert here.await_answer(filled(TERM)) is TERM
    asked = events.PreemptAsked("drain", print)
    assert here.await_answer(filled(asked)) is asked


def test_a_node_of_several_that_is_asked_goes_on_to_its_loop(tmp_path: Path) -> None:
    """There the other nodes are asked as well; nothing of what came is lost."""
    inbox = filled(USR1, events.PreemptAsked("drain", print), PROBED)
    here = DirectoryProbe(settings(tmp_path, "--checkpoint-dir=ck", *TWO_NODES), inbox.put)
    assert here.await_answer(inbox) is None
    assert rest(inbox) == [USR1, events.PreemptAsked("drain", print)]


def test_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for for ever, and the error names host and directory."""
    monkeypatch.setattr(probing, "ANSWER_S", 0.05)
    here = DirectoryProbe(settings(tmp_path, "--checkpoint-dir=ck"), print)
    with pytest.raises(UsageError) as caught:
        here.await_answer(filled())
    assert f"--checkpoint-dir {tmp_path}/ck: the file system has not answered on " in str(
        caught.value
    )
    assert os.uname().nodename in str(caught.value)


def test_an_error_of_the_file_system_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the mark cannot be written."""

    def full(place: Path, _: str) -> None:
        raise UsageError(f"--checkpoint-dir {place}: no space")

    monkeypatch.setattr(probe, "leave_mark", full)
    inbox = filled()
    one = DirectoryProbe(settings(tmp_path, "--checkpoint-dir=ck", *TWO_NODES), inbox.put)
    one.start()
    with pytest.raises(UsageError, match="no space"):
        one.await_answer(inbox)
    one.close()
