"""What a LaunchConfig is on the command line of ``elaunch run``."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from elaunch.cli.run import parse

pytestmark = pytest.mark.slow  # imports torch

ALWAYS = {
    "nnodes": "1:1",
    "nproc-per-node": "2",
    "role": "default_role",
    "max-restarts": "3",
    "signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "shutdown-timeout": "30",
    "event-log-handler": "null",
}


def flags(**config: Any) -> dict[str, str]:
    """Return the flags of a configuration of one node, without those that all have."""
    from elaunch.torchrun import LaunchConfig
    from elaunch.torchrun.api import _flags

    made = LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, **config})
    found = dict(parse([*_flags(made), "script.py"]).flags)
    return {name: text for name, text in found.items() if ALWAYS.get(name) != text}


CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),  # torch's default backend is etcd, which one node does not need
    ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}, {}),
    ({"rdzv_backend": "static", "rdzv_configs": {"rank": 0}}, {}),
    ({"rdzv_backend": "mistaken"}, {"rdzv-backend": "mistaken"}),  # `elaunch run` refuses it
    (
        {"rdzv_backend": "static", "rdzv_endpoint": "127.0.0.1:29500", "run_id": "none"},
        {"rdzv-endpoint": "127.0.0.1:29500", "rdzv-id": "none"},
    ),
    (
        {"max_nodes": 4, "rdzv_backend": "c10d", "rdzv_endpoint": "h:1", "run_id": "job"},
        {"nnodes": "1:4", "rdzv-backend": "c10d", "rdzv-endpoint": "h:1", "rdzv-id": "job"},
    ),
    (
        {"min_nodes": 2, "max_nodes": 2, "rdzv_endpoint": "h:1", "rdzv_timeout": 60}
        | {"rdzv_backend": "static", "rdzv_configs": {"rank": 1}},
        {"nnodes": "2:2", "rdzv-endpoint": "h:1", "rdzv-conf": "rank=1,timeout=60"},
    ),
    (
        {"log_line_prefix_template": "<${rank}> "},
        {"log-line-prefix-template": "<${rank}> "},
    ),
    ({"duplicate_stdout_filters": ["a,b", "c"]}, {"duplicate-stdout-filters": "a,,b,c"}),
    (
        {"virtual_local_rank": True, "shutdown_timeout": 5, "local_addr": "h", "role": "r"},
        {"virtual-local-rank": "yes", "shutdown-timeout": "5", "local-addr": "h", "role": "r"},
    ),
    (
        {"monitor_interval": 2.0, "max_restarts": 0},
        {"monitor-interval": "2.0", "max-restarts": "0"},
    ),
]


@pytest.mark.parametrize(("config", "expected"), CASES, ids=range(len(CASES)))
def test_a_configuration_is_flags(config: dict[str, Any], expected: dict[str, str]) -> None:
    """What torch itself puts in and means nothing is left out."""
    from elaunch.torchrun import LaunchConfig

    lacks = config.keys() - {field.name for field in dataclasses.fields(LaunchConfig)}
    if lacks:
        pytest.skip(f"this torch has no {lacks}")
    assert flags(**config) == expected


def test_every_field_of_torchs_is_known() -> None:
    """A newer torch's own is named by this test, and on the log of a program that sets it."""
    from torch.distributed.launcher.api import LaunchConfig

    from elaunch.torchrun.api import FIELDS

    assert {field.name for field in dataclasses.fields(LaunchConfig)} <= FIELDS


@pytest.mark.parametrize("name", ["elastic_launch", "launch_agent", "run", "main"])
def test_calls_are_torchs(name: str) -> None:
    """The same parameters by name and by position, with the same defaults; those that are newer."""
    from torch.distributed import run
    from torch.distributed.launcher import api

    from elaunch import torchrun

    def called(module: Any) -> list[tuple[str, Any, Any]]:
        shown = inspect.signature(getattr(module, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in shown]

    theirs, own = called(api if hasattr(api, name) else run), called(torchrun)
    assert own[: len(theirs)] == theirs
    assert [name for name, _, _ in own[len(theirs) :]] in ([], ["health_check_server"])


def test_logs_are_where_they_are_asked_for(tmp_path: Path) -> None:
    """A directory, streams of all ranks or of some, the ranks of the console; nothing in /tmp."""
    from elaunch.torchrun import DefaultLogsSpecs, LaunchConfig, Std

    assert LaunchConfig(1, 1, 2).logs_specs.root_log_dir == os.devnull
    streams: dict[int, Any] = {0: Std.OUT, 1: Std.ALL}
    specs = DefaultLogsSpecs(str(tmp_path), Std.ERR, streams, local_ranks_filter={1, 0})
    assert flags(logs_specs=specs) == {
        "log-dir": str(tmp_path),
        "redirects": "2",
        "tee": "0:1,1:3",
        "local-ranks-filter": "0,1",
    }


def test_what_has_no_effect_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the log of elaunch."""
    from elaunch.torchrun.api import _no_effect

    _no_effect.cache_clear()
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    flags(metrics_cfg={"a": "b"})
    flags(metrics_cfg={"a": "b"})
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("elaunch: metrics_cfg has no effect: ")


def test_a_field_that_elaunch_does_not_know_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a newer torch may have it: only where it is set, and the launch goes on."""
    from elaunch.torchrun import LaunchConfig
    from elaunch.torchrun.api import _flags, _no_effect

    @dataclasses.dataclass
    class Newer(LaunchConfig):
        colour: str = "red"
        words: list[str] = dataclasses.field(default_factory=list)

    _no_effect.cache_clear()
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    assert _flags(Newer(1, 1, 2)) == _flags(LaunchConfig(1, 1, 2))
    assert caplog.records == []
    assert _flags(Newer(1, 1, 2, colour="blue")) == _flags(LaunchConfig(1, 1, 2))
    (line,) = [each.getMessage() for each in caplog.records]
    assert line == "elaunch: LaunchConfig.colour has no effect: elaunch does not know it"


def test_torchs_own_configuration_is_taken() -> None:
    """A program may import the one from torch, and the other from elaunch."""
    from torch.distributed.launcher.api import LaunchConfig

    import elaunch.torchrun
    from elaunch.torchrun.api import _flags

    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    assert isinstance(elaunch.torchrun.LaunchConfig(1, 1, 2), LaunchConfig)
    named = parse([*_flags(config), "script.py"]).flags
    assert named["log-dir"] == config.logs_specs.root_log_dir
    os.rmdir(named["log-dir"])
