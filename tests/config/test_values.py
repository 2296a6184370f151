"""Text to value: what each kind of value takes, and the reason where it does not."""

from __future__ import annotations

import signal

import pytest

from elaunch.config import values
from elaunch.config.flags.table import FLAGS
from elaunch.config.values import StreamMap
from tests.tables import each

BY_NAME = {flag.name: flag for flag in FLAGS}

GOOD = [
    ("nnodes", "1", (1, 1)),
    ("nnodes", "2:4", (2, 4)),
    ("nproc-per-node", "8", "8"),
    ("nproc-per-node", " 08 ", "8"),
    ("nproc-per-node", "gpu", "gpu"),
    ("nproc-per-node", "npu", "npu"),
    ("nproc-per-node", "privateuseone", "privateuseone"),
    ("rdzv-backend", "etcd_v2", "etcd-v2"),
    ("rdzv-endpoint", "localhost", "localhost"),
    ("rdzv-endpoint", "[::1]:29400", "[::1]:29400"),
    ("rdzv-endpoint", "a:1,b:2", "a:1,b:2"),
    ("rdzv-conf", "", {}),
    ("rdzv-conf", " a=1".replace("a", "timeout"), {"timeout": "1"}),
    ("rdzv-conf", "is_host=true,store_type=tcp", {"is_host": "true", "store_type": "tcp"}),
    ("standalone", "1", True),
    ("standalone", "7", True),
    ("standalone", "0", False),
    ("standalone", "True", True),
    ("standalone", "off", False),
    ("max-restarts", "3", 3),
    ("monitor-interval", "0.5", 0.5),
    ("shutdown-timeout", "0", 0.0),
    ("shutdown-timeout", "2.5", 2.5),
    ("start-method", "Spawn", "spawn"),
    ("redirects", "3", StreamMap(3)),
    ("tee", "0:1,12:3", StreamMap(0, {0: 1, 12: 3})),
    ("local-ranks-filter", "0,11", frozenset({0, 11})),
    ("local-ranks-filter", "", None),
    ("duplicate-stdout-filters", "a,b,,c", ("a", "b,c")),
    ("duplicate-stdout-filters", "", ()),
    ("signals-to-handle", "SIGTERM,usr1,SIGTERM", (signal.SIGTERM, signal.SIGUSR1)),
    ("preload", "none", ()),
    ("preload", "torch,numpy.random", ("torch", "numpy.random")),
    ("preload", "torch,+torch._dynamo", ("torch", "+torch._dynamo")),
    ("master-port", "0", 0),
    ("rdzv-id", "", ""),
    ("on-join", "Now", "now"),
    ("hang-timeout", "off", None),
    ("hang-timeout", "Auto", "auto"),
    ("hang-timeout", "0.5", 0.5),
    ("progress-regex", r"step (\d+)", r"step (\d+)"),
    ("progress-regex", "(?:a|b) done", "(?:a|b) done"),
    ("strict-symmetry", "yes", True),
]


@each(("name", "text", "value"), GOOD)
def test_a_good_value_is_read(name: str, text: str, value: object) -> None:
    """Torchrun's forms, and what elaunch takes beyond them."""
    assert BY_NAME[name].kind.read(text) == value


