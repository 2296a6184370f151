"""``elaunch manifest``: ready files for schedulers, from the flags of ``elaunch run``.

============  ===================================================================================
target        what is printed (docs/schedulers.md)
============  ===================================================================================
slurm         a batch script: one agent on each node, asked to save before the time limit, and
              queued again when it ends with 75
kubernetes    an indexed Job, with a headless Service where there are several nodes
jobset        a JobSet with one such Job
kubeflow      a TrainingRuntime and a TrainJob of Kubeflow Trainer
============  ===================================================================================

In the last three a pod that ends with 75, or that is evicted, is replaced without being counted.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from elaunch.cli.run import Line, parse
from elaunch.config import checks, command, settings, values
from elaunch.config.flags.flag import Answers, collect
from elaunch.config.flags.table import TABLE
from elaunch.endings import KILLED, PREEMPTED
from elaunch.errors import JoinTimeoutError, ServerError, StoreError, UsageError

PORT: Final = 29400
MARGIN_S: Final = 15
"""Seconds of the lead in which the agent ends what has not saved, and itself."""
LONGEST_DAYS: Final = 9999
SLURM_LEAD_S: Final = 65_535
"""Seconds before the limit at which Slurm can send a signal, at the most (sbatch(1))."""
SLURM_EARLY_S: Final = 60
"""Seconds by which Slurm may send it too early (the same page)."""
CONTAINER: Final = "node"
TRAINER: Final = "trainer.kubeflow.org/v1alpha1"
_AGAIN: Final = sorted(
    {StoreError.exit_code, ServerError.exit_code, JoinTimeoutError.exit_code, PREEMPTED}
    | {KILLED, 128 + 15}
)
"""Exit codes after which another pod may do better; all others are the script's, or a mistake."""
_MEETING: Final = frozenset(
    "standalone node-rank master-addr master-port local-addr detach dry-run workdir".split()
)
"""Flags that the target decides on, or that make no sense there."""
_SIZE: Final = ("nnodes", "nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint")

_CLAIM: Final = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)

_VARIABLES: Final = ("$host:$port", "$SLURM_JOB_ID")

Document = Mapping[str, Any]


@dataclass(frozen=True)
class ScheduledJob:
    """The job of which the files for every target are made.

    ``flags`` and ``command`` are words of ``elaunch run``, without the size and the meeting point,
    which ``answers`` have; ``lead`` is the seconds between the request to save and the end.
    """

    name: str
    answers: Answers
    flags: tuple[str, ...]
    command: tuple[str, ...]
    image: str
    gpus: int
    limit: int
    lead: int
    claim: str

    @property
    def least(self) -> int:
        """The least number of nodes."""
        return int(self.answers["nnodes"][0])

    @property
    def most(self) -> int:
        """The greatest number of nodes."""
        return int(self.answers["nnodes"][1])

    @property
    def through_etcd(self) -> bool:
        """Whether the nodes meet in an etcd that is named."""
        return bool(self.answers["rdzv-backend"] == "etcd")

    def meeting(self, endpoint: str, run_id: str) -> list[str]:
        """Return the flags for run and meeting point; ``endpoint`` is where node 0 is, or ""."""
        asked = self.answers
        flags = [
            f"--nproc-per-node={asked['nproc-per-node']}",
            f"--rdzv-id={asked['rdzv-id'] or run_id}",
        ]
        if self.through_etcd:
            flags += ["--rdzv-backend=etcd", f"--rdzv-endpoint={asked.given['rdzv-endpoint'].text}"]
        elif self.most == 1:
            # A pod's name, which Kubeflow gives by PET_MASTER_ADDR, need not resolve yet.
            return [*flags, "--standalone", "--master-addr=127.0.0.1"]
        elif endpoint:
            flags += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        else:
            return flags
        nodes = f"{self.least}" if self.least == self.most else f"{self.least}:{self.most}"
        return [f"--nnodes={nodes}", *flags]


