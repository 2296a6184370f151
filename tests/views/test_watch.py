"""elaunch.views.watch: readings until the run ends, and what counts as a change."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from elaunch.cli.views.status import view_of_runs
from elaunch.views.watch import changes, require_reader, watch
from tests.views.conftest import Play
from tests.views.playing import final


@dataclass
class Seen:
    """A job of which nothing is known but that."""

    gist: object
    live: bool = True


def test_it_ends_with_the_first_reading_in_which_nothing_is_live() -> None:
    planned = iter([[Seen(0)], [Seen(1), Seen(2, False)], [Seen(3, False)], [Seen(4)]])
    assert [[one.gist for one in r] for r in watch(lambda: next(planned), 0.001)] == [
        [0],
        [1, 2],
        [3],
    ]


def test_only_changes_are_shown() -> None:
    readings = iter([[Seen(gist)] for gist in "aabba"])
    assert [one.gist for (one,) in changes(readings)] == ["a", "b", "a"]


def test_a_run_is_followed_to_its_end(play: Play) -> None:
    agent = play(1)
    view = view_of_runs(str(agent.run.path), False)
    followed = map(view.document, changes(watch(view.read, 0.01)))
    assert next(followed)["state"] == "RUNNING"
    agent.write(state="RESTARTING", reason="rank 0 exited with code 1")
    assert next(followed)["reason"] == "rank 0 exited with code 1"
    agent.end(**final("COMPLETED", agent.record()))
    assert [document["state"] for document in followed][-1] == "COMPLETED"


def test_the_list_is_followed_until_nothing_is_live(
    play: Play, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    agent = play(0)
    view = view_of_runs(None, False)
    followed = changes(watch(view.read, 0.01))
    assert next(followed)[0].live
    agent.kill()
    assert [view.document(jobs)[0]["state"] for jobs in followed] == ["LOST"]


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
