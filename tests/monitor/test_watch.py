"""elaunch.monitor.watch: readings until the run ends, and what counts as a change."""

from __future__ import annotations

import os

import pytest

from elaunch.cli.views.status import list_reader, run_reader
from elaunch.monitor.watch import (
    WatchReading,
    changes,
    require_reader,
    watch,
)
from tests.monitor.conftest import Play
from tests.monitor.playing import final


def reading(gist: object, live: bool = True) -> WatchReading:
    """Return a reading without content."""
    return WatchReading(page=(), document=None, gist=gist, live=live)


def test_it_ends_with_the_first_reading_that_is_not_live() -> None:
    planned = [reading(0), reading(1), reading(2, live=False), reading(3)]
    given: list[WatchReading | None] = []

    def read(last: WatchReading | None) -> WatchReading:
        given.append(last)
        return planned[len(given) - 1]

    assert [r.gist for r in watch(read, 0.001)] == [0, 1, 2]
    assert given == [None, planned[0], planned[1]]


def test_only_changes_are_shown() -> None:
    readings = iter([reading("a"), reading("a"), reading("b"), reading("b"), reading("a")])
    assert [r.gist for r in changes(readings)] == ["a", "b", "a"]


def test_a_run_is_followed_to_its_end(play: Play) -> None:
    agent = play(1)
    followed = changes(watch(run_reader(agent.run), 0.01))
    assert next(followed).document["state"] == "RUNNING"
    agent.write(state="RESTARTING", reason="rank 0 exited with code 1")
    assert next(followed).document["reason"] == "rank 0 exited with code 1"
    agent.end(**final("COMPLETED", agent.record()))
    assert [r.document["state"] for r in followed][-1] == "COMPLETED"


def test_the_list_is_followed_until_nothing_is_live(play: Play, environ: dict[str, str]) -> None:
    agent = play(0)
    followed = changes(watch(list_reader(environ, False), 0.01))
    assert next(followed).live
    agent.kill()
    assert [r.document[0]["state"] for r in followed] == ["LOST"]


def test_a_pipe_that_nobody_reads_any_more() -> None:
    """Is seen without anything being written to it; a file and a terminal have readers."""
    reader, writer = os.pipe()
    require_reader(writer)
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        require_reader(writer)
    os.close(writer)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    require_reader(nowhere)
    os.close(nowhere)