def slurm(job: ScheduledJob) -> str:
    """Return a batch script.

    Raises UsageError where Slurm would refuse its lead, or send the signal at the very start.
    """
    _check_lead(job)
    nodes = f"{job.least}" if job.least == job.most else f"{job.least}-{job.most}"
    lead, left = job.lead, job.lead - MARGIN_S
    given = [
        # Without it, Slurm may bind the one task of a node, with all its workers, to one CPU.
        *("job-name=" + job.name, "nodes=" + nodes, "ntasks-per-node=1", "exclusive"),
        *([f"gpus-per-node={job.gpus}"] if job.gpus else []),
        *([f"time={-(-job.limit // 60)}"] if job.limit else []),
        *(f"signal=B:USR1@{job.lead}", "requeue", "open-mode=append"),
    ]
    head = "".join(f"#SBATCH --{one}\n" for one in given)
    meeting = job.meeting("$host:$port", "$SLURM_JOB_ID")
    words = [*map(_in_shell, meeting), *map(shlex.quote, job.flags), shlex.join(job.command)]
    run_id = _in_shell(job.answers["rdzv-id"] or "$SLURM_JOB_ID")
    started = " \\\n    ".join(["srun --kill-on-bad-exit=0 elaunch run", *words])
    return f"""\
#!/bin/bash
{head}
# Slurm sends USR1 here {lead} s before the time limit: the job saves, and ends with {PREEMPTED}.
ask() {{
    asked=yes
    elaunch preempt --deadline {left} --reason "the time limit of the Slurm job" -- {run_id}
}}
trap ask USR1

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
{started} &
step=$!
while
    asked=
    wait "$step"
    code=$?
    [ -n "$asked" ]  # the signal has ended the wait, not the step
do :; done

# {PREEMPTED}: it has saved, and is to be continued.
[ "$code" -eq {PREEMPTED} ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def _check_lead(job: ScheduledJob) -> None:
    if job.lead > SLURM_LEAD_S:
        raise UsageError(f"--lead: {job.lead} s: Slurm takes up to {SLURM_LEAD_S}")
    if job.limit and job.lead + SLURM_EARLY_S >= job.limit:
        raise UsageError(
            f"--lead: {job.lead} s, and {SLURM_EARLY_S} by which Slurm may be early, are not "
            f"shorter than --time, {job.limit} s: the job would be asked to save as soon as it "
            "starts, and again each time that it is requeued"
        )


def kubernetes(job: ScheduledJob) -> list[Document]:
    """Return an indexed Job, and the Service that gives its pods names."""
    meeting = job.meeting(f"{job.name}-0.{job.name}:{PORT}", job.name)
    spec = _job_spec(job, _pod(job, meeting))
    made = _object("batch/v1", "Job", job.name, spec)
    if job.most == 1:
        return [made]
    spec["template"]["spec"]["subdomain"] = job.name
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": job.name},
    }
    return [_object("v1", "Service", job.name, service), made]


def jobset(job: ScheduledJob) -> list[Document]:
    """Return a JobSet of one Job."""
    meeting = job.meeting(f"{job.name}-{CONTAINER}-0-0.{job.name}:{PORT}", job.name)
    spec = _job_spec(job, _pod(job, meeting))
    network = {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
        "subdomain": job.name,
    }
    jobs = [{"name": CONTAINER, "replicas": 1, "template": {"spec": spec}}]
    made = {"network": network, "replicatedJobs": jobs}
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", job.name, made)]


def kubeflow(job: ScheduledJob) -> list[Document]:
    """Return a TrainingRuntime and a TrainJob; the nodes meet where PET_* variables say."""
    if job.least != job.most:
        raise UsageError("--nnodes: a TrainJob has a fixed number of nodes; give one number")
    pod = _pod(job, job.meeting("", job.name))
    (container,) = pod["containers"]
    trainer = {"numNodes": job.most}
    trainer |= {name: container[name] for name in ("image", "command", "args")}
    if "resources" in container:
        trainer["resourcesPerNode"] = container["resources"]
    spec = {
        name: value
        for name, value in _job_spec(job, pod).items()
        if name not in ("completionMode", "completions", "parallelism", "activeDeadlineSeconds")
    }
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    jobs = [{"name": CONTAINER, "template": {"metadata": step, "spec": spec}}]
    runtime = {
        "mlPolicy": {"numNodes": job.most, "torch": {}},
        "template": {"spec": {"replicatedJobs": jobs}},
    }
    made: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": TRAINER.partition("/")[0],
            "kind": "TrainingRuntime",
            "name": job.name,
        },
        "trainer": trainer,
    }
    if job.limit:
        made["activeDeadlineSeconds"] = job.limit
    return [
        _object(TRAINER, "TrainingRuntime", job.name, runtime),
        _object(TRAINER, "TrainJob", job.name, made),
    ]


def _object(version: str, kind: str, name: str, spec: Document) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _job_spec(job: ScheduledJob, pod: Document) -> dict[str, Any]:
    """Return what a Job, a JobSet and a TrainingRuntime have alike."""
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes("In", [PREEMPTED])},
        {"action": "FailJob", "onExitCodes": _codes("NotIn", _AGAIN)},
    ]
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.most,
        "parallelism": job.most,
        "backoffLimit": 3 * job.most,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": dict(pod)},
    }
    if job.least < job.most:  # a pod that finds no place, or no job any more, is not missed
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    if job.limit:
        spec["activeDeadlineSeconds"] = job.limit
    return spec


def _codes(operator: str, codes: Sequence[int]) -> Document:
    return {"containerName": CONTAINER, "operator": operator, "values": list(codes)}


def _pod(job: ScheduledJob, meeting: Sequence[str]) -> Document:
    flags = [*meeting, *job.flags, *_shutdown(job)]
    volumes: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.claim:
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": job.claim}})
        where = job.answers["checkpoint-dir"]
        mounts.append({"name": "checkpoints", "mountPath": where})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.image,
        "command": ["elaunch", "run"],
        # $(NAME) is a variable to Kubernetes; $$ is a dollar.
        "args": [word.replace("$", "$$") for word in (*flags, *job.command)],
        "volumeMounts": mounts,
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.lead,
        "containers": [container],
        "volumes": volumes,
    }


def _shutdown(job: ScheduledJob) -> list[str]:
    """Return the flag by which the agent ends its workers before the kubelet ends the agent."""
    answers, own = job.answers, job.answers.is_set("shutdown-timeout")
    seconds = answers["shutdown-timeout"] if own else job.lead - MARGIN_S
    grace = answers["sibling-grace"]
    if not answers.is_set("sibling-grace"):
        grace = min(grace, seconds)
    if seconds + grace > job.lead:
        name, other = "shutdown-timeout", f"--sibling-grace, {grace:g} s"
        if not own:
            name, other = "sibling-grace", f"--shutdown-timeout, {seconds:g} s"
        longer = math.ceil((seconds if own else MARGIN_S) + grace)
        why = f"and {other}, are longer than --lead, {job.lead} s: the kubelet kills the agent"
        raise answers.fault(name, why, f"give a shorter time, or --lead {longer}")
    return [] if own else [f"--shutdown-timeout={seconds}"]


TARGETS: Mapping[str, Callable[[ScheduledJob], str | list[Document]]] = {
    target.__name__: target for target in (slurm, kubernetes, jobset, kubeflow)
}


def _in_shell(word: str) -> str:
    """Quote a word, but for the variables that the script sets."""
    head, equals, tail = word.rpartition("=")
    if tail not in _VARIABLES:
        return shlex.quote(word)
    return f'{shlex.quote(head)}{equals}"{tail}"' if equals else f'"{tail}"'


def to_yaml(documents: Sequence[Document]) -> str:
    """Return documents in which every text is quoted: no reader takes one for something else."""
    import yaml

    class Quoting(yaml.SafeDumper):
        """Writes values in double quotes, keys without."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')

    def mapping(dumper: yaml.SafeDumper, value: Document) -> yaml.Node:
        node = dumper.represent_mapping("tag:yaml.org,2002:map", value)
        for key, _ in node.value:
            key.style = None
        return node

    Quoting.add_representer(str, text)
    Quoting.add_representer(dict, mapping)
    Quoting.ignore_aliases = lambda *_: True  # type: ignore[method-assign]
    return yaml.dump_all(
        documents, Dumper=Quoting, sort_keys=False, width=1 << 20, explicit_start=True
    )


