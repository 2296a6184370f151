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

An agent settles the key (``MungeKey``) each time that it has opened the store, before it reads or
writes anything else there:

=================  ===============================================================================
agent              key
=================  ===============================================================================
hosts a TCPStore   makes it; its credential is in the store before anybody else can be. Without
                   MUNGE the store is open, and the agent warns
client of it       that of the credential in the store. Where there is none and MUNGE works here,
                   the agent ends: else any process that removes the key could give it any plan
of etcd            that of the credential in etcd; the first agent writes it. It stays as long as
                   the plan, which is signed with it
=================  ===============================================================================

A host that was started anew makes a new key, and its clients take it when they open the new store.
An agent that cannot read the key of its job ends with the reason.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
from typing import Final

from elaunch.errors import StoreDenied, StoreError
from elaunch.store.protocol import Store

DEADLINE: Final = 5.0
"""Seconds for one call of munge or unmunge; munged answers in milliseconds."""
KEY_BYTES: Final = 32
STATUSES: Final = {0: "success", 15: "expired", 16: "rewound", 17: "replayed"}
"""Those with which munged returns a payload, having checked its maker and its reader. A rewound
credential was made in the future of this node's clock."""

REMEDY: Final = "give --rdzv-secret-file FILE, the same on all nodes"

_CREDENTIAL = re.compile(rb"MUNGE:[A-Za-z0-9+/=]{1,8000}:")
_METADATA = re.compile(rb"^(\w+):\s+(?:.*\()?(\d+)\)?$", re.M)

log = logging.getLogger("elaunch")


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
    payload = json.dumps({"elaunch": 1, "run_id": run_id, "key": key.hex()}).encode()
    output, problem = _run(["munge", "-u", str(os.geteuid()), "-t", "-1"], payload)
    credential = output.strip()
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
    output, problem = _run(["unmunge", "-k", "STATUS,UID,UID_RESTRICTION"], credential)
    metadata, _, payload = output.partition(b"\n\n")
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
        content = json.loads(payload)
        key, its_run_id = bytes.fromhex(content["key"]), content["run_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise MungeError("it holds no key of elaunch") from None
    if its_run_id != run_id:
        raise MungeError(f"it was made for the job {its_run_id!r}, not for {run_id!r}")
    if len(key) != KEY_BYTES:
        raise MungeError(f"its key has {len(key)} bytes, and not {KEY_BYTES}")
    return key


def _run(argv: list[str], stdin: bytes) -> tuple[bytes, str]:
    """Return what a program writes to stdout, and the first line of its stderr."""
    # Its exit code goes to the agent's reaper, which waits for all children.
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        problem = f"{argv[0]} has not answered for {DEADLINE:g} s: does munged run?"
        raise MungeError(problem) from None
    except FileNotFoundError:
        raise MungeError(f"{argv[0]} is not on the PATH") from None
    except OSError as error:
        raise MungeError(f"{argv[0]} cannot be started: {error.strerror}") from None
    lines = done.stderr.decode(errors="replace").splitlines()
    return done.stdout, lines[0] if lines else ""


class MungeKey:
    """Owns what one agent knows of its job's key; ``secret`` is None as long as there is none."""

    def __init__(self, run_id: str) -> None:
        self.secret: bytes | None = None
        self.credential = b""
        """The credential that holds ``secret``, for others; empty without one."""
        self._run_id = run_id
        self._warned = False

    def host(self) -> str:
        """Make a key for the clients of this agent; return why there is none, "" otherwise."""
        try:
            self._make()
        except MungeError as error:
            return str(error)
        return ""

    def read(self, store: Store) -> None:
        """Take the key that the host of a TCPStore has made.

        Raises:
            StoreDenied: it is not to be read or trusted; or there is none, and MUNGE works here.
        """
        if found := store.shared():
            self._accept(found, store.name)
            return
        if self.secret is None:
            try:
                self._new()
            except MungeError as error:
                log.debug("%s has no key, and MUNGE does not work here: %s", store.name, error)
                return
        raise StoreDenied(
            f"the agent that hosts {store.name} shares no key by MUNGE, which works on this "
            f"node: have srun start that agent too, where munged runs, or {REMEDY}"
        )

    def agree(self, store: Store) -> None:
        """Take the key that is in etcd, or put one there.

        Raises:
            StoreDenied: it is not to be read or trusted.
        """
        try:
            self._make()
        except MungeError as error:
            if found := store.shared():
                self._accept(found, store.name)
            elif is_there() and not self._warned:
                self._warned = True
                log.warning("this job's agents share no key by MUNGE: %s; %s", error, REMEDY)
            return
        self._accept(store.shared(self.credential), store.name)

    def _make(self) -> None:
        """Make a key, unless there is one; raises MungeError."""
        if self.secret is None:
            self.secret, self.credential = self._new()

    def _new(self) -> tuple[bytes, bytes]:
        """Return a new key and its credential; raises MungeError where MUNGE does not work here."""
        key = os.urandom(KEY_BYTES)
        credential = make(key, self._run_id)
        read(credential, self._run_id)  # fails where a user namespace maps the uid
        return key, credential

    def _accept(self, credential: bytes, store_name: str) -> None:
        if credential == self.credential:
            return
        try:
            self.secret = read(credential, self._run_id)
        except MungeError as error:
            raise StoreDenied(
                f"the key that this job's agents share by MUNGE, in {store_name}, is refused: "
                f"{error}; or {REMEDY}"
            ) from None
        self.credential = credential
