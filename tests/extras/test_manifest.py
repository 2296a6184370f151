"""``elaunch manifest``: what is printed, and whether those that it is for would read the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elaunch.cli import execute
from elaunch.extras.manifest import label, read
from elaunch.extras.schedulers import TARGETS, to_yaml
from tests.launching import Launcher, free_port

SCHEMAS = json.loads((Path(__file__).parent / "manifest_schemas.json").read_text())
CLUSTERS = [target for target in TARGETS if target != "slurm"]
OPTIONS: dict[str, Any] = {"image": "i", "gpus": 0, "limit": 0, "lead": 120, "claim": ""}
FULL = OPTIONS | {"gpus": 8, "limit": 14400, "claim": "disk"}
TWO = ["--nnodes=2", "--nproc-per-node=8", "--max-restarts", "3", "--checkpoint-dir=/ckpt"]
# Texts that a reader of YAML may take for something else, or cannot read, unless they are quoted.
HOSTILE = [
    *("yes", "no", "null", "~", "1e3", "0o17", "0x1f", "12:30:45", ".inf", "2026-11-22", "=", "<<"),
    *(
        "",
        " ",
        "- x",
        "a: b",
        "# x",
        "'",
        '"',
        "\\",
        "a\nb\r\n",
        "\t",
        "\x7f\x85\u2028\ufeff",
        "😀",
    ),
    *("$(HOME)", "$$", "${x}", "`id`", "%d", "!!python/object", "&a", "*a", "[", "{", "|", ">"),
]


def made(target: str, words: list[str], **changes: Any) -> list[dict[str, Any]]:
    """Return the documents of a target as YAML's own reader reads them."""
    documents = TARGETS[target](read(words, **(OPTIONS | changes)))
    assert not isinstance(documents, str)
    return list(yaml.safe_load_all(to_yaml(documents)))


