"""Stands for a process of pytest that is forked from one that has torch (tests/warmserver.py).

xdist runs ``python forkedworker.py NAME -u -c CODE`` where it would run ``python -u -c CODE``; the
process at the other end of NAME, an abstract socket, forks one that does, with these streams.
"""

import json
import os
import signal
import socket
import sys

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that this one stands for gets it, too
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
    sock.connect(b"\0" + sys.argv[1].encode())
    argv = [sys.executable, *sys.argv[3:]]
    request = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}
    socket.send_fds(sock, [json.dumps(request).encode()], [0, 1, 2])
    os.close(0)
    os.close(1)
    sock.recv(1)  # until that process has ended
