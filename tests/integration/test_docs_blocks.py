"""The blocks of code in the pages run as they stand there; what they leave out stands around them.

A block that is on no list here, and has no test of its own, fails
``test_every_block_of_python_is_run``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from elaunch.agent.noticecommand import parse
from elaunch.cli import execute
from elaunch.extras.schedulers import TARGETS
from tests import programs, warm
from tests.config.resolving import Job
from tests.config.test_files import CERTIFICATE
from tests.launching import Launcher

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ELSEWHERE = {
    "docs/saving.md python": "tests/integration/test_docs_saving.py",
    "docs/saving-background.md python": "tests/integration/test_docs_saving.py",
    "docs/saving-state.md python": "tests/integration/test_docs_saving.py",
    "docs/steps.md python 0": "tests/integration/test_steps.py",
    "docs/tutorial.md python 0": "tests/integration/test_tutorial.py",
    "docs/from-python.md python 0": "tests/torchrun/test_functions.py",
}
"""Blocks, or all of a page, that a test of their own runs."""
NOT_RUN = {
    "docs/metrics.md python 1": "needs pandas, which nothing here needs",
    "docs/clients.md python 0": "needs accelerate, which `make clients` installs",
}


def blocks(page: str, *languages: str) -> list[str]:
    """Return the texts of a page's blocks in some languages."""
    fence = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    text = (ROOT / page).read_text()
    return [textwrap.dedent(part) for _, name, part in fence.findall(text) if name in languages]


def code_of(page: str, language: str) -> list[str]:
    """Return a page's blocks of Python; of docs/api.md those that are no signature."""
    found = blocks(page, language)
    if page != "docs/api.md":
        return found
    signature = re.compile(
        r"\A(class )?(elaunch|[A-Z]\w+)\.\w+|\A\w+\(.*\)( -> .+)?\n\Z", re.DOTALL
    )
    return [text for text in found if not signature.match(text)]


MODEL = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import elaunch
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.Adam(model.parameters())
steps = 100
def train(*_):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
BATCHES = """
import sys
import torch
from torch.utils.data import DataLoader, IterableDataset
import elaunch
dataset, epochs, batch_size, model = list(range(256)), 1, 32, torch.nn.Linear(2, 1)
load, save, checkpoint = lambda found, *_: 0 if found is None else None, print, None
train = lambda model, batch: float(batch.sum())
"""


class Script(NamedTuple):
    """What a block stands in.

    Attributes:
        before: what it takes for granted.
        after: what shows that it ran; must print "ran" on each rank.
        inside: the block is the body of what ``before`` ends with.
        flags: of ``elaunch run``; CKPT is a directory.
        code: the exit code of the job.
        nproc: workers; 0: the script is run by Python alone, and prints "ran" once.
    """

    before: str
    after: str = "print('ran')\n"
    inside: bool = False
    flags: str = ""
    code: int = 0
    nproc: int = 2


