"""Fixtures that more than one test module uses."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from tests import netns, programs, sessions, warm
from tests.cluster import Cluster
from tests.launching import Launcher, clean_environment

# Tests run beside others on a busy machine: how long examples take says nothing. They are others
# each time, so a few are enough; `make trials` tries many.
settings.register_profile(
    "project", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25
)
settings.load_profile("project")
settings.register_profile("trials", settings.get_profile("project"), max_examples=300)


OF_THE_PROCESS = re.compile(r"etcd|checkpoint \d+ rank \d+")
"""Names of threads that end with the process: one for all etcds, a save's whose node is dead."""

THREADS_END_S = 5.0

_LINKS = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that ``make test`` passes."""
    parser.addoption(
        "--strict-machine",
        action="store_true",
        help="fail tests, instead of skipping them, for a program that is not installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give the session, and its worker processes, the programs of the list and no others."""
    gc.disable()  # to the end of the collection, which makes next to no garbage
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    config.stash[_LINKS] = programs.directory_of_links()
    os.environ["PATH"] = str(config.stash[_LINKS])
    if config.getoption("--strict-machine"):
        os.environ[programs.STRICT] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork the session's worker processes, and what they start, from one that has torch."""
    warm.fork_workers(specs, clean_environment(Path()))
    threading.Thread(target=sessions.fill_files_of_hypothesis).start()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Have each of xdist's processes import the modules of a folder in an order of its own.

    In the same order all of them would rewrite each module for its assertions at the same time,
    where that is not kept from another session: twice what a collection costs else.
    """
    report = yield
    if "PYTEST_XDIST_WORKER" in os.environ and isinstance(collector, pytest.Directory):
        random.Random(os.environ["PYTEST_XDIST_WORKER"]).shuffle(report.result)
    return report


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: Any) -> list[pytest.Item] | None:
    """Make nothing of a trial that would be left out: that is a third of a collection."""
    if not sessions.leaves_trials_out(collector.config.option.markexpr):
        return None
    marks = [*collector.iter_markers("trial"), *getattr(obj, "pytestmark", [])]
    return [] if any(getattr(mark, "name", "") == "trial" for mark in marks) else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """See there; parameters that are no trials keep their names."""
    if sessions.leaves_trials_out(metafunc.config.option.markexpr):
        calls = [call for call in metafunc._calls if all(m.name != "trial" for m in call.marks)]
        metafunc._calls = calls or metafunc._calls


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the modules with long ones first, those with several nodes before all.

    So no process is left with one at the end. A module stays whole, and what it starts is started
    once. The order is the same in all processes.
    """
    places: dict[Path, int] = {}
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        nodes = slow and "cluster" in getattr(item, "fixturenames", ())
        places[item.path] = min(places.get(item.path, 2), 0 if nodes else 2 - slow)
    items.sort(key=lambda item: (places[item.path], item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the process one that runs tests: with default signals for what it starts, and cheap.

    Garbage is looked for again, but not among a million objects that stay to the end.
    """
    sessions.handle_what_is_ignored()
    sessions.let_loggers_propagate()
    sessions.send_less(session.config)
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what ``pytest_configure`` has made."""
    if _LINKS in config.stash:
        shutil.rmtree(config.stash[_LINKS])


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Have a thread of C show all stacks and end this process; one of Python costs more."""
    file = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=file)
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer() -> bool:
    """See there."""
    faulthandler.cancel_dump_traceback_later()
    return True


@pytest.fixture(autouse=True)
def _threads_end_with_the_test() -> Iterator[None]:
    """Wait for the threads that the test has started; the next test would catch what they log."""
    before = {*threading.enumerate()}
    yield
    until = time.monotonic() + THREADS_END_S
    for thread in threading.enumerate():
        if thread not in before and not OF_THE_PROCESS.fullmatch(thread.name):
            thread.join(max(0.0, until - time.monotonic()))


@pytest.fixture
def elaunch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Run the real command, ``run(args)`` or ``start(args)``; it may leave no process behind.

    It is forked from a process that has torch already, unless the test has the marker ``executed``.
    """
    executed = request.node.get_closest_marker("executed") is not None
    launcher = Launcher(tmp_path, forks=not executed)
    yield launcher
    launcher.close()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[int], Cluster]]:
    """Make machines, ``cluster(count)``; no process may be left behind in them."""
    forks = request.node.get_closest_marker("executed") is None
    netns.needed()
    with ExitStack() as clusters:

        def build(count: int) -> Cluster:
            made = Cluster(tmp_path, count, forks=forks)
            clusters.callback(made.close)
            return made

        yield build
