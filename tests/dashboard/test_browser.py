"""The pages in Chromium, while a real job runs: what a person sees, by mouse, keyboard, phone."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.dashboard.browser import Browser, Page, chromium
from tests.integration.jobs import ATTENTIVE, UNUSUAL
from tests.integration.watching import server_of
from tests.launching import Launcher, Running, free_port

pytestmark = [pytest.mark.trial, pytest.mark.slow]

# Rank r reports 100 r + 1/step; step n is a save where n is 5.
SCRIPT = """
import os, threading, elaunch
with elaunch.init() as ctx:
    rank = ctx.distributed.rank
    for step in range(1, 100_000):
        ctx.train.report_training_metrics(step, {"loss": 100 * rank + 1 / step})
        print(f"rank {rank} at step {step} pid {os.getpid()}", flush=True)
        if step == 5:
            with ctx.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
                (path / f"state-{rank}").write_text("5")
        threading.Event().wait(0.1)
"""
PAGES = ("", "metrics", "logs", "checkpoints", "failures", "stacks")
WIDE, PHONE = (1280, 900), (375, 740)


@contextmanager
def watched(elaunch: Launcher, directory: Path) -> Iterator[tuple[Running, Browser, str]]:
    """Run a job of three ranks, its dashboard, and a browser; yield them with the address."""
    script = elaunch.directory / "train.py"
    script.write_text(SCRIPT)
    flags = ["--nproc-per-node", "3", "--max-restarts", "3", "--checkpoint-dir", "saves"]
    job = elaunch.start(["run", *flags, "--rdzv-id", "job", "--tee", "3", script])
    job.wait_for_line(r"rank 1 at step 7 ")
    server = elaunch.start(["dashboard", "--port", "0", "--allow-control"])
    address = server.wait_for_line(r"^(http://\S+/)$")[1]
    with chromium(directory) as browser:
        yield job, browser, f"{address}#/run/job"
        assert browser.problems == []
    for running in (job, server):
        running.send_signal(signal.SIGTERM)
        running.wait()


def pid_of(job: Running, rank: int) -> int:
    """Return the pid that a rank has printed last."""
    return int(re.findall(rf"rank {rank} at step \d+ pid (\d+)", job.output())[-1])


def has_focus(page: Page, selector: str) -> bool:
    """Tell whether an element has the focus; Tab is pressed until it has, 30 times at most."""
    for _ in range(30):
        page.press("Tab")
        if page.evaluate(f"document.activeElement.matches({selector!r})"):
            return True
    return False


def test_a_person_sees_what_happens(elaunch: Launcher, tmp_path: Path) -> None:
    """Curves, one rank's lines, a killed worker without a reload; the keyboard is enough."""
    with watched(elaunch, tmp_path / "profile") as (job, browser, address):
        page = browser.open(address)
        page.resize(*WIDE)
        page.evaluate("window.sameDocument = true")

        page.see(".slots .RUNNING")
        assert has_focus(page, ".grid")
        for rank in (0, 1, 2):
            page.press("ArrowRight")
            page.wait(
                f"document.querySelector('#grid .legend').innerText.startsWith('rank {rank}:')"
            )
        os.kill(pid_of(job, 1), signal.SIGKILL)
        page.wait(
            "document.querySelector('.note')?.innerText.includes("
            "'Round 0 failed: rank 1 was killed by SIGKILL')"
        )
        page.wait("document.querySelectorAll('#rounds tbody tr').length === 2")
        assert page.evaluate("document.activeElement.matches('.grid')")
        assert page.evaluate("window.sameDocument")

        assert has_focus(page, "#do-restart")
        page.press("Enter")
        page.wait("document.querySelector('#do-restart').innerText.startsWith('Really')")
        page.press("Enter")
        page.wait("document.querySelector('#control .quiet').innerText.includes('is to end')")
        page.wait("document.querySelectorAll('#rounds tbody tr').length === 3")

        page.evaluate("location.hash = '#/run/job/metrics'")
        page.see(".chart canvas")
        assert has_focus(page, "input[aria-label=Ranks]")
        page.type("2")
        page.press("Enter")
        assert has_focus(page, ".chart canvas")
        page.press("ArrowRight")
        said = page.wait(
            "document.querySelector('.chart output').innerText.match(/step (\\d+) · rank 2: (.*)/)"
        )
        step, value = int(said[1]), float(said[2])
        assert value == pytest.approx(200 + 1 / step, rel=1e-4)
        assert page.evaluate(PAINTED) > 200

        page.evaluate("location.hash = '#/run/job/logs'")
        page.wait("document.querySelectorAll('.log div').length > 10")
        assert has_focus(page, "input[aria-label=Ranks]")
        page.type("1")
        page.wait(f"{LINES}.length > 5 && {LINES}.every(line => line.includes('rank 1 at step'))")
        before = page.evaluate(f"{LINES}.length")
        page.wait(f"{LINES}.length > {before}")
        assert all(re.match(r"\S+ +1  rank 1 at ", line) for line in page.evaluate(LINES))

        # One that types while an answer is on its way is sent each line once.
        page.evaluate(SLOW_ANSWERS)
        page.evaluate("window.choose('0')")
        page.wait("window.asked.length + window.sources.length === 1")
        page.evaluate("window.choose('2')")
        page.wait(f"{LINES}.length > 5 && {LINES}.every(line => line.includes('rank 2 at step'))")
        page.wait("window.sources.length > 0 && window.answered === window.asked.length")
        assert page.evaluate("window.sources.filter(each => each.readyState !== 2).length") == 1
        page.evaluate("window.choose('x')")
        page.wait("document.querySelector('[role=status].quiet').innerText.includes(\"'x'\")")
        assert page.evaluate("document.querySelector('#pulse').className") == ""
        assert browser.problems and all("ranks=x" in each for each in browser.problems)
        browser.problems.clear()  # of what is refused, the browser logs each answer