def read(words: Sequence[str], **given: Any) -> ScheduledJob:
    """Return what the words of ``elaunch run`` ask for.

    Raises UsageError for what is wrong with them, or means nothing to a scheduler.
    """
    line = _parse(words)
    if line.help or not (line.command or "file" in line.flags):
        raise UsageError("give the flags of `elaunch run` and the script; `elaunch run --help`")
    file = settings.job_file(line.flags, {}, Path.cwd())
    answers = collect(TABLE.values(), line.flags, {}, file)
    for name in (*line.flags, *(one for one in file.flags if one != "workdir")):
        if name in _MEETING:
            raise answers.fault(name, "has no place in a manifest", "the scheduler decides that")
    checks.refused(answers)
    _check_backend(answers)
    if answers["exit-codes"] == "torchrun":
        why = f"has no place in a manifest: a job to be continued has to end with {PREEMPTED}"
        raise answers.fault("exit-codes", why, "leave it out")
    for word in (*line.command, *line.flags.values(), given["image"], given["claim"]):
        if not _is_text(word):
            raise UsageError(f"{word!r} has bytes in it that are no text in UTF-8")
    chosen = command.choose(line.command, file.entrypoint, answers)
    flags = [_flag(name, text) for name, text in line.flags.items() if name not in _SIZE]
    if given["claim"] and not _can_be_mounted_at(str(answers["checkpoint-dir"] or "")):
        what = "an absolute path that is not / or /dev/shm and has no ':'"
        raise UsageError(f"--claim: give --checkpoint-dir, {what}: it is mounted there")
    if given["lead"] <= MARGIN_S:
        raise UsageError(
            f"--lead: {given['lead']} s are too short: the agent takes up to {MARGIN_S} of them "
            f"to end what has not saved; give {MARGIN_S + 1} or more"
        )
    name = label(answers["name"] or chosen.name)
    ended = ("--",) if line.command and chosen.entrypoint.startswith("-") else ()
    return ScheduledJob(name, answers, tuple(flags), (*ended, *line.command), **given)


