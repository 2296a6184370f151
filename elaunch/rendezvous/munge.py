"""A key that the agents of one user share by MUNGE, the service that Slurm signs its messages by.

Nothing in the environment of a Slurm step is secret, but each node of the cluster runs munged, and
all of these have one key. ``make`` has munged encrypt a key of ours; the credential that it returns
may lie where any process reads it. ``read`` has munged decrypt it::

    MUNGE:<base64>:  →  {"elaunch": 1, "run_id": "job", "key": "<64 hex digits>"}

munged decrypts it for processes of one user only, and reports which user has made it. Both have to
be the user of this process: a credential of another user is refused, whatever is in it.

munged also reports that a credential has expired or was read on this node before. It has checked
everything else by then (``STATUSES``). An agent that joins later, or is the second one on its node,
reads the same credential, so neither is a reason to refuse it. An unauthenticated process that has
copied the credential of an earlier job into the store of this one does not know its key either.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Final

from elaunch.errors import StoreError

DEADLINE: Final = 5.0
"""Seconds for one call of munge or unmunge; munged answers in milliseconds."""
KEY_BYTES: Final = 32
STATUSES: Final = {0: "success", 15: "expired", 16: "rewound", 17: "replayed"}
"""Those with which munged returns a payload, having checked its maker and its reader. A rewound
credential was made in the future of this node's clock."""

_CREDENTIAL = re.compile(rb"MUNGE:[A-Za-z0-9+/=]{1,8000}:")
_METADATA = re.compile(rb"^(\w+):\s+(?:.*\()?(\d+)\)?$", re.M)


class MungeError(StoreError):
    """MUNGE gives no key; the text is why."""


def is_there() -> bool:
    """Return whether this machine has the programs of MUNGE; munged may not run."""
    return all(shutil.which(program) for program in ("munge", "unmunge"))


def make(key: bytes, run_id: str) -> bytes:
    """Return a credential that holds ``key``, for agents of the job ``run_id`` and of this user.

    Raises:
        MungeError: munge is not there, or munged does not answer.
    """
    told = json.dumps({"elaunch": 1, "run_id": run_id, "key": key.hex()}).encode()
    said, problem = _ask(["munge", "-u", str(os.geteuid()), "-t", "-1"], told)
    credential = said.strip()
    if not _CREDENTIAL.fullmatch(credential):
        raise MungeError(problem or "munge gives no credential")
    return credential


def read(credential: bytes, run_id: str) -> bytes:
    """Return the key that an agent of the job ``run_id`` and of this user has put in a credential.

    Raises:
        MungeError: it is no credential, munged does not open it, or another user or job has made
            it.
    """
    if not _CREDENTIAL.fullmatch(credential):
        raise MungeError("it is no credential of MUNGE")
    said, problem = _ask(["unmunge", "-k", "STATUS,UID,UID_RESTRICTION"], credential)
    metadata, _, payload = said.partition(b"\n\n")
    facts = {name.decode(): int(number) for name, number in _METADATA.findall(metadata)}
    if facts.get("STATUS") not in STATUSES:
        raise MungeError(problem or "unmunge does not open it")
    own = os.geteuid()
    if facts.get("UID") != own:
        raise MungeError(f"the user with uid {facts.get('UID')} has made it, and not {own}")
    if facts.get("UID_RESTRICTION") != own:
        raise MungeError(f"others than the user with uid {own} can read it")
    return _key(payload, run_id)


def _key(payload: bytes, run_id: str) -> bytes:
    try:
        told = json.loads(payload)
        key, its_run_id = bytes.fromhex(told["key"]), told["run_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise MungeError("it holds no key of elaunch") from None
    if its_run_id != run_id:
        raise MungeError(f"it was made for the job {its_run_id!r}, not for {run_id!r}")
    if len(key) != KEY_BYTES:
        raise MungeError(f"its key has {len(key)} bytes, and not {KEY_BYTES}")
    return key


def _ask(argv: list[str], told: bytes) -> tuple[bytes, str]:
    """Return what a program writes to stdout, and the first line of its stderr."""
    # Its exit code goes to the agent's reaper, which waits for all children.
    try:
        done = subprocess.run(argv, input=told, capture_output=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        problem = f"{argv[0]} has not answered for {DEADLINE:g} s: does munged run?"
        raise MungeError(problem) from None
    except FileNotFoundError:
        raise MungeError(f"{argv[0]} is not on the PATH") from None
    except OSError as error:
        raise MungeError(f"{argv[0]} cannot be started: {error.strerror}") from None
    lines = done.stderr.decode(errors="replace").splitlines()
    return done.stdout, lines[0] if lines else ""
