"""The store that one of the agents hosts: a TCPStore to those who ask whose it is.

``client`` is the way in. ``host`` is what the store holds, ``server`` serves it, ``messages`` is
what agents and host send each other. ``wire`` is what a TCPStore understands, the round's too. No
agent imports torch for it.
"""

__all__ = ["client", "connection", "wire"]
