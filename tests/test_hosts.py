"""Names and addresses of hosts: which mean this machine, in whichever form they are written."""

from __future__ import annotations

import errno
import socket

import pytest

from elaunch.hosts import is_loopback, listen_at, listen_everywhere, plain


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost.",
        "ip6-localhost",
        "127.0.0.1",
        "127.8.9.10",
        "::1",
        "0:0:0:0:0:0:0:1",
        "::ffff:127.0.0.1",
        "::FFFF:7f00:1",
        "0:0:0:0:0:ffff:127.0.0.1",
        "::1%lo",
    ],
)
def test_loopback(host: str) -> None:
    """By name, by address, and as an IPv4-mapped address."""
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "node1", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "::", "0.0.0.0", "127"]
)
def test_not_loopback(host: str) -> None:
    """Other machines, all of one's own addresses, and what is no address."""
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::ffff:c000:207", "192.0.2.7"),
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("node1", "node1"),
    ],
)
def test_one_form_for_an_ipv4_address(address: str, expected: str) -> None:
    """Only IPv4-mapped ones change."""
    assert plain(address) == expected


def test_what_listens_everywhere_is_reached_by_both_kinds() -> None:
    with listen_everywhere(0) as listening:
        port = listening.getsockname()[1]
        for address in ("127.0.0.1", "::1") if socket.has_ipv6 else ("127.0.0.1",):
            with socket.create_connection((address, port), 10.0):
                continue


def test_a_port_in_use_is_refused_in_plain_words() -> None:
    """The message that is made of it names the address itself."""
    with listen_at(socket.AF_INET, "127.0.0.1", 0) as listening:
        with pytest.raises(OSError, match=f"{errno.EADDRINUSE}.*in use$") as caught:
            listen_at(socket.AF_INET, "127.0.0.1", listening.getsockname()[1])
        assert caught.value.errno == errno.EADDRINUSE
