"""The look for the newest complete checkpoint, before the first round and for each one that comes.

Before the first round a thread looks at the directory (`DirectoryProbe`), so that a job that cannot
save does not begin. Storage may hang: the answer, ``events.DirectoryProbed``, comes after ANSWER_S
at the latest, and at once where there is no directory. With several nodes and one directory this
also leaves the mark by which the coordinator sees that they share it (elaunch.checkpoint.probe,
elaunch.rendezvous.decide.checkpoints).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from elaunch.agent.patience import logged_wait
from elaunch.agent.policy import events
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.checkpoint.records import Checkpoint, Committed, SearchOutcome
from elaunch.config import Settings
from elaunch.errors import CheckpointError, ElaunchError, UsageError
from elaunch.rendezvous.decide import view

log = logging.getLogger("elaunch")

STILL = (
    "still looking for the newest complete checkpoint in {root}, for {seconds:.0f} s: files are "
    "read and compared with their checksums, if the storage answers at all"
)


def look(
    settings: Settings, finisher: DirectoryFinisher, asked: view.Search
) -> events.CheckpointChosen:
    """Return what is found below ``--checkpoint-dir``; blocks as long as the storage does.

    What the round before has left there is finished first, and what is damaged is put aside: nobody
    else may write there meanwhile, so an earlier search is waited for.
    """
    root = settings.checkpoint_dir
    assert root is not None  # the policy asks only then
    shared = settings.run_id_given or settings.rendezvous is not None
    run_id = settings.run_id if shared else None
    problem, exit_code = None, CheckpointError.exit_code
    try:
        finisher.jobs.update(asked.jobs)
        finisher.held = _held(asked)
        with logged_wait(lambda seconds: STILL.format(root=root, seconds=seconds)), finisher.turn:
            finisher.finish(root, run_id)
            search = _search(root, settings.checkpoint_glob, run_id, finisher)
            if isinstance(root, Path):
                finisher.put_aside(root, search.passed_over, run_id)
                _point_to(search)
            if settings.require_resume and search.checkpoint is None:
                problem = _lost(settings, search)
        chosen = search.checkpoint
        finisher.retire("" if chosen is None else chosen.name)
    except ElaunchError as error:
        search, problem = SearchOutcome(None), str(error)
        exit_code = error.exit_code
    except Exception as error:  # the round waits for the answer, whatever it is
        search, problem = SearchOutcome(None), f"{root}: {type(error).__name__}: {error}"
    unreadable = [passed.reason for passed in search.passed_over if passed.path == root]
    if unreadable:  # not the same as a directory without checkpoints: nobody may start afresh
        problem = f"{root}: {unreadable[0]}"
    return events.CheckpointChosen(search, problem, exit_code)


def _lost(settings: Settings, search: SearchOutcome) -> str | None:
    """Return why a job with ``--require-resume`` may not start afresh, None if it may."""
    root = settings.checkpoint_dir
    entries = count_entries(root) if isinstance(root, Path) else len(search.passed_over)
    if not entries:
        return None
    passed = next((f"; {one.path}: {one.reason}" for one in search.passed_over), "")
    return (
        f"--require-resume is given, and none of the {entries} entries of {root} can be resumed "
        f"from{passed}; name them by --checkpoint-glob, or leave the "
        "flag out to start afresh"
    )


def count_entries(root: Path) -> int:
    """Return how many entries a checkpoint directory has that scripts may have saved."""
    from elaunch.checkpoint import layout

    try:
        names = set(os.listdir(root)) - {layout.RUN}
    except OSError:
        return 0  # it is not there yet, or the search has reported it
    with contextlib.suppress(OSError):
        names.update(os.listdir(root / layout.QUARANTINE))
    return sum(not name.startswith(".") for name in names)


def _point_to(search: SearchOutcome) -> None:
    """Have DeepSpeed load what was chosen, where a newer one was skipped."""
    from elaunch.checkpoint.formats import deepspeed

    chosen = search.checkpoint
    if chosen is None or chosen.format != deepspeed.FORMAT or search.found is None:
        return
    before = deepspeed.point_to(search.found)
    if before:
        log.warning(
            "%s/%s named %s; it names %s now, so that load_checkpoint takes that",
            chosen.path,
            deepspeed.LATEST,
            before,
            search.found.name,
        )


def _search(
    root: Path | str, glob: str | None, run_id: str | None, finisher: DirectoryFinisher
) -> SearchOutcome:
    from elaunch.checkpoint.search.latest import find_latest, newest_in  # not for jobs without any

    doubted = finisher.doubted(root)
    if isinstance(root, Path):
        search = find_latest(root, glob=glob, run_id=run_id, doubted=doubted)
        if doubted is not None and search.checkpoint is not None:
            doubted.discard(Path(search.checkpoint.path).name)
        return search
    from elaunch.checkpoint.formats.own import FORMAT
    from elaunch.checkpoint.storage.storage import open_storage

    storage = open_storage(root)

    def verify(found: Committed) -> None:
        name = Path(found.place).name
        try:
            storage.verify(found, run_id, content=doubted is None or name in doubted)
        except CheckpointError as error:
            if run_id in (None, found.run_id):
                storage.quarantine(found, str(error))
            raise
        if doubted is not None:
            doubted.discard(name)

    newest, passed = newest_in(storage.newest_first(), verify)
    if newest is None:
        return SearchOutcome(None, tuple(passed))
    chosen = Checkpoint(newest.place, newest.step, FORMAT, newest.round)
    return SearchOutcome(chosen, tuple(passed))


def for_all_nodes(
    settings: Settings,
    post: Callable[[events.Event], None],
    finisher: DirectoryFinisher,
) -> Callable[[view.Search], view.SearchResult]:
    """Return the coordinator's search: what it finds, every node resumes from.

    What it finds is posted to the agent's loop as well, for its log.
    """

    def search(asked: view.Search) -> view.SearchResult:
        unseen = _unseen(settings, asked.probes)
        if unseen:  # nodes that share no directory share no checkpoint either
            return view.SearchResult(probes=asked.probes, unseen=unseen)
        chosen = look(settings, finisher, asked)
        post(chosen)
        return replace(chosen.result, probes=asked.probes)

    return search


def _held(asked: view.Search) -> frozenset[str]:
    """Return the stages of which agents have shards in memory."""
    from elaunch.checkpoint import layout

    held = (one for status in asked.present.values() for one in status.held)
    return frozenset(layout.stage_name(one.step, one.round, one.uuid) for one in held)


def _unseen(settings: Settings, probes: frozenset[str]) -> frozenset[str]:
    """Return the marks of other nodes that are not seen from here, after a bounded time."""
    if not probes or not isinstance(settings.checkpoint_dir, Path):
        return frozenset()
    from elaunch.checkpoint import probe

    return probe.unseen(settings.checkpoint_dir, probes)


ANSWER_S: Final = 30.0
CLOSE_S: Final = 2.0
"""Seconds at the end for the storage to take the mark back."""


class DirectoryProbe:
    """Owns the thread, and the mark in the directory while the agent lives.

    Args:
        settings: of the job; without a directory on a file system there is nothing to look at.
        post: takes the answer.
    """

    def __init__(self, settings: Settings, post: Callable[[events.Event], None]) -> None:
        self._settings = settings
        self._post = post
        root = settings.checkpoint_dir
        self._root = root if isinstance(root, Path) else None
        shares = settings.rendezvous is not None and not settings.checkpoint_local
        self.nonce = os.urandom(8).hex() if shares and self._root is not None else ""
        """Name of the mark; "" where no other node has to see one."""
        self._marked = False

    def start(self) -> None:
        """Begin to look, if there is anything to look at."""
        if self._root is None:
            self._post(events.DirectoryProbed())
        else:
            threading.Thread(
                target=self._run, args=(self._root,), name="probe", daemon=True
            ).start()

    def close(self) -> None:
        """Take the mark back, if the storage answers within CLOSE_S."""
        if self._marked and self._root is not None:
            from elaunch import atonce
            from elaunch.checkpoint import probe

            atonce.within(CLOSE_S, partial(probe.remove_mark, self._root, self.nonce), "unprobe")

    def _run(self, root: Path) -> None:
        from elaunch import atonce

        found: list[str] = []
        try:
            if not atonce.within(ANSWER_S, lambda: found.append(self._look(root)), "probe files"):
                raise UsageError(
                    f"--checkpoint-dir {root}: the file system has not answered on "
                    f"{os.uname().nodename} within {ANSWER_S:g} s; is its server up?"
                )
        except UsageError as error:
            self._post(events.DirectoryProbed(str(error)))
        except Exception as error:  # the loop waits for the answer, whatever it is
            problem = f"--checkpoint-dir {root}: {type(error).__name__}: {error}"
            self._post(events.DirectoryProbed(problem))
        else:
            self._post(events.DirectoryProbed(remark=found[0]))

    def _look(self, root: Path) -> str:
        """Return what is odd about the directory, or ""; leave the mark, if any."""
        from elaunch.checkpoint import probe

        settings = self._settings
        remark = probe.check(root, settings.checkpoint_local, bool(settings.checkpoint_keep))
        if self.nonce:
            self._marked = True
            probe.leave_mark(root, self.nonce)
        return remark