STEPS = """
import torch
import elaunch
dataset = [(torch.ones(2), torch.zeros(1))] * 480
model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
build, calls = lambda: (model, optimizer), []
def loss_fn(got, wanted):
    calls.append(1)
    if len(calls) == 20:
        ctx.preempt.request("it is enough")
    return (got - wanted).square().mean()
def loss_of(model, batch):
    return loss_fn(model(batch[0]), batch[1])
"""
SAVES = "--checkpoint-dir CKPT"
SCRIPTS = {
    "README.md python 0": Script(
        STEPS, "assert loop.preempted and loop.done\nprint('ran')\n", flags=SAVES, code=75
    ),
    "README.md python 1": Script(
        MODEL, "assert not found and step == 99\nprint('ran')\n", flags=SAVES
    ),
    "docs/AGENTS.md python 0": Script(
        MODEL, "assert not found and step == 99 and not asked\nprint('ran')\n", flags=SAVES
    ),
    "docs/checkpoints.md python 0": Script(
        "import os, torch\nmodel = torch.nn.Linear(1, 1)\n",
        "assert path.endswith('step_7.pt') and model.weight.item() == 7\nprint('ran')\n",
        flags=f"{SAVES} --checkpoint-glob step_*.pt",
    ),
    "docs/failure-json.md python 0": Script(
        "import os\nfrom torch.distributed.elastic import timer\nstep = lambda: print('ran')\n",
        "os.environ['TORCHELASTIC_TIMER_FILE']\n",
    ),
    "docs/metrics.md python 0": Script(
        "import elaunch\nstep, steps, loss, accuracy, f1 = 1, 2, 0.5, 0.9, 0.8\n"
    ),
    "docs/preemption.md python 0": Script(
        textwrap.dedent("""
            import os, subprocess, sys, time
            import elaunch
            first, steps = 1, 10**6
            def train(step):
                time.sleep(0.01)
                if step == 3 and os.environ["RANK"] == "0":
                    words = [sys.executable, "-m", "elaunch", "preempt"]
                    words.append(os.environ["ELAUNCH_RUN_ID"])
                    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            def save(step):
                print("ran")
            def main():
            """),
        "main()\n",
        inside=True,
        code=75,
    ),
    "docs/saving.md py 0": Script(
        MODEL
        + textwrap.dedent("""
            state, before = {"model": model, "optimizer": optimizer}, model.module.weight.clone()
            ctx = elaunch.init()
            """),
        "ctx.close()\nassert not found and first == 0\n"
        "assert not torch.equal(model.module.weight, before)\nprint('ran')\n",
        flags=SAVES,
    ),
    "docs/saving.md py 1": Script(
        MODEL
        + "state = {'model': model}\nctx = elaunch.init()\nfound = ctx.checkpoint.load(state)\n",
        "ctx.close()\nassert step == 99\nprint('ran')\n",
        flags=SAVES,
    ),
    "docs/tutorial.md py 0": Script(
        STEPS
        + "with elaunch.init() as ctx:\n"
        + "    state = {'model': model, 'optimizer': optimizer}\n",
        "assert loop.preempted and loop.done\nprint('ran')\n",
        inside=True,
        flags=SAVES,
        code=75,
    ),
    "docs/tutorial.md python 1": Script("import time\nrank = 2\nif True:\n", inside=True),
    "docs/from-python.md python 1": Script(
        "import asyncio, elaunch\nfrom elaunch.torchrun import LaunchConfig, elastic_launch\n"
        "from functions import train\nasync def main():\n",
        "    assert results == {rank: 1.0 for rank in range(2)}\n    print('ran')\n"
        "if __name__ == '__main__':\n    asyncio.run(main())\n",
        inside=True,
        nproc=0,
    ),
    "docs/from-python.md python 2": Script(
        "from functions import train\nif __name__ == '__main__':\n",
        "    assert results == {rank: 1.0 for rank in range(4)}\n    print('ran')\n",
        inside=True,
        nproc=0,
    ),
    "docs/api.md python 0": Script(""),
    "docs/api.md python 1": Script(
        MODEL + "with elaunch.init() as ctx:\n", "print('ran')\n", inside=True, flags=SAVES
    ),
    "docs/api.md python 2": Script(
        "import elaunch\nstep, steps, loss, accuracy = 1, 2, 0.5, 0.9\n"
        "with elaunch.init() as ctx:\n",
        inside=True,
    ),
    "docs/api.md python 3": Script(
        MODEL + "state, step = {'model': model}, 1\nwith elaunch.init() as ctx:\n", inside=True
    ),
    "docs/api.md python 4": Script(BATCHES.replace("model, batch", "batch")),
    "docs/api.md python 5": Script(
        "import elaunch\nloss, settings, dataset, download = 0.5, {}, '', print\n"
        "with elaunch.init() as ctx:\n",
        inside=True,
    ),
    "docs/api.md python 6": Script(
        STEPS + "with elaunch.init() as ctx:\n",
        "assert loop.preempted and loop.done\nprint('ran')\n",
        inside=True,
        flags=SAVES,
        code=75,
    ),
    "docs/steps.md py 0": Script(
        STEPS
        + textwrap.dedent("""
            scaler = torch.amp.GradScaler("cpu")
            ctx = elaunch.init()
            state = {"model": model, "optimizer": optimizer, "scaler": scaler}
            loop = ctx.train.steps(state, dataset, global_batch=48, micro_batch=4, until=2)
            for step in loop:
            """),
        "ctx.close()\nassert loop.done == 2\nprint('ran')\n",
        inside=True,
    ),
    "docs/api.md python 7": Script(
        BATCHES
        + textwrap.dedent("""
            dataset = [(number, number) for number in range(256)]
            train_step = lambda x, y: None
            is_time_to_save = lambda: False
            """),
        "assert sampler.epoch == 0\nprint('ran')\n",
    ),
    "docs/api.md python 8": Script(
        BATCHES + "open_stream = lambda: iter(range(256))\n",
        textwrap.dedent("""
            lines = Lines()
            lines.sampler = elaunch.ElasticDistributedSampler(dataset, shuffle=False)
            lines.batch_size = 32
            lines.sampler.set_epoch(0)
            assert sorted(lines) == sorted(lines.sampler), list(lines)
            print('ran')
            """),
    ),
    "docs/api.md python 9": Script("import elaunch\ntrain = lambda: print('ran')\n", "main()\n"),
    "docs/api.md python 10": Script(
        "import elaunch\nfrom functions import train\n",
        "    assert losses == {rank: 0.2 for rank in range(4)}\n    print('ran')\n",
        nproc=0,
    ),
}