SLOW_ANSWERS = """(() => {
  const [really, Source] = [window.fetch, window.EventSource];
  Object.assign(window, { asked: [], answered: 0, sources: [] });
  window.fetch = async (...what) => {
    window.asked.push(what);
    const answer = await really(...what);
    await new Promise((done) => setTimeout(done, 500));
    setTimeout(() => { window.answered += 1; }, 500);
    return answer;
  };
  window.EventSource = class extends Source {
    constructor(...what) { super(...what); window.sources.push(this); }
  };
  window.choose = (ranks) => {
    const field = document.querySelector("input[aria-label=Ranks]");
    field.value = ranks;
    field.dispatchEvent(new Event("input"));
  };
})()"""
LINES = "[...document.querySelectorAll('.log div')].map(line => line.innerText)"
# How many pixels of the chart have about the colour of a curve.
PAINTED = """(() => {
  const canvas = document.querySelector('.chart canvas');
  const probe = document.createElement('i');
  probe.style.color = 'var(--accent)';
  document.body.append(probe);
  const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    const off = Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b);
    found += data[i + 3] > 60 && off < 60;
  }
  return found;
})()"""


def test_a_person_sees_for_which_rank_the_others_wait(elaunch: Launcher, tmp_path: Path) -> None:
    """In the list of runs, and above all else on the page of the run."""
    words = ["run", "--nproc-per-node=3", "--run-id=job", str(UNUSUAL), "absent", "1", "0", "60"]
    job = elaunch.start_command([sys.executable, str(ATTENTIVE), *words])
    server = elaunch.start(["dashboard", "--port", "0"])
    address = server.wait_for_line(r"^(http://\S+/)$")[1]
    said = "rank 1 has not entered init_process_group; ranks 0, 2 have been waiting there for "
    with chromium(tmp_path / "profile") as browser:
        page = browser.open(address)
        page.wait(f"document.querySelector('td strong')?.innerText.includes({said!r})")
        page.evaluate("location.hash = '#/run/job'")
        page.wait(f"document.querySelector('#attention .note')?.innerText.startsWith({said!r})")
        assert page.evaluate("document.querySelector('#attention a').hash") == "#/run/job/stacks"
        assert browser.problems == []
    for running in (job, server):
        running.send_signal(signal.SIGTERM)
        running.wait()


# The tables that go on beyond their side without a shadow there.
HINTED = """[...document.querySelectorAll('.scroll')]
  .filter(each => each.scrollWidth > each.clientWidth)
  .filter(each => !getComputedStyle(each).backgroundImage.includes('gradient'))
  .map(each => each.ariaLabel)"""


