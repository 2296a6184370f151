"""Keys in credentials of MUNGE, with a real munged."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from elaunch.rendezvous import munge
from elaunch.rendezvous.munge import MungeError
from tests import munged
from tests.munged import NOBODY, Munged

KEY = bytes(range(munge.KEY_BYTES))
TOLD = {"elaunch": 1, "run_id": "job", "key": KEY.hex()}


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Munged]:
    """Run a munged, and have this process find it."""
    made = Munged()
    monkeypatch.setenv("PATH", made.path)
    yield made
    made.close()


def test_a_key_is_read_as_often_as_agents_need_it(daemon: Munged) -> None:
    """Those of one node read the same credential, which munged calls a replay."""
    credential = munge.make(KEY, "job")
    assert KEY.hex().encode() not in credential
    assert [munge.read(credential, "job") for _ in range(3)] == [KEY] * 3


def test_a_key_is_read_on_another_node(daemon: Munged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has a munged of its own, with the same key."""
    credential = munge.make(KEY, "job")
    other = Munged(daemon.key)
    try:
        monkeypatch.setenv("PATH", other.path)
        assert munge.read(credential, "job") == KEY
    finally:
        other.close()


@pytest.mark.slow
def test_a_key_outlives_its_credential(daemon: Munged) -> None:
    """An agent may join after the longest time that munged takes."""
    credential = daemon.credential(json.dumps(TOLD).encode(), ttl=1)
    time.sleep(2.1)  # whole seconds of the wall clock
    assert munge.read(credential, "job") == KEY


@pytest.mark.slow
def test_another_user_cannot_read_it(daemon: Munged) -> None:
    """munged itself refuses, also when the credential has expired."""
    munged.other_users_needed()
    credentials = [daemon.credential(json.dumps(TOLD).encode(), ttl=ttl) for ttl in (-1, 1)]
    time.sleep(2.1)  # whole seconds of the wall clock
    argv = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", str(daemon.programs / "unmunge")]
    for credential in credentials:
        done = subprocess.run(argv, input=credential, capture_output=True, timeout=60)
        assert b"Unauthorized credential" in done.stderr and not done.stdout


def test_a_key_of_another_user_is_refused(daemon: Munged) -> None:
    """Whatever it says."""
    munged.other_users_needed()
    credential = daemon.credential(json.dumps(TOLD).encode(), uid=NOBODY)
    with pytest.raises(MungeError, match="the user with uid 65534 has made it, and not"):
        munge.read(credential, "job")


def test_a_key_of_another_cluster_is_refused(daemon: Munged) -> None:
    """Its munged has another key."""
    other = Munged()
    try:
        credential = other.credential(json.dumps(TOLD).encode())
    finally:
        other.close()
    with pytest.raises(MungeError, match="Invalid credential"):
        munge.read(credential, "job")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"run_id": "job"}',
        b'{"run_id": "job", "key": 5}',
        b'{"run_id": "job", "key": "ab"}',
        b'{"run_id": "other", "key": "' + KEY.hex().encode() + b'"}',
        b"STATUS: 0\nUID: 0\n\n",
    ],
)
def test_what_else_this_user_has_made_is_refused(daemon: Munged, payload: bytes) -> None:
    """Slurm's commands make credentials for their user all the time."""
    with pytest.raises(MungeError):
        munge.read(daemon.credential(payload), "job")


@pytest.mark.parametrize("found", [b"", b"garbage", b"MUNGE:", b"MUNGE:\xff:", b"M" * 10**6])
def test_garbage_is_refused(daemon: Munged, found: bytes) -> None:
    """Before a program is started for it."""
    with pytest.raises(MungeError, match="it is no credential of MUNGE"):
        munge.read(found, "job")


@pytest.mark.slow
def test_a_munged_that_does_not_answer_is_told(
    daemon: Munged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen: after a deadline. Ended: with munge's own words. Not installed: by name."""
    monkeypatch.setattr(munge, "DEADLINE", 1.0)
    daemon.freeze()
    with pytest.raises(MungeError, match="munge has not answered for 1 s: does munged run"):
        munge.make(KEY, "job")
    daemon.stop()
    with pytest.raises(MungeError, match="Did you start munged"):
        munge.make(KEY, "job")
    monkeypatch.setenv("PATH", str(daemon.key.parent))
    assert not munge.is_there()
    with pytest.raises(MungeError, match="munge is not on the PATH"):
        munge.make(KEY, "job")
