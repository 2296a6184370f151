"""``--rdzv-conf``: its keys, torchrun's and elaunch's own, and what each of them takes.

==============================  ====================================================================
key                             is
==============================  ====================================================================
join_timeout (timeout)          seconds to wait for enough nodes; the host's store, too
settle (last_call_timeout)      seconds without an arrival after which MIN nodes begin
debounce                        seconds without an arrival after which a round ends for newcomers
heartbeat_timeout (heartbeat)   seconds after which a silent node is dead
keep_alive_interval,            their product is heartbeat_timeout where that is not given
keep_alive_max_attempt
store_timeout                   seconds without the store after which an agent ends
is_host                         this node hosts the TCPStore, or does not
protocol, cacert (ca_cert),     TLS to etcd; certificate and key of this client
cert (ssl_cert),
key (ssl_cert_key)
etcd_prefix                     what the keys in etcd begin with
user, password, password_file   to etcd
secret_file                     as --rdzv-secret-file
rank                            node rank of the static backend, without --node-rank
close_timeout, read_timeout,    torchrun's, without effect
cas_backoff_max_seconds,
store_type, use_libuv
==============================  ====================================================================

An unknown key is an error with the nearest name. A password is never shown, in an error neither,
nor what stands behind an unknown key whose name looks like a secret's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaunch.config import values
from elaunch.text import HIDDEN, is_secret

PASSWORD = "password"
_SECRETS = (PASSWORD, "passwd", "secret", "token", "credential")
# Other spellings, torchrun's mostly: both at once is an error.
ALIASES: Mapping[str, str] = {
    "last_call_timeout": "settle",
    "heartbeat": "heartbeat_timeout",
    "ssl_cert": "cert",
    "ssl_cert_key": "key",
    "ca_cert": "cacert",
}


def _store_type(raw: str) -> str:
    """Return ``tcp``; torchrun's ``file`` has no counterpart."""
    word = values.choice(("tcp", "file"))(raw)
    if word == "file":
        raise ValueError("is a store in a shared file, which elaunch does not have; leave it out")
    return word


_READERS: Mapping[str, Callable[[str], object]] = {
    "timeout": values.positive_seconds,
    "join_timeout": values.positive_seconds,
    "settle": values.seconds,
    "debounce": values.seconds,
    "heartbeat_timeout": values.positive_seconds,
    "keep_alive_interval": values.positive_seconds,
    "keep_alive_max_attempt": values.whole(1),
    "store_timeout": values.positive_seconds,
    "close_timeout": values.positive_seconds,
    "cas_backoff_max_seconds": values.seconds,
    "read_timeout": values.positive_seconds,
    "is_host": values.switch,
    "store_type": _store_type,
    "use_libuv": values.switch,
    "protocol": values.choice(("http", "https")),
    "cert": values.text,
    "key": values.text,
    "cacert": values.text,
    "etcd_prefix": values.text,
    "user": values.label,
    PASSWORD: values.text,
    "password_file": values.text,
    "secret_file": values.text,
    "rank": values.whole(0),
}
KEYS = (*_READERS, *ALIASES)


def rdzv_conf(raw: str) -> dict[str, str]:
    """Return the keys and values of ``key=value,key=value``; other spellings of a key become it."""
    conf: dict[str, str] = {}
    spelt: dict[str, str] = {}
    for pair in raw.strip().split(",") if raw.strip() else ():
        said, equals, value = (part.strip() for part in pair.partition("="))
        if PASSWORD in conf and (not equals or said not in KEYS):
            raise ValueError(
                "has something behind the password that is no key=value; a password with a comma "
                "in it has to come from ELAUNCH_ETCD_PASSWORD or password_file=PATH"
            )
        if not said:
            raise ValueError("is not of the form key=value,key=value")
        if said not in KEYS:
            raise ValueError(f"has the unknown key {said!r}{values.did_you_mean(said, KEYS)}")
        key = ALIASES.get(said, said)
        if spelt.get(key, said) != said:
            raise ValueError(f"has both {spelt[key]!r} and {said!r}, which are the same; give one")
        if not value:
            raise ValueError(f"gives no value to the key {said!r}")
        _check(said, key, value)
        conf[key], spelt[key] = value, said
    return conf


def _check(said: str, key: str, value: str) -> None:
    try:
        _READERS[key](value)
    except ValueError as exc:
        shown = HIDDEN if key == PASSWORD else repr(value)
        raise ValueError(f"has a bad value for {said!r}: {shown} {exc}") from None


def seconds(conf: Mapping[str, str], key: str, default: float) -> float:
    """Return a duration of a configuration that was read."""
    return float(conf.get(key, default))


def masked(raw: str) -> str:
    """Return the text of ``--rdzv-conf`` as it may be shown.

    An unknown key may be a misspelt one: what its name makes a secret is hidden, too. A secret may
    have commas in it.
    """
    shown: list[str] = []
    hidden = False
    for pair in raw.split(","):
        key, equals, _ = pair.partition("=")
        name = key.strip()
        if equals and (name == PASSWORD or (name not in KEYS and _looks_secret(name))):
            shown.append(f"{key}={HIDDEN}")
            hidden = True
        elif equals or not hidden:
            shown.append(pair)
            hidden = False
        if name == PASSWORD:
            break
    return ",".join(shown)


def _looks_secret(name: str) -> bool:
    near = values.nearest(name, _SECRETS, cutoff=0.7)
    return bool(near) or is_secret(name) or len(name) > 200


def without_password(conf: Mapping[str, str]) -> dict[str, str]:
    """Return a configuration that was read, without what must not be shown."""
    return {key: value for key, value in conf.items() if key != PASSWORD}
