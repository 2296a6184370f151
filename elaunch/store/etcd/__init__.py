"""The store in etcd, for agents that meet in a cluster of one to five members.

``client`` is the way in. Calls go to one member at a time and to the next when it fails (``calls``,
``connection``); what agents know of each other comes by one stream of watches (``watch``), and an
agent's own entry lives as long as its lease (``lease``).
"""

__all__ = ["client", "cluster"]
