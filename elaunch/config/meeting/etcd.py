"""How to get into etcd: key prefix, TLS, user and password; read from ``--rdzv-conf``.

The password comes from ``ELAUNCH_ETCD_PASSWORD``, from ``password_file``, or from ``password`` in a
variable or a job file; on the command line it is refused, where every user of the machine sees it.
TLS is used with ``protocol=https``, and whenever a certificate is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elaunch.config import paths
from elaunch.config.flags.answers import Answers
from elaunch.config.flags.rdzvconf import PASSWORD
from elaunch.config.flags.variables import ETCD_PASSWORD, ETCD_USER
from elaunch.config.meeting import secretfiles

_CONF = "rdzv-conf"
_SAFER = f"set the variable {ETCD_PASSWORD}, or give password_file=PATH"
_T = TypeVar("_T")


@dataclass(frozen=True)
class EtcdAccess:
    """Key prefix, user and password if any, TLS if ``cacert`` is set; paths are absolute."""

    prefix: str = "/elaunch"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def refuse_shown_password(answers: Answers) -> None:
    """Refuse a password on the command line, whatever the backend.

    Raises:
        UsageError: there is one.
    """
    if PASSWORD in answers[_CONF] and answers.given[_CONF].source == "command line":
        why = "puts a password where every user of this machine can read it (ps)"
        raise answers.fault(_CONF, why, _SAFER)


def etcd_access(answers: Answers, environ: Mapping[str, str], start: Path) -> EtcdAccess:
    """Return how to get into etcd.

    Args:
        answers: every flag, or at least ``--rdzv-conf``.
        environ: the launcher's environment.
        start: where relative paths start.

    Raises:
        UsageError: a file is missing or not what it should be, or settings contradict each other.
    """
    user, password = _identity(answers, environ, start)
    cacert, cert, key = _tls(answers, start)
    return EtcdAccess(_prefix(answers), user, password, cacert, cert, key)


def file_of(answers: Answers, flag: str, path: Path, named: str, read: Callable[[Path], _T]) -> _T:
    """Return what ``read`` makes of a file; its ValueError becomes the error for ``flag``.

    Args:
        answers: every flag.
        flag: the flag that names the file.
        path: the file.
        named: how the message calls it: ``cert='tls/me.pem' ``, or nothing where the flag's value
            is the path.
        read: raises ValueError with the end of a sentence that begins with the path.
    """
    try:
        return read(path)
    except ValueError as exc:
        raise answers.fault(flag, f"{named}{exc}", "") from None


def _conf_file(answers: Answers, key: str, start: Path, read: Callable[[Path], _T]) -> _T | None:
    raw = answers[_CONF].get(key)
    if raw is None:
        return None
    return file_of(answers, _CONF, paths.absolute(raw, start), f"names a {key} that ", read)


def _identity(
    answers: Answers, environ: Mapping[str, str], start: Path
) -> tuple[str | None, str | None]:
    conf = answers[_CONF]
    if PASSWORD in conf and "password_file" in conf:
        raise answers.fault(_CONF, "has both password and password_file", "give one of them")
    user = conf.get("user")
    password = conf.get(PASSWORD) or _conf_file(
        answers, "password_file", start, secretfiles.password
    )
    from_file = answers.given[_CONF].source == "file"
    if from_file or user is None:
        user = environ.get(ETCD_USER) or user
    if from_file or password is None:
        password = environ.get(ETCD_PASSWORD) or password
    if user and not password:
        raise answers.fault(_CONF, f"has no password for etcd's user {user!r}", _SAFER)
    if password and not user:
        why = "has no user for etcd's password"
        raise answers.fault(_CONF, why, f"give user=NAME, or set the variable {ETCD_USER}")
    return user, password


def _tls(answers: Answers, start: Path) -> tuple[Path | None, Path | None, Path | None]:
    conf = answers[_CONF]
    if ("cert" in conf) != ("key" in conf):
        there, missing = ("cert", "key") if "cert" in conf else ("key", "cert")
        raise answers.fault(_CONF, f"has {there} without {missing}", "give both or none of them")
    named = [name for name in ("cacert", "cert", "key") if name in conf]
    if named and conf.get("protocol") == "http":
        why = f"has {' and '.join(named)}, which protocol=http does not use"
        raise answers.fault(_CONF, why, "write protocol=https")
    if not named and conf.get("protocol") != "https":
        return None, None, None
    cacert = _conf_file(answers, "cacert", start, secretfiles.certificate)
    cert = _conf_file(answers, "cert", start, secretfiles.certificate)
    key = _conf_file(answers, "key", start, secretfiles.private_key)
    return cacert or _system_authorities(answers), cert, key


def _system_authorities(answers: Answers) -> Path:
    """Return the file with the certificate authorities that this machine trusts."""
    import ssl

    found = ssl.get_default_verify_paths().cafile or ""
    if not found:
        why = "asks for TLS, and this machine has no list of certificate authorities"
        raise answers.fault(_CONF, why, "give cacert=PATH")
    return Path(found)


def _prefix(answers: Answers) -> str:
    raw: str = answers[_CONF].get("etcd_prefix", EtcdAccess.prefix)
    word = raw.strip("/")
    if not word or not word.isprintable() or " " in word:
        why = f"has the etcd_prefix {raw!r}, which is no beginning of a key"
        raise answers.fault(_CONF, why, "write etcd_prefix=/NAME")
    return f"/{word}"