def container(document: dict[str, Any]) -> dict[str, Any]:
    """Return the one container of a Job or JobSet."""
    spec = document["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    (found,) = spec["template"]["spec"]["containers"]
    return dict(found)


def args(target: str, words: list[str], **changes: Any) -> list[str]:
    """Return the words that the container gets, as Kubernetes expands them."""
    found = made(target, words, **changes)[-1]
    given_ = found["spec"]["trainer"] if target == "kubeflow" else container(found)
    assert given_["command"] == ["elaunch", "run"]
    return [word.replace("$$", "$") for word in given_["args"]]


SIZES = [(target, size) for target in CLUSTERS for size in ("1", "2", "2:4")]
SIZES.remove(("kubeflow", "2:4"))  # a TrainJob has a fixed number of nodes


@pytest.mark.slow
@pytest.mark.parametrize(("target", "size"), SIZES)
def test_documents_fit_the_published_schemas(target: str, size: str) -> None:
    """Names, types and values of all fields; rules between fields are the server's own."""
    words = [*TWO, f"--nnodes={size}", "train.py"]
    for document in (*made(target, words), *made(target, words, **FULL)):
        jsonschema.validate(document, SCHEMAS[document["kind"]])


def test_a_schema_refuses_what_it_does_not_know() -> None:
    """So a field with a wrong name is found."""
    (document,) = made("kubernetes", ["train.py"])
    document["spec"]["completionmode"] = "Indexed"
    with pytest.raises(jsonschema.ValidationError, match="completionmode"):
        jsonschema.validate(document, SCHEMAS["Job"])


def test_a_job_of_kubernetes() -> None:
    """The pods find the first one by the Service; 75 and evictions are not counted."""
    service, job = made("kubernetes", [*TWO, "--name=My Job", "train.py", "--lr", "1e-3"], **FULL)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "my-job"}
    assert (service["spec"]["clusterIP"], service["metadata"]["name"]) == ("None", "my-job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert (pod["subdomain"], pod["restartPolicy"]) == ("my-job", "Never")
    assert spec["activeDeadlineSeconds"] == 14400
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[1] == {
        "action": "Ignore",
        "onExitCodes": {"containerName": "node", "operator": "In", "values": [75]},
    }
    assert rules[2]["onExitCodes"]["values"] == [69, 71, 72, 75, 137, 143]
    assert container(job)["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container(job)["args"] == [
        *("--nnodes=2", "--nproc-per-node=8", "--rdzv-id=my-job", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=my-job-0.my-job:29400", "--max-restarts=3", "--checkpoint-dir=/ckpt"),
        *("--name=My Job", "--shutdown-timeout=105", "train.py", "--lr", "1e-3"),
    ]


def test_where_the_nodes_meet() -> None:
    """One node does not; etcd is where it is; a TrainJob says it by PET_* variables."""
    etcd = ["--rdzv-backend=etcd", "--rdzv-endpoint=e1,e2"]
    assert {"--standalone", "--master-addr=127.0.0.1"} <= {*args("kubeflow", ["train.py"])}
    assert "--rdzv-endpoint=train-node-0-0.train:29400" in args(
        "jobset", ["--nnodes=2", "train.py"]
    )
    assert not [one for one in args("kubeflow", [*TWO, "train.py"]) if "rdzv-e" in one]
    for target in CLUSTERS:
        assert {*etcd, "--nnodes=2"} <= {*args(target, ["--nnodes=2", *etcd, "train.py"])}


@pytest.mark.parametrize("target", CLUSTERS)
def test_any_text_arrives_as_it_is(target: str) -> None:
    """In a value, whatever YAML or Kubernetes would make of it."""
    words = [f"--checkpoint-glob={HOSTILE[20]}", "train.py", *HOSTILE]
    assert args(target, words)[-len(HOSTILE) :] == HOSTILE


@pytest.mark.slow
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_any_text_is_read_back(words: list[str]) -> None:
    """From YAML, and from the batch script by a shell's rules."""
    assert args("jobset", ["train.py", *words])[-len(words) - 1 :] == ["train.py", *words]
    script = TARGETS["slurm"](read(["train.py", *words], **OPTIONS))
    assert isinstance(script, str)
    line = script.partition("\nsrun ")[2].rpartition(" &\nstep=$!")[0]
    printed = subprocess.run(
        ["bash", "-c", f"srun() {{ printf '%s\\0' \"$@\"; }}\nsrun {line}"],
        capture_output=True,
        timeout=60,
    ).stdout.decode()
    assert printed.split("\0")[-len(words) - 2 : -1] == ["train.py", *words]


def test_the_batch_script_is_one_of_bash() -> None:
    """Its syntax; tests/integration/test_slurm.py runs it."""
    words = [*TWO, "--rdzv-id=it's $HOME", "train.py", *HOSTILE]
    script = TARGETS["slurm"](read(words, **FULL))
    assert isinstance(script, str)
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    head = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert head == [
        *("#SBATCH --job-name=train", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1"),
        "#SBATCH --exclusive",
        *("#SBATCH --gpus-per-node=8", "#SBATCH --time=240", "#SBATCH --signal=B:USR1@120"),
        *("#SBATCH --requeue", "#SBATCH --open-mode=append"),
    ]
    assert "'--rdzv-id=it'\"'\"'s $HOME'" in script


def test_no_word_is_run_by_the_shell(tmp_path: Path) -> None:
    """A run id that ends like a variable of the script keeps the rest of its text."""
    run_id = f"x;touch {tmp_path}/made;y=$SLURM_JOB_ID"
    script = TARGETS["slurm"](read([f"--rdzv-id={run_id}", "train.py"], **OPTIONS))
    assert isinstance(script, str)
    shows = "() { printf '%s\\n' \"$@\"; }"
    body = script.rpartition("exit ")[0]
    done = subprocess.run(
        ["bash", "-c", f"srun{shows}\nelaunch{shows}\nscontrol() {{ :; }}\n{body}\nask"],
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [*tmp_path.iterdir()] == []
    run_id = run_id.replace("$SLURM_JOB_ID", "7")
    assert {f"--rdzv-id={run_id}", run_id} <= {*done.stdout.splitlines()}


def test_a_variable_in_a_run_id_is_not_the_scripts() -> None:
    """The shell leaves it as it is, in both places; Slurm's number of the job is filled in."""
    script = TARGETS["slurm"](read([*TWO, "--rdzv-id=$host:$port", "train.py"], **OPTIONS))
    assert isinstance(script, str)
    assert "'--rdzv-id=$host:$port'" in script and "-- '$host:$port'" in script
    assert '--rdzv-endpoint="$host:$port"' in script


def test_a_run_id_that_looks_like_a_flag_is_asked_to_save() -> None:
    """By ``elaunch preempt``, which would take it for one of its own."""
    script = TARGETS["slurm"](read(["--rdzv-id=-x", "train.py"], **OPTIONS))
    assert "    elaunch preempt --deadline 105 --reason" in script and " -- -x\n" in script


@pytest.mark.parametrize("target", CLUSTERS)
def test_the_agent_ends_before_the_kubelet_ends_it(target: str) -> None:
    """However short the lead is; a time of the user's own is kept where it fits."""
    assert "--shutdown-timeout=15" in args(target, ["train.py"], lead=30)
    assert "--shutdown-timeout=1" in args(target, ["train.py"], lead=16)
    own = ["--shutdown-timeout=50", "--sibling-grace=10", "train.py"]
    assert args(target, own, lead=60)[-3:] == own


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--lead=15", "jobset"], "--lead: 15 s are too short: "),
        (
            ["--lead=60", "jobset", "--shutdown-timeout=56"],
            "--shutdown-timeout: '56' and --sibling-grace, 5 s, are longer than --lead, 60 s: the "
            "kubelet kills the agent; give a shorter time, or --lead 61",
        ),
        (
            ["kubernetes", "--sibling-grace=20"],
            "--sibling-grace: '20' and --shutdown-timeout, 105 s, are longer than --lead, 120 s",
        ),
    ],
)
def test_a_lead_that_is_too_short(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent would be killed before it has ended its workers."""
    assert execute(["manifest", "--image=i", *words, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and problem in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "give the flags of `elaunch run` and the script"),
        (["--help"], "give the flags of `elaunch run` and the script"),
        (["--nnodes=x", "train.py"], "--nnodes: 'x'"),
        (["--node-rank=1", "train.py"], "--node-rank: '1' has no place in a manifest"),
        (["--rdzv-endpoint=h", "train.py"], "--rdzv-endpoint: 'h' is for etcd here"),
        (["--rdzv-backend=static", "train.py"], "--rdzv-backend: 'static' has no place"),
        (["--rdzv-backend=etcd", "train.py"], "--rdzv-backend: 'etcd' needs --rdzv-endpoint"),
        (["--file=nowhere.yaml"], "--file: 'nowhere.yaml'"),
        (["--time=4h", "train.py"], "--time is an option of `elaunch manifest`; it stands"),
        (["--gpus", "8", "train.py"], "--gpus is an option of `elaunch manifest`"),
        (["--exit-codes=torchrun", "train.py"], "--exit-codes: 'torchrun' has no place"),
        (["-"], "script '-': no scheduler has this open file; save it to a file"),
        (["/dev/stdin"], "script '/dev/stdin': no scheduler has this open file"),
        (["train.py", "\udcff"], "that are no text in UTF-8"),
    ],
)
def test_mistakes(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before anything is printed."""
    assert execute(["manifest", "slurm", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and problem in err


def test_mistakes_in_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    """An image is needed, a claim has a place, a TrainJob does not grow."""
    assert execute(["manifest", "jobset", "train.py"]) == 2
    assert "--image: jobset needs the image" in capsys.readouterr().err
    assert execute(["manifest", "--image=i", "--claim=c", "jobset", "train.py"]) == 2
    assert "--claim: give --checkpoint-dir" in capsys.readouterr().err
    assert execute(["manifest", "--image=i", "kubeflow", "--nnodes=1:2", "train.py"]) == 2
    assert "fixed number of nodes" in capsys.readouterr().err
    assert execute(["manifest", "--time=soon", "slurm", "train.py"]) == 2
    assert "'soon' is no duration" in capsys.readouterr().err
    for flag in ("--nnodes=2", "--nproc_per_node=2", "-m"):
        assert execute(["manifest", flag, "slurm", "train.py"]) == 2
        said = f"{flag.partition('=')[0]} is a flag of `elaunch run`; it stands behind the target"
        assert said in capsys.readouterr().err
    assert execute(["manifest", "--gpus=8", "slurm", "train.py"]) == 0
    assert "`--nproc-per-node 8` behind slurm gives each one a worker" in capsys.readouterr().err
    assert execute(["manifest", "--gpus=8", "slurm", "--nproc-per-node=1", "train.py"]) == 0
    assert capsys.readouterr().err == ""
    assert execute(["manifest", "--lea=2m", "slurm", "train.py"]) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/dev/shm", "//dev//shm/", "/ckpt/../dev/shm", "/", "/a:b"])
@pytest.mark.parametrize("target", CLUSTERS)
def test_where_no_claim_can_be_mounted(
    path: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two volumes at one place are refused by Kubernetes, others by what starts the container."""
    words = ["--image=i", "--claim=c", target, f"--checkpoint-dir={path}", "train.py"]
    assert execute(["manifest", *words]) == 2
    assert "--claim: give --checkpoint-dir, an absolute path that" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--time=1e9d"], "'1e9d' is no duration"),
        (["--time=99999999d"], "'99999999d' is longer than 9999 days"),
        (["--image=i"], "--image: is for pods"),
        (["--claim=c"], "--claim: is for pods"),
        (["--lead=65536"], "--lead: 65536 s: Slurm takes up to 65535"),
        (["--time=3m"], "--lead: 120 s, and 60 by which Slurm may be early, are not shorter than"),
        (["--image= i", "jobset"], "--image: ' i' is no image"),
        (["--image=--claim", "jobset"], "--image: '--claim' is no image"),
        (["--image=i", "--claim=My_Disk", "jobset"], "--claim: 'My_Disk' is no name"),
    ],
)
def test_what_the_scheduler_would_refuse(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or would start, signal, and queue again for ever."""
    words = words if words[-1] == "jobset" else [*words, "slurm"]
    assert execute(["manifest", *words, "--checkpoint-dir=/c", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and problem in err


def test_the_size_of_a_job_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands in no flag of the line is the file's: the line that is made would win over it."""
    file = tmp_path / "job.yaml"
    file.write_text("entrypoint: train.py\nnodes: 2\nslots: 8\nworkdir: /src\n")
    words = args("kubernetes", [f"--file={file}"])
    assert words[:2] == ["--nnodes=2", "--nproc-per-node=8"] and f"--file={file}" in words
    file.write_text("entrypoint: train.py\nstandalone: true\n")
    assert execute(["manifest", "slurm", f"--file={file}"]) == 2
    assert "--standalone: has no place in a manifest" in capsys.readouterr().err


@pytest.mark.parametrize("target", CLUSTERS)
def test_a_script_whose_name_begins_with_a_hyphen(target: str) -> None:
    """Behind ``--``, as it was given."""
    assert args(target, ["--", "--odd.py", "--", "x"])[-4:] == ["--", "--odd.py", "--", "x"]


def test_names_are_those_of_dns() -> None:
    """Of a Service: letters, digits and hyphens, a letter first."""
    names = {
        "train": "train",
        "GPT_2 (big)": "gpt-2-big",
        "7b": "train-7b",
        "été": "t",
        "__": "train",
    }
    assert {name: label(name) for name in names} == names
    assert len(label("x" * 99)) == 40


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["runs/train.v2.py"], "train-v2"),
        (["-m", "pkg.sub.Train"], "pkg-sub-train"),
        (["--no-python", "bin/start.sh"], "start"),
        (["runs/"], "runs"),
        (["--name=mine", "-m", "pkg.train"], "mine"),
    ],
)
def test_the_name_is_that_of_the_run(words: list[str], name: str) -> None:
    """As `elaunch run` names it: of a module all parts, of a file the last, without its suffix."""
    assert read(words, **OPTIONS).name == name


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.trial), 2])
def test_the_words_of_a_trainjob_start_it(elaunch: Launcher, nodes: int) -> None:
    """With the variables that Kubeflow sets; the name of one node's pod does not resolve yet."""
    script = elaunch.directory / "train.py"
    script.write_text('import os; print("up", os.environ["RANK"], os.environ["WORLD_SIZE"])')
    words = args("kubeflow", [f"--nnodes={nodes}", "--preload=none", str(script)])
    place = "127.0.0.1" if nodes > 1 else "train-node-0-0.train"
    variables = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": place}
    variables["PET_MASTER_PORT"] = str(free_port("127.0.0.1"))
    agents = [
        elaunch.start(
            ["run", *words],
            env=variables
            | {"PET_NODE_RANK": str(rank), "XDG_STATE_HOME": str(elaunch.directory / str(rank))},
        )
        for rank in range(nodes)
    ]
    ended = [agent.wait() for agent in agents]
    assert [done.returncode for done in ended] == [0] * nodes, ended
    assert [done.stdout for done in ended] == [f"up {rank} {nodes}\n" for rank in range(nodes)]
