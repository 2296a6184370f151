"""Secrets, passwords and certificates in files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.config import files


def private(path: Path, content: bytes, mode: int = 0o600) -> Path:
    """Write a file with a mode."""
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (b"abc\n", b"abc"),
        (b"abc\r\n", b"abc"),
        (b"abc", b"abc"),
        (b" a b \n", b" a b "),
        (b"\x00\xff\n", b"\x00\xff"),
    ],
)
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_secret_is_the_bytes_without_the_last_newline(
    tmp_path: Path, content: bytes, secret: bytes, mode: int
) -> None:
    """As an editor or echo leaves them."""
    assert files.secret(private(tmp_path / "s", content, mode)) == secret


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away, or read it then")
def test_a_file_of_another_user_is_refused_with_its_owner(tmp_path: Path) -> None:
    """Also for root, who could read it: its owner knows the secret."""
    path = private(tmp_path / "s", b"abc")
    os.chown(path, 12345, -1)
    with pytest.raises(ValueError, match=r"belongs to user 12345, .*; do 'chown 0 "):
        files.secret(path)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602, 0o604])
def test_a_file_of_others_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    """And with what to do."""
    path = private(tmp_path / "s", b"abc", mode)
    with pytest.raises(ValueError) as error:
        files.secret(path)
    assert f"has mode 0{mode:o}" in str(error.value)
    assert f"chmod 600 {path}" in str(error.value) and "abc" not in str(error.value)


def test_what_is_no_secret(tmp_path: Path) -> None:
    """Missing, empty, a directory, a pipe that nobody writes to, too large, no text."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    cases = {
        tmp_path / "none": "does not exist",
        private(tmp_path / "empty", b"\n"): "is empty",
        tmp_path: "is not a file",
        pipe: "is not a file",
        private(tmp_path / "large", b"x" * 70_000): "is larger than 65536 bytes",
        tmp_path / "large" / "x": "cannot be read: Not a directory",
    }
    for path, reason in cases.items():
        with pytest.raises(ValueError) as error:
            files.secret(path)
        assert reason in str(error.value)
    with pytest.raises(ValueError, match="is not a text in UTF-8"):
        files.password(private(tmp_path / "bytes", b"\xff\xfe"))
    assert files.password(private(tmp_path / "word", "é,=\n".encode())) == "é,="


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    """With the system's word."""
    with pytest.raises(ValueError, match="cannot be read: Permission denied"):
        files.secret(private(tmp_path / "s", b"abc", 0))


CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
KEY = b"-----BEGIN EC PRIVATE KEY-----\nAA==\n-----END EC PRIVATE KEY-----\n"


def test_certificates_and_keys_are_told_apart(tmp_path: Path) -> None:
    """The two files are often given in the wrong order; they may be readable for all."""
    certificate = private(tmp_path / "c.pem", CERTIFICATE, 0o644)
    key = private(tmp_path / "k.pem", KEY)
    both = private(tmp_path / "both.pem", KEY + CERTIFICATE)
    der = private(tmp_path / "c.der", b"\x30\x82")
    assert files.certificate(certificate) == certificate
    assert files.private_key(key) == key
    assert files.certificate(both) == files.private_key(both) == both
    with pytest.raises(ValueError, match="has no certificate in it"):
        files.certificate(key)
    with pytest.raises(ValueError, match="has no private key in it"):
        files.private_key(certificate)
    with pytest.raises(ValueError, match="is not a file in PEM format"):
        files.certificate(der)
    with pytest.raises(ValueError, match="does not exist"):
        files.certificate(tmp_path / "none")