BAD = [
    ("nnodes", "a", "is not a whole number"),
    ("nnodes", "1:2:3", "N or MIN:MAX"),
    ("nnodes", "0", "fewer than 1 node"),
    ("nnodes", "2:1", "MIN (2) larger than its MAX (1)"),
    ("nnodes", "", "is not a whole number"),
    ("nproc-per-node", "0", "at least 1 worker"),
    ("hang-timeout", "0", "is not more than 0 seconds; off switches it off"),
    ("hang-timeout", "-1", "is less than 0 seconds; auto and off are the other values"),
    ("hang-timeout", "10x", "with a unit: 90s, 30m, 3h; auto and off are the other values"),
    ("progress-regex", "", "is empty"),
    ("progress-regex", "step (", "is not a regular expression: missing )"),
    ("progress-regex", "(a)(b)", "has 2 groups; one at most"),
    ("nproc-per-node", "-1", "at least 1 worker"),
    ("nproc-per-node", "1.5", "is not a whole number"),
    ("nproc-per-node", "gpus", "did you mean 'gpu'?"),
    ("nproc-per-node", "offx", "is neither a number nor a device to count"),
    ("nproc-per-node", "GPU", "did you mean 'gpu'?"),
    ("nproc-per-node", "cuda", "did you mean 'gpu'?"),
    ("nproc-per-node", "autos", "did you mean 'auto'?"),
    ("nproc-per-node", "", "is not a whole number"),
    ("rdzv-backend", "c10", "did you mean 'c10d'?"),
    ("rdzv-endpoint", "host:123456", "a number from 0 to 65535"),
    ("rdzv-endpoint", "host:x", "a number from 0 to 65535"),
    ("rdzv-endpoint", "[::1:80", "has no IPv6 address between its brackets"),
    ("rdzv-endpoint", ":80", "has no host before its port"),
    ("rdzv-endpoint", "a b:80", "has no valid host"),
    ("rdzv-conf", "jon_timeout=3", "did you mean 'join_timeout'?"),
    ("rdzv-conf", "timeout", "gives no value to the key 'timeout'"),
    ("rdzv-conf", "=3", "key=value"),
    ("rdzv-conf", "timeout=abc", "'abc' is not a number of seconds"),
    ("rdzv-conf", "is_host=maybe", "neither yes nor no"),
    ("rdzv-conf", "store_type=tpc", "did you mean 'tcp'?"),
    ("standalone", "ture", "did you mean 'true'?"),
    ("max-restarts", "-1", "is less than 0"),
    ("max-restarts", "abc", "is not a whole number"),
    ("monitor-interval", "0", "is not more than 0"),
    ("shutdown-timeout", "-1", "is less than 0"),
    ("shutdown-timeout", "nan", "finite"),
    ("shutdown-timeout", "soon", "is not a number of seconds"),
    ("start-method", "spwan", "did you mean 'spawn'?"),
    ("redirects", "4", "neither 0, 1, 2 or 3"),
    ("redirects", "0:1,", "neither 0, 1, 2 or 3"),
    ("redirects", "0:7", "neither 0, 1, 2 or 3"),
    ("local-ranks-filter", "a", "is not a whole number"),
    ("local-ranks-filter", "-1", "is less than 0"),
    ("signals-to-handle", "SIGTERN", "did you mean 'SIGTERM'?"),
    ("signals-to-handle", "SIGKILL", "no process can handle"),
    ("forward-signals", "STOP", "no process can handle"),
    ("forward-signals", "SIGCHLD", "the agent needs"),
    ("master-port", "65536", "is more than 65535"),
    ("node-rank", "-1", "is less than 0"),
    ("numa-binding", "nodes", "did you mean 'node'?"),
    ("event-log-handler", "consol", "did you mean 'console'?"),
    ("preload", "torch numpy", "not the name of a module"),
    ("preload", "torch,++numpy", "not the name of a module"),
    ("role", " ", "is empty"),
    ("rdzv-id", "a\nb", "cannot be printed"),
    ("rdzv-id", "x" * 201, "longer than 200 bytes"),
    ("exit-codes", "torch", "did you mean 'torchrun'?"),
]


@each(("name", "text", "reason"), BAD)
def test_a_bad_value_is_refused_with_its_reason(name: str, text: str, reason: str) -> None:
    """The reason continues a sentence that begins with the value."""
    with pytest.raises(ValueError) as error:
        BY_NAME[name].kind.read(text)
    assert reason in str(error.value)


def test_a_stream_map_answers_for_every_rank() -> None:
    """A rank that the map does not name has the default."""
    assert [StreamMap(0, {1: 3}).of(rank) for rank in (0, 1, 20)] == [0, 3, 0]
    assert StreamMap(2).of(5) == 2
    assert not StreamMap() and StreamMap(1) and not StreamMap(0, {1: 0})


@pytest.mark.parametrize(
    ("text", "level"), [("warning", "WARNING"), ("Warn", "WARNING"), ("DEBUG", "DEBUG")]
)
def test_a_log_level_is_taken_in_any_case(text: str, level: str) -> None:
    """Torchrun takes upper case only."""
    assert values.log_level(text) == level


def test_every_default_is_a_value_of_its_flag() -> None:
    """A default goes through the same reader as what a user writes."""
    for flag in FLAGS:
        if flag.default is not None:
            flag.kind.read(flag.default)


@pytest.mark.parametrize(
    ("raw", "number"),
    [("90", 90.0), ("1.5", 1.5), ("1e3", 1000.0), ("90s", 90.0), ("1.5h", 5400.0)],
)
def test_seconds_with_and_without_a_unit(raw: str, number: float) -> None:
    """As the durations of every other command."""
    assert values.seconds(raw) == number
