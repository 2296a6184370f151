"""Notices of flags that have no effect: one line each, so that nothing is silently ignored.

Only what stands on the command line or in the job file is remarked on; a variable that a cluster
sets for every job is not. Remarks that cost the user nothing appear with ``LOGLEVEL=INFO``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elaunch.config import checkpoint, gpus
from elaunch.config.entrypoint import Command
from elaunch.config.flags.answers import Answers, unknown_variables
from elaunch.config.meeting.topology import Topology
from elaunch.config.validate import NO_FILES


def collect(
    answers: Answers, command: Command, meeting: Topology, environ: Mapping[str, str]
) -> list[str]:
    """Return the remarks on these settings, in the order of the table of flags."""
    found = [*_start(answers, command), *_logs(answers), *_ranks(answers), *meeting.notices]
    if answers.said("monitor-interval"):
        found.append("--monitor-interval has no effect: an exit wakes the agent, it does not poll")
    found += checkpoint.remarks(answers, answers["nnodes"][1])
    found += _gpus(answers, environ)
    found += unknown_variables(environ)
    if answers["log-level"] in ("DEBUG", "INFO"):
        found += meeting.infos
    return found


def _start(answers: Answers, command: Command) -> Iterator[str]:
    if answers["run-path"] and answers["no-python"]:
        yield "--no-python has no effect with --run-path"
    plain = "with --no-python" if command.mode == "command" else ""
    plain = plain or ("with --start-method spawn" if answers["start-method"] == "spawn" else "")
    if plain and answers.said("preload"):
        yield f"--preload has no effect {plain}: nothing is forked from a warm process"
    if command.mode == "command" and answers.said("start-method"):
        yield "--start-method has no effect with --no-python: the program is executed"


def _logs(answers: Answers) -> Iterator[str]:
    # The agent logs the same about --redirects and the filters, for the ranks that it starts.
    if answers["log-dir"] == NO_FILES and answers["tee"] and answers.said("tee"):
        yield f"--tee writes to the console only with --log-dir {NO_FILES}"
    if answers.said("restart-budget") and not answers["max-restarts"]:
        yield "--restart-budget has no effect without --max-restarts"


def _gpus(answers: Answers, environ: Mapping[str, str]) -> Iterator[str]:
    """Remark on workers that outnumber the GPUs; on CPUs (gloo) that is legitimate."""
    count, nproc = gpus.visible(environ), answers["nproc-per-node"]
    if count and nproc.isdigit() and int(nproc) > count:
        yield (
            f"--nproc-per-node {nproc}: {nproc} workers share {count} visible GPU"
            f"{'s' * (count > 1)}; a script that takes cuda:LOCAL_RANK fails. For a job on CPUs "
            "set CUDA_VISIBLE_DEVICES= (empty)"
        )


def _ranks(answers: Answers) -> Iterator[str]:
    """Remark on local ranks that this job does not have."""
    if not answers["nproc-per-node"].isdigit():
        return
    nproc = int(answers["nproc-per-node"])
    named = {
        "redirects": answers["redirects"].ranks,
        "tee": answers["tee"].ranks,
        "local-ranks-filter": answers["local-ranks-filter"] or (),
    }
    for name, ranks in named.items():
        absent = sorted(rank for rank in ranks if rank >= nproc)
        if absent:
            shown = ", ".join(map(str, absent))
            yield f"--{name} names local rank {shown}, but the ranks go from 0 to {nproc - 1}"
