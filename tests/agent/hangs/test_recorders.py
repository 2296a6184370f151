"""What workers answer of their collectives: read by a deadline, whatever it is."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from elaunch.agent.hangs import recorders
from elaunch.agent.hangs.collectives import RankPlace
from elaunch.agent.hangs.living import Living
from elaunch.agent.hangs.recorders import (
    DEVICE_TRACE,
    STACKS,
    TRACE,
    Question,
    Recorders,
    ask,
)
from elaunch.agent.policy.turn import Round
from elaunch.atonce import within
from elaunch.wire.local import listen
from elaunch.wire.recorder import groups_path, socket_path

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
NOT_THERE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"
ONE = Living(Round(0, 1), {0: 1})
GROUPS = '["0", 2, 1, []]\n["1", 1, null, [0]]\n'


def answering(
    path: Path, answer: bytes, on_device: bytes = NOT_THERE, *, questions: int = 2
) -> None:
    """Have somebody at ``path`` answer questions, that for NCCL's record with the second answer."""
    listener = listen(path, 8)

    def serve() -> None:
        with listener:
            for _ in range(questions):
                with listener.accept()[0] as connection:
                    reply(
                        connection, on_device if DEVICE_TRACE in connection.recv(4096) else answer
                    )

    threading.Thread(target=serve, daemon=True).start()


def reply(connection: socket.socket, answer: bytes) -> None:
    """Send an answer to a peer that may have gone."""
    with contextlib.suppress(OSError):
        for at in range(0, len(answer), 1 << 20):
            connection.sendall(answer[at : at + (1 << 20)])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


BROKEN = {
    "hung up": (b"HTTP/1.1 200 OK\r\n", "it has hung up"),
    "cut off": (HEAD % 10 + b"12345", "it has hung up"),
    "no such record": (NOT_THERE, "no such record"),
    "no length": (b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n", "no such record"),
    "too long": (HEAD % (1 << 30) + bytes(1 << 20), "too long"),
    "no JSON": (HEAD % 5 + b"\xff\xfe123", "is not read"),
    "nested": (HEAD % 200005 + b'{"x":' + b"[" * 200000, "is not read"),
    "something else": (HEAD % 14 + b'{"entries":[1]', "is not read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_is_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of that worker, and why."""
    monkeypatch.setattr(recorders, "LONGEST", 1 << 18)
    path = socket_path(tmp_path, 0, 0)
    answering(path, BROKEN[name][0])
    groups_path(path).write_text(GROUPS)
    found = Recorders(tmp_path).places(ONE, time.monotonic() + 5)[0]
    assert BROKEN[name][1] in found.problem and not found.groups


def test_a_rank_whose_interpreter_ends(tmp_path: Path) -> None:
    """It takes its socket away, and leaves its groups; one that never had any is nowhere."""
    groups_path(socket_path(tmp_path, 0, 0)).write_text(GROUPS)
    two = Living(Round(0, 2), {0: 1, 1: 1})
    found = Recorders(tmp_path).places(two, time.monotonic() + 5)
    assert found == {0: RankPlace(leaving=True)}


@pytest.mark.slow
def test_who_says_nothing_costs_the_deadline_once(tmp_path: Path) -> None:
    """All are asked at once; the others' answers count."""
    answer = b'{"entries": []}'
    paths = {Question(rank, TRACE): tmp_path / str(rank) for rank in range(4)}
    silent = [listen(tmp_path / str(rank), 8) for rank in range(2)]
    answering(tmp_path / "2", HEAD % len(answer) + answer)
    began = time.monotonic()
    found = {question.rank: said for question, said in ask(paths, began + 2.0).items()}
    assert time.monotonic() - began < 30
    assert [type(found[rank]) for rank in range(4)] == [
        *(TimeoutError, TimeoutError, bytes, FileNotFoundError)
    ]
    for listener in silent:
        listener.close()


def test_a_groups_file_that_is_none(tmp_path: Path) -> None:
    """Nobody waits for whoever might write into it."""
    path = socket_path(tmp_path, 0, 0)
    answering(path, HEAD % 2 + b"{}")
    os.mkfifo(groups_path(path))
    asked = Recorders(tmp_path)
    found: list[RankPlace] = []
    until = time.monotonic() + 5
    assert within(20.0, lambda: found.append(asked.places(ONE, until)[0]), "asks")
    assert "not a regular file" in found[0].problem


def test_a_torch_without_nccl_is_not_asked_for_its_record_again(tmp_path: Path) -> None:
    """One answer is enough: all workers have the same torch."""
    asked, body = Recorders(tmp_path), b'{"pg_status": {"0": {"last_enqueued_collective": "3"}}}'
    path = socket_path(tmp_path, 0, 0)
    answering(path, HEAD % len(body) + body)
    groups_path(path).write_text('["0", 1, 0, []]\n')
    assert DEVICE_TRACE in asked.traces
    assert asked.places(ONE, time.monotonic() + 5)[0].done == 3
    assert asked.traces == (TRACE,)


def test_stacks_that_are_only_shown_are_not_waited_for(tmp_path: Path) -> None:
    """They may wait for Python's lock for ever; what is recorded comes without it."""
    answer = b'{"entries": []}'
    answering(tmp_path / "0", HEAD % len(answer) + answer, questions=1)
    silent = listen(tmp_path / "1", 8)
    questions = {Question(0, TRACE): tmp_path / "0", Question(1, STACKS): tmp_path / "1"}
    began = time.monotonic()
    found = ask(questions, began + 60.0, hurries=True)
    assert time.monotonic() - began < 30
    assert found[Question(0, TRACE)] == answer
    assert isinstance(found[Question(1, STACKS)], TimeoutError)
    silent.close()
