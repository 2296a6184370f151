"""The facts that must be equal on every node of a job: short texts that the coordinator compares.

==============================  ====================================================================
fact                            is
==============================  ====================================================================
script                          what runs: its name and a digest of its file
argv                            a digest of its arguments, and their beginning
hyperparameters                 a digest of those of the job file
python, torch, elaunch          versions; of the agent's Python, unless the workers have another
nnodes, max_restarts, …         the flags that only the coordinator's node decides
NCCL_…, TORCH_…, GLOO_…         variables on which the ranks have to agree
==============================  ====================================================================

Addresses, interfaces, files and log levels differ between healthy nodes and are left out, as is
CUDA_VISIBLE_DEVICES. No fact is a secret: values of arguments that look like one are not shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from elaunch import __version__
from elaunch.config import command
from elaunch.config.settings import Settings
from elaunch.env import HPARAMS
from elaunch.text import arguments, one_line

TEXT_LIMIT = 80
VARIABLES_LIMIT = 1000
_WORLD = re.compile(r"(NCCL|TORCH|GLOO)_\w+")
_OF_ONE_NODE = re.compile(
    r"IFNAME|ADDR|HOST|HCA|_FILE|_DIR|_HOME|_PATH|_CACHE|DEBUG|LOG|STACKTRACE|TOPO|GRAPH|TOKEN|KEY"
)


def facts(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the facts of this node, name → short text, less than 2 KB in all.

    Args:
        settings: the job's settings on this node.
        environ: the launcher's environment.
    """
    workers_environ = {**environ, **settings.env}
    found = {
        "script": _script(settings, workers_environ),
        # The first argument of a call from Python is a directory that only this node has.
        "argv": _argv(settings.args[settings.entrypoint == command.CALLER :]),
        "hyperparameters": _hparams(settings),
        **_versions(settings),
        **_flags(settings),
        **_variables(workers_environ),
    }
    return {name: text for name, text in found.items() if text}


def digest(content: bytes) -> str:
    """Return the first 12 hex digits of the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()[:12]


def short(text: str) -> str:
    """Return a text on one line of at most TEXT_LIMIT; a digest makes a cut one unique."""
    text = one_line(text)
    if len(text) <= TEXT_LIMIT:
        return text
    mark = f"… ({digest(text.encode('utf-8', 'surrogateescape'))})"
    return text[: TEXT_LIMIT - len(mark)] + mark


def _script(settings: Settings, environ: Mapping[str, str]) -> str:
    file = _script_file(settings, environ)
    name = short(os.path.basename(settings.entrypoint) or settings.entrypoint)
    try:
        content = file.read_bytes() if file and file.is_file() else b""
    except OSError:  # removed meanwhile, or a program that may be executed and not read
        content = b""
    return f"{name} {digest(content)}" if content else name


def _script_file(settings: Settings, environ: Mapping[str, str]) -> Path | None:
    start = settings.workdir or Path.cwd()
    if settings.mode == "module":
        if settings.interpreter != sys.executable:
            return None  # only that Python knows where its modules are
        return command.file_of(settings.entrypoint, command.worker_path(start, environ))
    if settings.mode == "command" and "/" not in settings.entrypoint:
        program = shutil.which(settings.entrypoint, path=environ.get("PATH"))
        return Path(program) if program else None
    file = start / settings.entrypoint
    return file / "__main__.py" if file.is_dir() else file


def _argv(args: Iterable[str]) -> str:
    whole = "\0".join(args).encode("utf-8", "surrogateescape")
    if not whole:
        return "none"
    told = " ".join(arguments(args))
    return f"{short(told.encode('ascii', 'replace').decode())} ({digest(whole)})"


def _hparams(settings: Settings) -> str:
    given = settings.env.get(HPARAMS)
    return digest(given.encode()) if given else ""


def _versions(settings: Settings) -> dict[str, str]:
    from importlib import metadata

    found = {"elaunch": __version__}
    if settings.interpreter != sys.executable:
        return found
    found["python"] = platform.python_version()
    with contextlib.suppress(metadata.PackageNotFoundError):  # a job without torch
        found["torch"] = metadata.version("torch")
    return found


def _flags(settings: Settings) -> dict[str, str]:
    low, high = settings.min_nodes, settings.max_nodes
    local = settings.checkpoint_local
    checkpoints = "each node's own" if local else str(settings.checkpoint_dir or "")
    if settings.checkpoint_glob:
        checkpoints += f" ({settings.checkpoint_glob})"
    found = {
        "nnodes": str(low) if low == high else f"{low}:{high}",
        "max_restarts": str(settings.max_restarts),
        "restart_budget": settings.restart_budget,
        "checkpoint_dir": short(checkpoints),
        "checkpoint_keep": settings.checkpoint_keep.to_json() if settings.checkpoint_keep else "",
    }
    if settings.max_same_failures:
        found["max_same_failures"] = str(settings.max_same_failures)
    if settings.init_from:
        found["init_from"] = short(str(settings.init_from.path))
    if settings.checkpoint_replicas:
        found["checkpoint_replicas"] = str(settings.checkpoint_replicas)
    if settings.rendezvous:
        found["heartbeat_timeout"] = f"{settings.rendezvous.heartbeat_timeout:g}"
        found["on_join"] = settings.rendezvous.on_join
    return found


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables on which ranks must agree; many of them as one digest."""
    found = {
        name: short(environ[name])
        for name in sorted(environ)
        if _WORLD.fullmatch(name) and not _OF_ONE_NODE.search(name)
    }
    if sum(len(name) + len(text) for name, text in found.items()) <= VARIABLES_LIMIT:
        return found
    whole = "\0".join(f"{name}={environ[name]}" for name in found)
    marked = digest(whole.encode("utf-8", "surrogateescape"))
    return {"variables": f"{len(found)} of NCCL, TORCH and GLOO: {marked}"}
