"""The process that hosts the TCPStore of each round for the workers.

``host`` is that process, ``client`` the server's end of it. It is a process of its own, so that the
server stays single-threaded and can be forked.
"""

__all__ = ["client"]
