"""A cable on which every frame takes some time: a program between two network interfaces.

``python delayline.py FROM TO SECONDS`` hands each frame of one interface to the other, either way,
SECONDS later and in order; it prints a line once it does. (The kernel's own netem is often not
built in.)
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque

_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, _PACKET_MR_PROMISC = 263, 1, 1
_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 15, 23
_ETH_P_ALL = 3
_LARGEST = 1 << 17
"""Bytes: frames between virtual interfaces are up to 64 KiB, cut and summed by nobody."""


def tap(interface: str) -> socket.socket:
    """Return a socket with all that comes in at an interface, and for what is to go out."""
    tapped = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # The header says what is still to be done to a frame (checksum, segments): it is passed on.
    tapped.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    tapped.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    tapped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
    tapped.bind((interface, _ETH_P_ALL))
    index = socket.if_nametoindex(interface)
    request = index.to_bytes(4, sys.byteorder) + _PACKET_MR_PROMISC.to_bytes(2, sys.byteorder)
    tapped.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, request + bytes(10))
    return tapped


def main(one: str, other: str, seconds: float) -> None:
    """Carry frames until somebody ends this process."""
    ends = [tap(one), tap(other)]
    across = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait)[0]:
            under_way.append((time.monotonic() + seconds, across[end], end.recv(_LARGEST)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            try:
                end.send(frame)
            except OSError:
                continue  # the interface is down: what a cable carries then is lost


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
