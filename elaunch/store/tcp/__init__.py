"""The store in a TCPStore that one of the agents hosts.

``client`` is the way in. ``server`` is the store, ``host`` what the hosting agent does for all
beside it, ``wire`` what a TCPStore understands on a connection. No agent imports torch for it.
"""

__all__ = ["client", "connection", "wire"]
