"""How to get into etcd: prefix, user, password, TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.config.flags.table import SECRET_VARIABLES
from elaunch.store.etcd.cluster import EtcdCluster
from tests.config.resolving import Job
from tests.config.test_files import CERTIFICATE, KEY

LINE = "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h1,h2 --rdzv-id 7"


@pytest.fixture
def files(job: Job) -> Job:
    """Return a job with certificates, a key and a password beside its script."""
    job.write("tls/ca.pem", CERTIFICATE.decode())
    job.write("tls/me.pem", CERTIFICATE.decode())
    job.write("tls/key.pem", KEY.decode()).chmod(0o600)
    job.write("password", "a,b=c\n").chmod(0o600)
    job.write("open", "abc\n").chmod(0o644)
    job.write("text", "abc\n")
    return job


def access(job: Job, conf: str = "", **environ: str) -> EtcdCluster:
    """Return how a command line gets into etcd."""
    words = [*LINE.split(), *(["--rdzv-conf", conf] if conf else []), "train.py"]
    found = job.of(words, environ).rendezvous
    assert found is not None
    return found.etcd


def problem(job: Job, conf: str, **environ: str) -> str:
    """Return the error that a configuration ends in."""
    return job.error(f"{LINE} --rdzv-conf {conf} train.py", **environ)


def test_nothing_is_given(job: Job) -> None:
    """No TLS, no user, and a prefix of elaunch's own."""
    assert access(job) == EtcdCluster()


@pytest.mark.parametrize("text", ["/team/x", "team/x", "/team/x/"])
def test_the_prefix(job: Job, text: str) -> None:
    """With one slash before it and none behind it."""
    assert access(job, f"etcd_prefix={text}").prefix == "/team/x"
    assert "is no beginning of a key" in problem(job, "etcd_prefix=/")


def test_tls(files: Job) -> None:
    """Certificates are enough; torchrun's names are the same."""
    tls = files.directory / "tls"
    own = access(files, "cacert=tls/ca.pem,cert=tls/me.pem,key=tls/key.pem")
    assert (own.cacert, own.cert, own.key) == (tls / "ca.pem", tls / "me.pem", tls / "key.pem")
    theirs = "protocol=https,ca_cert=tls/ca.pem,ssl_cert=tls/me.pem,ssl_cert_key=tls/key.pem"
    assert access(files, theirs) == own


def test_tls_with_the_machines_authorities(files: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where etcd's certificate is signed by a known one; SSL_CERT_FILE is OpenSSL's variable."""
    monkeypatch.setenv("SSL_CERT_FILE", str(files.directory / "tls/ca.pem"))
    assert access(files, "protocol=https").cacert == files.directory / "tls/ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
    monkeypatch.setenv("SSL_CERT_DIR", "/nowhere")
    assert "give cacert=PATH" in problem(files, "protocol=https")


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("cert=tls/me.pem", "has cert without key; give both or none"),
        ("key=tls/key.pem", "has key without cert"),
        ("cacert=tls/none.pem", "names a cacert that does not exist"),
        ("cacert=text", "names a cacert that is not a file in PEM format"),
        ("cert=tls/key.pem,key=tls/me.pem", "names a cert that has no certificate in it"),
        ("cert=tls/me.pem,key=tls/ca.pem", "names a key that has no private key in it"),
        ("protocol=http,cacert=tls/ca.pem", "which protocol=http does not use"),
        ("user=me", "has no password for etcd's user 'me'; set the variable ELAUNCH_ETCD_PASSWORD"),
        ("user=me,password_file=none", "names a password_file that does not exist"),
        ("user=me,password_file=open", "has mode 0644"),
        ("password_file=password", "has no user for etcd's password; give user=NAME"),
        ("user=me,password=x", "where every user of this machine can read it"),
    ],
)
def test_what_is_wrong_is_said(files: Job, conf: str, message: str) -> None:
    """Before anything is connected to."""
    assert message in problem(files, conf)


def test_a_password_on_the_command_line_is_refused_for_every_backend(job: Job) -> None:
    """It is on the process list, used or not."""
    assert "(ps)" in job.error("--rdzv-conf user=a,password=b train.py")


def test_where_a_password_may_come_from(files: Job) -> None:
    """Variables, a file, and --rdzv-conf in a variable or in the job file."""
    both = {"ELAUNCH_ETCD_USER": "me", "ELAUNCH_ETCD_PASSWORD": "pw"}
    found = access(files, **both)
    assert (found.user, found.password) == ("me", "pw")
    found = access(files, "user=you,password_file=password", **both)
    assert (found.user, found.password) == ("you", "a,b=c")
    found = access(files, PET_RDZV_CONF="user=me,password=pw")
    assert (found.user, found.password) == ("me", "pw")
    files.write("j.yaml", "entrypoint: train.py\nrdzv_conf: {user: me, password: pw}\n")
    words = [*LINE.split(), "-f", "j.yaml"]
    meet = files.of(words, {}).rendezvous
    assert meet is not None and (meet.etcd.user, meet.etcd.password) == ("me", "pw")
    meet = files.of(words, {"ELAUNCH_ETCD_PASSWORD": "other"}).rendezvous
    assert meet is not None and (meet.etcd.user, meet.etcd.password) == ("me", "other")
    message = files.error(f"{LINE} train.py", PET_RDZV_CONF="password=a,password_file=password")
    assert "has both password and password_file" in message


def test_no_text_of_the_settings_shows_a_password(job: Job) -> None:
    """Neither their repr nor the configuration that they keep."""
    found = job.settings(f"{LINE} train.py", PET_RDZV_CONF="user=me,password=s3cr3t")
    assert "s3cr3t" not in repr(found)
    assert found.rdzv_conf == {"user": "me"}


def test_variables_that_workers_do_not_get() -> None:
    """Each may hold a password."""
    assert set(SECRET_VARIABLES) == {
        "ELAUNCH_ETCD_USER",
        "ELAUNCH_ETCD_PASSWORD",
        "ELAUNCH_RDZV_CONF",
        "PET_RDZV_CONF",
    }


def test_a_misspelt_variable_is_remarked_on(job: Job) -> None:
    """Else etcd would say that nobody gave a password."""
    notices = job.notices("train.py", ELAUNCH_ETCD_PASWORD="x")
    assert "did you mean ELAUNCH_ETCD_PASSWORD?" in notices


def test_paths_start_in_the_workdir_and_at_home(
    files: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of all flags."""
    monkeypatch.setenv("HOME", str(files.directory))
    assert access(files, "cacert=~/tls/ca.pem").cacert == files.directory / "tls/ca.pem"
    files.write("sub/train.py", "")
    files.write("sub/ca.pem", CERTIFICATE.decode())
    words = f"{LINE} -C sub --rdzv-conf cacert=ca.pem train.py".split()
    meet = files.of(words, {}).rendezvous
    assert meet is not None and meet.etcd.cacert == Path(files.directory / "sub/ca.pem")