def all_blocks() -> dict[str, str]:
    """Return each block of Python by page, language and number."""
    return {
        f"{page} {language} {number}": text
        for page in PAGES
        for language in ("python", "py")
        for number, text in enumerate(code_of(page, language))
    }


def test_every_block_of_python_is_run() -> None:
    """By a test here, by one of its own, or there is a reason."""
    own = {
        name
        for name in all_blocks()
        if name in ELSEWHERE or name.rpartition(" ")[0] in ELSEWHERE or name in NOT_RUN
    }
    assert set(all_blocks()) - own == set(SCRIPTS)
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_block_runs(elaunch: Launcher, tmp_path: Path, name: str) -> None:
    """On two ranks; what it has done is asserted in the script."""
    script, block = SCRIPTS[name], all_blocks()[name]
    if script.inside:
        block = textwrap.indent(block, "    ")
    path = tmp_path / "script.py"
    path.write_text(script.before + block + script.after)
    (tmp_path / "functions.py").write_text("def train(x):\n    return 2 * x\n")
    (tmp_path / "train.py").write_text("")
    flags = script.flags.replace("CKPT", str(tmp_path / "ckpt"))
    if "--checkpoint-glob" in flags:
        write = (
            "import sys, torch\nmodel = torch.nn.Linear(1, 1)\nmodel.weight.data.fill_(7.0)\n"
            "torch.save({'model': model.state_dict()}, sys.argv[1])\n"
        )
        (tmp_path / "ckpt").mkdir()
        words = [sys.executable, "-c", write, tmp_path / "ckpt" / "step_7.pt"]
        assert warm.run(words).returncode == 0
    environ = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    if "pretrain/ckpts" in block:
        first = tmp_path / "pretrain.py"
        first.write_text(MODEL + all_blocks()["docs/AGENTS.md python 0"])
        words = ["run", "--nproc-per-node=2", "--checkpoint-dir=pretrain/ckpts", first]
        assert elaunch.run(words, env=environ, cwd=tmp_path).returncode == 0
    if script.nproc:
        words = ["run", f"--nproc-per-node={script.nproc}", *flags.split(), path]
        done = elaunch.start(words, env=environ, cwd=tmp_path).wait(150)
    else:
        if "torch" not in script.before:  # the server would import it for nothing
            environ["ELAUNCH_PRELOAD"] = "none"
        done = elaunch.start_command([sys.executable, path], env=environ, cwd=tmp_path).wait(170)
    assert done.returncode == script.code, done.stderr
    assert done.stdout.splitlines().count("ran") == (script.nproc or 1), done.stdout + done.stderr


# ── shell, job files, units ──────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_lines_for_a_job_file(elaunch: Launcher, tmp_path: Path) -> None:
    """Each as a dry run: the file says two workers, the second line four."""
    (tmp_path / "job.yaml").write_text(blocks("docs/job-file.md", "yaml")[0])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "other.py").write_text("")
    (lines,) = blocks("docs/job-file.md", "sh")
    workers = []
    for line in lines.splitlines():
        words = shlex.split(line, comments=True)[1:]
        done = elaunch.run([words[0], "--dry-run", *words[1:]], cwd=tmp_path)
        assert done.returncode == 0, (line, done.stderr)
        workers += re.findall(r"^  workers +(\d)", done.stdout, re.MULTILINE)
        assert ("other.py --lr 0.1" in done.stdout) == ("other.py" in line)
    assert workers == ["2", "4", "2", "2", "2"]


