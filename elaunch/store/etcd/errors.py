"""The meaning of an answer that is no success: gRPC's status and etcd's text, in our words.

==========  ====================================================  ===============================
kind        the member                                            what follows
==========  ====================================================  ===============================
refused     runs nothing: its port is closed                      another member
leaderless  runs and knows no leader                              another member
silent      does not answer in time                               another member
failing     answers that it cannot do it now                      another member
tls         and this agent do not agree on encryption or on       another; StoreDenied if all do
            certificates
token       does not know our token (expired, or it was restarted)  a new token, or StoreDenied
            or has had none of us                                  where we have no user
denied      knows us and does not let us in                       StoreDenied
gone        knows our lease no more                               LeaseLost
full        takes no more writes: etcd's space is used up         StoreFull
wrong       will never do it: too large, no such call             StoreError
==========  ====================================================  ===============================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elaunch.store.etcd.cluster import EtcdCluster
from elaunch.text import shortened

Kind = Literal[
    "refused", "leaderless", "silent", "failing", "tls", "token", "denied", "gone", "full", "wrong"
]

_LONGEST_TEXT = 200
_DENIED = (
    "authentication failed",
    "user name not found",
    "permission denied",
)
_TOKEN = (
    "invalid auth token",
    "user name is empty",
    "auth: revision in header is old",
    "auth store is old",
)
_TLS = ("handshake", "unwrap failed", "security handshaker", "certificate")
_CUT_OFF = "tcp handshaker shutdown"
"""gRPC's text when time ran out before the other side's first frame: packets are lost."""
_WRONG = frozenset("INVALID_ARGUMENT OUT_OF_RANGE ALREADY_EXISTS".split())


class Refusal(Exception):
    """One member did not do what it was asked; ``text`` is why, as in "connection refused"."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind: Kind = kind
        self.text = text


@dataclass(frozen=True)
class Outcome:
    """The answers of a failed pass over the members, by address, in the order of the endpoints."""

    refusals: Mapping[str, Refusal]
    members: int

    @property
    def nobody_decides(self) -> bool:
        """Whether most members are down or report that they have no leader."""
        without = [r for r in self.refusals.values() if r.kind in ("refused", "leaderless")]
        return 2 * len(without) > self.members

    @property
    def text(self) -> str:
        """Every address with its reason: ``h1:2379: connection refused; h2:2379: …``."""
        return "; ".join(f"{address}: {why.text}" for address, why in self.refusals.items())


def refusal(code: str, details: str, waited: float) -> Refusal:
    """Return what an RPC's status means.

    Args:
        code: the name of the gRPC status code.
        details: its text.
        waited: seconds that the member had for its answer.
    """
    low = details.lower()
    short = _shortened(details)
    if code == "UNAUTHENTICATED" or any(text in low for text in _TOKEN):
        return Refusal("token", short)
    if code == "PERMISSION_DENIED" or any(text in low for text in _DENIED):
        return Refusal("denied", short)
    if code == "DEADLINE_EXCEEDED":
        return Refusal("silent", f"no answer within {waited:.2g} s")
    if "lease not found" in low:
        return Refusal("gone", short)
    if "space exceeded" in low:
        return Refusal("full", short)
    if "no leader" in low:
        return Refusal("leaderless", "it has no leader")
    if code == "UNAVAILABLE":
        return _unavailable(low, short)
    wrong = code in _WRONG or "larger than max" in low
    return Refusal("wrong" if wrong else "failing", short or code)


def _unavailable(low: str, short: str) -> Refusal:
    if "connection refused" in low:
        return Refusal("refused", "connection refused")
    if low.endswith(_CUT_OFF):
        return Refusal("silent", "the connection did not come about in time")
    if any(text in low for text in _TLS):
        return Refusal("tls", short)
    if "failed to connect" in low and "socket closed" in low:
        return Refusal("tls", "it closes the connection at once, as an etcd with TLS does")
    return Refusal("failing", short)


def _shortened(details: str) -> str:
    """Return the telling end of gRPC's text, in one line."""
    text = " ".join(details.rpartition("last error: ")[2].split())
    text = text.removeprefix("etcdserver: ")
    for code in ("UNKNOWN: ", "UNAVAILABLE: "):
        text = text.removeprefix(code)
    if text.startswith(("ipv4:", "ipv6:")):
        text = text.partition(": ")[2] or text
    return shortened(text, _LONGEST_TEXT)


def denied(cluster: EtcdCluster, text: str) -> str:
    """Return the message for a user whom etcd does not let in: what to check."""
    if cluster.user is None:
        return f"{cluster} does not let us in ({text}): give a user and a password for it"
    if "authentication failed" in text:
        return f"{cluster} does not know the user {cluster.user!r} with this password: check both"
    return (
        f"{cluster} does not let the user {cluster.user!r} in ({text}): it needs a role that may "
        f"read and write the keys below {cluster.prefix}/"
    )


def full(cluster: EtcdCluster, text: str) -> str:
    """Return the message for an etcd whose space is used up: how to free some."""
    return (
        f"{cluster} takes no more writes ({text}; alarm NOSPACE): free space with etcdctl compact, "
        "defrag and alarm disarm, and raise its --quota-backend-bytes"
    )


def not_trusted(cluster: EtcdCluster, text: str) -> str:
    """Return the message for TLS that does not come about: what to check."""
    if cluster.cacert is None:
        check = "does it want TLS? Then give cacert"
    elif cluster.cert is None:
        check = (
            f"is it signed by an authority in {cluster.cacert}, and does it ask for a certificate"
        )
        check += " of ours (cert, key)?"
    else:
        check = (
            f"is it signed by an authority in {cluster.cacert}, and does it trust {cluster.cert}?"
        )
    return f"{cluster} cannot be talked to: {check} ({text})"