def test_every_page_is_accessible_and_fits_a_phone(elaunch: Launcher, tmp_path: Path) -> None:
    """No serious fault for axe-core, light and dark; nothing to scroll sideways."""
    with watched(elaunch, tmp_path / "profile") as (job, browser, address):
        os.kill(pid_of(job, 1), signal.SIGKILL)
        job.wait_for_line(r"rank 1 was killed by SIGKILL", stream="stderr")
        faults = []
        for name in ("runs", *PAGES):
            at = address.partition("#")[0] if name == "runs" else f"{address}/{name}"
            page = browser.open(at.removesuffix("/") if name == "" else at)
            shown = {"runs": "td a", "": ".facts", "metrics": ".chart canvas", "logs": ".log div"}
            page.see(shown.get(name, "main h1"))
            said = page.evaluate("document.querySelector('#run').innerText")
            assert said == ("" if name == "runs" else "job")
            if name == "checkpoints":
                heads = page.wait("[...document.querySelectorAll('th')].map(th => th.innerText)")
                assert [head for head in heads if "loss" in head] == ["loss"]
            if name != "stacks":  # read when its button is pressed
                page.wait("document.querySelector('#pulse').innerText.startsWith('read at ')")
            if name == "stacks":
                page.evaluate("document.querySelector('main button').click()")
                page.see("main pre")
            for scheme in ("light", "dark"):
                page.scheme(scheme)
                for size in (WIDE, PHONE):
                    page.resize(*size)
                    faults += [f"{name} {scheme} {size}: {one}" for one in page.faults()]
                    root = "document.documentElement"
                    goes_on = page.evaluate(HINTED)
                    faults += [f"{name} {size}: {one} has no hint" for one in goes_on]
                    too_wide = page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")
                    if too_wide > 0:
                        faults.append(f"{name} {size}: {too_wide} pixels are off the side")
            page.call("Page.close")
        assert faults == [], "\n".join(faults)


# Each rank prints 1,000 lines a second, one by one, until TOUCH is there.
NOISY = """
import os, time, elaunch
with elaunch.init() as ctx:
    rank, begun, number = ctx.distributed.rank, time.monotonic(), 0
    while not os.path.exists(os.environ["TOUCH"]):
        while number < 1000 * (time.monotonic() - begun):
            number += 1
            print(f"rank {rank} line {number} loss 0.123456 lr 1e-4 1234.5 samples/s", flush=True)
            if number % 100 == 0:
                ctx.train.report_training_metrics(number // 100, {"loss": 1 / number})
        time.sleep(0.001)
    print(f"rank {rank} total {number}", flush=True)
"""
WATCHED_S = 20.0


def test_what_watching_costs(elaunch: Launcher, tmp_path: Path) -> None:
    """8 ranks with 1,000 lines/s, three pages, a scraper: no line is lost; the cost is shown.

    The server uses no processor but for the later modules of --preload, which are left out.
    """
    script, port = elaunch.directory / "noisy.py", free_port()
    script.write_text(NOISY)
    flags = ["--nproc-per-node", "8", "--run-id", "job", "--metrics-port", str(port)]
    flags += ["--preload", "torch"]
    env = {"TOUCH": str(tmp_path / "touch")}
    job = elaunch.start(["run", *flags, script], env=env)
    job.wait_for_line(r"rank 7 line 100 ")
    server = elaunch.start(["dashboard", "--port", "0"])
    address = server.wait_for_line(r"^(http://\S+/)$")[1]
    with chromium(tmp_path / "profile") as browser:
        pages = [browser.open(f"{address}#/run/job{name}") for name in ("", "/logs", "/metrics")]
        for page, selector in zip(pages, (".facts", ".log div", "canvas"), strict=True):
            page.see(selector)
        ours = [psutil.Process(pid) for pid in (job.pid, server_of(job), server.pid)]
        before = [sum(one.cpu_times()[:2]) for one in ours]
        for _ in range(4):
            threading.Event().wait(WATCHED_S / 4)
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read()
        assert not any(page.evaluate("document.hidden") for page in pages)
        spent = [sum(one.cpu_times()[:2]) - was for one, was in zip(ours, before, strict=True)]
    Path(env["TOUCH"]).touch()
    assert job.wait().returncode == 0
    for rank in range(8):
        logs = elaunch.state / "elaunch" / "runs" / "job" / "logs" / "attempt_0" / str(rank)
        *lines, last = (logs / "stdout.log").read_text().splitlines()
        numbers = [int(line.split()[3]) for line in lines]
        assert numbers == list(range(1, int(last.split()[3]) + 1))
        assert numbers[-1] > 1000 * WATCHED_S
    shares = [seconds / WATCHED_S for seconds in spent]
    told = f"agent, server, dashboard: {', '.join(f'{share:.1%}' for share in shares)} of a core"
    warnings.warn(f"{told}, {sum(shares):.1%} in all; to reach: 8 %", stacklevel=1)
    server.send_signal(signal.SIGTERM)
    server.wait()
