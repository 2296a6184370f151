"""What processes of one job send each other on one machine, and how two machines shake hands.

Commands send an agent the requests of ``control``. ``worker`` and ``saver`` are the messages
between a worker and its agent, ``progress`` is a page of memory that both see; ``handshake`` proves
to two processes that they belong to one job. The agent's messages to its server are beside the
server (``elaunch.server.protocol``), since another Python may run that.
"""

__all__ = ["control", "handshake", "progress", "saver", "worker"]
