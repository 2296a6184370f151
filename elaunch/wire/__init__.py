"""What processes of one job send each other on one machine, and how two machines shake hands.

``control`` is asked of an agent by commands, ``worker`` and ``saver`` are spoken between a worker
and its agent, ``progress`` is a page of memory that both see; ``handshake`` proves to two processes
that they belong to one job. The agent's messages to its server are beside the server
(``elaunch.server.protocol``), since another Python may run that.
"""

__all__ = ["control", "handshake", "progress", "saver", "worker"]
