"""Rounds of many agents on one machine: how long they take, and what the store's traffic is.

A crowd is a handful of light processes with some hundreds of agents each (cluster_agents.py;
torchrun's in cluster_handlers.py); the first process has one agent, and hosts the TCPStore. All
connections are made before; then

===========  =================================================================================
figure       from … to
===========  =================================================================================
form         "go" → the last agent has read the plan of the round, with its rank in it
told         one agent says that a worker failed → the last agent has read that it must stop
traffic      nothing but heartbeats: payload bytes of all TCP connections to the store, both
             ways, per agent and second, from ``ss -ti``
===========  =================================================================================

A store that an agent hosts anew has its first round after a third of the heartbeat timeout at the
earliest (elaunch.rendezvous.member); that is over when "go" is said.

The whole crowd shares the machine's few cores: each figure is a sum over agents that a cluster does
at the same time. With 1,024 agents and more the burst takes an agent longer than it may be silent,
so these rounds are formed with longer heartbeat timeouts; traffic is counted with the default one.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial

import machine
from cluster_crowd import Crowd, TooSlow, crowd
from cluster_figures import C10D, ETCD, OURS, TORCHRUN, TORCHRUN_FRESH, Case, Figure, Options, Trial
from cluster_places import place
from figures import Sample
from job import JobError

from elaunch.config.rendezvous import default_heartbeat

FORM_LIMITS = {
    32: {C10D: 0.1, ETCD: 0.3},
    256: {C10D: 0.15, ETCD: 0.8},
    1024: {C10D: 0.7, ETCD: 3.0},
    4096: {C10D: 6.0},
}
TOLD_LIMITS = {1024: dict.fromkeys(OURS, 0.3)}
TRAFFIC_LIMIT = 120.0

HEARTBEAT_TIMEOUTS = {256: 3.0, 1024: 30.0, sys.maxsize: 90.0}
"""That of the agents of a round: the most agents → seconds."""
NEVER_SECONDS = 60.0
"""After this a round that has not formed is given up."""
QUIET_SECONDS = 3.0
"""From the last agent's word to the first count of bytes: everybody has heard everything."""
TORCHRUN_MOST = 256
"""Agents that torchrun is tried with: 512 have not formed a round within 200 s."""
ETCD_MOST = 1024
"""Agents with etcd: each has a gRPC client, with ten threads or so, all on this machine."""
TRAFFIC_ETCD_MOST = 256
"""Agents with etcd that two cores keep alive with the default heartbeat timeout: a thousand send
2,000 renewals a second through Python's gRPC. Each has its own connection: what one of them costs
does not depend on how many there are."""


def form_cases(options: Options) -> list[Case]:
    """Return one case for each number of agents."""
    sizes = options.sizes.items()
    return [_form_case(options, size, min(count, options.repeats)) for size, count in sizes]


def traffic_cases(options: Options) -> list[Case]:
    """Return the case in which agents only wait."""
    size = options.traffic_agents
    agents = f"{size:,} agents" + (
        f" (etcd {TRAFFIC_ETCD_MOST})" if size > TRAFFIC_ETCD_MOST else ""
    )
    title = f"steady store traffic per agent, {agents}"
    figures = (Figure("traffic", title, "B/s", dict.fromkeys(OURS, TRAFFIC_LIMIT)),)
    repeats = dict.fromkeys(OURS, 1)
    return [Case("traffic", "traffic", figures, partial(_traffic, size), repeats)]


def _form_case(options: Options, size: int, count: int) -> Case:
    forms, told = f"{size:,} agents form a round", f"… first failure → all {size:,} told to stop"
    figures = (
        Figure(f"form-{size}", forms, "s", FORM_LIMITS.get(size, {})),
        Figure(f"told-{size}", told, "s", TOLD_LIMITS.get(size, {})),
    )
    repeats = {C10D: count}
    if size <= ETCD_MOST:
        repeats[ETCD] = count
    if size <= TORCHRUN_MOST:
        repeats |= dict.fromkeys((TORCHRUN, TORCHRUN_FRESH), min(count, options.slow_repeats))
    return Case("form", f"{size} agents", figures, partial(_form, size), repeats)


def _form(size: int, trial: Trial) -> Mapping[str, Sample]:
    ttl = next(ttl for most, ttl in HEARTBEAT_TIMEOUTS.items() if size <= most)
    with (
        place(trial.column, trial.root) as where,
        crowd(trial, where.endpoint, size, (size, ttl)) as people,
    ):
        begin = people.order("go")
        try:
            formed = people.await_all("running", NEVER_SECONDS)
        except TooSlow as slow:
            return {f"form-{size}": Sample(math.inf, f"{slow} {people.report()}")}
        results = {f"form-{size}": Sample(formed - begin, people.trouble())}
        if trial.column in OURS:
            people.order("run")
            people.await_all("told", NEVER_SECONDS)
            time.sleep(QUIET_SECONDS)
            results[f"told-{size}"] = _told(people)
        return results


def _told(people: Crowd) -> Sample:
    people.order("fail", only=len(people.processes) - 1)
    begin = people.await_one("failed", NEVER_SECONDS)
    try:
        return Sample(people.await_all("ending", NEVER_SECONDS) - begin, people.trouble())
    except TooSlow as slow:
        return Sample(math.inf, f"{slow} {people.report()}")


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────


def _traffic(size: int, trial: Trial) -> Mapping[str, Sample]:
    """Count what agents cost that wait for one more to come: the same as while workers run."""
    size = min(size, TRAFFIC_ETCD_MOST) if trial.column == ETCD else size
    window, one_more = trial.options.traffic_window, (size + 1, default_heartbeat(size))
    with (
        place(trial.column, trial.root) as where,
        crowd(trial, where.endpoint, size, one_more) as people,
    ):
        people.order("go")
        time.sleep(2 * QUIET_SECONDS)
        begin, before = time.monotonic(), _payload(where.endpoint)
        time.sleep(window)
        seconds, after = time.monotonic() - begin, _payload(where.endpoint)
        busy = machine.load()
        trouble = people.report()
    per_agent = (after - before) / seconds / size
    return {"traffic": Sample(per_agent, trouble, {"seconds": round(seconds, 2), **busy})}


def _payload(endpoint: str) -> int:
    """Return the bytes of all connections to the store so far.

    Only the clients' ends are counted, and of both directions what has arrived.

    Raises:
        JobError: ``ss`` is not installed or does not answer.
    """
    port = endpoint.rpartition(":")[2]
    try:
        said = subprocess.run(
            ["ss", "-tinpHO", f"dport = :{port}"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise JobError(f"bytes cannot be counted (ss, of iproute2): {error}") from error
    return sum(map(int, re.findall(r"\bbytes_(?:acked|received):(\d+)", said.stdout)))