def _parse(words: Sequence[str]) -> Line:
    try:
        return parse(words)
    except click.UsageError as error:
        own = [name for option in manifest.params for name in option.opts if name[:2] == "--"]
        for name in own:
            if repr(name) in error.format_message():
                raise UsageError(
                    f"{name} is an option of `elaunch manifest`; it stands before the target"
                ) from None
        raise


def _check_backend(answers: Answers) -> None:
    backend = answers["rdzv-backend"]
    if answers.is_set("rdzv-backend") and backend not in ("c10d", "etcd"):
        fix = "the nodes meet at the first one (c10d), or in an etcd (etcd)"
        raise answers.fault("rdzv-backend", "has no place in a manifest", fix)
    if backend != "etcd" and answers["rdzv-endpoint"]:
        raise answers.fault("rdzv-endpoint", "is for etcd here", "the nodes meet at the first one")
    if backend == "etcd" and not answers["rdzv-endpoint"]:
        raise answers.fault("rdzv-backend", "needs --rdzv-endpoint", "name the members of etcd")


def _can_be_mounted_at(path: str) -> bool:
    place = os.path.normpath(f"/{path.lstrip('/')}")
    return path[:1] == "/" and place not in ("/", "/dev/shm") and ":" not in path


def _is_text(word: str) -> bool:
    try:
        return b"\0" not in word.encode()
    except UnicodeEncodeError:
        return False


def _flag(name: str, text: str) -> str:
    return f"--{name}" if TABLE[name].is_switch and text == "yes" else f"--{name}={text}"


def label(text: str) -> str:
    """Return a name as Kubernetes allows it for a Service, the strictest."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return plain if plain[:1].isalpha() else f"train-{plain}".strip("-")


def _seconds(_: click.Context, __: click.Parameter, value: str) -> int:
    """Return the seconds of a text such as 90, 30m, 4h or 2d."""
    try:
        seconds = values.moment(f"+{value}").after or 0
    except ValueError:
        raise click.BadParameter(f"{value!r} is no duration such as 90, 30m, 4h or 2d") from None
    if seconds > LONGEST_DAYS * 86_400:
        raise click.BadParameter(f"{value!r} is longer than {LONGEST_DAYS} days")
    return int(seconds)


@click.command(
    "manifest",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option(
    "--image",
    default="",
    metavar="IMAGE",
    help="Image of the pods, with elaunch and the script; not for slurm.",
)
@click.option(
    "--gpus", type=click.IntRange(0), default=0, metavar="N", help="Number of GPUs of each node."
)
@click.option(
    *("--time", "limit"),
    callback=_seconds,
    default="0",
    metavar="DURATION",
    help="Time limit of the job, as in 30m, 4h, 2d.  [default: none]",
)
@click.option(
    "--lead",
    callback=_seconds,
    default="2m",
    metavar="DURATION",
    help="Time from the request to save to the end.  [default: 2m]",
)
@click.option(
    "--claim",
    default="",
    metavar="NAME",
    help="PersistentVolumeClaim to mount at --checkpoint-dir; not for slurm.",
)
@click.argument("target", metavar="|".join(TARGETS), type=click.Choice(list(TARGETS)))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN FLAGS] SCRIPT [ARGS]...")
def manifest(target: str, words: tuple[str, ...], **given: Any) -> None:
    """Print a scheduler's file that starts what `elaunch run` would.

    After the target come the flags of `elaunch run`, the script and its arguments.
    """
    image, claim = given["image"], given["claim"]
    if target == "slurm" and (image or claim):
        raise UsageError(f"--{'image' if image else 'claim'}: is for pods; slurm has none")
    if target != "slurm" and not re.fullmatch(r"[^\s-]\S*", image):
        fault = f"{image!r} is no image" if image else f"{target} needs the image"
        raise UsageError(f"--image: {fault} that has elaunch and the script")
    if claim and not _CLAIM.fullmatch(claim):
        raise UsageError(
            f"--claim: {claim!r} is no name of a PersistentVolumeClaim: small letters, digits, "
            "'-' and '.', a letter or digit first and last, at most 253"
        )
    made = TARGETS[target](read(words, **given))
    click.echo(made if isinstance(made, str) else to_yaml(made), nl=False)
