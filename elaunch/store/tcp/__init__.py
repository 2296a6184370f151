"""The store in a TCPStore that one of the agents hosts.

``client`` is the way in. ``host`` is what the hosting agent does for all, ``wire`` what torch's
TCPStore understands on a connection, so that only the host imports torch.
"""

__all__ = ["client", "connection", "wire"]