def test_the_job_file_of_several_nodes(tmp_path: Path) -> None:
    """Its files are made up; all else is the page's."""
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    secret.chmod(0o600)
    job = Job(tmp_path)
    authority = job.write("ca.pem", CERTIFICATE.decode())
    text = re.sub(r"/run/\S+", str(secret), blocks("docs/job-file.md", "yaml")[1])
    job.write("job.yaml", re.sub(r"/etc/\S+", str(authority), text))
    found = job.settings("-f job.yaml")
    assert (found.min_nodes, found.max_nodes, found.nproc_per_node) == (2, 4, "gpu")
    assert (found.rdzv_backend, found.run_id) == ("etcd", "digits-7")


class _Cloud(BaseHTTPRequestHandler):
    """The metadata servers of three clouds that are about to take the machine."""

    def do_PUT(self) -> None:
        """Give AWS's token for a minute."""
        known = self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
        self._answer("TOKEN" if known and self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        """Say what each says, to who asks as it wants to be asked."""
        if self.path == "/latest/meta-data/spot/instance-action":
            soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 110))
            known = self.headers["X-aws-ec2-metadata-token"] == "TOKEN"
            self._answer(f'{{"action": "terminate", "time": "{soon}"}}' if known else None)
        elif self.path == "/computeMetadata/v1/instance/preempted?wait_for_change=true":
            self._answer("TRUE" if self.headers["Metadata-Flavor"] == "Google" else None)
        elif self.path == "/metadata/scheduledevents?api-version=2020-07-01":
            event = '{"DocumentIncarnation": 1, "Events": [{"EventType": "Preempt"}]}'
            self._answer(event if self.headers["Metadata"] == "true" else None)
        else:
            self._answer(None)

    def _answer(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_: object) -> None:
        """Write no line for each request."""


@pytest.fixture
def cloud() -> Iterator[str]:
    """Return the address of a metadata server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Cloud) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_the_notices_of_the_clouds(cloud: str) -> None:
    """Each command asks as its cloud wants to be asked, and prints a notice with its seconds."""
    programs.needed("curl")
    commands = [text for text in blocks("docs/preemption.md", "sh") if "curl" in text]
    notices = []
    for text in commands:
        text = re.sub(r"169\.254\.169\.254|metadata\.google\.internal", cloud, text)
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        notices.append(parse(done.stdout.strip(), time.time()))
    (amazon, left), *others = [notice or ("", None) for notice in notices]
    assert amazon == "AWS will terminate this instance" and left is not None and 60 < left < 111
    assert others == [("Google Cloud takes this machine", 30), ("Azure takes this machine", 30)]


@pytest.mark.slow
def test_the_notices_of_clouds_that_take_nothing(cloud: str) -> None:
    """Nothing is printed; AWS's server then has no such page."""
    programs.needed("curl")
    for text in blocks("docs/preemption.md", "sh"):
        if "curl" in text:
            text = re.sub(r"169\.254\.169\.254|metadata\.google\.internal", f"{cloud}/none", text)
            done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60)
            assert done.stdout == ""


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_manifest_prints_is_what_its_page_shows(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the line that stands above it."""
    page = f"docs/{target}.md"
    (line,) = re.findall(r"^elaunch (manifest [^|>]+)", blocks(page, "sh")[0], re.MULTILINE)
    (shown,) = blocks(page, "yaml", "bash")
    assert execute(shlex.split(line)) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.slow
def test_the_lines_for_skypilot(elaunch: Launcher, tmp_path: Path) -> None:
    """By a shell, with the variables that SkyPilot sets for a job of one node."""
    import yaml

    (task,) = (yaml.safe_load(text) for text in blocks("docs/schedulers.md", "yaml"))
    (tmp_path / "train.py").write_text("import os; print('ran', os.environ['WORLD_SIZE'])\n")
    environ = {
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYPILOT_TASK_ID": "sky-2026-11-25-10-00-00_train_3-0",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "ELAUNCH_PRELOAD": "none",
    }
    line = task["run"].replace("/ckpt", str(tmp_path / "ckpt"))
    done = elaunch.start_command(["bash", "-c", line], env=environ, cwd=tmp_path).wait()
    assert (done.returncode, done.stdout) == (0, "ran 2\nran 2\n"), done.stderr
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
