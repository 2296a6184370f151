"""elaunch.views.store: whole jobs read from real stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.config.rendezvous import RendezvousSettings
from elaunch.errors import StoreDenied, StoreUnreachable, UsageError
from elaunch.rendezvous.plan import Plan
from elaunch.rendezvous.records import RecordError, encode, encode_plan
from elaunch.store.etcd.cluster import EtcdCluster
from elaunch.views.json import store_job
from elaunch.views.store import JobStore, StoreJob, look, read_jobs, run_ids
from elaunch.views.watch import changes, watch
from tests.launching import wait_until
from tests.store.memory import MemoryHub
from tests.views.jobs import BACKENDS, Meetings, PlayedJob, record


@pytest.fixture(params=sorted(BACKENDS))
def meetings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meetings]:
    """Give a real store of every backend in turn."""
    with BACKENDS[request.param](tmp_path) as meetings:
        yield meetings


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Meetings]:
    """Give an etcd."""
    with BACKENDS["etcd"](tmp_path) as meetings:
        yield meetings


def reading(meetings: Meetings, run_id: str = "train-1") -> StoreJob:
    """Return one reading of a job."""
    with closing(JobStore(meetings.settings, run_id)) as reader:
        return reader.read()


@pytest.mark.slow
def test_a_job_is_read_from_its_store(meetings: Meetings) -> None:
    with PlayedJob(meetings, "train-1", nodes=2) as job:
        wait_until(lambda: all(n["agent_state"] for n in store_job(reading(meetings))["nodes"]))
        found = reading(meetings)
        document = store_job(found)
        assert (document["run_id"], document["state"], found.live) == ("train-1", "RUNNING", True)
        assert [node["state"] for node in document["nodes"]] == ["alive", "alive"]
        assert [node["last_rank"] for node in document["nodes"]] == [1, 3]
        assert document["place"] == job.stores[0].name
        job.stores[1].withdraw()
        wait_until(lambda: store_job(reading(meetings))["nodes"][1]["state"] == "gone")
        job.post(phase="over", exit_code=0, reason="all workers ended with 0")
        found = reading(meetings)
        assert (found.state, found.live) == ("COMPLETED", False)


@pytest.mark.slow
def test_agents_that_gather_have_no_plan_yet(meetings: Meetings) -> None:
    with closing(meetings.open("train-1")) as store:
        store.enrol("aaaaaa", encode(record(1, state="joining", round=-1), None, "aaaaaa"), 60.0)
        # A TCPStore tells readers a moment later.
        wait_until(lambda: store_job(reading(meetings))["joining"])
        document = store_job(reading(meetings))
    assert (document["state"], document["round"]) == ("FORMING", None)
    assert [node["host"] for node in document["joining"]] == ["node1"]


@pytest.mark.slow
def test_reading_changes_nothing(meetings: Meetings) -> None:
    with PlayedJob(meetings, "train-1", nodes=2) as job:
        before = (job.stores[0].latest(), set(job.stores[0].members()))
        for _ in range(3):
            reading(meetings)
        assert (job.stores[0].latest(), set(job.stores[0].members())) == before


@pytest.mark.slow
def test_the_store_knows_its_jobs(meetings: Meetings) -> None:
    with PlayedJob(meetings, "train-1"):
        assert run_ids(meetings.settings) == ("train-1",)
        with pytest.raises(UsageError, match=r"there is no job 'train-2' in .*: train-1$"):
            reading(meetings, "train-2")


@pytest.mark.slow
def test_a_new_plan_is_seen_at_once(meetings: Meetings) -> None:
    """Although the interval is a minute."""
    with (
        PlayedJob(meetings, "train-1") as job,
        closing(JobStore(meetings.settings, "train-1")) as reader,
    ):
        followed = changes(watch(lambda: [reader.read()], 60.0, reader.wait))
        assert next(followed)[0].state == "RUNNING"
        later = threading.Timer(0.2, lambda: job.post(phase="over", exit_code=0))
        later.start()
        began = time.monotonic()
        assert [each.state for (each,) in followed] == ["COMPLETED"]
        assert time.monotonic() - began < 30
        later.join()


def test_a_secret_is_needed_where_the_agents_have_one(meetings: Meetings) -> None:
    with PlayedJob(meetings, "train-1", secret=b"right"):
        hosted = meetings.settings.backend == "c10d"  # it does not let them in
        wrong = "has another secret" if hosted else "signature is wrong"
        none = "have a secret: give the same" if hosted else "no --rdzv-secret-file"
        for secret, why in ((None, none), (b"wrong", wrong)):
            other = replace(meetings.settings, secret=secret)
            with (
                closing(JobStore(other, "train-1")) as reader,
                pytest.raises(StoreDenied if hosted else RecordError, match=why),
            ):
                reader.read()
        right = replace(meetings.settings, secret=b"right")
        with closing(JobStore(right, "train-1")) as reader:
            assert reader.read().state == "RUNNING"


@pytest.mark.slow
def test_a_store_that_nobody_answers_for_is_an_error(meetings: Meetings) -> None:
    meetings.close()
    settings = replace(meetings.settings, connect_timeout=1.0)
    with closing(JobStore(settings, "train-1")) as reader, pytest.raises(StoreUnreachable):
        reader.read()
    with pytest.raises(StoreUnreachable):
        run_ids(settings)


@pytest.mark.slow
def test_while_watching_a_silent_store_is_waited_for(meetings: Meetings) -> None:
    now = [0.0]
    settings = replace(meetings.settings, store_timeout=30.0, connect_timeout=5.0)
    with (
        PlayedJob(meetings, "train-1") as job,
        closing(JobStore(settings, "train-1", clock=lambda: now[0])) as reader,
    ):
        first = reader.read()
        job.close()
        meetings.close()
        now[0] = 29.0
        second = reader.read()
        assert second.live and second.gist != first.gist
        assert second.stale and second.state == "RUNNING"
        now[0] = 30.0
        with pytest.raises(StoreUnreachable):
            reader.read()


def test_one_agent_that_is_refused_does_not_hide_the_others() -> None:
    hub = MemoryHub()
    with closing(hub.store()) as good, closing(hub.store()) as bad:
        good.enrol("aaaaaa", encode(record(1), b"right", "aaaaaa"), 60.0)
        bad.enrol("bbbbbb", b"{}", 60.0)
        found = look(good, "r", b"right")
        assert (set(found.members), set(found.refused)) == ({"aaaaaa"}, {"bbbbbb"})
        assert "bbbbbb" in found.refused["bbbbbb"]


def test_without_a_plan_and_with_none_readable_the_refusal_is_the_answer() -> None:
    with closing(MemoryHub().store()) as store:
        store.enrol("aaaaaa", encode(record(1), b"right", "aaaaaa"), 60.0)
        with pytest.raises(RecordError, match="aaaaaa"):
            look(store, "r", b"wrong")


def test_a_plan_that_is_refused_is_the_answer() -> None:
    with closing(MemoryHub().store()) as store:
        store.enrol("aaaaaa", encode(record(1), None, "aaaaaa"), 60.0)
        assert store.await_leadership("aaaaaa", 10.0)
        assert store.publish(1, encode_plan(Plan("maple"), b"other", 1, b""))
        with pytest.raises(RecordError, match="the coordinator"):
            look(store, "r", None)


@pytest.mark.slow
def test_an_etcd_has_many_jobs(etcd: Meetings) -> None:
    assert run_ids(etcd.settings) == ()
    with pytest.raises(UsageError, match="it has none"):
        reading(etcd)
    with PlayedJob(etcd, "b/2") as one, PlayedJob(etcd, "a 1", secret=b"other"):
        assert run_ids(etcd.settings) == ("a 1", "b/2")
        first = read_jobs(etcd.settings)
        assert [(j.run_id, j.state) for j in first] == [("a 1", "UNREADABLE"), ("b/2", "RUNNING")]
        one.post(phase="over", exit_code=3)
        second = read_jobs(etcd.settings)
        assert [job.state for job in second] == ["UNREADABLE", "FAILED"]


def test_another_prefix_of_an_etcd_has_other_jobs(etcd: Meetings) -> None:
    elsewhere = replace(etcd.settings, etcd=EtcdCluster(prefix="/elsewhere"))
    with PlayedJob(etcd, "train-1"):
        assert run_ids(elsewhere) == ()


def test_what_is_cleared_while_it_is_watched_is_over(etcd: Meetings) -> None:
    with PlayedJob(etcd, "train-1"), closing(JobStore(etcd.settings, "train-1")) as reader:
        reader.read()
        etcd.forget("train-1")
        last = reader.read()
        assert (last.state, last.live) == ("UNREADABLE", False)
        assert "nothing of the job is left" in last.reason


@pytest.mark.slow
def test_what_is_no_store_of_elaunch_is_said_so(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = RendezvousSettings("c10d", (silent.getsockname()[:2],), connect_timeout=1.0)
        with pytest.raises(StoreUnreachable):
            run_ids(settings)
